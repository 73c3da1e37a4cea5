"""`gpunode toolkit config set|unset`: change the toolkit's config.toml, comments kept, values checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpunode.commands.toolkit_config import KIND, ToolkitConfig, settings_in
from gpunode.dataclass import dataclass
from gpunode.errors import PreconditionError, UsageError
from gpunode.facts import toolkit_config as facts
from gpunode.facts.containerd import parse_toml
from gpunode.facts.toolkit_config import Key
from gpunode.host import Host
from gpunode.result import Block, Diff, Progress, Result, Style, Text
from gpunode.runtime.engine import FileEdit, decode
from gpunode.runtime.files import FilesChanged, change_files
from gpunode.runtime.toolkit_file import with_settings, without_settings

OPERATION = "toolkit-config"
_NO_RESTART = "read whenever a container starts: nothing to restart; running containers stay as they are"
_ROOTFUL = (
    "no-cgroups counts for every user of this file: containers that root starts in legacy mode then fail with"
    " 'NVML: Unknown Error'; rootless Docker alone takes ~/.config/nvidia-container-runtime/config.toml"
)
_HEADING = "# NVIDIA Container Toolkit; what isn't here has the toolkit's own default\n"


@dataclass(frozen=True)
class Options:
    """`settings`: KEY=VALUE each, or for `unset` the bare keys. `create` makes a missing file."""

    settings: tuple[str, ...]
    config: str = ""
    create: bool = False
    dry_run: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Change settings; kind ToolkitConfig. `UsageError` for a key or value that the toolkit doesn't take."""
    given = _parsed(facts.keys_for(host), options.settings)

    def edited(text: str, path: str) -> str:
        after = with_settings(text, path, {key.path: value for key, value in given.items()})
        tree = parse_toml(after, path)
        for key, value in given.items():
            problem = facts.wrong(key, value, tree)
            if problem:
                raise UsageError(f"{key.name}: {problem}", hint=f"see: gpunode toolkit config get {key.name}")
        return after

    return _change(host, options, progress, edited, tuple(key.name for key in given))


def unset(host: Host, options: Options, progress: Progress) -> Result:
    """Take keys out, so that the toolkit's own defaults hold again; kind ToolkitConfig."""

    def edited(text: str, path: str) -> str:
        there = facts.names_in(parse_toml(text, path))
        for name in options.settings:
            if name not in there:
                facts.find_key(facts.KEYS, name)
        return without_settings(text, path, [tuple(name.split(".")) for name in options.settings])

    return _change(host, options, progress, edited, options.settings)


def _parsed(keys: tuple[Key, ...], settings: tuple[str, ...]) -> Mapping[Key, Any]:
    given: dict[Key, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        key = facts.find_key(keys, name)
        if not equals:
            raise UsageError(
                f"{name}: no value given",
                hint=f"gpunode toolkit config set {name}=VALUE, or: gpunode toolkit config unset {name}",
            )
        if key in given:
            raise UsageError(f"{name} is given twice", hint="keep the one that is meant")
        given[key] = facts.parsed(key, text)
    return given


def _change(
    host: Host,
    options: Options,
    progress: Progress,
    edited: Callable[[str, str], str],
    names: tuple[str, ...],
) -> Result:
    path, source = facts.locate(host, options.config)
    if not path.startswith("/"):
        raise UsageError(f"the configuration's path must be absolute, not {path!r}", hint="--config /PATH")

    def plan() -> tuple[FileEdit, ...]:
        before = host.read_bytes(path)
        if before is None and not options.create:
            raise PreconditionError(
                f"{path} does not exist: the toolkit isn't installed, or runs with its defaults",
                hint="install the package nvidia-container-toolkit, or make the file: add --create",
            )
        text = _HEADING if before is None else decode(before, path)
        after = edited(text, path)
        return (FileEdit(path, before, before if before is not None and after == text else after.encode()),)

    context = {"config": path, "settings": list(options.settings)}
    done = change_files(host, OPERATION, plan, progress, context=context, dry_run=options.dry_run)
    return _report(host, options, done, path, source, names)


def _report(
    host: Host, options: Options, done: FilesChanged, path: str, source: str, names: tuple[str, ...]
) -> Result:
    edit = done.edits[0]
    tree = parse_toml(decode(edit.after, path), path)
    settings = tuple(one for one in settings_in(host, tree) if one.key in names)
    change = edit.change()
    exists = host.exists(path)
    data = ToolkitConfig(path, source, exists, settings, (change,), done.journal, options.dry_run)
    notes = done.notes
    if any(one.key.endswith(".no-cgroups") and one.value is True for one in settings):
        notes += (_ROOTFUL,)
    return Result(KIND, data, messages=notes, blocks=_blocks(data, options.dry_run))


def _blocks(data: ToolkitConfig, dry_run: bool) -> tuple[Block, ...]:
    change = data.changes[0]
    if change.action == "unchanged":
        return (Text(f"{change.path} unchanged"),)
    blocks: list[Block] = [
        Text(f"{change.path} {change.action}{' (dry run)' if dry_run else ''}", Style.GOOD)
    ]
    if dry_run:
        blocks.append(Diff(change.diff))
    blocks.append(Text(_NO_RESTART, Style.DIM))
    if data.journal:
        blocks.append(Text(f"undo it with: gpunode rollback {data.journal}", Style.DIM))
    return tuple(blocks)
