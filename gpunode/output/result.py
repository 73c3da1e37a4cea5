"""Return value of a command: data for programs, blocks for users, one exit code for both.

A command returns a `Result` and prints nothing; `render.py` prints it. `Result.envelope()` is the JSON
contract (``apiVersion: gpunode/v1``): fields are added within v1, never removed or renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from gpunode.output.typed import StrEnum, plain

API_VERSION = "gpunode/v1"


class ExitCode(IntEnum):
    """Exit codes of the process, as in docs/exit-codes.md."""

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
    DOCUMENT = "document"
    """A line of a file for another program, such as kubectl: not colored, not wrapped."""


class Text(NamedTuple):
    """One line of text; leading spaces are kept."""

    text: str
    style: Style = Style.PLAIN


class Cell(NamedTuple):
    """One table cell with a style. `short` replaces its text if the terminal is too narrow."""

    text: str
    style: Style = Style.PLAIN
    short: str = ""


class Table(NamedTuple):
    """Rows under optional headings; every row has as many cells as there are columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]


class Diff(NamedTuple):
    """A unified diff, rendered line by line."""

    text: str


Block = Text | Table | Diff


class ErrorInfo(NamedTuple):
    """One error for programs; `code` is stable kebab-case."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Result:
    """Result of one command.

    `status` is ok, warn, fail or error; `data` is plain JSON or dataclasses. `documents` are the formats that
    only some results have (html, prometheus): by name, the function that renders each from the envelope. With
    `file` the result is written to that path of this machine, and not to stdout.
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


class Change(NamedTuple):
    """What happened, or would happen, to one file.

    `action` is created, updated, unchanged, removed or restored; `diff` is unified and empty if unchanged.
    """

    path: str
    action: str
    diff: str = ""


def change_blocks(changes: Sequence[Change], *, dry_run: bool) -> list[Block]:
    """A line for each file; in a dry run also its diff."""
    blocks: list[Block] = []
    for change in changes:
        unchanged = change.action == "unchanged"
        mark = " (dry run)" if dry_run and not unchanged else ""
        blocks.append(Text(f"{change.path} {change.action}{mark}", Style.PLAIN if unchanged else Style.GOOD))
        blocks += [Diff(change.diff)] if dry_run and change.diff else []
    return blocks


def command_blocks(commands: Sequence[str], *, dry_run: bool) -> list[Block]:
    """Commands that ran, or would run."""
    return [Text(f"{'would run' if dry_run else 'ran'}: {command}", Style.COMMAND) for command in commands]


class Progress(Protocol):
    """Progress, notes and information on stderr."""

    def step(self, text: str) -> AbstractContextManager[None]:
        """Name work that may take a moment. A terminal shows it after a second, and then its duration."""

    def note(self, text: str) -> None:
        """Print one line about a problem, which the user needs even with --quiet."""

    def info(self, text: str) -> None:
        """Print one line of information, which --quiet hides."""

    def following(self, text: str, name: str) -> AbstractContextManager[Callable[[str], None]]:
        """Like `step`, for work that may take minutes: the worker calls the returned function as often as it
        likes with the last line of output. `name` is one or two words for the work."""


def many(number: int, noun: str) -> str:
    """A count in words: ``1 GPU``, ``2 GPUs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def undecided(number: int, reasons: set[str], causes: set[str], fixed_by_reboot: Collection[str]) -> str:
    """Why a reboot can't be judged: this many of its checks have no result, for these reasons, as in
    `Finding.skipped`. `causes` are the findings that the blocked ones wait for."""
    doubt = f"{many(number, 'check')} could not run{' without root' if reasons == {'unreadable'} else ''}"
    if reasons == {"blocked"}:
        wait = f"{many(number, 'check')} {'waits' if number == 1 else 'wait'}"
        doubt = f"{wait} for the fix of {', '.join(sorted(causes))}"
        if causes <= {*fixed_by_reboot}:
            return f"No problem found, but {doubt}"
    return f"Unknown: {doubt}"


def some_of(items: Sequence[object], most: int) -> str:
    """The first `most` items in words, and how many more there are: ``a, b and 3 more``."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
