"""Waiting in tests: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PATIENCE = 120.0
"""Seconds after which a test takes something as hanging. No busy machine needs as many."""


def eventually(ready: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Poll until `ready()` is true, False after `seconds`. A file or process that is missing is not ready."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(FileNotFoundError, ProcessLookupError):
            if ready():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or only waits for its parent to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it may go between opening and reading
        return True
