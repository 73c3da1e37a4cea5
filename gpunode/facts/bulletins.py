"""Security bulletins of NVIDIA's, against what is installed: which holes a release still has.

A bulletin is a row of tables/driver_cves.json or tables/toolkit_cves.json, newest first. What was published
after a table's date isn't in it: nothing here says that a release has no hole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunode.facts.driver import version_numbers
from gpunode.facts.toolkit_settings import MODE, RUNTIMES, Settings
from gpunode.host import Host
from gpunode.tables import numbers, table

DRIVER, TOOLKIT = "driver_cves", "toolkit_cves"
Bulletin = Mapping[str, Any]


def name_of(bulletin: Bulletin) -> str:
    """For people."""
    return f"NVIDIA's security bulletin {bulletin['bulletin']} of {bulletin['published']}"


def driver_bulletins(version: str) -> tuple[tuple[Bulletin, str], ...]:
    """Those with a fix for this driver's own branch that it hasn't, each with the release that has it."""
    here = version_numbers(version)
    found = []
    for bulletin in table(DRIVER).rows:
        for fixed in bulletin["fixed"]:
            release = version_numbers(fixed)
            if release[:1] == here[:1] and here < release:
                found.append((bulletin, str(fixed)))
    return tuple(found)


def toolkit_bulletins(host: Host, version: tuple[int, ...], settings: Settings) -> tuple[Bulletin, ...]:
    """Those whose hole this release has, as it is set up here."""
    return tuple(row for row in table(TOOLKIT).rows if _concerns(row, host, version, settings))


def _concerns(row: Bulletin, host: Host, version: tuple[int, ...], settings: Settings) -> bool:
    by_cdi = settings.value(MODE) == "cdi"
    if version >= numbers(row["fixed"]) or (row["not_by_cdi"] and by_cdi):
        return False
    if row["cdi_only_below"] and version < numbers(row["cdi_only_below"]) and not by_cdi:
        return False
    if row["mitigation"] and settings.value(row["mitigation"]) is True:
        return False
    return not row["not_with"] or _low_level(host, settings) != row["not_with"]


def _low_level(host: Host, settings: Settings) -> str:
    """The first low-level runtime of the list that is on this node: the toolkit takes that one."""
    names = [str(one) for one in settings.value(RUNTIMES)]
    here = (one for one in names if host.executable(one) or host.which(one))
    return next(here, names[0]).rpartition("/")[2]
