"""`gpunode verify --on kubernetes`: from the pod to the verdict, without leftovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures.api_server import ADMIN, ApiServer, Fault, kubeconfig
from tests.cli import Ran, clean_environment, command
from tests.cluster import Gpunode
from tests.kubernetes.pods import EVENTS, FAILED, GPU, PENDING, RUNNING, SUCCEEDED, unscheduled, waiting
from tests.waiting import PATIENCE, eventually

PASSED = "[Vector addition of 50000 elements]\nCopy output data from the CUDA device\nTest PASSED\nDone\n"


@pytest.fixture
def gpu_node(api: ApiServer) -> Iterator[ApiServer]:
    """The node has eight GPUs and the cluster nvidia's class; a pod passes."""
    for part in ("capacity", "allocatable"):
        api.node("gpu-1")["status"][part][GPU] = "8"
    api.store.put("RuntimeClass", {"metadata": {"name": "nvidia"}, "handler": "nvidia"})
    api.pod_life = [waiting("ContainerCreating"), RUNNING, SUCCEEDED]
    api.logs[""] = PASSED
    yield api
    assert api.store.list("Pod") == [] or api.asked[-1].method == "DELETE", "a pod is left over"


def verify(run: Gpunode, *argv: str, state: str = "/nowhere", **env: str) -> Ran:
    constants = {"gpunode.commands.verify_kubernetes:_STATE_DIR": state}
    return run("verify", "--on", "kubernetes", "-o", "json", *argv, constants=constants, **env)


def created(api: ApiServer) -> dict[str, Any]:
    (one,) = [asked for asked in api.asked if asked.method == "POST"]
    body: dict[str, Any] = one.body
    return body


def error_of(ran: Ran) -> dict[str, str]:
    errors = ran.document["errors"]
    assert len(errors) == 1, errors
    found: dict[str, str] = errors[0]
    return found


# --- success --------------------------------------------------------------------------------------------


def test_pod_that_passes_proves_the_node_and_is_removed(gpu_node: ApiServer, run: Gpunode) -> None:
    ran = verify(run)
    assert ran.code == 0, ran.err
    assert gpu_node.store.list("Pod") == []
    data = ran.document["data"]
    assert (data["on"], data["via"], data["devices"][0]["status"]) == ("kubernetes", "device plugin", "ok")
    pod = data["pod"]
    assert (pod["node"], pod["namespace"], pod["phase"]) == ("gpu-1", "default", "Succeeded")
    assert (pod["runtimeClass"], pod["removed"], pod["reason"]) == ("nvidia", True, "")
    assert "Test PASSED" in pod["log"]
    assert pod["name"].startswith("gpunode-vector-add-")


def test_pod_is_bound_to_this_node_and_has_a_deadline(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.node("gpu-1")["metadata"]["labels"]["kubernetes.io/hostname"] = "host-1"
    ran = verify(
        run, "--namespace", "tests", "--timeout", "60", "--image", "registry.example.com/vectoradd:1"
    )
    assert ran.code == 0, ran.err
    body = created(gpu_node)
    spec = body["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/hostname": "host-1"}
    assert spec["restartPolicy"] == "Never" and spec["runtimeClassName"] == "nvidia"
    assert 60 <= spec["activeDeadlineSeconds"] <= 120
    assert spec["containers"][0]["image"] == "registry.example.com/vectoradd:1"
    assert spec["containers"][0]["resources"] == {"limits": {GPU: "1"}}
    assert spec["tolerations"] == [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    assert body["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "gpunode"
    assert "name" not in body["metadata"] and body["metadata"]["generateName"]
    assert all("/namespaces/tests/" in one.path for one in gpu_node.asked if "pods" in one.path)


def test_log_and_verdict_are_printed(gpu_node: ApiServer, run: Gpunode) -> None:
    ran = run("verify", "--on", "kubernetes")
    assert ran.code == 0, ran.err
    assert "  Test PASSED\n" in ran.out
    assert ran.out.splitlines()[-1] == "The pod computed on a GPU of gpu-1"
    assert ran.err == ""


def test_mig_profile_is_requested_on_a_node_without_the_runtime_class(
    gpu_node: ApiServer, run: Gpunode
) -> None:
    gpu_node.store.delete("RuntimeClass", "nvidia")
    ran = verify(run, "--resource", "nvidia.com/mig-1g.10gb")
    assert ran.code == 0, ran.err
    spec = created(gpu_node)["spec"]
    assert "runtimeClassName" not in spec
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/mig-1g.10gb": "1"}
    assert spec["tolerations"][0]["key"] == "nvidia.com/mig-1g.10gb"


def test_gpu_from_a_resource_claim_is_reported(gpu_node: ApiServer, run: Gpunode) -> None:
    """DRAExtendedResource: the node advertises nothing, and the scheduler makes a claim of the request."""
    for part in ("capacity", "allocatable"):
        del gpu_node.node("gpu-1")["status"][part][GPU]
    claim = {"resourceClaimName": "gpunode-vector-add-x-extended-resources-1"}
    gpu_node.pod_life = [{**SUCCEEDED, "extendedResourceClaimStatus": claim}]
    ran = verify(run)
    assert ran.code == 0, ran.err
    assert ran.document["data"]["via"] == "resource claim gpunode-vector-add-x-extended-resources-1"


# --- pending pods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("life", "code", "said", "hint"), [one[1:] for one in (PENDING[0], PENDING[6])], ids=["gpus", "image"]
)
def test_pending_pod_is_explained_and_removed(
    gpu_node: ApiServer, run: Gpunode, life: dict[str, Any], code: str, said: str, hint: str
) -> None:
    gpu_node.pod_life = [life]
    ran = verify(run, "--timeout", "3")
    assert ran.code == 1, ran.err
    error = error_of(ran)
    assert error["code"] == code
    assert said in error["message"] and hint in error["hint"], error
    assert "2 node(s)" not in error["message"], "other nodes don't matter"
    assert f"Pending: {ran.document['data']['pod']['reason']}" in ran.err, "reported while it waits"
    assert gpu_node.store.list("Pod") == []


def test_reason_that_lasts_ends_the_wait_before_the_timeout(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.pod_life = [waiting("CreateContainerError", "the device is gone")]
    ran = verify(run, "--timeout", "1h")
    assert ran.code == 1 and error_of(ran)["code"] == "pending-container"
    assert 15 <= ran.document["data"]["pod"]["seconds"] < 60
    assert gpu_node.store.list("Pod") == []


@pytest.mark.full
def test_node_without_the_resource_lists_the_resources_it_has(gpu_node: ApiServer, run: Gpunode) -> None:
    for part in ("capacity", "allocatable"):
        resources = gpu_node.node("gpu-1")["status"][part]
        del resources[GPU]
        resources["nvidia.com/mig-3g.40gb"] = "2"
    gpu_node.pod_life = [unscheduled(f"0/1 nodes are available: 1 Insufficient {GPU}.")]
    error = error_of(verify(run, "--timeout", "3"))
    assert error["code"] == "pending-no-gpu"
    assert error["hint"] == "request what it has: --resource nvidia.com/mig-3g.40gb"


TAIL = "no new claims to deallocate, preemption: 0/1 nodes are available: 1 Preemption is not helpful."


@pytest.mark.full
def test_taint_that_the_scheduler_does_not_name_is_read_from_the_node(
    gpu_node: ApiServer, run: Gpunode
) -> None:
    """Kubernetes 1.36: "untolerated taint(s)"."""
    gpu_node.node("gpu-1")["spec"]["taints"] = [
        {"key": "slow", "effect": "PreferNoSchedule"},
        {"key": GPU, "value": "present", "effect": "NoSchedule"},
        {"key": "team", "value": "ml", "effect": "NoSchedule"},
    ]
    gpu_node.pod_life = [unscheduled(f"0/1 nodes are available: 1 node(s) had untolerated taint(s). {TAIL}")]
    error = error_of(verify(run, "--timeout", "3"))
    assert error["code"] == "pending-taint"
    assert error["message"].endswith(
        "the pod can't be scheduled on gpu-1: it does not tolerate the node's taint team=ml:NoSchedule"
    )
    assert error["hint"].endswith("kubectl taint nodes gpu-1 team-")


@pytest.mark.full
def test_unhealthy_gpus_are_named_if_all_are(gpu_node: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    gpu_node.kubelet = None  # its last reported state is kept
    node = gpu_node.node("gpu-1")
    node["status"]["allocatable"][GPU] = "0"
    gpu_node.pod_life = [unscheduled(f"0/1 nodes are available: 1 Insufficient {GPU}. {TAIL}")]
    error = error_of(verify(run, "--timeout", "3"))
    assert error["code"] == "pending-no-gpu"
    assert error["message"] == f"gpu-1: all 8 {GPU} of gpu-1 are unhealthy"
    machine_id = Path("/etc/machine-id")
    if not machine_id.exists():
        pytest.skip("this machine has no machine-id by which its own node is known")
    node["status"]["nodeInfo"] = {"machineID": machine_id.read_text().strip()}
    unit = {"id": "GPU-1", "index": "0", "problem": {"code": "xid-79", "reason": "XID 79: fell off the bus"}}
    status = {"resources": [{"name": GPU, "units": [unit, {"id": "GPU-2", "index": "1"}]}]}
    (tmp_path / "status.json").write_text(json.dumps(status))
    error = error_of(verify(run, "--timeout", "3", state=str(tmp_path)))
    assert error["message"].endswith("are unhealthy (GPU 0 GPU-1: XID 79: fell off the bus)")


def event(reason: str, message: str) -> Callable[[ApiServer], Fault]:
    """Kubernetes writes it when the events are listed."""

    def made(api: ApiServer) -> Fault:
        def act() -> None:
            for pod in api.store.list("Pod"):
                about = {"uid": pod["metadata"]["uid"], "kind": "Pod", "name": pod["metadata"]["name"]}
                body = {"metadata": {"name": f"e-{reason.lower()}"}, "type": "Warning", "reason": reason}
                where = pod["metadata"]["namespace"]
                api.store.put("Event", body | {"message": message, "involvedObject": about}, where)

        return Fault("GET", "/events", "meanwhile", act=act)

    return made


@pytest.mark.full
def test_cause_found_only_in_an_event_is_reported(gpu_node: ApiServer, run: Gpunode) -> None:
    reason, message, code, hint = EVENTS[0]
    gpu_node.pod_life = [waiting("ContainerCreating")]
    gpu_node.faults.append(event(reason, message)(gpu_node))
    error = error_of(verify(run, "--timeout", "3"))
    assert error["code"] == code
    assert error["hint"].startswith(hint)


@pytest.mark.full
def test_event_has_the_cause_that_the_back_off_hides(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.pod_life = [waiting("ImagePullBackOff", 'Back-off pulling image "x"')]
    gpu_node.faults.append(event("Failed", "Failed to pull image: 401 Unauthorized")(gpu_node))
    error = error_of(verify(run, "--timeout", "3"))
    assert "401 Unauthorized" in error["message"] and "requires a login" in error["hint"]


@pytest.mark.full
def test_pod_that_never_ends_times_out_and_is_removed(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.pod_life = [RUNNING]
    ran = verify(run, "--timeout", "3")
    assert (ran.code, error_of(ran)["code"]) == (1, "pod-hangs")
    assert gpu_node.store.list("Pod") == []


# --- failed pods ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("life", "log", "code", "said", "hint"), [FAILED[0], FAILED[5], FAILED[-1]])
def test_failed_pod_is_explained(
    gpu_node: ApiServer, run: Gpunode, life: dict[str, Any], log: str, code: str, said: str, hint: str
) -> None:
    gpu_node.pod_life = [RUNNING, life]
    gpu_node.logs[""] = log
    ran = verify(run)
    assert ran.code == 1, ran.err
    error = error_of(ran)
    assert error["code"] == code
    assert said in error["message"] and hint in error["hint"], error
    assert ran.document["data"]["pod"]["log"] == log.splitlines()
    assert gpu_node.store.list("Pod") == []


def test_pod_deleted_by_another_user_is_reported(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.pod_life = [RUNNING]

    def delete_pod() -> None:
        for pod in gpu_node.store.list("Pod"):
            gpu_node.store.delete("Pod", pod["metadata"]["name"], pod["metadata"]["namespace"])

    gpu_node.faults.append(Fault("GET", "/pods/gpunode", "meanwhile", act=delete_pod))
    ran = verify(run)
    assert (ran.code, error_of(ran)["code"]) == (1, "pod-deleted")


@pytest.mark.full
def test_control_characters_of_a_pod_never_reach_the_terminal(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.pod_life = [waiting("CreateContainerError", "bad \x1b[2J\x1b]0;x\x07 thing")]
    ran = run("verify", "--on", "kubernetes", "--timeout", "3")
    assert ran.code == 1 and "\x1b" not in ran.out + ran.err and "\x07" not in ran.err
    gpu_node.pod_life, gpu_node.logs[""] = [SUCCEEDED], "\x1b[31mTest PASSED\n"
    assert "\x1b" not in run("verify", "--on", "kubernetes").out


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "code", "hint"),
    [
        (
            "pods is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, limited: 8",
            "pending-quota",
            "kubectl -n default describe quota",
        ),
        (
            'violates PodSecurity "restricted:latest": seccompProfile',
            "pending-pod-security",
            "--namespace",
        ),
        (
            'pod rejected: RuntimeClass "nvidia" not found',
            "pending-runtime-class",
            "gpunode manifests runtime-class --nvidia-runtime-name nvidia | kubectl apply",
        ),
        (
            'admission webhook "images.example.com" denied the request: only our registry',
            "pending-admission",
            "--image",
        ),
        (
            "maximum memory usage per Container is 1Gi, but limit is 2Gi",
            "pending-limits",
            "kubectl -n default describe limitrange",
        ),
    ],
)
def test_admission_refusal_is_explained(
    gpu_node: ApiServer, run: Gpunode, message: str, code: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fixtures.api_objects import Refused

    def refuse(*_: Any) -> None:
        raise Refused(403, "Forbidden", message)

    monkeypatch.setattr(gpu_node, "_create", refuse)
    ran = verify(run)
    assert ran.code == 3
    error = error_of(ran)
    assert error["code"] == code and hint in error["hint"] and message[:20] in error["message"]
    assert not [one for one in gpu_node.asked if one.method == "DELETE"]


def test_webhook_that_does_not_respond_is_named(gpu_node: ApiServer, run: Gpunode) -> None:
    from fixtures.api_objects import Refused

    message = 'Internal error occurred: failed calling webhook "pods.example.com": connection refused'

    def refuse(*_: Any) -> None:
        raise Refused(500, "InternalError", message)

    gpu_node._create = refuse  # type: ignore[assignment,method-assign]
    ran = verify(run)
    assert (ran.code, error_of(ran)["code"]) == (1, "pending-webhook")
    assert "the webhook pods.example.com doesn't answer" in error_of(ran)["hint"]


def test_missing_namespace_is_refused(gpu_node: ApiServer, run: Gpunode) -> None:
    ran = verify(run, "--namespace", "elsewhere")
    assert (ran.code, error_of(ran)["code"]) == (3, "pending-namespace")
    assert error_of(ran)["hint"].startswith("kubectl create namespace elsewhere")


def test_missing_runtime_class_is_refused_before_any_object_is_created(
    gpu_node: ApiServer, run: Gpunode
) -> None:
    ran = verify(run, "--runtime-class", "nvidia-cdi")
    assert (ran.code, error_of(ran)["code"]) == (3, "pending-runtime-class")
    assert "manifests runtime-class --nvidia-runtime-name nvidia-cdi" in error_of(ran)["hint"]
    assert gpu_node.changes() == []


def test_unknown_node_is_refused_before_any_object_is_created(gpu_node: ApiServer, run: Gpunode) -> None:
    ran = verify(run, "--node", "gpu-2")
    assert ran.code == 3 and "gpu-2" in error_of(ran)["message"]
    assert gpu_node.changes() == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--cdi",), "--cdi is for a container engine"),
        (("--socket", "/run/x"), "--socket is for a container engine"),
        (("--resource", "gpu"), "DOMAIN/NAME"),
        (("--namespace", "A"), "can't be a namespace"),
        (("--image", "a b"), "can't be an image's name"),
        (("--timeout", "0"), "--timeout: 0 is not between 1s and 24h"),
    ],
)
def test_contradicting_options_are_a_usage_error(
    gpu_node: ApiServer, run: Gpunode, argv: tuple[str, ...], message: str
) -> None:
    ran = run("verify", "--on", "kubernetes", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert gpu_node.asked == []


def test_pod_options_without_a_pod_are_a_usage_error(run: Gpunode) -> None:
    ran = run("verify", "--namespace", "x")
    assert ran.code == 2 and "gpunode verify --on kubernetes" in ran.err


# --- failures of the API server -------------------------------------------------------------------------


def test_api_server_unavailable_for_a_moment_is_retried(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.faults += [
        Fault("GET", "/pods/gpunode", "cut", 2),
        Fault("GET", "/pods/gpunode", "status", 1),
        Fault("DELETE", "/pods/gpunode", "status", 1),
        Fault("GET", "/nodes/gpu-1", "status", 1),
    ]
    ran = verify(run)
    assert ran.code == 0, ran.err
    assert "looked at again when it is back" in ran.err
    assert gpu_node.store.list("Pod") == []


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [(), ("--timeout", "3")],
    ids=["for-too-long", "past-the-timeout"],
)
def test_unavailable_api_server_is_reported_with_the_cleanup_command(
    gpu_node: ApiServer, run: Gpunode, words: tuple[str, ...]
) -> None:
    gpu_node.faults += [Fault("GET", "/pods/gpunode", "cut", 9999), Fault("DELETE", "", "cut", 9999)]
    ran = verify(run, *words)
    (pod,) = gpu_node.store.list("Pod")
    assert ran.code == 1 and error_of(ran)["code"] == "kubernetes-unreachable"
    assert f"remove it: kubectl --namespace default delete pod {pod['metadata']['name']}" in ran.err
    gpu_node.store.delete("Pod", pod["metadata"]["name"], "default")


def test_pod_with_a_lost_create_response_is_found_and_removed(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.faults.append(Fault("POST", "/pods", "cut-after"))
    ran = verify(run)
    assert ran.code == 1 and error_of(ran)["code"] == "kubernetes-unreachable"
    assert [one.method for one in gpu_node.changes()] == ["POST", "DELETE"]
    assert gpu_node.store.list("Pod") == []


def test_token_expiring_during_the_run_is_reported(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.pod_life = [RUNNING]

    def expire() -> None:
        gpu_node.expired.add(ADMIN)

    gpu_node.faults.append(Fault("GET", "/pods/gpunode", "meanwhile", act=expire))
    ran = verify(run)
    (pod,) = gpu_node.store.list("Pod")
    assert ran.code == 3 and error_of(ran)["code"] == "kubernetes-unauthorized"
    assert f"delete pod {pod['metadata']['name']}" in ran.err
    gpu_node.store.delete("Pod", pod["metadata"]["name"], "default")


def test_pod_that_cannot_be_removed_is_named_and_the_proof_counts(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.faults.append(Fault("DELETE", "/pods/", "status", 999, 403, "Forbidden"))
    ran = verify(run)
    (pod,) = gpu_node.store.list("Pod")
    assert (ran.code, ran.document["status"]) == (0, "warn")
    assert ran.document["data"]["pod"]["removed"] is False
    assert f"delete pod {pod['metadata']['name']}" in ran.document["messages"][0]
    gpu_node.store.delete("Pod", pod["metadata"]["name"], "default")


def test_missing_right_to_list_events_does_not_stop_verify(gpu_node: ApiServer, run: Gpunode) -> None:
    gpu_node.faults.append(Fault("GET", "/events", "status", 999, 403, "Forbidden"))
    ran = verify(run)
    assert ran.code == 0 and "may not list events" in ran.err


# --- interrupts -----------------------------------------------------------------------------------------


def struck(api: ApiServer, home: Path, number: signal.Signals) -> tuple[int, str]:
    """Exit code and standard error of a run that is sent a signal while its pod runs."""
    api.pod_life = [RUNNING]
    path = home / "kubeconfig"
    path.write_text(kubeconfig(api))
    env = clean_environment({"HOME": str(home), "KUBECONFIG": str(path), "NODE_NAME": "gpu-1"})
    words = command("verify", "--on", "kubernetes")
    with subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert eventually(lambda: any("/pods/gpunode" in one.path for one in list(api.asked)))
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=PATIENCE)
    return process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda one: one.name)
def test_signal_ends_verify_and_removes_the_pod(
    gpu_node: ApiServer, tmp_path: Path, number: signal.Signals
) -> None:
    code, err = struck(gpu_node, tmp_path, number)
    assert code == 130, err
    assert gpu_node.store.list("Pod") == []


@pytest.mark.skipif(not Path("/etc/machine-id").is_file(), reason="this machine has no machine-id")
def test_pod_of_a_run_killed_just_now_is_removed_by_the_next(
    gpu_node: ApiServer, run: Gpunode, tmp_path: Path
) -> None:
    assert struck(gpu_node, tmp_path, signal.SIGKILL)[0] == -signal.SIGKILL
    assert len(gpu_node.store.list("Pod")) == 1
    gpu_node.pod_life = [SUCCEEDED]
    assert verify(run).code == 0
    assert gpu_node.store.list("Pod") == []


def test_leftovers_of_a_killed_run_are_removed_by_the_next(gpu_node: ApiServer, run: Gpunode) -> None:
    def leave_pod(name: str, when: str, host: str, **labels: str) -> None:
        marks = {"app.kubernetes.io/managed-by": "gpunode", "app.kubernetes.io/name": "gpunode-vector-add"}
        spec = {"nodeSelector": {"kubernetes.io/hostname": host}, "activeDeadlineSeconds": 330}
        metadata = {"name": name, "creationTimestamp": when, "labels": {**marks, **labels}}
        gpu_node.store.put("Pod", {"metadata": metadata, "spec": spec}, "default")

    run_mark = {"gpunode/run": "0123"}
    leave_pod("old", "2020-01-01T00:00:00Z", "gpu-1", **run_mark)
    leave_pod("fresh", "2999-01-01T00:00:00Z", "gpu-1", **run_mark)
    leave_pod("elsewhere", "2020-01-01T00:00:00Z", "gpu-2", **run_mark)
    leave_pod("by-hand", "2020-01-01T00:00:00Z", "gpu-1")
    assert verify(run).code == 0
    assert [one["metadata"]["name"] for one in gpu_node.store.list("Pod")] == [
        "by-hand",
        "elsewhere",
        "fresh",
    ]
    for name in ("by-hand", "elsewhere", "fresh"):
        gpu_node.store.delete("Pod", name, "default")


def test_printed_rbac_rules_are_those_that_verify_uses(gpu_node: ApiServer, run: Gpunode) -> None:
    """`gpunode manifests rbac --for verify`: a missing verb would stop it, an additional one is a risk."""
    assert verify(run).code == 0
    used = set()
    for asked in gpu_node.asked:
        parts = asked.path.strip("/").split("/")
        plural = next(one for one in reversed(parts) if one in {"nodes", "runtimeclasses", "pods", "events"})
        named = parts[-1] != plural
        kind = "pods/log" if parts[-1] == "log" else plural
        verb = {"POST": "create", "DELETE": "delete"}.get(asked.method, "get" if named else "list")
        used.add((kind, verb))
    granted = {
        (resource, verb)
        for one in yaml.safe_load_all(run("manifests", "rbac", "--for", "verify").out)
        for rule in one.get("rules", ())
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert used == granted
