"""What CRI-O needs to know of an nvidia handler: which of its own low-level handlers it is made like."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from gpunode.facts.crio import CrioConfig, CrioFile, compiled_default
from gpunode.facts.crio_programs import NVIDIA_NAMES, is_low_level, is_nvidias
from gpunode.runtime.engine import Handler
from gpunode.runtime.trees import Tree, same

# what says where or what a handler's program is, and so never goes from one handler to another.
# inherit_default_runtime (1.31 and up) copies the default's runtime_path over the handler's own: no use here
_OWN = (
    "runtime_path",
    "runtime_type",
    "runtime_config_path",
    "runtime_pull_image",
    "inherit_default_runtime",
    "platform_runtime_paths",
)


def base_handler(config: CrioConfig, version: tuple[int, ...], new: Collection[str]) -> Tree:
    """The table to inherit from: the default's if it is crun's or runc's, else theirs; {} without either.

    Never that of a virtual machine or a sandbox: their monitor and root mean something else; nor one of the
    handlers that are to be written (`new`) or go by NVIDIA's names.
    """
    compiled = compiled_default(version)
    for name in (config.named_default, compiled, "crun", "runc", *sorted(config.handlers)):
        table = config.handlers.get(name)
        if table is not None and name not in (*new, *NVIDIA_NAMES) and is_low_level(name, table):
            return dict(table)
    return {}


def handler_table(base: Tree, existing: Tree, handler: Handler, missing: Collection[str]) -> Tree:
    """The handler's table: what `base` has, over it what somebody gave the `existing` one, then the program.

    A monitor_path among `missing` was copied from a machine or a release that had it there.
    """
    inherited = {key: value for key, value in base.items() if key not in _OWN}
    kept = {key: value for key, value in existing.items() if key not in _OWN}
    if kept.get("monitor_path") in missing and "monitor_path" in inherited:
        del kept["monitor_path"]
    program = {"runtime_path": handler.path, "runtime_type": "oci"}
    return copy.deepcopy({**program, **inherited, **kept})


def means(existing: Any, table: Tree) -> bool:
    """Whether an existing table says the same; without a type a handler is CRI-O's ``oci``."""
    return isinstance(existing, dict) and same({**existing, **_type(existing)}, {**table, **_type(table)})


def _type(table: Tree) -> Tree:
    return {"runtime_type": table.get("runtime_type") or "oci"}


def only_nvidias(file: CrioFile) -> bool:
    """Whether a file holds nothing but NVIDIA's handlers, and perhaps one of them as the default."""
    runtime = dict(file.runtime)
    default = runtime.pop("default_runtime", None)
    runtime.pop("runtimes", None)
    alone = set(file.tree) <= {"crio"} and set(file.tree.get("crio", {})) <= {"runtime"} and not runtime
    handlers = file.handlers
    named = default is None or default in handlers or default in NVIDIA_NAMES
    return bool(handlers or default) and alone and named and all(is_nvidias(*one) for one in handlers.items())
