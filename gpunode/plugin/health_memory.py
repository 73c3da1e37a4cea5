"""Health memory: the marks in ``STATE_DIR/health.json``, which tell a restarted plugin the unhealthy GPUs.

It is forgotten with a reboot, which resets every GPU; only what requires other hardware is kept. A file that
can't be understood is renamed to ``health.json.broken``, with a warning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from gpunode.errors import GpunodeError
from gpunode.facts.kernel_log import HARDWARE
from gpunode.gpu.driver_traces import boot_id
from gpunode.host import Host
from gpunode.output.typed import from_plain
from gpunode.plugin.health_marks import Mark
from gpunode.plugin.logfmt import Log, OnChange

VERSION = 1
_FILE = "health.json"
_PAUSE_SECONDS = 2.0  # a storm of events must not cause a storm of writes
_RETRY_SECONDS = 30.0  # a disk that was full may have room again
_MOST_BYTES = 1 << 20
_MOST_REMEMBERED = 4096


class HealthMemory:
    """Read once; as a part of the service write what has changed. See `gpunode.plugin.model.Part`."""

    def __init__(self, host: Host, state_dir: str, log: Log) -> None:
        self._host = host
        self._path = f"{state_dir.rstrip('/')}/{_FILE}"
        self._log = log
        self._say = OnChange(log)
        self._written: tuple[Mark, ...] = ()
        self._next = 0.0
        self.source: Callable[[], tuple[Mark, ...]] = lambda: self._written

    def load(self) -> tuple[Mark, ...]:
        """The marks that still count. Never raises: the plugin serves without memory as well."""
        try:
            data = self._host.read_bytes(self._path)
        except (GpunodeError, OSError) as error:
            self._log.warning("health memory can't be read", reason=str(error))
            return ()
        if data is None:
            return ()
        try:
            boot, marks = _read(data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._lay_aside(repr(error))
            return ()
        self._written = marks
        now = boot_id(self._host)
        if boot and now and boot != now:
            marks = tuple(mark for mark in marks if mark.kind == HARDWARE)
        present = self._host.now()  # a clock that was ahead must not prolong a hold time
        marks = tuple(_not_after(mark, present) for mark in marks)
        if marks:
            self._log.info("health memory read", path=self._path, marks=len(marks))
        return marks

    def tick(self, now: float) -> None:
        """Write changes, at limited intervals."""
        if now >= self._next and self.source() != self._written:
            self._write(self.source())
            self._next = now + (_PAUSE_SECONDS if self.source() == self._written else _RETRY_SECONDS)

    def close(self) -> None:
        """Write all unwritten changes."""
        if self.source() != self._written:
            self._write(self.source())

    def _write(self, marks: tuple[Mark, ...]) -> None:
        document = {
            "version": VERSION,
            "bootId": boot_id(self._host),
            "marks": [asdict(mark) for mark in marks[:_MOST_REMEMBERED]],
        }
        try:
            self._host.make_dirs(self._path.rpartition("/")[0])
            data = (json.dumps(document, indent=1) + "\n").encode()
            self._host.write_atomic(self._path, data, keep=False)
            self._written = marks
            self._say.reset()
        except (GpunodeError, OSError) as error:
            self._say.warning(
                "health memory can't be written: it is lost when the plugin restarts", reason=str(error)
            )

    def _lay_aside(self, reason: str) -> None:
        aside = self._path + ".broken"
        try:
            self._host.rename(self._path, aside)
            self._log.warning("health memory is invalid and was renamed", path=aside, reason=reason)
        except (GpunodeError, OSError) as error:
            self._log.warning("health memory is invalid", path=self._path, reason=str(error))


def _read(data: bytes) -> tuple[str, tuple[Mark, ...]]:
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{len(data)} bytes")
    document = json.loads(data)
    if document["version"] != VERSION:
        raise ValueError(f"version {document['version']!r}, not {VERSION}")
    return str(document["bootId"]), tuple(_mark(item) for item in document["marks"][:_MOST_REMEMBERED])


def _not_after(mark: Mark, now: float) -> Mark:
    return replace(mark, since=min(mark.since, now), last=min(mark.last, now), mended=min(mark.mended, now))


def _mark(item: Any) -> Mark:
    mark = from_plain(Mark, item, unknown=False)
    if not all(math.isfinite(when) for when in (mark.since, mark.last, mark.mended)):
        raise ValueError("invalid time")
    if not mark.gpu or (mark.xid is None and mark.code.startswith("xid-")):
        raise ValueError(f"invalid mark: {mark.code!r}")
    return mark
