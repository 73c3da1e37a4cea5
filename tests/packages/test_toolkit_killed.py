"""`gpunode toolkit` after a run that was killed together with apt, as by a power failure."""

import fcntl
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli import clean_environment, command
from tests.packages.apt_root import PACKAGES, alone, four, journal, make_repository
from tests.waiting import eventually, has_ended

pytestmark = pytest.mark.full

NEWEST = dict.fromkeys(PACKAGES, "1.20.0-1")
WAITS = "[ -e {root}/free ] || {{ touch {root}/begun; exec sleep 60; }}"


def tree_of(pid):
    """A process with all below it."""
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        below = []
    return [pid, *(one for child in below for one in tree_of(int(child)))]


def killed(apt, *argv, family=True):
    """Run until a program signals that it waits, then end all of it at once, or gpunode alone."""
    child = subprocess.Popen(
        [*(alone() if "remove" in argv else ()), *command("toolkit", *argv)],
        env=clean_environment(apt.env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    begun = apt.root / "begun"
    assert eventually(lambda: begun.exists() or child.poll() is not None)
    assert begun.exists(), child.communicate()
    # apt has its own session; from the top down, so that no process sees the death of another
    ended = tree_of(child.pid) if family else [child.pid]
    for pid in ended:
        with suppress(ProcessLookupError):  # a short-lived one of apt's
            os.kill(pid, signal.SIGKILL)
    child.communicate()
    assert eventually(lambda: all(map(has_ended, ended))), "apt still holds its locks"
    (apt.root / "free").touch()


def waiting(apt, place):
    """Apt waits there, once: before dpkg starts, in a package's script, or after everything is done."""
    script = WAITS.format(root=apt.root)
    if place != "script":
        hook = apt.root / "hook"
        hook.write_text(f"#!/bin/sh\n{script}\n")
        hook.chmod(0o755)
        with (apt.root / "apt.conf").open("a") as file:
            file.write(f'DPkg::{place} {{ "{hook}"; }};\n')
    return script if place == "script" else ""


@pytest.mark.parametrize("place", ["Pre-Invoke", "script", "Post-Invoke"])
def test_install_after_a_kill_reports_it_and_completes(apt, signer, tmp_path, place):
    mirror = make_repository(tmp_path / "mirror", signer)
    four(mirror.flat, "1.20.0-1", postinst=waiting(apt, place))
    mirror.index()
    before = apt.tree()
    asked = ("install", "--repository", mirror.url, "--key", str(mirror.key))
    killed(apt, *asked)
    assert (apt.installed() == NEWEST) == (place == "Post-Invoke")
    status = apt.gpunode("toolkit", "status")
    assert (
        status.code == 1 and "killed half-way" in status.out and "next: gpunode toolkit install" in status.out
    )
    assert ("unpacked and not configured: " in status.out) == (place == "script")
    dry = apt.gpunode("toolkit", *asked, "--dry-run")
    assert dry.code == 0 and "killed half-way" in dry.err
    assert ("--configure -a" in dry.out) == (place == "script")
    done = apt.gpunode("toolkit", *asked)
    assert (done.code, apt.installed()) == (0, NEWEST), done.err
    assert "killed half-way" in done.err and {one["state"] for one in journal(apt)} == {"committed"}
    assert apt.gpunode("toolkit", "status").code == 0
    again = apt.json("toolkit", *asked)
    assert (again["data"]["commands"], again["data"]["changes"], again["messages"]) == ([], [], [])
    assert apt.gpunode("toolkit", "remove").code == 0
    assert (apt.installed(), apt.tree()) == ({}, before)


def test_apt_continues_if_only_gpunode_is_killed(apt, signer, tmp_path):
    script = f"touch {apt.root}/begun; until [ -e {apt.root}/free ]; do sleep 0.02; done; echo it is set up"
    mirror = make_repository(tmp_path / "mirror", signer)
    four(mirror.flat, "1.20.0-1", postinst=script)
    mirror.index()
    asked = ("install", "--repository", mirror.url, "--key", str(mirror.key))
    killed(apt, *asked, family=False)
    with (apt.root / "var/lib/dpkg/lock-frontend").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # until apt has ended
    assert apt.installed() == NEWEST
    done = apt.gpunode("toolkit", *asked)
    assert done.code == 0 and "killed half-way" in done.err, done.err
    assert apt.json("toolkit", *asked)["data"]["commands"] == []


def test_other_commands_keep_the_repository_of_a_killed_install(apt, repository):
    waiting(apt, "Post-Invoke")
    asked = ("install", "--repository", repository.url, "--key", str(repository.key))
    killed(apt, *asked)
    other = apt.gpunode("cdi", "generate", "--vendor", "nvidia", "--output", str(apt.root / "nvidia.yaml"))
    assert apt.ours.exists() and apt.key.exists(), other.err
    assert apt.gpunode("toolkit", "remove").code == 0
    assert apt.installed() == {} and not apt.ours.exists()


def test_killed_removal_is_completed_by_the_next(apt, repository):
    before = apt.tree()
    apt.gpunode("toolkit", "install", "--repository", repository.url, "--key", str(repository.key))
    waiting(apt, "Post-Invoke")
    killed(apt, "remove")
    done = apt.gpunode("toolkit", "remove")
    assert done.code == 0, done.err
    assert (apt.installed(), apt.tree()) == ({}, before)
