"""What is wrong with containerd's files before anything is changed: the file, the line and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunode.errors import ConfigError
from gpunode.facts.containerd import BYTE_ORDER_MARK, CRI_IDS, CRI_PLUGINS, dig, parse_toml
from gpunode.facts.toml_places import line_of_key, line_of_text, place
from gpunode.runtime.containerd_state import State
from gpunode.runtime.trees import Tree

# from 2.3 every file is migrated by itself; before, all of them are read in the version of the last
EACH_FILE_MIGRATED = (2, 3)


def refuse(state: State) -> None:
    """`ConfigError` for the first thing that containerd can't load, or would take otherwise than it looks."""
    for path in state.config.files:
        refuse_wrong_types(state.config.trees[path], path, state.texts[path])
    _refuse_byte_order_mark(state)
    _refuse_unread_version(state)
    _refuse_mixed_versions(state)


def refuse_wrong_types(tree: Tree, path: str, text: str) -> None:
    """`ConfigError` for what containerd can't load: a number where a table belongs and the like."""
    for key in ("imports", "disabled_plugins", "required_plugins"):
        value = tree.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise _wrong(path, text, (key,), "an array of strings")
    _expect(tree, ("plugins",), path, text, dict, "a table")
    for plugin in CRI_PLUGINS.values():
        below = ("plugins", plugin)
        containerd = (*below, "containerd")
        runtimes = (*containerd, "runtimes")
        for keys in (below, containerd, runtimes):
            _expect(tree, keys, path, text, dict, "a table")
        for name in dig(tree, *runtimes) or {}:
            _expect(tree, (*runtimes, name), path, text, dict, "a table")
            _expect(tree, (*runtimes, name, "options"), path, text, dict, "a table")
        _expect(tree, (*containerd, "default_runtime_name"), path, text, str, "a string")
        _expect(tree, (*below, "enable_cdi"), path, text, bool, "true or false")


def _expect(tree: Tree, keys: tuple[str, ...], path: str, text: str, kind: type, name: str) -> None:
    value: Any = dig(tree, *keys)
    if value is not None and not isinstance(value, kind):
        raise _wrong(path, text, keys, name)


def _wrong(path: str, text: str, keys: tuple[str, ...], name: str) -> ConfigError:
    line = line_of_key(text, keys)
    return ConfigError(
        f"{place(path, line)}: {'.'.join(keys)} is not {name}, so containerd can't start with it",
        hint=f"correct it: ${{EDITOR:-vi}} +{max(line, 1)} {path}",
    )


def _refuse_byte_order_mark(state: State) -> None:
    """containerd 1 skips one, 2 takes it for the first key's first character."""
    marked = [path for path in state.config.files if state.texts[path].startswith(BYTE_ORDER_MARK)]
    if marked and state.release >= (2,):
        raise ConfigError(
            f"{marked[0]}:1: begins with a byte order mark, which containerd {state.release_text} can't read",
            hint=f"take it out: sed -i '1s/^\\xef\\xbb\\xbf//' {marked[0]}",
        )


def _refuse_unread_version(state: State) -> None:
    """A version that this containerd can't read; 1.6 would take it without a word and ignore the tables."""
    newest = 4 if state.release >= (2, 3) else 3 if state.release >= (2,) else 2
    if not state.release or state.release >= (3,):
        return
    for path in state.config.files:
        version = state.config.versions[path]
        if version > newest:
            line = line_of_key(state.texts[path], ("version",))
            raise ConfigError(
                f"{place(path, line)}: version = {version},"
                f" containerd {state.release_text} reads up to {newest}",
                hint="bring file and containerd together: containerd config default shows what it wants",
            )


def refuse_missing_import(state: State, texts: Mapping[str, str | None]) -> None:
    """`ConfigError` if a file still imports, by its exact name, a file that is missing after the change.

    `texts` are the new texts of the files that the change writes (None: removed). containerd does not start
    with such an import. Its `config dump` of 2.0 and later prints what it has read until then and exits 0.
    """
    for missing in state.config.missing_imports:
        text = texts.get(missing.importer, state.texts[missing.importer]) or ""
        imports = parse_toml(text, missing.importer).get("imports", [])
        if texts.get(missing.path) is not None or missing.pattern not in imports:
            continue
        line = line_of_text(state.texts[missing.importer], missing.pattern)
        raise ConfigError(
            f"{place(missing.importer, line)}: imports {missing.path}, which does not exist:"
            " containerd does not start with this import",
            hint=f"create that file or remove the import: ${{EDITOR:-vi}} +{max(line, 1)} {missing.importer}",
        )


def _refuse_mixed_versions(state: State) -> None:
    """Files of several versions that are read in the version of the last: tables of the others are lost."""
    config = state.config
    if not state.release or state.release >= EACH_FILE_MIGRATED or not config.exists:
        return
    for path in config.files[1:]:
        given = config.trees[path].get("version")
        if given and given != config.version and path != state.drop_in and config.trees[path].get("plugins"):
            line = line_of_key(state.texts[path], ("version",))
            raise ConfigError(
                f"{place(path, line)}: version = {given}, but {config.path} has version {config.version};"
                f" containerd {state.release_text} then ignores the tables of one of them",
                hint=f"give both the same version: containerd --config {path} config migrate prints that file"
                " in the newest",
            )


def short_names(config_main: Tree) -> list[str]:
    """Plugin names that only version 1 reads, the CRI's own aside."""
    return [
        one
        for key in ("disabled_plugins", "required_plugins")
        for one in config_main.get(key, [])
        if one not in CRI_IDS and not one.startswith("io.containerd.")
    ]


def refuse_ignored_version_1(state: State, what: str) -> ConfigError:
    """containerd 2.0 to 2.2 read a file of version 1 without its CRI settings, and so does their migrate."""
    path = state.config.path
    line = line_of_key(state.texts.get(path, ""), ("version",)) or 1
    return ConfigError(
        f"{path}:{line}: has no version (or version 1) and {what}: containerd {state.release_text} ignores"
        " its CRI settings, and what its own config migrate prints lacks them too",
        hint="make it version 2, which brings those settings into force: "
        "sed -i.bak -e '/^version *=/d' -e '1i version = 2'"
        ' -e \'s/^\\( *\\[plugins\\.\\)"\\?cri"\\?\\([].]\\)/\\1"io.containerd.grpc.v1.cri"\\2/\''
        f' -e \'/_plugins *=/s/"cri"/"io.containerd.grpc.v1.cri"/\' {path}',
    )
