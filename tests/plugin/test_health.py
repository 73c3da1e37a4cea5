"""Causes that make units unhealthy, and conditions for recovery: the checker with its own clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpunode.gpu.model import GPU_IS_LOST, Reading
from gpunode.gpu.nvml import GpuEvent
from gpunode.plugin.config.settings import ALL_XIDS, HealthSettings
from gpunode.plugin.health import HealthChecker
from gpunode.plugin.health_marks import Mark
from gpunode.plugin.model import Unit
from gpunode.plugin.serve import steady_clock
from tests.plugin.nodes import MemoryLog, inventory, uuid

NOW = 1_700_000_000.0
GOOD = Reading(uuid(1), ecc_volatile=0, recovery_action="none", generation="boot/1/550")
OLD = Reading(uuid(1), ecc_volatile=0, generation="boot/1/470")  # a driver that reports no recovery action


def whole(index: int) -> Unit:
    return Unit(uuid(index), uuid(index), str(index))


def part(gi: int, ci: int = 0, gpu: int = 1) -> Unit:
    return Unit(f"MIG-{gpu}-{gi}-{ci}", uuid(gpu), f"{gpu}:{gi}", gi=gi, ci=ci)


class Node:
    """A checker of four GPUs whose clock is set by the test."""

    def __init__(self, reading: Reading = GOOD, hold: float = 60.0, **settings: frozenset[int]) -> None:
        self.log = MemoryLog()
        self.now = NOW
        self.checker = HealthChecker(HealthSettings(**settings, hold_seconds=hold), self.log)  # type: ignore[arg-type]
        self.checker.seen(inventory(4), self.now)
        self.reading = reading
        self.checker.readings([reading], self.now)

    def xid(self, number: int, gi: int | None = None, ci: int | None = None, gpu: int = 1) -> Node:
        self.checker.event(GpuEvent("xid", uuid(gpu), number, gi, ci), self.now)
        return self

    def reads(self, **changes: object) -> Node:
        self.reading = self.reading._replace(**changes)  # type: ignore[arg-type]
        self.checker.readings([self.reading], self.now)
        return self

    def later(self, seconds: float) -> Node:
        self.now += seconds
        self.checker.tick(self.now)
        return self

    def why(self, unit: Unit | None = None) -> str:
        problem = self.checker.problem(unit or whole(1))
        return problem.code if problem else ""

    def needed_fix(self) -> str:
        problem = self.checker.problem(whole(1))
        return problem.mend if problem else ""


# --- which units -----------------------------------------------------------------------------------------


def test_xid_marks_only_its_gpu() -> None:
    node = Node().xid(79)
    assert [node.why(whole(index)) for index in range(4)] == ["", "xid-79", "", ""]
    problem = node.checker.problem(whole(1))
    assert problem is not None
    assert (problem.reason, problem.since, problem.mend) == (
        "XID 79: the GPU has fallen off the bus",
        NOW,
        "reboot",
    )


def test_xid_of_a_mig_instance_marks_only_that_instance() -> None:
    node = Node().xid(94, gi=3, ci=1)
    assert node.why(part(3, 1)) == "xid-94"
    assert [node.why(part(3, 0)), node.why(part(4, 1)), node.why(part(3, 1, gpu=2))] == ["", "", ""]
    assert node.why(whole(1)) == "xid-94"  # the GPU as a whole holds the instance


def test_without_a_compute_instance_the_whole_gpu_instance_is_marked() -> None:
    node = Node().xid(48, gi=3)
    assert [node.why(part(3, 0)), node.why(part(3, 1)), node.why(part(4))] == ["xid-48", "xid-48", ""]


def test_xid_without_instances_marks_the_whole_gpu() -> None:
    node = Node().xid(94)
    assert [node.why(part(3)), node.why(part(4)), node.why(part(3, gpu=2))] == ["xid-94", "xid-94", ""]


@pytest.mark.parametrize("number", [62, 74, 79, 95, 119, 140])
def test_gpu_wide_xid_marks_every_instance(number: int) -> None:
    node = Node().xid(number, gi=3, ci=0)
    assert {node.why(part(gi)) for gi in range(5)} == {f"xid-{number}"}


def test_only_double_bit_ecc_events_make_a_gpu_unhealthy() -> None:
    node = Node()
    node.checker.event(GpuEvent("ecc-single", uuid(1)), NOW)
    assert node.why() == ""
    node.checker.event(GpuEvent("ecc-double", uuid(1)), NOW)
    assert node.why() == "ecc"


def test_most_serious_problem_is_reported_and_of_equals_the_first() -> None:
    node = Node().xid(94).later(1).xid(95).later(1).xid(119)
    assert (node.why(), node.needed_fix()) == ("xid-95", "reset")
    assert node.xid(79).needed_fix() == "reboot"


# --- ignored events and their log lines -------------------------------------------------------------------


def test_event_of_an_unknown_gpu_marks_none() -> None:
    node = Node()
    node.checker.event(GpuEvent("xid", "", 79), NOW)
    node.checker.event(GpuEvent("xid", "GPU-other", 79), NOW)
    assert [node.why(whole(index)) for index in range(4)] == [""] * 4
    assert node.log.messages() == ["health event of an unknown GPU"] * 2


def test_storm_of_events_needs_few_lines_and_bounded_memory() -> None:
    node = Node()
    for number in range(1000):
        node.checker.event(GpuEvent("ecc-single", uuid(0)), NOW)
        node.checker.event(GpuEvent("xid", "", 79), NOW)
        node.xid(31).xid(79).xid(5000 + number)
    assert node.log.messages() == [
        "ignored GPU event",
        "health event of an unknown GPU",
        "ignored GPU event",
        "the GPU has more than 64 problems; the last one counts for the whole GPU",
    ]
    assert len(node.checker.kept) == 64


def test_instance_of_a_gpu_with_too_many_problems_is_unhealthy() -> None:
    node = Node(enabled=frozenset({ALL_XIDS}))
    for number in range(64):
        node.xid(5000 + number, gi=1, ci=0)
    assert (node.why(part(1)), node.why(part(2))) == ("xid-5000", "")
    node.xid(5064, gi=2, ci=0)
    assert (node.why(part(1)), node.why(part(2))) == ("xid-5000", "xid-5063")
    node.xid(79)
    assert (node.why(part(1)), node.why(part(2))) == ("xid-79", "xid-79")
    assert node.log.messages() == ["the GPU has more than 64 problems; the last one counts for the whole GPU"]


def test_only_xid_48_counts_if_all_others_are_disabled() -> None:
    node = Node(disabled=frozenset({ALL_XIDS}), enabled=frozenset({48}))
    node.xid(79).reads(recovery_action="reset", ecc_volatile=3)
    assert node.why() == ""
    assert node.xid(48).why() == "xid-48"
    node.checker.readings([node.reading._replace(error="the GPU is lost")], node.now)
    assert node.why(whole(0)) == ""


def test_lost_gpu_counts_with_everything_disabled() -> None:
    node = Node(disabled=frozenset({ALL_XIDS}))
    assert node.reads(error="the GPU is lost").why() == "lost"


def test_changed_settings_apply_at_once() -> None:
    node = Node().xid(119).xid(79).reads(remap_pending=True)
    node.checker.configure(HealthSettings(disabled=frozenset({79})))
    assert node.needed_fix() == "reset"
    node.checker.configure(HealthSettings(disabled=frozenset({ALL_XIDS})))
    assert node.why() == ""
    node.checker.configure(HealthSettings())
    assert node.why() == "row-remap"


# --- readings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "mend"),
    [
        ({"remap_pending": True}, "row-remap", "reset"),
        ({"remap_failed": True, "remap_pending": True}, "row-remap", "replace"),
        ({"retired_pending": True}, "page-retirement", "reset"),
        ({"recovery_action": "reset"}, "recovery-action", "reset"),
        ({"recovery_action": "reboot"}, "recovery-action", "reboot"),
        ({"recovery_action": "drain-p2p"}, "recovery-action", "restart-app"),
        ({"recovery_action": "drain-and-reset"}, "recovery-action", "reset"),
        ({"recovery_action": "unknown-9"}, "recovery-action", ""),
        ({"fabric_state": "in-progress"}, "fabric", ""),
        ({"fabric_state": "completed", "fabric_error": "unknown"}, "fabric", "reset"),
        ({"ecc_volatile": 2}, "ecc", "reset"),
    ],
)
def test_reading_that_makes_a_gpu_unhealthy(changes: dict[str, object], code: str, mend: str) -> None:
    node = Node().reads(**changes)
    assert (node.why(), node.needed_fix()) == (code, mend)
    assert node.why(part(3)) == code
    assert node.why(whole(2)) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"ecc_volatile": 0, "ecc_aggregate": 99},
        {"fabric_state": "completed"},
        {"recovery_action": None},
        {"remap_pending": False, "busy_percent": 100},
    ],
)
def test_reading_that_does_not_make_a_gpu_unhealthy(changes: dict[str, object]) -> None:
    assert Node().reads(**changes).why() == ""


def test_errors_counted_before_the_start_are_ignored() -> None:
    assert Node(GOOD._replace(ecc_volatile=7)).why() == ""
    assert Node(GOOD._replace(ecc_volatile=7)).reads(ecc_volatile=8).why() == "ecc"


def test_persistent_condition_clears_after_the_hold_time() -> None:
    node = Node().reads(remap_pending=True).later(1000).reads(remap_pending=False)
    assert node.later(59).why() == "row-remap"
    assert node.later(2).why() == ""


def test_first_fabric_registration_needs_no_hold_time_and_a_later_loss_does() -> None:
    node = Node(GOOD._replace(fabric_state="in-progress")).reads(fabric_state="completed")
    assert node.later(1).why() == ""
    node.reads(fabric_state="in-progress").later(5).reads(fabric_state="completed")
    assert node.later(1).why() == "fabric"


def test_changed_system_clock_does_not_change_a_hold_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    before = clock()
    for jump in (-1e9, 1e9):
        monkeypatch.setattr("time.time", lambda jump=jump: NOW + jump)
        assert 0 <= clock() - before < 10


# --- recovery --------------------------------------------------------------------------------------------


def test_contained_error_clears_after_the_hold_time() -> None:
    node = Node(OLD).xid(94)
    assert node.later(59).why() == "xid-94"
    assert node.later(2).why() == ""


def test_each_event_restarts_the_hold_time() -> None:
    node = Node(OLD).xid(94).later(50).xid(94)
    assert node.later(50).why() == "xid-94"
    assert node.later(11).why() == ""


def test_recovery_action_none_clears_a_mark_and_a_missing_one_does_not() -> None:
    assert Node().xid(48).later(61).why() == ""
    node = Node(OLD).xid(48).later(10_000)
    assert node.why() == "xid-48"
    node.reads(generation="boot/2/470")
    assert node.later(61).why() == ""


def test_requested_reset_must_happen_before_recovery() -> None:
    node = Node().xid(48).reads(recovery_action="reset").later(10_000)
    assert node.needed_fix() == "reset"
    node.reads(recovery_action="none")
    assert node.later(59).why() != ""
    assert node.later(2).why() == ""


@pytest.mark.parametrize("number", [79, 95, 119, 54])
def test_xid_that_needs_a_reset_does_not_clear_by_waiting(number: int) -> None:
    assert Node().xid(number).later(1_000_000).why() == f"xid-{number}"


@pytest.mark.parametrize("number", [79, 95, 119])
@pytest.mark.parametrize(
    "reset",
    [
        [{"ecc_volatile": 4}, {"ecc_volatile": 0}],
        [{"recovery_action": "reset"}, {"recovery_action": "none"}],
        [{"generation": "boot/2/550"}],
        [{"generation": "boot/1/570"}],
    ],
    ids=["counter-fell", "driver-content", "reloaded", "upgraded"],
)
def test_detected_reset_clears_after_the_hold_time(number: int, reset: list[dict[str, object]]) -> None:
    node = Node().xid(number)
    for changes in reset:
        node.later(10).reads(**changes)
    assert node.later(59).why() != ""
    assert node.later(2).why() == ""


@pytest.mark.parametrize("number", [79, 95, 119, 54])
@pytest.mark.parametrize(
    "changes",
    [
        [{"recovery_action": "drain-p2p"}, {"recovery_action": "none"}],
        [{"ecc_volatile": 0, "ecc_aggregate": 0}],
        [{"error": "busy (NVML 19)"}, {"error": ""}],
        [{"fabric_state": "in-progress"}, {"fabric_state": "completed"}],
    ],
    ids=["drained", "same-count", "unreadable", "fabric"],
)
def test_change_that_is_no_reset_does_not_clear_the_mark(
    number: int, changes: list[dict[str, object]]
) -> None:
    node = Node().xid(number)
    for change in changes:
        node.later(10).reads(**change)
    node.checker.seen(inventory(4), node.now)
    assert node.later(100_000).why() == f"xid-{number}"


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ([{"ecc_volatile": 4}, {"ecc_volatile": 0}], "xid-54"),
        ([{"recovery_action": "reset"}, {"recovery_action": "none"}], "xid-54"),
        ([{"generation": "boot/2/550"}], "xid-54"),
        ([{"generation": "reboot/1/550"}], ""),
    ],
    ids=["counter-fell", "driver-content", "reloaded", "booted"],
)
def test_manual_repair_needs_a_reboot(changes: list[dict[str, object]], after: str) -> None:
    node = Node().xid(54)
    for change in changes:
        node.later(10).reads(**change)
    assert node.later(59).why() != ""
    assert node.later(100_000).why() == after


def test_reset_while_the_plugin_was_stopped_is_detected_by_the_recovery_action() -> None:
    node = Node().xid(119).reads(recovery_action="reset")
    checker = HealthChecker(HealthSettings(), MemoryLog(), node.checker.kept)
    checker.seen(inventory(4), node.now)
    checker.readings([GOOD], node.now)
    checker.tick(node.now + 59)
    assert checker.problem(whole(1)) is not None
    checker.tick(node.now + 61)
    assert checker.problem(whole(1)) is None


def test_gpu_unreadable_for_a_moment_recovers() -> None:
    """The inventory stays the same all the time, so it isn't reported again."""
    node = Node().reads(error="unknown error (NVML 999)")
    assert node.later(100).why() == "lost"
    node.reads(error="")
    assert node.later(9).why() == "lost"
    assert node.later(2).why() == ""


def test_gpu_listed_with_an_error_does_not_recover_by_a_reading() -> None:
    node = Node().reads(error="unknown error (NVML 999)")
    bad = inventory(4)
    node.checker.seen(
        bad._replace(gpus=(*bad.gpus[:1], replace(bad.gpus[1], error="odd"), *bad.gpus[2:])), NOW
    )
    assert node.reads(error="").later(100).why() == "lost"


def test_mark_of_a_disabled_xid_is_cleared_by_reload_and_restart() -> None:
    node = Node().xid(119).xid(79, gpu=2)
    fewer = HealthSettings(disabled=frozenset({119}))
    node.checker.configure(fewer)
    assert (node.why(), node.why(whole(2))) == ("", "xid-79")
    assert node.log.messages("info") == ["problem cleared"]
    log = MemoryLog()
    again = HealthChecker(fewer, log, Node().xid(119).checker.kept)
    assert again.problem(whole(1)) is None
    assert (again.kept, log.messages()) == ((), ["problem cleared"])


def test_gpu_that_disappeared_and_returned_was_reset() -> None:
    node = Node().xid(79)
    node.checker.seen(inventory(1), node.now)  # the ledger would list the others with an error
    lost = inventory(4)
    gone = (lost.gpus[0], replace(lost.gpus[1], error="lost", error_code=GPU_IS_LOST), *lost.gpus[2:])
    node.checker.seen(lost._replace(gpus=gone), node.now)
    for _ in range(2):
        node.later(5)
        node.checker.seen(lost, node.now)
    assert node.why() == "xid-79"
    assert node.later(61).why() == ""


def test_event_after_the_reset_needs_another_reset() -> None:
    node = Node().xid(119).reads(generation="boot/2/550").later(30).xid(119)
    assert node.later(10_000).why() == "xid-119"


def test_repeatedly_failing_gpu_waits_longer_each_time() -> None:
    node = Node(OLD)
    waits = []
    for _ in range(4):
        node.xid(94)
        start = node.now
        while node.why():
            node.later(10)
        waits.append(node.now - start)
    assert waits == [60, 120, 240, 480]
    node.later(7200).xid(94)
    assert node.later(61).why() == ""


def test_nothing_recovers_while_the_driver_is_broken() -> None:
    node = Node(OLD).xid(94)
    node.checker.broken("driver not loaded", True, node.now)
    assert node.later(1000).why() == "xid-94"
    assert node.why(whole(0)) == "driver"


def test_remembered_mark_applies_from_the_start_and_clears_as_usual() -> None:
    mark = Mark(uuid(1), "xid-119", "XID 119", "reset", NOW - 100, NOW - 100, generation="boot/1/550", ecc=0)
    checker = HealthChecker(HealthSettings(), MemoryLog(), [mark])
    checker.seen(inventory(2), NOW)
    checker.readings([GOOD], NOW)
    checker.tick(NOW + 1000)
    assert checker.problem(whole(1)) == mark.problem
    checker.readings([GOOD._replace(generation="boot/2/550")], NOW + 1000)
    checker.tick(NOW + 1061)
    assert checker.problem(whole(1)) is None
    assert checker.kept == ()
