"""`gpunode plugin explain-placement`: what GetPreferredAllocation would answer on this node, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

from gpunode.commands.plugin_options import sources
from gpunode.commands.plugin_serve import refused
from gpunode.errors import ConfigError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.output.result import Block, Cell, Progress, Result, Style, Table, Text, plain

if TYPE_CHECKING:
    from gpunode.gpu.model import Inventory, Topology
    from gpunode.plugin.config.settings import Settings
    from gpunode.plugin.model import Plan, Resource, Unit
    from gpunode.plugin.placement.explain import Explanation, Group

_KIND = "PlacementExplanation"
_LEGEND = {
    "NV": "NVLinks",
    "INT": "one board",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a host bridge",
    "NODE": "a NUMA node",
    "SYS": "nothing but the system",
}


@dataclass(frozen=True)
class Options:
    """`available` and `must_include` are indices or ids, also several in one by commas; nothing available is
    everything. `given` is what the command line says of `plugin serve`'s options.
    """

    size: int
    available: tuple[str, ...] = ()
    must_include: tuple[str, ...] = ()
    resource: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)


def run(host: Host, options: Options, progress: Progress) -> Result:
    """`PreconditionError` where there are no GPUs to be seen, `UsageError` for devices that there aren't."""
    from gpunode.plugin.model import Snapshot
    from gpunode.plugin.placement.explain import explain

    if options.size < 1:
        raise UsageError(f"--size {options.size}: a container asks for one device or more")
    resolved = sources(host, options.given).resolve()
    if resolved.problems:
        return refused(_KIND, resolved.problems, {})
    with progress.step("asking how the GPUs hang together"):
        inventory, links, plan = _look(host, resolved.settings)
    resource = _resource(plan, resolved.settings, options.resource)
    available = _ids(resource, options.available) or tuple(device.id for device in resource.devices)
    must = _ids(resource, options.must_include)
    found = explain(resolved.settings, Snapshot(1, resource), links, available, must, options.size)
    data = {
        "resource": resource.name,
        "simulated": inventory.simulated,
        "size": options.size,
        "available": available,
        "mustInclude": must,
        "units": [_told(unit) for unit in resource.units],
        "links": list(_links(resource.units, links)),
        **plain(found),
    }
    return Result(_KIND, data, blocks=tuple(_blocks(resource, links, found)))


def _look(host: Host, settings: Settings) -> tuple[Inventory, Topology, Plan]:
    from gpunode.plugin.compose import make_backend
    from gpunode.plugin.config.look import look_with_links
    from gpunode.plugin.logfmt import NoLog

    backend = make_backend(host, settings, NoLog())
    inventory, links, why = look_with_links(host, settings, backend)
    if inventory is None:
        raise PreconditionError(
            f"there are no GPUs to be seen: {why}",
            hint="gpunode doctor; or try a node with --simulate h100:8",
        )
    return inventory, links, backend.plan(settings, inventory)


def _resource(plan: Plan, settings: Settings, name: str) -> Resource:
    there = {resource.name: resource for resource in plan.resources}
    if not there:
        left_out = "; ".join(f"{item.index}: {item.reason}" for item in plan.left_out)
        raise ConfigError(f"nothing would be advertised on this node{left_out and ': '}{left_out}")
    wanted = name or (settings.resource_name if settings.resource_name in there else "")
    if wanted in there:
        return there[wanted]
    if not wanted and len(there) == 1:
        return next(iter(there.values()))
    known = ", ".join(there)
    raise UsageError(
        f"no resource {name!r} would be advertised" if name else "several resources would be advertised",
        hint=f"--resource takes one of: {known}",
    )


def _ids(resource: Resource, asked: Sequence[str]) -> tuple[str, ...]:
    """Ids of devices for indices and ids; an index or a unit's id stands for all of its shares."""
    names: dict[str, list[str]] = {}
    for device in resource.devices:
        for name in dict.fromkeys((device.id, device.unit.id, device.unit.index)):
            names.setdefault(name, []).append(device.id)
    words = [word.strip() for text in asked for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in names]
    if unknown:
        known = ", ".join(unit.index for unit in resource.units)
        raise UsageError(
            f"{resource.name} has no device {', '.join(unknown)}", hint=f"indices there are: {known}"
        )
    return tuple(dict.fromkeys(one for word in words for one in names[word]))


# --- telling it -----------------------------------------------------------------------------------------


def _told(unit: Unit) -> dict[str, Any]:
    return {"index": unit.index, "id": unit.id, "name": unit.name, "pci": unit.pci, "numa": unit.numa}


def _links(units: Sequence[Unit], topology: Topology) -> Iterator[dict[str, Any]]:
    from gpunode.plugin.placement.scores import Links

    links = Links(topology)
    for first, second in combinations(units, 2):
        near = links.near(first, second)
        yield {
            "first": first.index,
            "second": second.index,
            "word": near.word,
            "level": near.level,
            "nvlinks": near.direct,
            "switchLinks": near.switch,
            "score": near.score,
        }


def _blocks(resource: Resource, topology: Topology, found: Explanation) -> Iterator[Block]:
    chosen = {device.unit.index for device in resource.devices if device.id in found.chosen}
    if found.policy == "aligned":
        yield _matrix(resource.units, topology, chosen)
        yield Text(_legend(resource.units, topology), Style.DIM)
        yield Text("")
        yield _candidates(found.candidates)
    else:
        yield Table(
            ("DEVICE", "ID", "SHARES", "IN USE", "CHOSEN"),
            tuple(
                (
                    one.index,
                    one.unit,
                    str(one.devices),
                    str(one.held),
                    Cell(str(one.chosen or "-"), Style.GOOD if one.chosen else Style.DIM),
                )
                for one in found.uses
            ),
        )
    yield Text("")
    yield Text(
        f"chosen of {resource.name} ({found.policy}): {', '.join(_indices(resource, found))}", Style.GOOD
    )
    for reason in found.reasons:
        yield Text(f"  {reason}")
    for group in found.leaves:
        yield Text(f"  left for others: {','.join(group.indices)} ({group.why}, score {group.score})")


def _indices(resource: Resource, found: Explanation) -> list[str]:
    """What people call the chosen devices: an index, with ``::3`` for a share."""
    names = {device.id: device for device in resource.devices}
    return [
        names[one].unit.index + "".join(one.partition("::")[1:]) if one in names else one
        for one in found.chosen
    ] or ["nothing"]


def _matrix(units: Sequence[Unit], topology: Topology, chosen: set[str]) -> Table:
    """As ``nvidia-smi topo -m``."""
    from gpunode.plugin.placement.scores import Links

    links = Links(topology)

    def cell(one: Unit, other: Unit) -> Cell | str:
        inside = {one.index, other.index} <= chosen and one is not other
        word = "X" if one is other else links.near(one, other).word
        return Cell(word, Style.GOOD) if inside else word

    return Table(
        ("", *(f"GPU{unit.index}" for unit in units), "NUMA"),
        tuple(
            (
                Cell(f"GPU{unit.index}", Style.GOOD if unit.index in chosen else Style.PLAIN),
                *(cell(unit, other) for other in units),
                "-" if unit.numa is None else str(unit.numa),
            )
            for unit in units
        ),
    )


def _legend(units: Sequence[Unit], topology: Topology) -> str:
    """The words in the table, and which way the scores go."""
    from gpunode.plugin.placement.scores import Links

    links = Links(topology)
    there = {links.near(a, b).word.rstrip("0123456789") for a, b in combinations(units, 2)}
    words = [f"{word} {meaning}" for word, meaning in _LEGEND.items() if word in there]
    return "; ".join(("in common: " + ", ".join(words), "a higher score is nearer") if words else ())


def _candidates(groups: Sequence[Group]) -> Table:
    return Table(
        ("GROUP", "SCORE", "ALL DIVIDED", "LINKS"),
        tuple(
            (
                Cell(",".join(group.indices), Style.GOOD if number == 0 else Style.PLAIN),
                str(group.score),
                "-" if group.total is None else str(group.total),
                group.why,
            )
            for number, group in enumerate(groups)
        ),
    )
