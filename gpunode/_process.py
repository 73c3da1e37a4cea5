"""`Host.run`'s other half: a child in its own session, killed as a whole, never waited for without end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

COMMAND_NOT_FOUND = 127
_GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class Completed:
    """A finished child. `code` is its exit status, 127 without such a program, negative for a signal."""

    argv: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out


def run_process(
    argv: tuple[str, ...], timeout: float, stdin: str | bytes | None, env: Mapping[str, str]
) -> Completed:
    """Run `argv` to its end or kill it and its children after `timeout` seconds."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
    except OSError as error:
        return Completed(argv, COMMAND_NOT_FOUND, "", f"{argv[0]}: {error.strerror}")
    timed_out = False
    try:
        out, err = child.communicate(given, timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
        out, err = _kill(child)
    except BaseException:
        _kill(child)
        raise
    code = child.returncode if child.returncode is not None else -signal.SIGKILL
    return Completed(argv, code, _text(out), _text(err), timed_out)


def _kill(child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Kill the whole session; give up on a child that even SIGKILL doesn't end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        return child.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return b"", b""
    finally:  # the second communicate() leaves a half-written stdin open
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")
