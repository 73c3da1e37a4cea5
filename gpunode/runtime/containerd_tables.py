"""The tables of containerd's CRI configuration: what a runtime inherits, and what a file is about."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from gpunode.facts.containerd import CRI_PLUGINS, ContainerdConfig, dig
from gpunode.runtime.engine import Handler
from gpunode.runtime.trees import Tree

RUNC_TYPE = "io.containerd.runc.v2"
_RUNC_SHIMS = "io.containerd.runc."
# settings of version 2's containerd table that moved to the images plugin
_OF_IMAGES = ("snapshotter", "disable_snapshot_annotations", "discard_unpacked_layers")


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
    if not _has_runc_shim(table, config.release):
        table["runtime_type"] = RUNC_TYPE
    options = table.setdefault("options", {})
    options["BinaryName"] = handler.path
    cgroup = True if systemd_cgroup else dig(base, "options", "SystemdCgroup")
    if isinstance(dig(present, "options", "SystemdCgroup"), bool) and not _spelled_out(config, handler.name):
        cgroup = (
            None  # containerd's built-in runc knows nothing of this node's kubelet; who wrote the file did
        )
    if isinstance(cgroup, bool) and options.get("SystemdCgroup", False) != cgroup:
        options["SystemdCgroup"] = cgroup
    return table


def inherited(config: ContainerdConfig, effective: Tree | None, heir: str) -> Tree:
    """Options to start from: the default runtime's if it is a runc, else runc's, else crun's.

    kata, gVisor and other NVIDIA runtimes are passed over: their options mean something else.
    """
    spelled_out = _spelled_out(config, heir)
    if spelled_out:
        return copy.deepcopy(spelled_out)
    for name in _ancestors(config, heir):
        entry = simple(effective, name)
        if entry and _is_runc_like(entry):
            return entry
    return {"runtime_type": RUNC_TYPE}


def _spelled_out(config: ContainerdConfig, heir: str) -> Tree:
    """The runc to inherit from as a file spells it out; {} if none does."""
    entries = (config.runtimes.get(name) for name in _ancestors(config, heir))
    return next((entry for entry in entries if isinstance(entry, dict) and _is_runc_like(entry)), {})


def _ancestors(config: ContainerdConfig, heir: str) -> tuple[str, ...]:
    names = dict.fromkeys((config.default_runtime, "runc", "crun"))
    return tuple(name for name in names if name != heir and not name.startswith("nvidia"))


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
    return isinstance(kind, str) and kind.startswith(_RUNC_SHIMS) and "nvidia" not in binary


def _has_runc_shim(entry: Tree, release: tuple[int, ...]) -> bool:
    """Whether the runtime names a shim for runc that this containerd has; 2.0 removed all but v2."""
    kind = str(entry.get("runtime_type"))
    return kind == RUNC_TYPE or (kind.startswith(_RUNC_SHIMS) and release < (2,))


def snapshotter_without_runtimes(config: ContainerdConfig) -> bool:
    """Whether version 2 files have image settings beside no runtimes, which containerd 2 then passes over."""
    merged = dig(config.merged, "plugins", CRI_PLUGINS[2], "containerd")
    return isinstance(merged, dict) and "runtimes" not in merged and has_image_settings(merged)


def has_image_settings(containerd: Tree) -> bool:
    """Whether version 2's containerd table has settings that moved to the images plugin since."""
    return not containerd.keys().isdisjoint(_OF_IMAGES)


def of_runtimes_only(tree: Tree, names: Collection[str]) -> bool:
    """Whether a file has nothing but these runtimes, the default among them, and the CDI switch."""
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
    """The tree without tables that hold nothing, which mean nothing to containerd."""
    if not isinstance(tree, dict):
        return tree
    found = {key: without_empty(value) for key, value in tree.items()}
    return {key: value for key, value in found.items() if value != {}}
