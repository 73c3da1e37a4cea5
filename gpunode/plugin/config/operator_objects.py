"""What of a stream of Kubernetes objects says how the GPU operator's device plugin is configured.

`kubectl get configmaps` gives those of everybody, the operator's own for MIG layouts and metrics among them.
The plugin's is the one that the ClusterPolicy names, or else each whose texts read like its configurations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpunode.facts.located import EMPTY, Item
from gpunode.plugin.config.file import TOP
from gpunode.plugin.config.gke import Left, WrongInput, documents, get, keys
from gpunode.plugin.config.operator_policy import SECTIONS

LABEL = "nvidia.com/device-plugin.config"
_OWN = frozenset(TOP) - {"version", "health"}  # which other programs' files have as well
# by their only key besides the version: what the operator's other ConfigMaps hold, and who takes it here
_OTHERS = {
    "mig-configs": ("MIG layouts", "gpunode mig apply -f FILE, with that text as the file"),
    "gpu-clients": ("programs that mig-manager stops", "gpunode mig apply --drain"),
    "vgpu-configs": ("vGPU devices", "virtual machines with GPUs are not gpunode's matter"),
}


@dataclass(frozen=True)
class ConfigMap:
    """`texts` by their keys."""

    name: str
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Found:
    """`maps` are ConfigMaps of anybody, `texts` configurations that stand in no object, `labels` what the
    Nodes that bear the label choose, by node."""

    maps: tuple[ConfigMap, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    plain_config: Item = EMPTY
    sections: Mapping[str, Item] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    left: tuple[Left, ...] = ()


def collected(found: Iterable[Item]) -> Found:
    """`WrongInput` where something stands in the file that is none of the operator's."""
    maps: list[ConfigMap] = []
    texts: dict[str, str] = {}
    sections: dict[str, Item] = {}
    labels: dict[str, str] = {}
    plain_config, left = EMPTY, dict[Left, None]()
    for one in _objects(found):
        kind = get(one, "kind").text
        name = get(one, "metadata", "name").text
        if kind == "ConfigMap":
            maps.append(ConfigMap(name, _texts(get(one, "data"))))
        elif kind == "ClusterPolicy":
            sections |= {key: value for key, _, value in get(one, "spec").pairs}
        elif kind == "Node":
            if chosen := get(one, "metadata", "labels", LABEL).text:
                labels[name] = chosen
        elif kind:
            hint = SECTIONS["driver"] if kind == "NVIDIADriver" else ""
            left[Left(kind, "objects of this kind don't configure the device plugin", hint)] = None
        elif set(keys(one)) & SECTIONS.keys() and not set(keys(one)) & {"flags", "sharing"}:
            sections |= {key: value for key, _, value in one.pairs}
        elif other := _other(one):
            raise WrongInput(f"line {one.line}: these are {other[0]}, not the plugin's", hint=other[1])
        elif set(keys(one)) & set(TOP):
            plain_config = one
        elif get(one, "config", "map").pairs:
            texts |= _texts(get(one, "config", "map"))  # the values of the plugin's own chart
        elif one.pairs and all("\n" in value.text for _, _, value in one.pairs):
            texts |= _texts(one)
        else:
            raise WrongInput(
                f"line {one.line}: this is nothing of the GPU operator's that is known here",
                hint="a ConfigMap of the device plugin, a ClusterPolicy, or the chart's values",
            )
    texts |= _texts(get(sections.get("devicePlugin", EMPTY), "config", "data"))  # the chart's values
    return Found(tuple(maps), texts, plain_config, sections, labels, tuple(left))


def _objects(found: Iterable[Item]) -> list[Item]:
    """The documents, those of lists (`kubectl get -o yaml`) one by one."""
    made: list[Item] = []
    for one in found:
        if one.kind != "map":
            raise WrongInput(f"line {one.line}: expected an object; found {one.what}")
        listed = get(one, "kind").text.endswith("List") or get(one, "kind").text == "List"
        made += _objects(get(one, "items").items) if listed else [one]
    return made


def _texts(data: Item) -> dict[str, str]:
    return {key: value.text for key, _, value in data.pairs if value.kind == "scalar"}


# --- which ConfigMap ------------------------------------------------------------------------------------


def configurations(found: Found, wanted: str, left: list[Left]) -> dict[str, str]:
    """The plugin's configurations by name; `wanted` is the ConfigMap that the policy names, or empty.

    `left` grows by what the other ConfigMaps are for. `WrongInput` where two say different things under one
    name, or where there are ConfigMaps and none is the plugin's.
    """
    taken = [one for one in found.maps if one.name == wanted] if wanted else _like_the_plugins(found.maps)
    others = [one for one in found.maps if one not in taken]
    configs = dict(found.texts)
    for one in taken:
        for key, text in one.texts.items():
            if configs.get(key, text) != text:
                raise WrongInput(
                    f"two ConfigMaps have a configuration {key!r}",
                    hint=f"give only one of {', '.join(sorted({other.name for other in taken}))}",
                )
            configs[key] = text
    told = [(one.name, _others_of(one)) for one in others]
    left += [Left(f"ConfigMap {name}", f"it holds {of[0]}", of[1]) for name, of in told if of]
    if others and not taken and not configs and not found.sections and found.plain_config is EMPTY:
        hint = next((of[1] for _, of in told if of), "give the ConfigMap of the plugin")
        names = ", ".join(sorted({one.name for one in others}))
        raise WrongInput(f"no configuration of the device plugin is in {names}", hint=hint)
    return configs


def _like_the_plugins(maps: Sequence[ConfigMap]) -> list[ConfigMap]:
    """Where there is only one it is meant, unless it is plainly something else."""
    if len(maps) == 1:
        return [] if _others_of(maps[0]) else list(maps)
    return [one for one in maps if any(set(keys(_tree(text))) & _OWN for text in one.texts.values())]


def _others_of(one: ConfigMap) -> tuple[str, str] | None:
    return next((other for text in one.texts.values() if (other := _other(_tree(text)))), None)


def _other(tree: Item) -> tuple[str, str] | None:
    return next((_OTHERS[key] for key in keys(tree) if key in _OTHERS), None)


def _tree(text: str) -> Item:
    """The text as a tree; empty where it is something else, such as a certificate."""
    try:
        return documents(text.encode())[0] if text.strip() else EMPTY
    except WrongInput:
        return EMPTY
