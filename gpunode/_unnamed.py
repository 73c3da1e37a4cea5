"""Files without a name: gone with the last process that has them open."""

from __future__ import annotations

import os
from contextlib import suppress


def unnamed_file() -> int:
    """The descriptor of an empty one, in memory, which no full disk stops; a child by exec doesn't get it.

    On a disk where memfd_create(2) isn't to be had: Pythons that are built for old C libraries lack it, such
    as those of uv, and seccomp may forbid it.
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return os.memfd_create("gpunode")
    import tempfile

    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())
