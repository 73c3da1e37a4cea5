"""`gpunode plugin status`: which resources are registered, which pod has which device, and which is
unhealthy.

It queries the kubelet's own sockets and files, whichever plugin is serving. It only connects to another
plugin's socket: a second ListAndWatch stream would take health updates away from the kubelet's (NVIDIA's
plugin sends each update to one stream).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Annotated, NamedTuple, TypeVar

import typer

from gpunode.commands.options import duration_option
from gpunode.commands.plugin import plugin_app
from gpunode.commands.plugin_options import StateDirOption, plugin_option
from gpunode.commands.session import Session, verb
from gpunode.daemons.pod_resources import Holding, allocatable, list_pods
from gpunode.errors import DaemonError, GpunodeError, PreconditionError, Unreadable
from gpunode.facts.device_plugins import status_path
from gpunode.facts.kubelet import NAME, Checkpoint, read_checkpoint
from gpunode.gpu.model import Inventory, short_uuid
from gpunode.gpu.probe import probe
from gpunode.host import PLUGIN_STATE, Host
from gpunode.output.result import Block, Cell, Progress, Result, Style, Table, Text
from gpunode.plugin.config.settings import KUBELET_SOCKET, Settings, pod_resources_socket
from gpunode.plugin.model import LeftOut, how_to_fix
from gpunode.plugin.observe.status_file import OwnStatus, PluginSocket, plugin_sockets, read_own_status
from gpunode.plugin.observe.status_report import (
    DeviceProblem,
    Known,
    ResourceStatus,
    UnitStatus,
    make_report,
    utc_time,
)

TIMEOUT_SECONDS = 5.0
_NEWS_SECONDS = 3.0  # the plugin writes its status once a second at most, on a busy node later
_AGAIN_SECONDS = 0.4
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Query:
    """The command's options. An empty socket is looked up: that of our running plugin, else the kubelet's
    default."""

    kubelet_socket: Annotated[
        str,
        typer.Option(
            "--kubelet-socket", metavar="PATH", help="Socket of the kubelet.", show_default="the plugin's"
        ),
    ] = ""
    pod_resources_socket: Annotated[
        str, plugin_option("pod_resources_socket", metavar="PATH", show_default="the plugin's")
    ] = ""
    state_dir: StateDirOption = PLUGIN_STATE
    nvml: Annotated[
        bool,
        typer.Option("--nvml/--no-nvml", help="Query the driver (NVML) for what the plugin doesn't report."),
    ] = True
    every: Annotated[bool, typer.Option("--all", help="Also show resources that aren't GPUs.")] = False
    timeout: Annotated[
        float,
        duration_option("--timeout", least=0.1, default=TIMEOUT_SECONDS, help="Time limit for each request."),
    ] = TIMEOUT_SECONDS


class Source(NamedTuple):
    """A source that was queried. `state`: read, absent, skipped or failed; `problem` and `hint` say why."""

    name: str
    path: str
    state: str
    problem: str = ""
    hint: str = ""


class OwnPlugin(NamedTuple):
    """Our plugin's own report; see `OwnStatus`. Times are such as 2026-05-01T12:00:00Z, or empty."""

    state: str
    version: str
    pid: int
    started: str
    stopped: str
    ready: bool
    status: str
    config_file: str
    config_error: str


class PluginStatus(NamedTuple):
    """`data` of the envelope. `plugin` is None if no plugin of gpunode's has served on this node."""

    kubelet_socket: str
    kubelet: str
    plugin: OwnPlugin | None
    resources: tuple[ResourceStatus, ...]
    units: tuple[UnitStatus, ...]
    left_out: tuple[LeftOut, ...]
    sockets: tuple[PluginSocket, ...]
    sources: tuple[Source, ...]


def _between_news(data: PluginStatus) -> bool:
    """Whether the kubelet knows of a change that our plugin hasn't written yet, or the other way round:
    compared with each other, the two would show a fault where there is none."""
    if data.plugin is None or data.plugin.state != "serving":
        return False
    # without these, our own old list looks like another plugin's
    own_names = {resource.name for resource in data.resources if resource.plugin}
    return any(
        unit.resource in own_names
        and (unit.health == "not-allocatable" or (unit.health == "unhealthy" and unit.allocatable))
        for unit in data.units
    )


def _is_healthy(data: PluginStatus) -> bool:
    return (
        data.kubelet in ("listening", "unknown")
        and all(unit.health == "healthy" for unit in data.units)
        and all(socket.state == "listening" for socket in data.sockets)
        and all(resource.registered is not False for resource in data.resources)
        and not any(source.state == "failed" for source in data.sources)
        and (data.plugin is None or (data.plugin.state != "gone" and not data.plugin.config_error))
    )


class _Sources:
    """Collects the result of each query."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.denied: GpunodeError | None = None  # the first refusal for lack of rights

    def query(self, name: str, path: str, question: Callable[[], _Found | None]) -> _Found | None:
        try:
            answer = question()
        except GpunodeError as error:
            if error.code == "denied" or isinstance(error, Unreadable):
                self.denied = self.denied or error
            absent = error.code in ("absent", "not-live", "unsupported")
            state = "absent" if absent else "failed"
            self.sources.append(Source(name, path, state, error.message, error.hint))
            return None
        self.sources.append(Source(name, path, "absent" if answer is None else "read"))
        return answer

    def skip(self, name: str, path: str, reason: str) -> None:
        self.sources.append(Source(name, path, "skipped", reason))


def _gather(host: Host, query: Query, progress: Progress) -> PluginStatus:
    reader = _Sources()
    own_path = status_path(query.state_dir)
    own = reader.query("plugin", own_path, lambda: read_own_status(host, query.state_dir))
    kubelet_socket, pod_resources = _sockets_of(query, own)
    directory = str(PurePosixPath(kubelet_socket).parent)
    kubelet = reader.query("kubelet", kubelet_socket, lambda: host.socket_state(kubelet_socket))
    free, holdings = _kubelet_answers(host, reader, query, pod_resources, directory)
    node_facts = Known(own, free, holdings, None, query.every)
    report = make_report(node_facts)
    inventory = _inventory(host, reader, query, report.units, own, progress)
    if inventory is not None:
        report = make_report(replace(node_facts, inventory=inventory))
    names = [resource.name for resource in report.resources]
    sockets = reader.query("sockets", directory, lambda: plugin_sockets(host, directory, names))
    _refuse_blind(reader)
    return PluginStatus(
        kubelet_socket,
        "unknown" if not kubelet or (kubelet == "absent" and not host.live) else kubelet,
        None if own is None else _own(own),
        report.resources,
        report.units,
        report.left_out,
        tuple(socket for socket in sockets or () if query.every or socket.resource or _of_gpus(socket)),
        tuple(reader.sources),
    )


def _sockets_of(query: Query, own: OwnStatus | None) -> tuple[str, str]:
    """The kubelet's and PodResources' sockets: from the options, as our plugin uses them, or the defaults."""
    reported = own.settings if own and own.current else {}
    kubelet = query.kubelet_socket or str(reported.get("kubeletSocket") or KUBELET_SOCKET)
    usual = Settings.pod_resources_socket
    reported_socket = usual if query.kubelet_socket else str(reported.get("podResourcesSocket") or usual)
    return kubelet, query.pod_resources_socket or pod_resources_socket(kubelet, reported_socket)


def _kubelet_answers(
    host: Host, reader: _Sources, query: Query, socket: str, directory: str
) -> tuple[Mapping[str, Sequence[str]] | None, tuple[Holding, ...]]:
    """Allocatable devices and their pods: from PodResources, or else from the kubelet's last checkpoint."""
    holdings = reader.query("pods", socket, lambda: list_pods(host, socket, query.timeout))
    free: Mapping[str, Sequence[str]] | None = None
    if holdings is not None:
        free = reader.query("allocatable", socket, lambda: allocatable(host, socket, query.timeout))
    if holdings is not None and free is not None:
        return free, holdings
    path = f"{directory}/{NAME}"
    checkpoint: Checkpoint | None = reader.query("checkpoint", path, lambda: read_checkpoint(host, directory))
    if checkpoint is None:
        return free, holdings or ()
    return checkpoint.healthy if free is None else free, checkpoint.holdings if holdings is None else holdings


def _inventory(
    host: Host,
    reader: _Sources,
    query: Query,
    units: Sequence[UnitStatus],
    own: OwnStatus | None,
    progress: Progress,
) -> Inventory | None:
    """NVML is queried only if our plugin hasn't reported everything: it is slow, and may hang."""
    if not query.nvml:
        reader.skip("nvml", "", "--no-nvml")
    elif own is not None and own.current and all(unit.index for unit in units):
        reader.skip("nvml", "", "our plugin knows these GPUs")
    else:
        with progress.step("querying NVML"):
            return reader.query("nvml", "", lambda: _probed(host, query.timeout))
    return None


def _probed(host: Host, timeout: float) -> Inventory | None:
    answer = probe(host, timeout)
    if answer.inventory is None:
        code = "absent" if not answer.timed_out and answer.code is not None else ""
        raise DaemonError(answer.message, hint="find out why: gpunode doctor", code=code)
    return answer.inventory


def _own(own: OwnStatus) -> OwnPlugin:
    return OwnPlugin(
        own.state,
        own.version,
        own.pid,
        utc_time(own.started),
        utc_time(own.stopped),
        own.ready and own.state == "serving",
        own.status,
        str(own.settings.get("configFile") or ""),
        own.config_error if own.state == "serving" else "",
    )


def _of_gpus(socket: PluginSocket) -> bool:
    """Sockets of other kinds of plugins are irrelevant; those of GPU plugins are named after the vendor."""
    name = PurePosixPath(socket.path).name
    return name.startswith(("nvidia", "amd", "gpu")) or "gpu" in name


def _refuse_blind(reader: _Sources) -> None:
    """`PreconditionError` if nothing was read and a source was denied, because an empty table would
    mislead."""
    if any(source.state == "read" and source.name not in ("kubelet", "nvml") for source in reader.sources):
        return
    if reader.denied is not None:
        raise PreconditionError(reader.denied.message, hint=reader.denied.hint)


# `plugin status` for people: the plugin, the resources, the GPUs, and what is wrong with them.

_RESOURCES = ("RESOURCE", "CAPACITY", "ALLOCATABLE", "HELD", "SERVED BY")
_UNITS = ("GPU", "MODEL", "DEVICE", "RESOURCE", "HEALTH", "HELD BY")
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
_DEAD = "no process listens on it; the kubelet removes it at its next start"


def blocks(data: PluginStatus) -> tuple[Block, ...]:
    page: list[Block] = [*_heads(data)]
    if data.resources:
        page.append(Table(_RESOURCES, tuple(_resource(data, resource) for resource in data.resources)))
    if data.units:
        page += _units(data.units)
    page += _faults(data)
    if not data.resources and not data.units:
        if data.kubelet in ("listening", "unknown") and not _kubelet_answered(data):
            return (*page, Text("the kubelet did not say which resources it has", Style.WARN))
        page.append(Text("no GPU resource is registered with the kubelet", Style.WARN))
        if data.kubelet == "listening" and (data.plugin is None or data.plugin.state in ("ended", "gone")):
            page.append(Text("  gpunode plugin serve", Style.COMMAND))
    return tuple(page)


def _kubelet_answered(data: PluginStatus) -> bool:
    return any(
        source.name in ("allocatable", "checkpoint") and source.state == "read" for source in data.sources
    )


def _heads(data: PluginStatus) -> Iterator[Text]:
    state = "not queried" if data.kubelet == "unknown" else data.kubelet
    style = {"listening": Style.PLAIN, "unknown": Style.DIM}.get(data.kubelet, Style.WARN)
    yield Text(f"kubelet: {state} ({data.kubelet_socket})", style)
    if data.kubelet in _NO_KUBELET:
        yield Text(f"  {_NO_KUBELET[data.kubelet]}", Style.COMMAND)
    if data.plugin is not None:
        yield _plugin(data.plugin)
        if data.plugin.config_error:
            yield Text(f"config file refused, the last good one stays: {data.plugin.config_error}", Style.BAD)


def _plugin(own: OwnPlugin) -> Text:
    program = f"gpunode {own.version}, pid {own.pid}"
    if own.state == "ended":
        return Text(f"plugin: {program} ended at {own.stopped}", Style.WARN)
    if own.state == "gone":
        return Text(
            f"plugin: {program} exited without a final status; the last one was: {own.status}", Style.BAD
        )
    since = f", since {own.started}" if own.started else ""
    style = Style.PLAIN if own.ready else Style.WARN
    state = "" if own.state == "serving" else f" ({own.state})"
    return Text(f"plugin: {program}{since}{state}: {own.status}", style)


def _resource(data: PluginStatus, resource: ResourceStatus) -> tuple[Cell | str, ...]:
    name = resource.name if resource.sharing == "none" else f"{resource.name} ({resource.sharing})"
    short = (
        resource.allocatable is not None
        and resource.capacity is not None
        and resource.allocatable < resource.capacity
    )
    bad = resource.registered is False or short
    return (
        name,
        _count(resource.capacity),
        Cell(_count(resource.allocatable), Style.BAD if bad else Style.PLAIN),
        str(resource.held),
        _server(data, resource),
    )


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)


def _server(data: PluginStatus, resource: ResourceStatus) -> Cell:
    """The process that listens on the resource's socket."""
    own = data.plugin.pid if data.plugin is not None else 0
    socket = next((item for item in data.sockets if item.resource == resource.name and item.pid != own), None)
    if resource.registered is False:
        is_complete = resource.status.startswith(("registered", "not registered"))
        return Cell(
            resource.status if is_complete else f"not registered: {resource.status}".rstrip(": "), Style.BAD
        )
    if resource.plugin == "gpunode":
        return Cell("gpunode")
    if socket is None:
        return Cell("another plugin", Style.DIM)
    listener = f"{socket.program}, pid {socket.pid}" if socket.program else PurePosixPath(socket.path).name
    return Cell(listener if socket.state == "listening" else f"{listener} ({socket.state})")


def _units(units: tuple[UnitStatus, ...]) -> Iterator[Block]:
    """What all GPUs share is printed once, because rows of eighty columns have no room for it."""
    models = {unit.model or "?" for unit in units}
    resources = {unit.resource or "-" for unit in units}
    omitted = {
        *((_MODEL,) if len(models) == 1 and not any(unit.profile for unit in units) else ()),
        *((_RESOURCE,) if len(resources) == 1 else ()),
    }
    if _MODEL in omitted:
        yield Text(f"model: {models.pop()}")
    columns = [number for number in range(len(_UNITS)) if number not in omitted]
    rows = tuple(tuple(row[number] for number in columns) for row in _rows(units))
    yield Table(tuple(_UNITS[number] for number in columns), rows)


def _rows(units: tuple[UnitStatus, ...]) -> Iterator[tuple[Cell | str, ...]]:
    """MIG devices below their GPU, which has a row even if it isn't offered itself."""
    whole = {unit.index for unit in units}
    for unit in units:
        parent, part, _ = unit.index.partition(":")
        if part and parent not in whole:
            whole.add(parent)
            yield (parent, unit.model, Cell(unit.gpu, Style.DIM, short_uuid(unit.gpu)), "", "", "")
        yield (
            unit.index or "?",
            f"  MIG {unit.profile}" if unit.profile else unit.model or "?",
            Cell(unit.id, short=short_uuid(unit.id)),
            unit.resource or "-",
            Cell(_health(unit), _HEALTH.get(unit.health, Style.PLAIN)),
            _held(unit),
        )


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


def _faults(data: PluginStatus) -> Iterator[Block]:
    pid = data.plugin.pid if data.plugin is not None and data.plugin.state == "serving" else 0
    for (problem, health), units in troubles(data.units).items():
        since = f", since {problem.since}" if problem.since else ""
        bad = Style.BAD if health == "unhealthy" else Style.WARN
        yield Text(f"GPU {', '.join(unit.index or unit.id for unit in units)}: {problem.reason}{since}", bad)
        gpus = dict.fromkeys(unit.index.partition(":")[0] for unit in units)
        if fix := how_to_fix(problem.mend, units[0].gpu, ",".join(gpus), pid):
            yield Text(f"  {fix}", Style.COMMAND)
    reported = {(unit.id, unit.index) for unit in data.units if unit.problem}
    for item in data.left_out:
        if not any(item.id == unit_id or item.index == index for unit_id, index in reported):
            yield Text(f"GPU {item.index or item.id} is not advertised: {item.reason}", Style.DIM)
    for resource in data.resources:
        if resource.plugin == "other" and resource.status:
            yield Text(f"{resource.name}: gpunode is {resource.status}", Style.BAD)
    for socket in data.sockets:
        if socket.state != "listening":
            state = _DEAD if socket.state == "refused" else socket.state
            yield Text(f"{socket.path}: {state}", Style.WARN)
    for source in data.sources:
        unanswered = source.name in ("pods", "allocatable") and not _kubelet_answered(data)
        if source.state == "failed" or (unanswered and source.problem):
            yield Text(f"{source.name}: {source.problem}", Style.WARN)
            if source.hint:
                yield Text(f"  {source.hint}", Style.COMMAND)


def troubles(units: tuple[UnitStatus, ...]) -> dict[tuple[DeviceProblem, str], list[UnitStatus]]:
    """Faults with the GPUs that have them: a cause that all of them share is reported once."""
    groups: dict[tuple[DeviceProblem, str], list[UnitStatus]] = {}
    reported = set()
    for unit in units:
        if unit.problem and (unit.index or unit.id, unit.problem.code) not in reported:
            reported.add((unit.index or unit.id, unit.problem.code))
            groups.setdefault((unit.problem, unit.health), []).append(unit)
    return groups


# `gpunode plugin status`.


@verb(plugin_app, "status", "PluginStatus")
def plugin_status(session: Session, query: Query) -> Result:
    """Show which pod has which GPU. It also shows what is registered, and why a GPU is unhealthy.

    It works with any device plugin. Needs root to query the kubelet.

    sudo gpunode plugin status
    """
    data = _gather(session.host, query, session.progress)
    deadline = session.host.monotonic() + _NEWS_SECONDS
    while session.host.live and _between_news(data) and session.host.monotonic() < deadline:
        session.host.sleep(_AGAIN_SECONDS)
        data = _gather(session.host, query, session.progress)
    return Result("PluginStatus", data, "ok" if _is_healthy(data) else "warn", blocks=blocks(data))
