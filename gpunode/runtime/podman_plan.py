"""What podman's files must become. Pure functions over their text; podman.py reads, validates and asks."""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError
from gpunode.facts.containerd import dig, parse_toml
from gpunode.facts.podman import DROP_INS, PodmanConfig
from gpunode.runtime import toml_edit
from gpunode.runtime.engine import Handler, Unwanted
from gpunode.runtime.trees import Tree

DROP_IN = f"{DROP_INS}/99-nvidia.conf"


@dataclass(frozen=True)
class Draft:
    """New text of every file to change, None for one to remove."""

    texts: Mapping[str, str | None]
    previous_default: str = ""


def configured(config: PodmanConfig, handlers: tuple[Handler, ...], default: str) -> Draft:
    """The drop-in with the runtimes that the files don't have yet."""
    runtimes = config.runtimes
    new = {one.name: [one.path] for one in handlers if runtimes.get(one.name) != [one.path]}
    before = config.setting("runtime") or ""
    changes_default = default not in ("", before)
    if not new and not changes_default:
        return Draft({})
    for file in config.files:
        beaten = [name for name in new if name in file.runtimes]
        if changes_default and dig(file.tree, "engine", "runtime") is not None:
            beaten.append("runtime")
        if file.path > DROP_IN and file.path.startswith(DROP_INS) and beaten:
            raise ConfigError(
                f"{file.path} sets {beaten[0]} otherwise, and podman reads it after {DROP_IN}",
                hint=f"take it out there: ${{EDITOR:-vi}} {file.path}",
            )

    def mutate(tree: Tree) -> None:
        engine = tree.setdefault("engine", {})
        if new:
            engine.setdefault("runtimes", {}).update(new)
        if changes_default:
            engine["runtime"] = default

    own = next((file.text for file in config.files if file.path == DROP_IN), "")
    return Draft({DROP_IN: toml_edit.edit(own, mutate, DROP_IN)}, str(before) if changes_default else "")


def removed(config: PodmanConfig, unwanted: Unwanted) -> Draft:
    """The administrator's files without the runtimes; the drop-in goes if nothing else is in it."""

    def mutate(tree: Tree) -> None:
        engine = tree["engine"]
        if engine.get("runtime") in unwanted.names:
            del engine["runtime"]
        for name in [name for name in unwanted.names if name in engine.get("runtimes", {})]:
            del engine["runtimes"][name]
        if engine.get("runtimes") == {}:
            del engine["runtimes"]
        if not engine:
            del tree["engine"]

    texts: dict[str, str | None] = {}
    for file in config.files:
        named = dig(file.tree, "engine", "runtime") in unwanted.names
        if not file.path.startswith("/etc/") or not (named or set(unwanted.names) & set(file.runtimes)):
            continue
        after = toml_edit.edit(file.text, mutate, file.path)
        emptied = file.path == DROP_IN and not parse_toml(after, file.path)
        texts[file.path] = None if emptied else after
    return Draft(texts)
