"""Reading sysfs of AMD's drivers: what isn't there, is closed or makes no sense reads as nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpunode.errors import GpunodeError
from gpunode.host import Host

DRIVER = "/sys/module/amdgpu/drivers/pci:amdgpu"
KFD = "/sys/class/kfd/kfd/topology"
PLATFORM = "/sys/devices/platform"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NUMBER = re.compile(r"-?[0-9]{1,20}")
_IDS = ("/usr/share/libdrm/amdgpu.ids", "/opt/amdgpu/share/libdrm/amdgpu.ids")
Place = tuple[int, int, int]
"""Domain, bus and device of a PCI address."""


def parse_properties(text: str) -> dict[str, int]:
    """KFD's ``name number`` lines; what is no such line is passed over. Pure."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = number_of(value)
        if name and number is not None:
            found[name] = number
    return found


class ProductNames:
    """Product names: the board's own, else libdrm's list, else the device id."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._ids: dict[tuple[str, str], str] | None = None

    def of(self, at: str) -> str:
        told = text_of(self._host, f"{at}/product_name")
        if told:
            return told
        device, revision = (
            text_of(self._host, f"{at}/{name}").removeprefix("0x").lower() for name in ("device", "revision")
        )
        if self._ids is None:
            self._ids = parse_ids("\n".join(text_of(self._host, path) for path in _IDS))
        return self._ids.get((device, revision)) or f"AMD GPU {device or 'of unknown model'}"


def parse_ids(text: str) -> dict[tuple[str, str], str]:
    """libdrm's amdgpu.ids: device id, revision, name. Pure."""
    rows = (line.split(",", 2) for line in text.splitlines() if not line.startswith("#"))
    return {(row[0].strip().lower(), row[1].strip().lower()): row[2].strip() for row in rows if len(row) == 3}


def addresses(host: Host) -> tuple[str, ...]:
    return tuple(matching(host, DRIVER, _ADDRESS))


def matching(host: Host, directory: str, pattern: re.Pattern[str]) -> Iterator[str]:
    return (name for name in listed(host, directory) if pattern.fullmatch(name))


def listed(host: Host, directory: str) -> tuple[str, ...]:
    """Names, none if the directory can't be read; numbers in their order."""
    try:
        names = host.listdir(directory)
    except GpunodeError:
        return ()
    return tuple(sorted(names, key=lambda name: (int(name) if name.isdecimal() else -1, name)))


def text_of(host: Host, path: str) -> str:
    """A file's text, empty if there is none or it can't be read now, as sysfs has it for much."""
    try:
        return (host.read_text(path) or "").strip()
    except GpunodeError:
        return ""


def number_of(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def place_of(address: str) -> Place:
    domain, bus, rest = address.split(":")
    return int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)
