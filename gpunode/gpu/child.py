"""How gpunode starts one of its own modules as a child process."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from gpunode.gpu.forked import Child, end, finish, start
from gpunode.host.forkable import forkable
from gpunode.host.process import unnamed_file

TYPE_CHECKING = False  # `typing` itself can wait until the child is on its way
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpunode.host import Host
    from gpunode.host.process import Completed

_PR_SET_PDEATHSIG = 1  # prctl(2)


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments that run a module of this package with this Python.

    ``-P`` keeps the current directory off the module path: a file there named like a module of the standard
    library must not run with the rights of whoever calls gpunode.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


class Begun:
    """A forked child that runs a module's `main()` with these arguments."""

    def __init__(self, child: Child, arguments: tuple[str, ...], errors: int) -> None:
        self.child, self.arguments, self.errors = child, arguments, errors


_begun: dict[str, Begun] = {}


def begin(module: str, *arguments: str) -> None:
    """Have a child run the module as `run_module` would, for the case that it will be asked for just that.

    Nothing happens where no fork may stand for a new process, or none is to be had: then `run_module` tells.
    Whoever calls this calls `end_begun`, too.
    """
    if forkable(os.environ):
        with suppress(OSError):
            _begun[module] = _fork(module, arguments)


def end_begun() -> None:
    """End what nobody asked for."""
    while _begun:
        _end(_begun.popitem()[1])


def _end(unasked: Begun) -> None:
    os.close(unasked.errors)
    end(unasked.child)


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
    begun = _begun.pop(module, None)
    if begun is not None and begun.arguments != arguments:
        _end(begun)
        begun = None
    if begun is None and not host.forkable():
        if started is not None:
            started()
        return host.run(argv, timeout=timeout)
    from gpunode.host.process import COMMAND_NOT_FOUND, Completed

    if host.trace is not None:
        host.trace(" ".join(argv))
    try:
        begun = begun or _fork(module, arguments)
    except OSError as error:  # as `Host.run` tells it: no process, no memory, no descriptor left
        return Completed(argv, COMMAND_NOT_FOUND, "", f"{argv[0]}: {error.strerror}")
    with os.fdopen(begun.errors, "rb") as errors:
        outcome = finish(begun.child, timeout, started)
        errors.seek(0)
        said = errors.read()
    out, err = outcome.output.decode("utf-8", "replace"), said.decode("utf-8", "replace")
    return Completed(argv, outcome.code, out, err, outcome.timed_out)


def _fork(module: str, arguments: tuple[str, ...]) -> Begun:
    errors, parent = unnamed_file(), os.getpid()
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            child = start(lambda: _answer(module, arguments, parent), 0.0, given=nothing, errors=errors)
        finally:
            os.close(nothing)
    except OSError:
        os.close(errors)
        raise
    return Begun(child, arguments, errors)


def _answer(module: str, arguments: tuple[str, ...], parent: int) -> bytes:
    """What a process of its own would be to the module, in a forked one."""
    import io
    import signal
    from importlib import import_module

    end_with_parent(parent)
    os.setsid()  # Ctrl-C is the parent's, which ends this
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = [module, *arguments]
    sys.stdout = io.StringIO()
    import_module(module).main()
    return sys.stdout.getvalue().encode()


def end_with_parent(parent: int = 0) -> None:
    """Nobody is left to kill this process when NVML hangs and the one that asked has gone.

    Leaves at once if that has gone already: `parent` is its number, 0 if it isn't known.
    """
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)


def signal_name(code: int) -> str:
    """SIGSEGV and the like for the exit code of a child that a signal ended (-11)."""
    import signal

    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
