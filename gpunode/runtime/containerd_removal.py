"""Taking a runtime out of containerd's files again. Pure functions over their text."""

from __future__ import annotations

from gpunode.facts.containerd import CRI_PLUGINS, dig, parse_toml
from gpunode.runtime import toml_edit
from gpunode.runtime.containerd_plan import State, import_pattern
from gpunode.runtime.containerd_tables import refuse_wrong_types
from gpunode.runtime.engine import Unwanted
from gpunode.runtime.trees import Mutation, Tree


def removed(state: State, unwanted: Unwanted) -> dict[str, str | None]:
    """New text of every file that knows one of the runtimes; None for a drop-in that would be empty."""
    result: dict[str, str | None] = {}
    for path in state.config.files:
        tree = parse_toml(state.texts[path], path)
        refuse_wrong_types(tree, path)
        after = toml_edit.edit(state.texts[path], lambda tree: _take_out(tree, unwanted), path)
        left = parse_toml(after, path)
        emptied = path != state.config.path and left.keys() <= {"version"} and left != tree
        result[path] = None if emptied else after
        if emptied and path == state.drop_in:
            main = result[state.config.path] or ""
            alone = not any(
                _directory(other) == _directory(path) for other in state.config.files if other != path
            )
            if alone:
                result[state.config.path] = toml_edit.edit(main, _forget(path), state.config.path)
    return result


def _take_out(tree: Tree, unwanted: Unwanted) -> None:
    for plugin in CRI_PLUGINS.values():
        containerd = dig(tree, "plugins", plugin, "containerd")
        if not isinstance(containerd, dict):
            continue
        if containerd.get("default_runtime_name") in unwanted.names:
            del containerd["default_runtime_name"]
            if unwanted.previous_default:
                containerd["default_runtime_name"] = unwanted.previous_default
        for name in unwanted.names:
            if dig(containerd, "runtimes", name) is not None:
                del containerd["runtimes"][name]
                _prune(tree, ("plugins", plugin, "containerd", "runtimes"))


def _prune(tree: Tree, path: tuple[str, ...]) -> None:
    """Remove tables that became empty, upwards."""
    while path and dig(tree, *path) == {}:
        parent = dig(tree, *path[:-1])
        del parent[path[-1]]
        path = path[:-1]


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def _forget(drop_in: str) -> Mutation:
    """Drop the import of a drop-in that is gone."""
    pattern = import_pattern(drop_in)

    def mutate(tree: Tree) -> None:
        tree["imports"] = [one for one in tree.get("imports", []) if one != pattern]
        if not tree["imports"]:
            del tree["imports"]

    return mutate
