"""The present layouts as a configuration of mig-parted: an entry for each group of GPUs cut alike. Pure.

As ``nvidia-mig-parted export`` writes it (its v0.15): a GPU that knows no MIG counts as one with MIG off; the
mode is the current one; a GPU instance without a compute instance is no device; filters name device and
vendor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpunode.mig.layout import GpuLayout, Layouts

Key = tuple[bool, tuple[tuple[str, int], ...]]


def export(layouts: Layouts, label: str = "current") -> dict[str, Any]:
    """The document, keys in the order in which mig-parted writes them."""
    return {"version": "v1", "mig-configs": {label: list(_entries(layouts.gpus))}}


def _entries(gpus: Sequence[GpuLayout]) -> Iterator[dict[str, Any]]:
    groups: dict[Key, list[GpuLayout]] = {}
    for gpu in gpus:
        groups.setdefault(_key(gpu), []).append(gpu)
    kinds = {gpu.device_id for gpu in gpus}
    for (enabled, devices), members in groups.items():
        entry: dict[str, Any] = {}
        own = list(dict.fromkeys(gpu.device_id for gpu in members))
        if len(kinds) > 1 and len(groups) > 1:
            filters = [f"0x{number:08X}" for number in own]
            entry["device-filter"] = filters[0] if len(filters) == 1 else filters
        meant = [gpu for gpu in gpus if gpu.device_id in own]
        entry["devices"] = "all" if len(meant) == len(members) else [gpu.index for gpu in members]
        entry["mig-enabled"] = enabled
        entry["mig-devices"] = dict(devices)
        yield entry


def _key(gpu: GpuLayout) -> Key:
    devices: Mapping[str, int] = gpu.devices() if gpu.current else {}
    return gpu.capable and gpu.current, tuple(sorted(devices.items()))


def as_json(document: Mapping[str, Any]) -> str:
    """Indented by two, as mig-parted's."""
    import json

    return json.dumps(document, indent=2)


def as_yaml(document: Mapping[str, Any]) -> str:
    """With lists of devices in one line, as mig-parted's."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Shows a list of numbers in one line."""

    def numbers(dumper: yaml.SafeDumper, found: list[Any]) -> yaml.Node:
        short = bool(found) and all(isinstance(one, int) for one in found)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", found, flow_style=short)

    Dumper.add_representer(list, numbers)
    return str(yaml.dump(dict(document), Dumper=Dumper, sort_keys=False, default_flow_style=False))
