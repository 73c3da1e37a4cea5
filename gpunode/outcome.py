"""From a command to its outcome: the machine it runs on, signals, errors, the exit code.

Nothing of the command line's parser is needed for it: a command that stays (light.py) runs without one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from gpunode.output import Color, Output

if TYPE_CHECKING:
    from gpunode.errors import GpunodeError
    from gpunode.host import Host
    from gpunode.render import StderrProgress
    from gpunode.result import ExitCode, Result


class Session(NamedTuple):
    """What the global options amount to for one command: `chosen` are they, `kind` is the result's."""

    host: Host
    progress: StderrProgress
    kind: str = ""
    chosen: dict[str, Any] = {}  # noqa: RUF012 - never written to


class Form(NamedTuple):
    """How the outcome is told."""

    kind: str
    output: Output
    color: Color
    debug: bool


def run_command(kind: str, chosen: dict[str, Any], command: Callable[[Session], Result]) -> int:
    """Run one command; whatever happens ends as a rendered result and an exit code."""
    from gpunode.errors import GpunodeError
    from gpunode.render import render, render_error
    from gpunode.result import ExitCode

    form = Form(kind, chosen["output"] or Output.TABLE, chosen["color"] or Color.AUTO, bool(chosen["debug"]))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        result = command(_session(kind, chosen))
    except GpunodeError as error:
        return _report(form, error)
    except KeyboardInterrupt:
        stopped = GpunodeError("interrupted", code="interrupted", exit_code=ExitCode.INTERRUPTED)
        return _report(form, stopped)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug is reported as one
        bug = GpunodeError(
            f"{type(error).__name__}: {error}",
            code="internal",
            hint="this is a bug in gpunode; run the same command with --debug and report what it prints",
        )
        return _report(form, bug)
    render(result, form.output, form.color)
    for info in result.errors:
        render_error(GpunodeError(info.message, hint=info.hint))
    return result.exit_code


def _session(kind: str, chosen: dict[str, Any]) -> Session:
    from gpunode.errors import UsageError
    from gpunode.host import Host
    from gpunode.render import StderrProgress

    progress = StderrProgress(int(chosen["verbose"] or 0))
    root = (chosen["root"] or Path("/")).absolute().resolve()
    try:
        found = root.is_dir()
    except PermissionError as error:
        raise UsageError(
            f"--root {root} can't be read by this user", hint="run as root, with sudo"
        ) from error
    if not found:
        raise UsageError(
            f"--root {root} is no directory", hint="give the directory that holds etc, sys and proc"
        )
    host = Host(root, dict(os.environ), progress.trace)
    _ = host.recording  # a malformed recording is one error now, not one in every check
    return Session(host, progress, kind, chosen)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that what was applied is rolled back."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _report(form: Form, error: GpunodeError) -> ExitCode:
    from gpunode.render import render, render_error
    from gpunode.result import Result

    if form.debug:
        import traceback

        traceback.print_exc()
    render_error(error)
    if form.output is not Output.TABLE:
        failed = Result(form.kind, status="error", exit_code=error.exit_code, errors=(error.info(),))
        render(failed, form.output, form.color)
    return error.exit_code
