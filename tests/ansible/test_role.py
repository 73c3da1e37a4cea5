"""The role gpu_node and the playbooks: variables and syntax. tests/machine/test_fleet.py runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures.api_server import ApiServer, Listening, kubeconfig, make_certificates
from fixtures.machines import recorded_host
from scripts.build_packages import collection
from tests.ansible.controller import COLLECTION, Controller, require_ansible
from tests.cli import Ran

pytestmark = pytest.mark.xdist_group("ansible-collection")
ROLE = COLLECTION / "roles/gpu_node"


def test_variables_are_documented_with_their_defaults() -> None:
    specs = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]
    options = {**specs["main"]["options"], **specs["report"]["options"]}
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
    described = {name: one["default"] for name, one in options.items() if "default" in one}
    assert described == defaults


def test_ansible_doc_prints_the_role(controller: Controller) -> None:
    done = controller.run("ansible-doc", "-t", "role", "gpunode.node.gpu_node")
    assert done.code == 0, done.err
    assert "gpu_node_package" in done.out and "gpu_node_report_program" in done.out


def test_playbooks_are_valid(controller: Controller) -> None:
    books = [f"gpunode.node.{path.stem}" for path in sorted((COLLECTION / "playbooks").glob("*.yml"))]
    assert books == ["gpunode.node.report", "gpunode.node.rolling"]
    done = controller.run("ansible-playbook", "--syntax-check", "-i", "localhost,", *books)
    assert done.code == 0, done.out + done.err


def test_the_archive_has_the_collection_and_its_license(tmp_path: Path) -> None:
    require_ansible()
    with tarfile.open(collection(tmp_path)) as archive:
        names = set(archive.getnames())
    assert {"MANIFEST.json", "FILES.json", "LICENSE", "README.md", "meta/runtime.yml"} <= names
    assert {"playbooks/rolling.yml", "plugins/modules/runtime.py", "plugins/module_utils/gpunode.py"} <= names
    assert {"roles/gpu_node/tasks/main.yml", "roles/gpu_node/meta/argument_specs.yml"} <= names
    assert not [name for name in names if "ruff" in name or "pycache" in name or name.startswith(".")]


REBOOTS = {
    # a machine, whether a reboot is allowed, and what the role says; "" is no reboot
    "allowed": ("driver-lib-mismatch", True, "reboot with local connection would reboot the control node"),
    "not allowed": ("driver-lib-mismatch", False, "this node must be rebooted (driver-lib-mismatch)"),
    "not needed": ("healthy-h100", True, ""),
    "not safe": ("dkms-not-built", True, "that is not safe now (dkms-not-built)"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", REBOOTS)
def test_a_node_is_rebooted_only_if_that_is_needed_and_allowed(
    name: str, controller: Controller, tmp_path: Path
) -> None:
    """Ansible refuses to reboot the machine that it runs on, which shows that the role asked for it."""
    machine, allowed, message = REBOOTS[name]
    driver = "a new driver" if name == "not safe" else ""
    variables = {"gpu_node_reboot": allowed, "gpu_node_driver_result": {"reboot": driver}}
    done = run_role(controller, machine, tmp_path, variables, tasks_from="reboot")
    assert (done.code == 0) == (message == ""), done.out + done.err
    assert message in " ".join((done.out + done.err).split())


def run_role(
    controller: Controller, machine: str, place: Path, variables: dict[str, Any], tasks_from: str = "main"
) -> Ran:
    """The role on this machine, where gpunode sees a recorded one."""
    root = place / machine
    if not root.exists():
        recorded_host(machine, root)
    program = place / "bin/gpunode"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpunode --root={root} "$@"\n')
    program.chmod(0o755)
    role = {"name": "gpunode.node.gpu_node", "tasks_from": tasks_from}
    task = {"ansible.builtin.include_role": role, "vars": variables}
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    file = place / "play.json"
    play = {"hosts": "localhost", "gather_facts": False, "environment": path, "tasks": [task]}
    file.write_text(json.dumps([play]))
    here = ("-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}")
    return controller.run("ansible-playbook", *here, str(file))


MARK = "gpunode.io/cordoned-by"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    """An API server with the node gpu1, and a kubectl that uses it in tmp_path/kubectl."""
    if shutil.which("kubectl") is None:
        assert not os.environ.get("CI"), "kubectl is missing"
        pytest.skip("kubectl is missing")
    server = ApiServer()
    server.add_node("gpu1")
    with Listening(server, make_certificates(tmp_path)):
        (tmp_path / "config").write_text(kubeconfig(server))
        options = f"--kubeconfig={tmp_path}/config --cache-dir={tmp_path}/cache"
        (tmp_path / "kubectl").write_text(f'#!/bin/sh\nexec kubectl {options} "$@"\n')
        (tmp_path / "kubectl").chmod(0o755)
        yield server


@pytest.mark.full
def test_a_run_uncordons_only_what_the_role_has_cordoned(
    controller: Controller, api: ApiServer, tmp_path: Path
) -> None:
    """A run for driver-lib-mismatch fails at the reboot of this machine, which Ansible refuses."""
    kubectl = str(tmp_path / "kubectl")

    def run(machine: str, code: int, *drain_options: str) -> str:
        variables = {
            **{f"gpu_node_{name}": False for name in ("runtime", "verify")},
            **{f"gpu_node_{name}": True for name in ("drain", "reboot")},
            "gpu_node_kubectl": kubectl,
            "gpu_node_kubernetes_name": "gpu1",
            "gpu_node_drain_options": ["--ignore-daemonsets", *drain_options],
        }
        done = run_role(controller, machine, tmp_path, variables)
        assert done.code == code, done.out + done.err
        return " ".join((done.out + done.err).split())

    def state() -> tuple[bool, str | None]:
        node = api.node("gpu1")
        cordoned = node["spec"].get("unschedulable", False)
        return cordoned, node["metadata"].get("annotations", {}).get(MARK)

    assert "would reboot the control node" in run("driver-lib-mismatch", 2)
    assert state() == (True, "gpunode.node.gpu_node")
    run("healthy-h100", 0)
    assert state() == (False, None)

    undrained = "gpu1 was not drained, and nothing was changed: "
    printed = run("driver-lib-mismatch", 2, "--wrong")
    assert undrained in printed and "unknown flag: --wrong" in printed, printed
    assert state() == (False, None)
    subprocess.run([kubectl, "cordon", "gpu1"], check=True, capture_output=True)  # by an administrator
    assert undrained in run("driver-lib-mismatch", 2, "--wrong")
    run("healthy-h100", 0)
    assert state() == (True, None)
