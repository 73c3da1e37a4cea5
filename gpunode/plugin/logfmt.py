"""Log lines for people and machines: ``time=... level=info msg="..." key=value`` on stderr.

Under systemd the journal keeps the time and wants the level as ``<6>`` in front (sd-daemon(3));
JOURNAL_STREAM says by device and inode whether stderr really leads there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Protocol, TextIO

_PRIORITY = {"error": 3, "warning": 4, "info": 6}


class Log(Protocol):
    """What the plugin says; every field is one ``key=value``."""

    def info(self, message: str, **fields: object) -> None: ...

    def warning(self, message: str, **fields: object) -> None: ...

    def error(self, message: str, **fields: object) -> None: ...


class NoLog:
    """For those who only look: what a backend would say while it serves is not asked for."""

    def info(self, message: str, **fields: object) -> None:
        """Not told."""

    def warning(self, message: str, **fields: object) -> None:
        """Not told."""

    def error(self, message: str, **fields: object) -> None:
        """Not told."""


class LogfmtLog:
    """Writes whole lines to one stream, from any thread."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str]) -> None:
        self._stream = stream
        self._journal = _is_journal(stream, environ.get("JOURNAL_STREAM", ""))
        self._lock = Lock()

    def info(self, message: str, **fields: object) -> None:
        self._write("info", message, fields)

    def warning(self, message: str, **fields: object) -> None:
        self._write("warning", message, fields)

    def error(self, message: str, **fields: object) -> None:
        self._write("error", message, fields)

    def _write(self, level: str, message: str, fields: Mapping[str, object]) -> None:
        head: dict[str, Any] = {"level": level, "msg": message, **fields}
        if not self._journal:
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            head = {"time": now, **head}
        priority = f"<{_PRIORITY[level]}>" if self._journal else ""
        # a full disk or a reader that left must not end the service
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(priority + line(head) + "\n")
            self._stream.flush()


def line(fields: Mapping[str, object]) -> str:
    """One logfmt line; a value is quoted where it has to be, and never breaks the line."""
    return " ".join(f"{key}={_value(str(value))}" for key, value in fields.items())


def _value(text: str) -> str:
    if text and text.isprintable() and not set(text) & set(' "=\\'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    printable = (c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in escaped)
    return '"' + "".join(printable) + '"'


def _is_journal(stream: TextIO, announced: str) -> bool:
    try:
        seen = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return announced == f"{seen.st_dev}:{seen.st_ino}"


class OnChange:
    """Says a thing once, and again only after it has said another; other fields make it another."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._last: object = None

    def warning(self, message: str, **fields: object) -> None:
        said = (message, fields)
        if said != self._last:
            self._last = said
            self._log.warning(message, **fields)

    def reset(self) -> None:
        """All is well: whatever comes next is news."""
        self._last = None


class Rarely:
    """Lets the same thing through once in `seconds`: a faulty GPU reports thousands of equal events.

    At most `_KINDS` things are remembered, the oldest are forgotten first.
    """

    _KINDS = 256

    def __init__(self, seconds: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._seen: dict[object, tuple[float, int]] = {}
        self._lock = Lock()

    def times(self, what: object) -> int:
        """0 if `what` should not be told now, else how often it came since it was told, this one included."""
        with self._lock:
            return self._times(what, self._clock())

    def _times(self, what: object, now: float) -> int:
        told, kept = self._seen.get(what, (-self._seconds, 0))
        if now - told < self._seconds:
            self._seen[what] = (told, kept + 1)
            return 0
        self._seen.pop(what, None)
        while len(self._seen) >= self._KINDS:
            del self._seen[next(iter(self._seen))]
        self._seen[what] = (now, 0)
        return kept + 1
