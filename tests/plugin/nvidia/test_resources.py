"""Advertised resources of a node: MIG strategies, names, selection, and left-out devices."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import ConfigError
from gpunode.gpu.model import Gpu
from gpunode.host import Host
from gpunode.plugin.config.settings import NameRule, Settings, SharedResource, Sharing
from tests.plugin.gpus import (
    GPU_RESOURCE,
    bare_host,
    cut,
    gpu,
    inventory,
    mig_uuid,
    only,
    planned,
    problem_of,
    shown,
    uuid,
)

NOWHERE = Path("/nonexistent")
MINORS = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\nnonsense\n"


@pytest.fixture
def host(tmp_path):
    return bare_host(tmp_path / "node")


def reasons(plan):
    return {item.index: item.reason for item in plan.left_out}


# --- MIG strategies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["none", "single", "mixed"])
def test_whole_gpus_are_the_same_with_every_strategy(host, strategy):
    plan = planned(host, gpu(1), gpu(0), mig_strategy=strategy)
    assert shown(plan) == {GPU_RESOURCE: ["0", "1"]}
    assert [device.id for device in only(plan).devices] == [uuid(0), uuid(1)]
    assert (plan.left_out, plan.warnings) == ((), ())
    unit = only(plan).devices[0].unit
    assert (unit.paths, unit.pci, unit.numa, unit.minor) == (("/dev/nvidia0",), "0000:19:00.0", 0, 0)


def test_none_strategy_advertises_a_gpu_in_mig_mode_whole_with_a_warning(host):
    plan = planned(host, cut(0, "1g.10gb", "1g.10gb"), gpu(1))
    assert shown(plan) == {GPU_RESOURCE: ["0", "1"]}
    assert all(device.healthy for device in only(plan).devices)
    assert "GPU 0 is in MIG mode and mig-strategy is none" in plan.warnings[0]


def test_none_strategy_marks_a_gpu_in_mig_mode_without_mig_devices(host):
    plan = planned(host, cut(0), gpu(1))
    first, second = only(plan).devices
    assert problem_of(first).code == "mig-mode"
    assert "nvidia-smi -i 0 -mig 0" in problem_of(first).reason
    assert second.healthy


def test_single_strategy_advertises_each_mig_device_as_a_gpu(host):
    plan = planned(host, cut(0, "1g.10gb", "1g.10gb"), cut(1, "1g.10gb"), mig_strategy="single")
    assert shown(plan) == {GPU_RESOURCE: ["0:0", "0:1", "1:0"]}
    assert only(plan).devices[0].id == mig_uuid(0, 0)


@pytest.mark.parametrize(
    ("gpus", "kept", "gone"),
    [
        # a layout that differs on one GPU doesn't change the others
        (
            (cut(0, "3g.40gb", "3g.40gb"), cut(1, "1g.10gb"), cut(2, "1g.10gb")),
            ["1:0", "2:0"],
            ["0:0", "0:1"],
        ),
        # one GPU of mixed devices: the profile with more devices
        ((cut(0, "3g.40gb", "1g.10gb", "1g.10gb"),), ["0:1", "0:2"], ["0:0"]),
        # as many whole GPUs as MIG ones: MIG is what the strategy requests
        ((gpu(0), cut(1, "1g.10gb")), ["1:0"], ["0"]),
        ((gpu(0), gpu(1), cut(2, "1g.10gb")), ["0", "1"], ["2:0"]),
        # all equal: the first GPU's
        ((cut(0, "2g.20gb"), cut(1, "1g.10gb")), ["0:0"], ["1:0"]),
        # an unreadable one is ignored
        ((gpu(0, error="lost"), gpu(1, error="lost"), cut(2, "1g.10gb")), ["2:0"], ["0", "1"]),
        ((gpu(0, error="lost"),), ["0"], []),
    ],
)
def test_single_strategy_never_mixes_profiles_under_one_name(host, gpus, kept, gone):
    plan = planned(host, *gpus, mig_strategy="single")
    assert shown(plan) == {GPU_RESOURCE: kept}
    assert list(reasons(plan)) == gone
    assert all("mig-strategy mixed" in reason for reason in reasons(plan).values())


def test_single_strategy_allows_profiles_with_their_own_names(host):
    rules = (NameRule("mig", "3g.*", "nvidia.com/half"),)
    plan = planned(host, cut(0, "3g.40gb", "1g.10gb", "1g.10gb"), mig_strategy="single", rules=rules)
    assert shown(plan) == {"nvidia.com/half": ["0:0"], GPU_RESOURCE: ["0:1", "0:2"]}
    assert plan.left_out == ()


def test_mixed_strategy_names_every_profile(host):
    profiles = ("1g.10gb", "1g.10gb+me", "1c.3g.20gb", "1g.24gb-me", "1g.24gb+me.all", "1g.24gb+gfx")
    plan = planned(host, cut(0, *profiles), gpu(1), mig_strategy="mixed")
    assert shown(plan) == {
        "nvidia.com/mig-1g.10gb": ["0:0"],
        "nvidia.com/mig-1g.10gb.me": ["0:1"],
        "nvidia.com/mig-1c.3g.20gb": ["0:2"],
        "nvidia.com/mig-1g.24gb-me": ["0:3"],
        "nvidia.com/mig-1g.24gb.me.all": ["0:4"],
        "nvidia.com/mig-1g.24gb.gfx": ["0:5"],
        GPU_RESOURCE: ["1"],
    }


@pytest.mark.parametrize("strategy", ["single", "mixed"])
def test_empty_mig_gpu_does_not_affect_the_others(host, strategy):
    plan = planned(host, cut(0), cut(1, "1g.10gb"), mig_strategy=strategy)
    assert [unit.index for unit in only(plan).units] == ["1:0"]
    assert "holds no MIG device" in reasons(plan)["0"]


def test_mig_device_without_a_valid_profile_name_is_left_out_alone(host):
    plan = planned(host, cut(0, "1g.10gb", "", "what is/this"), mig_strategy="mixed")
    assert shown(plan) == {"nvidia.com/mig-1g.10gb": ["0:0"]}
    assert set(reasons(plan)) == {"0:1", "0:2"}
    assert all("resources.mig" in reason for reason in reasons(plan).values())


# --- one bad GPU ----------------------------------------------------------------------------------------


def test_unreadable_gpu_stays_known_and_the_others_are_served(host):
    dead = Gpu(0, "", "", "", error="GPU is lost")
    plan = planned(host, dead, gpu(1, error="Unknown Error"), gpu(2))
    assert shown(plan) == {GPU_RESOURCE: ["1", "2"]}
    assert reasons(plan) == {"0": "GPU is lost"}


def test_two_gpus_with_one_uuid_are_one_device(host):
    plan = planned(host, gpu(0), gpu(1, uuid=uuid(0)), gpu(2))
    assert shown(plan) == {GPU_RESOURCE: ["0", "2"]}
    assert reasons(plan) == {"1": "device 0 has the same UUID"}


@pytest.mark.parametrize("name", ["DGX Display", "NVIDIA DGX Display"])
def test_display_card_is_not_advertised(host, name):
    assert shown(planned(host, gpu(0), gpu(1, name=name))) == {GPU_RESOURCE: ["0"]}


def test_node_without_gpus_has_no_resource(host):
    assert planned(host).resources == ()


# --- names and selection --------------------------------------------------------------------------------


def test_rules_name_gpus_by_model_and_the_first_match_wins(host):
    rules = (
        NameRule("gpu", "*A100*", "nvidia.com/a100"),
        NameRule("gpu", "*80GB*", "nvidia.com/big"),
        NameRule("mig", "*", "nvidia.com/never"),
    )
    gpus = (
        gpu(0, name="NVIDIA A100-SXM4-80GB"),
        gpu(1),
        gpu(2, name="Tesla T4"),
        gpu(3, name="", error="lost"),
    )
    plan = planned(host, *gpus, rules=rules)
    assert shown(plan) == {"nvidia.com/a100": ["0"], "nvidia.com/big": ["1"], GPU_RESOURCE: ["2"]}
    assert "by their model" in reasons(plan)["3"]


def test_rule_can_give_the_standard_name_and_units_stay_in_order(host):
    rules = (NameRule("gpu", "*T4*", GPU_RESOURCE),)
    plan = planned(host, gpu(0), gpu(1, name="Tesla T4"), gpu(2), rules=rules)
    assert shown(plan) == {GPU_RESOURCE: ["0", "1", "2"]}


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        (("0", "2"), (), ["0", "2"]),
        ((), ("0",), ["1:0", "1:1", "2"]),
        (("1",), (), ["1:0", "1:1"]),
        (("1:1",), (), ["1:1"]),
        ((), ("1:0",), ["0", "1:1", "2"]),
        ((uuid(2).upper(),), (), ["2"]),
        ((mig_uuid(1, 0),), (), ["1:0"]),
        (("0000:19:00.0",), (), ["0"]),
        (("00000000:1B:00.0",), (), ["2"]),
        (("1b:00",), (), ["2"]),
        (("Tesla *",), (), ["0"]),
        (("1g.*",), (), ["1:0"]),
        (("*",), ("Tesla T4",), ["1:0", "1:1", "2"]),
    ],
)
def test_gpus_are_selected_by_index_uuid_address_and_model(host, include, exclude, kept):
    gpus = (gpu(0, name="Tesla T4"), cut(1, "1g.10gb", "2g.20gb"), gpu(2))
    plan = planned(host, *gpus, mig_strategy="mixed", include=include, exclude=exclude)
    found = sorted(index for indices in shown(plan).values() for index in indices)
    assert found == kept
    assert len(plan.left_out) == 4 - len(kept)


def test_selector_without_a_match_gives_a_warning(host):
    plan = planned(host, gpu(0), include=("0", "7"), exclude=("GPU-nope",))
    assert plan.warnings == ("include: this node has no GPU 7", "exclude: this node has no GPU GPU-nope")


# --- device files ---------------------------------------------------------------------------------------


def test_mig_devices_have_their_gpus_node_and_their_two_capabilities(tmp_path):
    host = bare_host(tmp_path / "node", files={"/proc/driver/nvidia-caps/mig-minors": MINORS})
    plan = planned(host, cut(0, "1g.10gb", "1g.10gb"), mig_strategy="single", pass_device_specs=True)
    first, second = only(plan).devices
    assert first.unit.paths == (
        "/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13",
    )  # fmt: skip
    assert first.healthy
    assert problem_of(second).code == "device-nodes"
    assert "mig-minors" in problem_of(second).reason


def test_missing_capabilities_matter_only_if_they_are_passed(host):
    plan = planned(host, cut(0, "1g.10gb"), mig_strategy="mixed")
    assert only(plan).devices[0].healthy


def test_minor_number_missing_in_nvml_is_read_from_the_driver(tmp_path):
    information = "Device Minor: \t 5\n"
    files = {"/proc/driver/nvidia/gpus/0000:19:00.0/information": information}
    host = bare_host(tmp_path / "node", files=files)
    plan = planned(host, gpu(0, minor=None), gpu(1, minor=None), pass_device_specs=True)
    first, second = only(plan).devices
    assert first.unit.paths == ("/dev/nvidia5",)
    assert problem_of(second).code == "device-nodes"


def test_control_nodes_are_those_that_exist(tmp_path):
    host = bare_host(tmp_path / "node", devices=("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"))
    assert only(planned(host, gpu(0))).common.nodes == ()
    passed = planned(host, gpu(0), pass_device_specs=True)
    assert only(passed).common.nodes == ("/dev/nvidiactl", "/dev/nvidia-uvm")


def test_missing_imex_channel_is_skipped_with_a_warning_or_required(tmp_path):
    bare = bare_host(tmp_path / "bare")
    plan = planned(bare, gpu(0), imex_channel_ids=(0,))
    assert only(plan).common.channels == ()
    assert "channel0 does not exist" in plan.warnings[0]
    required = planned(bare, gpu(0), imex_channel_ids=(0,), imex_required=True)
    assert problem_of(only(required).devices[0]).code == "imex"
    host = bare_host(tmp_path / "imex", devices=("/dev/nvidia-caps-imex-channels/channel0",))
    there = planned(host, gpu(0), imex_channel_ids=(0,), imex_required=True)
    assert only(there).common.channels == (0,)
    assert only(there).devices[0].healthy


# --- other platforms ------------------------------------------------------------------------------------


def test_wsl_has_one_device(tmp_path):
    host = bare_host(tmp_path / "node", devices=("/dev/dxg",))
    device = only(planned(host, gpu(0), gpu(1))).devices[0]
    assert (device.id, device.unit.index, device.unit.paths) == ("all", "all", ("/dev/dxg",))


@pytest.mark.parametrize(
    ("gpus", "files"),
    [((gpu(0, name="Orin (nvgpu)"),), {}), ((), {"/etc/nv_tegra_release": "# R35"})],
)
def test_tegra_has_one_device(tmp_path, gpus, files):
    host = bare_host(tmp_path / "node", files=files)
    device = only(planned(host, *gpus)).devices[0]
    assert (device.id, device.unit.index, device.unit.paths) == ("tegra", "0", ())


def test_cdi_is_refused_if_no_specification_is_written(tmp_path):
    host = bare_host(tmp_path / "node", devices=("/dev/dxg",))
    with pytest.raises(ConfigError, match="no CDI specification for wsl"):
        planned(host, gpu(0), device_list_strategy=("cdi-cri",))


# --- sharing --------------------------------------------------------------------------------------------


def mps(replicas, **more):
    return Sharing("mps", (SharedResource(GPU_RESOURCE, replicas, **more),))


def test_mps_does_not_share_mig_devices_and_says_so(host):
    plan = planned(host, cut(0, "1g.10gb"), cut(1, "1g.10gb"), mig_strategy="single", sharing=mps(2))
    assert plan.resources == ()
    assert "MPS can't share MIG devices" in reasons(plan)["0:0"]
    whole = planned(host, cut(0, "1g.10gb"), gpu(1), sharing=mps(2))
    assert shown(whole) == {GPU_RESOURCE: ["1"]}
    assert "MPS can't share MIG devices" in reasons(whole)["0"]


@pytest.mark.parametrize(("capability", "fits"), [("7.0", True), ("7.5", True), ("6.1", False), ("", True)])
def test_mps_allows_48_clients_since_volta(host, capability, fits):
    plan = planned(host, gpu(0, compute_capability=capability), gpu(1), sharing=mps(48))
    assert len(only(plan).devices) == (96 if fits else 48)
    assert ("0" in reasons(plan)) is not fits


def test_more_clients_than_mps_supports_are_an_error(host):
    with pytest.raises(ConfigError, match="49 replicas: MPS has 48"):
        planned(host, gpu(0), sharing=mps(49))


def test_thousand_shares_are_planned_quickly(host):
    sharing = Sharing("time-slicing", (SharedResource(GPU_RESOURCE, 128),))
    best = 1.0
    for _ in range(5):
        start = time.thread_time()
        plan = planned(host, *(gpu(index) for index in range(8)), sharing=sharing)
        best = min(best, time.thread_time() - start)
    assert len(only(plan).devices) == 1024
    assert best < 0.02


# --- properties -----------------------------------------------------------------------------------------

PROFILES = st.sampled_from(["1g.10gb", "2g.20gb", "1c.3g.40gb", "1g.10gb+me", ""])
NODES = st.lists(
    st.one_of(st.just("whole"), st.just("dead"), st.just("lost"), st.lists(PROFILES, max_size=3).map(tuple)),
    max_size=6,
)


def _gpu(index, kind):
    if kind == "dead":
        return Gpu(index, "", "", "", error="GPU is lost")
    if kind == "lost":
        return gpu(index, error="GPU is lost")
    return gpu(index) if kind == "whole" else cut(index, *kind)


@given(NODES, st.sampled_from(["none", "single", "mixed"]), st.booleans())
def test_every_unit_is_advertised_once_or_left_out_with_a_reason(kinds, strategy, specs):
    from gpunode.plugin.nvidia.resources import plan

    node = inventory(*(_gpu(index, kind) for index, kind in enumerate(kinds)))
    settings = Settings(mig_strategy=strategy, pass_device_specs=specs)
    made = plan(Host(NOWHERE, {}), settings, node)
    assert made == plan(Host(NOWHERE, {}), settings, node)
    ids = [device.id for resource in made.resources for device in resource.devices]
    assert len(ids) == len(set(ids))
    gone = [item.id for item in made.left_out]
    assert all(item.reason for item in made.left_out)
    expected = []
    for one in node.gpus:
        whole = strategy == "none" or not one.mig_enabled or not one.mig
        expected += [one.uuid] if whole else [mig.uuid for mig in one.mig]
    assert sorted(ids + gone) == sorted(expected)
    for resource in made.resources:
        orders = [device.unit.order for device in resource.devices]
        assert orders == sorted(orders)
        if strategy == "single" or resource.name != GPU_RESOURCE:
            assert len({device.unit.profile for device in resource.devices}) == 1
