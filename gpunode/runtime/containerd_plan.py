"""Plans to add runtimes to containerd's files: `configured` makes one, `file_to_edit` chooses the file.

Pure functions over the files' text; containerd.py reads, validates and queries.

containerd 2 merges deeply, so a drop-in needs only the runtime. With containerd 1 a later file replaces the
whole CRI table, so the last file that has such a table is edited in place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpunode.errors import ConfigError
from gpunode.facts.cdi import unlisted
from gpunode.facts.containerd import CRI_IDS, CRI_PLUGINS, ContainerdConfig
from gpunode.facts.toml import Tree, dig, parse_toml
from gpunode.facts.writers import nvidia_writer
from gpunode.output.result import some_of
from gpunode.runtime.containerd_files import (
    EACH_FILE_MIGRATED,
    SHOWN,
    ContainerdState,
    Copies,
    add_import,
    cri_of,
    forget_imports,
    import_of_drop_in,
    is_imported,
    of_runtimes_only,
    refuse,
    refuse_ignored_version_1,
    refuse_missing_import,
    short_names,
    snapshotter_without_runtimes,
)
from gpunode.runtime.engine import DesiredConfig, Handler, PlannedFiles
from gpunode.runtime.toml_edit import Changes


@dataclass(frozen=True)
class _Draft:
    """The new files, changed step by step."""

    state: ContainerdState
    changes: Changes = field(default_factory=Changes)
    notes: list[str] = field(default_factory=list)


def configured(state: ContainerdState, desired: DesiredConfig) -> PlannedFiles:
    """The files' new texts with the desired configuration; `ConfigError` if that isn't possible."""
    refuse(state)
    outcome = _configured(state, desired)
    refuse_missing_import(state, outcome.texts)
    return outcome


def _configured(state: ContainerdState, desired: DesiredConfig) -> PlannedFiles:
    version = _version(state)
    notes = _about_cdi(state, desired)
    off = state.config.disabled and desired.handlers
    tables = _tables(state, desired, systemd_cgroup=False)
    if not off and _is_there(state, desired, tables):
        return PlannedFiles({}, notes, state.config.version)
    draft = _Draft(state, notes=list(notes))
    _bring_main_up(draft, version)
    switched_on = bool(desired.handlers) and _enable_cri(draft)
    systemd_cgroup = _needs_systemd_cgroup(draft, switched_on=switched_on)
    _add(draft, desired, version, systemd_cgroup)
    return PlannedFiles(
        draft.changes.texts(state.texts),
        tuple(draft.notes),
        version,
        switched_cdi=desired.cdi and not state.config.has_cdi,
    )


def file_to_edit(state: ContainerdState, desired: DesiredConfig, plugin: str) -> str:
    """The file that gets the runtime (docs/containerd.md): the drop-in that the user named; with containerd 1
    the last file with a CRI table, else the main file; with containerd 2 the last file that defines the
    runtime, else the drop-in, which with --replace has the path of the first generated copy."""
    with_cri = _files_with_cri(state, plugin)
    if state.drop_in_forced:
        if not state.deep and with_cri and with_cri[-1] != state.drop_in:
            raise ConfigError(
                f"containerd {state.release_text} replaces the whole CRI table of {with_cri[-1]} by that of a"
                f" drop-in: {state.drop_in} would have to be a copy of it",
                hint="leave out --drop-in-config: the file itself is then edited, and nothing else in it",
            )
        return state.drop_in
    for name in reversed(with_cri):
        known = dig(state.config.trees[name], "plugins", plugin, "containerd", "runtimes")
        if not state.deep or (isinstance(known, dict) and not known.keys().isdisjoint(desired.names)):
            return name
    return state.drop_in if state.deep else state.config.path


def _files_with_cri(state: ContainerdState, plugin: str) -> tuple[str, ...]:
    config = state.config
    return tuple(
        name for name in config.files if isinstance(dig(config.trees[name], "plugins", plugin), dict)
    )


def _version(state: ContainerdState) -> int:
    """The main file's version; a missing file, or one without version and plugins, gets the newest."""
    config = state.config
    if config.version != 1:
        return config.version
    short = short_names(config.main)
    keeps = "plugins in it" if "plugins" in config.main else f"the short name {short[0]!r}" if short else ""
    keeps = keeps or ("imports in it" if config.imports else "")
    if not keeps:
        # version 4 ignores [grpc] and the like, so a file that may have them gets the version before
        return min(state.newest_version, 3) if config.exists else state.newest_version
    refuse_ignored_version_1(state, keeps)
    return 1


def _bring_main_up(draft: _Draft, version: int) -> None:
    config = draft.state.config
    if version == config.version and config.exists:
        return

    def mutate(tree: Tree) -> None:
        tree["version"] = version

    draft.changes.add(config.path, mutate)
    if config.exists:
        draft.notes.append(
            f"{config.path} gets version = {version}: without one containerd takes it as version 1"
        )


def _enable_cri(draft: _Draft) -> bool:
    """Remove the CRI from `disabled_plugins` in every file; True if it was disabled.

    Lists of several files are joined, so a drop-in could not enable it.
    """
    was_disabled = False
    for path in draft.state.config.files:
        listed = draft.state.config.trees[path].get("disabled_plugins", [])
        if any(plugin_id in CRI_IDS for plugin_id in listed):
            was_disabled = True
            draft.changes.add(path, _without_cri)
            draft.notes.append(f"the CRI is switched on: {path} had it in disabled_plugins")
    return was_disabled


def _without_cri(tree: Tree) -> None:
    tree["disabled_plugins"] = [
        plugin_id for plugin_id in tree["disabled_plugins"] if plugin_id not in CRI_IDS
    ]


def _needs_systemd_cgroup(draft: _Draft, *, switched_on: bool) -> bool:
    """Whether runc and the runtimes need SystemdCgroup set, because there is nothing to inherit.

    A containerd 2 without a file runs pods already, and newer kubelets query it for runc's driver: there the
    runtimes follow runc, regardless of the kubelet's file.
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


def _tables(state: ContainerdState, desired: DesiredConfig, *, systemd_cgroup: bool) -> dict[str, Tree]:
    return {
        handler.name: runtime_table(state.config, state.effective, handler, systemd_cgroup)
        for handler in desired.handlers
    }


def _add(draft: _Draft, desired: DesiredConfig, version: int, systemd_cgroup: bool) -> None:
    state = draft.state
    plugin = _plugin(state, version)
    tables = _tables(state, desired, systemd_cgroup=systemd_cgroup)
    target = file_to_edit(state, desired, plugin)
    is_beside = target == state.drop_in and target != state.config.path
    spelled_out = bool(state.config.runtimes)

    def mutate(tree: Tree) -> None:
        if is_beside:
            tree.setdefault("version", version)
        cri = cri_of(tree, plugin)
        if tables:
            runtimes = cri.setdefault("containerd", {}).setdefault("runtimes", {})
            if systemd_cgroup or not (spelled_out or state.deep):
                _spell_out_runc(runtimes, state.effective, systemd_cgroup)
            runtimes.update(tables)
        if desired.default:
            cri["containerd"]["default_runtime_name"] = desired.default
        if desired.cdi and not state.config.has_cdi:
            cri["enable_cdi"] = True

    if target == state.drop_in and _starts_afresh(state, desired, version):
        draft.changes.add(target, lambda tree: tree.clear())
    draft.changes.add(target, mutate)
    if is_beside and not is_imported(state.config, target):
        pattern = import_of_drop_in(state)
        draft.changes.add(state.config.path, lambda tree: add_import(tree, pattern))


def _plugin(state: ContainerdState, version: int) -> str:
    """The name of the CRI's table in the file that is edited.

    containerd 2 ignores a version 2 file's snapshotter as long as the file has no runtimes (the migration of
    its images plugin ends early); a new table of them would activate it. Under the newer name, which a
    version 2 file may use as well, it does not.
    """
    joined = state.deep and state.release < EACH_FILE_MIGRATED
    if version == 2 and joined and snapshotter_without_runtimes(state.config):
        return CRI_PLUGINS[3]
    if version == state.config.version:
        return state.config.plugin
    return CRI_PLUGINS[min(version, 3)]


def _starts_afresh(state: ContainerdState, desired: DesiredConfig, version: int) -> bool:
    """Whether the drop-in's old content is replaced: it isn't read, or has another version.

    `ConfigError` if it is neither empty nor NVIDIA's nor only about the desired runtimes.
    """
    text, path = state.texts.get(state.drop_in, ""), state.drop_in
    tree = parse_toml(text, path)
    read = path in state.config.files
    if not tree or (read and tree.get("version", version) == version):
        return False
    if nvidia_writer(text, tree) or of_runtimes_only(tree, desired.names):
        return True
    why = f"has version {tree.get('version')}, {state.config.path} {version}" if read else "is not imported"
    raise ConfigError(
        f"{path} {why}, and contains settings that gpunode did not write",
        hint=f"name another drop-in: --drop-in-config {path.rpartition('/')[0]}/98-gpunode.toml",
    )


def _is_there(state: ContainerdState, desired: DesiredConfig, tables: Mapping[str, Tree]) -> bool:
    """Whether the merged files already have all this, from any author."""
    config = state.config
    default = desired.default in ("", config.default_runtime)
    there = all(config.runtimes.get(name) == table for name, table in tables.items())
    return there and default and (state.config.has_cdi or not desired.cdi)


def _about_cdi(state: ContainerdState, desired: DesiredConfig) -> tuple[str, ...]:
    if not desired.cdi:
        return ()
    notes = []
    if state.config.disabled and not desired.handlers:
        notes.append(
            f"{state.config.path} switches containerd's CRI off: only ctr and nerdctl can use CDI through it"
        )
    listed = state.config.cri.get("cdi_spec_dirs")
    if isinstance(listed, list):
        unread = unlisted(map(str, listed))
        if unread:
            notes.append(
                f"cdi_spec_dirs in {state.config.path} leaves out {' and '.join(unread)}:"
                " containerd does not see a specification there"
            )
    return tuple(notes)


def _spell_out_runc(runtimes: Tree, effective: Tree | None, systemd_cgroup: bool) -> None:
    """containerd 1 drops its built-in runc as soon as a file names any runtime."""
    runc = runtimes.setdefault("runc", simple(effective, "runc"))
    if systemd_cgroup:
        runc.setdefault("options", {})["SystemdCgroup"] = True


# The table of a runtime, and what it inherits.

RUNC_TYPE = "io.containerd.runc.v2"
_RUNC_SHIMS = "io.containerd.runc."


def runtime_table(
    config: ContainerdConfig, effective: Tree | None, handler: Handler, systemd_cgroup: bool
) -> Tree:
    """The table of a desired runtime: an existing one corrected, else a copy of runc's."""
    base = inherited(config, effective, handler.name)
    present = config.runtimes.get(handler.name)
    table = copy.deepcopy(present if isinstance(present, dict) else base)
    if not _has_runc_shim(table, config.release):
        table["runtime_type"] = RUNC_TYPE
    options = table.setdefault("options", {})
    options["BinaryName"] = handler.path
    cgroup = True if systemd_cgroup else dig(base, "options", "SystemdCgroup")
    if isinstance(dig(present, "options", "SystemdCgroup"), bool) and not _spelled_out(config, handler.name):
        cgroup = None  # containerd's built-in runc ignores this node's kubelet; the file's author did not
    if isinstance(cgroup, bool) and options.get("SystemdCgroup", False) != cgroup:
        options["SystemdCgroup"] = cgroup
    return table


def inherited(config: ContainerdConfig, effective: Tree | None, new_runtime: str) -> Tree:
    """Options to copy: the default runtime's if it is a runc, else runc's, else crun's.

    kata, gVisor and other NVIDIA runtimes are skipped: their options mean something else.
    """
    spelled_out = _spelled_out(config, new_runtime)
    if spelled_out:
        return copy.deepcopy(spelled_out)
    for name in _models(config, new_runtime):
        entry = simple(effective, name)
        if entry and _is_runc_like(entry):
            return entry
    return {"runtime_type": RUNC_TYPE}


def _spelled_out(config: ContainerdConfig, new_runtime: str) -> Tree:
    """The runtime to copy options from as a file defines it; {} if no file does."""
    entries = (config.runtimes.get(name) for name in _models(config, new_runtime))
    return next((entry for entry in entries if isinstance(entry, dict) and _is_runc_like(entry)), {})


def _models(config: ContainerdConfig, new_runtime: str) -> tuple[str, ...]:
    """Names of the runtimes that `new_runtime` may copy its options from, the preferred one first."""
    names = dict.fromkeys((config.default_runtime, "runc", "crun"))
    return tuple(name for name in names if name != new_runtime and not name.startswith("nvidia"))


def simple(effective: Tree | None, name: str) -> Tree:
    """A runtime from containerd's own merged view, without the empty values that the view prints.

    A value that isn't empty must be repeated: 1.7 sets `sandbox_mode` for its built-in runc, for example.
    """
    for plugin in CRI_PLUGINS.values():
        entry = dig(effective, "plugins", plugin, "containerd", "runtimes", name)
        if isinstance(entry, dict):
            simplified = {key: value for key, value in entry.items() if value and key != "options"}
            simplified.setdefault("runtime_type", RUNC_TYPE)
            option_table = entry.get("options")
            options = option_table if isinstance(option_table, dict) else {}
            used_options = {key: value for key, value in options.items() if value or key == "SystemdCgroup"}
            return {**simplified, "options": used_options} if used_options else simplified
    return {"runtime_type": RUNC_TYPE} if name == "runc" else {}


def _is_runc_like(entry: Tree) -> bool:
    kind = entry.get("runtime_type") or RUNC_TYPE
    binary = str(dig(entry, "options", "BinaryName") or "")
    return isinstance(kind, str) and kind.startswith(_RUNC_SHIMS) and "nvidia" not in binary


def _has_runc_shim(entry: Tree, release: tuple[int, ...]) -> bool:
    """Whether the runtime names a shim for runc that this containerd has; 2.0 removed all but v2."""
    kind = str(entry.get("runtime_type"))
    return kind == RUNC_TYPE or (kind.startswith(_RUNC_SHIMS) and release < (2,))


# The replacement of generated copies, if the user requested it.


class Replacement(NamedTuple):
    """The state without the copies, the desired configuration then, and the copies themselves."""

    state: ContainerdState
    desired: DesiredConfig
    copies: Copies


def with_copied(desired: DesiredConfig, by_path: Copies) -> DesiredConfig:
    """The desired configuration plus what the copies configured: other runtimes, the default runtime, CDI."""
    handlers = {handler.name: handler for handler in desired.handlers}
    for copied in by_path.values():
        for name, program in copied.handlers.items():
            handlers.setdefault(name, Handler(name, program))
    default = desired.default or next((copied.default for copied in by_path.values() if copied.default), "")
    ordered = sorted(
        handlers.values(), key=lambda handler: handler.name != default
    )  # the default comes first
    cdi = desired.cdi or any(copied.cdi for copied in by_path.values())
    return desired._replace(handlers=tuple(ordered), set_as_default=bool(default), cdi=cdi)


def without_copies(replacement: Replacement) -> PlannedFiles:
    """A minimal configuration instead of the copies, with notes on what changes."""
    state, by_path = replacement.state, replacement.copies
    outcome = configured(state, replacement.desired)
    texts: dict[str, str | None] = dict(outcome.texts)
    for path in by_path:
        texts.setdefault(path, None)
    forget_imports(state, texts)
    return outcome._replace(texts=texts, notes=(*outcome.notes, *_made_effective(by_path)))


def _made_effective(by_path: Copies) -> tuple[str, ...]:
    notes = []
    for path, copied in by_path.items():
        keys = [".".join(key) for key in (*copied.shadowed, *copied.lost)]
        if keys:
            notes.append(
                f"the copy of the CRI section in {path} is removed; these settings of the other files"
                f" become effective: {some_of(keys, SHOWN)}"
            )
    return tuple(notes)
