"""Whether a fork of this process can stand for a new one."""

from __future__ import annotations

import os
from collections.abc import Mapping

_AT_START = ("LD_", "PYTHON", "GLIBC_")
"""Variables that only a starting program reads, by how they begin."""


def forkable(environ: Mapping[str, str]) -> bool:
    """See `Host.forkable`. Threads are counted by the kernel: those of libraries count, too."""
    try:
        with open("/proc/self/environ", "rb") as stream:  # noqa: PTH123 - pathlib takes longer than all of it
            given = stream.read().split(b"\0")
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    except OSError:
        return False
    wanted = {os.fsencode(f"{name}={value}") for name, value in environ.items() if name.startswith(_AT_START)}
    return (
        threads == 1
        and dict(os.environ) == dict(environ)
        and wanted == {one for one in given if one.startswith(tuple(map(os.fsencode, _AT_START)))}
    )
