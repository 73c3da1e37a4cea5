"""`plugin status` for people: the plugin, the resources, the GPUs, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from gpunode.plugin.mending import how_to_mend
from gpunode.plugin.observe.report import ResourceStatus, Trouble, UnitStatus
from gpunode.result import Block, Cell, Style, Table, Text

if TYPE_CHECKING:
    from gpunode.commands.plugin_status import OwnPlugin, PluginStatus
    from gpunode.plugin.observe.sockets import PluginSocket

_RESOURCES = ("RESOURCE", "CAPACITY", "ALLOCATABLE", "HELD", "SERVED BY")
_UNITS = ("GPU", "MODEL", "DEVICE", "RESOURCE", "HEALTH", "HELD BY")
_UUID = re.compile(r"((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f-]{27}")
_MODEL, _RESOURCE = 1, 3
_HEALTH = {
    "healthy": Style.GOOD,
    "unhealthy": Style.BAD,
    "not-allocatable": Style.BAD,
    "not-advertised": Style.WARN,
    "unknown": Style.DIM,
}
_NO_KUBELET = {
    "absent": "systemctl status kubelet; another kubelet's directory: --kubelet-socket",
    "refused": "systemctl status kubelet",
    "denied": "run as root, for example with sudo",
}
_DEAD = "nobody listens on it; the kubelet removes it at its next start"


def blocks(data: PluginStatus) -> tuple[Block, ...]:
    found: list[Block] = [*_heads(data)]
    if data.resources:
        found.append(Table(_RESOURCES, tuple(_resource(data, one) for one in data.resources)))
    if data.units:
        found += _units(data.units)
    found += _wrong(data)
    if not data.resources and not data.units:
        found.append(Text("no GPU resource is registered with the kubelet", Style.WARN))
        if data.kubelet == "listening" and (data.plugin is None or data.plugin.state in ("ended", "gone")):
            found.append(Text("  gpunode plugin serve", Style.COMMAND))
    return tuple(found)


def _heads(data: PluginStatus) -> Iterator[Text]:
    state = "not asked" if data.kubelet == "unknown" else data.kubelet
    style = {"listening": Style.PLAIN, "unknown": Style.DIM}.get(data.kubelet, Style.WARN)
    yield Text(f"kubelet: {state} ({data.kubelet_socket})", style)
    if data.kubelet in _NO_KUBELET:
        yield Text(f"  {_NO_KUBELET[data.kubelet]}", Style.COMMAND)
    if data.plugin is not None:
        yield _plugin(data.plugin)
        if data.plugin.config_error:
            yield Text(f"config file refused, the last good one stays: {data.plugin.config_error}", Style.BAD)


def _plugin(own: OwnPlugin) -> Text:
    who = f"gpunode {own.version}, pid {own.pid}"
    if own.state == "ended":
        return Text(f"plugin: {who} ended at {own.stopped}", Style.WARN)
    if own.state == "gone":
        return Text(f"plugin: {who} is gone without a word; it last said: {own.status}", Style.BAD)
    since = f", since {own.started}" if own.started else ""
    style = Style.PLAIN if own.ready else Style.WARN
    state = "" if own.state == "serving" else f" ({own.state})"
    return Text(f"plugin: {who}{since}{state}: {own.status}", style)


def _resource(data: PluginStatus, one: ResourceStatus) -> tuple[Cell | str, ...]:
    name = one.name if one.sharing == "none" else f"{one.name} ({one.sharing})"
    short = one.allocatable is not None and one.capacity is not None and one.allocatable < one.capacity
    bad = one.registered is False or short
    return (
        name,
        _count(one.capacity),
        Cell(_count(one.allocatable), Style.BAD if bad else Style.PLAIN),
        str(one.held),
        _server(data, one),
    )


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)


def _server(data: PluginStatus, one: ResourceStatus) -> Cell:
    """Who listens on the resource's socket."""
    own = data.plugin.pid if data.plugin is not None else 0
    socket = next((item for item in data.sockets if item.resource == one.name and item.pid != own), None)
    if one.registered is False:
        known = one.status.startswith(("registered", "not registered"))
        return Cell(one.status if known else f"not registered: {one.status}".rstrip(": "), Style.BAD)
    if one.plugin == "gpunode":
        return Cell("gpunode")
    if socket is None:
        return Cell("another plugin", Style.DIM)
    who = f"{socket.program}, pid {socket.pid}" if socket.program else PurePosixPath(socket.path).name
    return Cell(who if socket.state == "listening" else f"{who} ({socket.state})")


def _units(units: tuple[UnitStatus, ...]) -> Iterator[Block]:
    """What is the same of every GPU is said once: eighty columns have no room for it in each row."""
    models = {unit.model or "?" for unit in units}
    resources = {unit.resource or "-" for unit in units}
    gone = {
        *((_MODEL,) if len(models) == 1 and not any(unit.profile for unit in units) else ()),
        *((_RESOURCE,) if len(resources) == 1 else ()),
    }
    if _MODEL in gone:
        yield Text(f"model: {models.pop()}")
    kept = [number for number in range(len(_UNITS)) if number not in gone]
    rows = tuple(tuple(row[number] for number in kept) for row in _rows(units))
    yield Table(tuple(_UNITS[number] for number in kept), rows)


def _rows(units: tuple[UnitStatus, ...]) -> Iterator[tuple[Cell | str, ...]]:
    """MIG devices under their GPU, which has a row of its own even if it isn't offered itself."""
    whole = {unit.index for unit in units}
    for unit in units:
        parent, part, _ = unit.index.partition(":")
        if part and parent not in whole:
            whole.add(parent)
            yield (parent, unit.model, Cell(unit.gpu, Style.DIM, _short(unit.gpu)), "", "", "")
        yield (
            unit.index or "?",
            f"  MIG {unit.profile}" if unit.profile else unit.model or "?",
            Cell(unit.id, short=_short(unit.id)),
            unit.resource or "-",
            Cell(_health(unit), _HEALTH.get(unit.health, Style.PLAIN)),
            _held(unit),
        )


def _short(device: str) -> str:
    """The first group of a UUID tells the GPUs of a node apart; for other ids nothing."""
    found = _UUID.fullmatch(device)
    return found[1] if found else ""


def _health(unit: UnitStatus) -> str:
    code = f" ({unit.problem.code})" if unit.problem and unit.health == "unhealthy" else ""
    return unit.health.replace("-", " ") + code


def _held(unit: UnitStatus) -> str:
    if unit.devices <= 1:
        return ", ".join(holder.name for holder in unit.holders) or "-"
    names = (
        f"{holder.name} ({len(holder.devices)})" if len(holder.devices) > 1 else holder.name
        for holder in unit.holders
    )
    return f"{unit.held} of {unit.devices} shares" + "".join(f", {name}" for name in names)


def _wrong(data: PluginStatus) -> Iterator[Block]:
    pid = data.plugin.pid if data.plugin is not None and data.plugin.state == "serving" else 0
    for (problem, health), units in troubles(data.units).items():
        since = f", since {problem.since}" if problem.since else ""
        bad = Style.BAD if health == "unhealthy" else Style.WARN
        yield Text(f"GPU {', '.join(unit.index or unit.id for unit in units)}: {problem.reason}{since}", bad)
        gpus = dict.fromkeys(unit.index.partition(":")[0] for unit in units)
        if mend := how_to_mend(problem.mend, ",".join(gpus), pid):
            yield Text(f"  {mend}", Style.COMMAND)
    known = {(unit.id, unit.index) for unit in data.units if unit.problem}
    for item in data.left_out:
        if not any(item.id == unit_id or item.index == index for unit_id, index in known):
            yield Text(f"GPU {item.index or item.id} is not advertised: {item.reason}", Style.DIM)
    for one in data.resources:
        if one.plugin == "other" and one.status:
            yield Text(f"{one.name}: gpunode is {one.status}", Style.BAD)
    yield from (_socket(one) for one in data.sockets if one.state != "listening")
    for source in data.sources:
        if source.state == "failed":
            yield Text(f"{source.name}: {source.problem}", Style.WARN)
            if source.hint:
                yield Text(f"  {source.hint}", Style.COMMAND)


def troubles(units: tuple[UnitStatus, ...]) -> dict[tuple[Trouble, str], list[UnitStatus]]:
    """What is wrong, and with which GPUs: a cause that all of them share is told once."""
    found: dict[tuple[Trouble, str], list[UnitStatus]] = {}
    told = set()
    for unit in units:
        if unit.problem and (unit.index or unit.id, unit.problem.code) not in told:
            told.add((unit.index or unit.id, unit.problem.code))
            found.setdefault((unit.problem, unit.health), []).append(unit)
    return found


def _socket(one: PluginSocket) -> Text:
    return Text(f"{one.path}: {_DEAD if one.state == 'refused' else one.state}", Style.WARN)
