"""A command that stays goes on in this very process, without the command line's parser.

Typer and what it brings are of no use to a service, and memory that Python has once taken it rarely gives
back. So the process replaces itself (execve, same pid, same streams) by a Python that knows what was asked
for from an open file, and has never seen the rest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from gpunode.commands.outcome import Session

_LATER = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1)
"""Blocked, and so kept, from before execve until the command has its handlers: until then a service would die
of SIGHUP, and Ctrl-C would end in the middle of an import. Whatever the command is, it unblocks them."""
_ARENAS = "MALLOC_ARENA_MAX"  # one heap for all threads of glibc's malloc: they are idle


def hand_over(session: Session, command: str, given: Mapping[str, Any]) -> NoReturn:
    """Run gpunode.commands.COMMAND with what was given on the command line, and never return.

    `given` are strings and tuples of strings; what wasn't given is left out.
    """
    from gpunode.gpu.child import module_argv
    from gpunode.host.process import unnamed_file

    own = _ARENAS not in os.environ
    order = {
        "command": command,
        "kind": session.kind,
        "chosen": {**session.chosen, "root": str(session.host.root)},
        "given": {name: value for name, value in given.items() if value is not None and value != ()},
        "own": [_ARENAS] if own else [],
    }
    descriptor = unnamed_file()
    os.set_inheritable(descriptor, True)  # it is for the next program
    os.write(descriptor, json.dumps(order).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    signal.pthread_sigmask(signal.SIG_BLOCK, _LATER)  # stays so over execve, unlike a handler
    sys.stdout.flush()
    sys.stderr.flush()
    # the words of the command line only make it readable in `ps`
    argv = module_argv("gpunode.light", str(descriptor), *sys.argv[1:])
    os.execve(argv[0], argv, {**os.environ, **({_ARENAS: "1"} if own else {})})  # noqa: S606 - itself


def main() -> int:
    """The other side."""
    with os.fdopen(int(sys.argv[1]), "rb") as stream:
        order = json.load(stream)
    for name in order["own"]:
        os.environ.pop(name, None)  # children shall not inherit what is only for us
    # gRPC imports asyncio, which takes TLS along where it is: OpenSSL is 4 MiB, and a socket of ours has none
    sys.modules["ssl"] = None  # type: ignore[assignment]

    from gpunode.commands.outcome import run_command
    from gpunode.output.render import Color, Output

    chosen = order["chosen"]
    chosen |= {
        "root": Path(chosen["root"]),
        "output": Output(chosen["output"]) if chosen["output"] else None,
        "color": Color(chosen["color"]) if chosen["color"] else None,
    }
    command = import_module(f"gpunode.commands.{order['command']}")

    def run(session: Session) -> Any:
        for number in _LATER:
            # once the command has let go of them none may spoil its outcome; SIG_IGN would forget those kept
            signal.signal(number, lambda *_: None)
        return command.run(session.host, command.Options(order["given"]), session.progress)

    code = run_command(order["kind"], chosen, run)
    for number in _LATER:
        # on the way out Python puts the default in place of its handlers, and leaves what is ignored; blocked
        # they would still hit gRPC's threads
        signal.signal(number, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
