"""What is known about a containerd's files before a change is planned."""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gpunode.errors import ConfigError
from gpunode.facts.containerd import CRI_IDS, CRI_PLUGINS, ContainerdConfig, covers, merge
from gpunode.facts.toml import BYTE_ORDER_MARK, Tree, dig, line_of_key, line_of_text, parse_toml, place
from gpunode.facts.writers import GeneratedCopy, generated_copy, nvidia_writer
from gpunode.output.result import some_of
from gpunode.output.typed import as_strings
from gpunode.runtime import toml_edit

DROP_IN_PATH = "conf.d/99-nvidia.toml"
# where NVIDIA's tools have put their drop-in over the years, relative to the main file's directory
NVIDIA_DROP_INS = (DROP_IN_PATH, "config.d/99-nvidia.toml")


Texts = Mapping[str, str | None]
"""The text of each file by its path; None for a file that does not exist, or is removed."""


class ContainerdState(NamedTuple):
    """The files and what is known of them.

    `texts` has every file that may be edited. `effective` is containerd's merged view, None if unknown.
    `drop_in` is the path for a drop-in, `drop_in_forced` whether the user named it. `systemd_cgroup` is for a
    CRI that is only now enabled, or that had no file. `neighbours` are TOML files in the directories of
    these files and of NVIDIA's drop-ins, whether containerd reads them or not.
    """

    config: ContainerdConfig
    texts: Mapping[str, str]
    effective: Tree | None = None
    drop_in: str = ""
    drop_in_forced: bool = False
    systemd_cgroup: bool = False
    neighbours: tuple[str, ...] = ()

    @property
    def deep(self) -> bool:
        """Whether this containerd merges a drop-in key by key."""
        return self.config.deep

    @property
    def release(self) -> tuple[int, ...]:
        """This containerd's release; () if it is unknown."""
        return self.config.release

    @property
    def release_text(self) -> str:
        """The release as text for the user."""
        return ".".join(map(str, self.release)) or "(unknown release)"

    @property
    def newest_version(self) -> int:
        """The file version that this release writes itself."""
        return 4 if self.release >= (2, 3) else 3 if self.deep else 2


# The tables of the CRI in a file.

# settings of version 2's containerd table that moved to the images plugin
_OF_IMAGES = ("snapshotter", "disable_snapshot_annotations", "discard_unpacked_layers")


def cri_of(tree: Tree, plugin: str) -> Tree:
    """The CRI table of a tree, created if it is missing."""
    table: Tree = tree.setdefault("plugins", {}).setdefault(plugin, {})
    return table


def snapshotter_without_runtimes(config: ContainerdConfig) -> bool:
    """Whether version 2 files have image settings without runtimes, which containerd 2 then ignores."""
    merged = dig(config.merged, "plugins", CRI_PLUGINS[2], "containerd")
    return isinstance(merged, dict) and "runtimes" not in merged and has_image_settings(merged)


def has_image_settings(containerd: Tree) -> bool:
    """Whether version 2's containerd table has settings that moved to the images plugin since."""
    return not containerd.keys().isdisjoint(_OF_IMAGES)


def of_runtimes_only(tree: Tree, names: Collection[str]) -> bool:
    """Whether a file has only these runtimes, the default among them, and the CDI switch."""
    rest = copy.deepcopy(tree)
    rest.pop("version", None)
    for plugin in CRI_PLUGINS.values():
        cri = dig(rest, "plugins", plugin)
        if isinstance(cri, dict):
            cri.pop("enable_cdi", None)
            containerd = cri.get("containerd")
            if isinstance(containerd, dict):
                if containerd.get("default_runtime_name") in names:
                    del containerd["default_runtime_name"]
                runtimes = containerd.get("runtimes")
                if isinstance(runtimes, dict):
                    for name in names:
                        runtimes.pop(name, None)
    return not without_empty(rest)


def without_empty(tree: Any) -> Any:
    """The tree without empty tables, which containerd ignores."""
    if not isinstance(tree, dict):
        return tree
    simplified = {key: without_empty(value) for key, value in tree.items()}
    return {key: value for key, value in simplified.items() if value != {}}


# Entries of containerd's `imports`: adds the one that a drop-in needs, and removes it.


def is_imported(config: ContainerdConfig, path: str) -> bool:
    """Whether containerd's files import `path`, which need not exist."""
    return any(
        covers(importer, pattern, path, config.release)
        for importer, tree in config.trees.items()
        for pattern in _patterns(tree)
    )


def import_of_drop_in(state: ContainerdState) -> str:
    """The import for the drop-in: its directory's ``*.toml``, as nvidia-ctk writes it.

    ``NAME*.toml`` where that glob would activate files that containerd doesn't read, or would have the main
    file import itself; the file's own path only where this glob would as well, or doesn't match the file.
    containerd does not start while a file imported by its own path is missing, and an administrator may
    delete the drop-in.
    """
    path, config = state.drop_in, state.config
    others = [name for name in state.neighbours if name not in (*config.files, path)] + [config.path]
    for pattern in _globs(path):
        if [path] == [name for name in (path, *others) if covers(config.path, pattern, name, config.release)]:
            return pattern
    return path


def _globs(path: str) -> tuple[str, ...]:
    """The globs by which gpunode imports a drop-in; none if its name doesn't match them."""
    stem, extension = posixpath.splitext(path)
    return (f"{posixpath.dirname(path)}/*.toml", f"{stem}*.toml") if extension == ".toml" else ()


def add_import(tree: Tree, pattern: str) -> None:
    """Append an entry."""
    tree["imports"] = [*tree.get("imports", []), pattern]


def forget_imports(state: ContainerdState, texts: dict[str, str | None]) -> None:
    """Remove the entries that were made for files that `texts` deletes, unless another file needs them."""
    config = state.config
    deleted = [path for path, text in texts.items() if text is None]
    there = [path for path in (*config.files, *state.neighbours, *texts) if path not in deleted]
    for importer, tree in config.trees.items():
        unneeded = [
            pattern
            for pattern in _patterns(tree)
            if any(pattern in (path, *_globs(path)) for path in deleted)
            and not any(covers(importer, pattern, path, config.release) for path in there)
        ]

        def mutate(tree: Tree, unneeded: list[str] = unneeded) -> None:
            remaining = [pattern for pattern in tree.get("imports", []) if pattern not in unneeded]
            tree.pop("imports", None)
            tree.update({"imports": remaining} if remaining else {})

        text = texts.get(importer, state.texts[importer])
        if unneeded and text is not None:
            texts[importer] = toml_edit.edit(text, mutate, importer)


def _patterns(tree: Tree) -> tuple[str, ...]:
    return as_strings(tree.get("imports"))


# Errors in containerd's files before anything is changed: the file, the line and the fix.

# from 2.3 on each file is migrated by itself; earlier releases read all in the last one's version
EACH_FILE_MIGRATED = (2, 3)


def refuse(state: ContainerdState) -> None:
    """`ConfigError` for the first thing that containerd can't load, or would misread."""
    for path in state.config.files:
        refuse_wrong_types(state.config.trees[path], path, state.texts[path])
    _refuse_byte_order_mark(state)
    _refuse_unread_version(state)
    _refuse_mixed_versions(state)


def refuse_wrong_types(tree: Tree, path: str, text: str) -> None:
    """`ConfigError` for wrong types that containerd can't load, such as a number instead of a table."""
    for key in ("imports", "disabled_plugins", "required_plugins"):
        value = tree.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
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


def _refuse_byte_order_mark(state: ContainerdState) -> None:
    """containerd 1 skips it, 2 reads it as the first key's first character."""
    marked = [path for path in state.config.files if state.texts[path].startswith(BYTE_ORDER_MARK)]
    if marked and state.release >= (2,):
        raise ConfigError(
            f"{marked[0]}:1: begins with a byte order mark, which containerd {state.release_text} can't read",
            hint=f"take it out: sed -i '1s/^\\xef\\xbb\\xbf//' {marked[0]}",
        )


def _refuse_unread_version(state: ContainerdState) -> None:
    """A version that this containerd can't read; 1.6 would silently ignore the tables."""
    newest = state.newest_version
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


def refuse_missing_import(state: ContainerdState, texts: Texts) -> None:
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


def _refuse_mixed_versions(state: ContainerdState) -> None:
    """Files of several versions, all read in the version of the last: tables of the others are lost."""
    config = state.config
    if not state.release or state.release >= EACH_FILE_MIGRATED or not config.exists:
        return
    for path in config.files[1:]:
        version = config.trees[path].get("version")
        if (
            version
            and version != config.version
            and path != state.drop_in
            and config.trees[path].get("plugins")
        ):
            line = line_of_key(state.texts[path], ("version",))
            raise ConfigError(
                f"{place(path, line)}: version = {version}, but {config.path} has version {config.version};"
                f" containerd {state.release_text} then ignores the tables of one of them",
                hint=f"give both the same version: containerd --config {path} config migrate prints that file"
                " in the newest",
            )


def short_names(config_main: Tree) -> list[str]:
    """Plugin names that only version 1 reads, the CRI's own aside."""
    return [
        plugin_id
        for key in ("disabled_plugins", "required_plugins")
        for plugin_id in config_main.get(key, [])
        if plugin_id not in CRI_IDS and not plugin_id.startswith("io.containerd.")
    ]


def refuse_ignored_version_1(state: ContainerdState, what: str) -> None:
    """`ConfigError` with containerd 2.0 to 2.2, which read a file of version 1 without its CRI settings, as
    does their migrate."""
    if not state.deep or state.release >= EACH_FILE_MIGRATED:
        return
    path = state.config.path
    line = line_of_key(state.texts.get(path, ""), ("version",)) or 1
    raise ConfigError(
        f"{path}:{line}: has no version (or version 1) and {what}: containerd {state.release_text} ignores"
        " its CRI settings, and what its own config migrate prints lacks them too",
        hint="make it version 2, which brings those settings into force: "
        "sed -i.bak -e '/^version *=/d' -e '1i version = 2'"
        ' -e \'s/^\\( *\\[plugins\\.\\)"\\?cri"\\?\\([].]\\)/\\1"io.containerd.grpc.v1.cri"\\2/\''
        f' -e \'/_plugins *=/s/"cri"/"io.containerd.grpc.v1.cri"/\' {path}',
    )


# Drop-ins that NVIDIA's tools generated: copies of the CRI section that hide the main file's.
#
# They are kept as long as they have the right runtime, with a note about what they hide.

SHOWN = 5
Copies = Mapping[str, GeneratedCopy]


def generated_copies(state: ContainerdState) -> Copies:
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
                f" settings: {some_of(hidden, SHOWN)}; to put only the runtime in its place:"
                " gpunode configure-runtime --replace"
            )
    return tuple(notes)


def _hidden(state: ContainerdState, others: Tree, path: str, key: tuple[str, ...]) -> str:
    plugin = state.config.plugin
    copied = dig(state.config.trees[path], "plugins", plugin, *key)
    return f"{'.'.join(key)} ({copied!r} there, {dig(others, 'plugins', plugin, *key)!r} otherwise)"
