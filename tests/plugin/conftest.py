"""A short directory for unix sockets: pytest's own is often longer than their 107 bytes allow."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        yield Path(name)
