"""Files without a name, also where Python has no memfd_create, and where the disk is full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.scenario import machine
from fixtures.stubs import have_compiler, stub_node
from gpunode.host.process import unnamed_file
from tests.cli import clean_environment


def refuse(name: str) -> int:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("without", ["", "the call", "the right"])
def test_unnamed_file_can_be_written_and_read_and_has_no_name(
    without: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if without == "the call":
        monkeypatch.delattr(os, "memfd_create")
    if without == "the right":
        monkeypatch.setattr(os, "memfd_create", refuse)
    number = unnamed_file()
    try:
        os.write(number, b"text")
        assert os.pread(number, 9, 0) == b"text"
        assert os.fstat(number).st_nlink == 0 and list(tmp_path.iterdir()) == []
        assert os.get_inheritable(number) is False
    finally:
        os.close(number)


@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
def test_gpus_are_queried_by_a_python_without_memfd(tmp_path: Path) -> None:
    assert_gpus_are_queried(tmp_path, "import os; del os.memfd_create")


@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this Python has no memfd_create")
def test_gpus_are_queried_on_a_full_disk(tmp_path: Path) -> None:
    """No temporary file can be created, as where tempfile finds no directory that takes one."""
    assert_gpus_are_queried(tmp_path, "import tempfile; tempfile.tempdir = '/proc/full'")


def assert_gpus_are_queried(tmp_path: Path, setup: str) -> None:
    node = stub_node(tmp_path, machine(2), libraries="nvml")
    program = f"{setup}; from gpunode.__main__ import main; main()"
    argv = [sys.executable, "-c", program, "gpus"]
    done = subprocess.run(
        argv, capture_output=True, text=True, env=clean_environment(node.env), timeout=60, check=False
    )
    assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    assert done.stdout.count("GPU-") == 2
