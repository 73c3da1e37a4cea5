"""From a command to its outcome: the machine it runs on, signals, errors, the exit code."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from gpunode.output.render import ENVELOPES, Color, Output

if TYPE_CHECKING:
    from gpunode.errors import GpunodeError
    from gpunode.host import Host
    from gpunode.output.render import StderrProgress
    from gpunode.output.result import Block, ExitCode, Result


DOCUMENTED = ("DoctorReport",)
"""Kinds of result that are also drawn as a page and as metrics."""
READING = (
    *("DoctorReport", "CheckExplanation", "GpuInventory", "MigLayout", "MigExport"),
    *("RuntimeStatus", "CdiDevices", "DriverPlan"),
)
"""Kinds of result for which a support bundle may stand for a machine: nothing is changed for them."""


HELD = (signal.SIGHUP, signal.SIGUSR1)
"""Blocked since the process started (__main__.py): they must not end a service before it has its handlers."""
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


@dataclass(frozen=True)
class Session:
    """What the global options amount to for one command: `chosen` are they, `kind` is the result's."""

    host: Host
    progress: StderrProgress
    kind: str = ""
    chosen: dict[str, Any] = field(default_factory=dict)

    def show(self, *blocks: Block) -> None:
        """Print a part of the result now, while the command goes on. JSON and YAML come whole at the end."""
        from gpunode.output.render import render
        from gpunode.output.result import Result

        if (self.chosen["output"] or Output.TABLE) is Output.TABLE:
            render(Result(self.kind, blocks=blocks), Output.TABLE, self.chosen["color"] or Color.AUTO)


@dataclass(frozen=True)
class Form:
    """How the outcome is told."""

    kind: str
    output: Output
    color: Color
    debug: bool


def run_command(
    kind: str, chosen: dict[str, Any], command: Callable[[Session], Result], service: bool = False
) -> int:
    """Run one command; whatever happens ends as a rendered result and an exit code.

    SIGTERM and SIGHUP interrupt a command as Ctrl-C does. A `service` gets each signal that comes while it
    starts once it has its handlers (`until_signal`), and none can spoil its outcome after that.
    """
    if not service:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        return _run(kind, chosen, command)
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDING, *HELD))
    for number in (*_ENDING, *HELD):
        signal.signal(number, lambda *_: None)  # SIG_IGN would drop those that are pending
    code = _run(kind, chosen, command)
    for number in (*_ENDING, *HELD):
        signal.signal(number, signal.SIG_IGN)  # as it ends Python restores the default of its own handlers
    return code


def _run(kind: str, chosen: dict[str, Any], command: Callable[[Session], Result]) -> int:
    from gpunode.errors import GpunodeError
    from gpunode.output.render import render_error
    from gpunode.output.result import ExitCode

    form = Form(kind, chosen["output"] or Output.TABLE, chosen["color"] or Color.AUTO, bool(chosen["debug"]))
    try:
        _refuse(kind, form.output)
        with _session(kind, chosen) as session:
            result = command(session)
        if result.file:
            _write(result, form)
    except GpunodeError as error:
        return _report(form, error)
    except KeyboardInterrupt:
        stopped = GpunodeError("interrupted", code="interrupted", exit_code=ExitCode.INTERRUPTED)
        return _report(form, stopped)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug is reported as one
        if isinstance(error, FileNotFoundError) and _directory_deleted():
            gone = GpunodeError(
                "the current directory was deleted",
                hint="change to a directory that exists: cd /",
                code="no-cwd",
            )
            return _report(form, gone)
        bug = GpunodeError(
            f"{type(error).__name__}: {error}",
            code="internal",
            hint="this is a bug in gpunode; run the same command with --debug and report what it prints",
        )
        return _report(form, bug)
    if not result.file and not _shown(result, form):
        return ExitCode.FAILED
    for info in result.errors:
        render_error(GpunodeError(info.message, hint=info.hint))
    return result.exit_code


def _directory_deleted() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _refuse(kind: str, output: Output) -> None:
    """Before anything is done: nobody wants a changed node and then no result."""
    from gpunode.errors import UsageError

    if output not in (Output.TABLE, *ENVELOPES) and kind not in DOCUMENTED:
        raise UsageError(f"this command has no -o {output}", hint="only gpunode doctor has; use -o json")


def _write(result: Result, form: Form) -> None:
    """Into the file that was asked for, on this machine whatever --root is."""
    from gpunode.host import Host
    from gpunode.output.render import document, output_for, say

    output = form.output
    if output is Output.TABLE:
        output = output_for(result.file) or output
    text = document(result, output)
    Host(Path("/")).write_atomic(
        str(Path(result.file).absolute()), text.encode("utf-8", "backslashreplace"), mode=0o644
    )
    say(f"wrote {result.file}")


@contextmanager
def _session(kind: str, chosen: dict[str, Any]) -> Iterator[Session]:
    from gpunode.host import Host
    from gpunode.output.render import StderrProgress

    progress = StderrProgress(int(chosen["verbose"] or 0))
    with _root(kind, (chosen["root"] or Path("/")).absolute().resolve()) as root:
        host = Host(root, dict(os.environ), progress.trace)
        _ = host.recording  # a malformed recording is one error now, not one in every check
        yield Session(host, progress, kind, chosen)


@contextmanager
def _root(kind: str, root: Path) -> Iterator[Path]:
    """The directory to act on; a support bundle is unpacked, for as long as the command looks at it."""
    from gpunode.errors import UsageError

    try:
        found, packed = root.is_dir(), root.is_file()
    except PermissionError as error:
        raise UsageError(
            f"--root {root} can't be read by this user", hint="run as root, with sudo"
        ) from error
    if packed:
        from gpunode.host.bundle import unpacked

        if kind not in READING:
            raise UsageError(
                f"--root {root} is a file, and a support bundle can only be looked at",
                hint=f"gpunode doctor --root {root}",
            )
        with unpacked(root) as machine:
            yield machine
        return
    if not found:
        raise UsageError(
            f"--root {root} is no directory",
            hint="give the directory that holds etc, sys and proc, or a bundle of gpunode report",
        )
    yield root


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that what was applied is rolled back."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _report(form: Form, error: GpunodeError) -> ExitCode:
    from gpunode.output.render import printable, render_error
    from gpunode.output.result import Result

    if form.debug:
        import sys
        import traceback

        sys.stderr.write(printable(traceback.format_exc()))  # it shows foreign words as well
    render_error(error)
    if form.output in ENVELOPES:
        failed = Result(form.kind, status="error", exit_code=error.exit_code, errors=(error.info(),))
        _shown(failed, form)
    return error.exit_code


def _shown(result: Result, form: Form) -> bool:
    """On stdout; where that takes no more, stderr says so."""
    from gpunode.errors import GpunodeError
    from gpunode.output.render import render, render_error

    try:
        render(result, form.output, form.color)
    except GpunodeError as error:
        render_error(error)
        return False
    return True
