"""The playbook report over recorded machines, reached by Ansible's local connection.

``GPUNODE_TEST_FLEET=100 pytest -s -m full tests/ansible/test_report.py`` measures a larger fleet.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import sys
import time
from pathlib import Path

import pytest

from fixtures.machines import names, recorded_host
from tests.ansible.controller import Controller, require_ansible

pytestmark = pytest.mark.full
NODES = int(os.environ.get("GPUNODE_TEST_FLEET", "4"))
BROKEN = {"broken": "a node whose gpunode is missing", "lost": "a node that no packet reaches"}


def test_every_node_is_on_the_page(tmp_path: Path) -> None:
    require_ansible()
    program = tmp_path / "gpunode"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m gpunode "$@"\n')
    program.chmod(0o755)
    machines = ["driver-lib-mismatch", "driver-lib-mismatch", "healthy-h100", *names()[: NODES - 3]]
    hosts: dict[str, dict[str, str]] = {
        f"node{number:03}": {"gpu_node_report_root": str(recorded_host(name, tmp_path / f"{number}").root)}
        for number, name in enumerate(machines, start=1)
    }
    hosts["broken"] = {"gpu_node_report_executable": str(tmp_path / "nothing")}
    # port 1 of this machine refuses the connection
    hosts["lost"] = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": "1"}
    common = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "gpu_node_report_executable": str(program),
        "gpu_node_report_program": str(program),
        "gpu_node_report": "fleet.html",
        "ansible_become_method": "ansible.builtin.sudo",
        "ansible_become_exe": program_without_sudo(tmp_path),
    }
    inventory = tmp_path / "inventory.json"
    inventory.write_text(json.dumps({"all": {"hosts": hosts, "vars": common}}))
    started = time.monotonic()
    controller = Controller(tmp_path / "controller")
    done = controller.run(
        "ansible-playbook", "-i", str(inventory), "-f", "4", "gpunode.node.report", timeout=1800
    )
    seconds = time.monotonic() - started
    assert done.code == 0, done.out[-4000:] + done.err[-2000:]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor, memory = used.ru_utime + used.ru_stime, used.ru_maxrss >> 10
    cost = f"{seconds:.0f} s, {processor:.0f} s of CPU, largest process {memory} MiB"
    page = (controller.place / "fleet.html").read_text()
    lines = (controller.place / "fleet.html.jsonl").read_text().splitlines()
    print(
        f"\n{len(hosts)} nodes: {cost}, page {len(page) >> 10} KiB, reports {sum(map(len, lines)) >> 10} KiB"
    )
    reports = {one["data"]["node"]["name"]: one for one in map(json.loads, lines)}
    assert list(reports) == list(hosts)
    assert f"<h1>{len(hosts)} nodes</h1>" in page and "1 unreachable, 1 without a report" in page
    assert reports["lost"]["errors"][0]["code"] == "unreachable"
    assert reports["broken"]["errors"][0]["code"] == "gpunode-missing"
    (fault,) = [one for one in reports["node001"]["data"]["findings"] if one["status"] == "fail"]
    assert fault["id"] == "driver-lib-mismatch" and "node001, node002" in page


def program_without_sudo(place: Path) -> str:
    """A program that runs commands as sudo does, where the user is root already."""
    program = place / "sudo"
    program.write_text('#!/bin/sh\nwhile [ "$1" != /bin/sh ]; do shift; done\nexec "$@"\n')
    program.chmod(0o755)
    return str(program)
