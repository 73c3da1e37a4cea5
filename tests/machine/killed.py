"""SIGKILL right before one of the changes that gpunode makes to the machine.

A change is a file or directory that it creates, opens for writing, renames or removes in `_PLACES`, or a
command of systemctl other than show.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import PurePath
from typing import Any

_PLACES = ("/etc/", "/run/gpunode", "/var/lib/gpunode")
_NAMES = {
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.link": ((0, 2), (1, 3)),
    "os.symlink": ((1, 2),),
}
"""Where each event has a name, and the descriptor of the directory that the name is relative to."""


def _is_change(event: str, args: tuple[Any, ...]) -> bool:
    """By Python's table of audit events; each is raised before it happens."""
    if event == "subprocess.Popen":
        program, *words = args[1]
        return PurePath(program).name == "systemctl" and "show" not in words
    if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
        # gpunode opens by a directory's descriptor, which this event doesn't have
        return not args[0].startswith("/") or args[0].startswith(_PLACES)
    return any(_path(args[name], args[fd]).startswith(_PLACES) for name, fd in _NAMES.get(event, ()))


def _path(name: Any, directory: int) -> str:
    above = os.readlink(f"/proc/self/fd/{directory}") if directory >= 0 else ""
    return str(PurePath(above, os.fsdecode(name)))


def kill_before(number: int) -> None:
    """End this process before its change of this number; a process that makes fewer ends as usual."""
    owner, count = os.getpid(), 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if os.getpid() == owner and _is_change(event, args):
            count += 1
            if count == number:
                os.write(2, f"killed before {event} {args[:2]}\n".encode())
                os.kill(owner, signal.SIGKILL)

    sys.addaudithook(hook)
