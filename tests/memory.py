"""Recorded machines lie in memory where there is some: a tree has hundreds of entries and the journal waits
for the disk, which takes longer than what is tested. A folder's conftest.py takes `tmp_path` from here."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")
_ROOM = 64 << 20


def _fit() -> bool:
    """Writable, with room, and programs may be started from there, which a container often forbids."""
    if not os.access(_MEMORY, os.W_OK) or os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC:
        return False
    return shutil.disk_usage(_MEMORY).free > _ROOM


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, but gone after the test."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _fit() else None, prefix="gpunode-test-") as name:
        yield Path(name)
