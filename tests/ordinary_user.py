"""Runs gpunode as an ordinary user, with a directory that such a user can read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

UID = 65534
AS_ORDINARY_USER = ("setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups")


@contextmanager
def public_directory() -> Iterator[Path]:
    """A directory readable by all users, unlike pytest's own. Skips if no other user is possible."""
    if os.geteuid() != 0 or shutil.which(AS_ORDINARY_USER[0]) is None:
        pytest.skip("only root can change to another user, with setpriv")
    probe = [*AS_ORDINARY_USER, sys.executable, "-c", "import gpunode.host, typer"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("another user may not read this Python environment")
    with _public() as directory:
        yield directory


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory accessible to all users; only root can act as several users."""
    if os.geteuid() != 0:
        pytest.skip("only root can make files of several users")
    with _public() as directory:
        yield directory


@contextmanager
def _public() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpunode-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def make_readable(directory: Path) -> None:
    """Make everything below readable for all users."""
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else path.stat().st_mode | 0o444)
