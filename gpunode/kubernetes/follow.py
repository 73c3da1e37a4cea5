"""From a pod and its events to where it stands. Pure: asking and waiting is the command's matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.kubernetes import reasons
from gpunode.kubernetes.reasons import Aim, Reason

PASSED = "Test PASSED"  # what NVIDIA's vectorAdd sample prints
_GONE = Reason("pod-deleted", "somebody deletes the pod", "run this again")


class Phase(StrEnum):
    """A pod's life as a follower needs it."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    GONE = "Gone"


@dataclass(frozen=True)
class State:
    """`reason` says why it isn't further, or how it failed; None where all goes its way."""

    phase: Phase
    reason: Reason | None = None

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)


def state(pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]], aim: Aim) -> State:
    """Where a pod stands, whatever shape the answers have. `events` oldest first."""
    status = _map(pod.get("status"))
    phase = str(status.get("phase") or "Pending")
    if phase == Phase.SUCCEEDED:
        return State(Phase.SUCCEEDED)
    if phase == Phase.FAILED:
        return State(Phase.FAILED, _failure(status, aim))
    if _map(pod.get("metadata")).get("deletionTimestamp"):
        return State(Phase.GONE, _GONE)
    if phase == Phase.RUNNING:
        return State(Phase.RUNNING)
    return State(Phase.PENDING, _hindrance(status, events, aim))


def _failure(status: Mapping[str, Any], aim: Aim) -> Reason:
    if status.get("reason"):
        return reasons.failed(str(status["reason"]), str(status.get("message") or ""), aim)
    for container in _maps(status.get("containerStatuses")):
        ended = _map(_map(container.get("state")).get("terminated"))
        if ended:
            said = str(ended.get("message") or f"exit code {ended.get('exitCode')}")
            return reasons.failed(str(ended.get("reason") or "Error"), said, aim)
    return reasons.failed("", str(status.get("message") or ""), aim)


def _hindrance(status: Mapping[str, Any], events: Sequence[Mapping[str, Any]], aim: Aim) -> Reason | None:
    """The container's own state first, then the scheduler's word, then the last warning that tells."""
    for container in _maps(status.get("containerStatuses")):
        found = reasons.waiting(_map(_map(container.get("state")).get("waiting")), events, aim)
        if found is not None:
            return found
    for condition in _maps(status.get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            if condition.get("reason") == "SchedulingGated":
                gates = "somebody's admission webhook gates new pods"
                return Reason("pending-gated", gates, "kubectl describe pod names the gates", 60)
            return reasons.unschedulable(str(condition.get("message") or ""), aim)
    scheduled = any(
        condition.get("type") == "PodScheduled" and condition.get("status") == "True"
        for condition in _maps(status.get("conditions"))
    )
    for one in reversed([one for one in events if one.get("type") == "Warning"]):
        if scheduled and one.get("reason") == "FailedScheduling":
            continue  # it was so, before it found a place
        if (told := reasons.event(one, aim)) is not None:
            return told
    return None


def verdict(found: State, log: str, aim: Aim) -> Reason | None:
    """None if it passed: it succeeded, and says so itself. A shell that hides a failing program doesn't."""
    if found.phase is Phase.SUCCEEDED:
        if PASSED in log:
            return None
        said = f"the pod succeeded without {PASSED!r} in its log"
        return Reason("vector-add-silent", said, "is it a vector-add sample? --image names another")
    if found.phase is Phase.FAILED and log.strip() and _by_program(found):
        return reasons.logged(log, aim)
    return found.reason


def _by_program(found: State) -> bool:
    """Whether the program itself failed, which knows best why."""
    return found.reason is None or found.reason.message.startswith(("Error", "Completed"))


def allocation(pod: Mapping[str, Any]) -> str:
    """How the GPU came: ``device plugin``, or the claim that the scheduler made for it (Kubernetes 1.34,
    DRAExtendedResource: status.extendedResourceClaimStatus)."""
    claim = _map(_map(pod.get("status")).get("extendedResourceClaimStatus")).get("resourceClaimName")
    return f"resource claim {reasons.short(claim)}" if claim else "device plugin"


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: Any) -> Iterable[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
