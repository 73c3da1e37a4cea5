"""Selectors: how a person names GPUs and partitions in `include`, `exclude` and `devices`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from gpunode.pattern import pattern
from gpunode.plugin.model import Unit
from gpunode.plugin.naming import glob_matches
from gpunode.plugin.settings import Settings

Matcher = Callable[[Unit], bool]
_INDEX = pattern(r"\d{1,6}(:\d{1,6})?", re.ASCII)
_PCI = pattern(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.ASCII | re.IGNORECASE)


def matcher(selector: str) -> Matcher:
    """What a selector means. One that names a GPU means all its partitions, too.

    An index (``0``, ``0:1`` for a MIG device), a UUID in any case, a PCI address in any spelling
    (``0000:3b:00.0``, ``00000000:3B:00.0``, ``3b:00.0``; ``10:00`` alone is a MIG device), or else a glob of
    the product's name or the partition's profile.
    """
    text = selector.strip()
    if _INDEX.fullmatch(text):
        wanted = tuple(int(part) for part in text.split(":"))
        return lambda unit: unit.order[: len(wanted)] == wanted
    address = pci_numbers(text)
    if address is not None:
        return lambda unit: pci_numbers(unit.pci) == address
    folded = text.casefold()

    def by_name(unit: Unit) -> bool:
        return (
            folded in (unit.id.casefold(), unit.gpu.casefold())
            or glob_matches(text, unit.name)
            or (unit.profile != "" and glob_matches(text, unit.profile))
        )

    return by_name


def pci_numbers(address: str) -> tuple[int, int, int, int] | None:
    """Domain, bus, device and function of a PCI address; None for what is none."""
    found = _PCI.fullmatch(address)
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return int(domain or "0", 16), int(bus, 16), int(device, 16), int(function or "0")


def unmatched(selectors: Iterable[str], units: Sequence[Unit]) -> tuple[str, ...]:
    """Those selectors that name nothing: a typing error, or a GPU that isn't there now."""
    return tuple(one for one in selectors if not any(map(matcher(one), units)))


def deselected(settings: Settings, units: Sequence[Unit]) -> tuple[dict[str, str], list[str]]:
    """Why a unit is not advertised, by its id, for those that `include` and `exclude` take away; and which
    selectors name nothing."""
    warnings = [
        f"{option}: this node has no GPU {selector}"
        for option, selectors in (("include", settings.include), ("exclude", settings.exclude))
        for selector in unmatched(selectors, units)
    ]
    include = [matcher(selector) for selector in settings.include]
    exclude = [matcher(selector) for selector in settings.exclude]
    reasons = {}
    for unit in units:
        if include and not any(test(unit) for test in include):
            reasons[unit.id] = "include doesn't name it"
        elif any(test(unit) for test in exclude):
            reasons[unit.id] = "exclude names it"
    return reasons, warnings
