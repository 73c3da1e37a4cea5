"""Entries of containerd's `imports`: adding the one that a drop-in needs, and taking it out again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpunode.facts.containerd import ContainerdConfig
from gpunode.facts.containerd_imports import covers
from gpunode.runtime import toml_edit
from gpunode.runtime.containerd_state import State
from gpunode.runtime.trees import Tree


def imported(config: ContainerdConfig, path: str) -> bool:
    """Whether containerd's files import `path`, which need not exist."""
    return any(
        covers(importer, pattern, path, config.release)
        for importer, tree in config.trees.items()
        for pattern in _patterns(tree)
    )


def entry(state: State) -> str:
    """The import for the drop-in: its directory's ``*.toml``, as nvidia-ctk writes it, or the file alone.

    The file alone where the directory has files that containerd doesn't read: they would come into force.
    """
    directory = state.drop_in.rpartition("/")[0]
    unread = [
        path
        for path in state.neighbours
        if path.rpartition("/")[0] == directory and path not in (*state.config.files, state.drop_in)
    ]
    return state.drop_in if unread else whole_directory(state.drop_in)


def whole_directory(path: str) -> str:
    """The glob for a drop-in's directory; the file itself if its name doesn't end as the glob wants it."""
    return f"{path.rpartition('/')[0]}/*.toml" if path.endswith(".toml") else path


def add(tree: Tree, pattern: str) -> None:
    """Put an entry behind the others."""
    tree["imports"] = [*tree.get("imports", []), pattern]


def forgotten(
    config: ContainerdConfig, gone: Iterable[str], there: Iterable[str]
) -> Mapping[str, tuple[str, ...]]:
    """Entries made for the files in `gone` that none of the files `there` needs, by importer."""
    gone, there = tuple(gone), tuple(there)
    found: dict[str, tuple[str, ...]] = {}
    for importer, tree in config.trees.items():
        ours = tuple(
            pattern
            for pattern in _patterns(tree)
            if any(pattern in (path, whole_directory(path)) for path in gone)
            and not any(covers(importer, pattern, path, config.release) for path in there)
        )
        if ours:
            found[importer] = ours
    return found


def take_out(tree: Tree, patterns: Iterable[str]) -> None:
    """Remove entries, and `imports` itself if none is left."""
    kept = [one for one in tree.get("imports", []) if one not in tuple(patterns)]
    if kept:
        tree["imports"] = kept
    else:
        tree.pop("imports", None)


def _patterns(tree: Tree) -> tuple[str, ...]:
    listed = tree.get("imports")
    return tuple(one for one in listed if isinstance(one, str)) if isinstance(listed, list) else ()


def without(text: str, patterns: Iterable[str], path: str) -> str:
    """A file's text without these entries."""
    return toml_edit.edit(text, lambda tree: take_out(tree, patterns), path)
