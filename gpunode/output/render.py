"""Output of results for users and programs. The only module that writes to stdout; imports rich only for a
terminal.

Data goes to stdout, everything else to stderr. Text from a file or a daemon is untrusted: control characters
are shown as ``\\x1b`` and never reach the terminal.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import RLock, Timer
from typing import Any, TextIO

from gpunode.errors import ConfigError, GpunodeError
from gpunode.output.result import Block, Cell, Diff, Result, Style, Table, Text
from gpunode.output.typed import StrEnum

# Output formats and colour. They come first, because the command line needs them before anything else.


class Output(StrEnum):
    """``-o``: the output format. Only some commands have a page and metrics (`Result.documents`)."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    HTML = "html"
    PROMETHEUS = "prometheus"


ENVELOPES = (Output.JSON, Output.YAML)
"""The machine-readable forms that every command has."""


def output_for(path: str) -> Output | None:
    """The format for a file's suffix, None if the suffix has none."""
    ends = {".json": Output.JSON, ".yaml": Output.YAML, ".yml": Output.YAML, ".html": Output.HTML}
    ends |= {".htm": Output.HTML, ".prom": Output.PROMETHEUS, ".txt": Output.TABLE}
    return next((form for end, form in ends.items() if path.endswith(end)), None)


class Color(StrEnum):
    """``--color``: always beats NO_COLOR, NO_COLOR beats FORCE_COLOR, both beat the terminal."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


_RICH_STYLES = {
    Style.PLAIN: "",
    Style.GOOD: "green",
    Style.WARN: "yellow",
    Style.BAD: "bold red",
    Style.DIM: "dim",
    Style.HEADING: "bold",
    Style.COMMAND: "cyan",
    Style.DOCUMENT: "",
}


_UNSEEN = {
    code: f"\\u{code:04x}"
    for part in ((0x7F, 0xA0), (0x202A, 0x202F), (0x2066, 0x206A))
    for code in range(*part)
}
"""Characters that JSON may contain unescaped and a terminal interprets: DEL, C1 controls, text direction."""
_BYTE = re.compile(r"(?<!\\ud[89ab][0-9a-f]{2})\\udc([89a-f][0-9a-f])")
"""How Python escapes a byte that is not UTF-8; not the second half of a character in JSON."""
SHOWN_SECONDS = 1.0
"""A step that takes no longer is not shown."""
_ALIVE_SECONDS = 20.0  # often enough to show that it doesn't hang, without filling the screen
_ALIVE_WIDTH = 160


def wants_color(color: Color, stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to colour what goes to `stream` (no-color.org; TERM=dumb counts as no terminal)."""
    if color is not Color.AUTO:
        return color is Color.ALWAYS
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and environ.get("TERM") != "dumb"


def render(result: Result, output: Output, color: Color) -> None:
    """Write a result to stdout in the requested format, and its messages to stderr in the table format.

    `ConfigError` if stdout can't be written, for example on a full disk.
    """
    try:
        if output is Output.TABLE:
            for message in result.messages:
                say(message)
            sys.stdout.flush()
            _render_blocks(result.blocks, wants_color(color, sys.stdout, os.environ))
        else:
            sys.stdout.write(document(result, output))
        sys.stdout.flush()
    except OSError as error:
        failed = output_failed(error)
        if failed is not None:
            raise failed from error


def output_failed(error: OSError) -> ConfigError | None:
    """Error for a failed write to stdout: none if its reader has exited (`| head`).

    Nothing more is written to stdout, so that Python doesn't report it again at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return None
    return ConfigError(
        f"can't write to standard output: {error.strerror or error}",
        hint="redirect standard output to another file",
    )


def render_error(error: GpunodeError) -> None:
    """``error: what`` and ``hint: what to do``, on stderr."""
    say(f"error: {error.message}")
    if error.hint:
        sys.stderr.write(
            printable(f"hint: {error.hint}") + "\n"
        )  # not wrapped, so that a user can copy a command in it


def document(result: Result, output: Output) -> str:
    """The whole result as one text, ending in a newline, without colour; empty if the result has no such
    form."""
    if output is Output.TABLE:
        lines = [printable(line) for block in result.blocks for line in plain_lines(block)]
        return "".join(f"{line}\n" for line in lines)
    if output not in ENVELOPES:
        draw = result.documents.get(output)
        return draw(result.envelope()) if draw else ""
    if output is Output.JSON:
        import json

        text = json.dumps(result.envelope(), indent=2, ensure_ascii=False)
        return text.translate(_UNSEEN) + "\n"
    import yaml

    return str(yaml.safe_dump(result.envelope(), sort_keys=False, allow_unicode=True, width=110))


def say(text: str) -> None:
    """Print a line, or several, on stderr; wrapped on a terminal."""
    with suppress(OSError):  # nothing can reach a reader that has exited; the command continues
        if sys.stderr.isatty():
            width = _columns(sys.stderr)
            text = "\n".join(_wrapped(Text(line), width) for line in text.split("\n"))
        with _LINE.lock:
            _LINE.clear()
            sys.stderr.write(printable(text) + "\n")


def _columns(stream: TextIO) -> int:
    """A serial console doesn't report its width, and returns 0."""
    return os.get_terminal_size(stream.fileno()).columns or 80


class _ChangingLine:
    """The last line of a terminal while it is rewritten; any other text replaces it.

    The lock is for the thread that announces a step, and may be taken again by a signal handler that prints.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._shown = False

    def show(self, text: str) -> None:
        with self.lock, suppress(OSError):
            width = _columns(sys.stderr)
            line = printable(text).replace("\t", " ")
            sys.stderr.write(f"\r{line[: max(1, width - 1)]}\x1b[K")
            sys.stderr.flush()
            self._shown = True

    def clear(self) -> None:
        with self.lock, suppress(OSError):
            if self._shown:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
                self._shown = False


_LINE = _ChangingLine()


def _is_changing() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """The text with control characters escaped; newlines and tabs stay, undecodable bytes are escaped."""
    encoded = _BYTE.sub(r"\\x\1", text.encode("utf-8", "backslashreplace").decode())
    return "".join(char if char in "\n\t" or char.isprintable() else ascii(char)[1:-1] for char in encoded)


# --- blocks ---------------------------------------------------------------------------------------------


def _render_blocks(blocks: tuple[Block, ...], color: bool) -> None:
    if color or sys.stdout.isatty():
        _render_rich(blocks, color)
        return
    for block in blocks:  # lines are not wrapped in a file or a pipe, for grep and diff
        for line in plain_lines(block):
            sys.stdout.write(printable(line) + "\n")


def plain_lines(block: Block, narrow: bool = False) -> list[str]:
    """One block as lines without colour; table columns are padded, the last one is not. `narrow`: with short
    cells."""
    if isinstance(block, Text):
        return [block.text]
    if isinstance(block, Diff):
        return block.text.splitlines()
    rows = [tuple(_text(cell, narrow) for cell in row) for row in block.rows]
    lines = [block.columns, *rows] if any(block.columns) else rows
    widths = [max((len(row[column]) for row in lines), default=0) for column in range(len(block.columns))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    ]


def _text(cell: Cell | str, narrow: bool = False) -> str:
    if isinstance(cell, str):
        return cell
    return cell.short if narrow and cell.short else cell.text


def _render_rich(blocks: tuple[Block, ...], color: bool) -> None:
    from rich.console import Console

    console = Console(
        # of a dumb terminal, which has no colour, rich would not ask the width
        force_terminal=color,
        color_system="auto" if color else None,
        # for a pipe or a file rich would assume 80 columns
        width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else sys.maxsize,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )
    for block in blocks:
        if isinstance(block, Table):
            table = _rich_table(block, console.width)
            words = console.measure(table, options=console.options.update(width=sys.maxsize)).minimum
            if words <= console.width:
                console.print(table, soft_wrap=False)
                continue
            for line in plain_lines(block, narrow=True):  # the terminal wraps them, and no word is split
                console.print(printable(line))
        elif isinstance(block, Diff):
            for line in block.text.splitlines():
                console.print(printable(line), style=_diff_style(line))
        else:
            console.print(_wrapped(block, console.width), style=_RICH_STYLES[block.style])


def _wrapped(block: Text, width: int) -> str:
    """Words are not broken; lines keep their indent, or that of the text of a numbered step. Commands and
    documents stay as they are."""
    text = printable(block.text)
    if block.style in (Style.COMMAND, Style.DOCUMENT) or len(text) <= width:
        return text
    start = re.sub(r"^( *(\d+\. )?).*", r"\1", text)
    return textwrap.fill(
        text.removeprefix(start),
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _rich_table(block: Table, width: int) -> Any:
    """Cells wrap if the terminal is too narrow, and have their short text, but the first one, which names the
    row, has one line."""
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    table = RichTable(box=None, show_header=any(block.columns), header_style="bold", pad_edge=False)
    narrow = max(map(len, plain_lines(block)), default=0) > width
    for number, column in enumerate(block.columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    for row in block.rows:
        styles = (cell.style if isinstance(cell, Cell) else Style.PLAIN for cell in row)
        pairs = zip(row, styles, strict=True)
        table.add_row(
            *(RichText(printable(_text(cell, narrow)), _RICH_STYLES[style]) for cell, style in pairs)
        )
    return table


def _diff_style(line: str) -> str:
    if line.startswith(("+++", "---")):
        return "bold"
    return {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")


# --- progress -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StderrProgress:
    """Progress on a terminal, for what takes longer than a second; notes go to every stderr.

    A pipe and a file get no progress: they keep what is printed, and `-v` lists the commands for a log.
    """

    verbose: int = 0
    quiet: bool = False

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        started = time.monotonic()
        ended = "failed after"
        try:
            with _announced(f"  {text} ..."):
                yield
            ended = "done in"
        finally:
            seconds = time.monotonic() - started
            if seconds >= SHOWN_SECONDS:
                say(f"  {text}: {ended} {seconds:.1f} s")

    def note(self, text: str) -> None:
        say(f"  {text}")

    def info(self, text: str) -> None:
        if not self.quiet:
            say(f"  {text}")

    @contextmanager
    def following(self, text: str, name: str) -> Iterator[Callable[[str], None]]:
        """One line that is rewritten; on a terminal that can't do that, a line every `_ALIVE_SECONDS`."""
        started = last_shown = time.monotonic()
        silent = self.quiet or not sys.stderr.isatty()

        def show(last: str) -> None:
            nonlocal last_shown
            now = time.monotonic()
            if silent or now - started < SHOWN_SECONDS:
                return
            going = f"  {name}, {now - started:.0f} s" + (f": {last}" if last else "")
            if _is_changing():
                _LINE.show(going)
            elif now - last_shown >= _ALIVE_SECONDS:
                last_shown = now
                say(f"{going[:_ALIVE_WIDTH]}")

        with self.step(text):
            yield show

    def trace(self, command: str) -> None:
        """With ``-v``, every command that gpunode runs."""
        if self.verbose:
            say(f"  + {command}")


@contextmanager
def _announced(line: str) -> Iterator[None]:
    """Show `line` on the terminal if the block takes longer than `SHOWN_SECONDS`; it is gone at the end."""
    timer = Timer(SHOWN_SECONDS, _LINE.show if _is_changing() else say, (line,))
    timer.daemon = True
    try:
        # the thread inherits the mask: a signal that the main thread blocks must not be delivered there
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            timer.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        _LINE.clear()
