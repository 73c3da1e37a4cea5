"""`gpunode plugin`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from gpunode import __version__
from gpunode.commands.help_page import command_group
from gpunode.commands.options import one_of
from gpunode.commands.plugin_options import (
    CheckConfigCommand,
    SettingsCommand,
    StateDirOption,
    refuse_empty,
    refused,
    sources,
    value_text,
)
from gpunode.commands.session import ReceivedSignals, Session, until_signal, verb
from gpunode.errors import ConfigError, GpunodeError, UsageError
from gpunode.gpu.model import Inventory
from gpunode.gpu.probe import probe
from gpunode.host import PLUGIN_STATE, Host
from gpunode.host.documents import MAX_STREAM_BYTES
from gpunode.output.result import Block, Cell, ErrorInfo, ExitCode, Result, Style, Table, Text
from gpunode.plugin.config.options import OPTIONS
from gpunode.plugin.config.resolve import DEFAULT, ResolvedSettings, option_value
from gpunode.plugin.config.settings import NameRule, Settings, Sharing
from gpunode.plugin.config.values import ConfigProblem
from gpunode.plugin.model import KubeletDevice, LeftOut, ResourcePlan

if TYPE_CHECKING:
    from gpunode.plugin.config.gke import Left
    from gpunode.plugin.serve import PluginService

# what only one subcommand needs is imported when that runs: `plugin status` loads this module, too


plugin_app = command_group("Run and inspect the Kubernetes device plugin.")


@verb(plugin_app, "serve", "PluginRun", cls=SettingsCommand, service=lambda options: True)
def plugin_serve(session: Session, **options: Any) -> Result:
    """Run the device plugin. It stays in the foreground until SIGTERM or Ctrl-C. Needs root, except with
    --simulate. The flags, variables and config file of NVIDIA's device plugin are accepted. SIGHUP rereads
    the file. Each option with [true|false] is false by default.

    sudo gpunode plugin serve

    sudo gpunode plugin serve --config-file plugin.yaml --mig-strategy mixed
    """
    return serve(session.host, options)


@verb(plugin_app, "check-config", "PluginConfig", cls=CheckConfigCommand)
def plugin_check_config(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="Configuration file to check.")] = "",
    source: Annotated[
        Literal["gke"] | None, typer.Option("--from", help="Convert FILE from GKE's format and print it.")
    ] = None,
    **options: Any,
) -> Result:
    """Check a config file. Print each value, its origin, and the devices that would be served.

    The options and variables of plugin serve are accepted, too: see gpunode plugin serve --help.

    gpunode plugin check-config /etc/gpunode/plugin.yaml

    gpunode plugin check-config --from gke gpu_config.json > plugin.yaml
    """
    host = session.host
    if source:
        if any(value not in (None, (), []) for value in options.values()):
            raise UsageError(
                "--from only translates a file: options of the plugin have no place beside it",
                hint="translate it, then check the outcome: gpunode plugin check-config FILE",
            )
        return translate(host, source, file)
    if file:
        if options.get("config_file") is not None:
            raise UsageError("both FILE and --config-file are given", hint="name the file once")
        options = {**options, "config_file": file}
    origins = sources(host, options, command="plugin check-config")
    resolved = origins.resolve()
    data = _data(origins.file, resolved)
    if resolved.problems:
        messages = _messages(resolved.warnings)
        return replace(refused(_KIND, resolved.problems), data=data, messages=messages)
    refuse_empty(origins, resolved)
    try:
        plan, unknown = _plan(host, resolved.settings)
    except GpunodeError as error:
        return Result(
            *(_KIND, data, "error", error.exit_code, _messages(resolved.warnings)),
            errors=(resolved.refused(error).info(),),
        )
    warnings = (*_messages(resolved.warnings), *(plan.warnings if plan else ()))
    return Result(
        _KIND,
        _planned(data, plan, unknown),
        status="warn" if warnings else "ok",
        messages=tuple(f"warning: {warning}" for warning in warnings),
        blocks=tuple(_blocks(origins.file, resolved, plan, unknown)),
    )


# `gpunode plugin inject`.

_FAULTS = "xid, ecc, lost, return, unplug, plug, remap, recovery, fabric, mig, reset, heal, driver"
_FAULTS_HELP = (
    "What happens: xid N, ecc N, lost, return, unplug, plug, remap STATE (memory rows), recovery ACTION,"
    " fabric STATE (NVLink), mig LAYOUT, reset, heal (undo all), driver gone|back."
)


@verb(plugin_app, "inject", "InjectedFault")
def plugin_inject(
    session: Session,
    fault: Annotated[
        str,
        typer.Argument(metavar="[FAULT]", help=_FAULTS_HELP, autocompletion=one_of(*_FAULTS.split(", "))),
    ] = "",
    value: Annotated[
        str,
        typer.Argument(
            metavar="[VALUE]",
            help="N, LAYOUT, ACTION or STATE; errors list the valid words.",
        ),
    ] = "",
    gpu: Annotated[
        str,
        typer.Option("--gpu", metavar="GPU", help="GPU index, UUID or all; required except for driver."),
    ] = "",
    gi: Annotated[int | None, typer.Option("--gi", metavar="ID", help="GPU instance of an XID.")] = None,
    ci: Annotated[int | None, typer.Option("--ci", metavar="ID", help="Compute instance of an XID.")] = None,
    script: Annotated[
        str, typer.Option("--script", metavar="FILE", help="File of timed faults, one JSON object per line.")
    ] = "",
    state_dir: StateDirOption = PLUGIN_STATE,
) -> Result:
    """Inject a fault into a simulated GPU. The plugin must run with --simulate.

    Needs root if the plugin runs as root.

    sudo gpunode plugin inject xid 79 --gpu 3

    sudo gpunode plugin inject reset --gpu 3

    sudo gpunode plugin inject --script faults.jsonl
    """
    from gpunode.plugin.simulate.faults import Client, InjectedFault, make_fault, read_script

    if bool(script) == bool(fault):
        raise UsageError("give a fault or a --script", hint="gpunode plugin inject xid 79 --gpu 3")
    host = session.host
    faults = read_script(host, script) if script else (make_fault(fault, value, gpu, gi, ci),)
    client = Client(host, state_dir)
    started = host.monotonic()
    try:
        for event in faults:
            host.sleep(max(0.0, started + event.at - host.monotonic()))
            client.send(event)
            if script:
                session.progress.info(f"{host.monotonic() - started:.1f} s: {event}")
    finally:
        client.close()
    blocks = tuple(Text(f"injected {event}") for event in faults)
    return Result("InjectedFault", InjectedFault(tuple(faults)), blocks=blocks)


# `gpunode plugin serve`: the device plugin in the foreground, until SIGTERM or Ctrl-C.


def serve(host: Host, options: Mapping[str, Any]) -> Result:
    """Serve until a signal. `options` are options by field. Logs go to stderr, one line each.

    Exit 2 or 1 with every problem of the command line or the config file. `PreconditionError` if the plugin
    can't serve at all: not root, or another plugin is on the same socket. A missing driver, GPU or kubelet is
    waited for.
    """
    from gpunode.plugin.config.watch import ConfigWatch

    host.restrict_umask()
    host.use_one_heap()
    with until_signal() as signals:
        source = sources(host, options)
        resolved = source.resolve()
        if resolved.problems:
            return refused("PluginRun", resolved.problems)
        from gpunode.plugin.compose import make_service
        from gpunode.plugin.logfmt import open_log

        log = open_log(sys.stderr, host.environ, resolved.settings.log_format)
        log.info("starting", version=__version__, **dict(_chosen(resolved)))
        for warning in resolved.warnings:
            log.warning(warning.text, **warning.fields)

        service = make_service(host, resolved.settings, log)
        hurry, take_hangup = service.backend.hurry, signals.take_hangup
        service.parts.append(ConfigWatch(service.ledger, log, hurry, source, take_hangup, resolved.content))
        _serve(service, signals)
    if signals:  # a client that signals a whole process group may send the signal twice
        log.info("stopped", signal=signals[0])
    return _result(resolved.settings, service)


def _chosen(resolved: ResolvedSettings) -> Iterator[tuple[str, str]]:
    """Options that differ from their defaults; `check-config` prints all, and their sources."""
    settings = resolved.settings
    for option in OPTIONS:
        if option.field in resolved.origins and (settings.labels.to or not option.part):
            yield option.flags[0].removeprefix("--"), value_text(option, settings)
    if settings.rules:
        yield "rules", ", ".join(f"{rule.pattern} {rule.name}" for rule in settings.rules)
    if settings.sharing is not None:
        shares = (f"{entry.name} by {entry.replicas}" for entry in settings.sharing.resources)
        yield settings.sharing.strategy, ", ".join(shares)


def _serve(service: PluginService, signals: ReceivedSignals) -> None:
    service.at_end = signals.wake
    signals.let_go = service.backend.let_go
    service.start()
    while service.running and not signals:
        signals.wait()
        service.wake()
    service.stop()
    service.join()


@dataclass(frozen=True)
class ServedDevice:
    """A device as last reported to the kubelet; `problem` is why it is unhealthy."""

    id: str
    index: str
    healthy: bool
    problem: str


class ServedResource(NamedTuple):
    """One resource and its devices."""

    name: str
    devices: tuple[ServedDevice, ...]


class PluginRun(NamedTuple):
    """`data` of the envelope when the plugin ends: all devices, and those of each resource."""

    resource: str
    devices: tuple[ServedDevice, ...]
    resources: tuple[ServedResource, ...]
    registrations: int


def _result(settings: Settings, service: PluginService) -> Result:
    snapshots = service.snapshots
    return Result(
        "PluginRun",
        PluginRun(
            settings.resource_name,
            tuple(_served_device(device) for snapshot in snapshots.values() for device in snapshot.devices),
            tuple(
                ServedResource(name, tuple(map(_served_device, snapshot.devices)))
                for name, snapshot in snapshots.items()
            ),
            service.registrations,
        ),
        blocks=tuple(
            Text(_served(service, name, len(snapshot.devices))) for name, snapshot in snapshots.items()
        ),
    )


def _served(service: PluginService, name: str, count: int) -> str:
    link = service.links.get(name)
    if link is not None and (link.registrations or not service.settings.kubelet_socket):
        return f"served {count} {name}"
    return f"served none of {count} {name}: {link.status if link else 'no socket was created'}"


def _served_device(device: KubeletDevice) -> ServedDevice:
    problem = device.problem.reason if device.problem else ""
    return ServedDevice(device.id, device.unit.index, device.healthy, problem)


# `gpunode plugin check-config`: the effective configuration and what it would advertise, without serving.

_KIND = "PluginConfig"


def _messages(warnings: tuple[ConfigProblem, ...]) -> tuple[str, ...]:
    return tuple(warning.text + (f" ({warning.hint})" if warning.hint else "") for warning in warnings)


# --- the node -------------------------------------------------------------------------------------------


def _plan(host: Host, settings: Settings) -> tuple[ResourcePlan | None, str]:
    """What this node would advertise, or None and why that is unknown."""
    from gpunode.plugin.compose import make_backend
    from gpunode.plugin.logfmt import silent_log

    backend = make_backend(host, settings, silent_log())
    inventory, reason = look(host, settings)
    return (None, reason) if inventory is None else (backend.plan(settings, inventory), "")


# --- output ---------------------------------------------------------------------------------------------


class EffectiveSetting(NamedTuple):
    """An option's effective `value`; `from` is a flag, a variable, ``FILE:LINE`` or ``default``."""

    option: str
    key: str
    value: Any
    from_: str


@dataclass(frozen=True)
class PlannedDevice:
    """A device that would be advertised; `problem` is why it would be unhealthy."""

    id: str
    index: str
    model: str
    profile: str
    problem: str


class PlannedResource(NamedTuple):
    """A resource that would be advertised; `sharing` is none, time-slicing or mps."""

    name: str
    sharing: str
    devices: tuple[PlannedDevice, ...]


class PluginConfig(NamedTuple):
    """`data` of the envelope: the effective configuration, and what this node would advertise.

    `unknown` is why the devices are unknown.
    """

    file: str
    valid: bool
    settings: tuple[EffectiveSetting, ...]
    rules: tuple[NameRule, ...]
    rules_from: str
    sharing: Sharing | None
    sharing_from: str
    resources: tuple[PlannedResource, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    unknown: str = ""


def _data(file: str, resolved: ResolvedSettings) -> PluginConfig:
    settings, origins = resolved.settings, resolved.origins
    return PluginConfig(
        file,
        not resolved.problems,
        tuple(
            EffectiveSetting(
                option.flags[0],
                option.key,
                option_value(settings, option),
                origins.get(option.field, DEFAULT),
            )
            for option in OPTIONS
            if option.field != "lenient" and (option.field in origins or not option.part)
        ),
        settings.rules,
        origins.get("rules", DEFAULT),
        settings.sharing,
        origins.get("sharing", DEFAULT),
    )


def _planned(data: PluginConfig, plan: ResourcePlan | None, unknown: str) -> PluginConfig:
    if plan is None:
        return data._replace(unknown=unknown)
    resources = tuple(
        PlannedResource(resource.name, resource.sharing, tuple(map(_planned_device, resource.devices)))
        for resource in plan.resources
    )
    return data._replace(resources=resources, left_out=plan.left_out)


def _planned_device(device: KubeletDevice) -> PlannedDevice:
    problem = device.problem.reason if device.problem else ""
    return PlannedDevice(device.id, device.unit.index, device.unit.name, device.unit.profile, problem)


def _blocks(
    file: str, resolved: ResolvedSettings, plan: ResourcePlan | None, unknown: str
) -> Iterator[Block]:
    yield Text(f"{file or 'without a config file'}: valid", Style.GOOD)
    yield Text("")
    yield Table(("option", "value", "from"), tuple(_rows(resolved)))
    yield Text("")
    if plan is None:
        yield Text(f"the devices that would be advertised are unknown: {unknown}", Style.WARN)
        return
    if not plan.resources:
        yield Text("nothing would be advertised", Style.WARN)
    else:
        columns = ("resource", "devices", "index", "id", "model", "shares", "")
        yield Table(columns, tuple(_devices(plan)))
    for item in plan.left_out:
        yield Text(f"left out: {item.index} {item.id}: {item.reason}", Style.WARN)


def _rows(resolved: ResolvedSettings) -> Iterator[tuple[Cell | str, ...]]:
    for option in OPTIONS:
        if option.field == "lenient" or (option.part and option.field not in resolved.origins):
            continue
        origin = resolved.origins.get(option.field, DEFAULT)
        text = value_text(option, resolved.settings)
        yield option.flags[0], text, Cell(origin, Style.DIM if origin == DEFAULT else Style.PLAIN)
    for rule in resolved.settings.rules:
        yield f"resources: {rule.kind} {rule.pattern}", rule.name, resolved.origins["rules"]
    sharing = resolved.settings.sharing
    for shared in sharing.resources if sharing else ():
        shared_devices = "all" if shared.devices is None else shared.devices
        devices = ",".join(shared_devices) if isinstance(shared_devices, tuple) else str(shared_devices)
        name = f" as {shared.rename}" if shared.rename else ""
        assert sharing is not None
        yield (
            f"sharing: {sharing.strategy}",
            f"{shared.name}{name}: {shared.replicas} of {devices}",
            resolved.origins["sharing"],
        )


def _devices(plan: ResourcePlan) -> Iterator[tuple[Cell | str, ...]]:
    for resource in plan.resources:
        shares = Counter(device.unit.id for device in resource.devices if device.id != device.unit.id)
        problems = {device.unit.id: device.problem for device in resource.devices}
        for number, unit in enumerate(resource.units):
            first = (resource.name, str(len(resource.devices))) if number == 0 else ("", "")
            problem = problems[unit.id]
            model = f"{unit.name} {unit.profile}".strip()
            count = f"{shares[unit.id]} by {resource.sharing}" if unit.id in shares else ""
            yield *first, unit.index, unit.id, model, count, f"unhealthy: {problem.reason}" if problem else ""


# `gpunode plugin check-config --from gke`: the configuration of GKE's device plugin as gpunode's.

KIND = "PluginConfigTranslation"
_FORM = "it is gpu_config.json of a GKE node, or the ConfigMap of GKE's device plugin"


def translate(host: Host, source: str, file: str) -> Result:
    """Exit 1 where the file can't be understood, or has a setting that is wrong in any plugin."""
    from gpunode.plugin.config import gke

    if not file:
        raise UsageError("--from needs a file", hint=f"gpunode plugin check-config --from {source} FILE")
    file_name = "standard input" if file == "-" else file
    content = _read(host, file)
    try:
        translation, text = gke.as_config_file(gke.translate(gke.documents(content)))
    except ConfigError as error:
        raise ConfigError(f"{file_name}: {error.message}", hint=error.hint or _FORM) from error
    data = gke.PluginConfigTranslation(source, file, translation.config, text, translation.left)
    if translation.problems:
        errors = tuple(ErrorInfo("config", f"{file_name}: {problem}") for problem in translation.problems)
        return Result(KIND, data, "error", ExitCode.FAILED, _translation_messages(translation.left), errors)
    lines = tuple(Text(line, Style.DOCUMENT) for line in text.splitlines())
    return Result(
        KIND,
        data,
        "warn" if translation.left else "ok",
        messages=_translation_messages(translation.left),
        blocks=lines,
    )


def _translation_messages(left_out: tuple[Left, ...]) -> tuple[str, ...]:
    return tuple(f"left: {item.text}" for item in left_out)


def _read(host: Host, file: str) -> bytes:
    """The file is on the node, or relative to the working directory, as with --config-file; - is stdin."""
    if file == "-":
        return sys.stdin.buffer.read(MAX_STREAM_BYTES + 1)  # the reader refuses more, and truncates nothing
    reader = host if file.startswith("/") else Host(Path("/"), host.environ)
    path = str(Path(file).absolute())
    data = None if reader.is_dir(path) else reader.read_bytes(path)
    if data is None:
        raise ConfigError(
            f"{file} doesn't exist or isn't a file", hint="name a file, or - for standard input"
        )
    return data


# One read of the node's GPUs, as `plugin serve` would see them, without serving.


def look(host: Host, settings: Settings) -> tuple[Inventory | None, str]:
    """The inventory, or None and why there is none. `ConfigError` for a malformed recording."""
    if settings.simulate:
        from gpunode.plugin.simulate.node import load

        return load(settings.simulate, host)[0], ""
    if settings.vendor == "amd":
        from gpunode.gpu.amd import missing, read_inventory

        reason = missing(host)
        return (None, reason) if reason else (read_inventory(host), "")
    from gpunode.plugin.nvidia.platform import TEGRA, nvml_library

    if settings.device_discovery_strategy == TEGRA:  # one device, and no NVML to query
        return Inventory(""), ""
    answer = probe(host, settings.probe_seconds, library=nvml_library(host, settings))
    return answer.inventory, answer.message
