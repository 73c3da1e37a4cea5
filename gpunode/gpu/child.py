"""How gpunode starts one of its own modules as a child process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from gpunode._unnamed import unnamed_file
from gpunode.dataclass import dataclass

if TYPE_CHECKING:
    from gpunode.gpu.forked import Child
    from gpunode.host import Completed, Host


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments that run a module of this package with this Python.

    ``-P`` keeps the current directory off the module path: a file there named like a module of the standard
    library must not run with the rights of whoever calls gpunode.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


@dataclass(frozen=True)
class Waiting:
    """A forked child that has a module loaded, and waits for its arguments: a line of JSON."""

    child: Child
    question: int
    errors: int


_begun: dict[str, Waiting] = {}


def begin(host: Host, module: str) -> None:
    """Have a child load what the module needs, while we find out what to ask it; `run_module` will ask.

    Nothing happens where no fork may stand for a new process. Whoever calls this calls `end_begun`, too.
    """
    if host.forkable():
        _begun[module] = _fork(module)


def end_begun() -> None:
    """End what nobody asked."""
    from gpunode.gpu.forked import end

    while _begun:
        waiting = _begun.popitem()[1]
        os.close(waiting.question)
        os.close(waiting.errors)
        end(waiting.child)


def run_module(
    host: Host,
    module: str,
    *arguments: str,
    timeout: float,
    started: Callable[[], None] | None = None,
) -> Completed:
    """`Host.run` for a module of this package whose `main()` prints one answer.

    Where a fork of this process is as good as a new one it is forked: that spares an interpreter its start,
    and all that is imported already. `started` is called while the child has its turn.
    """
    argv = module_argv(module, *arguments)
    waiting = _begun.pop(module, None)
    if waiting is None and not host.forkable():
        if started is not None:
            started()
        return host.run(argv, timeout=timeout)
    from gpunode.gpu.forked import finish
    from gpunode.host import Completed

    if host.trace is not None:
        host.trace(" ".join(argv))
    waiting = waiting or _fork(module)
    with os.fdopen(waiting.errors, "rb") as errors:
        with suppress(BrokenPipeError), os.fdopen(waiting.question, "wb") as question:
            question.write(json.dumps(arguments).encode())
        outcome = finish(waiting.child, timeout, started)
        errors.seek(0)
        said = errors.read()
    out, err = outcome.output.decode("utf-8", "replace"), said.decode("utf-8", "replace")
    return Completed(argv, outcome.code, out, err, outcome.timed_out)


def _fork(module: str) -> Waiting:
    from gpunode.gpu.forked import start

    errors = unnamed_file()
    told, question = os.pipe()
    child = start(lambda: _answer(module), 0.0, given=told, errors=errors)
    os.close(told)
    return Waiting(child, question, errors)


def _answer(module: str) -> bytes:
    """What a process of its own would be to the module, in a forked one."""
    import io
    import signal
    from importlib import import_module

    os.setsid()  # Ctrl-C is the parent's, which ends this
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    loaded = import_module(module)
    if hasattr(loaded, "prepare"):
        loaded.prepare()
    with open(0, "rb", closefd=False) as stream:  # until the parent has told everything, or is gone
        given = stream.read()
    if not given:
        return b""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv = [module, *json.loads(given)]
    sys.stdout = io.StringIO()
    loaded.main()
    return sys.stdout.getvalue().encode()


def signal_name(code: int) -> str:
    """SIGSEGV and the like for the exit code of a child that a signal ended (-11)."""
    import signal

    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
