"""Taking runtimes out of containerd's files again, whoever put them in. Pure functions over their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpunode.dataclass import dataclass, field, replace
from gpunode.facts.containerd import CRI_PLUGINS, ContainerdConfig, dig, merge, parse_toml
from gpunode.facts.writers import is_nvidia_program, nvidia_writer
from gpunode.runtime import containerd_imports, toml_edit
from gpunode.runtime.containerd_generated import Copies, copies
from gpunode.runtime.containerd_plan import Outcome
from gpunode.runtime.containerd_refusals import refuse_wrong_types
from gpunode.runtime.containerd_state import State
from gpunode.runtime.containerd_tables import has_image_settings, of_runtimes_only
from gpunode.runtime.engine import Unwanted
from gpunode.runtime.trees import Mutation, Tree

Texts = Mapping[str, str | None]
# whether containerd takes the files with these texts laid over them for the same; None if it can't be asked
Judge = Callable[[Texts, Texts], bool | None]


@dataclass(frozen=True)
class Removal:
    """What is taken out of which files. `unread` has the text of drop-ins that containerd does not read."""

    state: State
    unwanted: Unwanted
    judge: Judge
    unread: Mapping[str, str] = field(default_factory=dict)


def removed(removal: Removal) -> Outcome:
    """New text of every file that knows one of the runtimes; None for a drop-in that has no reason left."""
    state, unwanted = removal.state, removal.unwanted
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
    notes = [*_drop_copies(removal, texts), *_drop_unread(removal, texts)]
    _forget_imports(state, texts)
    return Outcome(texts, state.config.version, tuple(notes))


def take_out(tree: Tree, unwanted: Unwanted, *, deep: bool = False) -> None:
    """Take the runtimes out of one file's tree; a default that was one of them becomes the previous one.

    With `deep`, for containerd 2, an emptied table of runtimes stays beside image settings, which a version 2
    file would lose without it. containerd 1 has no runc as long as such a table is there.
    """
    for plugin in CRI_PLUGINS.values():
        below = ("plugins", plugin, "containerd")
        containerd = dig(tree, *below)
        if isinstance(containerd, dict):
            _clear(tree, below, unwanted, deep=deep)
        if unwanted.cdi and dig(tree, *below[:2], "enable_cdi") is True:
            del tree["plugins"][plugin]["enable_cdi"]
            _prune(tree, below[:2])


def _clear(tree: Tree, below: tuple[str, ...], unwanted: Unwanted, *, deep: bool) -> None:
    containerd = dig(tree, *below)
    touched = False
    if containerd.get("default_runtime_name") in unwanted.names:
        del containerd["default_runtime_name"]
        touched = True
        if unwanted.previous_default:
            containerd["default_runtime_name"] = unwanted.previous_default
    if _is_nvidias(containerd.get("default_runtime")):  # nvidia-ctk's way to a default in version 1
        del containerd["default_runtime"]
        touched = True
    for name in unwanted.names:
        if dig(containerd, "runtimes", name) is not None:
            del containerd["runtimes"][name]
            if not (deep and has_image_settings(containerd)):
                _prune(tree, (*below, "runtimes"))
    if touched:
        _prune(tree, below)


def _is_nvidias(table: object) -> bool:
    programs = [dig(table, "options", key) for key in ("BinaryName", "Runtime")]
    return any(isinstance(program, str) and is_nvidia_program(program) for program in programs)


def _prune(tree: Tree, path: tuple[str, ...]) -> None:
    """Remove tables that became empty, upwards."""
    while path and dig(tree, *path) == {}:
        parent = dig(tree, *path[:-1])
        del parent[path[-1]]
        path = path[:-1]


def _restore_default(state: State, unwanted: Unwanted, texts: dict[str, str | None]) -> None:
    """Name the previous default where the runtime's was named, unless another file names it already."""
    config, previous = state.config, unwanted.previous_default
    if not previous or config.named_default not in unwanted.names:
        return
    if _default_of(config, texts) == previous:
        return
    named = ("containerd", "default_runtime_name")
    for path in reversed(config.files):
        for plugin in CRI_PLUGINS.values():
            if dig(config.trees[path], "plugins", plugin, *named) in unwanted.names:
                texts[path] = toml_edit.edit(
                    texts[path] or f"version = {config.version}\n", _name_default(plugin, previous), path
                )
                return


def _name_default(plugin: str, name: str) -> Mutation:
    def mutate(tree: Tree) -> None:
        cri = tree.setdefault("plugins", {}).setdefault(plugin, {})
        cri.setdefault("containerd", {})["default_runtime_name"] = name

    return mutate


def _default_of(config: ContainerdConfig, texts: Texts) -> str:
    """The default that the files name once they have these texts."""
    merged: Tree = {}
    for path in config.files:
        merged = merge(merged, parse_toml(texts.get(path) or "", path), deep=config.deep)
    name = dig(merged, "plugins", config.plugin, "containerd", "default_runtime_name")
    return name if isinstance(name, str) else ""


def _drop_copies(removal: Removal, texts: dict[str, str | None]) -> list[str]:
    """Delete generated copies whose rest only repeats what the other files or containerd's defaults mean."""
    notes = []
    found = copies(removal.state)
    for path, copied in found.items():
        if texts[path] is None or not copied.handlers.keys() <= set(removal.unwanted.names):
            continue
        same = removal.judge({**texts, path: None}, texts)
        if same is None:
            same = not copied.shadowed and not (copied.lost and not removal.state.deep)
        if same:
            texts[path] = None
        else:
            notes.append(_still_hides(removal.state, path, found))
    return notes


def _still_hides(state: State, path: str, found: Copies) -> str:
    keys = [".".join(key) for key in (*found[path].shadowed, *(() if state.deep else found[path].lost))]
    what = f"still hides {', '.join(keys[:5])}" if keys else "has settings that no other file has"
    return (
        f"{path} was generated by NVIDIA's tools and {what}: only the runtimes were taken out;"
        " delete it by hand if its settings aren't meant"
    )


def _drop_unread(removal: Removal, texts: dict[str, str | None]) -> list[str]:
    """Delete NVIDIA's drop-ins where containerd reads none."""
    notes = []
    for path, text in removal.unread.items():
        tree = parse_toml(text, path)
        if nvidia_writer(text, tree) or of_runtimes_only(tree, removal.unwanted.names):
            texts[path] = None
            notes.append(f"{path} is removed: NVIDIA's tools left it, and containerd does not read it")
    return notes


def _forget_imports(state: State, texts: dict[str, str | None]) -> None:
    """Take out the import of a drop-in that is gone, if nothing else needs it."""
    gone = [path for path, text in texts.items() if text is None]
    there = [path for path in (*state.config.files, *state.neighbours) if path not in gone]
    for importer, patterns in containerd_imports.forgotten(state.config, gone, there).items():
        text = texts.get(importer, state.texts[importer])
        if text is not None:
            texts[importer] = containerd_imports.without(text, patterns, importer)
