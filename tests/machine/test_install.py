"""gpunode on a machine where README's commands were run."""

from __future__ import annotations

from fixtures.debian_base import PYTHONS
from tests.machine.booted import Machine


def test_gpunode_is_in_the_path_of_root(machine: Machine) -> None:
    assert machine.sh("command -v gpunode") == "/usr/local/bin/gpunode\n"
    assert machine.gpunode("--version").code == 0
    version = machine.sh("/opt/gpunode/bin/python --version")
    assert version.startswith(f"Python {PYTHONS[machine.suite]}.")


def test_no_unit_started_by_the_machine_has_failed(machine: Machine) -> None:
    assert machine.sh("systemctl --failed --plain --no-legend") == ""
    for unit in ("containerd.service", "docker.service"):
        assert machine.is_active(unit), machine.journal(unit)
    machine.sh("docker info > /dev/null && ctr version > /dev/null")
