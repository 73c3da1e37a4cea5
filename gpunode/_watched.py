"""`Host.run`'s other half for what must not be ended half-way because nobody listens any more."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import BinaryIO

from gpunode._process import COMMAND_NOT_FOUND, Completed, _kill, _text
from gpunode._unnamed import unnamed_file

_LOOK_SECONDS = 0.25
_GRACE_SECONDS = 10.0
_LAST_BYTES = 2000


def run_watched(
    argv: tuple[str, ...], timeout: float, env: Mapping[str, str], watch: Callable[[str], None], program: str
) -> Completed:
    """As `run_process`, but the child writes to memory and not to a pipe: if we are killed it goes on.

    A broken pipe would end a package manager, or the script of a package, by SIGPIPE. `watch` is told what
    was printed last, several times a second. It has `timeout` seconds from the last that it printed: one that
    still says something isn't stuck. Then it is asked to end before it is killed.
    """
    with _memory() as out, _memory() as err:
        try:
            child = subprocess.Popen(
                argv,
                executable=program,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(env),
                start_new_session=True,
            )
        except OSError as error:
            return Completed(argv, COMMAND_NOT_FOUND, "", f"{argv[0]}: {error.strerror}")

        def look() -> int:
            watch(_last_line(out) or _last_line(err))
            return _size(out) + _size(err)

        try:
            timed_out = not _ends(child, timeout, look)
            if timed_out:
                _ask_to_end(child)
        except BaseException:
            _kill(child)
            raise
        if timed_out:
            _kill(child)
        code = child.returncode if child.returncode is not None else -signal.SIGKILL
        said, complained = (_text(os.pread(one.fileno(), _size(one), 0)) for one in (out, err))
        return Completed(argv, code, said, complained, timed_out)


def _ends(child: subprocess.Popen[bytes], timeout: float, look: Callable[[], int]) -> bool:
    """Whether it ends before it has been silent for so long; `look` counts the bytes that it has said."""
    deadline, said = time.monotonic() + timeout, 0
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(min(left, _LOOK_SECONDS))
            return True
        if (now := look()) != said:
            deadline, said = time.monotonic() + timeout, now
    return False


def _ask_to_end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM to its session: package managers put their locks and lists in order."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_SECONDS)


def _memory() -> BinaryIO:
    return os.fdopen(unnamed_file(), "w+b", buffering=0)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _last_line(file: BinaryIO) -> str:
    """Carriage returns end lines too, as progress bars have them. The child's own position stays."""
    end = os.pread(file.fileno(), _LAST_BYTES, max(0, _size(file) - _LAST_BYTES))
    lines = (line.strip() for line in reversed(_text(end).splitlines()))
    return next((line for line in lines if line), "")
