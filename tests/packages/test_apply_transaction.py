"""While a package manager works: messages, and the state after Ctrl-C, a hang-up or a failed rollback."""

import os
import pty
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from gpunode.commands import driver
from gpunode.host import Host
from gpunode.output.render import StderrProgress
from gpunode.packages.apply import PackageJob
from gpunode.packages.manager import Command
from gpunode.packages.zypper import Zypper
from tests.cli import clean_environment, command
from tests.packages.apt_root import PACKAGES, build, from_mirror, journal
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.full

NEWEST = dict.fromkeys(PACKAGES, "1.20.0-1")


def run_before_dpkg(apt, script):
    """Let apt run this shell script before each dpkg; if the script fails, apt doesn't run dpkg."""
    hook = apt.root / "hook"
    hook.write_text(f"#!/bin/sh\n{script}\n")
    hook.chmod(0o755)
    with (apt.root / "apt.conf").open("a") as file:
        file.write(f'DPkg::Pre-Invoke {{ "{hook}"; }};\n')


@contextmanager
def at_work(apt, *argv):
    """`toolkit install` while apt waits before dpkg; it continues when this ends."""
    waits, go = apt.root / "waits", apt.root / "go"
    run_before_dpkg(apt, f"touch {waits}; until [ -e {go} ]; do sleep 0.02; done")
    child = subprocess.Popen(
        command("toolkit", "install", *argv),
        env=clean_environment(apt.env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert eventually(lambda: waits.exists() or child.poll() is not None)
    assert waits.exists(), child.communicate()
    try:
        yield child
    finally:
        go.touch()


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_interrupted_package_manager_may_end_and_that_is_reported_at_once(apt, repository, number, name):
    with at_work(apt, *from_mirror(repository)) as child:
        os.kill(child.pid, number)
        said = next(line for line in child.stderr if name in line)
    assert f"{name}: waiting for apt-get install to end" in said
    _, err = child.communicate(timeout=PATIENCE)
    assert (child.returncode, apt.installed()) == (0, NEWEST), err
    assert apt.ours.exists()


def test_interrupt_skips_the_next_step_and_rolls_back(apt, repository):
    before = apt.tree()
    with at_work(apt, *from_mirror(repository), "--hold") as child:
        os.kill(child.pid, signal.SIGINT)
        assert any("Ctrl-C" in line for line in child.stderr)
    _, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130 and "interrupted" in err and "the packages were restored" in err
    assert "apt-mark hold" not in err
    assert (apt.installed(), apt.tree()) == ({}, before)


def test_closed_terminal_does_not_roll_back(apt, repository):
    with at_work(apt, *from_mirror(repository), "--hold") as child:
        child.stderr.close()  # the connection is closed, and the output is read by no process
    child.stdout.read()
    child.stdout.close()
    assert (child.wait(), apt.installed()) == (0, NEWEST)


def test_packages_left_by_a_failed_rollback_are_known_to_a_removal(apt, repository, tmp_path):
    # dpkg refuses the toolkit, because another package has one of its files
    other = build(tmp_path, "other", "1.0", files=("usr/bin/nvidia-ctk",))
    apt.apt("-y", "install", str(other))
    before, settings = apt.tree(), (apt.root / "apt.conf").read_text()
    # only the installation gets as far as dpkg, and its rollback fails
    installed = apt.root / "installed"
    run_before_dpkg(apt, f"[ ! -e {installed} ] || exit 1; touch {installed}")

    done = apt.gpunode("toolkit", "install", *from_mirror(repository))
    assert done.code != 0 and "could not be restored" in done.err and not apt.ours.exists()
    assert [one["state"] for one in journal(apt)] == ["rolled-back", "committed"]

    (apt.root / "apt.conf").write_text(settings)
    removed = apt.json("toolkit", "remove")
    assert removed["exitCode"] == 0 and removed["data"]["packages"] and not removed["data"]["kept"]
    assert (apt.installed(), apt.tree()) == ({"other": "1.0"}, before)


class Stopped(Host):
    """Ctrl-C arrives during any command."""

    def run(self, argv, **_):
        raise KeyboardInterrupt


def test_ctrl_c_after_the_packages_lists_the_remaining_steps(tmp_path, capsys):
    host = Stopped(tmp_path, environ={})
    job = PackageJob(host, Zypper(host), "driver-install", StderrProgress(), (), {})
    with pytest.raises(KeyboardInterrupt):
        driver._finish(job, [Command(("modprobe", "nvidia")), Command(("modprobe", "nvidia-uvm"))])
    message = "the driver is installed; left to do: modprobe nvidia; modprobe nvidia-uvm"
    assert message in capsys.readouterr().err


# --- messages -------------------------------------------------------------------------------------------


def test_last_line_is_passed_on_while_running_and_all_output_is_kept(tmp_path):
    go = tmp_path / "go"
    heard = []

    def watch(line):
        heard.append(line)
        if line == "20%":
            go.touch()

    script = (
        f"echo one; printf '10%%\\r20%%\\r'; echo bad >&2; until [ -e {go} ]; do sleep 0.02; done; echo end"
    )
    done = Host(environ=dict(os.environ)).run(["sh", "-c", script], watch=watch)
    assert set(heard) - {"", "one", "end"} == {"20%"}  # it may be slow to start, and to be reaped
    assert (done.code, done.stderr) == (0, "bad\n")
    assert done.stdout == "one\n10%\r20%\rend\n"


def test_timed_out_command_is_ended_with_its_children():
    done = Host(environ=dict(os.environ)).run(
        ["sh", "-c", "sleep 60 & wait"], timeout=0.1, watch=lambda _: None
    )
    assert done.timed_out and not done.ok
    assert Host(environ={}).run(["/nonexistent"], watch=lambda _: None).code == 127


def test_command_with_output_runs_past_its_limit(tmp_path, monkeypatch):
    """It prints its next line only once its last one was seen, and five seconds pass after each."""
    script = "for n in 1 2 3 4 5 6 7 8 9; do until [ -e $0/$n ]; do sleep 0.01; done; echo $n; done"
    clock, seen = 0.0, None

    def watch(line):
        nonlocal clock, seen
        if line != seen:
            seen, clock = line, clock + 5.0
            (tmp_path / str(int(line or 0) + 1)).touch()

    monkeypatch.setattr("gpunode.host.process.time", SimpleNamespace(monotonic=lambda: clock))
    argv = ["sh", "-c", script, str(tmp_path)]
    done = Host(environ=dict(os.environ)).run(argv, timeout=6.0, watch=watch)
    assert (done.timed_out, done.code, done.stdout.split()[-1]) == (False, 0, "9")
    assert clock >= 40.0


def test_silent_command_gets_sigterm_before_sigkill(tmp_path):
    left = tmp_path / "left"
    script = f"trap 'echo tidy > {left}; exit 1' TERM; echo ready; while :; do sleep 0.02; done"
    for seconds in (1.0, 10.0, 60.0):  # a busy machine may not have started the shell within the first
        done = Host(environ=dict(os.environ)).run(["sh", "-c", script], timeout=seconds, watch=lambda _: None)
        if done.stdout:
            break
    assert done.timed_out and done.code == 1
    assert left.read_text() == "tidy\n"


SET_CLOCK = """
import threading, time
from types import SimpleNamespace
now = 0.0
render.time = SimpleNamespace(monotonic=lambda: now)
render.SHOWN_SECONDS = 0.1
def wait_until_shown():
    while threading.active_count() > 1:
        time.sleep(0.01)
"""
"""Lines of a program whose variable `now` is the clock of its progress."""


def test_on_a_dumb_terminal_a_line_now_and_then():
    program = (
        "from gpunode.output import render\nrender._ALIVE_SECONDS = 0.0\n"
        f"{SET_CLOCK}"
        "with render.StderrProgress().following('apt-get install -y x', 'apt-get install') as tell:\n"
        "    wait_until_shown(); now = 1.2; tell('Unpacking x \\x1b[1m')\n"
        "    render._ALIVE_SECONDS = 20.0; tell('Setting up x')\n"
    )
    shown = on_terminal("dumb", program)
    assert [line.rpartition(" in ")[0] or line for line in shown.splitlines()] == [
        "  apt-get install -y x ...",
        "  apt-get install, 1 s: Unpacking x \\x1b[1m",
        "  apt-get install -y x: done",
    ]


def on_terminal(kind, program):
    """What a Python program shows on its standard error."""
    keeper, end = pty.openpty()
    env = clean_environment({"TERM": kind})
    subprocess.run([sys.executable, "-c", program], stderr=end, env=env, check=True)
    os.close(end)
    shown = b""
    with suppress(OSError), os.fdopen(keeper, "rb", 0) as stream:  # EIO is its end
        while part := stream.read(4096):
            shown += part
    return shown.decode()


def test_terminal_progress_is_one_changing_line():
    program = (
        "from gpunode.output import render\nfrom gpunode.output.render import StderrProgress\n"
        f"{SET_CLOCK}"
        "with StderrProgress().following('apt-get install -y x', 'apt-get install') as tell:\n"
        "    wait_until_shown(); now = 1.2\n"
        "    tell('Unpacking x'); tell('Setting up\tx'); StderrProgress().note('Ctrl-C: it is left to end')\n"
    )
    shown = on_terminal("xterm", program)
    lines = (
        "apt-get install -y x ...",
        *(f"apt-get install, 1 s: {word} x" for word in ("Unpacking", "Setting up")),
    )
    first = "".join(f"\r  {line}\x1b[K" for line in lines)
    assert shown.startswith(f"{first}\r\x1b[K  Ctrl-C: it is left to end\r\n")
    assert shown.endswith(" s\r\n") and "apt-get install -y x: done in" in shown
