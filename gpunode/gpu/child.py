"""How gpunode starts one of its own modules as a child process."""

from __future__ import annotations

import sys


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments that run a module of this package with this Python.

    ``-P`` keeps the current directory off the module path: a file there named like a module of the standard
    library must not run with the rights of whoever calls gpunode.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def signal_name(code: int) -> str:
    """SIGSEGV and the like for the exit code of a child that a signal ended (-11)."""
    import signal

    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
