"""Cases that mig-parted handles wrongly or silently, as gpunode handles them."""

from __future__ import annotations

import pytest

from fixtures.scenario import Fault, Scenario, StubGpuInstance, mig_machine
from tests.mig.conftest import EXAMPLES, MigMaker, MigNode

pytestmark = pytest.mark.full

BALANCED = {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}


def cut(mig_node: MigMaker, scenario: Scenario) -> MigNode:
    """A node with a MIG layout; the next command must not touch it."""
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    return node


def test_unknown_profile_changes_nothing(mig_node: MigMaker) -> None:
    node = cut(mig_node, mig_machine("h100"))
    done = node.stub.mig_changes()
    ran = node.apply("wanted", file=node.profiles("1g.11gb: 7"))
    assert ran.code == 3
    assert (
        "config.yaml:4: GPU 0 (NVIDIA H100 80GB HBM3) has no profile 1g.11gb; it has 1g.10gb, 2g.20gb"
        in ran.err
    )
    assert node.stub.mig_changes() == done


def test_profile_of_another_gpu_changes_nothing(mig_node: MigMaker) -> None:
    node = cut(mig_node, mig_machine("h100", "a30"))
    done = node.stub.mig_changes()
    ran = node.apply("wanted", file=node.profiles("1g.6gb: 4"))
    assert ran.code == 3 and "GPU 0 (NVIDIA H100 80GB HBM3) has no profile 1g.6gb" in ran.err
    assert "GPU 1" not in ran.err
    assert node.stub.mig_changes() == done


def test_layout_that_does_not_fit_changes_nothing(mig_node: MigMaker) -> None:
    node = cut(mig_node, mig_machine("h100"))
    ran = node.apply("wanted", file=node.profiles("3g.40gb: 2, 1g.10gb: 1"))
    assert ran.code == 3
    assert "1 x 1g.10gb don't fit together in its 8 memory slots" in ran.err
    assert "this much of it would fit: 2 x 3g.40gb" in ran.err
    assert node.devices() == BALANCED


def without_mig(scenario: Scenario, index: int) -> Scenario:
    return scenario.with_gpu(index, name="NVIDIA L40S", cc="8.9")


def test_mig_on_unsupported_gpus_is_an_error(mig_node: MigMaker) -> None:
    node = mig_node(without_mig(mig_machine("h100"), 0))
    ran = node.apply("all-enabled")
    assert ran.code == 3 and "GPU 0 (NVIDIA L40S) does not support MIG" in ran.err
    assert node.apply("all-disabled").code == 0


def test_unsupported_gpu_beside_others_is_left_out_and_reported(mig_node: MigMaker) -> None:
    node = mig_node(without_mig(mig_machine("h100", "h100"), 1))
    ran = node.apply("wanted", file=node.profiles("7g.80gb: 1"))
    assert ran.code == 0 and "GPU 1 (NVIDIA L40S) does not support MIG and is left out" in ran.err
    ran = node.apply("wanted", file=node.profiles("7g.80gb: 1", devices="[0, 1]"))
    assert ran.code == 3 and "GPU 1 (NVIDIA L40S) does not support MIG" in ran.err


def test_filter_without_a_match_is_an_error(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    entry = "{device-filter: '0x20B010DE', devices: all, mig-enabled: false}"
    text = f"version: v1\nmig-configs:\n  a:\n    - {entry}\n"
    ran = node.apply("a", file=node.config(text))
    assert ran.code == 3 and "no entry of 'a' matches a GPU of this node (GPU 0 is 0x233010DE)" in ran.err
    ran = node.apply("a", file=node.config(text.replace("'0x20B010DE'", "20B0")))
    assert ran.code == 1 and "device-filter: '20B0' is not a device filter" in ran.err


def test_missing_index_is_an_error(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    ran = node.apply("wanted", file=node.profiles("7g.80gb: 1", devices="[0, 8]"))
    assert ran.code == 3 and "GPU 8 does not exist: this node has 1 GPU" in ran.err
    assert node.stub.mig_changes() == []


def test_empty_instance_does_not_block(mig_node: MigMaker) -> None:
    empty = StubGpuInstance(5, 1, 2)  # a 2g at slot 2 without a compute instance
    scenario = mig_machine("h100", enabled=True).with_gpu(0, gpu_instances=(empty,))
    node = mig_node(scenario)
    assert [gi.id for gi in node.gpu().instances] == [5] and node.devices() == {}
    ran = node.run("assert", "-f", EXAMPLES, "-c", "all-enabled")
    assert ran.code == 0 and "GPU instance 5 has no compute instance and takes up room" in ran.err
    assert node.apply("all-1g").code == 0
    assert node.devices() == {"1g.10gb": 7}


def test_empty_instance_is_reused(mig_node: MigMaker) -> None:
    empty = StubGpuInstance(5, 1, 2)
    node = mig_node(mig_machine("h100", enabled=True).with_gpu(0, gpu_instances=(empty,)))
    assert node.apply("all-balanced").code == 0
    assert next(gi for gi in node.gpu().instances if gi.name == "2g.20gb").id == 5


def test_unsupported_placement_is_never_tried(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("a100-40gb"))
    assert node.apply("all-balanced").code == 0
    verbs = [line.split()[0] for line in node.stub.mig_changes()]
    assert sorted(verbs) == ["create-ci"] * 4 + ["create-gi"] * 4 + ["set-mode"]


@pytest.mark.parametrize("code", [2, 3])
def test_profile_without_placements_hides_no_other_profile(mig_node: MigMaker, code: int) -> None:
    """A driver may list but not support it: it can't be placed, that is all."""
    call = "nvmlDeviceGetGpuInstancePossiblePlacements"
    node = mig_node(mig_machine("h100").with_faults(Fault(call, code, after=6)))  # the seventh is 1g.20gb
    gpu = node.gpu()
    assert not gpu.error and [one.name for one in gpu.profiles if not one.placements] == ["1g.20gb"]
    node.stub.write(mig_machine("h100").with_faults(Fault(call, code)))
    ran = node.apply("all-balanced")
    assert ran.code == 3 and "the driver doesn't report the possible placements of a 3g.40gb" in ran.err
    assert node.stub.mig_changes() == []


def test_hooks_that_are_not_run_are_reported(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    env = {"MIG_PARTED_HOOKS_FILE": "/etc/nvidia-mig-manager/hooks.yaml"}
    for word in ("plan", "apply"):
        ran = node.run(word, "-f", EXAMPLES, "-c", "all-1g", env=env)
        assert ran.code == 0 and "the hooks of /etc/nvidia-mig-manager/hooks.yaml aren't run" in ran.err


def test_two_entries_for_one_gpu_are_refused(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100", "h100"))
    entry = "    - {{devices: {}, mig-enabled: {}, mig-devices: {{{}}}}}\n"
    head = "version: v1\nmig-configs:\n  a:\n"
    later = head + entry.format("all", "true", "1g.10gb: 7") + entry.format("[1]", "true", "7g.80gb: 1")
    ran = node.apply("a", file=node.config(later))
    assert ran.code == 0 and "config.yaml:5: holds for GPU 1, and not line 4" in ran.err
    assert (node.devices(0), node.devices(1)) == ({"1g.10gb": 7}, {"7g.80gb": 1})
    torn = head + entry.format("all", "true", "1g.10gb: 7") + entry.format("[1]", "false", "")
    ran = node.apply("a", file=node.config(torn))
    assert ran.code == 3 and "GPU 1 is to have MIG off and, by line 4, on" in ran.err


def test_lost_gpu_is_named_and_nothing_changes(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100", "h100").with_gpu(1, lost=True))
    ran = node.apply("wanted", file=node.profiles("7g.80gb: 1"))
    assert ran.code == 3 and "GPU 1" in ran.err and "can't be queried" in ran.err and "lost" in ran.err
    assert node.stub.mig_changes() == []
    # whether a filter matches it is unknown
    for words in (("apply",), ("plan",), ("assert",), ("assert", "-m")):
        ran = node.run(*words, "-f", EXAMPLES, "-c", "all-1g")
        assert ran.code == 3 and ran.err.count("GPU 1 can't be queried") == 1
    assert node.stub.mig_changes() == []
    assert node.apply("wanted", file=node.profiles("7g.80gb: 1", devices="[0]")).code == 0


def test_virtual_gpu_is_refused_since_its_host_controls_mig(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100").with_gpu(0, reported={"virtualization": 2}))
    ran = node.apply("all-1g")
    assert (
        ran.code == 3 and "GPU 0 (NVIDIA H100 80GB HBM3) is a virtual GPU: its host controls MIG" in ran.err
    )


def test_profile_name_of_an_older_driver_is_accepted(mig_node: MigMaker) -> None:
    """The memory in a profile's name follows from the memory that the driver reports: 7g.79gb, 7g.80gb."""
    node = mig_node(mig_machine("h100").with_gpu(0, memory=82 << 30))
    whole = next(one for one in node.gpu().profiles if one.slices == 7)
    assert whole.name == "7g.80gb" and "7g.82gb" in whole.names
    assert node.apply("wanted", file=node.profiles("7g.82gb: 1")).code == 0
    assert node.run("assert", "-f", str(node.directory / "config.yaml")).code == 0


@pytest.mark.parametrize("label", ["nothing", "all-balancd"])
def test_unknown_label_error_lists_the_known_ones(mig_node: MigMaker, label: str) -> None:
    ran = mig_node(mig_machine("h100")).apply(label)
    assert ran.code == 2
    assert ("did you mean all-balanced?" if label != "nothing" else "there are: all-disabled") in ran.err


# --- a driver that reports the profiles once MIG is on ---------------------------------------------------


def silent(times: int) -> Scenario:
    """The driver reports no profile of an H100 in the first `times` calls, 18 for one look; 0: never."""
    call = "nvmlDeviceGetGpuInstanceProfileInfo"
    faults = (Fault(name, 3, times=times) for name in (call, f"{call}V"))
    return mig_machine("h100").with_faults(*faults)


def test_placements_are_chosen_once_the_profiles_are_reported(mig_node: MigMaker) -> None:
    node = mig_node(silent(0))
    ran = node.run("plan", "-f", EXAMPLES, "-c", "all-balanced")
    assert ran.code == 0 and "placements are chosen then" in ran.out
    node.stub.write(silent(18))
    assert node.apply("all-balanced").code == 0
    assert node.devices() == BALANCED


def test_layout_that_turns_out_not_to_fit_is_rolled_back(mig_node: MigMaker) -> None:
    node = mig_node(silent(18))
    ran = node.apply("wanted", file=node.profiles("3g.40gb: 2, 1g.10gb: 1"))
    assert ran.code == 4
    assert "this much of it would fit: 2 x 3g.40gb; the previous layout was restored" in ran.err
    assert not node.gpu().current
    node.stub.write(silent(0))
    ran = node.apply("all-1g")
    assert ran.code == 4 and "it has no profile 1g.10gb; its profiles: none;" in ran.err
    assert not node.gpu().current


def test_mode_that_waits_for_a_reset_unexpectedly_is_rolled_back(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100").with_gpu(0, reported={"mig_vm": 1, "virtualization": 1}))
    ran = node.apply("all-1g", "--skip-reset")
    assert ran.code == 4 and "the new MIG mode of GPU 0 waits for a reset" in ran.err
    assert "or let it wait for a reboot: --mode-only --skip-reset" in ran.err
    assert not node.gpu().pending
