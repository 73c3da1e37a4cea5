"""The recorded machines of these tests lie in memory where there is some: a tree has hundreds of entries, and
a disk takes longer to make and remove them than the doctor to judge them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")
_ROOM = 64 << 20


def _roomy() -> bool:
    return os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's own, but gone after the test."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _roomy() else None, prefix="gpunode-test-") as name:
        yield Path(name)
