"""Recorded machines lie in memory where there is some: a tree has hundreds of entries and the journal waits
for the disk, which takes longer than what is tested. A folder's conftest.py takes `tmp_path` from here."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")
_ROOM = 64 << 20


def _place() -> Path | None:
    """Where it is writable, with room, and programs may be started there, which containers often forbid."""
    if not os.access(_MEMORY, os.W_OK) or os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC:
        return None
    return _MEMORY if shutil.disk_usage(_MEMORY).free > _ROOM else None


@contextmanager
def temporary(prefix: str) -> Iterator[Path]:
    """A directory for as long as this lasts."""
    with tempfile.TemporaryDirectory(dir=_place(), prefix=prefix) as name:
        yield Path(name)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, but gone after the test."""
    with temporary("gpunode-test-") as made:
        yield made
