"""`gpunode toolkit config get`: the NVIDIA Container Toolkit's settings, and the source of each value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from gpunode.commands.help_page import command_group
from gpunode.commands.options import DryRunOption
from gpunode.commands.session import Session, verb
from gpunode.errors import PreconditionError, UsageError
from gpunode.facts import toolkit as facts
from gpunode.facts.toml import dig, parse_toml
from gpunode.facts.toolkit import Key
from gpunode.host import Host
from gpunode.host.journal import FileEdit, rollback_command
from gpunode.host.transaction import change_files
from gpunode.output.result import (
    Block,
    Cell,
    Change,
    ErrorInfo,
    ExitCode,
    Result,
    Style,
    Table,
    Text,
    change_blocks,
)
from gpunode.runtime.engine import decode
from gpunode.runtime.restart import engine_restart
from gpunode.runtime.toolkit_file import with_settings, without_settings

KIND = "ToolkitConfig"

toolkit_app = command_group("Install and configure the NVIDIA Container Toolkit.")
config_app = command_group("Read and edit the toolkit's config.toml.")
toolkit_app.add_typer(config_app, name="config")

FileOption = Annotated[
    str,
    typer.Option(
        *("--config-file", "--config"),
        metavar="PATH",
        help="Path of config.toml.",
        show_default="the file that the toolkit reads",
    ),
]


class Setting(NamedTuple):
    """One effective key. `value` is None for an absent key; `source` is file, default or unknown.

    An unknown key is one that the toolkit doesn't have. `problem` says what is wrong, empty if nothing is.
    """

    key: str
    value: Any
    source: str
    type: str
    default: Any
    allowed: tuple[str, ...]
    problem: str


class ToolkitConfig(NamedTuple):
    """`data` of the envelope: the requested settings, or those that were changed."""

    config: str
    config_source: str
    exists: bool
    settings: tuple[Setting, ...]
    changes: tuple[Change, ...] = ()
    journal: str = ""
    dry_run: bool = False


@verb(config_app, "get", "ToolkitConfig")
def toolkit_config_get(
    session: Session,
    key: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY]...", help="Keys or tables to print.", show_default="all"),
    ] = None,
    config: FileOption = "",
) -> Result:
    """Show settings and the origin of each value. The exit code is 1 for a file with invalid settings.

    gpunode toolkit config get nvidia-container-runtime.mode
    """
    keys = key or ()
    path, source = facts.locate(session.host, config)
    text = session.host.read_text(path)
    if config and text is None:
        raise PreconditionError(
            f"{path} doesn't exist", hint="leave out --config-file, or name an existing file"
        )
    tree = parse_toml(text or "", path)
    settings = _selected(settings_in(session.host, tree), keys)
    data = ToolkitConfig(path, source, text is not None, settings)
    problems = tuple(
        ErrorInfo("toolkit-config", f"{path}: {setting.key}: {setting.problem}", _fix(setting))
        for setting in settings
        if setting.problem
    )
    status, code = ("fail", ExitCode.FAILED) if problems else ("ok", ExitCode.OK)
    single = len(keys) == 1 and len(settings) == 1
    blocks: tuple[Block, ...] = (Text(shown(settings[0].value)),) if single else _listed(data)
    return Result(KIND, data, status, code, (), problems, blocks)


def settings_in(host: Host, tree: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Every known key with its effective value, and every other key in the file."""
    keys = facts.keys_for(host)
    known_settings = tuple(_setting(key, tree) for key in keys)
    names = {key.name for key in keys}
    strange = (name for name in facts.names_in(tree) if name not in names)
    return (*known_settings, *(_unknown(name, dig(tree, *name.split(".")), names) for name in strange))


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


def _selected(settings: tuple[Setting, ...], names: Sequence[str]) -> tuple[Setting, ...]:
    if not names:
        return settings
    selected = []
    for name in names:
        below = [setting for setting in settings if setting.key == name or setting.key.startswith(f"{name}.")]
        if not below:
            facts.find_key(facts.KEYS, name)  # names the nearest key
        selected += below
    return tuple({setting.key: setting for setting in selected}.values())


def _fix(setting: Setting) -> str:
    if setting.source == "unknown" or setting.default is None:
        return f"take it out: gpunode toolkit config unset {setting.key}"
    return f"gpunode toolkit config set '{setting.key}={shown(setting.default)}'"


def shown(value: Any) -> str:
    """A value in the form that `set` accepts."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def _listed(data: ToolkitConfig) -> tuple[Block, ...]:
    state = "" if data.exists else ", which does not exist: these are the toolkit's defaults"
    rows = tuple(
        (
            setting.key,
            Cell("(not set)", Style.DIM) if setting.value is None else shown(setting.value),
            Cell(setting.source, Style.DIM if setting.source == "default" else Style.PLAIN),
            Cell(setting.problem, Style.BAD),
        )
        for setting in data.settings
    )
    columns = (
        "KEY",
        "VALUE",
        "SOURCE",
        "PROBLEM" if any(setting.problem for setting in data.settings) else "",
    )
    return Text(f"{data.config} ({data.config_source}){state}", Style.HEADING), Table(columns, rows)


# `gpunode toolkit config set|unset`: change the toolkit's config.toml, comments kept, values checked.

OPERATION = "toolkit-config"
_NO_RESTART = "read whenever a container starts: nothing to restart; running containers stay as they are"
_ROOTFUL = (
    "no-cgroups counts for every user of this file: containers that root starts in legacy mode then fail with"
    " 'NVML: Unknown Error'; rootless Docker alone takes ~/.config/nvidia-container-runtime/config.toml"
)
_HEADING = "# NVIDIA Container Toolkit; what isn't here has the toolkit's own default\n"


@verb(config_app, "set", "ToolkitConfig")
def toolkit_config_set(
    session: Session,
    setting: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE...", help="Settings; separate the values of a list with commas."),
    ],
    config: FileOption = "",
    create: Annotated[bool, typer.Option("--create", help="Create the file if it doesn't exist.")] = False,
    dry_run: DryRunOption = False,
) -> Result:
    """Change settings. Comments are kept and values checked; gpunode rollback undoes the change.

    Needs root, except for a file of your own or with --dry-run.

    sudo gpunode toolkit config set nvidia-container-runtime.mode=cdi
    """
    values = _parsed(facts.keys_for(session.host), setting)
    # before the file is read; what depends on the file is allowed here
    _refuse_wrong(values, {"features": {"allow-ldconfig-from-container": True}})

    def edited(text: str, path: str) -> str:
        after = with_settings(text, path, {key.path: value for key, value in values.items()})
        _refuse_wrong(values, parse_toml(after, path))
        return after

    return _change(session, config, edited, setting, create=create, dry_run=dry_run)


def _refuse_wrong(values: Mapping[Key, Any], tree: Mapping[str, Any]) -> None:
    for key, value in values.items():
        problem = facts.wrong(key, value, tree)
        if problem:
            raise UsageError(f"{key.name}: {problem}", hint=f"see gpunode toolkit config get {key.name}")


@verb(config_app, "unset", "ToolkitConfig")
def toolkit_config_unset(
    session: Session,
    key: Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys to reset to their defaults.")],
    config: FileOption = "",
    dry_run: DryRunOption = False,
) -> Result:
    """Remove settings, so that the toolkit's defaults apply.

    Needs root, except for a file of your own or with --dry-run.

    sudo gpunode toolkit config unset features.allow-ldconfig-from-container
    """

    def edited(text: str, path: str) -> str:
        names = facts.names_in(parse_toml(text, path))
        for name in key:
            if name not in names:
                facts.find_key(facts.KEYS, name)
        return without_settings(text, path, [tuple(name.split(".")) for name in key])

    return _change(session, config, edited, key, dry_run=dry_run)


def _parsed(keys: tuple[Key, ...], settings: Sequence[str]) -> Mapping[Key, Any]:
    values: dict[Key, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals and name not in {key.name for key in keys}:
            raise UsageError(f"{name!r} has no value", hint="gpunode toolkit config set KEY=VALUE")
        key = facts.find_key(keys, name)
        if not equals:
            raise UsageError(
                f"{name!r} has no value",
                hint=f"gpunode toolkit config set {name}=VALUE, or: gpunode toolkit config unset {name}",
            )
        if key in values:
            raise UsageError(f"{name} is given twice", hint="keep the one that is meant")
        values[key] = facts.parsed(key, text)
    return values


def _change(
    session: Session,
    config: str,
    edited: Callable[[str, str], str],
    settings: Sequence[str],
    *,
    create: bool = False,
    dry_run: bool,
) -> Result:
    """Write what `edited` makes of the file's text and path; `settings`, KEY or KEY=VALUE each, are recorded
    in the journal."""
    host = session.host
    path, source = facts.locate(host, config)
    if not path.startswith("/"):
        raise UsageError(
            f"the configuration's path must be absolute, not {path!r}", hint="--config-file /PATH"
        )

    def plan() -> tuple[FileEdit, ...]:
        before = host.read_bytes(path)
        if before is None and not create:
            raise PreconditionError(
                f"{path} does not exist: the toolkit isn't installed, or runs with its defaults",
                hint="install it: gpunode toolkit install, or make the file: add --create",
            )
        text = _HEADING if before is None else decode(before, path)
        after = edited(text, path)
        return (FileEdit(path, before, before if before is not None and after == text else after.encode()),)

    context = {"config": path, "settings": list(settings)}
    restart = engine_restart(host, session.progress)
    done = change_files(host, OPERATION, plan, restart, context=context, dry_run=dry_run)
    tree = parse_toml(decode(done.edits[0].after, path), path)
    changed = {setting.partition("=")[0] for setting in settings}
    now = tuple(setting for setting in settings_in(host, tree) if setting.key in changed)
    data = ToolkitConfig(path, source, host.exists(path), now, done.changes, done.journal, dry_run)
    notes = done.notes
    if any(setting.key.endswith(".no-cgroups") and setting.value is True for setting in now):
        notes += (_ROOTFUL,)
    return Result(KIND, data, messages=notes, blocks=_blocks(host, data))


def _blocks(host: Host, data: ToolkitConfig) -> tuple[Block, ...]:
    blocks = change_blocks(data.changes, dry_run=data.dry_run)
    if data.changes[0].action == "unchanged":
        return tuple(blocks)
    blocks.append(Text(_NO_RESTART, Style.DIM))
    if data.journal:
        blocks.append(Text(f"undo it with: {rollback_command(host, data.journal)}", Style.DIM))
    return tuple(blocks)
