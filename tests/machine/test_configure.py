"""configure-runtime and rollback with real units: the behavior of systemd, containerd and docker."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from tests.machine.booted import Machine

CONTAINERD, DOCKER = "containerd.service", "docker.service"
CONFIG = "/etc/containerd/config.toml"
DAEMON_JSON = "/etc/docker/daemon.json"
FILES = {"containerd": CONFIG, "docker": DAEMON_JSON}
JOURNAL = "/var/lib/gpunode/journal"
HOLD = "/run/hold"
REFUSES = "[Service]\nExecStartPre=/bin/sh -c '! grep nvidia-container-runtime {path}'\n"
RELOAD_FAILS = "[Service]\nExecReload=\nExecReload=/bin/sh -c 'echo no such key >&2; exit 1'\n"
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
    """Whether the running containerd reports the runtime."""
    done = machine.gpunode("status", "runtime", "-o", "json")
    assert done.code == 0, done.err
    engines = {engine["name"]: engine for engine in done.document["data"]["engines"]}
    return any(one["name"] == "nvidia" and one["active"] for one in engines["containerd"]["handlers"])


@pytest.fixture
def original(machine: Machine) -> Iterator[str]:
    """containerd's file before the test; restored, with its unit, after it."""
    text = machine.sh(f"cat {CONFIG}")
    yield text
    machine.sh(f"rm -rf {HOLD} {drop_in_of(CONTAINERD)} && systemctl daemon-reload")
    machine.gpunode("unconfigure-runtime", "--runtime", "containerd", "--yes")
    machine.write(CONFIG, text)
    machine.sh(f"systemctl reset-failed && systemctl restart {CONTAINERD}")


@pytest.fixture
def daemon_json(machine: Machine) -> Iterator[str]:
    """docker's file for the test; removed, with the unit's drop-in, after it."""
    text = '{"debug": false}\n'
    machine.write(DAEMON_JSON, text)
    yield text
    machine.sh(f"rm -f {DAEMON_JSON} {drop_in_of(DOCKER)} && systemctl daemon-reload")
    machine.sh(f"systemctl reset-failed && systemctl restart {DOCKER}")


def drop_in_of(unit: str) -> str:
    return f"/etc/systemd/system/{unit}.d/test.conf"


def with_drop_in(machine: Machine, text: str, unit: str = CONTAINERD) -> None:
    machine.write(drop_in_of(unit), text)
    machine.sh("systemctl daemon-reload")


def configure(machine: Machine, engine: str) -> dict[str, Any]:
    done = machine.gpunode("configure-runtime", "--runtime", engine, "--yes", "-o", "json")
    assert done.code == 0, done.err
    data: dict[str, Any] = done.document["data"]
    return data


def entry_states(machine: Machine, before: Collection[str] = ()) -> dict[str, str]:
    """States of the journal's entries but those `before`, the oldest first, read from outside the machine."""
    paths = (machine.upper / JOURNAL[1:]).glob("*/manifest.json")
    entries = sorted((json.loads(path.read_text()) for path in paths), key=lambda one: int(one["sequence"]))
    return {one["id"]: one["state"] for one in entries if one["id"] not in before}


def last_state(machine: Machine) -> str:
    return list(entry_states(machine).values())[-1]


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


def test_containerd_that_does_not_start_is_rolled_back_with_its_own_message(
    machine: Machine, original: str
) -> None:
    """Also if systemd refuses a start because there were more than five in ten seconds."""
    with_drop_in(machine, REFUSES.format(path=CONFIG))
    for _ in range(4):
        done = machine.gpunode("configure-runtime", "--runtime", "containerd")
        assert done.code == 4, done.out + done.err
        assert "Control process exited, code=exited, status=1/FAILURE" in done.err, done.err
        assert machine.sh(f"cat {CONFIG}") == original
        assert machine.is_active(CONTAINERD), machine.journal(CONTAINERD)
    assert not configured(machine)


@pytest.mark.parametrize(
    ("verb", "drop_in", "message"),
    [
        ("restart", REFUSES.format(path=DAEMON_JSON), "Control process exited, code=exited"),
        ("reload", RELOAD_FAILS, "no such key"),
    ],
    ids=["restart", "reload"],
)
def test_docker_that_does_not_accept_the_new_file_is_rolled_back(
    machine: Machine, daemon_json: str, verb: str, drop_in: str, message: str
) -> None:
    """Docker's unit is refused a start after three in a minute, and systemd itself starts one that failed."""
    with_drop_in(machine, drop_in, DOCKER)
    for _ in range(2):
        if verb == "restart":  # the toolkit was installed after docker was started
            machine.sh("touch /usr/bin/nvidia-container-runtime-hook")
        done = machine.gpunode("configure-runtime", "--runtime", "docker")
        # after a failed reload dockerd can't be made to read the old file either
        assert done.code == (4 if verb == "restart" else 1), done.out + done.err
        assert f"systemctl {verb} {DOCKER}" in done.err and message in done.err, done.err
        assert machine.sh(f"cat {DAEMON_JSON}") == daemon_json
        assert last_state(machine) == "rolled-back"
        assert machine.is_active(DOCKER), machine.journal(DOCKER)
        assert "nvidia" not in machine.sh("docker info --format '{{json .Runtimes}}'")


def test_containerd_running_without_its_cri_is_rolled_back(machine: Machine, original: str) -> None:
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
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "interrupted: the files are as before" in error, error
    assert machine.sh(f"cat {CONFIG}") == original
    assert machine.is_active(CONTAINERD) and not configured(machine)


def test_sigkill_during_the_restart_is_recovered_by_the_next_run(machine: Machine, original: str) -> None:
    process = start_and_hold(machine)
    send(machine, signal.SIGKILL)
    process.communicate(timeout=120)
    machine.sh(f"rm {HOLD}")
    assert last_state(machine) == "applied"
    done = machine.gpunode("configure-runtime", "--runtime", "containerd")
    assert done.code == 0 and "killed half-way" in done.out + done.err, done
    assert configured(machine) and machine.is_active(CONTAINERD)
    assert machine.gpunode("rollback").code == 0
    assert machine.sh(f"cat {CONFIG}") == original and not configured(machine)


@pytest.mark.parametrize("engine", list(FILES))
def test_sigkill_before_each_change_is_recovered_by_the_next_run(
    machine: Machine, original: str, daemon_json: str, engine: str
) -> None:
    """Every file, directory and rename of configure-runtime, and its restart or reload, in turn."""
    command = ("configure-runtime", "--runtime", engine)
    text = f"cat {FILES[engine]}"
    untouched = {"containerd": original, "docker": daemon_json}[engine]
    written = ""
    with machine.forks() as gpunode:
        for number in itertools.count(1):
            before = entry_states(machine)
            killed = gpunode.run(*command, env={}, killed_before=number)
            if killed.code == 0:
                break
            assert killed.code == -signal.SIGKILL, killed
            left = list(entry_states(machine, before).values())
            done = gpunode.run(*command, "-o", "json", env={})
            assert done.code == 0 and "nvidia" in done.document["data"]["active"]["handler"], (killed, done)
            unfinished = bool(set(left) & {"begun", "applied"})
            assert ("killed half-way" in done.out + done.err) == unfinished, killed
            expected = ["rolled-back"] * len(left) + ["committed"] if left != ["committed"] else left
            assert list(entry_states(machine, before).values()) == expected, killed
            assert machine.is_active(f"{engine}.service"), machine.journal(engine)
            assert machine.sh("find /etc -name '*.gpunode'") == "", killed
            written = written or machine.sh(text)
            assert machine.sh(text) == written != untouched, killed
            assert gpunode.run("rollback", env={}).code == 0
            assert machine.sh(text) == untouched, killed
    assert number > 10
    assert machine.sh(text) == written and machine.gpunode("rollback").code == 0


def test_reboot_during_the_change_is_recovered(machine: Machine, original: str) -> None:
    process = start_and_hold(machine)
    machine.kill()
    process.communicate(timeout=120)
    machine.boot()
    done = machine.gpunode("configure-runtime", "--runtime", "containerd")
    assert done.code == 0 and "killed half-way" in done.out + done.err, done
    assert configured(machine)


# --- the logs that gpunode reads ------------------------------------------------------------------------


def test_journal_of_a_daemon_is_in_the_report(machine: Machine) -> None:
    machine.sh(f"echo planted-line | systemd-cat --identifier=dockerd && systemctl restart {DOCKER}")
    done = machine.gpunode("report", "--output-file", "/root/report.tar.gz")
    assert done.code == 0, done.err
    listed = machine.sh("tar -tzf /root/report.tar.gz")
    name = next(line for line in listed.splitlines() if "docker" in line and "log" in line)
    assert "Starting up" in machine.sh(f"tar -xzOf /root/report.tar.gz {name}")


def test_doctor_quotes_the_last_line_of_a_failed_daemon(machine: Machine, daemon_json: str) -> None:
    """Only journald has it: docker ends at once, and its unit only says that it failed."""
    with_drop_in(machine, "[Unit]\nStartLimitIntervalSec=3600\n", DOCKER)  # however slow three starts are
    machine.write(DAEMON_JSON, '{"storage-driver": "none-such"}\n')
    machine.run("systemctl", "restart", DOCKER)
    machine.wait(lambda: machine.show(DOCKER)["ActiveState"] == "failed", lambda: machine.journal(DOCKER))
    document = machine.gpunode("doctor", "-o", "json").document
    found = next(one for one in document["data"]["findings"] if one["id"] == "docker-not-running")
    quoted = [one["value"] for one in found["evidence"] if one["source"] == f"journalctl -u {DOCKER}"]
    assert len(quoted) == 1 and "failed to start daemon" in quoted[0], found


def test_doctor_reads_the_kernel_log(machine: Machine) -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
    machine.write("/dev/kmsg", f"3,100,5000000,-;{line}\n")
    try:
        done = machine.gpunode("doctor")
        assert "xid-recent: XID 79" in done.out and line in done.out, done.out
    finally:
        machine.sh("rm /dev/kmsg")
