"""The tables of containerd's CRI configuration: what a runtime inherits, and which types are wrong."""

from __future__ import annotations

import copy
from typing import Any

from gpunode.errors import ConfigError
from gpunode.facts.containerd import CRI_PLUGINS, ContainerdConfig, dig
from gpunode.runtime.engine import Handler
from gpunode.runtime.trees import Tree

RUNC_TYPE = "io.containerd.runc.v2"


def cri_of(tree: Tree, plugin: str) -> Tree:
    """The CRI table of a tree, made if it isn't there."""
    table: Tree = tree.setdefault("plugins", {}).setdefault(plugin, {})
    return table


def runtime_table(
    config: ContainerdConfig, effective: Tree | None, handler: Handler, systemd_cgroup: bool
) -> Tree:
    """The table of a wanted runtime: an existing one set right, else a copy of the runc it stands for."""
    base = inherited(config, effective, handler.name)
    present = config.runtimes.get(handler.name)
    table = copy.deepcopy(present if isinstance(present, dict) else base)
    if not _is_runc_like(table) or not table.get("runtime_type"):
        table["runtime_type"] = RUNC_TYPE
    options = table.setdefault("options", {})
    options["BinaryName"] = handler.path
    cgroup = True if systemd_cgroup else dig(base, "options", "SystemdCgroup")
    if isinstance(cgroup, bool) and options.get("SystemdCgroup", False) != cgroup:
        options["SystemdCgroup"] = cgroup
    return table


def inherited(config: ContainerdConfig, effective: Tree | None, heir: str) -> Tree:
    """Options to start from: the default runtime's if it is a runc, else runc's, else crun's.

    kata, gVisor and other NVIDIA runtimes are passed over: their options mean something else.
    """
    names = dict.fromkeys((config.default_runtime, "runc", "crun"))
    usable = [name for name in names if name != heir and not name.startswith("nvidia")]
    for name in usable:
        entry = config.runtimes.get(name)
        if isinstance(entry, dict) and _is_runc_like(entry):
            return copy.deepcopy(entry)
    for name in usable:
        entry = simple(effective, name)
        if entry and _is_runc_like(entry):
            return entry
    return {"runtime_type": RUNC_TYPE}


def simple(effective: Tree | None, name: str) -> Tree:
    """A runtime from containerd's own merged view, without the empty values that the view spells out.

    What isn't empty there must be repeated: 1.7 sets `sandbox_mode` for its built-in runc, for example.
    """
    for plugin in CRI_PLUGINS.values():
        entry = dig(effective, "plugins", plugin, "containerd", "runtimes", name)
        if isinstance(entry, dict):
            found = {key: value for key, value in entry.items() if value and key != "options"}
            found.setdefault("runtime_type", RUNC_TYPE)
            given = entry.get("options")
            options = given if isinstance(given, dict) else {}
            kept = {key: value for key, value in options.items() if value or key == "SystemdCgroup"}
            return {**found, "options": kept} if kept else found
    return {"runtime_type": RUNC_TYPE} if name == "runc" else {}


def _is_runc_like(entry: Tree) -> bool:
    kind = entry.get("runtime_type") or RUNC_TYPE
    binary = str(dig(entry, "options", "BinaryName") or "")
    return isinstance(kind, str) and kind.startswith("io.containerd.runc.") and "nvidia" not in binary


def refuse_wrong_types(tree: Tree, path: str) -> None:
    """`ConfigError` for what containerd can't load: a number where a table belongs and the like."""
    for key in ("imports", "disabled_plugins", "required_plugins"):
        value = tree.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise _wrong(path, key, "an array of strings")
    _expect_table(tree, ("plugins",), path)
    for plugin in CRI_PLUGINS.values():
        below = ("plugins", plugin)
        for keys in (below, (*below, "containerd"), (*below, "containerd", "runtimes")):
            _expect_table(tree, keys, path)
        runtimes = dig(tree, *below, "containerd", "runtimes") or {}
        for name in runtimes:
            _expect_table(tree, (*below, "containerd", "runtimes", name), path)
            _expect_table(tree, (*below, "containerd", "runtimes", name, "options"), path)
        default = dig(tree, *below, "containerd", "default_runtime_name")
        if default is not None and not isinstance(default, str):
            raise _wrong(path, "default_runtime_name", "a string")


def _expect_table(tree: Tree, keys: tuple[str, ...], path: str) -> None:
    value: Any = dig(tree, *keys)
    if value is not None and not isinstance(value, dict):
        raise _wrong(path, ".".join(keys), "a table")


def _wrong(path: str, key: str, name: str) -> ConfigError:
    return ConfigError(
        f"{path}: {key} is not {name}, so containerd can't start with it",
        hint=f"correct it: ${{EDITOR:-vi}} {path}",
    )
