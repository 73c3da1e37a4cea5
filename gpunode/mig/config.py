"""Parser for mig-parted's configuration file, version v1: labels, and each label's layout of every GPU.

It follows NVIDIA's mig-parted v0.15, with two differences: it reports all errors at once, each with its line,
and it rejects what mig-parted silently ignores (a filter that can't match anything, a duplicate key). The
file is untrusted input.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpunode.errors import ConfigError, PreconditionError, UsageError
from gpunode.host.documents import DocumentError, Item, Notes, read
from gpunode.mig.model import GpuLayout, Layouts, parse_name
from gpunode.mig.placement import meaning, offered, summary, unknown_profiles
from gpunode.output.result import many

VERSION = "v1"
_TOP = ("version", "mig-configs")
_ENTRY = ("devices", "device-filter", "mig-enabled", "mig-devices")
_TRUE = frozenset({"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE = frozenset({"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})
_NUMBER = re.compile(r"0|[1-9]\d{0,5}", re.ASCII)
_FILTER = re.compile(r"0[xX]([0-9a-fA-F]{1,8})(?::0[xX]([0-9a-fA-F]{1,8}))?")
_MOST_SHOWN = 10


class Filter(NamedTuple):
    """PCI device above vendor as NVML packs them, 0x20B010DE; `subsystem` likewise, None for any."""

    device: int
    subsystem: int | None = None


class LayoutEntry(NamedTuple):
    """The layout for some GPUs.

    `filters` are alternatives, no filter matches every GPU; `devices` are NVML's indices, None is all.
    `profiles` are counts by name, as written; counts of zero are left out.
    """

    line: int
    enabled: bool
    profiles: Mapping[str, int]
    filters: tuple[Filter, ...] = ()
    devices: tuple[int, ...] | None = None

    def selects(self, gpu: GpuLayout) -> bool:
        """Whether the entry matches the GPU; one of which the ids can't be read may match any filter."""
        if self.devices is not None and gpu.index not in self.devices:
            return False
        return (
            not self.filters
            or (bool(gpu.error) and not gpu.device_id)
            or any(
                entry.device == gpu.device_id and entry.subsystem in (None, gpu.subsystem_id)
                for entry in self.filters
            )
        )


class MigConfig(NamedTuple):
    """A whole file. `path` is for messages."""

    path: str
    labels: Mapping[str, tuple[LayoutEntry, ...]]

    def select(self, label: str) -> tuple[str, tuple[LayoutEntry, ...]]:
        """The label and its entries; an empty label selects the only one.

        `UsageError` if there are several labels, or none with that name.
        """
        known = ", ".join(self.labels)
        if not label:
            if len(self.labels) != 1:
                raise UsageError(
                    f"{self.path} has several configurations and none was chosen",
                    hint=f"choose one with -c: {known}",
                    code="no-label",
                )
            label = next(iter(self.labels))
        if label not in self.labels:
            from difflib import get_close_matches

            near = get_close_matches(label, self.labels, n=1)
            raise UsageError(
                f"{self.path} has no configuration {label!r}",
                hint=f"did you mean {near[0]}?" if near else f"there are: {known}",
                code="unknown-label",
            )
        return label, self.labels[label]


class InvalidMigConfig(ConfigError):
    """A file with one or more errors; `faults` are (line, message), line 0 for the file as a whole."""

    default_code = "mig-config"

    def __init__(self, path: str, faults: Sequence[tuple[int, str]]) -> None:
        texts = [f"{path}:{line}: {what}" if line else f"{path}: {what}" for line, what in faults]
        more = len(texts) - _MOST_SHOWN
        lines = texts[:_MOST_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        super().__init__(
            "; ".join(lines), hint="the form is mig-parted's, version v1; gpunode's docs/mig.md describes it"
        )
        self.faults = tuple(faults)


def parse(data: bytes, path: str) -> MigConfig:
    """The file's labels. `InvalidMigConfig` with every error in it."""
    notes: Notes = []
    try:
        root = read(data, notes)
    except DocumentError as error:
        raise InvalidMigConfig(path, [(error.line, error.message)]) from error
    faults = [(line, what) for line, what in notes]
    labels = _labels(root, faults)
    if faults:
        raise InvalidMigConfig(path, sorted(faults))
    return MigConfig(path, labels)


Faults = list[tuple[int, str]]


def _labels(root: Item, faults: Faults) -> dict[str, tuple[LayoutEntry, ...]]:
    if root.kind != "map":
        faults.append((root.line, f"expected the keys version and mig-configs, found {root.what}"))
        return {}
    fields = _fields(root, _TOP, faults)
    version = fields.get("version")
    if version is None or version.kind == "null":
        faults.append((root.line, "the key version is missing: version: v1"))
    elif version.text != VERSION or version.kind != "scalar":
        faults.append((version.line, f"unknown version: {version.what}; there is only v1"))
    configs = fields.get("mig-configs")
    if configs is None or configs.kind == "null" or (configs.kind == "map" and not configs.pairs):
        faults.append((root.line, "mig-configs needs at least one label with entries"))
        return {}
    if configs.kind != "map":
        faults.append((configs.line, f"mig-configs: expected labels, found {configs.what}"))
        return {}
    return {label: tuple(_entries(label, line, item, faults)) for label, line, item in configs.pairs}


def _fields(item: Item, known: Sequence[str], faults: Faults) -> dict[str, Item]:
    fields = {}
    for key, line, value in item.pairs:
        if key in known:
            fields[key] = value
        else:
            faults.append((line, f"unknown key: {key}; known: {', '.join(known)}"))
    return fields


def _entries(label: str, line: int, item: Item, faults: Faults) -> Iterator[LayoutEntry]:
    if item.kind != "list" or not item.items:
        what = "an empty list" if item.kind == "list" else item.what
        faults.append((line, f"{label}: at least one entry is required, found {what}"))
        return
    for entry_item in item.items:
        if entry_item.kind != "map":
            faults.append(
                (
                    entry_item.line,
                    f"{label}: an entry is a mapping with {', '.join(_ENTRY)}, not {entry_item.what}",
                )
            )
            continue
        before = len(faults)
        entry = _entry(entry_item, faults)
        if len(faults) == before:
            yield entry


def _entry(item: Item, faults: Faults) -> LayoutEntry:
    fields = _fields(item, _ENTRY, faults)
    enabled = _enabled(item.line, fields.get("mig-enabled"), faults)
    return LayoutEntry(
        item.line,
        bool(enabled),
        _profiles(item.line, enabled, fields.get("mig-devices"), faults),
        tuple(_filters(fields.get("device-filter"), faults)),
        _devices(item.line, fields.get("devices"), faults),
    )


def _enabled(line: int, item: Item | None, faults: Faults) -> bool | None:
    if item is None or item.kind == "null":
        faults.append((line, "the required key mig-enabled is missing"))
        return None
    if item.kind != "scalar" or item.text not in _TRUE | _FALSE:
        faults.append((item.line, f"mig-enabled is true or false, not {item.what}"))
        return None
    return item.text in _TRUE


def _devices(line: int, item: Item | None, faults: Faults) -> tuple[int, ...] | None:
    if item is None or item.kind == "null":
        faults.append((line, "the required key devices is missing: all, or a list of indices"))
        return None
    if item.kind == "scalar" and item.text == "all":
        return None
    if item.kind != "list" or not item.items:
        what = "an empty list" if item.kind == "list" else item.what
        faults.append((item.line, f"devices is all or a list of indices such as [0, 1], not {what}"))
        return None
    wrong = [entry for entry in item.items if entry.kind != "scalar" or not _NUMBER.fullmatch(entry.text)]
    faults += [(entry.line, f"devices: {entry.what} is not the index of a GPU") for entry in wrong]
    return None if wrong else tuple(dict.fromkeys(int(entry.text) for entry in item.items))


def _filters(item: Item | None, faults: Faults) -> Iterator[Filter]:
    if item is None or item.kind == "null":
        return
    for entry in item.items if item.kind == "list" else (item,):
        if entry.kind == "scalar" and not entry.text:
            continue  # as in mig-parted: every GPU
        match = _FILTER.fullmatch(entry.text) if entry.kind == "scalar" else None
        if match is None:
            form = '"0x20B010DE" (PCI device, vendor), or "0x20B010DE:0x134F10DE" with the subsystem'
            faults.append(
                (entry.line, f"device-filter: {entry.what} is not a device filter; its form is {form}")
            )
        else:
            yield Filter(int(match[1], 16), int(match[2], 16) if match[2] else None)


def _profiles(line: int, enabled: bool | None, item: Item | None, faults: Faults) -> dict[str, int]:
    if item is None or item.kind == "null":
        if enabled:
            faults.append((line, "mig-devices is required where mig-enabled is true; {} for none"))
        return {}
    if item.kind != "map":
        faults.append((item.line, f"mig-devices is a mapping of profiles to counts, not {item.what}"))
        return {}
    if enabled is False and item.pairs:
        faults.append((item.line, "mig-devices must be empty where mig-enabled is false"))
        return {}
    return _counts(item, faults)


def _counts(item: Item, faults: Faults) -> dict[str, int]:
    counts: dict[str, int] = {}
    before = len(faults)
    for name, line, value in item.pairs:
        if parse_name(name) is None:
            faults.append(
                (line, f"{name!r} is not a MIG profile; one looks like 1g.10gb, 1c.3g.40gb or 1g.10gb+me")
            )
        elif value.kind != "scalar" or not _NUMBER.fullmatch(value.text):
            faults.append((value.line, f"{name}: {value.what} is not a count"))
        elif int(value.text):
            counts[name] = int(value.text)
    if item.pairs and not counts and len(faults) == before:
        faults.append((item.line, "mig-devices: all counts are 0"))
    return counts


# From a configuration to the layout of each GPU of this node, with every reason why it isn't possible.

_VGPU_GUEST = 2  # NVML_GPU_VIRTUALIZATION_MODE_VGPU


class DesiredLayout(NamedTuple):
    """The desired layout of one GPU: MIG on or off, and devices by name. `line` is the configuration's."""

    gpu: GpuLayout
    enabled: bool
    profiles: Mapping[str, int]
    line: int


class DesiredLayouts(NamedTuple):
    """All of them, in NVML's order, with notes for the user. `unnamed` are GPUs with MIG without an entry."""

    all: tuple[DesiredLayout, ...]
    notes: tuple[str, ...] = ()
    unnamed: tuple[GpuLayout, ...] = ()


class ImpossibleMigConfig(PreconditionError):
    """The configuration is valid, but not possible on this node; nothing was changed."""

    default_code = "mig-impossible"

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults), hint="list the profiles of the GPUs: gpunode mig list --profiles")
        self.faults = tuple(faults)


def desired_layouts(
    path: str, label: str, entries: Sequence[LayoutEntry], layouts: Layouts, *, mode_only: bool = False
) -> DesiredLayouts:
    """What the entries of one label mean on this node. `ImpossibleMigConfig` with every reason.

    With `mode_only` instances are ignored, so the right to read them isn't needed.

    As in mig-parted, entries are processed in the file's order; of two that match one GPU the later one
    defines its instances, and it is an error if they differ in the mode. Unlike in mig-parted, these are
    errors too: an index that this node doesn't have, entries that match no GPU at all, and MIG on a GPU that
    doesn't support it.
    """
    faults: list[str] = []
    notes: list[str] = []
    result: dict[int, DesiredLayout] = {}
    for entry in entries:
        place = f"{path}:{entry.line}"
        faults += _missing(place, entry, layouts)
        for gpu in _matching_gpus(entry, layouts, place, notes, faults):
            before = result.get(gpu.index)
            if gpu.error and before is not None:
                continue  # report it only once
            if before is not None and before.enabled != entry.enabled:
                mode, other_mode = ("on", "off") if entry.enabled else ("off", "on")
                faults.append(
                    f"{place}: GPU {gpu.index} is to have MIG {mode} and, by line {before.line}, {other_mode}"
                )
            elif before is not None and dict(before.profiles) != dict(entry.profiles):
                notes.append(f"{place}: holds for GPU {gpu.index}, and not line {before.line}")
            result[gpu.index] = DesiredLayout(gpu, entry.enabled, entry.profiles, entry.line)
    if not result and not faults:
        seen = ", ".join(f"GPU {gpu.index} is 0x{gpu.device_id:08X}" for gpu in layouts.gpus) or "it has none"
        faults.append(f"{path}: no entry of {label!r} matches a GPU of this node ({seen})")
    faults += _impossible(path, result, mode_only)
    if faults:
        raise ImpossibleMigConfig(tuple(dict.fromkeys(faults)))
    unnamed = tuple(gpu for gpu in layouts.gpus if gpu.capable and gpu.index not in result)
    return DesiredLayouts(tuple(result[index] for index in sorted(result)), tuple(notes), unnamed)


def _missing(place: str, entry: LayoutEntry, layouts: Layouts) -> list[str]:
    here = {gpu.index for gpu in layouts.gpus}
    count = len(here)
    have = f"this node has {many(count, 'GPU')}, from 0 on" if count else "it has no GPU"
    return [
        f"{place}: GPU {index} does not exist: {have}" for index in entry.devices or () if index not in here
    ]


def _matching_gpus(
    entry: LayoutEntry, layouts: Layouts, place: str, notes: list[str], faults: list[str]
) -> list[GpuLayout]:
    """The GPUs that an entry matches. `devices: all` excludes those without MIG if others have it."""
    gpus = [gpu for gpu in layouts.gpus if entry.selects(gpu)]
    if entry.enabled and entry.devices is None:
        able = [gpu for gpu in gpus if gpu.capable or gpu.error]
        if able:
            notes += [
                f"{place}: GPU {gpu.index} ({gpu.name}) does not support MIG and is left out"
                for gpu in gpus
                if gpu not in able
            ]
            gpus = able
    if not gpus and entry.devices is not None and not _missing(place, entry, layouts):
        faults.append(f"{place}: its device-filter matches none of its devices")
    return gpus


def _impossible(path: str, wishes_by_gpu: Mapping[int, DesiredLayout], mode_only: bool) -> list[str]:
    """Why the desired layouts aren't possible; GPUs with the same reason are listed together."""
    faults: dict[tuple[str, int, str], list[str]] = {}
    for wish in wishes_by_gpu.values():
        reason = _against(wish, mode_only)
        if reason:
            faults.setdefault((wish.gpu.name, wish.line, reason), []).append(str(wish.gpu.index))
    return [
        f"{path}:{line}: GPU {', '.join(numbers)}{f' ({name})' if name else ''} {reason}"
        for (name, line, reason), numbers in faults.items()
    ]


def _against(wish: DesiredLayout, mode_only: bool) -> str:
    gpu = wish.gpu
    if gpu.error:
        return f"can't be queried: {gpu.error}"
    if not gpu.capable:
        return "does not support MIG" if wish.enabled else ""
    changes = wish.enabled != gpu.current or bool(wish.profiles) or bool(gpu.instances)
    if gpu.virtualization == _VGPU_GUEST and changes:
        return "is a virtual GPU: its host controls MIG"
    if mode_only:
        return ""
    if gpu.untold:
        return f"doesn't report its instances: {gpu.untold} (run as root)"
    unknown = unknown_profiles(gpu, wish.profiles) if gpu.profiles else ()
    return f"has no profile {' or '.join(unknown)}; it has {offered(gpu)}" if unknown else ""


# The present layouts as a configuration of mig-parted: one entry per group of GPUs with one layout. Pure.
#
# It matches ``nvidia-mig-parted export`` (v0.15): a GPU without MIG support counts as one with MIG off; the
# mode is the current one; a GPU instance without a compute instance is not a device; filters name device and
# vendor.


def export(layouts: Layouts, label: str = "current") -> dict[str, Any]:
    """The document, with its keys in mig-parted's order."""
    return {"version": "v1", "mig-configs": {label: list(_export_entries(layouts.gpus))}}


def _export_entries(gpus: Sequence[GpuLayout]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[bool, tuple[tuple[str, int], ...]], list[GpuLayout]] = {}
    for gpu in gpus:
        counts: Mapping[str, int] = gpu.devices() if gpu.current else {}
        key = gpu.capable and gpu.current, tuple(sorted(counts.items()))
        groups.setdefault(key, []).append(gpu)
    kinds = {gpu.device_id for gpu in gpus}
    for (enabled, devices), members in groups.items():
        entry: dict[str, Any] = {}
        own = list(dict.fromkeys(gpu.device_id for gpu in members))
        if len(kinds) > 1 and len(groups) > 1:
            filters = [f"0x{number:08X}" for number in own]
            entry["device-filter"] = filters[0] if len(filters) == 1 else filters
        matches = [gpu for gpu in gpus if gpu.device_id in own]
        entry["devices"] = "all" if len(matches) == len(members) else [gpu.index for gpu in members]
        entry["mig-enabled"] = enabled
        entry["mig-devices"] = dict(devices)
        yield entry


def as_json(document: Mapping[str, Any]) -> str:
    """The document as JSON, indented by two as in mig-parted."""
    import json

    return json.dumps(document, indent=2)


def as_yaml(document: Mapping[str, Any]) -> str:
    """The document as YAML, with each list of devices on one line as in mig-parted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes a list of numbers on one line."""

    def numbers(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
        short = bool(values) and all(isinstance(value, int) for value in values)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=short)

    Dumper.add_representer(list, numbers)
    return str(yaml.dump(dict(document), Dumper=Dumper, sort_keys=False, default_flow_style=False))


# Whether a GPU matches a configuration by mig-parted's rules: the mode and the count of devices.


def difference(wish: DesiredLayout, *, mode_only: bool = False) -> str:
    """What differs, as text; empty if nothing does.

    The placements of the instances are ignored, and a GPU instance without a compute instance is not a
    device.
    """
    gpu = wish.gpu
    if gpu.current != wish.enabled:
        desired, now = ("on", "off") if wish.enabled else ("off", "on")
        waits = ", the change waits for a reset" if gpu.pending == wish.enabled else ""
        return f"GPU {gpu.index}: MIG is {now}, wanted is {desired}{waits}"
    if mode_only or not wish.enabled:
        return ""
    have = Counter((gi.profile, ci.slices) for gi in gpu.instances for ci in gi.compute)
    want: Counter[tuple[int, int]] = Counter()
    for name, count in wish.profiles.items():
        match = meaning(gpu, name)
        if match is None:
            return f"GPU {gpu.index}: it has no profile {name}"
        want[match[0].index, match[1]] += count
    if have == want:
        return ""
    has, wants = (summary(devices) or "no MIG device" for devices in (gpu.devices(), wish.profiles))
    return f"GPU {gpu.index}: it has {has}, wanted is {wants}"


def empty_instances(gpu: GpuLayout) -> tuple[int, ...]:
    """Ids of GPU instances without compute instances: they occupy slots, and mig-parted ignores them."""
    return tuple(instance.id for instance in gpu.instances if not instance.compute)
