"""The GPU operator's configuration of its device plugin as our config file.

Taken are, in one stream of YAML or alone: the ConfigMap with the plugin's configurations, its data, a
ClusterPolicy, its spec or a part of it, the chart's values (operator_objects.py). What the operator makes of
a ClusterPolicy (variables of the plugin's container, which beat the config file) is that of its
TransformDevicePlugin (NVIDIA/gpu-operator, controllers/object_controls.go).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunode.facts.located import EMPTY, Item
from gpunode.plugin.config.gke import Left, Translation, WrongInput, documents, ordered, plain, put
from gpunode.plugin.config.operator_objects import LABEL, Found, collected, configurations
from gpunode.plugin.config.operator_policy import Policy, read_policy

_NAME_HINT = "--name NAME"


def translate(found: Sequence[Item], name: str) -> Translation:
    """`WrongInput` where nothing of the operator's is in the file, or it doesn't hold the configuration."""
    all_of_it = collected(found)
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


# --- which configuration --------------------------------------------------------------------------------


def _chosen(found: Found, policy: Policy, name: str) -> tuple[str, Item, list[Left]]:
    """(its name, its tree, what to say of it). The node's label chooses in a cluster, the default without."""
    left: list[Left] = []
    configs = configurations(found, policy.config_map, left)
    if name and name not in configs:
        known = ", ".join(sorted(configs)) or "none has a name"
        raise WrongInput(f"there is no configuration {name!r}", hint=f"there are: {known}")
    if not configs:
        if policy.config_map:
            hint = f"put it into the file, too: kubectl get configmap {policy.config_map} -o yaml"
            left.append(Left("devicePlugin.config", f"the ConfigMap {policy.config_map} isn't here", hint))
        return "", found.plain_config, left
    chosen = name or _of_the_node(found, configs, left)
    chosen = chosen or (policy.default if policy.default in configs else "")
    if not chosen and len(configs) == 1:
        chosen = next(iter(configs))
        if policy.config_map:
            why = "there is none: in a cluster a node without the label has no configuration at all"
            left.append(Left("devicePlugin.config.default", why, f"{chosen} is the only one, and taken here"))
    if not chosen:
        listed = ", ".join(sorted(configs))
        hint = f"say which: {_NAME_HINT.replace('NAME', min(configs))}"
        raise WrongInput(f"there are {len(configs)} configurations: {listed}", hint=hint)
    if len(configs) > 1:
        why = f"the label {LABEL} chooses in a cluster; here a node's file is the node's own"
        left.append(Left(", ".join(sorted(set(configs) - {chosen})), why, _NAME_HINT))
    return chosen, _tree(chosen, configs[chosen]), left


def _of_the_node(found: Found, configs: Mapping[str, str], left: list[Left]) -> str:
    """What the Node in the file chooses by its label; of several that differ nobody knows which is meant."""
    names = sorted(set(found.labels.values()))
    if len(names) == 1:
        if names[0] not in configs:
            known = ", ".join(sorted(configs))
            raise WrongInput(
                f"{', '.join(found.labels)}: the label {LABEL} says {names[0]!r}, and there is no such"
                " configuration",
                hint=f"there are: {known}",
            )
        return names[0]
    told = ", ".join(f"{node} {name}" for node, name in sorted(found.labels.items()))
    left += [Left(LABEL, f"nodes choose differently: {told}", _NAME_HINT)] if names else []
    return ""


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
