"""Settings of a container with an MPS resource."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import AllocationError, ContainerMount, Snapshot, requested_devices
from gpunode.plugin.mps.layout import container_parts, limit
from gpunode.plugin.nvidia.response import answer
from tests.plugin.mps.resources import NAME, snapshot, uuid

ROOT = "/run/nvidia/mps"
OWN = Settings(mps=True, mps_root=ROOT)
OTHERS = Settings(mps_root=ROOT)


def shares(index: int, *numbers: int) -> list[str]:
    return [f"{uuid(index)}::{number}" for number in numbers]


def parts(
    settings: Settings, shown: Snapshot, ids: Sequence[str]
) -> tuple[dict[str, str], list[ContainerMount]]:
    """As in the response to a request for these devices."""
    return container_parts(settings, shown.resource, requested_devices(shown, ids))


def test_one_share_of_a_gpu_with_its_own_daemon() -> None:
    env, mounts = parts(OWN, snapshot({0: 4, 1: 10}), shares(1, 7))
    assert env == {
        "CUDA_MPS_PIPE_DIRECTORY": f"/mps/{NAME}/pipe",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8192M",
    }
    assert mounts == [
        ContainerMount(f"{ROOT}/{NAME}/GPU-00000001/pipe", f"/mps/{NAME}/pipe"),
        ContainerMount(f"{ROOT}/shm", "/dev/shm"),
    ]


def test_limits_grow_with_the_number_of_shares() -> None:
    env, mounts = parts(OWN, snapshot({0: 4}, single=False), shares(0, 1, 2, 3))
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "75"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=61440M"
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert mounts[0].host == f"{ROOT}/{NAME}/pipe"


def test_shares_of_several_gpus_name_and_limit_each() -> None:
    env, _ = parts(OWN, snapshot({0: 4, 1: 4, 2: 4}, single=False), shares(0, 0, 1) + shares(2, 3))
    assert env["CUDA_VISIBLE_DEVICES"] == f"{uuid(0)},{uuid(2)}"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"{uuid(0)}=40960M,{uuid(2)}=20480M"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"


def test_external_daemon_serves_all_gpus() -> None:
    env, mounts = parts(OTHERS, snapshot({0: 4, 1: 4}), shares(1, 0))
    assert mounts[0] == ContainerMount(f"{ROOT}/{NAME}/pipe", f"/mps/{NAME}/pipe")
    assert env["CUDA_VISIBLE_DEVICES"] == uuid(1)
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"{uuid(1)}=20480M"


def test_unknown_memory_has_no_limit() -> None:
    env, _ = parts(OWN, snapshot({0: 4}, gib=0), shares(0, 0))
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in env


def test_device_without_mps_sharing_gets_no_settings() -> None:
    sliced = answer(OWN, snapshot({0: 4}, sharing="time-slicing"), shares(0, 0))
    assert (list(sliced.envs), sliced.mounts) == (["NVIDIA_VISIBLE_DEVICES"], ())
    assert parts(OWN, snapshot({0: 0, 1: 4}), [uuid(0)]) == ({}, [])


def test_devices_that_one_client_cannot_see_together_are_refused() -> None:
    with pytest.raises(AllocationError, match="whole GPU"):
        parts(OWN, snapshot({0: 0, 1: 4}, single=False), [uuid(0), *shares(1, 0)])
    with pytest.raises(AllocationError, match="maximum request size for shared resources is 1") as caught:
        parts(OWN, snapshot({0: 4, 1: 4}), shares(0, 0) + shares(1, 0))
    assert "set failRequestsGreaterThanOne to false in sharing.mps " in caught.value.message
    with pytest.raises(AllocationError, match="unknown device 'GPU-9'"):
        parts(OWN, snapshot({0: 4}), ["GPU-9"])
    with pytest.raises(AllocationError, match="the request names no device"):
        parts(OWN, snapshot({0: 4}), [])


@pytest.mark.parametrize(
    ("capability", "cuda", "clients"),
    [
        *(("6.0", "12.4", 16), ("7.0", "12.4", 48), ("7.5", "", 48), ("10.0", "13.0", 48)),
        *(("9.0", "13.1", 60), ("6.1", "13.1", 16), ("", "12.0", 48), ("nonsense", "", 48)),
    ],
)
def test_number_of_clients_a_gpu_can_have(capability: str, cuda: str, clients: int) -> None:
    assert limit(capability, cuda) == clients


@given(counts=st.lists(st.integers(1, 48), min_size=1, max_size=8), choice=st.randoms(use_true_random=False))
def test_no_container_gets_more_than_its_share(counts: list[int], choice) -> None:
    shown = snapshot(dict(enumerate(counts)), single=False)
    ids = choice.sample([device.id for device in shown.devices], choice.randint(1, len(shown.devices)))
    env, mounts = parts(OWN, shown, ids)
    held = {index: sum(uuid(index) in one for one in ids) for index in range(len(counts))}
    least = min(held[index] / count for index, count in enumerate(counts) if held[index])
    assert 1 <= int(env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) <= max(1, 100 * least)
    limits = [int(one.partition("=")[2][:-1]) for one in env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].split(",")]
    assert limits == [80 * 1024 * held[i] // counts[i] for i in held if held[i]]
    assert len(mounts) == 2
