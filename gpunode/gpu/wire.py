"""Reading back what `sentinel` tells. KeyError, TypeError or ValueError if a document is none of its."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunode.dataclass import fields
from gpunode.gpu.events import GpuEvent
from gpunode.gpu.model import Pair, Reading, Topology


def topology_from_json(data: Mapping[str, Any]) -> Topology:
    """Read back what `result.plain` made of a `Topology`."""
    pairs = tuple(
        Pair(item["first"], item["second"], item["level"], item["nvlinks"]) for item in data["pairs"]
    )
    return Topology(pairs, {str(uuid): int(count) for uuid, count in data["switchLinks"].items()})


def readings_from_json(data: list[Mapping[str, Any]]) -> tuple[Reading, ...]:
    """Read back what `result.plain` made of `Reading`s."""
    return tuple(Reading(**{name: item[key] for key, name in _READING.items()}) for item in data)


def event_from_json(data: Mapping[str, Any]) -> GpuEvent:
    """Read back what `result.plain` made of a `GpuEvent`."""
    return GpuEvent(data["kind"], data["uuid"], data["xid"], data["gi"], data["ci"])


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


_READING = {_camel(field.name): field.name for field in fields(Reading)}
