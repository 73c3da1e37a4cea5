"""mig-parted's configuration file, version v1: labels, and for each what every GPU is to be cut into.

Read as NVIDIA's mig-parted reads it (its v0.15), but that all faults are told at once, each with its line,
and that what it passes over in silence is a fault here: a filter that can't match anything, a key that stands
twice. Untrusted input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError, UsageError
from gpunode.facts.yaml_tree import DocumentError, Item, Notes, read
from gpunode.mig.profiles import parse_name

VERSION = "v1"
_TOP = ("version", "mig-configs")
_ENTRY = ("devices", "device-filter", "mig-enabled", "mig-devices")
_TRUE = frozenset({"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE = frozenset({"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})
_NUMBER = re.compile(r"0|[1-9]\d{0,5}", re.ASCII)
_FILTER = re.compile(r"0[xX]([0-9a-fA-F]{1,8})(?::0[xX]([0-9a-fA-F]{1,8}))?")
_MOST_SHOWN = 10


@dataclass(frozen=True)
class Filter:
    """PCI device above vendor as NVML packs them, 0x20B010DE; `subsystem` likewise, None if not asked."""

    device: int
    subsystem: int | None = None

    def matches(self, device: int, subsystem: int) -> bool:
        """Whether a GPU with these ids is meant."""
        return self.device == device and self.subsystem in (None, subsystem)


@dataclass(frozen=True)
class Entry:
    """What some GPUs are to be. `filters` are alternatives, none is every GPU; `devices` are NVML's indices,
    None is all. `profiles` are counts by name, as written; counts of zero are left out."""

    line: int
    enabled: bool
    profiles: Mapping[str, int]
    filters: tuple[Filter, ...] = ()
    devices: tuple[int, ...] | None = None

    def selects(self, index: int, device: int, subsystem: int) -> bool:
        """Whether the GPU of that index and those ids is meant."""
        listed = self.devices is None or index in self.devices
        return listed and (not self.filters or any(one.matches(device, subsystem) for one in self.filters))


@dataclass(frozen=True)
class MigConfig:
    """A whole file. `path` is for messages."""

    path: str
    labels: Mapping[str, tuple[Entry, ...]]

    def select(self, label: str) -> tuple[str, tuple[Entry, ...]]:
        """The label and its entries; an empty one is the only one there is.

        `UsageError` if there are several, or none of that name.
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
    """A file with one fault or more; `faults` are (line, what), line 0 for the file as a whole."""

    default_code = "mig-config"

    def __init__(self, path: str, faults: Sequence[tuple[int, str]]) -> None:
        shown = [f"{path}:{line}: {what}" if line else f"{path}: {what}" for line, what in faults]
        more = len(shown) - _MOST_SHOWN
        told = shown[:_MOST_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        super().__init__(
            "; ".join(told), hint="the form is mig-parted's, version v1; gpunode's docs/mig.md describes it"
        )
        self.faults = tuple(faults)


def parse(data: bytes, path: str) -> MigConfig:
    """The file's labels. `InvalidMigConfig` with everything that is wrong with it."""
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


def _labels(root: Item, faults: Faults) -> dict[str, tuple[Entry, ...]]:
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


def _entries(label: str, line: int, item: Item, faults: Faults) -> Iterator[Entry]:
    if item.kind != "list" or not item.items:
        what = "an empty list" if item.kind == "list" else item.what
        faults.append((line, f"{label}: at least one entry is required, found {what}"))
        return
    for one in item.items:
        if one.kind != "map":
            faults.append(
                (one.line, f"{label}: an entry is a mapping with {', '.join(_ENTRY)}, not {one.what}")
            )
            continue
        before = len(faults)
        entry = _entry(one, faults)
        if len(faults) == before:
            yield entry


def _entry(item: Item, faults: Faults) -> Entry:
    fields = _fields(item, _ENTRY, faults)
    enabled = _enabled(item.line, fields.get("mig-enabled"), faults)
    return Entry(
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
    wrong = [one for one in item.items if one.kind != "scalar" or not _NUMBER.fullmatch(one.text)]
    faults += [(one.line, f"devices: {one.what} is no index of a GPU") for one in wrong]
    return None if wrong else tuple(dict.fromkeys(int(one.text) for one in item.items))


def _filters(item: Item | None, faults: Faults) -> Iterator[Filter]:
    if item is None or item.kind == "null":
        return
    for one in item.items if item.kind == "list" else (item,):
        if one.kind == "scalar" and not one.text:
            continue  # as mig-parted has it: every GPU
        found = _FILTER.fullmatch(one.text) if one.kind == "scalar" else None
        if found is None:
            form = '"0x20B010DE" (PCI device, vendor), or "0x20B010DE:0x134F10DE" with the subsystem'
            faults.append((one.line, f"device-filter: {one.what} is none; its form is {form}"))
        else:
            yield Filter(int(found[1], 16), int(found[2], 16) if found[2] else None)


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
                (line, f"{name!r} is no MIG profile; one looks like 1g.10gb, 1c.3g.40gb or 1g.10gb+me")
            )
        elif value.kind != "scalar" or not _NUMBER.fullmatch(value.text):
            faults.append((value.line, f"{name}: {value.what} is no count"))
        elif int(value.text):
            counts[name] = int(value.text)
    if item.pairs and not counts and len(faults) == before:
        faults.append((item.line, "mig-devices: all counts are 0"))
    return counts
