"""From a pod and its events to a reason: every known wording, and random data without an exception."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.kubernetes import pods
from gpunode.kubernetes.pods import Aim, Phase
from tests.kubernetes.pods import EVENTS, FAILED, GPU, PENDING, RUNNING, SUCCEEDED, unscheduled, waiting

AIM = Aim("gpu-1", GPU, "nvcr.io/nvidia/k8s/cuda-sample:v", {GPU: "8", "cpu": "64"})


def pod(status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "status": status}


@pytest.mark.parametrize(
    ("status", "code", "message", "hint"), [one[1:] for one in PENDING], ids=[one[0] for one in PENDING]
)
def test_reason_of_a_pending_pod(status: dict[str, Any], code: str, message: str, hint: str) -> None:
    found = pods.state(pod(status), (), AIM)
    assert found.phase is Phase.PENDING and found.reason is not None
    assert found.reason.code == code
    assert message in found.reason.message and hint in found.reason.hint
    assert "2 node(s)" not in found.reason.message, "other nodes don't matter"
    assert "preemption" not in found.reason.message, "nor do plugins that could not help"
    assert found.reason.patience < 300


@pytest.mark.parametrize(("reason", "message", "code", "hint"), EVENTS)
def test_cause_found_only_in_an_event_is_reported(reason: str, message: str, code: str, hint: str) -> None:
    event = {"type": "Warning", "reason": reason, "message": message}
    found = pods.state(pod(waiting("ContainerCreating")), (event,), AIM)
    assert found.reason is not None and found.reason.code == code
    assert found.reason.hint.startswith(hint)


def test_scheduling_event_before_the_binding_is_ignored() -> None:
    event = {"type": "Warning", "reason": "FailedScheduling", "message": f"0/1 ...: 1 Insufficient {GPU}."}
    assert pods.state(pod(waiting("ContainerCreating")), (event,), AIM).reason is None


@pytest.mark.parametrize(("status", "log", "code", "message", "hint"), FAILED)
def test_reason_of_a_failed_pod(status: dict[str, Any], log: str, code: str, message: str, hint: str) -> None:
    found = pods.state(pod(status), (), AIM)
    assert found.ended
    reason = pods.verdict(found, log, AIM)
    assert reason is not None and reason.code == code
    assert message in reason.message and hint in reason.hint


@pytest.mark.parametrize("log", ["Test PASSED", "x\nTest PASSED\nDone\n"])
def test_only_a_succeeded_pod_with_the_success_message_passes(log: str) -> None:
    assert pods.verdict(pods.state(pod(SUCCEEDED), (), AIM), log, AIM) is None
    failed = pods.state(pod({"phase": "Failed"}), (), AIM)
    assert pods.verdict(failed, log, AIM) is not None
    assert not pods.state(pod(RUNNING), (), AIM).ended


@pytest.mark.parametrize(("amount", "code"), [("0", "pending-no-gpu"), ("1", "pending-gpu-in-use")])
def test_missing_gpu_and_busy_gpu_have_distinct_reasons(amount: str, code: str) -> None:
    aim = Aim("gpu-1", GPU, "image", {GPU: amount})
    found = pods.state(pod(unscheduled(f"0/1 nodes are available: 1 Insufficient {GPU}.")), (), aim)
    assert found.reason is not None and found.reason.code == code


def test_deleted_pod_is_gone_unless_it_has_ended() -> None:
    going = {"metadata": {"deletionTimestamp": "2026-11-21T12:00:00Z"}}
    assert pods.state({**going, "status": RUNNING}, (), AIM).phase is Phase.GONE
    assert pods.state({**going, "status": SUCCEEDED}, (), AIM).phase is Phase.SUCCEEDED


def test_server_text_is_quoted_in_commands_to_copy() -> None:
    message = "0/1 nodes are available: 1 node(s) had untolerated taint {$(reboot): x}."
    assert pods.unschedulable(message, AIM).hint.endswith(" '$(reboot)-'")
    aim = AIM._replace(resources={"nvidia.com/x;reboot": "1"})
    short = pods.unschedulable(f"0/1 nodes are available: 1 Insufficient {AIM.resource}.", aim)
    assert short.hint.endswith("--resource 'nvidia.com/x;reboot'")


words = st.sampled_from(
    [
        *("phase", "reason", "message", "conditions", "containerStatuses", "state", "waiting", "terminated"),
        *("type", "status", "PodScheduled", "False", "Failed", "Pending", "Warning", "Unschedulable"),
        *("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", "ErrImagePull", "\x1b[2J", ""),
    ]
)
nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.full
@given(status=nonsense, events=st.lists(st.dictionaries(words, nonsense, max_size=3), max_size=3), log=words)
def test_any_server_response_gives_a_printable_reason(
    status: Any, events: list[dict[str, Any]], log: str
) -> None:
    found = pods.state({"metadata": {}, "status": status}, events, AIM)
    reason = pods.verdict(found, log, AIM) or found.reason
    pods.allocation({"status": status})
    if reason is not None:
        assert reason.message.isprintable() and len(reason.message) < 1000
