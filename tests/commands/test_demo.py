"""The demo: all steps on a simulated node, in a temporary directory only."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cli import gpunode

READ_ONLY = ("/etc", "/var/lib")
OWN = ("/run", "/dev/shm")
"""Other tests, and the engines that they start, make and remove things in all of these meanwhile."""


def with_own(below: Path) -> tuple[str, ...]:
    """Start a program to which directories below this one are /run and /dev/shm, and that can't write to /etc
    and /var/lib. Empty where this user may not mount."""
    script = 'exec "$@"'
    for place in READ_ONLY:
        script = f"mount --no-mtab --bind --read-only {place} {place} && {script}"
    for place in OWN:
        own = below / place.lstrip("/")
        own.mkdir(parents=True)
        script = f"mount --bind {own} {place} && {script}"
    prefix = ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")
    return prefix if shutil.which("unshare") and not subprocess.run([*prefix, "true"]).returncode else ()


def test_demo_ends_with_eight_allocatable_gpus(tmp_path: Path) -> None:
    long = tmp_path / ("a-directory-name-that-leaves-no-room-for-a-socket" * 2)
    long.mkdir()
    ran = gpunode("demo", "-o", "json", env={"TMPDIR": str(long)})
    assert ran.code == 0, ran.err
    data = ran.document["data"]
    assert data["allocatable"] == 8
    assert [(step["command"], step["exitCode"]) for step in data["steps"]] == [
        ("gpunode doctor", 1),
        ("gpunode configure-runtime --runtime containerd", 0),
        ("systemctl restart containerd", 0),
        ("gpunode configure-runtime --runtime docker", 0),
        ("systemctl reload docker", 0),
        ("gpunode doctor", 0),
        ("gpunode gpus", 0),
        ("gpunode verify", 0),
        ("gpunode plugin serve", 0),
    ]


def test_demo_leaves_nothing_behind() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place, tempfile.TemporaryDirectory(dir="/tmp") as shared:
        ran = gpunode("demo", env={"TMPDIR": place}, prefix=with_own(Path(shared)))
        assert ran.code == 0, ran.err
        assert f"GPUNODE_ROOT={place}/gpunode-" in ran.out
        assert list(Path(place).iterdir()) == []
        assert [list((Path(shared) / name.lstrip("/")).iterdir()) for name in OWN] == [[], []]


def test_transcript_looks_typed_and_names_what_is_simulated() -> None:
    ran = gpunode("demo")
    lines = ran.out.splitlines()
    assert lines[0].startswith("$ export GPUNODE_ROOT=")
    assert "$ gpunode doctor" in lines
    assert "$ gpunode plugin serve &" in lines
    assert "simulated" in ran.out
    assert lines[-1] == "8 of 8 GPUs are allocatable: pods can run on this node."
    assert "\nerror: " not in ran.out
    # a warning in here would be about the simulated node's age: give it a newer driver or toolkit
    assert "This node is ready: no check found a fault" in lines
