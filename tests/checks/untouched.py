"""Run every check of the doctor in this process and print its changes: ``python -m ... ROOT``.

The interpreter's own audit events are the evidence: each file opened for writing, each change of a directory,
each program started and each socket connected to is a line, whichever code in the program does it.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = (
    *("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink"),
    *("os.truncate", "os.utime", "os.setxattr", "os.removexattr", "os.kill", "os.exec", "os.posix_spawn"),
    *("shutil.rmtree", "shutil.copyfile", "socket.bind", "ctypes.dlopen", "fcntl.flock"),
)


def change_of(event: str, args: tuple[Any, ...]) -> dict[str, Any] | None:
    """Record of an audit event; None if it changes nothing."""
    if event == "open" and isinstance(args[2], int) and args[2] & WRITING:
        return None if args[0] == os.devnull else {"event": "write", "what": str(args[0])}
    if event == "subprocess.Popen":
        return {"event": "run", "what": [str(word) for word in args[1]]}
    if event == "socket.connect":
        return {"event": "connect", "what": str(args[1])}
    return {"event": event, "what": str(args[:1])} if event in CHANGES else None


def main(root: str) -> None:
    sys.dont_write_bytecode = True
    from gpunode.checks.catalogue import ALL_CHECKS
    from gpunode.checks.report import describe
    from gpunode.facts.node import Node
    from gpunode.host import Host

    found: list[dict[str, Any]] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        change = change_of(event, args)
        if change is not None:
            found.append(change)

    sys.addaudithook(hook)
    node = Node(Host(Path(root)))
    for check in ALL_CHECKS:
        if not check.deep:
            with suppress(Exception):
                check.run(node)  # whichever check blocks it: a root cause must not hide the changes of others
    describe(node)
    done = list(found)
    print(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1])
