"""What containerd's files must become. Pure functions over their text; containerd.py reads, validates, asks.

Which file is edited: the one that defines the runtime already; else, on containerd 2, which merges deeply, a
drop-in that holds nothing but the runtime; else, on containerd 1, where a later file replaces the whole CRI
table, the last file that has such a table, in place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpunode.errors import ConfigError
from gpunode.facts.containerd import CRI_IDS, CRI_PLUGINS, ContainerdConfig, dig, parse_toml
from gpunode.runtime import toml_edit
from gpunode.runtime.containerd_tables import cri_of, refuse_wrong_types, runtime_table, simple
from gpunode.runtime.engine import Wanted
from gpunode.runtime.trees import Mutation, Tree

DROP_IN_NAME = "conf.d/99-nvidia.toml"


@dataclass(frozen=True)
class State:
    """What is known before planning. `effective` is containerd's own merged view, None if it gives none.

    `drop_in` is the path for a drop-in, `drop_in_forced` whether the user named it, `drop_in_imported`
    whether the main file's imports cover it. `systemd_cgroup` is what a CRI that is switched on only now
    should use.
    """

    config: ContainerdConfig
    texts: Mapping[str, str]
    release: tuple[int, ...]
    effective: Tree | None = None
    drop_in: str = ""
    drop_in_forced: bool = False
    drop_in_imported: bool = False
    systemd_cgroup: bool = False

    @property
    def deep(self) -> bool:
        """Whether this containerd merges a drop-in key by key."""
        return self.release >= (2,)

    @property
    def newest_version(self) -> int:
        """The file version to start a new file with: the one that every release of this major reads."""
        return 3 if self.deep else 2


@dataclass(frozen=True)
class _Draft:
    """Mutations collected per file, then carried out at once."""

    state: State
    mutations: dict[str, list[Mutation]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, path: str, mutate: Mutation) -> None:
        self.mutations.setdefault(path, []).append(mutate)

    def texts(self) -> dict[str, str]:
        """New text of every file that was touched."""
        result = {}
        for path, mutations in self.mutations.items():

            def mutate(tree: Tree, mutations: list[Mutation] = mutations) -> None:
                for one in mutations:
                    one(tree)

            hint = "" if path == self.state.drop_in else self._hint()
            result[path] = toml_edit.edit(self.state.texts.get(path, ""), mutate, path, hint)
        return result

    def _hint(self) -> str:
        if not self.state.deep:
            return ""
        return f"use a drop-in: gpunode configure-runtime --drop-in-config {self.state.drop_in}"


def configured(state: State, wanted: Wanted) -> tuple[dict[str, str], int, tuple[str, ...]]:
    """New text of every file to change, the version of the main file, and what a person should know."""
    for path in state.config.files:
        refuse_wrong_types(parse_toml(state.texts[path], path), path)
    refuse_unread_version(state)
    _refuse_missing_import(state)
    draft = _Draft(state)
    version = _bring_main_up(draft)
    fresh = _enable_cri(draft) or not state.config.exists
    _add_runtime(draft, wanted, version, fresh and state.systemd_cgroup)
    return draft.texts(), version, tuple(draft.notes)


def refuse_unread_version(state: State) -> None:
    """A version that this containerd can't read; 1.6 would take it without a word and ignore the tables."""
    newest = 4 if state.release >= (2, 3) else 3 if state.release >= (2,) else 2
    if state.release and state.config.version > newest and state.release < (3,):
        release = ".".join(map(str, state.release))
        raise ConfigError(
            f"{state.config.path} has version = {state.config.version},"
            f" containerd {release} reads up to {newest}",
            hint="bring file and containerd together: containerd config default shows what this one wants",
        )


def _refuse_missing_import(state: State) -> None:
    """containerd starts with no file that imports, other than by a pattern, one that isn't there."""
    missing = [path for path in state.config.missing_imports if path != state.drop_in]
    if missing:
        raise ConfigError(
            f"{state.config.path} imports {missing[0]}, which does not exist: containerd can't start with it",
            hint=f"create that file or take it out of imports: grep -n imports {state.config.path}",
        )


def _bring_main_up(draft: _Draft) -> int:
    """The main file's version; a file that is absent, or has no version and no plugins, gets the newest."""
    config, state = draft.state.config, draft.state
    if config.version != 1:
        return config.version
    if "plugins" in config.main:
        if state.deep:
            raise ConfigError(
                f"{config.path} has no version (or version 1); containerd 2 ignores its CRI settings",
                hint=f"migrate it: containerd --config {config.path} config migrate",
            )
        return 1
    ids = [
        one
        for key in ("disabled_plugins", "required_plugins")
        for one in config.main.get(key, [])
        if one not in CRI_IDS and not one.startswith("io.containerd.")
    ]
    if ids or config.imports:
        what = f"the short plugin name {ids[0]!r}" if ids else "imports"
        raise ConfigError(
            f"{config.path} has no version and {what}, which mean something else in version 2",
            hint=f"migrate it: containerd --config {config.path} config migrate",
        )
    version = state.newest_version

    def mutate(tree: Tree) -> None:
        tree["version"] = version

    draft.add(config.path, mutate)
    if config.exists:
        draft.notes.append(
            f"{config.path} gets version = {version}: without one containerd takes it as version 1"
        )
    return version


def _enable_cri(draft: _Draft) -> bool:
    """Take the CRI out of `disabled_plugins` wherever it stands; True if it was switched off."""
    found = False
    for path in draft.state.config.files:
        listed = parse_toml(draft.state.texts[path], path).get("disabled_plugins", [])
        if any(one in CRI_IDS for one in listed):
            found = True
            draft.add(path, _without_cri)
            draft.notes.append(f"the CRI is switched on: {path} had it in disabled_plugins")
    return found


def _without_cri(tree: Tree) -> None:
    tree["disabled_plugins"] = [one for one in tree["disabled_plugins"] if one not in CRI_IDS]


def _add_runtime(draft: _Draft, wanted: Wanted, version: int, systemd_cgroup: bool) -> None:
    state = draft.state
    plugin = CRI_PLUGINS[min(version, 3)]
    tables = {
        handler.name: runtime_table(state.config, state.effective, handler, systemd_cgroup)
        for handler in wanted.handlers
    }
    target = _destination(state, wanted, plugin)
    spelled_out = bool(state.config.runtimes)

    def mutate(tree: Tree) -> None:
        if target == state.drop_in and version > 1:
            tree.setdefault("version", version)
        cri = cri_of(tree, plugin)
        if not state.deep and target == state.drop_in and target not in state.config.files:
            cri.update(copy.deepcopy(state.config.cri))  # containerd 1 forgets every other file's table
        if tables or systemd_cgroup:
            runtimes = cri.setdefault("containerd", {}).setdefault("runtimes", {})
            if systemd_cgroup or not (spelled_out or state.deep):
                _spell_out_runc(runtimes, state.effective, systemd_cgroup)
            runtimes.update(tables)
        if wanted.default:
            cri["containerd"]["default_runtime_name"] = wanted.default
        if wanted.cdi and (not state.deep or state.config.cri.get("enable_cdi") is False):
            cri["enable_cdi"] = True

    if _is_there(state, wanted, tables) and not draft.mutations:
        return
    if target == state.drop_in and _other_version(state, version):
        draft.add(target, lambda tree: tree.clear())  # NVIDIA's own file: containerd wants it in this version
    draft.add(target, mutate)
    if target == state.drop_in and not state.drop_in_imported:
        draft.add(state.config.path, lambda tree: _import(tree, state.drop_in))


def _other_version(state: State, version: int) -> bool:
    return state.config.versions.get(state.drop_in, version) != version


def _is_there(state: State, wanted: Wanted, tables: Tree) -> bool:
    """Whether the merged files mean all this already, whoever wrote them."""
    config = state.config
    default = wanted.default in ("", config.default_runtime)
    cdi = not wanted.cdi or config.cri.get("enable_cdi", state.deep) is True
    return all(config.runtimes.get(name) == table for name, table in tables.items()) and default and cdi


def _destination(state: State, wanted: Wanted, plugin: str) -> str:
    if state.drop_in_forced:
        return state.drop_in
    path = state.config.path
    for name in reversed(state.config.files):
        tree = parse_toml(state.texts[name], name)
        known = dig(tree, "plugins", plugin, "containerd", "runtimes")
        if isinstance(known, dict) and not known.keys().isdisjoint(wanted.names):
            return name
        if not state.deep and isinstance(dig(tree, "plugins", plugin), dict):
            return name
    return state.drop_in if state.deep else path


def _spell_out_runc(runtimes: Tree, effective: Tree | None, systemd_cgroup: bool) -> None:
    """containerd 1 forgets its built-in runc as soon as a file names any runtime."""
    runc = runtimes.setdefault("runc", simple(effective, "runc"))
    if systemd_cgroup:
        runc.setdefault("options", {})["SystemdCgroup"] = True


def _import(tree: Tree, drop_in: str) -> None:
    pattern = import_pattern(drop_in)
    tree["imports"] = [*tree.get("imports", []), pattern]


def import_pattern(drop_in: str) -> str:
    """The import that covers a drop-in: its directory's ``*.toml`` as nvidia-ctk writes it, else the file."""
    return f"{drop_in.rpartition('/')[0]}/*.toml" if drop_in.endswith(".toml") else drop_in
