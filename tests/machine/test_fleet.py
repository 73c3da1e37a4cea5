"""The Ansible collection on three booted nodes: rolling configuration with a broken node, the fleet report.

The tests follow one another on the same nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.api_server import ApiServer, Listening, kubeconfig, make_certificates
from gpunode import __version__
from tests.ansible.controller import require_ansible
from tests.cli import Ran
from tests.dist import BUNDLE, NEXT
from tests.machine.booted import SCENARIO, SHARED, SPACE, apt
from tests.machine.conftest import SUITES
from tests.machine.fleet import NAMES, Fleet, booted_fleet, changes, recap
from tests.machine.test_kubernetes import UNIT, becomes, node_with_kubelet
from tests.memory import temporary
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("suite", SUITES[:1], indirect=True)
CONTAINERD = "/etc/containerd/config.toml"
# one node, and then the others together, of which half may fail
BATCHES = {"gpu_node_serial": [1, 2], "gpu_node_max_fail_percentage": 50}
TOGETHER = {"gpu_node_serial": 3, "gpu_node_max_fail_percentage": 50}
OLDER = "580.159.03"
MODULE_VERSIONS = ("driver-files/nvidia/version", "module/nvidia/version")
"""Files of a node, in `Machine.shared`, with the version of the loaded module."""
CRI_TABLE = '[plugins."io.containerd.grpc.v1.cri"]\n'


@pytest.fixture(scope="module")
def fleet(suite: str) -> Iterator[Fleet]:
    require_ansible()
    with temporary("gpunode-fleet-", SPACE) as place, booted_fleet(suite, place) as nodes:
        yield nodes


def debian_file(fleet: Fleet) -> str:
    """containerd's file as the nodes had it at first."""
    return (fleet.machines["node1"].layers[0] / CONTAINERD[1:]).read_text()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with the three nodes."""
    server = ApiServer()
    for name in NAMES:
        server.add_node(name)
    with Listening(server, make_certificates(tmp_path_factory.mktemp("certificates"))):
        yield server


@pytest.fixture(scope="module")
def kubectl(api: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The real kubectl, in the network namespace of this process, where the API server listens."""
    if shutil.which("kubectl") is None:
        assert not os.environ.get("CI"), "kubectl is missing"
        pytest.skip("kubectl is missing")
    place = tmp_path_factory.mktemp("kubectl")
    (place / "config").write_text(kubeconfig(api))
    program = place / "kubectl"
    options = f"--kubeconfig={place}/config --cache-dir={place}/cache"
    program.write_text(f'#!/bin/sh\nexec nsenter --target {os.getpid()} --net kubectl {options} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture(scope="module")
def variables(dist: Path) -> dict[str, object]:
    """Install the .deb, and configure containerd."""
    return {
        "gpu_node_package": str(dist / f"gpunode_{__version__}_amd64.deb"),
        "gpu_node_engines": ["containerd"],
    }


def cordon(unschedulable: bool | None, by: str | None) -> dict[str, object]:
    """The request by which the role cordons or uncordons a node."""
    annotations = {"gpunode.io/cordoned-by": by}
    return {"metadata": {"annotations": annotations}, "spec": {"unschedulable": unschedulable}}


def test_a_node_without_gpunode_is_one_clear_error(fleet: Fleet) -> None:
    done = fleet.play("rolling", "--limit", "node1")
    assert recap(done)["node1"]["failed"] == 1
    assert "gpunode is not installed on this node; hint: install gpunode with the role" in done.out + done.err


def test_a_user_who_may_not_use_sudo_gets_the_error_of_ansible(
    fleet: Fleet, variables: dict[str, object]
) -> None:
    done = fleet.play("rolling", "--limit", "node1", ansible_user="ben", **variables)
    assert done.code == 2 and "Missing sudo password" in done.out + done.err
    assert fleet.machines["node1"].run("test", "-e", "/opt/gpunode").code == 1


def test_check_mode_installs_nothing(fleet: Fleet, variables: dict[str, object]) -> None:
    done = fleet.play("rolling", "--check", **TOGETHER, **variables)
    assert done.code == 0 and changes(done) == dict.fromkeys(NAMES, 1), done.out + done.err
    assert "would be installed; the next steps are known only then" in done.out
    for machine in fleet.machines.values():
        assert machine.run("test", "-e", "/opt/gpunode").code == 1


def test_a_node_that_refuses_its_configuration_does_not_stop_the_others(
    fleet: Fleet, variables: dict[str, object], kubectl: str, api: ApiServer
) -> None:
    """The engine of node2 refuses its own file, in which an administrator made a mistake."""
    node2 = fleet.machines["node2"]
    good = node2.sh(f"cat {CONTAINERD}")
    assert CRI_TABLE in good
    wrong = good.replace(CRI_TABLE, f"{CRI_TABLE}    sandbox_image = 5\n")
    node2.write(CONTAINERD, wrong)
    drain = {"gpu_node_drain": True, "gpu_node_kubectl": kubectl}
    done = fleet.play("rolling", **BATCHES, **variables, **drain)
    printed = done.out + done.err
    assert {name: counts["failed"] for name, counts in recap(done).items()} == {
        "node1": 0,
        "node2": 1,
        "node3": 0,
    }, printed
    assert (
        f"containerd refuses {CONTAINERD} as it is" in printed and "to string; hint: see it with:" in printed
    )
    assert node2.sh(f"cat {CONTAINERD}") == wrong
    for name in NAMES:
        patches = [one.body for one in api.asked if one.method == "PATCH" and one.path.endswith(f"/{name}")]
        drained = [cordon(True, "gpunode.node.gpu_node"), cordon(None, None)]
        # the node that failed stays cordoned
        assert patches == (drained[:1] if name == "node2" else drained)
    for name in ("node1", "node3"):
        assert "nvidia-container-runtime" in fleet.machines[name].sh(f"cat {CONTAINERD}")
    node2.write(CONTAINERD, good)


def test_check_mode_predicts_the_change(fleet: Fleet, variables: dict[str, object]) -> None:
    node2 = fleet.machines["node2"]
    before = node2.sh(f"cat {CONTAINERD}; systemctl show containerd --property MainPID")
    done = fleet.play("rolling", "--check", "--diff", **TOGETHER, **variables)
    assert done.code == 0 and changes(done) == {"node1": 0, "node2": 1, "node3": 0}, done.out + done.err
    assert '+        BinaryName = "/usr/bin/nvidia-container-runtime"' in done.out
    assert node2.sh(f"cat {CONTAINERD}; systemctl show containerd --property MainPID") == before


def test_an_unreachable_daemon_does_not_stop_the_others(fleet: Fleet, variables: dict[str, object]) -> None:
    """containerd of node3 does not run, and systemd may not start it."""
    node3 = fleet.machines["node3"]
    node3.write(CONTAINERD, debian_file(fleet))
    node3.sh("systemctl mask --now containerd")
    done = fleet.play("rolling", **BATCHES, **variables)
    printed = done.out + done.err
    assert (recap(done)["node1"]["failed"], recap(done)["node3"]["failed"]) == (0, 1), printed
    assert "Unit containerd.service is masked" in printed
    assert changes(done)["node1"] == 0 and changes(done)["node2"] == 1
    assert "nvidia-container-runtime" in fleet.machines["node2"].sh(f"cat {CONTAINERD}")
    node3.sh("systemctl unmask containerd; systemctl start containerd")


def test_a_rerun_finishes_what_is_left_and_another_changes_nothing(
    fleet: Fleet, variables: dict[str, object], kubectl: str, api: ApiServer
) -> None:
    done = fleet.play("rolling", **TOGETHER, **variables)
    assert done.code == 0 and changes(done) == {"node1": 0, "node2": 0, "node3": 1}, done.out + done.err
    api.asked.clear()
    drain = {"gpu_node_drain": True, "gpu_node_kubectl": kubectl}
    # the role cordoned node2 in a run that failed
    again = fleet.play("rolling", **drain, **TOGETHER, **variables)
    assert again.code == 0 and changes(again) == {"node1": 0, "node2": 1, "node3": 0}, again.out + again.err
    assert [(one.path, one.body) for one in api.changes()] == [("/api/v1/nodes/node2", cordon(None, None))]
    api.asked.clear()
    again = fleet.play("rolling", **drain, **TOGETHER, **variables)
    assert again.code == 0 and changes(again) == dict.fromkeys(NAMES, 0), again.out + again.err
    assert api.changes() == [], "nothing restarts, so no node is drained"


def problems(report: dict[str, Any], *statuses: str) -> set[str]:
    """The checks that ended with one of the statuses, by default with an error or a warning."""
    return {
        one["id"] for one in report["data"]["findings"] if one["status"] in (statuses or ("fail", "warn"))
    }


def test_the_report_distinguishes_unreachable_nodes_from_faults(fleet: Fleet, tmp_path: Path) -> None:
    # the module that node2 has loaded is older than its libraries
    for name in MODULE_VERSIONS:
        file = fleet.machines["node2"].shared / name
        file.write_text(file.read_text().replace(SCENARIO.driver, OLDER))
    fleet.cut("node3")
    page = tmp_path / "fleet.html"
    program = tmp_path / "gpunode"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpunode "$@"\n')
    program.chmod(0o755)
    # a connection that is kept open would not notice the cut for minutes
    lost = {"ansible_ssh_args": "-o ControlMaster=no -o ControlPath=none -o ConnectTimeout=5"}
    reports: list[dict[str, Any]] = []

    def docker_is_examined() -> bool:
        """dockerd starts other programs before it answers: on a busy machine later than the doctor waits."""
        done = fleet.play("report", gpu_node_report=str(page), gpu_node_report_program=str(program), **lost)
        assert done.code == 0 and changes(done) == dict.fromkeys(recap(done), 0), done.out + done.err
        reports[:] = [json.loads(line) for line in Path(f"{page}.jsonl").read_text().splitlines()]
        return all("docker-runtime-missing" in problems(report) for report in reports[:2])

    assert eventually(docker_is_examined), reports
    assert [one["data"]["node"]["name"] for one in reports] == list(NAMES)
    # a node's own doctor may see more than this test broke: the machines share a kernel and a disk
    faults = [problems(report, "fail") for report in reports[:2]]
    assert faults[1] - faults[0] == {"driver-lib-mismatch"}, faults
    assert (
        reports[2]["errors"][0]["code"] == "unreachable" and "port 22" in reports[2]["errors"][0]["message"]
    )
    text = page.read_text()
    assert '<p class="verdict">1 unreachable, ' in text
    assert "<code>driver-lib-mismatch</code>" in text and "1 of 2 nodes: node2" in text
    assert "<code>docker-runtime-missing</code>" in text and "2 of 2 nodes: node1, node2" in text
    assert f"<dt>{OLDER}</dt><dd><p>1 node: node2</p></dd>" in text


def test_a_node_with_a_new_driver_is_drained_rebooted_proven_and_uncordoned(
    fleet: Fleet, variables: dict[str, object], kubectl: str, api: ApiServer
) -> None:
    """node2 has libraries that are newer than the loaded module, as an upgrade of the driver leaves them."""
    node2 = fleet.machines["node2"]
    while_down = []

    def load_the_new_module() -> None:
        while_down.append(api.node("node2")["spec"]["unschedulable"])
        for name in MODULE_VERSIONS:
            file = node2.shared / name
            file.write_text(file.read_text().replace(OLDER, SCENARIO.driver))

    drain = {"gpu_node_drain": True, "gpu_node_kubectl": kubectl}
    done = fleet.play_with_reboot("node2", load_the_new_module, gpu_node_reboot=True, **drain, **variables)
    assert done.code == 0 and while_down == [True], done.out + done.err
    steps = ("Move the pods", "Reboot the node]", "Prove that GPUs compute", "Uncordon the node")
    places = [done.out.index(f"TASK [gpunode.node.gpu_node : {step}") for step in steps]
    assert places == sorted(places) and changes(done) == {"node2": 4}, done.out + done.err
    assert "unschedulable" not in api.node("node2")["spec"]


def play_package(fleet: Fleet, package: Path, variables: dict[str, object]) -> Ran:
    """Configure node2 with gpunode of this file."""
    return fleet.play("rolling", "--limit", "node2", **variables | {"gpu_node_package": str(package)})


def is_installed_once(fleet: Fleet, package: Path, variables: dict[str, object]) -> None:
    """The role installs the file on node2, and a second run changes nothing."""
    done = play_package(fleet, package, variables)
    assert done.code == 0 and changes(done)["node2"] > 0, done.out + done.err
    assert fleet.machines["node2"].gpunode("--version").out == f"gpunode {__version__}\n"
    again = play_package(fleet, package, variables)
    assert again.code == 0 and changes(again) == {"node2": 0}, again.out + again.err


def test_bundle_and_wheel_are_installed_once_and_not_over_each_other(
    fleet: Fleet, variables: dict[str, object], dist: Path
) -> None:
    node2 = fleet.machines["node2"]
    apt(node2, "purge", "gpunode")
    bundle, wheel_file = dist / f"{BUNDLE}.tar.gz", dist / f"gpunode-{__version__}-py3-none-any.whl"
    is_installed_once(fleet, bundle, variables)
    assert node2.show(UNIT)["LoadState"] == "loaded"
    refused = play_package(fleet, wheel_file, variables | {"gpu_node_version": "9"})
    assert "/opt/gpunode exists and was not installed from a wheel; hint: " in refused.out + refused.err
    shutil.copy(bundle, node2.shared)
    node2.sh(f"cd /tmp && tar -xzf {SHARED}/{bundle.name} && {BUNDLE}/install.sh --remove")
    is_installed_once(fleet, wheel_file, variables)
    node2.sh("rm -r /opt/gpunode /usr/local/bin/gpunode")


@pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="rpmbuild is not installed")
def test_rpm_is_installed_once(
    fleet: Fleet, variables: dict[str, object], dist: Path, tmp_path: Path
) -> None:
    """By dnf, on a Debian; Ansible itself would take apt for its package manager."""
    node2 = fleet.machines["node2"]
    shutil.copy(python_rpm(tmp_path), node2.shared / "python3.rpm")
    node2.sh(f"dnf -y install {SHARED}/python3.rpm")
    package = dist / f"gpunode-{__version__}-1.x86_64.rpm"
    is_installed_once(fleet, package, variables | {"ansible_facts": {"pkg_mgr": "dnf"}})
    assert f"{__version__}-1" in node2.sh("dnf -q list installed gpunode")
    assert node2.show(UNIT)["LoadState"] == "loaded"


def python_rpm(place: Path) -> Path:
    """An empty rpm that provides what gpunode's needs: Debian has its Python and its shell in no rpm."""
    spec = place / "python3.spec"
    spec.write_text(
        "Name: python3\nVersion: 3.11.2\nRelease: 1\nProvides: /bin/sh\nSummary: empty\nLicense: none\n"
        "BuildArch: noarch\n%description\nempty\n%files\n"
    )
    build = ("rpmbuild", "-bb", "--define", f"_topdir {place}", "--define", f"_rpmdir {place}", spec)
    subprocess.run(build, check=True, capture_output=True)
    return next(place.rglob("python3-*.rpm"))


def test_an_upgrade_and_the_device_plugin(fleet: Fleet, variables: dict[str, object], dist: Path) -> None:
    node1 = node_with_kubelet(fleet.machines["node1"])
    wanted = variables | {
        "gpu_node_package": str(dist / f"gpunode_{NEXT}_amd64.deb"),
        "gpu_node_plugin": True,
        "gpu_node_environment": {"GPUNODE_PLUGIN_SERVE_LOG_LEVEL": "info"},
    }
    done = fleet.play("rolling", "--limit", "node1", **wanted)
    assert done.code == 0, done.out + done.err
    assert "RUNNING HANDLER [gpunode.node.gpu_node : Restart the device plugin]" in done.out
    becomes(node1, "2")
    assert node1.sh("dpkg-query --show --showformat='${Version}' gpunode") == NEXT
    assert node1.sh("tail -n 1 /etc/gpunode/env") == "GPUNODE_PLUGIN_SERVE_LOG_LEVEL=info\n"
