"""How gpunode starts one of its own modules as a child process."""

from __future__ import annotations

import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments that run a module of this package with this Python.

    ``-P`` keeps the current directory off the module path: a file there named like a module of the standard
    library must not run with the rights of whoever calls gpunode.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: that has the time limit, and NVML may hang."""
    import ctypes  # here, as the plugin's serving process needs only `module_argv`

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def signal_name(code: int) -> str:
    """SIGSEGV and the like for the exit code of a child that a signal ended (-11)."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
