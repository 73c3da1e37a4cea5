"""configure-runtime and rollback with real units: what systemd, containerd and docker do."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.machine.booted import Machine

CONTAINERD, DOCKER = "containerd.service", "docker.service"
CONFIG = "/etc/containerd/config.toml"
JOURNAL = "/var/lib/gpunode/journal"
DROP_IN = f"/etc/systemd/system/{CONTAINERD}.d/test.conf"
HOLD = "/run/hold"
REFUSES = "[Service]\nExecStartPre=/bin/sh -c '! grep nvidia-container-runtime /etc/containerd/config.toml'\n"
BROKEN_CRI = """\
[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "/etc/containerd/certs.d"
  [plugins."io.containerd.grpc.v1.cri".registry.mirrors."docker.io"]
    endpoint = ["https://mirror.test"]
"""
WAITS = f"[Service]\nExecStartPre=/bin/sh -c 'while [ -e {HOLD} ]; do sleep 0.05; done'\n"


def main_pid(machine: Machine, unit: str) -> int:
    return int(machine.show(unit)["MainPID"])


def configured(machine: Machine) -> bool:
    """Whether the running containerd has the runtime, by its own word."""
    done = machine.gpunode("status", "runtime", "-o", "json")
    assert done.code == 0, done.err
    engines = {engine["name"]: engine for engine in done.document["data"]["engines"]}
    return any(one["name"] == "nvidia" and one["active"] for one in engines["containerd"]["handlers"])


@pytest.fixture
def original(machine: Machine) -> Iterator[str]:
    """containerd's file before the test; restored, with its unit, after it."""
    text = machine.sh(f"cat {CONFIG}")
    yield text
    machine.sh(f"rm -rf {HOLD} {DROP_IN} && systemctl daemon-reload")
    machine.gpunode("unconfigure-runtime", "--runtime", "containerd", "--yes")
    machine.write(CONFIG, text)
    machine.sh(f"systemctl reset-failed && systemctl restart {CONTAINERD}")


def with_drop_in(machine: Machine, text: str) -> None:
    machine.write(DROP_IN, text)
    machine.sh("systemctl daemon-reload")


def configure(machine: Machine, engine: str) -> dict[str, Any]:
    done = machine.gpunode("configure-runtime", "--runtime", engine, "--yes", "-o", "json")
    assert done.code == 0, done.err
    data: dict[str, Any] = done.document["data"]
    return data


def start_and_hold(machine: Machine) -> subprocess.Popen[str]:
    """configure-runtime while `systemctl restart` waits for containerd."""
    with_drop_in(machine, WAITS)
    machine.sh(f"touch {HOLD}")
    process = machine.start("gpunode", "configure-runtime", "--runtime", "containerd")
    machine.wait(lambda: machine.show(CONTAINERD)["ActiveState"] == "activating", machine.console)
    return process


def send(machine: Machine, number: signal.Signals) -> None:
    assert machine.run("pkill", f"-{number.value}", "-f", "bin/gpunode configure-runtime").code == 0


def test_containerd_is_restarted_and_docker_reloaded(machine: Machine, original: str) -> None:
    pids = main_pid(machine, CONTAINERD), main_pid(machine, DOCKER)
    data = configure(machine, "containerd")
    assert data["restart"]["command"] == f"systemctl restart {CONTAINERD}"
    assert "nvidia" in data["active"]["handler"] and main_pid(machine, CONTAINERD) != pids[0]
    data = configure(machine, "docker")
    assert "nvidia" in data["active"]["handler"]
    if data["restart"]["verb"] == "reload":
        assert main_pid(machine, DOCKER) == pids[1]
    again = configure(machine, "containerd")
    assert {change["action"] for change in again["changes"]} == {"unchanged"} and not again["restart"][
        "performed"
    ]
    for _ in range(2):
        assert machine.gpunode("rollback").code == 0
    assert machine.sh(f"cat {CONFIG}") == original and not configured(machine)
    assert machine.is_active(DOCKER)


def test_a_containerd_that_does_not_start_is_rolled_back_with_its_own_words(
    machine: Machine, original: str
) -> None:
    """Also where systemd refuses a start because there were more than five in ten seconds."""
    with_drop_in(machine, REFUSES)
    for _ in range(4):
        done = machine.gpunode("configure-runtime", "--runtime", "containerd")
        assert done.code == 4, done.out + done.err
        assert "Control process exited, code=exited, status=1/FAILURE" in done.err, done.err
        assert machine.sh(f"cat {CONFIG}") == original
        assert machine.is_active(CONTAINERD), machine.journal(CONTAINERD)
    assert not configured(machine)


def test_a_containerd_that_runs_without_its_cri_is_rolled_back(machine: Machine, original: str) -> None:
    """The CRI is off and could not start once it is on; containerd says so only in its log."""
    off = original.replace("version = 2\n", 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
    machine.write(CONFIG, f"{off}\n{BROKEN_CRI}")
    machine.sh(f"systemctl restart {CONTAINERD}")
    done = machine.gpunode("configure-runtime", "--runtime", "containerd")
    assert done.code == 4 and "containerd runs with them" in done.err, done.err
    assert "cannot be set when `config_path` is provided" in done.err
    assert machine.sh(f"cat {CONFIG}") == f"{off}\n{BROKEN_CRI}" and machine.is_active(CONTAINERD)


def test_ctrl_c_during_the_restart_rolls_back(machine: Machine, original: str) -> None:
    process = start_and_hold(machine)
    try:
        assert machine.sh(f"cat {CONFIG}") != original
        send(machine, signal.SIGINT)
        machine.sh(f"rm {HOLD}")
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted: the files are as before" in error, error
    assert machine.sh(f"cat {CONFIG}") == original
    assert machine.is_active(CONTAINERD) and not configured(machine)


def entry_states(machine: Machine) -> list[str]:
    """States of the journal's entries, read from outside the machine."""
    manifests = sorted((machine.upper / JOURNAL[1:]).glob("*/manifest.json"))
    return [json.loads(path.read_text())["state"] for path in manifests]


@pytest.mark.parametrize("held", ["while it writes", "during the restart", "right after the restart"])
def test_the_next_run_recovers_from_a_sigkill(machine: Machine, original: str, held: str) -> None:
    before = len(entry_states(machine))
    if held == "while it writes":  # its first entry appears before any file is written
        process = machine.start("gpunode", "configure-runtime", "--runtime", "containerd")
        while len(entry_states(machine)) == before:
            assert process.poll() is None, process.communicate()[1]
    else:
        process = start_and_hold(machine)
    if held == "right after the restart":
        machine.sh(f"rm {HOLD}")
        machine.wait(lambda: machine.is_active(CONTAINERD), machine.console)
    machine.run("pkill", "-KILL", "-f", "bin/gpunode configure-runtime")
    process.communicate(timeout=60)
    machine.sh(f"rm -f {HOLD}")
    interrupted = entry_states(machine)[-1] in ("begun", "applied")
    done = machine.gpunode("configure-runtime", "--runtime", "containerd")
    assert done.code == 0, done.out + done.err
    assert ("killed half-way" in done.out + done.err) == interrupted, done
    assert configured(machine) and machine.is_active(CONTAINERD)
    assert machine.gpunode("rollback").code == 0
    assert machine.sh(f"cat {CONFIG}") == original and not configured(machine)


def test_a_reboot_in_the_middle_is_recovered_from(machine: Machine, original: str) -> None:
    process = start_and_hold(machine)
    machine.kill()
    process.communicate(timeout=60)
    machine.boot()
    done = machine.gpunode("configure-runtime", "--runtime", "containerd")
    assert done.code == 0 and "killed half-way" in done.out + done.err, done
    assert configured(machine)


# --- the logs that gpunode reads ------------------------------------------------------------------------


def test_the_journal_of_a_daemon_is_in_the_report(machine: Machine) -> None:
    machine.sh(f"echo planted-line | systemd-cat --identifier=dockerd && systemctl restart {DOCKER}")
    done = machine.gpunode("report", "--output-file", "/root/report.tar.gz")
    assert done.code == 0, done.err
    listed = machine.sh("tar -tzf /root/report.tar.gz")
    name = next(line for line in listed.splitlines() if "docker" in line and "log" in line)
    assert "Starting up" in machine.sh(f"tar -xzOf /root/report.tar.gz {name}")


def test_the_doctor_reads_the_kernels_log(machine: Machine) -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
    machine.write("/dev/kmsg", f"3,100,5000000,-;{line}\n")
    try:
        done = machine.gpunode("doctor")
        assert "xid-recent: XID 79" in done.out and line in done.out, done.out
    finally:
        machine.sh("rm /dev/kmsg")
