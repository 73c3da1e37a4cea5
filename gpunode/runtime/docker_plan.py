"""What daemon.json must become. Pure functions over its text; docker.py reads, validates and asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunode.errors import ConfigError, UsageError
from gpunode.facts.docker_file import parse_daemon_json
from gpunode.facts.docker_flags import flag_features
from gpunode.facts.docker_keys import refused_by_20
from gpunode.runtime import json_edit
from gpunode.runtime.engine import Unwanted, Wanted
from gpunode.runtime.trees import Tree

BUILT_IN = "runc"  # dockerd refuses a file that defines a runtime of this name
_BUILT_IN_SHIMS = ("io.containerd.runc.v2", "io.containerd.runtime.v1.linux")  # of dockerd 20.10
_HAS_VALIDATE = (23,)
_PATH_XOR_TYPE = (25,)  # fatal at start from here on; 24 says so by itself
_SHIM_NAMES = (23,)  # from here on a default runtime may be a containerd shim that no file mentions
# moby 28.2 took CDI for on unless features.cdi is false (seen with 28.5.2); 25.0 had it off without the key
_CDI_BY_DEFAULT = (28, 2)


def configured(content: str, path: str, wanted: Wanted) -> str:
    """The file with the runtimes in it, and keys for CDI and the default if wanted; the rest as it was."""
    if BUILT_IN in wanted.names:
        raise UsageError(
            f"dockerd reserves the runtime name {BUILT_IN}",
            hint="choose another: --nvidia-runtime-name nvidia",
        )

    def mutate(tree: Tree) -> None:
        _check_types(tree, content, path)
        for handler in wanted.handlers:
            runtimes = _table(tree, "runtimes")
            if not _is_right(runtimes.get(handler.name), handler.path):
                runtimes[handler.name] = {"path": handler.path, "runtimeArgs": []}
        if wanted.default:
            tree["default-runtime"] = wanted.default
        if wanted.cdi:
            _table(tree, "features")["cdi"] = True

    return json_edit.edit(content, mutate, path)


def removed(content: str, path: str, unwanted: Unwanted) -> str:
    """The file without the runtimes; a default among them gives way to the previous one, or to none."""

    def mutate(tree: Tree) -> None:
        _check_types(tree, content, path)
        for name in unwanted.names:
            _take_out(tree, "runtimes", name)
        if tree.get("default-runtime") in unwanted.names:
            _put_default_back(tree, unwanted.previous_default)
        if unwanted.cdi and (tree.get("features") or {}).get("cdi") is True:  # false is somebody's wish
            _take_out(tree, "features", "cdi")

    return json_edit.edit(content, mutate, path)


def _table(tree: Tree, key: str) -> Tree:
    """The object at `key`; one that is absent, or null as dockerd also takes it, is made."""
    if tree.get(key) is None:
        tree[key] = {}
    found: Tree = tree[key]
    return found


def _take_out(tree: Tree, key: str, name: str) -> None:
    """Take `name` out of the object at `key`, and that object if nothing else is in it."""
    if name in (tree.get(key) or {}):
        del tree[key][name]
        if not tree[key]:
            del tree[key]


def _put_default_back(tree: Tree, previous: str) -> None:
    known = previous in (tree.get("runtimes") or {}) or previous == BUILT_IN or _is_shim(previous)
    if previous and known:
        tree["default-runtime"] = previous
    else:
        del tree["default-runtime"]


def for_reload(content: str, path: str) -> str:
    """`content` with the keys spelled out whose absence a reload ignores.

    dockerd keeps its runtimes and default runtime if the file it reloads doesn't name them, and 20.10 panics
    on a file whose `runtimes` lacks the present default while `default-runtime` is absent.
    """

    def mutate(tree: Tree) -> None:
        for key in ("runtimes", "default-runtime"):
            if not tree.get(key):  # null and "" count as absent
                tree[key] = {} if key == "runtimes" else BUILT_IN

    return json_edit.edit(content, mutate, path)


def refused_by_dockerd(content: str, path: str, version: tuple[int, ...]) -> str:
    """What dockerd is known to refuse in a file, as ``LINE: REASON``; empty if nothing is.

    It stands in for ``--validate`` where there is none, and for what that doesn't look at: from 25.0 on it
    passes over the runtimes (seen on 26.1.5 and 28.5.2), which are fatal at start all the same.
    """
    tree = parse_daemon_json(content, path)
    _check_types(tree, content, path)
    runtimes = tree.get("runtimes") or {}
    default = tree.get("default-runtime") or BUILT_IN
    keys, reason = _refused_runtimes(runtimes, version)
    if not reason and not (default in (BUILT_IN, *runtimes) or _is_built_in(default, version)):
        keys, reason = ("default-runtime",), f'default-runtime "{default}" is not among runtimes'
    if not reason and version and version < _HAS_VALIDATE:
        keys, reason = refused_by_20(tree)
        if not reason and content.startswith("\ufeff"):
            reason = "dockerd 20.10 can't read a byte order mark"
        if not reason and not content.strip():
            reason = "dockerd 20.10 takes {} for an empty file, but not an empty one"
    return f"{json_edit.line_of(content, *keys)}: {reason}" if reason else ""


def _refused_runtimes(runtimes: Tree, version: tuple[int, ...]) -> tuple[tuple[str, ...], str]:
    for name, entry in runtimes.items():
        if name == BUILT_IN:
            return ("runtimes", name), f'the runtime name "{BUILT_IN}" is reserved'
        if not isinstance(entry, dict):
            return ("runtimes", name), f'the runtime "{name}" is not an object'
        if version >= _PATH_XOR_TYPE and bool(entry.get("path")) == bool(entry.get("runtimeType")):
            return ("runtimes", name), f'the runtime "{name}" needs either a path or a runtimeType'
    return (), ""


def _is_built_in(name: str, version: tuple[int, ...]) -> bool:
    return _is_shim(name) if version >= _SHIM_NAMES else name in _BUILT_IN_SHIMS


def _is_shim(name: str) -> bool:
    """Whether dockerd (23.0 and up) takes a name for a containerd shim: PREFIX.NAME, without a slash."""
    return "/" not in name and bool(name.partition(".")[0]) and "." in name


def _is_right(entry: Any, path: str) -> bool:
    """Whether an existing entry already means the same; dockerd ignores nvidia-ctk's key `args`."""
    if not isinstance(entry, dict) or entry.get("path") != path:
        return False
    return not entry.get("runtimeArgs") and not entry.get("args") and "runtimeType" not in entry


def _check_types(tree: Tree, content: str, path: str) -> None:
    """Refuse types that dockerd refuses; null counts as absent, as it does for dockerd."""
    kinds = {"runtimes": (dict, "an object"), "features": (dict, "an object")}
    for key, (kind, name) in (kinds | {"default-runtime": (str, "a string")}).items():
        if tree.get(key) is not None and not isinstance(tree[key], kind):
            line = json_edit.line_of(content, key)
            raise ConfigError(
                f"{path}:{line}: {key} is not {name}, so dockerd can't start with it",
                hint=f"correct that line: ${{EDITOR:-vi}} +{line} {path}",
            )


def cdi_is_on(tree: Mapping[str, Any], argv: tuple[str, ...], version: tuple[int, ...]) -> bool:
    """Whether a dockerd of this release has CDI with this file and these flags."""
    features = tree.get("features")
    said = flag_features(argv) | (features if isinstance(features, dict) else {})
    return bool(said.get("cdi", version >= _CDI_BY_DEFAULT))
