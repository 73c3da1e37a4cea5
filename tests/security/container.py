"""A process with its own root directory, as a container's."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def process_below(root: Path) -> Iterator[int]:
    """Its number."""
    shutil.copy("/usr/bin/busybox", root / "busybox")
    with subprocess.Popen(
        ["unshare", "--mount", "chroot", root, "/busybox", "sh", "-c", "echo ready; read x"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
        process.communicate(b"\n")
