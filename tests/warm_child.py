"""A child that has NVML by a fork instead of a new Python: the same module with the same pipes.

Otherwise most of a test with hundreds of sessions is the interpreter that starts and imports.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pynvml  # noqa: F401  each child has it already

from gpunode.gpu import nvml_watcher  # noqa: F401  each child has it already
from gpunode.gpu.child import module_argv
from gpunode.host.process import LineChild
from gpunode.mig import nvml  # noqa: F401  each child has it already


class ForkedPopen:
    """As much of Popen as `LineChild` needs. Only for modules of this package."""

    def __init__(
        self, argv: tuple[str, ...], *, env: Mapping[str, str], pass_fds: tuple[int, ...] = (), **_: object
    ) -> None:
        module, *arguments = argv[len(module_argv("")) - 1 :]
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # a thread of another test may still be running
            self.pid = os.fork()
        if self.pid == 0:
            _be_the_child(theirs, pass_fds, env, module, arguments)
        for number in theirs:
            os.close(number)
        self.stdin = os.fdopen(pipes[0][1], "wb", 0)
        self.stdout = os.fdopen(pipes[1][0], "rb", 0)
        self.stderr = os.fdopen(pipes[2][0], "rb", 0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("forked child", timeout)
            time.sleep(0.001)
        assert self.returncode is not None
        return self.returncode


def _be_the_child(
    pipes: list[int], pass_fds: tuple[int, ...], env: Mapping[str, str], module: str, arguments: list[str]
) -> None:
    """Never returns. The loader has read LD_LIBRARY_PATH long ago: NVML is loaded by its path."""
    code = 1
    try:
        os.setsid()
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
        for number in set(range(3, 1024)) - set(pass_fds):
            with suppress(OSError):
                os.close(number)
        faulthandler.disable()  # crashes here are intended
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        os.environ.clear()
        os.environ.update(env)
        for directory in env["LD_LIBRARY_PATH"].split(":"):
            ctypes.CDLL(str(Path(directory) / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
        sys.argv = [module, *arguments]
        code = import_module(module).main()
    finally:
        os._exit(code)


class WarmChild(LineChild):
    """A `LineChild` that starts at once."""

    def __init__(self, argv: tuple[str, ...], env: Mapping[str, str]) -> None:
        with patch("subprocess.Popen", ForkedPopen):
            super().__init__(argv, env)
