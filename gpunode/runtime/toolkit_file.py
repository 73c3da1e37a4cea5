"""Changes to settings in the toolkit's config.toml; pure, comments kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunode.errors import ConfigError
from gpunode.facts.toml import Tree
from gpunode.runtime import toml_edit


def with_settings(text: str, path: str, settings: Mapping[tuple[str, ...], Any]) -> str:
    """`text` with these keys set; a new one is added after the comment that shows it.

    `ConfigError` if a key's table is something else in this file, or the file can't be edited safely.
    """

    def mutate(tree: Tree) -> None:
        for key, value in settings.items():
            _table(tree, key, path)[key[-1]] = value

    after = toml_edit.edit(text, mutate, path, beside_comments=True)
    return after if after == text or after.endswith("\n") else f"{after}\n"


def without_settings(text: str, path: str, keys: Sequence[tuple[str, ...]]) -> str:
    """`text` without these keys; a missing one is not an error."""

    def mutate(tree: Tree) -> None:
        for key in keys:
            here: Any = tree
            for part in key[:-1]:
                here = here.get(part) if isinstance(here, dict) else None
            if isinstance(here, dict):
                here.pop(key[-1], None)

    return toml_edit.edit(text, mutate, path)


def _table(tree: Tree, key: tuple[str, ...], path: str) -> Tree:
    here = tree
    for depth, part in enumerate(key[:-1]):
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            name = ".".join(key[: depth + 1])
            raise ConfigError(
                f"{path}: {name} is a value, but the toolkit expects a table",
                hint=f"take it out: gpunode toolkit config unset {name}",
            )
    return here
