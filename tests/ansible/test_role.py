"""The role gpu_node and the playbooks: variables and syntax. tests/machine/test_fleet.py runs them."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from fixtures.machines import recorded_host
from scripts.build_packages import collection
from tests.ansible.controller import COLLECTION, Controller, require_ansible

pytestmark = pytest.mark.xdist_group("ansible-collection")
ROLE = COLLECTION / "roles/gpu_node"


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    require_ansible()
    return Controller(tmp_path / "controller")


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
    root = recorded_host(machine, tmp_path / "node").root
    program = tmp_path / "bin/gpunode"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpunode --root={root} "$@"\n')
    program.chmod(0o755)
    tasks = {"name": "gpunode.node.gpu_node", "tasks_from": "reboot"}
    task = {
        "ansible.builtin.include_role": tasks,
        "vars": {"gpu_node_reboot": allowed, "gpu_node_driver_result": {"reboot": driver}},
    }
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    file = tmp_path / "play.json"
    play = {"hosts": "localhost", "gather_facts": False, "environment": path, "tasks": [task]}
    file.write_text(json.dumps([play]))
    here = ("-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}")
    done = controller.run("ansible-playbook", *here, str(file))
    assert (done.code == 0) == (message == ""), done.out + done.err
    assert message in " ".join((done.out + done.err).split())
