"""Recorded and booted machines are stored in memory if possible: a tree has hundreds of entries and the
journal waits for the disk, which takes longer than the tested code. A folder's conftest.py takes `tmp_path`
from here."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


def _place(space: int) -> Path | None:
    """A writable directory with this many bytes free in which programs may be started, often forbidden in
    containers."""
    if not os.access(_MEMORY, os.W_OK) or os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC:
        return None
    return _MEMORY if shutil.disk_usage(_MEMORY).free > space else None


@contextmanager
def temporary(prefix: str, space: int = 64 << 20) -> Iterator[Path]:
    """A directory for the duration of the context, in memory if that has `space` bytes free."""
    with tempfile.TemporaryDirectory(dir=_place(space), prefix=prefix) as name:
        yield Path(name)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Like pytest's own, but removed after the test."""
    with temporary("gpunode-test-") as made:
        yield made
