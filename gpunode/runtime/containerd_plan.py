"""Plans for containerd's files. Pure functions over their text; containerd.py reads, validates and queries.

This file is edited: the one that defines the runtime already; else, on containerd 2, which merges deeply, a
drop-in with only the runtime; else, on containerd 1, where a later file replaces the whole CRI table, the
last file that has such a table, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from gpunode.errors import ConfigError
from gpunode.facts.cdi import unlisted
from gpunode.facts.containerd import CRI_IDS, CRI_PLUGINS, ContainerdConfig, merge
from gpunode.facts.toml import Tree, dig, parse_toml, prune
from gpunode.facts.writers import GeneratedCopy, generated_copy, is_nvidia_program, nvidia_writer
from gpunode.output.result import some_of
from gpunode.runtime import containerd_files, toml_edit
from gpunode.runtime.containerd_files import (
    EACH_FILE_MIGRATED,
    ContainerdState,
    Texts,
    cri_of,
    forget_imports,
    has_image_settings,
    of_runtimes_only,
    refuse,
    refuse_ignored_version_1,
    refuse_missing_import,
    refuse_wrong_types,
    runtime_table,
    short_names,
    simple,
    snapshotter_without_runtimes,
)
from gpunode.runtime.engine import DesiredConfig, Handler, PlannedFiles, UnwantedConfig
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
    if state.deep and state.release < EACH_FILE_MIGRATED:
        raise refuse_ignored_version_1(state, keeps)
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
    target = _destination(state, desired, plugin)
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
        if desired.default:
            cri["containerd"]["default_runtime_name"] = desired.default
        if desired.cdi and not state.config.has_cdi:
            cri["enable_cdi"] = True

    if target == state.drop_in and _starts_afresh(state, desired, version):
        draft.changes.add(target, lambda tree: tree.clear())
    draft.changes.add(target, mutate)
    if target == state.drop_in and not containerd_files.imported(state.config, state.drop_in):
        entry = containerd_files.entry(state)
        draft.changes.add(state.config.path, lambda tree: containerd_files.add(tree, entry))


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


def _destination(state: ContainerdState, desired: DesiredConfig, plugin: str) -> str:
    """The file to edit (docs/containerd.md). With --replace on containerd 2 the drop-in has the path of the
    first generated copy."""
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


def _spell_out_runc(runtimes: Tree, effective: Tree | None, systemd_cgroup: bool) -> None:
    """containerd 1 drops its built-in runc as soon as a file names any runtime."""
    runc = runtimes.setdefault("runc", simple(effective, "runc"))
    if systemd_cgroup:
        runc.setdefault("options", {})["SystemdCgroup"] = True


# Drop-ins that NVIDIA's tools generated: copies of the CRI section that hide the main file's.
#
# They are kept as long as they have the right runtime, with a note about what they hide. `without_copies`
# replaces them if the user requested that.

_SHOWN = 5
Copies = Mapping[str, GeneratedCopy]


@dataclass(frozen=True)
class Replacement:
    """The state without the copies, the desired configuration then, and the copies themselves."""

    state: ContainerdState
    desired: DesiredConfig
    copies: Copies


def copies(state: ContainerdState) -> Copies:
    """The generated copies among the files that containerd reads, by path."""
    config = state.config
    result = {}
    for path in config.files:
        if path == config.path:
            continue
        others = _merged_without(config, path)
        copied = generated_copy(config.trees[path], others, config.plugin)
        if copied is not None and nvidia_writer(state.texts[path], config.trees[path]):
            result[path] = copied
    return result


def _merged_without(config: ContainerdConfig, left_out: str) -> Tree:
    merged: Tree = {}
    for path, tree in config.trees.items():
        if path != left_out:
            merged = merge(merged, tree, deep=config.deep)
    return merged


def drift(state: ContainerdState, by_path: Copies) -> tuple[str, ...]:
    """What the copies hide, as text for the user; nothing about a copy that hides nothing."""
    notes = []
    for path, copied in by_path.items():
        others = _merged_without(state.config, path)
        hidden = [_hidden(state, others, path, key) for key in copied.shadowed]
        if not state.deep:
            hidden += [f"{'.'.join(key)} ({state.config.path} only)" for key in copied.lost]
        if hidden:
            notes.append(
                f"{path} is a copy of the whole CRI section that NVIDIA's tools generated, and hides newer"
                f" settings: {some_of(hidden, _SHOWN)}; to put only the runtime in its place:"
                " gpunode configure-runtime --replace"
            )
    return tuple(notes)


def _hidden(state: ContainerdState, others: Tree, path: str, key: tuple[str, ...]) -> str:
    plugin = state.config.plugin
    copied = dig(state.config.trees[path], "plugins", plugin, *key)
    return f"{'.'.join(key)} ({copied!r} there, {dig(others, 'plugins', plugin, *key)!r} otherwise)"


def with_copied(desired: DesiredConfig, by_path: Copies) -> DesiredConfig:
    """The desired configuration plus what the copies configured: other runtimes, the default runtime, CDI."""
    handlers = {handler.name: handler for handler in desired.handlers}
    for copied in by_path.values():
        for name, program in copied.handlers.items():
            handlers.setdefault(name, Handler(name, program))
    default = desired.default or next((copy.default for copy in by_path.values() if copy.default), "")
    ordered = sorted(
        handlers.values(), key=lambda handler: handler.name != default
    )  # the default comes first
    cdi = desired.cdi or any(copied.cdi for copied in by_path.values())
    return replace(desired, handlers=tuple(ordered), set_as_default=bool(default), cdi=cdi)


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
                f" become effective: {some_of(keys, _SHOWN)}"
            )
    return tuple(notes)


# Removing runtimes from containerd's files, from any author. Pure functions over their text.

# whether the files with these new texts mean the same to containerd; None if it can't be run
SameMeaning = Callable[[Texts, Texts], bool | None]


def removed(
    state: ContainerdState, unwanted: UnwantedConfig, same_meaning: SameMeaning, unread: Mapping[str, str]
) -> PlannedFiles:
    """New text of every file with one of the runtimes; None for a drop-in that is no longer needed.

    `unread` has the text of drop-ins that containerd does not read.
    """
    texts: dict[str, str | None] = {}
    bare = replace(unwanted, previous_default="")
    for path in state.config.files:
        tree = state.config.trees[path]
        refuse_wrong_types(tree, path, state.texts[path])
        after = toml_edit.edit(state.texts[path], lambda tree: take_out(tree, bare, deep=state.deep), path)
        left = parse_toml(after, path)
        emptied = path != state.config.path and left.keys() <= {"version"} and left != tree
        texts[path] = None if emptied else after
    _restore_default(state, unwanted, texts)
    notes = [
        *_drop_copies(state, unwanted.names, same_meaning, texts),
        *_drop_unread(unread, unwanted.names, texts),
    ]
    forget_imports(state, texts)
    return PlannedFiles(texts, tuple(notes), state.config.version)


def take_out(tree: Tree, unwanted: UnwantedConfig, *, deep: bool = False) -> None:
    """Remove the runtimes from one file's tree; a default among them becomes the previous one.

    With `deep`, for containerd 2, an emptied table of runtimes stays if there are image settings, which a
    version 2 file would lose without it. containerd 1 has no runc as long as such a table exists.
    """
    for plugin in CRI_PLUGINS.values():
        below = ("plugins", plugin, "containerd")
        containerd = dig(tree, *below)
        if isinstance(containerd, dict):
            _clear(tree, below, unwanted, deep=deep)
        if unwanted.cdi and dig(tree, *below[:2], "enable_cdi") is True:
            del tree["plugins"][plugin]["enable_cdi"]
            prune(tree, below[:2])


def _clear(tree: Tree, below: tuple[str, ...], unwanted: UnwantedConfig, *, deep: bool) -> None:
    containerd = dig(tree, *below)
    touched = False
    if containerd.get("default_runtime_name") in unwanted.names:
        del containerd["default_runtime_name"]
        touched = True
        if unwanted.previous_default:
            containerd["default_runtime_name"] = unwanted.previous_default
    if _is_nvidias(containerd.get("default_runtime")):  # nvidia-ctk sets a default like this in version 1
        del containerd["default_runtime"]
        touched = True
    for name in unwanted.names:
        if dig(containerd, "runtimes", name) is not None:
            del containerd["runtimes"][name]
            if not (deep and has_image_settings(containerd)):
                prune(tree, (*below, "runtimes"))
    if touched:
        prune(tree, below)


def _is_nvidias(table: object) -> bool:
    programs = [dig(table, "options", key) for key in ("BinaryName", "Runtime")]
    return any(isinstance(program, str) and is_nvidia_program(program) for program in programs)


def _restore_default(state: ContainerdState, unwanted: UnwantedConfig, texts: dict[str, str | None]) -> None:
    """Set the previous default where the runtime was the default, unless another file sets it already."""
    config, previous = state.config, unwanted.previous_default
    if not previous or config.named_default not in unwanted.names:
        return
    if _default_of(config, texts) == previous:
        return
    key_path = ("containerd", "default_runtime_name")
    for path in reversed(config.files):
        for plugin in CRI_PLUGINS.values():
            if dig(config.trees[path], "plugins", plugin, *key_path) in unwanted.names:
                text = texts[path] or f"version = {config.version}\n"
                default = {"default_runtime_name": previous}
                texts[path] = toml_edit.edit(text, partial(_set_in_containerd, plugin, default), path)
                return


def _set_in_containerd(plugin: str, settings: Tree, tree: Tree) -> None:
    cri_of(tree, plugin).setdefault("containerd", {}).update(settings)


def _default_of(config: ContainerdConfig, texts: Texts) -> str:
    """The default that the files set with these texts."""
    merged: Tree = {}
    for path in config.files:
        merged = merge(merged, parse_toml(texts.get(path) or "", path), deep=config.deep)
    name = dig(merged, "plugins", config.plugin, "containerd", "default_runtime_name")
    return name if isinstance(name, str) else ""


def _drop_copies(
    state: ContainerdState, names: tuple[str, ...], same_meaning: SameMeaning, texts: dict[str, str | None]
) -> list[str]:
    """Delete generated copies if the rest only repeats the other files or containerd's defaults."""
    notes = []
    by_path = copies(state)
    for path, copied in by_path.items():
        if texts[path] is None or not copied.handlers.keys() <= set(names):
            continue
        same = same_meaning({**texts, path: None}, texts)
        if same is None:
            same = not copied.shadowed and not (copied.lost and not state.deep)
        if same:
            texts[path] = None
        else:
            notes.append(_still_hides(state, path, by_path))
    return notes


def _still_hides(state: ContainerdState, path: str, by_path: Copies) -> str:
    keys = [".".join(key) for key in (*by_path[path].shadowed, *(() if state.deep else by_path[path].lost))]
    what = f"still hides {', '.join(keys[:5])}" if keys else "has settings that no other file has"
    return (
        f"{path} was generated by NVIDIA's tools and {what}: only the runtimes were removed; delete the "
        "file manually if its settings are not needed"
    )


def _drop_unread(
    unread: Mapping[str, str], names: tuple[str, ...], texts: dict[str, str | None]
) -> list[str]:
    """Delete NVIDIA's drop-ins where containerd reads none."""
    notes = []
    for path, text in unread.items():
        tree = parse_toml(text, path)
        if nvidia_writer(text, tree) or of_runtimes_only(tree, names):
            texts[path] = None
            notes.append(f"{path} is removed: NVIDIA's tools left it, and containerd does not read it")
    return notes
