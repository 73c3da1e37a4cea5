"""What containerd's files must become. Pure functions over their text; containerd.py reads, validates, asks.

Which file is edited: the one that defines the runtime already; else, on containerd 2, which merges deeply, a
drop-in that holds nothing but the runtime; else, on containerd 1, where a later file replaces the whole CRI
table, the last file that has such a table, in place.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.dataclass import dataclass, field
from gpunode.errors import ConfigError
from gpunode.facts.containerd import CRI_IDS, CRI_PLUGINS, dig, parse_toml
from gpunode.facts.writers import nvidia_writer
from gpunode.runtime import containerd_imports, toml_edit
from gpunode.runtime.containerd_refusals import (
    EACH_FILE_MIGRATED,
    refuse,
    refuse_ignored_version_1,
    refuse_missing_import,
    short_names,
)
from gpunode.runtime.containerd_state import State
from gpunode.runtime.containerd_tables import (
    cri_of,
    of_runtimes_only,
    runtime_table,
    simple,
    snapshotter_without_runtimes,
)
from gpunode.runtime.engine import Wanted
from gpunode.runtime.trees import Mutation, Tree

_CDI_DIRECTORIES = (("/etc/cdi",), ("/var/run/cdi", "/run/cdi"))


@dataclass(frozen=True)
class Outcome:
    """New text of every file that changes (None: removed), the main file's version, and notes for people."""

    texts: Mapping[str, str | None]
    version: int
    notes: tuple[str, ...] = ()
    switched_cdi: bool = False


@dataclass(frozen=True)
class _Draft:
    """Mutations collected per file, then carried out at once."""

    state: State
    mutations: dict[str, list[Mutation]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, path: str, mutate: Mutation) -> None:
        self.mutations.setdefault(path, []).append(mutate)

    def texts(self) -> dict[str, str | None]:
        """New text of every file that was touched."""
        result: dict[str, str | None] = {}
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


def configured(state: State, wanted: Wanted) -> Outcome:
    """What the files must become so that containerd has what is wanted; `ConfigError` if they can't."""
    refuse(state)
    outcome = _configured(state, wanted)
    refuse_missing_import(state, outcome.texts)
    return outcome


def _configured(state: State, wanted: Wanted) -> Outcome:
    version = _version(state)
    notes = _about_cdi(state, wanted)
    off = state.config.disabled and wanted.handlers
    tables = _tables(state, wanted, systemd_cgroup=False)
    if not off and _is_there(state, wanted, tables):
        return Outcome({}, state.config.version, notes)
    draft = _Draft(state, notes=list(notes))
    _bring_main_up(draft, version)
    switched_on = bool(wanted.handlers) and _enable_cri(draft)
    systemd_cgroup = _needs_systemd_cgroup(draft, switched_on=switched_on)
    _add(draft, wanted, version, systemd_cgroup)
    return Outcome(draft.texts(), version, tuple(draft.notes), _switches_cdi(state, wanted))


def _version(state: State) -> int:
    """The main file's version; a file that is absent, or has no version and no plugins, gets the newest."""
    config = state.config
    if config.version != 1:
        return config.version
    short = short_names(config.main)
    keeps = "plugins in it" if "plugins" in config.main else f"the short name {short[0]!r}" if short else ""
    keeps = keeps or ("imports in it" if config.imports else "")
    if not keeps:
        # version 4 takes nothing from [grpc] and its like, so a file that may have them gets the one before
        return min(state.newest_version, 3) if config.exists else state.newest_version
    if state.deep and state.release < EACH_FILE_MIGRATED:
        raise refuse_ignored_version_1(state, keeps)
    return 1


def _bring_main_up(draft: _Draft, version: int) -> None:
    config = draft.state.config
    if version == config.version and config.exists:
        return

    def mutate(tree: Tree) -> None:
        tree["version"] = version

    draft.add(config.path, mutate)
    if config.exists:
        draft.notes.append(
            f"{config.path} gets version = {version}: without one containerd takes it as version 1"
        )


def _enable_cri(draft: _Draft) -> bool:
    """Take the CRI out of `disabled_plugins` wherever it stands; True if it was switched off.

    Lists of several files are joined, so a drop-in could not switch it on.
    """
    found = False
    for path in draft.state.config.files:
        listed = draft.state.config.trees[path].get("disabled_plugins", [])
        if any(one in CRI_IDS for one in listed):
            found = True
            draft.add(path, _without_cri)
            draft.notes.append(f"the CRI is switched on: {path} had it in disabled_plugins")
    return found


def _without_cri(tree: Tree) -> None:
    tree["disabled_plugins"] = [one for one in tree["disabled_plugins"] if one not in CRI_IDS]


def _needs_systemd_cgroup(draft: _Draft, *, switched_on: bool) -> bool:
    """Whether runc and the runtimes must be told to use systemd, there being nothing to inherit.

    A containerd 2 without a file runs pods already, and newer kubelets ask it which driver runc uses: there
    the runtimes follow runc, whatever the kubelet's file says.
    """
    state = draft.state
    if not state.systemd_cgroup or (state.config.exists and not switched_on):
        return False
    if switched_on or not state.deep or state.effective is None:
        return True
    draft.notes.append(
        "runc has SystemdCgroup = false in containerd's defaults and the runtime follows it; if this node's"
        f" pods should use systemd, say so for both in {state.config.path}"
    )
    return False


def _tables(state: State, wanted: Wanted, *, systemd_cgroup: bool) -> dict[str, Tree]:
    return {
        handler.name: runtime_table(state.config, state.effective, handler, systemd_cgroup)
        for handler in wanted.handlers
    }


def _add(draft: _Draft, wanted: Wanted, version: int, systemd_cgroup: bool) -> None:
    state = draft.state
    plugin = _plugin(state, version)
    tables = _tables(state, wanted, systemd_cgroup=systemd_cgroup)
    target = _destination(state, wanted, plugin)
    spelled_out = bool(state.config.runtimes)

    def mutate(tree: Tree) -> None:
        if target == state.drop_in and target != state.config.path:
            tree.setdefault("version", version)
        cri = cri_of(tree, plugin)
        if tables:
            runtimes = cri.setdefault("containerd", {}).setdefault("runtimes", {})
            if systemd_cgroup or not (spelled_out or state.deep):
                _spell_out_runc(runtimes, state.effective, systemd_cgroup)
            runtimes.update(tables)
        if wanted.default:
            cri["containerd"]["default_runtime_name"] = wanted.default
        if _switches_cdi(state, wanted):
            cri["enable_cdi"] = True

    if target == state.drop_in and _starts_afresh(state, wanted, version):
        draft.add(target, lambda tree: tree.clear())
    draft.add(target, mutate)
    if target == state.drop_in and not containerd_imports.imported(state.config, state.drop_in):
        entry = containerd_imports.entry(state)
        draft.add(state.config.path, lambda tree: containerd_imports.add(tree, entry))


def _plugin(state: State, version: int) -> str:
    """The name of the CRI's table in the file that is edited.

    containerd 2 forgets a version 2 file's snapshotter as long as no runtimes stand beside it (the migration
    of its images plugin ends early); a new table of them would bring it into force. Under the newer name,
    which a version 2 file may use as well, it does not.
    """
    joined = state.deep and state.release < EACH_FILE_MIGRATED
    if version == 2 and joined and snapshotter_without_runtimes(state.config):
        return CRI_PLUGINS[3]
    if version == state.config.version:
        return state.config.plugin
    return CRI_PLUGINS[min(version, 3)]


def _starts_afresh(state: State, wanted: Wanted, version: int) -> bool:
    """Whether the drop-in's old content goes: it isn't read, or has another version than the main file.

    `ConfigError` if it is neither empty nor NVIDIA's nor only about the wanted runtimes.
    """
    text, path = state.texts.get(state.drop_in, ""), state.drop_in
    tree = parse_toml(text, path)
    read = path in state.config.files
    if not tree or (read and tree.get("version", version) == version):
        return False
    if nvidia_writer(text, tree) or of_runtimes_only(tree, wanted.names):
        return True
    why = f"has version {tree.get('version')}, {state.config.path} {version}" if read else "is not imported"
    raise ConfigError(
        f"{path} {why}, and holds settings of somebody else",
        hint=f"name another drop-in: --drop-in-config {path.rpartition('/')[0]}/98-gpunode.toml",
    )


def _is_there(state: State, wanted: Wanted, tables: Mapping[str, Tree]) -> bool:
    """Whether the merged files mean all this already, whoever wrote them."""
    config = state.config
    default = wanted.default in ("", config.default_runtime)
    there = all(config.runtimes.get(name) == table for name, table in tables.items())
    return there and default and not _switches_cdi(state, wanted)


def _switches_cdi(state: State, wanted: Wanted) -> bool:
    """Whether CDI is wanted and off; containerd 2 has it on unless a file says otherwise."""
    return wanted.cdi and state.config.cri.get("enable_cdi", state.deep) is not True


def _about_cdi(state: State, wanted: Wanted) -> tuple[str, ...]:
    if not wanted.cdi:
        return ()
    notes = []
    if state.config.disabled and not wanted.handlers:
        notes.append(
            f"{state.config.path} switches containerd's CRI off: only ctr and nerdctl can use CDI through it"
        )
    listed = state.config.cri.get("cdi_spec_dirs")
    if isinstance(listed, list):
        unread = [names[0] for names in _CDI_DIRECTORIES if not any(name in listed for name in names)]
        if unread:
            notes.append(
                f"cdi_spec_dirs in {state.config.path} leaves out {' and '.join(unread)}:"
                " containerd does not see a specification there"
            )
    return tuple(notes)


def _destination(state: State, wanted: Wanted, plugin: str) -> str:
    tables = _files_with_cri(state, plugin)
    if state.drop_in_forced:
        if not state.deep and tables and tables[-1] != state.drop_in:
            raise ConfigError(
                f"containerd {state.release_text} replaces the whole CRI table of {tables[-1]} by that of a"
                f" drop-in: {state.drop_in} would have to be a copy of it",
                hint="leave out --drop-in-config: the file itself is then edited, and nothing else in it",
            )
        return state.drop_in
    for name in reversed(tables):
        known = dig(state.config.trees[name], "plugins", plugin, "containerd", "runtimes")
        if not state.deep or (isinstance(known, dict) and not known.keys().isdisjoint(wanted.names)):
            return name
    return state.drop_in if state.deep else state.config.path


def _files_with_cri(state: State, plugin: str) -> tuple[str, ...]:
    config = state.config
    return tuple(
        name for name in config.files if isinstance(dig(config.trees[name], "plugins", plugin), dict)
    )


def _spell_out_runc(runtimes: Tree, effective: Tree | None, systemd_cgroup: bool) -> None:
    """containerd 1 forgets its built-in runc as soon as a file names any runtime."""
    runc = runtimes.setdefault("runc", simple(effective, "runc"))
    if systemd_cgroup:
        runc.setdefault("options", {})["SystemdCgroup"] = True
