"""`gpunode plugin check-config`: the effective configuration and what it would advertise, without serving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gpunode.commands.plugin_options import sources, value_text
from gpunode.commands.plugin_serve import refused
from gpunode.errors import GpunodeError, UsageError
from gpunode.host import Host
from gpunode.output.result import Block, Cell, Progress, Result, Style, Table, Text
from gpunode.plugin.config.options import OPTIONS
from gpunode.plugin.config.resolve import DEFAULT, Resolved, told

if TYPE_CHECKING:
    from gpunode.plugin.config.settings import Settings
    from gpunode.plugin.config.values import Problem
    from gpunode.plugin.model import Plan

_KIND = "PluginConfig"


@dataclass(frozen=True)
class Options:
    """What the command line says, as for `plugin serve`; `file` stands for --config-file.

    With `source` (gke) it is that plugin's, and is translated.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    source: str = ""


@dataclass(frozen=True)
class _Seen:
    """What this node would advertise, or why that can't be told."""

    plan: Plan | None = None
    unknown: str = ""
    problem: GpunodeError | None = None


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Exit 1 with every problem of a file, 2 where only the command line or the environment is wrong."""
    given = dict(options.given)
    if options.source:
        return _translated(host, options, given)
    if options.file:
        if given.get("config_file") is not None:
            raise UsageError("both FILE and --config-file are given", hint="name the file once")
        given["config_file"] = options.file
    source = sources(host, given)
    resolved = source.resolve()
    data = _data(source.file, resolved)
    if resolved.problems:
        return replace(refused(_KIND, resolved.problems, data), messages=_messages(resolved.warnings))
    seen = _look(host, resolved.settings)
    if seen.problem is not None:
        return Result(
            *(_KIND, data, "error", seen.problem.exit_code, _messages(resolved.warnings)),
            errors=(resolved.refused(seen.problem).info(),),
        )
    warnings = (*_messages(resolved.warnings), *(seen.plan.warnings if seen.plan else ()))
    return Result(
        _KIND,
        data | _planned(seen),
        status="warn" if warnings else "ok",
        messages=tuple(f"warning: {one}" for one in warnings),
        blocks=tuple(_blocks(source.file, resolved, seen)),
    )


def _translated(host: Host, options: Options, given: Mapping[str, Any]) -> Result:
    from gpunode.commands import plugin_translate

    if any(value not in (None, (), []) for value in given.values()):
        raise UsageError(
            "--from only translates a file: options of the plugin have no place beside it",
            hint="translate it, then check the outcome: gpunode plugin check-config FILE",
        )
    return plugin_translate.run(host, options.source, options.file)


def _messages(warnings: tuple[Problem, ...]) -> tuple[str, ...]:
    return tuple(one.text + (f" ({one.hint})" if one.hint else "") for one in warnings)


# --- the node -------------------------------------------------------------------------------------------


def _look(host: Host, settings: Settings) -> _Seen:
    from gpunode.plugin.compose import make_backend
    from gpunode.plugin.config.look import look
    from gpunode.plugin.logfmt import NoLog

    try:
        backend = make_backend(host, settings, NoLog())
        inventory, why = look(host, settings, backend)
        if inventory is None:
            return _Seen(unknown=why)
        return _Seen(backend.plan(settings, inventory))
    except GpunodeError as error:
        return _Seen(problem=error)


# --- telling it -----------------------------------------------------------------------------------------


def _data(file: str, resolved: Resolved) -> dict[str, Any]:
    settings, origins = resolved.settings, resolved.origins
    return {
        "file": file,
        "valid": not resolved.problems,
        "settings": [
            {
                "option": option.flags[0],
                "key": option.key,
                "value": told(settings, option),
                "from": origins.get(option.field, DEFAULT),
            }
            for option in OPTIONS
            if option.field != "lenient" and (option.field in origins or not option.part)
        ],
        "rules": settings.rules,
        "rulesFrom": origins.get("rules", DEFAULT),
        "sharing": settings.sharing,
        "sharingFrom": origins.get("sharing", DEFAULT),
        "resources": [],
        "leftOut": [],
        "unknown": "",
    }


def _planned(seen: _Seen) -> dict[str, Any]:
    if seen.plan is None:
        return {"unknown": seen.unknown}
    return {
        "resources": [
            {
                "name": resource.name,
                "sharing": resource.sharing,
                "devices": [
                    {
                        "id": device.id,
                        "index": device.unit.index,
                        "model": device.unit.name,
                        "profile": device.unit.profile,
                        "problem": device.problem.reason if device.problem else "",
                    }
                    for device in resource.devices
                ],
            }
            for resource in seen.plan.resources
        ],
        "leftOut": seen.plan.left_out,
    }


def _blocks(file: str, resolved: Resolved, seen: _Seen) -> Iterator[Block]:
    yield Text(f"{file or 'without a config file'}: valid", Style.GOOD)
    yield Text("")
    yield Table(("option", "value", "from"), tuple(_rows(resolved)))
    yield Text("")
    if seen.plan is None:
        yield Text(f"which devices would be advertised can't be told: {seen.unknown}", Style.WARN)
        return
    if not seen.plan.resources:
        yield Text("nothing would be advertised", Style.WARN)
    else:
        columns = ("resource", "devices", "index", "id", "model", "shares", "")
        yield Table(columns, tuple(_devices(seen.plan)))
    for item in seen.plan.left_out:
        yield Text(f"left out: {item.index} {item.id}: {item.reason}", Style.WARN)


def _rows(resolved: Resolved) -> Iterator[tuple[Cell | str, ...]]:
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
        chosen = "all" if shared.devices is None else shared.devices
        devices = ",".join(chosen) if isinstance(chosen, tuple) else str(chosen)
        name = f" as {shared.rename}" if shared.rename else ""
        assert sharing is not None
        yield (
            f"sharing: {sharing.strategy}",
            f"{shared.name}{name}: {shared.replicas} of {devices}",
            resolved.origins["sharing"],
        )


def _devices(plan: Plan) -> Iterator[tuple[Cell | str, ...]]:
    for resource in plan.resources:
        shares = Counter(device.unit.id for device in resource.devices if device.id != device.unit.id)
        problems = {device.unit.id: device.problem for device in resource.devices}
        for number, unit in enumerate(resource.units):
            first = (resource.name, str(len(resource.devices))) if number == 0 else ("", "")
            problem = problems[unit.id]
            model = f"{unit.name} {unit.profile}".strip()
            count = f"{shares[unit.id]} by {resource.sharing}" if unit.id in shares else ""
            yield *first, unit.index, unit.id, model, count, f"unhealthy: {problem.reason}" if problem else ""
