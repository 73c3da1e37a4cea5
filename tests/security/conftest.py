"""The directory in which tests act as several users."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory accessible to all users; only root can act as several users."""
    if os.geteuid() != 0:
        pytest.skip("only root can make files of several users")
    with tempfile.TemporaryDirectory(prefix="gpunode-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)
