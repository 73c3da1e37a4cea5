"""What daemon.json must become. Pure functions over its text; docker.py reads, validates and asks."""

from __future__ import annotations

from typing import Any

from gpunode.errors import ConfigError, UsageError
from gpunode.facts.docker_file import parse_daemon_json
from gpunode.runtime import json_edit
from gpunode.runtime.engine import Unwanted, Wanted
from gpunode.runtime.trees import Tree

BUILT_IN = "runc"  # dockerd refuses a file that defines a runtime of this name


def configured(content: str, path: str, wanted: Wanted) -> str:
    """The file with the runtime in it, everything else as it was."""
    if BUILT_IN in wanted.names:
        raise UsageError(
            f"dockerd reserves the runtime name {BUILT_IN}",
            hint="choose another: --nvidia-runtime-name nvidia",
        )

    def mutate(tree: Tree) -> None:
        _tidy(tree, path)
        for handler in wanted.handlers:
            runtimes = tree.setdefault("runtimes", {})
            if not _is_right(runtimes.get(handler.name), handler.path):
                runtimes[handler.name] = {"path": handler.path, "runtimeArgs": []}
        if wanted.default:
            tree["default-runtime"] = wanted.default
        if wanted.cdi:
            tree.setdefault("features", {})["cdi"] = True

    return json_edit.edit(content, mutate, path)


def removed(content: str, path: str, unwanted: Unwanted) -> str:
    """The file without the runtimes; a default among them gives way to the previous one, or to none."""

    def mutate(tree: Tree) -> None:
        _tidy(tree, path)
        for name in unwanted.names:
            if name in tree.get("runtimes", {}):
                del tree["runtimes"][name]
                if not tree["runtimes"]:
                    del tree["runtimes"]
        if tree.get("default-runtime") in unwanted.names:
            _put_default_back(tree, unwanted.previous_default)
        if unwanted.cdi and "cdi" in tree.get("features", {}):
            del tree["features"]["cdi"]
            if not tree["features"]:
                del tree["features"]

    return json_edit.edit(content, mutate, path)


def _put_default_back(tree: Tree, previous: str) -> None:
    if previous and (previous in tree.get("runtimes", {}) or previous == BUILT_IN):
        tree["default-runtime"] = previous
    else:
        del tree["default-runtime"]


def for_reload(content: str, path: str) -> str:
    """`content` with the keys spelled out whose absence a reload ignores.

    dockerd keeps its runtimes and default runtime if the file it reloads doesn't name them, and 20.10 panics
    on a file whose `runtimes` lacks the present default while `default-runtime` is absent.
    """

    def mutate(tree: Tree) -> None:
        tree.setdefault("runtimes", {})
        tree.setdefault("default-runtime", BUILT_IN)

    return json_edit.edit(content, mutate, path)


def refused_by_dockerd(tree: Tree) -> str:
    """What dockerd is known to refuse in a file, for versions without ``--validate``; empty if nothing."""
    runtimes = tree.get("runtimes", {})
    default = tree.get("default-runtime", BUILT_IN)
    if BUILT_IN in runtimes:
        return f'runtime name "{BUILT_IN}" is reserved'
    if default != BUILT_IN and default not in runtimes:
        return f'default-runtime "{default}" is not among runtimes'
    return ""


def _is_right(entry: Any, path: str) -> bool:
    """Whether an existing entry already means the same; dockerd ignores nvidia-ctk's key `args`."""
    if not isinstance(entry, dict) or entry.get("path") != path:
        return False
    return not entry.get("runtimeArgs") and not entry.get("args") and "runtimeType" not in entry


def _tidy(tree: Tree, path: str) -> None:
    """Refuse types that dockerd refuses; null counts as absent, as it does for dockerd."""
    for key, kind, name in (("runtimes", dict, "an object"), ("features", dict, "an object")):
        _check(tree, key, kind, name, path)
    _check(tree, "default-runtime", str, "a string", path)


def _check(tree: Tree, key: str, kind: type, name: str, path: str) -> None:
    if key in tree and tree[key] is None:
        del tree[key]
    if key in tree and not isinstance(tree[key], kind):
        raise ConfigError(
            f"{path}: {key} is not {name}, so dockerd can't start with it",
            hint=f"correct it: ${{EDITOR:-vi}} {path}",
        )


def features_cdi(content: str, path: str) -> bool:
    """Whether the file switches CDI on."""
    features = parse_daemon_json(content, path).get("features")
    return isinstance(features, dict) and features.get("cdi") is True
