"""Plans to remove runtimes from containerd's files, from any author. Pure functions over their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from gpunode.facts.containerd import CRI_PLUGINS, ContainerdConfig, merge
from gpunode.facts.toml import Tree, dig, parse_toml, prune
from gpunode.facts.writers import is_nvidia_program, nvidia_writer
from gpunode.runtime import toml_edit
from gpunode.runtime.containerd_files import (
    ContainerdState,
    Copies,
    Texts,
    cri_of,
    forget_imports,
    generated_copies,
    has_image_settings,
    of_runtimes_only,
    refuse_missing_import,
    refuse_wrong_types,
)
from gpunode.runtime.engine import PlannedFiles, UnwantedConfig

# whether the files with these new texts mean the same to containerd; None if it can't be run
SameMeaning = Callable[[Texts, Texts], bool | None]


def removed(
    state: ContainerdState, unwanted: UnwantedConfig, same_meaning: SameMeaning, unread: Mapping[str, str]
) -> PlannedFiles:
    """New text of every file with one of the runtimes; None for a drop-in that is no longer needed.

    `unread` has the text of drop-ins that containerd does not read.
    """
    texts: dict[str, str | None] = {}
    bare = unwanted._replace(previous_default="")
    for path in state.config.files:
        refuse_wrong_types(state.config.trees[path], path, state.texts[path])
        edit = toml_edit.edit if path == state.config.path else toml_edit.edit_or_remove
        texts[path] = edit(state.texts[path], lambda tree: take_out(tree, bare, deep=state.deep), path)
    _restore_default(state, unwanted, texts)
    notes = [
        *_drop_copies(state, unwanted.names, same_meaning, texts),
        *_drop_unread(unread, unwanted.names, texts),
    ]
    forget_imports(state, texts)
    refuse_missing_import(state, texts)
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
    by_path = generated_copies(state)
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
