"""The GPU operator's configuration of its device plugin as our config file.

Taken are, in one stream of YAML or alone: the ConfigMap with the plugin's configurations, its data, a
ClusterPolicy, its spec or a part of it, the chart's values. What the operator makes of a ClusterPolicy
(variables of the plugin's container, which beat the config file) is that of its TransformDevicePlugin
(NVIDIA/gpu-operator, controllers/object_controls.go).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.facts.yaml_tree import EMPTY, Item
from gpunode.plugin.config.file import TOP
from gpunode.plugin.config.operator_policy import SECTIONS, Policy, read_policy
from gpunode.plugin.config.translate import (
    Left,
    Translation,
    WrongInput,
    documents,
    get,
    keys,
    ordered,
    plain,
    put,
)

LABEL = "nvidia.com/device-plugin.config"
_NAME_HINT = "--name NAME"


@dataclass(frozen=True)
class _Found:
    """By name, the texts of the plugin's configurations; the policy's sections, by name."""

    configs: dict[str, str] = field(default_factory=dict)
    plain_config: Item = EMPTY
    sections: dict[str, Item] = field(default_factory=dict)
    left: tuple[Left, ...] = ()


def translate(found: Sequence[Item], name: str) -> Translation:
    """`WrongInput` where nothing of the operator's is in the file, or it doesn't hold the configuration."""
    all_of_it = _collected(_objects(found))
    policy = read_policy(all_of_it.sections)
    chosen, tree, left = _chosen(all_of_it, policy, name)
    config = plain(tree) or {}
    if not isinstance(config, dict):
        raise WrongInput(f"{chosen or 'the configuration'}: expected a mapping; found {tree.what}")
    left += _what_counts_here(config)
    said: dict[str, str] = {}
    for key, value, source in policy.values:
        before = put(config, key, value)
        if before is not None and before != value:
            other = said.get(key, "the configuration")
            left.append(
                Left(key, f"{source} says {_shown(value)}, and beats {other}, which says {_shown(before)}")
            )
        said[key] = source
    left += _mps(config)
    return Translation(ordered(config), (*all_of_it.left, *left, *policy.left), name=chosen)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- what is in the file --------------------------------------------------------------------------------


def _objects(found: Iterable[Item]) -> list[Item]:
    """The documents, those of lists (`kubectl get -o yaml`) one by one."""
    made: list[Item] = []
    for one in found:
        if one.kind != "map":
            raise WrongInput(f"line {one.line}: expected an object; found {one.what}")
        listed = get(one, "kind").text.endswith("List") or get(one, "kind").text == "List"
        made += _objects(get(one, "items").items) if listed else [one]
    return made


def _collected(objects: Iterable[Item]) -> _Found:
    configs: dict[str, str] = {}
    sections: dict[str, Item] = {}
    plain_config, left = EMPTY, []
    for one in objects:
        kind = get(one, "kind").text
        if kind == "ConfigMap":
            configs |= _texts(get(one, "data"))
        elif kind == "ClusterPolicy":
            sections |= {key: value for key, _, value in get(one, "spec").pairs}
        elif kind:
            left.append(
                Left(
                    kind,
                    "objects of this kind don't configure the device plugin",
                    SECTIONS.get("driver", "") if kind == "NVIDIADriver" else "",
                )
            )
        elif set(keys(one)) & SECTIONS.keys() and not set(keys(one)) & {"flags", "sharing"}:
            sections |= {key: value for key, _, value in one.pairs}
        elif set(keys(one)) & set(TOP):
            plain_config = one
        elif get(one, "config", "map").pairs:
            configs |= _texts(get(one, "config", "map"))  # the values of the plugin's own chart
        elif one.pairs and all("\n" in value.text for _, _, value in one.pairs):
            configs |= _texts(one)
        else:
            raise WrongInput(
                f"line {one.line}: this is nothing of the GPU operator's that is known here",
                hint="a ConfigMap of the device plugin, a ClusterPolicy, or the chart's values",
            )
    configs |= _texts(get(sections.get("devicePlugin", EMPTY), "config", "data"))  # the chart's values
    return _Found(configs, plain_config, sections, tuple(left))


def _texts(data: Item) -> dict[str, str]:
    return {key: value.text for key, _, value in data.pairs if value.kind == "scalar"}


# --- which configuration --------------------------------------------------------------------------------


def _chosen(found: _Found, policy: Policy, name: str) -> tuple[str, Item, list[Left]]:
    """(its name, its tree, what to say of it). The node's label chooses in a cluster, the default without."""
    configs, left = found.configs, list[Left]()
    if name and name not in configs:
        known = ", ".join(sorted(configs)) or "none has a name"
        raise WrongInput(f"there is no configuration {name!r}", hint=f"there are: {known}")
    if not configs:
        if policy.config_map:
            hint = f"put it into the file, too: kubectl get configmap {policy.config_map} -o yaml"
            left.append(Left("devicePlugin.config", f"the ConfigMap {policy.config_map} isn't here", hint))
        return "", found.plain_config, left
    chosen = name or (policy.default if policy.default in configs else "")
    if not chosen and len(configs) == 1:
        chosen = next(iter(configs))
    if not chosen:
        listed = ", ".join(sorted(configs))
        raise WrongInput(f"there are {len(configs)} configurations: {listed}", hint=_NAME_HINT)
    if len(configs) > 1:
        why = f"the label {LABEL} chooses in a cluster; here a node's file is the node's own"
        left.append(Left(", ".join(sorted(set(configs) - {chosen})), why, _NAME_HINT))
    return chosen, _tree(chosen, configs[chosen]), left


def _tree(name: str, text: str) -> Item:
    try:
        return documents(text.encode())[0] if text.strip() else EMPTY
    except WrongInput as error:
        raise WrongInput(f"{name}: {error.message}", error.hint) from error


# --- what means something else here ---------------------------------------------------------------------


def _what_counts_here(config: dict[str, Any]) -> list[Left]:
    """NVIDIA's plugin reads naming rules and parts of sharing, and drops them; ours does what they say."""
    why = "NVIDIA's plugin drops this with a warning; gpunode does what it says"
    left = (
        [Left("resources", why, "take it out to have things as they were")] if config.get("resources") else []
    )
    sharing = config.get("sharing")
    for section, value in sharing.items() if isinstance(sharing, dict) else ():
        entries = value.get("resources") if isinstance(value, dict) else None
        for number, entry in enumerate(entries if isinstance(entries, list) else ()):
            given = [key for key in ("rename", "devices") if isinstance(entry, dict) and entry.get(key)]
            left += [
                Left(f"sharing.{section}.resources[{number}].{key}", why)
                for key in given
                if entry.get(key) != "all"
            ]
    return left


def _mps(config: dict[str, Any]) -> list[Left]:
    sharing = config.get("sharing")
    if not isinstance(sharing, dict) or not sharing.get("mps"):
        return []
    if put(config, "flags.gpunode.mps", True) is not None:
        return []
    return [
        Left(
            "sharing.mps",
            "the operator runs the MPS daemons in a DaemonSet; here the plugin does (flags.gpunode.mps)",
        )
    ]
