"""gpunode, killed by SIGKILL right before one of its changes to the machine: killed.py NUMBER ARGUMENT...

A change is a file or directory that it makes, opens for writing, renames or removes in `_PLACES`, or a
command of systemctl other than show. It ends as usual where it makes fewer than NUMBER changes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import PurePath
from typing import Any

from gpunode.__main__ import main

_PLACES = ("/etc/", "/run/gpunode", "/var/lib/gpunode")
_NAMES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink")


def _is_change(event: str, args: tuple[Any, ...]) -> bool:
    """By Python's table of audit events; each is raised before it happens."""
    if event == "subprocess.Popen":
        program, *words = args[1]
        return PurePath(program).name == "systemctl" and "show" not in words
    if event == "open":
        return str(args[0]).startswith(_PLACES) and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
    return event in _NAMES and any(str(path).startswith(_PLACES) for path in args)


def _kill_before(number: int) -> None:
    owner, count = os.getpid(), 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if os.getpid() == owner and _is_change(event, args):
            count += 1
            if count == number:
                os.write(2, f"killed before {event} {args[:2]}\n".encode())
                os.kill(owner, signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    _kill_before(int(sys.argv[1]))
    sys.argv = ["gpunode", *sys.argv[2:]]
    main()
