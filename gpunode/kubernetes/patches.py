"""What changes on a node, as a JSON patch (RFC 6902) that only holds for the node that was looked at.

Every patch tests what it replaces: the old value where there was one, the node's version where there was none
(RFC 6902 can't test for absence). A node that somebody else changed meanwhile refuses the whole patch, and it
is made anew. Pure: from a node, as the server gives it, to operations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.kubernetes.api import ClusterError, Json

_QUANTITY = re.compile(r"([0-9]{1,18})(|k|Ki|[MGTPE]i?|[eE][0-9]{1,2})")


@dataclass(frozen=True)
class Taint:
    """A node's taint; one key may have one taint of each effect."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


def pointer(*parts: str) -> str:
    """A JSON pointer: ``~`` is written ~0 and ``/`` is ~1 (RFC 6901)."""
    return "".join(f"/{part.replace('~', '~0').replace('/', '~1')}" for part in parts)


def label_patch(node: Json, wanted: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Operations that make `wanted` true: a value to set, None to take away; empty if it is so already."""
    return map_patch(node, ("metadata", "labels"), wanted)


def capacity_patch(node: Json, resource: str, count: int | None) -> list[dict[str, Any]]:
    """For the subresource status: how many of `resource` the node has; None takes the entry out.

    The kubelet copies it to allocatable when it next looks.
    """
    there = strings(node, ("status", "capacity")).get(resource)
    if there is not None and whole(there) == count:
        return []
    value = None if count is None else str(count)
    return map_patch(node, ("status", "capacity"), {resource: value})


def whole(quantity: str) -> int | None:
    """A number of devices as the API server writes it (Kubernetes, resource.Quantity): 1000 comes back as
    ``1k``. None for what isn't a whole number."""
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        return None
    number, suffix = int(found[1]), found[2]
    if suffix[1:].isdigit():
        return number * int(10 ** int(suffix[1:]))
    power = " kMGTPE".index(suffix[0].lower() if suffix[0] == "K" else suffix[0]) if suffix else 0
    return number * int((1024 if suffix.endswith("i") else 1000) ** power)


def map_patch(node: Json, at: tuple[str, ...], wanted: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """The same for any map of strings in an object."""
    there = strings(node, at)
    tests: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    adds = False
    for key, value in sorted(wanted.items()):
        old, path = there.get(key), pointer(*at, key)
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


def taint_patch(node: Json, wanted: Sequence[Taint]) -> list[dict[str, Any]]:
    """The whole list of taints in place of the one that was seen; `wanted` from `with_taints`."""
    there = _at(node, ("spec", "taints"))
    if not there:
        there = None  # the server leaves an empty list out
    kept = {_identity(one): one for one in there or ()}
    after = [_written(one, kept.get((one.key, one.effect))) for one in wanted]
    if after == (there or []):
        return []
    path = pointer("spec", "taints")
    if there is None:
        return [*_version_test(node), {"op": "add", "path": path, "value": after}]
    test = {"op": "test", "path": path, "value": there}
    if not after:
        return [test, {"op": "remove", "path": path}]
    return [test, {"op": "replace", "path": path, "value": after}]


def with_taints(there: Sequence[Taint], add: Sequence[Taint], remove: Sequence[Taint]) -> tuple[Taint, ...]:
    """The taints of a node after a change: `add` replaces those of the same key and effect.

    In `remove` an empty effect or value stands for all.
    """

    def goes(one: Taint) -> bool:
        return any(
            one.key == gone.key and gone.effect in ("", one.effect) and gone.value in ("", one.value)
            for gone in remove
        )

    new = {(one.key, one.effect): one for one in add}
    kept = [new.pop((one.key, one.effect), one) for one in there if not goes(one)]
    return (*kept, *new.values())


def taints_of(node: Json) -> tuple[Taint, ...]:
    """A node's taints. `ClusterError` for what is no list of taints."""
    found = _at(node, ("spec", "taints")) or []
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise ClusterError("the node's taints are no list: not an API server's answer")
    return tuple(Taint(*(str(one.get(name) or "") for name in ("key", "value", "effect"))) for one in found)


def labels_of(node: Json) -> dict[str, str]:
    return strings(node, ("metadata", "labels"))


def strings(node: Json, at: tuple[str, ...]) -> dict[str, str]:
    """A map of strings in an object; empty if there is none."""
    found = _at(node, at)
    if not isinstance(found, Mapping):
        return {}
    return {str(key): str(value) for key, value in found.items()}


def writer_of(node: Json, resource: str) -> str:
    """Who last gave a resource's capacity its value, by the server's own record; empty if it isn't told.

    managedFields name the manager of each field (Kubernetes, Server-Side Apply); a kubelet is "kubelet".
    """
    found = _at(node, ("metadata", "managedFields"))
    for entry in found if isinstance(found, list) else ():
        fields = _at(entry, ("fieldsV1", "f:status", "f:capacity")) if isinstance(entry, dict) else None
        if isinstance(fields, Mapping) and f"f:{resource}" in fields:
            return str(entry.get("manager") or "")
    return ""


def _version_test(node: Json) -> list[dict[str, Any]]:
    version = strings(node, ("metadata",)).get("resourceVersion")
    if not version:
        return []
    return [{"op": "test", "path": pointer("metadata", "resourceVersion"), "value": version}]


def _identity(taint: Mapping[str, Any]) -> tuple[str, str]:
    return str(taint.get("key") or ""), str(taint.get("effect") or "")


def _written(taint: Taint, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """As the API has it; a taint that stays keeps all of its fields (timeAdded)."""
    if before is not None and str(before.get("value") or "") == taint.value:
        return dict(before)
    value = {"value": taint.value} if taint.value else {}
    return {"effect": taint.effect, "key": taint.key, **value}


def _at(node: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node
