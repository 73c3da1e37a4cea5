"""Changing an object by one patch until it holds, whatever happens on the way.

A patch tests what it replaces (`patches.py`), so it may be sent again: had the first one been carried out and
only its answer been lost, the second look finds nothing left to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from gpunode.dataclass import dataclass
from gpunode.host import Host
from gpunode.kubernetes.api import ClusterError, Conflict, Invalid, Json, Patch, Unavailable, Unreachable
from gpunode.result import Progress

ATTEMPTS = 5
_PAUSES = (0.2, 0.5, 1.0, 2.0)  # seconds, after the first, second, ... attempt
_LONGEST_PAUSE = 10.0
_RETRY_SECONDS = 30.0  # no attempt starts later than this; one that is slow may use all of it
_LONGEST_VALUE = 500  # characters; taints are one value
_UNKNOWN = "whether the change was made can't be told: all of it or none; run this again to find out"
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Changed:
    """The object as it was right before the change and as it is now, and the patch that was sent last; empty
    if none."""

    before: Json
    after: Json
    patch: Patch


def patiently(host: Host, progress: Progress, ask: Callable[[], _Answer]) -> _Answer:
    """Call a read-only request; for half a minute, retry while the server is busy or silent."""
    started = host.monotonic()
    for attempt in range(ATTEMPTS):
        try:
            return ask()
        except (Unavailable, Unreachable) as error:
            _wait(host, progress, error, attempt, started)
    raise AssertionError("the last attempt raises")


def change(
    host: Host,
    progress: Progress,
    read: Callable[[], Json],
    plan: Callable[[Json], Patch],
    send: Callable[[Patch], Json],
) -> Changed:
    """Read, plan and patch; `ClusterError` says whether anything was changed.

    What `plan` raises goes through. A busy server, a lost answer and a conflict are tried again.
    """
    now: Json = {}
    started = host.monotonic()
    lost: tuple[Json, Patch] | None = None  # a patch of which we don't know what became, and what it was for
    for attempt in range(ATTEMPTS):
        patch: Patch = ()
        try:
            now = read()
            patch = plan(now)
            if not patch:
                return Changed(lost[0], now, lost[1]) if lost else Changed(now, now, ())
            if lost is not None and _aims(patch) != _aims(lost[1]):
                return Changed(lost[0], send(patch), patch)  # it was made, and some of it is to be made again
            return Changed(now, send(patch), patch)
        except ClusterError as error:
            if isinstance(error, Unreachable | Unavailable) and error.sent:
                lost = lost or (now, patch)
            if not _worth_another(error, read, now):
                raise _told(error, lost[1] if lost else ()) from error
            try:
                _wait(host, progress, error, attempt, started)
            except ClusterError as last:
                raise _told(last, lost[1] if lost else ()) from error
        except KeyboardInterrupt:
            if patch or lost:
                progress.note(f"stopped: {_unknown(lost[1] if lost else patch)}")
            raise
    raise AssertionError("the last attempt raises")


def _aims(patch: Patch) -> list[tuple[str, str]]:
    """What it is to come to, whatever there was: path and value of each step."""
    return [(str(one["path"]), repr(one.get("value"))) for one in patch if one["op"] != "test"]


def _worth_another(error: ClusterError, read: Callable[[], Json], seen: Json) -> bool:
    """A conflict, a busy server or a lost answer; and a refused patch, if the object has changed since: then
    it was a test of ours that failed, and not the value."""
    if not isinstance(error, Invalid):
        return isinstance(error, Conflict | Unavailable | Unreachable)
    try:
        return bool(_version(read()) != _version(seen))
    except (Unavailable, Unreachable):
        return True


def _version(node: Json) -> Any:
    metadata = node.get("metadata")
    return metadata.get("resourceVersion") if isinstance(metadata, dict) else None


def _wait(host: Host, progress: Progress, error: ClusterError, attempt: int, started: float) -> None:
    """Wait before the next attempt. Raise `error` after the last one, and if waiting can't help."""
    if attempt + 1 >= ATTEMPTS or (isinstance(error, Unreachable) and error.lasting):
        raise error
    asked = error.retry_after if isinstance(error, Unavailable) else 0.0
    pause = min(max(_PAUSES[attempt], asked), _LONGEST_PAUSE)
    if host.monotonic() + pause - started > _RETRY_SECONDS:
        raise error
    progress.note(f"{error.message}; trying again")
    host.sleep(pause)


def _told(error: ClusterError, lost: Patch) -> ClusterError:
    """The last error, with what is known of the change; `lost` is the patch of which it isn't known."""
    outcome = _unknown(lost) if lost else "nothing was changed"
    error.hint = f"{outcome}; {error.hint}" if error.hint else outcome
    return error


def _unknown(patch: Patch) -> str:
    """With what the patch replaces: if it was made, the next run finds nothing to do and so no way back."""
    there = [
        f"{_key(one['path'])} was {_short(one['value'])}"
        for one in patch
        if one["op"] == "test" and one["path"] != "/metadata/resourceVersion"
    ]
    return f"{_UNKNOWN}; before, {', '.join(there)}" if there else _UNKNOWN


def _key(path: str) -> str:
    """The last part of a JSON pointer; see `patches.pointer`."""
    return path.rpartition("/")[2].replace("~1", "/").replace("~0", "~")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
