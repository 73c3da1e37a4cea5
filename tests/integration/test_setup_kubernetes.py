"""`gpunode setup --kubernetes` on a live node: containerd, the plugin and the proofs are real.

The kubelet is gpunode's own stub, systemctl one of the test, the API server fixtures/api_server.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.api_server import ApiServer, Fault, Listening, kubeconfig, make_certificates
from fixtures.stubs import have_compiler
from tests.cli import Ran
from tests.integration.conftest import refuse_for, require
from tests.integration.kubernetes_node import UNIT, KubernetesNode, kubernetes_node

pytestmark = [pytest.mark.containerd, pytest.mark.full]
NAME = "gpu-1"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
PASSED = {
    "phase": "Succeeded",
    "containerStatuses": [{"name": "vector-add", "state": {"terminated": {"exitCode": 0}}}],
}


# the process that starts it may ignore SIGINT, and its children would inherit that
_AS_FROM_A_TERMINAL = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    " from gpunode.cli import main; main()"
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[KubernetesNode]:
    require("containerd", "ctr", "runc", "unshare")
    if not have_compiler():
        refuse_for(["gcc"])
    with kubernetes_node(tmp_path, NAME) as made:
        yield made


@pytest.fixture
def api(node: KubernetesNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """With the node, for which `node` has a kubeconfig."""
    server = ApiServer()
    server.add_node(NAME)
    server.pod_life = [{"phase": "Pending"}, PASSED]
    server.logs = {"": "[Vector addition of 50000 elements]\nTest PASSED\nDone\n"}
    with Listening(server, make_certificates(tmp_path_factory.mktemp("certificates"))):
        file = node.place / "kubeconfig"
        file.write_text(kubeconfig(server))
        node.environ["KUBECONFIG"] = str(file)
        yield server


def setup(node: KubernetesNode, *options: str) -> Ran:
    return node.gpunode("setup", "--kubernetes", *options, "-o", "json")


def states(ran: Ran) -> dict[str, str]:
    return {step["name"]: step["state"] for step in ran.document["data"]["steps"]}


def kinds(api: ApiServer) -> set[str]:
    return {kind for kind in ("RuntimeClass", "DaemonSet", "ServiceAccount", "Pod") if api.store.list(kind)}


def has_unit(node: KubernetesNode) -> bool:
    return node.sh(f"test -e {UNIT_FILE} && echo yes || echo no") == "yes\n"


def test_setup_runs_every_step_once_and_a_second_run_changes_nothing(
    node: KubernetesNode, api: ApiServer
) -> None:
    first = setup(node)
    assert first.code == 0, first.err + node.log()
    assert states(first) == {
        "doctor": "done",
        "toolkit": "right",
        "runtime": "done",
        "runtime-class": "done",
        "plugin": "done",
        "verify": "done",
    }
    assert node.calls() == [
        "systemctl restart containerd.service",
        "systemctl daemon-reload",
        f"systemctl enable --now {UNIT}",
    ]
    assert kinds(api) == {"RuntimeClass"}  # the proof's pod has been removed
    plugin = first.document["data"]["steps"][4]["result"]
    assert "2 of 2 nvidia.com/gpu healthy" in plugin["status"]

    asked, calls = len(api.changes()), node.calls()
    second = setup(node)
    assert second.code == 0, second.err
    again = states(second)
    assert {name for name, state in again.items() if state == "right"} == {
        *("toolkit", "runtime", "runtime-class", "plugin"),
    }
    assert node.calls() == calls
    assert [one.path.rpartition("/")[2] for one in api.changes()[asked:]][:1] == ["pods"]
    assert "RuntimeClass" not in {one.path for one in api.changes()[asked:]}

    printed = node.gpunode("setup", "--kubernetes")
    assert printed.code == 0, printed.err
    assert "Pods can request: 2 nvidia.com/gpu" in printed.out.splitlines()
    example = "To try it with an example pod: gpunode manifests vector-add | kubectl --kubeconfig "
    assert example in printed.out and "gpunode plugin status" in printed.out.splitlines()[-1]


@pytest.mark.containers
def test_without_an_api_server_a_container_is_the_proof(node: KubernetesNode) -> None:
    done = setup(node)
    assert done.code == 0, done.err + node.log()
    assert done.document["status"] == "warn"
    assert states(done) == {
        "doctor": "done",
        "toolkit": "right",
        "runtime": "done",
        "runtime-class": "left",
        "plugin": "done",
        "verify-host": "done",
        "verify-container": "done",
    }
    back = node.gpunode("rollback")
    assert back.code == 0, back.err
    assert not has_unit(node)
    assert f"systemctl disable --now {UNIT}" in node.calls()
    assert node.sh("ls /run/units") == ""


def test_plugin_that_does_not_start_is_rolled_back_and_a_later_run_continues(
    node: KubernetesNode, api: ApiServer
) -> None:
    (node.place / "broken").touch()
    failed = setup(node)
    assert failed.code == 4, failed.err
    assert states(failed) == {
        "doctor": "done",
        "toolkit": "right",
        "runtime": "done",
        "runtime-class": "done",
        "plugin": "failed",
        "verify": "waiting",
    }
    assert "Job for gpunode-device-plugin.service failed" in failed.document["errors"][0]["message"]
    assert not has_unit(node)

    (node.place / "broken").unlink()
    words = failed.document["data"]["goOn"].split()
    assert words[:3] == ["gpunode", "setup", "--kubernetes"]
    done = node.gpunode(*words[1:], "-o", "json")
    assert done.code == 0, done.err + node.log()
    assert states(done)["runtime"] == states(done)["runtime-class"] == "right"
    assert states(done)["plugin"] == "done"


def test_failed_registration_and_ctrl_c_leave_no_plugin(node: KubernetesNode, api: ApiServer) -> None:
    # the plugin offers its GPUs to no kubelet, so it is never ready
    (node.place / "environment").write_text(
        "GPUNODE_PLUGIN_SERVE_KUBELET_SOCKET=/var/lib/kubelet/none/kubelet.sock\n"
    )
    node.sh("mkdir -p /var/lib/kubelet/none")
    failed = setup(node, "--wait", "1")
    assert failed.code == 4, failed.err
    assert "the kubelet took no GPUs within 1 s" in failed.document["errors"][0]["message"]
    assert not has_unit(node)

    # Ctrl-C once the unit has been started, however long that takes
    before = sum("enable --now" in call for call in node.calls())
    script = (
        f'(until [ "$(grep -c "enable --now" {node.place}/calls)" -gt {before} ]; do sleep 0.05; done;'
        f" kill -INT $$) & exec {node.place}/venv/bin/python -c '{_AS_FROM_A_TERMINAL}'"
        " setup --kubernetes -o json"
    )
    stopped = node.cli.program("sh", "-c", script, env=node.environ)
    assert stopped.code == 130, stopped.err
    assert states(stopped)["plugin"] == "interrupted"
    assert states(stopped)["verify"] == "waiting"
    assert not has_unit(node)
    assert node.sh("ls /run/units") == ""


def test_daemon_set_is_rolled_back_if_its_pod_does_not_start(node: KubernetesNode, api: ApiServer) -> None:
    options = ("--plugin", "daemonset", "--image", "registry.test/gpunode:1")
    none = setup(node, *options, "--wait", "1")
    assert none.code == 4, none.err
    assert states(none)["node-label"] == "done"
    assert "no pod of the DaemonSet was made" in none.document["errors"][0]["message"]
    assert kinds(api) == {"RuntimeClass"}
    planned = setup(node, "--plugin", "daemonset", "--dry-run").document
    assert any("no registry has the image gpunode:" in message for message in planned["messages"])
    without_image = setup(node, "--plugin", "daemonset", "--wait", "1")
    assert without_image.code == 4 and "no registry has the image gpunode:" in without_image.err

    # replaces the DaemonSet's controller and the pod that the kubelet then starts
    serve = f"{node.place}/venv/bin/python -m gpunode plugin serve"
    node.sh(
        f"(while [ ! -e {node.place}/go ]; do sleep 0.1; done; exec setsid {serve})"
        f" > {node.place}/pod.log 2>&1 < /dev/null &"
    )
    api.faults.append(Fault("POST", "daemonsets", "meanwhile", act=(node.place / "go").touch))
    done = setup(node, *options)
    assert done.code == 0, done.err + (node.place / "pod.log").read_text()
    assert states(done)["node-label"] == "right"
    assert states(done)["plugin"] == states(done)["verify"] == "done"
    assert kinds(api) == {"RuntimeClass", "DaemonSet", "ServiceAccount"}
    assert states(setup(node, *options))["plugin"] == "right"
