"""`gpunode setup` on a booted machine: from a fresh node to GPUs in real containers, and Ctrl-C."""

from __future__ import annotations

import subprocess

import pytest

from fixtures.scenario import Fault
from fixtures.stubs import SCENARIO_IN_CONTAINER
from tests.machine.booted import SCENARIO, Machine

CONFIG = {"containerd": "/etc/containerd/config.toml", "docker": "/etc/docker/daemon.json"}


@pytest.fixture(scope="module")
def original(machine: Machine) -> str:
    """The engines' files before anything is configured."""
    return files(machine)


def files(machine: Machine) -> str:
    return machine.sh(f"md5sum {' '.join(CONFIG.values())} 2>/dev/null || true")


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Its output on stdout, up to the line that has `text`."""
    lines = ""
    assert process.stdout is not None
    for line in process.stdout:
        lines += line
        if text in line:
            return lines
    raise AssertionError(f"no {text!r} in {lines}{process.communicate()[1]}")


def test_ctrl_c_after_the_restart_of_containerd(machine: Machine, original: str) -> None:
    """Finished steps are printed; remaining changes are named, with the command that undoes them."""
    SCENARIO.with_faults(Fault("cuInit", hang=600.0, times=100)).write(machine.shared / "scenario.txt")
    process = machine.start("gpunode", "setup", "--runtime", "containerd")
    try:
        read_until(process, "$ gpunode verify")
        assert files(machine) != original
        calls = f"{SCENARIO_IN_CONTAINER}.calls.0"
        machine.wait(lambda: machine.read(calls) != "", lambda: "verify did not ask CUDA")
        assert machine.run("pkill", "-INT", "-f", "bin/gpunode setup").code == 0
        out, error = process.communicate(timeout=120)
    finally:
        process.kill()
        SCENARIO.write(machine.shared / "scenario.txt")
    assert process.returncode == 130, error
    assert "Stopped at: gpunode verify" in out
    assert f"error: interrupted during gpunode verify; changed: {CONFIG['containerd']}" in error
    undo = error.partition("hint: undo it with: ")[2].splitlines()[0]
    assert undo.startswith("gpunode rollback "), error
    machine.sh(undo)
    assert files(machine) == original and machine.is_active("containerd.service")


@pytest.mark.parametrize("engine", list(CONFIG))
def test_fresh_node_ends_with_a_computing_container(machine: Machine, engine: str) -> None:
    done = machine.gpunode("setup", "--runtime", engine, "--yes")
    assert done.code == 0, done.out + done.err
    assert f"This node is set up: a {engine} container computed on its GPUs." in done.out
    assert done.out.splitlines()[-1] == f"To check this again: gpunode verify --on {engine}"
    again = machine.gpunode("verify", "--on", engine)
    assert again.code == 0 and "2 of 2 devices right" in again.out, again.out + again.err
    assert machine.sh(f"systemctl is-active {engine}") == "active\n"


def test_node_is_ready_also_after_a_reboot(machine: Machine) -> None:
    for _ in range(2):
        done = machine.gpunode("doctor")
        assert done.out.startswith("This node is ready"), done.out
        machine.reboot()
    for engine in CONFIG:
        assert machine.gpunode("verify", "--on", engine).code == 0


def test_setup_by_an_ordinary_user(machine: Machine) -> None:
    before = files(machine)
    done = machine.gpunode("doctor", user="ada")
    assert done.code == 0, done.out + done.err
    for command in (("configure-runtime", "--runtime", "docker"), ("setup", "--runtime", "docker")):
        refused = machine.gpunode(*command, user="ada")
        assert refused.code == 3 and "root" in refused.err, (command, refused)
    planned = machine.gpunode("configure-runtime", "--runtime", "containerd", "--dry-run", user="ada")
    assert planned.code == 0 and "unchanged" in planned.out, planned.out + planned.err
    assert files(machine) == before


def test_rollback_undoes_every_change(machine: Machine, original: str) -> None:
    for _ in CONFIG:
        assert machine.gpunode("rollback").code == 0
    assert files(machine) == original
    for engine in CONFIG:
        assert machine.is_active(f"{engine}.service")
