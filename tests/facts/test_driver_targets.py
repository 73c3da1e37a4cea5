"""GPUs supported by each driver: only GPUs without a driver are ever called unsupported."""

import pytest

from gpunode.facts.bulletins import end_of_life, maintained_branches
from gpunode.facts.driver import branch
from gpunode.facts.driver_targets import DROPPED, FLAVOUR, TOO_NEW, supports, unsupported_gpus
from gpunode.facts.pci import PciGpu
from gpunode.facts.tables import table
from tests.required import required


def gpu(device_id, driver=None):
    return PciGpu(address="0000:01:00.0", device_id=device_id, driver=driver, numa=None)


@pytest.mark.parametrize(
    ("device_id", "version", "opened", "reason"),
    [
        ("0x1db6", "595.71.05", True, DROPPED),  # V100
        ("0x1db6", "580.159.03", True, FLAVOUR),
        ("0x1db6", "580.159.03", False, None),
        ("0x15f8", "470.256.02", False, None),  # P100
        ("0x1eb8", "580.159.03", False, None),  # T4: either module
        ("0x1eb8", "580.159.03", True, None),
        ("0x2330", "515.105.01", False, TOO_NEW),  # H100
        ("0x2330", "535.309.01", True, None),
        ("0x2342", "580.159.03", False, FLAVOUR),  # GH200
        ("0x2b85", "565.57.01", True, TOO_NEW),  # RTX 5090
        ("0x2b85", "580.159.03", False, FLAVOUR),
        ("0x2b85", "580.159.03", None, None),  # whether it is the open one is unknown
        ("0x3182", "570.211.01", True, TOO_NEW),  # GB300
        ("0xffff", "580.159.03", True, None),  # not in the table
        ("rubbish", "580.159.03", True, None),
        ("0x2b85", "", True, None),
    ],
)
def test_gpu_without_an_owner_is_matched_with_its_driver(device_id, version, opened, reason):
    found = [one.reason for one in unsupported_gpus((gpu(device_id),), version, opened)]
    assert found == ([reason] if reason else [])


def test_gpu_bound_to_a_driver_is_supported_whatever_the_table_says():
    assert (
        list(unsupported_gpus((gpu("0x1db6", "nvidia"), gpu("0x1db6", "vfio-pci")), "595.71.05", True)) == []
    )


def test_table_has_no_gap_that_changes_the_verdict_of_an_id():
    rows = table("gpu_branches").rows
    for row in rows:
        assert int(row["first"], 16) <= int(row["last"], 16)
        assert row["module"] in ("", "open", "proprietary")
        assert not row["max"] or row["min"] <= row["max"]
    assert required(supports("0x20b2")).name == "Ampere" and required(supports("0x2684")).name == "Ada"


def test_branch_newer_than_the_last_bulletin_is_not_end_of_life():
    assert branch("580.159.03") == 580 and branch("") == 0
    assert end_of_life(580) is None and end_of_life(9999) is None
    assert end_of_life(570) is not None and 580 in maintained_branches()
