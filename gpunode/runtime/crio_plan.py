"""What CRI-O's files must become. Pure functions over their text; crio.py reads, validates and asks.

Handlers go into one drop-in that holds nothing else. Other files are touched only where they would stand in
its way: a later one that defines the same handler, and NVIDIA's own leftovers, which CRI-O loads whatever
their names are (``99-nvidia.conf`` of the GPU operator, ``99-nvidia.toml.bak``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gpunode.dataclass import dataclass, field, replace
from gpunode.errors import ConfigError
from gpunode.facts.containerd import dig, parse_toml
from gpunode.facts.crio import CrioConfig, CrioFile, compiled_default
from gpunode.runtime import toml_edit
from gpunode.runtime.crio_handlers import base_handler, handler_table, means, only_nvidias
from gpunode.runtime.engine import Unwanted, Wanted
from gpunode.runtime.trees import Mutation, Tree

DROP_IN_NAME = "99-nvidia.toml"
_LEFTOVER = "99-nvidia"


@dataclass(frozen=True)
class State:
    """What is known before planning. `drop_in` is the path of our own file, whether it exists or not.

    `unread` are files at places where CRI-O never looks. `missing` are monitor paths that lead nowhere;
    `conmon` is the monitor to name where neither a handler does nor CRI-O's PATH leads to one.
    """

    config: CrioConfig
    drop_in: str
    version: tuple[int, ...] = ()
    unread: tuple[CrioFile, ...] = ()
    missing: Collection[str] = ()
    conmon: str = ""


@dataclass(frozen=True)
class Draft:
    """New text of every file to change, None for one to remove, and what a person should know."""

    texts: Mapping[str, str | None]
    notes: tuple[str, ...] = ()
    previous_default: str = ""


@dataclass(frozen=True)
class _Work:
    """The files as they will be, changed step by step."""

    state: State
    gone: tuple[CrioFile, ...]
    changes: dict[str, list[Mutation]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def left(self) -> CrioConfig:
        """CRI-O's configuration without the leftovers."""
        config = self.state.config
        gone = {file.path for file in self.gone}
        return replace(config, files=tuple(file for file in config.files if file.path not in gone))

    def later(self) -> tuple[CrioFile, ...]:
        """The files that CRI-O reads after the drop-in."""
        config, own = self.left, order(self.state.drop_in)
        return tuple(file for file in config.files if file.path != config.path and order(file.path) > own)

    def add(self, path: str, mutate: Mutation) -> None:
        self.changes.setdefault(path, []).append(mutate)

    def texts(self) -> dict[str, str | None]:
        known = {file.path: file.text for file in self.state.config.files}
        result: dict[str, str | None] = {file.path: None for file in self.gone}
        for path, mutations in self.changes.items():

            def mutate(tree: Tree, mutations: list[Mutation] = mutations) -> None:
                for one in mutations:
                    one(tree)

            result[path] = toml_edit.edit(known.get(path, ""), mutate, path)
        return result


def order(path: str) -> tuple[str, ...]:
    """Sorts paths below one directory as CRI-O reads them: by name in each directory, in place."""
    return tuple(path.split("/"))


def is_leftover(path: str, drop_in: str) -> bool:
    """Whether a file has one of the names that NVIDIA's tools, or a copy of theirs, have left behind.

    A hidden one is what an editor or a killed write left of such a file; CRI-O reads it all the same.
    """
    return path != drop_in and path.rpartition("/")[2].lstrip(".").startswith(_LEFTOVER)


def configured(state: State, wanted: Wanted) -> Draft:
    """The files with the handlers in them; without any handlers to register, as they are."""
    if not wanted.handlers:
        return Draft({})
    work = _Work(state, _leftovers(state))
    base = base_handler(state.config, state.version, wanted.names)
    for handler in wanted.handlers:
        existing = {} if wanted.replace else _own(state.config, handler.name)
        table = handler_table(base, existing, handler, state.missing)
        if state.conmon and not table.get("monitor_path"):
            table["monitor_path"] = state.conmon
        _put(work, handler.name, table)
    _carry_over(work, wanted)
    previous = _set_default(work, wanted)
    return Draft(work.texts(), tuple(work.notes), previous)


def _leftovers(state: State) -> tuple[CrioFile, ...]:
    found = (file for file in state.config.files if is_leftover(file.path, state.drop_in))
    return tuple(file for file in (*found, *state.unread) if only_nvidias(file))


def _carry_over(work: _Work, wanted: Wanted) -> None:
    """What a leftover alone has defined, and nobody asked to lose, moves into the drop-in."""
    for file in work.gone:
        read = file not in work.state.unread
        where = "CRI-O reads it as well" if read else "CRI-O never reads it there"
        work.notes.append(f"{file.path} is left from NVIDIA's tools and is removed: {where}")
        for name in file.handlers if read else ():
            if name not in wanted.names:
                _put(work, name, work.state.config.handlers[name])


def _own(config: CrioConfig, name: str) -> Tree:
    table = config.handlers.get(name)
    return dict(table) if isinstance(table, dict) else {}


def _put(work: _Work, name: str, table: Tree) -> None:
    """Give the handler this table, unless the files that stay say so already."""
    if means(work.left.handlers.get(name), table):
        return
    for file in work.later():
        if name in file.handlers:  # a handler in a later file replaces ours as a whole
            place = f"{file.path}:{file.line_of(name)}"
            work.notes.append(
                f"{place} has a handler {name} that would replace this one; it is taken out there"
            )
            work.add(file.path, lambda tree: _take_out_handlers(tree, (name,)))
    work.add(work.state.drop_in, _with_handler(name, table))


def _with_handler(name: str, table: Tree) -> Mutation:
    def mutate(tree: Tree) -> None:
        runtime = tree.setdefault("crio", {}).setdefault("runtime", {})
        runtime.setdefault("runtimes", {})[name] = table

    return mutate


def _set_default(work: _Work, wanted: Wanted) -> str:
    """Make the wanted handler the default, or keep a leftover's; the default that was replaced."""
    before = work.state.config.named_default
    now = wanted.default or before
    if now == work.left.named_default:
        return ""
    for file in work.later():
        if "default_runtime" in file.runtime:
            line = file.line_of("default_runtime")
            raise ConfigError(
                f"{file.path}:{line} names another default runtime,"
                f" and CRI-O reads it after {work.state.drop_in}",
                hint=f"take default_runtime out: ${{EDITOR:-vi}} +{line} {file.path}",
            )
    work.add(work.state.drop_in, _with_default(now))
    return before if before != now else ""


def _with_default(name: str) -> Mutation:
    def mutate(tree: Tree) -> None:
        tree.setdefault("crio", {}).setdefault("runtime", {})["default_runtime"] = name

    return mutate


def removed(state: State, unwanted: Unwanted) -> Draft:
    """The files without the handlers, whoever wrote them; ours goes if nothing else is in it."""
    config = state.config
    left = {name for name in config.handlers if name not in unwanted.names}
    known = {*left, compiled_default(state.version)}
    previous = unwanted.previous_default if unwanted.previous_default in known else ""
    texts: dict[str, str | None] = {}
    for file in (*config.files, *state.unread):
        named = file.runtime.get("default_runtime")
        mine = named in unwanted.names or any(name in file.handlers for name in unwanted.names)
        if not mine:
            continue
        own = file.path == state.drop_in or is_leftover(file.path, state.drop_in)
        back = "" if own else previous
        after = toml_edit.edit(file.text, take_out(unwanted.names, back), file.path)
        emptied = own and not parse_toml(after, file.path)
        texts[file.path] = None if emptied else after
    return Draft(texts)


def take_out(names: Collection[str], previous_default: str = "") -> Mutation:
    """Remove handlers, and a default that is one of them; tables that become empty go as well."""

    def mutate(tree: Tree) -> None:
        runtime = dig(tree, "crio", "runtime")
        if not isinstance(runtime, dict):
            return
        if runtime.get("default_runtime") in names:
            del runtime["default_runtime"]
            if previous_default:
                runtime["default_runtime"] = previous_default
        _take_out_handlers(tree, names)

    return mutate


def _take_out_handlers(tree: Tree, names: Collection[str]) -> None:
    handlers = dig(tree, "crio", "runtime", "runtimes")
    for name in [name for name in names if isinstance(handlers, dict) and name in handlers]:
        del handlers[name]
    for path in (("crio", "runtime", "runtimes"), ("crio", "runtime"), ("crio",)):
        _prune(tree, path)


def _prune(tree: Tree, path: tuple[str, ...]) -> None:
    parent: Any = dig(tree, *path[:-1])
    if isinstance(parent, dict) and parent.get(path[-1]) == {}:
        del parent[path[-1]]
