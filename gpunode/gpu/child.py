"""How gpunode starts one of its own modules as a child process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpunode.host import Completed, Host


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments that run a module of this package with this Python.

    ``-P`` keeps the current directory off the module path: a file there named like a module of the standard
    library must not run with the rights of whoever calls gpunode.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def run_module(
    host: Host,
    module: str,
    *arguments: str,
    timeout: float,
    started: Callable[[], None] | None = None,
) -> Completed:
    """`Host.run` for a module of this package whose `main()` prints one answer.

    Where a fork of this process is as good as a new one it is forked: that spares an interpreter its start,
    and all that is imported already. `started` is called while the child has its turn, and may start threads.
    """
    argv = module_argv(module, *arguments)
    if not host.forkable():
        if started is not None:
            started()
        return host.run(argv, timeout=timeout)
    from gpunode.gpu.forked import run_each
    from gpunode.host import Completed

    if host.trace is not None:
        host.trace(" ".join(argv))
    with os.fdopen(os.memfd_create("stderr"), "rb") as errors:
        job = _job(module, arguments)
        (outcome,) = run_each([job], timeout, errors=errors.fileno(), started=started)
        errors.seek(0)
        said = errors.read()
    out, err = outcome.output.decode("utf-8", "replace"), said.decode("utf-8", "replace")
    return Completed(argv, outcome.code, out, err, outcome.timed_out)


def _job(module: str, arguments: tuple[str, ...]) -> Callable[[], bytes]:
    """What a process of its own would be to the module, in a forked one."""

    def run() -> bytes:
        import io
        import signal
        from importlib import import_module

        os.setsid()  # Ctrl-C is the parent's, which ends this
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        sys.argv = [module, *arguments]
        sys.stdout = io.StringIO()
        import_module(module).main()
        return sys.stdout.getvalue().encode()

    return run


def signal_name(code: int) -> str:
    """SIGSEGV and the like for the exit code of a child that a signal ended (-11)."""
    import signal

    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
