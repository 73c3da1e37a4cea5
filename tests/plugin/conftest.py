"""Fixtures of every plugin test: a state directory, and a short directory for unix sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.memory import temporary, tmp_path

__all__ = ["short", "state_directory", "tmp_path"]


@pytest.fixture
def short() -> Iterator[Path]:
    """pytest's own is often longer than the 107 bytes that a socket's path may have."""
    with temporary("gp-") as made:
        yield made


@pytest.fixture(autouse=True)
def state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Health memory and status of a plugin that a test starts: never this machine's, never another test's."""
    monkeypatch.setenv("GPUNODE_PLUGIN_SERVE_STATE_DIR", str(tmp_path / "plugin-state"))
    return tmp_path / "plugin-state"
