"""Profile names against the names that NVIDIA documents for each GPU's memory sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.gpu.model import profile_name

MIB = 1 << 20
A100_40, A100_80, H100_NVL, B200 = 40536 * MIB, 81920 * MIB, 95830 * MIB, 183359 * MIB


@pytest.mark.parametrize(
    ("slices", "compute", "mib", "gpu_memory", "profile", "name"),
    [
        (1, 1, 4864, A100_40, 0, "1g.5gb"),
        (1, 1, 4864, A100_40, 7, "1g.5gb+me"),
        (1, 1, 9856, A100_40, 9, "1g.10gb"),
        (2, 2, 9856, A100_40, 1, "2g.10gb"),
        (3, 1, 19968, A100_40, 2, "1c.3g.20gb"),
        (7, 7, 40192, A100_40, 4, "7g.40gb"),
        (3, 3, 40192, A100_80, 2, "3g.40gb"),
        (2, 2, 23936, H100_NVL, 1, "2g.24gb"),  # 23.5 goes up to 24
        (3, 3, 47488, H100_NVL, 2, "3g.47gb"),
        (1, 1, 22528, B200, 0, "1g.23gb"),  # 22.5 goes up: rounding to even would say 22
        (1, 1, 22528, B200, 10, "1g.23gb+gfx"),
        (1, 1, 22528, B200, 13, "1g.23gb-me"),
        (1, 1, 22528, B200, 15, "1g.23gb+me.all"),
        (1, 1, 22528, B200, None, "1g.23gb"),
    ],
)
def test_profile_names_follow_nvidias_scheme(slices, compute, mib, gpu_memory, profile, name):
    assert profile_name(slices, compute, mib, gpu_memory, profile) == name


@given(st.integers(1, 300_000), st.integers(1, 300_000))
def test_name_never_claims_more_memory_than_the_gpu_has_in_whole_gib(mib, gpu_mib):
    part = min(mib, gpu_mib)
    claimed = int(profile_name(1, 1, part, gpu_mib * MIB, 0).removeprefix("1g.").removesuffix("gb"))
    assert 0 <= claimed <= -(-gpu_mib // 1024)
