"""Errors that a command may report. Each says what happened and, in `hint`, what to do about it.

Anything else that escapes a command is a bug and is reported as one (traceback with ``--debug``).
"""

from __future__ import annotations

from gpunode.output.result import ErrorInfo, ExitCode


class GpunodeError(Exception):
    """An expected failure: one line of what, one line of hint, an exit code and a stable `code`."""

    default_exit_code = ExitCode.FAILED
    default_code = "failed"

    def __init__(
        self, message: str, *, hint: str = "", code: str = "", exit_code: ExitCode | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.default_code
        self.exit_code = exit_code if exit_code is not None else self.default_exit_code

    def info(self) -> ErrorInfo:
        """The error as a JSON envelope shows it."""
        return ErrorInfo(self.code, self.message, self.hint)


class UsageError(GpunodeError):
    """The command line is invalid: unknown runtime, contradictory options."""

    default_exit_code = ExitCode.USAGE
    default_code = "usage"


class PreconditionError(GpunodeError):
    """Refused before anything was written: not root, engine absent, containers would be stopped."""

    default_exit_code = ExitCode.PRECONDITION
    default_code = "precondition"


class ConfigError(GpunodeError):
    """A configuration file that can't be read, parsed or edited safely; names file, line and column."""

    default_code = "config"


class ValidationError(GpunodeError):
    """The daemon itself refuses the staged configuration; nothing was written."""

    default_code = "validation"


class RolledBackError(GpunodeError):
    """Applied, failed and rolled back: the node is unchanged."""

    default_exit_code = ExitCode.ROLLED_BACK
    default_code = "rolled-back"


class NotRestoredError(GpunodeError):
    """Applied, failed and rolled back, but something is not as it was; the message names it."""

    default_code = "not-restored"


class Unreadable(GpunodeError):
    """Something exists but this user may not read it. A check that meets it is skipped and says so."""

    default_code = "unreadable"


class DaemonError(GpunodeError):
    """A daemon's socket can't be reached, or it answered with an error."""

    default_code = "daemon"


def install_command(extra: str, library: str) -> str:
    """Command that installs what an extra needs for the interpreter that runs now.

    It names the libraries themselves, because no package index has gpunode; in a checkout, only `library`.
    """
    import shlex
    import sys
    from importlib.metadata import PackageNotFoundError, requires
    from importlib.util import find_spec

    try:
        listed = requires("gpunode") or ()
    except PackageNotFoundError:
        listed = ()
    parts = [requirement.partition(";") for requirement in listed]
    needed = [name.strip() for name, _, marker in parts if extra in marker]
    what = shlex.join(needed or [library])
    if find_spec("pip") is None:  # as uv makes environments
        return f"uv pip install --python {shlex.quote(sys.executable)} {what}"
    return f"{shlex.quote(sys.executable)} -m pip install {what}"
