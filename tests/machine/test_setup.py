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


@pytest.fixture
def fresh(machine: Machine, original: str) -> Machine:
    """Without what an earlier test set up."""
    done = machine.gpunode("reset", "--yes")
    assert done.code == 0, done.out + done.err
    assert files(machine) == original
    return machine


@pytest.fixture
def ready(machine: Machine, original: str) -> Machine:
    """Set up for both engines, by earlier tests or now."""
    for engine in CONFIG:
        done = machine.gpunode("setup", "--runtime", engine, "--yes")
        assert done.code == 0, done.out + done.err
    return machine


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Its output on stdout, up to the line that has `text`."""
    lines = ""
    assert process.stdout is not None
    for line in process.stdout:
        lines += line
        if text in line:
            return lines
    raise AssertionError(f"no {text!r} in {lines}{process.communicate()[1]}")


def test_ctrl_c_after_the_restart_of_containerd(fresh: Machine, original: str) -> None:
    """Finished steps are printed; remaining changes are named, with the command that undoes them."""
    SCENARIO.with_faults(Fault("cuInit", hang=600.0, times=100)).write(fresh.shared / "scenario.txt")
    process = fresh.start("gpunode", "setup", "--runtime", "containerd")
    try:
        read_until(process, "$ gpunode verify")
        assert files(fresh) != original
        calls = f"{SCENARIO_IN_CONTAINER}.calls.0"
        fresh.wait(lambda: fresh.read(calls) != "", lambda: "verify did not ask CUDA")
        assert fresh.run("pkill", "-INT", "-f", "bin/gpunode setup").code == 0
        out, error = process.communicate(timeout=120)
    finally:
        process.kill()
        SCENARIO.write(fresh.shared / "scenario.txt")
    assert process.returncode == 130, error
    assert "Stopped at: gpunode verify" in out
    assert f"error: interrupted during gpunode verify; changed: {CONFIG['containerd']}" in error
    undo = error.partition("hint: undo it with: ")[2].splitlines()[0]
    assert undo.startswith("gpunode rollback "), error
    fresh.sh(undo)
    assert files(fresh) == original and fresh.is_active("containerd.service")


@pytest.mark.parametrize("engine", list(CONFIG))
def test_fresh_node_ends_with_a_computing_container(fresh: Machine, engine: str) -> None:
    done = fresh.gpunode("setup", "--runtime", engine, "--yes")
    assert done.code == 0, done.out + done.err
    assert f"This node is set up: a {engine} container computed on its GPUs." in done.out
    assert done.out.splitlines()[-1] == f"To check this again: gpunode verify --on {engine}"
    again = fresh.gpunode("verify", "--on", engine)
    assert again.code == 0 and "2 of 2 devices right" in again.out, again.out + again.err
    assert fresh.sh(f"systemctl is-active {engine}") == "active\n"


def test_node_is_ready_also_after_a_reboot(ready: Machine) -> None:
    for _ in range(2):
        done = ready.gpunode("doctor")
        assert done.out.startswith("This node is ready"), done.out
        ready.reboot()
    for engine in CONFIG:
        assert ready.gpunode("verify", "--on", engine).code == 0


def test_setup_by_an_ordinary_user(ready: Machine) -> None:
    before = files(ready)
    done = ready.gpunode("doctor", user="ada")
    assert done.code == 0, done.out + done.err
    for command in (("configure-runtime", "--runtime", "docker"), ("setup", "--runtime", "docker")):
        refused = ready.gpunode(*command, user="ada")
        assert refused.code == 3 and "root" in refused.err, (command, refused)
    planned = ready.gpunode("configure-runtime", "--runtime", "containerd", "--dry-run", user="ada")
    assert planned.code == 0 and "unchanged" in planned.out, planned.out + planned.err
    assert files(ready) == before


def test_rollback_undoes_every_change(ready: Machine, original: str) -> None:
    for _ in CONFIG:
        assert ready.gpunode("rollback").code == 0
    assert files(ready) == original
    for engine in CONFIG:
        assert ready.is_active(f"{engine}.service")
