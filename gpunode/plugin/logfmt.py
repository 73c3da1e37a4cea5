"""The plugin's log on stderr, by the standard `logging`: ``time=... level=info msg="..." key=value`` or JSON.

systemd's journal takes the level as ``<6>`` in front of a line (sd-daemon(3)); JOURNAL_STREAM names by device
and inode what the journal reads.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from threading import Lock
from typing import TextIO

_PRIORITIES = {logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6}  # sd-daemon(3)


class Log:
    """A logger of which every keyword argument is one ``key=value``."""

    def __init__(self, handler: logging.Handler) -> None:
        # outside the tree of loggers: no library's settings apply
        self._logger = logging.Logger("gpunode", logging.INFO)
        self._logger.addHandler(handler)

    def info(self, message: str, **fields: object) -> None:
        self._logger.info(message, extra={"fields": fields})

    def warning(self, message: str, **fields: object) -> None:
        self._logger.warning(message, extra={"fields": fields})

    def error(self, message: str, **fields: object) -> None:
        self._logger.error(message, extra={"fields": fields})


def open_log(stream: TextIO, environ: Mapping[str, str], log_format: str = "text") -> Log:
    """A log of whole lines on `stream`, for every thread; `log_format` is text or json."""
    handler = _StreamHandler(stream)
    journal = _is_journal(stream, environ.get("JOURNAL_STREAM", ""))
    handler.setFormatter(LineFormatter(as_json=log_format == "json", journal=journal))
    return Log(handler)


def silent_log() -> Log:
    """A log that discards what a backend reports, for commands that read the GPUs once."""
    return Log(logging.NullHandler())


class _StreamHandler(logging.StreamHandler):  # type: ignore[type-arg] # generic only from Python 3.11 on
    def handleError(self, record: logging.LogRecord) -> None:
        """Raise errors that are bugs of ours; a full disk or a closed stream must not stop the service."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, (OSError, ValueError)):
            raise error


class LineFormatter(logging.Formatter):
    """One line with time (RFC 3339), level, msg and fields; for the journal the priority in front.

    Text for the journal has no time: journalctl shows its own.
    """

    def __init__(self, *, as_json: bool = False, journal: bool = False) -> None:
        super().__init__()
        self._as_json = as_json
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        created = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        time = {} if self._journal and not self._as_json else {"time": created.replace("+00:00", "Z")}
        fields = {"level": record.levelname.lower(), "msg": record.getMessage(), **vars(record)["fields"]}
        text = json_line({**time, **fields}) if self._as_json else line({**time, **fields})
        return f"<{_PRIORITIES[record.levelno]}>{text}" if self._journal else text


def json_line(fields: Mapping[str, object]) -> str:
    """One JSON object in ASCII; numbers that JSON supports and booleans stay, everything else is a string."""
    return json.dumps({key: value if _is_json(value) else str(value) for key, value in fields.items()})


def _is_json(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def line(fields: Mapping[str, object]) -> str:
    """One logfmt line; a value is quoted where it has to be, and never breaks the line."""
    return " ".join(f"{key}={_value(str(value))}" for key, value in fields.items())


def _value(text: str) -> str:
    if text and text.isprintable() and not set(text) & set(' "=\\'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    printable = (c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in escaped)
    return '"' + "".join(printable) + '"'


def _is_journal(stream: TextIO, journal_stream: str) -> bool:
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return journal_stream == f"{status.st_dev}:{status.st_ino}"


class OnChange:
    """Reports a state once, and again only after another one; different fields count as another state."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._last: object = None

    def warning(self, message: str, **fields: object) -> None:
        state = (message, fields)
        if state != self._last:
            self._last = state
            self._log.warning(message, **fields)

    def reset(self) -> None:
        """Report the next state in any case: the error is over."""
        self._last = None


class Rarely:
    """Reports equal messages once in `seconds`: a faulty GPU reports thousands of equal events.

    At most `_KINDS` messages are remembered; the oldest is forgotten first.
    """

    _KINDS = 256

    def __init__(self, seconds: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._seen: dict[object, tuple[float, int]] = {}
        self._lock = Lock()

    def times(self, what: object) -> int:
        """0 if `what` is not to be reported now, else how often it occurred since the last report."""
        with self._lock:
            now = self._clock()
            reported, suppressed = self._seen.get(what, (-self._seconds, 0))
            if now - reported < self._seconds:
                self._seen[what] = (reported, suppressed + 1)
                return 0
            self._seen.pop(what, None)
            while len(self._seen) >= self._KINDS:
                del self._seen[next(iter(self._seen))]
            self._seen[what] = (now, 0)
            return suppressed + 1
