"""What a command gives back: data for programs, blocks for people, one exit code for both.

A command returns a `Result` and prints nothing; `render.py` is the only reader. `Result.envelope()` is the
JSON contract (``apiVersion: gpunode/v1``): fields are added within v1, never removed or renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Protocol

from gpunode.output.typed import plain

API_VERSION = "gpunode/v1"


class ExitCode(IntEnum):
    """What the process exits with; docs/exit-codes.md says when."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PRECONDITION = 3
    ROLLED_BACK = 4
    DIFFERS = 5
    INTERRUPTED = 130


class Style(StrEnum):
    """The meaning of a piece of text; `render.py` alone decides what it looks like."""

    PLAIN = "plain"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    DIM = "dim"
    HEADING = "heading"
    COMMAND = "command"


@dataclass(frozen=True)
class Text:
    """One line for people; leading spaces are kept."""

    text: str
    style: Style = Style.PLAIN


@dataclass(frozen=True)
class Cell:
    """One table cell with a meaning. `short` stands for it where the terminal is too narrow for all."""

    text: str
    style: Style = Style.PLAIN
    short: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under optional headings; every row has as many cells as there are columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]


@dataclass(frozen=True)
class Diff:
    """A unified diff, rendered line by line."""

    text: str


Block = Text | Table | Diff


@dataclass(frozen=True)
class ErrorInfo:
    """One error as programs read it; `code` is stable kebab-case."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Result:
    """One command's outcome. `status` is ok, warn, fail or error; `data` is plain JSON or dataclasses.

    `documents` are the forms that only some results have (html, prometheus): by name, what draws each from
    the envelope. With `file` the result is written to that path of this machine, and not to stdout.
    """

    kind: str
    data: Any = field(default_factory=dict)
    status: str = "ok"
    exit_code: ExitCode = ExitCode.OK
    messages: tuple[str, ...] = ()
    errors: tuple[ErrorInfo, ...] = ()
    blocks: tuple[Block, ...] = ()
    documents: Mapping[str, Callable[[dict[str, Any]], str]] = field(default_factory=dict)
    file: str = ""

    def envelope(self) -> dict[str, Any]:
        """The versioned JSON document."""
        return {
            "apiVersion": API_VERSION,
            "kind": self.kind,
            "status": self.status,
            "exitCode": int(self.exit_code),
            "data": plain(self.data),
            "messages": list(self.messages),
            "errors": [plain(error) for error in self.errors],
        }


@dataclass(frozen=True)
class Step:
    """One thing that a fix does, as it is carried out: a program without a shell, or a file or a link.

    Either `argv`, or `path` with `content` (the whole file) or `link` (what the symlink shows). `disruptive`
    as `Fix` has it.
    """

    argv: tuple[str, ...] = ()
    path: str = ""
    content: str = ""
    link: str = ""
    disruptive: str = "none"


@dataclass(frozen=True)
class Fix:
    """One command that mends a finding. `disruptive` is none, restart, drain or reboot.

    A fix with `steps` can be carried out by `doctor --fix --apply`; one that is also `safe` disturbs nothing
    that runs, can be undone, and needs no further leave.
    """

    command: str
    needs_root: bool = True
    disruptive: str = "none"
    safe: bool = False
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """What was seen: `source` is a path or a command, `line` is 1-based or None."""

    source: str
    value: str
    line: int | None = None


class FindingStatus(StrEnum):
    """What a check came to; `error` means the check itself broke."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check, in the JSON contract's field order. `severity`: error, warning or info.

    A `note` has passed and is worth knowing. `skipped` is why there is no judgement: not-applicable, blocked,
    unreadable, left-out, hangs or nothing-to-judge; empty if there is one. `ignored` is the reason for which
    an error only counts as a warning. `reboot`: it belongs to the section "Safe to reboot?".
    """

    id: str
    title: str
    status: FindingStatus
    severity: str
    summary: str
    evidence: tuple[Evidence, ...] = ()
    why: str = ""
    fix: tuple[Fix, ...] = ()
    blocked_by: str | None = None
    refs: tuple[str, ...] = ()
    milliseconds: float = 0.0
    layer: str = ""
    note: bool = False
    skipped: str = ""
    ignored: str | None = None
    reboot: bool = False


@dataclass(frozen=True)
class Change:
    """What happened, or would happen, to one file.

    `action` is created, updated, unchanged, removed or restored; `diff` is unified and empty if unchanged.
    """

    path: str
    action: str
    diff: str = ""


class Progress(Protocol):
    """Tells a person what is going on, on stderr; tests pass `SilentProgress`."""

    def step(self, text: str) -> AbstractContextManager[None]:
        """Announce work that may take a moment; leaving the context says how long it took."""

    def note(self, text: str) -> None:
        """Say one thing that a person should know now."""

    def following(self, text: str, name: str) -> AbstractContextManager[Callable[[str], None]]:
        """As `step`, for what may take minutes: whoever does the work calls what this gives, as often as it
        likes, with the last thing that it heard. `name` is what a person calls the work in a word or two."""
