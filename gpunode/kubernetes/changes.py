"""Changes in the cluster: one JSON patch with retries, and objects that are created all or not at all.

A patch tests what it replaces (`map_patch`), so it may be sent again: if the first one was carried out and
only its response was lost, there is nothing left to do when the object is read again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpunode.errors import GpunodeError
from gpunode.host import Host, transaction
from gpunode.kubernetes.api import (
    FIELD_MANAGER,
    ClusterError,
    Conflict,
    Invalid,
    Json,
    NotFound,
    Patch,
    Unavailable,
    Unreachable,
    named,
)
from gpunode.output.result import Progress

if TYPE_CHECKING:
    from gpunode.kubernetes.client import Cluster

ATTEMPTS = 5
_PAUSES = (0.2, 0.5, 1.0, 2.0)  # seconds, after the first, second, ... attempt
_LONGEST_PAUSE = 10.0
_RETRY_SECONDS = 30.0  # no attempt starts later than this; one that is slow may use all of it
_LONGEST_VALUE = 500  # characters
_UNKNOWN = "it is unknown whether the change was applied (completely or not at all); run this again to check"
_Answer = TypeVar("_Answer")


class Changed(NamedTuple):
    """The object directly before the change and after it, and the last patch sent; empty if none."""

    before: Json
    after: Json
    patch: Patch


def patiently(
    host: Host, progress: Progress, request: Callable[[], _Answer], *, conflicts: bool = False
) -> _Answer:
    """Call what may be called again; for half a minute, retry while the server is busy or silent, and with
    `conflicts` also where another client has changed the object meanwhile."""
    started = host.monotonic()
    for attempt in range(ATTEMPTS):
        try:
            return request()
        except (Unavailable, Unreachable, Conflict) as error:
            if isinstance(error, Conflict) and not conflicts:
                raise
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

    Errors of `plan` are raised unchanged. A busy server, a lost response and a conflict are retried.
    """
    now: Json = {}
    started = host.monotonic()
    lost: tuple[Json, Patch] | None = None  # a patch with an unknown result, and the object it was for
    for attempt in range(ATTEMPTS):
        patch: Patch = ()
        try:
            now = read()
            patch = plan(now)
            if not patch:
                return Changed(lost[0], now, lost[1]) if lost else Changed(now, now, ())
            if lost is not None and _aims(patch) != _aims(lost[1]):
                return Changed(lost[0], send(patch), patch)  # it was made, and another client undid a part
            return Changed(now, send(patch), patch)
        except ClusterError as error:
            if error.sent:
                lost = lost or (now, patch)
            if not _worth_another(error, read, now):
                raise _with_outcome(error, lost[1] if lost else ()) from error
            try:
                _wait(host, progress, error, attempt, started)
            except ClusterError as last:
                raise _with_outcome(last, lost[1] if lost else ()) from error
        except KeyboardInterrupt:
            if patch or lost:
                progress.note(f"stopped: {_unknown(lost[1] if lost else patch)}")
            raise
    raise AssertionError("the last attempt raises")


def _aims(patch: Patch) -> list[tuple[str, str]]:
    """The result of a patch regardless of the previous state: path and value of each step."""
    return [
        (str(operation["path"]), repr(operation.get("value")))
        for operation in patch
        if operation["op"] != "test"
    ]


def _worth_another(error: ClusterError, read: Callable[[], Json], seen: Json) -> bool:
    """A conflict, a busy server or a lost answer; and a rejected patch, if the object has changed since: then
    a test in it failed, and the value may be right."""
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
    """Wait before the next attempt. Raise `error` after the last one, and if waiting doesn't help."""
    if attempt + 1 >= ATTEMPTS or error.lasting:
        raise error
    pause = min(max(_PAUSES[attempt], error.retry_after), _LONGEST_PAUSE)
    if host.monotonic() + pause - started > _RETRY_SECONDS:
        raise error
    progress.note(f"{error.message}; trying again")
    host.sleep(pause)


def _with_outcome(error: ClusterError, lost: Patch) -> ClusterError:
    """The last error, with the known state of the change; `lost` is the patch with an unknown result."""
    outcome = _unknown(lost) if lost else "nothing was changed"
    error.hint = f"{outcome}; {error.hint}" if error.hint else outcome
    return error


def _unknown(patch: Patch) -> str:
    """Add the values that the patch replaces: if it was made, the next run has nothing to undo."""
    before = [
        f"{_key(operation['path'])} was {_short(operation['value'])}"
        for operation in patch
        if operation["op"] == "test" and operation["path"] != "/metadata/resourceVersion"
    ]
    return f"{_UNKNOWN}; before, {', '.join(before)}" if before else _UNKNOWN


def _key(path: str) -> str:
    """The last part of a JSON pointer; see `pointer`."""
    return path.rpartition("/")[2].replace("~1", "/").replace("~0", "~")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


# --- patches --------------------------------------------------------------------------------------------
# JSON patches (RFC 6902) for one version of an object. Every patch tests what it replaces: the old value
# where there was one, the object's version where there was none (RFC 6902 can't test for absence). If another
# client has changed the object, the server rejects the whole patch and a new one is computed.

_QUANTITY = re.compile(r"([0-9]{1,18})(|k|Ki|[MGTPE]i?|[eE][0-9]{1,2})")


def pointer(*parts: str) -> str:
    """A JSON pointer: ``~`` is written ~0 and ``/`` is ~1 (RFC 6901)."""
    return "".join(f"/{part.replace('~', '~0').replace('/', '~1')}" for part in parts)


def label_patch(node: Json, labels: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Operations that set these labels, or remove those with None; empty if nothing differs."""
    return map_patch(node, ("metadata", "labels"), labels)


def capacity_patch(node: Json, resource: str, count: int | None) -> list[dict[str, Any]]:
    """For the subresource status: how many of `resource` the node has; None removes the entry.

    The kubelet copies it to allocatable at its next status update.
    """
    current = strings(node, ("status", "capacity")).get(resource)
    if current is not None and whole_number(current) == count:
        return []
    value = None if count is None else str(count)
    return map_patch(node, ("status", "capacity"), {resource: value})


def whole_number(quantity: str) -> int | None:
    """A number of devices in the API server's form (Kubernetes, resource.Quantity): 1000 is returned as
    ``1k``. None if it isn't a whole number."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        return None
    number, suffix = int(match[1]), match[2]
    if suffix[1:].isdigit():
        return number * int(10 ** int(suffix[1:]))
    power = " kMGTPE".index(suffix[0].lower() if suffix[0] == "K" else suffix[0]) if suffix else 0
    return number * int((1024 if suffix.endswith("i") else 1000) ** power)


def map_patch(node: Json, at: tuple[str, ...], values: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Like `label_patch`, for any map of strings in an object."""
    current = strings(node, at)
    tests: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    adds = False
    for key, value in sorted(values.items()):
        old, path = current.get(key), pointer(*at, key)
        if old == value:
            continue
        if old is not None:
            tests.append({"op": "test", "path": path, "value": old})
        if value is None:
            steps.append({"op": "remove", "path": path})
            continue
        adds = adds or old is None
        steps.append({"op": "add" if old is None else "replace", "path": path, "value": value})
    if adds and not isinstance(_at(node, at), Mapping):
        steps.insert(0, {"op": "add", "path": pointer(*at), "value": {}})
    return [*(_version_test(node) if adds else ()), *tests, *steps]


def labels_of(node: Json) -> dict[str, str]:
    return strings(node, ("metadata", "labels"))


def strings(node: Json, at: tuple[str, ...]) -> dict[str, str]:
    """A map of strings in an object; empty if there is none."""
    values = _at(node, at)
    return {str(key): str(value) for key, value in values.items()} if isinstance(values, Mapping) else {}


def writer_of(node: Json, resource: str) -> str:
    """The manager that last set a resource's capacity, by the server's own record; empty if unknown.

    managedFields name the manager of each field (Kubernetes, Server-Side Apply); a kubelet is "kubelet".
    """
    return _writers(node, ("status", "capacity")).get(resource, "")


def _writers(node: Json, at: tuple[str, ...]) -> dict[str, str]:
    """The manager of each entry of a map; see `writer_of`."""
    writers: dict[str, str] = {}
    entries = _at(node, ("metadata", "managedFields"))
    path = ("fieldsV1", *(f"f:{part}" for part in at))
    for entry in entries if isinstance(entries, list) else ():
        fields = _at(entry, path)
        for field in fields if isinstance(fields, Mapping) else ():
            writers.setdefault(str(field).removeprefix("f:"), str(entry.get("manager") or ""))
    return writers


def own_entries(node: Json, at: tuple[str, ...]) -> dict[str, str]:
    """The entries of a map, such as the labels, that gpunode set last; see `writer_of`."""
    writers = _writers(node, at)
    return {key: value for key, value in strings(node, at).items() if writers.get(key) == FIELD_MANAGER}


def _version_test(node: Json) -> list[dict[str, Any]]:
    version = strings(node, ("metadata",)).get("resourceVersion")
    if not version:
        return []
    return [{"op": "test", "path": pointer("metadata", "resourceVersion"), "value": version}]


def _at(node: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


# --- required objects -----------------------------------------------------------------------------------
# All or none of the missing ones are created. An existing one that differs is never overwritten: an
# administrator may have changed it on purpose.


class Held(NamedTuple):
    """A desired object, and the server's object of that name or None."""

    desired: Json
    existing: Json | None

    @property
    def differs(self) -> tuple[str, ...]:
        """JSON pointers to the values that differ in the existing object; () without one."""
        return () if self.existing is None else tuple(differences(self.desired, self.existing))


def look(host: Host, cluster: Cluster, objects: Sequence[Json], progress: Progress) -> tuple[Held, ...]:
    """Each object as the server has it. `ClusterError`."""
    return tuple(
        Held(desired, patiently(host, progress, partial(_find, cluster, desired))) for desired in objects
    )


def _find(cluster: Cluster, body: Json) -> Json | None:
    try:
        return cluster.get(*_address(body))
    except NotFound:
        return None


def _address(body: Json) -> tuple[str, str, str]:
    """Kind, name and namespace of an object."""
    return body["kind"], body["metadata"]["name"], body["metadata"].get("namespace", "")


def differences(desired: Any, existing: Any, at: str = "") -> list[str]:
    """JSON pointers to desired values that `existing` lacks; the server adds fields of its own."""
    if isinstance(desired, Mapping | list) and not desired and existing is None:
        return []
    if isinstance(desired, Mapping) and isinstance(existing, Mapping):
        items = desired.items()
        return [
            difference
            for key, value in items
            for difference in differences(value, existing.get(key), f"{at}/{key}")
        ]
    if isinstance(desired, list) and isinstance(existing, list) and len(desired) == len(existing):
        both = enumerate(zip(desired, existing, strict=True))
        return [
            difference for number, values in both for difference in differences(*values, f"{at}/{number}")
        ]
    # the server omits these
    empty = existing is None and (desired is None or desired == "" or desired is False)
    return [] if desired == existing or empty else [at or "/"]


def create(cluster: Cluster, objects: Sequence[Json]) -> tuple[Json, ...]:
    """Create them in their order. After any failure, Ctrl-C included, those that were created are deleted.

    An object that another client has created meanwhile isn't ours. `ClusterError` names what could not be
    deleted.
    """
    created: list[Json] = []

    def create_all() -> None:
        for desired in objects:
            item = _create(cluster, desired)
            if item is not None:
                created.append(item)

    def delete_again(error: BaseException) -> None:
        left = delete(cluster, created)
        if left and isinstance(error, ClusterError):
            error.hint = f"{error.hint}; these were made and could not be deleted: {', '.join(left)}"

    transaction.attempt(create_all, delete_again)
    return tuple(created)


def _create(cluster: Cluster, desired: Json) -> Json | None:
    """The object as it was created; None if another client has just created it."""
    try:
        return cluster.create(desired)
    except Conflict as error:
        if error.code != "kubernetes-exists":
            raise
        return None
    except Unreachable as error:
        if not error.sent:
            raise
        # it may have been created, and only the response was lost
        with suppress(GpunodeError):
            existing = cluster.get(*_address(desired))
            return None if differences(desired, existing) else existing
        raise


def delete(cluster: Cluster, created: Sequence[Json]) -> list[str]:
    """Delete what `create` returned, the last first; the names of those that could not be deleted."""
    left = []
    for item in reversed(created):
        try:
            cluster.delete(*_address(item))
        except NotFound:
            continue
        except GpunodeError:
            left.append(named(item))
    return left
