"""An API server that fails in every way it can: a clear error, and the whole change or none of it."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import ClassVar

import pytest

from fixtures.api_server import ApiServer, Fault, kubeconfig
from gpunode.host import Host
from gpunode.kubernetes.changes import change
from tests.cluster import ADVERTISE, Gpunode, capacity
from tests.silent import SilentProgress

UNDO = " --resource a.b/c --remove"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PATCH", "", "cut"),
        Fault("PATCH", "", "cut-after"),
        Fault("GET", "", "cut", times=2),
        Fault("PATCH", "", "status", code=503),
        Fault("PATCH", "", "status", code=500),
        Fault("PATCH", "", "status", code=429, retry_after=1),
        Fault("PATCH", "", "status", code=409, reason="Conflict", times=3),
        Fault("GET", "", "status", code=503, times=3),
    ],
    ids=lambda fault: f"{fault.method} {fault.kind} {fault.code}",
)
def test_temporary_error_is_retried(api: ApiServer, run: Gpunode, fault: Fault) -> None:
    api.faults.append(fault)
    done = run(*ADVERTISE, "-o", "json")
    assert done.code == 0, done.err
    assert capacity(api) == "1"
    assert done.document["data"]["undo"].endswith(UNDO)
    assert "trying again" in done.err


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (Fault("PATCH", "", "cut", 99), "kubernetes-unreachable", "completely or not at all"),
        (Fault("", "", "status", 99), "kubernetes-unavailable", "nothing was changed"),
        (
            Fault("PATCH", "", "status", 99, 409, "Conflict"),
            "kubernetes-conflict",
            "nothing was changed",
        ),
        (Fault("", "", "html", 99), "kubernetes-no-api-server", "not a response of an API server"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else None,
)
def test_permanent_error_is_reported(
    api: ApiServer, run: Gpunode, fault: Fault, code: str, message: str
) -> None:
    api.faults.append(fault)
    done = run(*ADVERTISE, "-o", "json")
    assert done.code == 1
    (error,) = done.document["errors"]
    assert error["code"] == code
    assert message in f"{error['message']}; {error['hint']}"
    assert capacity(api) is None


def test_server_lost_after_the_change_is_reported_as_unknown_result(api: ApiServer, run: Gpunode) -> None:
    api.faults += [Fault("PATCH", "", "cut-after"), Fault("GET", "", "cut", 99, after=1)]
    done = run(*ADVERTISE)
    assert done.code == 1
    assert "completely or not at all); run this again" in done.err
    assert capacity(api) == "1"
    api.faults.clear()
    assert run(*ADVERTISE).out.startswith("node gpu-1 unchanged\n")


def jwt(ends: float) -> str:
    part = base64.urlsafe_b64encode(json.dumps({"exp": int(ends)}).encode()).decode().rstrip("=")
    return f"e30.{part}.sig"


def test_expired_token_is_reported_as_such(api: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    path = tmp_path / "expired"
    path.write_text(kubeconfig(api, jwt(1_700_000_000)))
    done = run(*ADVERTISE, KUBECONFIG=str(path))
    assert done.code == 3
    assert "doesn't know who we are (401)" in done.err
    assert "the token expired at 2023-11-14 22:13 UTC" in done.err
    assert jwt(1_700_000_000) not in done.err + done.out
    assert capacity(api) is None

    path.write_text(kubeconfig(api, jwt(time.time() + 3600)))
    refused = run(*ADVERTISE, KUBECONFIG=str(path))
    assert "sign in again" in refused.err


def test_token_that_expires_during_the_run(api: ApiServer, run: Gpunode) -> None:
    api.faults.append(Fault("PATCH", "", "status", 9, 401, "Unauthorized"))
    done = run(*ADVERTISE)
    assert (done.code, "nothing was changed" in done.err) == (3, True)
    assert capacity(api) is None


def test_missing_node_is_refused(api: ApiServer, run: Gpunode) -> None:
    done = run(*ADVERTISE, "--node", "nowhere", "-o", "json")
    assert done.code == 3
    (error,) = done.document["errors"]
    assert error["code"] == "kubernetes-not-found"
    assert '"nowhere" not found' in error["message"]
    assert "kubectl get nodes" in error["hint"]


@pytest.mark.parametrize("name", ["../pods", "a/b", "A", "-a", "a?x=1", "a..b"])
def test_node_name_cannot_change_the_path(api: ApiServer, run: Gpunode, name: str) -> None:
    done = run(*ADVERTISE, f"--node={name}")
    assert (done.code, api.asked) == (2, [])


def test_value_that_the_server_refuses_is_not_retried(api: ApiServer, run: Gpunode) -> None:
    api.faults.append(Fault("PATCH", "", "status", 9, 422, "Invalid"))
    done = run(*ADVERTISE)
    assert done.code == 1
    assert api.faults[0].times == 8


def test_slow_server_is_waited_for(api: ApiServer, run: Gpunode) -> None:
    api.faults.append(Fault("GET", "", "slow", seconds=0.3))
    assert run(*ADVERTISE).code == 0


def test_change_behind_a_gateway_timeout_is_reported_with_its_undo(api: ApiServer, run: Gpunode) -> None:
    """A load balancer stops waiting (504), and the server has executed it."""

    def carried_out() -> None:
        node = api.node("gpu-1")
        node["status"]["capacity"]["a.b/c"] = node["status"]["allocatable"]["a.b/c"] = "1"
        api.store.put("Node", node)

    api.faults += [Fault("PATCH", "", "status", code=504, act=carried_out)]
    done = run(*ADVERTISE, "-o", "json")
    assert done.code == 0, done.err
    assert done.document["data"]["undo"].endswith(UNDO)
    assert len(api.changes()) == 0  # the response was the fault; nothing was sent again


def test_undo_restores_the_last_value_before_the_change(api: ApiServer, run: Gpunode) -> None:
    def other() -> None:
        node = api.node("gpu-1")
        node["status"]["capacity"]["a.b/c"] = "7"
        api.store.put("Node", node)

    api.faults.append(Fault("PATCH", "/nodes/", "meanwhile", act=other))
    done = run(*ADVERTISE, "--force", "-o", "json")
    assert done.document["data"]["undo"].endswith(" --resource a.b/c --count 7 --force")
    assert done.document["data"]["changes"] == [{"key": "a.b/c", "before": "7", "after": "1"}]


def test_ctrl_c_while_waiting_for_the_response_names_the_possible_state() -> None:
    class Noted(SilentProgress):
        said: ClassVar[list[str]] = []

        def note(self, text: str) -> None:
            self.said.append(text)

    def stopped(_: object) -> dict[str, object]:
        raise KeyboardInterrupt

    patch = [
        {"op": "test", "path": "/metadata/labels/a.com~1b", "value": "old"},
        {"op": "remove", "path": "/metadata/labels/a.com~1b"},
    ]
    with pytest.raises(KeyboardInterrupt):
        change(Host(Path("/"), {}), Noted(), dict, lambda _: patch, stopped)
    assert "completely or not at all); run this again" in Noted.said[0]
    assert Noted.said[0].endswith('before, a.com/b was "old"')


def test_refused_connection_is_reported(run: Gpunode) -> None:
    done = run(*ADVERTISE, "--server", "http://127.0.0.1:1")
    assert done.code == 1
    assert "Connection refused" in done.err
    assert "nothing was changed" in done.err
