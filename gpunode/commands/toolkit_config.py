"""`gpunode toolkit config get`: how the NVIDIA Container Toolkit is set, and where each value comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.facts import toolkit_config as facts
from gpunode.facts.containerd import dig, parse_toml
from gpunode.facts.toolkit_config import Key
from gpunode.host import Host
from gpunode.result import (
    Block,
    Cell,
    Change,
    ErrorInfo,
    ExitCode,
    Progress,
    Result,
    Style,
    Table,
    Text,
)

KIND = "ToolkitConfig"


@dataclass(frozen=True)
class Options:
    """`keys`: what to show, everything if empty."""

    keys: tuple[str, ...] = ()
    config: str = ""


@dataclass(frozen=True)
class Setting:
    """One key in force. `value` is None for what is absent; `source` is file, default or unknown.

    An unknown key is one that the toolkit doesn't have. `problem` says what is wrong, empty if nothing is.
    """

    key: str
    value: Any
    source: str
    type: str
    default: Any
    allowed: tuple[str, ...]
    problem: str


@dataclass(frozen=True)
class ToolkitConfig:
    """`data` of the envelope: the settings asked for, or those that were changed."""

    config: str
    config_source: str
    exists: bool
    settings: tuple[Setting, ...]
    changes: tuple[Change, ...] = ()
    journal: str = ""
    dry_run: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Show settings with where they come from; kind ToolkitConfig. A key may be a table: all below it then.

    Exit 1 if the file holds something that the toolkit doesn't know or take.
    """
    path, source = facts.locate(host, options.config)
    text = host.read_text(path)
    tree = parse_toml(text or "", path)
    settings = _wanted(settings_in(host, tree), options.keys)
    data = ToolkitConfig(path, source, text is not None, settings)
    problems = tuple(
        ErrorInfo("toolkit-config", f"{path}: {one.key}: {one.problem}", _mend(one))
        for one in settings
        if one.problem
    )
    status, code = ("fail", ExitCode.FAILED) if problems else ("ok", ExitCode.OK)
    single = len(options.keys) == 1 and len(settings) == 1
    blocks: tuple[Block, ...] = (Text(shown(settings[0].value)),) if single else _listed(data)
    return Result(KIND, data, status, code, (), problems, blocks)


def settings_in(host: Host, tree: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Every known key with what holds for it, and every other one that stands in the file."""
    keys = facts.keys_for(host)
    known = tuple(_setting(key, tree) for key in keys)
    names = {key.name for key in keys}
    strange = (name for name in facts.names_in(tree) if name not in names)
    return (*known, *(_unknown(name, dig(tree, *name.split(".")), names) for name in strange))


def _setting(key: Key, tree: Mapping[str, Any]) -> Setting:
    value = dig(tree, *key.path)
    default = list(key.default) if isinstance(key.default, tuple) else key.default
    if value is None:
        return Setting(key.name, default, "default", key.kind, default, key.allowed, "")
    return Setting(key.name, value, "file", key.kind, default, key.allowed, facts.wrong(key, value, tree))


def _unknown(name: str, value: Any, names: set[str]) -> Setting:
    near = facts.nearest(name, tuple(sorted(names)))
    problem = "the toolkit has no such key" + (f", did you mean {near}?" if near else "")
    return Setting(name, value, "unknown", "", None, (), problem)


def _wanted(settings: tuple[Setting, ...], names: tuple[str, ...]) -> tuple[Setting, ...]:
    if not names:
        return settings
    found = []
    for name in names:
        below = [one for one in settings if one.key == name or one.key.startswith(f"{name}.")]
        if not below:
            facts.find_key(facts.KEYS, name)  # says which one is near
        found += below
    return tuple({one.key: one for one in found}.values())


def _mend(setting: Setting) -> str:
    if setting.source == "unknown" or setting.default is None:
        return f"take it out: gpunode toolkit config unset {setting.key}"
    return f"gpunode toolkit config set '{setting.key}={shown(setting.default)}'"


def shown(value: Any) -> str:
    """A value as `set` takes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def _listed(data: ToolkitConfig) -> tuple[Block, ...]:
    state = "" if data.exists else ", which does not exist: these are the toolkit's defaults"
    rows = tuple(
        (
            one.key,
            Cell("(not set)", Style.DIM) if one.value is None else shown(one.value),
            Cell(one.source, Style.DIM if one.source == "default" else Style.PLAIN),
            Cell(one.problem, Style.BAD),
        )
        for one in data.settings
    )
    return Text(f"{data.config} ({data.config_source}){state}", Style.HEADING), Table(_columns(data), rows)


def _columns(data: ToolkitConfig) -> tuple[str, ...]:
    return ("KEY", "VALUE", "SOURCE", "PROBLEM" if any(one.problem for one in data.settings) else "")
