"""`gpunode plugin status`: what is registered, which pod holds what, who is unhealthy and why.

Asked are the kubelet's own sockets and files, whichever plugin is serving. Another plugin's socket is only
connected to: a second ListAndWatch stream would take health updates away from the kubelet's (NVIDIA's plugin
gives each update to one stream).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypeVar

from gpunode.daemons.pod_resources import Holding, allocatable, list_pods
from gpunode.dataclass import dataclass, replace
from gpunode.errors import DaemonError, GpunodeError, PreconditionError
from gpunode.facts.device_checkpoint import NAME, Checkpoint, read_checkpoint
from gpunode.facts.device_plugins import status_path
from gpunode.gpu.isolated import probe
from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.model import LeftOut
from gpunode.plugin.observe.own_status import OwnStatus, read_own_status
from gpunode.plugin.observe.report import (
    Known,
    ResourceStatus,
    UnitStatus,
    make_report,
    told_time,
)
from gpunode.plugin.observe.sockets import PluginSocket, plugin_sockets, pod_resources_socket
from gpunode.plugin.settings import KUBELET_SOCKET, Settings
from gpunode.result import Progress, Result

_NEWS_SECONDS = 1.2  # the plugin writes once a second at most
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Options:
    """Empty sockets are found: what our plugin serves, else the kubelet's defaults. `timeout` is for each
    question."""

    kubelet_socket: str = ""
    pod_resources_socket: str = ""
    state_dir: str = Settings.state_dir
    nvml: bool = True
    every_resource: bool = False
    timeout: float = 5.0


@dataclass(frozen=True)
class Source:
    """Something that was asked. `state`: read, absent, skipped or failed; `problem` and `hint` tell why."""

    name: str
    path: str
    state: str
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True)
class OwnPlugin:
    """Our plugin as it tells of itself; see `OwnStatus`. Times are such as 2026-05-01T12:00:00Z, or empty."""

    state: str
    version: str
    pid: int
    started: str
    stopped: str
    ready: bool
    status: str
    config_file: str
    config_error: str


@dataclass(frozen=True)
class PluginStatus:
    """`data` of the envelope. `plugin` is None if none of ours has served here."""

    kubelet_socket: str
    kubelet: str
    plugin: OwnPlugin | None
    resources: tuple[ResourceStatus, ...]
    units: tuple[UnitStatus, ...]
    left_out: tuple[LeftOut, ...]
    sockets: tuple[PluginSocket, ...]
    sources: tuple[Source, ...]


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Kind PluginStatus; status warn if a device, a socket or a source isn't as it should be. Exit 0 either
    way: it is information.

    `PreconditionError` if nothing at all may be read.
    """
    from gpunode.commands.plugin_status_blocks import blocks

    data = _gather(host, options, progress)
    if host.live and _between_news(data):
        host.sleep(_NEWS_SECONDS)
        data = _gather(host, options, progress)
    return Result("PluginStatus", data, "ok" if _fine(data) else "warn", blocks=blocks(data))


def _between_news(data: PluginStatus) -> bool:
    """Whether the kubelet already knows of something that our plugin hasn't written down yet, or the other
    way round: seen together they would make a GPU fail for no reason."""
    if data.plugin is None or data.plugin.state != "serving":
        return False
    ours = {one.name for one in data.resources if one.plugin}  # an old list of ours looks like another's
    return any(
        unit.resource in ours
        and (unit.health == "not-allocatable" or (unit.health == "unhealthy" and unit.allocatable))
        for unit in data.units
    )


def _fine(data: PluginStatus) -> bool:
    return (
        data.kubelet in ("listening", "unknown")
        and all(unit.health == "healthy" for unit in data.units)
        and all(one.state == "listening" for one in data.sockets)
        and all(one.registered is not False for one in data.resources)
        and not any(source.state == "failed" for source in data.sources)
        and (data.plugin is None or (data.plugin.state != "gone" and not data.plugin.config_error))
    )


class _Asked:
    """Collects what became of each question."""

    def __init__(self) -> None:
        self.sources: list[Source] = []

    def ask(self, name: str, path: str, question: Callable[[], _Found | None]) -> _Found | None:
        try:
            found = question()
        except GpunodeError as error:
            absent = error.code in ("absent", "not-live", "unsupported")
            state = "absent" if absent else "failed"
            self.sources.append(Source(name, path, state, error.message, error.hint))
            return None
        self.sources.append(Source(name, path, "absent" if found is None else "read"))
        return found

    def skip(self, name: str, path: str, why: str) -> None:
        self.sources.append(Source(name, path, "skipped", why))


def _gather(host: Host, options: Options, progress: Progress) -> PluginStatus:
    asked = _Asked()
    own_path = status_path(options.state_dir)
    own = asked.ask("plugin", own_path, lambda: read_own_status(host, options.state_dir))
    kubelet_socket, pod_resources = _sockets_of(options, own)
    directory = str(PurePosixPath(kubelet_socket).parent)
    kubelet = asked.ask("kubelet", kubelet_socket, lambda: host.socket_state(kubelet_socket))
    free, holdings = _kubelets_word(host, asked, options, pod_resources, directory)
    known = Known(own, free, holdings, None, options.every_resource)
    report = make_report(known)
    inventory = _inventory(host, asked, options, report.units, own, progress)
    if inventory is not None:
        report = make_report(replace(known, inventory=inventory))
    names = [one.name for one in report.resources]
    sockets = asked.ask("sockets", directory, lambda: plugin_sockets(host, directory, names))
    _refuse_blind(asked.sources)
    return PluginStatus(
        kubelet_socket,
        _unless_recorded(host, kubelet or "unknown"),
        None if own is None else _own(own),
        report.resources,
        report.units,
        report.left_out,
        tuple(one for one in sockets or () if options.every_resource or one.resource or _of_gpus(one)),
        tuple(asked.sources),
    )


def _sockets_of(options: Options, own: OwnStatus | None) -> tuple[str, str]:
    """The kubelet's and PodResources' sockets: as told, as our plugin uses them, or the defaults."""
    told = own.settings if own and own.current else {}
    kubelet = options.kubelet_socket or str(told.get("kubeletSocket") or KUBELET_SOCKET)
    usual = Settings.pod_resources_socket
    given = usual if options.kubelet_socket else str(told.get("podResourcesSocket") or usual)
    return kubelet, options.pod_resources_socket or pod_resources_socket(kubelet, given)


def _kubelets_word(
    host: Host, asked: _Asked, options: Options, socket: str, directory: str
) -> tuple[Mapping[str, Sequence[str]] | None, tuple[Holding, ...]]:
    """What could be handed out and who holds what: by PodResources, or else as the kubelet last wrote it."""
    holdings = asked.ask("pods", socket, lambda: list_pods(host, socket, options.timeout))
    free: Mapping[str, Sequence[str]] | None = None
    if holdings is not None:
        free = asked.ask("allocatable", socket, lambda: allocatable(host, socket, options.timeout))
    if holdings is not None and free is not None:
        return free, holdings
    path = f"{directory}/{NAME}"
    found: Checkpoint | None = asked.ask("checkpoint", path, lambda: read_checkpoint(host, directory))
    if found is None:
        return free, holdings or ()
    return found.healthy if free is None else free, found.holdings if holdings is None else holdings


def _inventory(
    host: Host,
    asked: _Asked,
    options: Options,
    units: Sequence[UnitStatus],
    own: OwnStatus | None,
    progress: Progress,
) -> Inventory | None:
    """NVML is asked only where our plugin hasn't told everything: it takes long, and may hang."""
    if not options.nvml:
        asked.skip("nvml", "", "--no-nvml")
    elif own is not None and own.current and all(unit.index for unit in units):
        asked.skip("nvml", "", "our plugin knows these GPUs")
    else:
        with progress.step("asking NVML"):
            return asked.ask("nvml", "", lambda: _probed(host, options.timeout))
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
        told_time(own.started),
        told_time(own.stopped),
        own.ready and own.state == "serving",
        own.status,
        str(own.settings.get("configFile") or ""),
        own.config_error if own.state == "serving" else "",
    )


def _of_gpus(socket: PluginSocket) -> bool:
    """Other plugins' sockets are nobody's business here; those of GPU plugins are called after the vendor."""
    name = PurePosixPath(socket.path).name
    return name.startswith(("nvidia", "amd", "gpu")) or "gpu" in name


def _unless_recorded(host: Host, state: str) -> str:
    return "unknown" if not host.live and state == "absent" else state


def _refuse_blind(sources: Sequence[Source]) -> None:
    """Nothing was read and something may not be: better said as an error than as an empty table."""
    if any(source.state == "read" and source.name not in ("kubelet", "nvml") for source in sources):
        return
    denied = next((one for one in sources if one.hint.startswith("run as root")), None)
    if denied is not None:
        raise PreconditionError(denied.problem, hint=denied.hint)
