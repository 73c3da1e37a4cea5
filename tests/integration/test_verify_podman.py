"""Vector-add in a container of a real podman, by CDI alone: only the driver, a stub, is on the node."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.scenario import Fault, mig_uuid, mixed_layout, with_mig
from tests.cli import checked
from tests.integration.cdi_node import CdiNode, cdi_node
from tests.integration.conftest import require
from tests.integration.podman_node import PodmanNode
from tests.integration.verify_support import GPUS, UUIDS

pytestmark = [pytest.mark.podman, pytest.mark.containers]
CUT = with_mig(GPUS, 1, mixed_layout(1))
# crun, podman's first choice, refuses hybrid cgroups, and without CAP_SYS_RESOURCE no limit may be raised
CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""
LEFTOVERS = "podman ps --all --quiet; podman images --quiet"
HANGING = GPUS.with_faults(Fault("cuInit", hang=60.0))
# ends a run by a signal once its container runs; prints its exit code, its leftovers, those of the next run
ENDED_BY = """\
import json, signal, subprocess, sys, time
def podman(*argv):
    return subprocess.run(["podman", *argv], capture_output=True, text=True, check=True).stdout.split()
def held():
    images = podman("images", "--format", "{{.Repository}}:{{.Tag}}")
    return podman("ps", "--all", "--format", "{{.Names}}") + images
verify = [sys.executable, "-m", "gpunode", "verify", "--on", "podman"]
child = subprocess.Popen(verify, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
deadline = time.monotonic() + 120
while not podman("ps", "--quiet") and child.poll() is None and time.monotonic() < deadline:
    time.sleep(0.1)
child.send_signal(getattr(signal, "SIG" + sys.argv[1]))
code, left = child.wait(), held()
if sys.argv[1] == "KILL":
    subprocess.run([*verify, "--timeout", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(json.dumps([code, left, held()]))
"""


class Node:
    """podman in its namespace, and the driver; `run` writes the specification where podman searches."""

    def __init__(self, directory: Path) -> None:
        require("podman", "runc", "gcc")
        (directory / "podman").mkdir()
        self.podman = PodmanNode(directory / "podman").prepare()
        (self.podman.etc / "containers.conf").write_text(CONF)
        self.gpus: CdiNode = cdi_node(directory, CUT)

    def shell(self, script: str) -> subprocess.CompletedProcess[str]:
        stubs = [f"{name}={value}" for name, value in self.gpus.stubs.env.items()]
        place = f"mkdir -p /run/cdi; mount --bind {self.gpus.specs} /run/cdi; "
        return self.podman.run(
            "env", *stubs, f"GPUNODE={sys.executable} -m gpunode", "sh", "-c", place + script
        )

    def verify(self, *options: str) -> tuple[int, Any]:
        """The exit code and the document; podman must hold nothing afterwards."""
        asked = " ".join(("$GPUNODE verify --on podman -o json", *options))
        done = self.shell(f'{asked}; code=$?; test -z "$({LEFTOVERS})" || exit 77; exit $code')
        assert done.returncode != 77, "podman still holds something"
        return done.returncode, checked(done.stdout)

    def ended_by(self, name: str) -> tuple[int, list[str], list[str]]:
        """See `ENDED_BY`."""
        (self.podman.directory / "ended_by.py").write_text(ENDED_BY)
        done = self.shell(f"{sys.executable} {self.podman.directory}/ended_by.py {name}")
        assert done.returncode == 0, done.stderr
        code, left, after = json.loads(done.stdout)
        return code, left, after


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def error(document: Any) -> tuple[str, str, str]:
    first = document["errors"][0]
    return first["code"], first["message"], first["hint"]


def test_node_with_only_the_driver_computes_in_containers(node: Node) -> None:
    node.gpus.generate()
    code, document = node.verify()
    assert code == 0, document
    data = document["data"]
    assert (data["on"], data["via"]) == ("podman", "cdi nvidia.com/gpu=all")
    assert [one["uuid"] for one in data["devices"]] == [UUIDS[0], *(mig_uuid(1, i) for i in range(4))]
    assert {(one["status"], one["maxError"]) for one in data["devices"]} == {("ok", 0.0)}


@pytest.mark.full
def test_gpu_with_wrong_results_is_reported_by_the_container(node: Node) -> None:
    node.gpus.generate()
    node.gpus.stubs.write(CUT.with_gpu(0, wrong=True))
    code, document = node.verify("--cdi")
    assert (code, [one["status"] for one in document["data"]["devices"]]) == (1, ["fail", *["ok"] * 4])


@pytest.mark.full
def test_missing_specification_is_reported_before_any_object_is_created(node: Node) -> None:
    code, document = node.verify()
    assert (code, error(document)[0], error(document)[2]) == (
        3,
        "cdi-no-specification",
        "gpunode cdi refresh",
    )
    assert "/var/run/cdi" in error(document)[1]


@pytest.mark.full
def test_missing_library_is_named_with_the_specification(node: Node) -> None:
    node.gpus.generate().libcuda.unlink()
    code, document = node.verify()
    assert (code, error(document)[0]) == (1, "cdi-stale")
    assert f"/var/run/cdi/nvidia.yaml names {node.gpus.libcuda}, which does not exist" in error(document)[1]


@pytest.mark.full
def test_missing_device_file_is_named_with_the_specification(node: Node) -> None:
    (node.gpus.generate().root / "dev/nvidia0").unlink()
    code, document = node.verify()
    assert (code, error(document)[0]) == (1, "cdi-stale")
    assert f"{node.gpus.root}/dev/nvidia0" in error(document)[1]


@pytest.mark.full
def test_specification_too_new_for_podman_is_named_with_both_versions(node: Node) -> None:
    node.gpus.generate().write({**node.gpus.tree(), "cdiVersion": "9.9.0"})
    code, document = node.verify()
    assert (code, error(document)[0]) == (1, "cdi-unresolvable")
    assert "nvidia.yaml is written for CDI 9.9.0, and podman 4." in error(document)[1]


@pytest.mark.full
def test_specification_without_the_device_lists_its_devices(node: Node) -> None:
    tree: Any = node.gpus.generate().tree()
    tree["devices"] = [device for device in tree["devices"] if device["name"] != "all"]
    node.gpus.write(tree)
    code, document = node.verify()
    assert (code, error(document)[0]) == (1, "cdi-unresolvable")
    assert "names no device all; it has 0, " in error(document)[1]


@pytest.mark.full
def test_driver_outside_the_loader_path_is_no_proof(node: Node) -> None:
    """It lies where NVIDIA's images look, and where no other image's loader does."""
    tree: Any = node.gpus.generate().tree()
    for mount in tree["containerEdits"]["mounts"]:
        name = mount["containerPath"].rpartition("/")[2]
        if name.startswith("libcuda"):
            mount["containerPath"] = f"/usr/local/nvidia/lib64/{name}"
    node.gpus.write(tree)
    code, document = node.verify()
    assert (code, error(document)[0]) == (1, "driver-not-injected")
    assert "not where a loader" in error(document)[1]


@pytest.mark.full
def test_interrupt_leaves_no_objects(node: Node) -> None:
    node.gpus.generate().stubs.write(HANGING)
    assert node.ended_by("INT") == (130, [], [])


@pytest.mark.full
def test_leftovers_of_a_killed_run_are_removed_by_the_next(node: Node) -> None:
    node.gpus.generate().stubs.write(HANGING)
    code, left, after = node.ended_by("KILL")
    assert code == -signal.SIGKILL
    assert [what for what in left if what.startswith("gpunode-verify-")]
    assert [what for what in left if what.startswith("gpunode.local/verify:")]
    assert after == []


@pytest.mark.full
def test_missing_image_is_never_pulled(node: Node) -> None:
    node.gpus.generate()
    code, document = node.verify("--image", "registry.invalid/cuda:12")
    assert (code, error(document)[2]) == (3, "podman pull registry.invalid/cuda:12")
