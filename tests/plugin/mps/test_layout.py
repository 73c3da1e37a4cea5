"""Daemons required by a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.plugin.config.settings import SOCKET_BYTES, Settings
from gpunode.plugin.model import KubeletDevice, Resource
from gpunode.plugin.mps.layout import DaemonSpec, daemon_specs, memory_share, thread_share
from tests.plugin.mps.resources import NAME, resource, unit, uuid

OWN = Settings(mps=True, mps_root="/run/nvidia/mps")
OTHERS = Settings(mps_root="/run/nvidia/mps")


def test_each_gpu_has_its_own_daemon_if_a_container_has_one_share() -> None:
    specs = daemon_specs(OWN, [resource({0: 4, 1: 10})])
    assert specs == (
        DaemonSpec(NAME, (uuid(0),), f"/run/nvidia/mps/{NAME}/GPU-00000000", 25, (20480,)),
        DaemonSpec(NAME, (uuid(1),), f"/run/nvidia/mps/{NAME}/GPU-00000001", 10, (8192,)),
    )


def test_single_gpu_uses_the_directory_of_the_nvidia_plugin() -> None:
    (spec,) = daemon_specs(OWN, [resource({0: 3})])
    assert (spec.pipe, spec.log) == (f"/run/nvidia/mps/{NAME}/pipe", f"/run/nvidia/mps/{NAME}/log")
    assert (spec.percentage, spec.memory) == (33, (27306,))


def test_container_with_several_shares_needs_one_daemon_without_limits() -> None:
    """A client's own limit can only lower the daemon's."""
    (spec,) = daemon_specs(OWN, [resource({0: 4, 1: 4}, single=False)])
    assert spec.gpus == (uuid(0), uuid(1))
    assert (spec.directory, spec.percentage, spec.memory) == (f"/run/nvidia/mps/{NAME}", 100, (0, 0))


def test_external_plugin_gets_one_daemon_and_its_limits() -> None:
    (spec,) = daemon_specs(OTHERS, [resource({0: 4, 1: 10})])
    assert spec.gpus == (uuid(0), uuid(1))
    assert (spec.percentage, spec.memory) == (25, (20480, 8192))


def test_gpu_not_shared_with_mps_has_no_daemon() -> None:
    assert daemon_specs(OWN, [resource({0: 4}, sharing="time-slicing"), resource({0: 0})]) == ()
    (spec,) = daemon_specs(OWN, [resource({0: 0, 1: 4})])
    assert spec.gpus == (uuid(1),)


def test_mig_devices_have_no_daemon() -> None:
    part = replace(unit(0), id="MIG-1")
    cut = Resource(NAME, (KubeletDevice("MIG-1::0", part), KubeletDevice("MIG-1::1", part)), "mps", 2, True)
    assert daemon_specs(OWN, [cut]) == ()


def test_gpus_with_a_common_prefix_get_distinct_directories() -> None:
    other = replace(unit(0), id=uuid(0)[:-1] + "5", gpu=uuid(0)[:-1] + "5")
    made = resource({0: 2})
    both = replace(
        made, devices=(*made.devices, *(KubeletDevice(f"{other.id}::{n}", other) for n in range(2)))
    )
    assert len({spec.directory for spec in daemon_specs(OWN, [both])}) == 2


@pytest.mark.parametrize(("root", "fits"), [("/run/nvidia/mps", True), ("/" + "r" * 90, False)])
def test_path_too_long_for_a_socket_is_a_problem(root: str, fits: bool) -> None:
    """The daemon ends with 1 and prints nothing."""
    name = "nvidia.com/gpu.shared"
    for spec in daemon_specs(Settings(mps=True, mps_root=root), [resource({0: 2, 1: 2}, name=name)]):
        assert (len(f"{spec.pipe}/control_privileged") <= SOCKET_BYTES) is fits
        assert (spec.path_problem == "") is fits


@given(shares=st.integers(1, 60), gib=st.integers(0, 192))
def test_shares_never_exceed_the_total(shares: int, gib: int) -> None:
    made = unit(0, gib)
    assert shares * memory_share(made, shares) <= gib * 1024
    assert memory_share(made, shares, shares) == gib * 1024
    assert shares * thread_share(shares) <= 100
    assert thread_share(shares, shares) == 100
    assert all(memory_share(made, shares, k) >= k * memory_share(made, shares) for k in range(shares))
