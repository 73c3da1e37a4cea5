"""NVIDIA's security bulletins against installed releases: which vulnerabilities a release still has.

A bulletin is a row of tables/driver_cves.json or tables/toolkit_cves.json, newest first. A table doesn't
contain later bulletins: nothing here says that a release has no vulnerability.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpunode.facts.driver import branch, version_numbers
from gpunode.facts.tables import numbers, table
from gpunode.facts.toolkit import MODE, RUNTIMES, ToolkitSettings
from gpunode.host import Host

DRIVER, TOOLKIT = "driver_cves", "toolkit_cves"
Bulletin = Mapping[str, Any]


def maintained_branches() -> tuple[int, ...]:
    """Branches that the last bulletin has a fix for, the newest first."""
    return tuple(sorted({branch(version) for version in _last_bulletin()["fixed"]}, reverse=True))


def _last_bulletin() -> Bulletin:
    rows: tuple[Bulletin, ...] = table(DRIVER).rows
    return max(rows, key=lambda row: str(row["published"]))


def end_of_life(number: int) -> Bulletin | None:
    """The last known bulletin, if it has no fix for this driver branch but for newer ones; else None."""
    branches = maintained_branches()
    return None if number in branches or number > max(branches, default=0) else _last_bulletin()


def title(bulletin: Bulletin) -> str:
    """Text for users."""
    return f"NVIDIA's security bulletin {bulletin['bulletin']} of {bulletin['published']}"


def driver_bulletins(version: str) -> tuple[tuple[Bulletin, str], ...]:
    """Bulletins with a fix in this driver's own branch that it lacks, each with the release that has it."""
    here = version_numbers(version)
    bulletins = []
    for bulletin in table(DRIVER).rows:
        for fixed in bulletin["fixed"]:
            release = version_numbers(fixed)
            if release[:1] == here[:1] and here < release:
                bulletins.append((bulletin, str(fixed)))
    return tuple(bulletins)


def toolkit_bulletins(
    host: Host, version: tuple[int, ...], settings: ToolkitSettings
) -> tuple[Bulletin, ...]:
    """Bulletins with a vulnerability that this release has, as it is configured here."""
    return tuple(row for row in table(TOOLKIT).rows if _concerns(row, host, version, settings))


def _concerns(row: Bulletin, host: Host, version: tuple[int, ...], settings: ToolkitSettings) -> bool:
    by_cdi = settings.value(MODE) == "cdi"
    if version >= numbers(row["fixed"]) or (row["not_by_cdi"] and by_cdi):
        return False
    if row["cdi_only_below"] and version < numbers(row["cdi_only_below"]) and not by_cdi:
        return False
    if row["mitigation"] and settings.value(row["mitigation"]) is True:
        return False
    return not row["not_with"] or _low_level(host, settings) != row["not_with"]


def _low_level(host: Host, settings: ToolkitSettings) -> str:
    """The first low-level runtime of the list that exists on this node: the toolkit uses that one."""
    names = [str(element) for element in settings.value(RUNTIMES)]
    here = (name for name in names if host.executable(name) or host.which(name))
    return next(here, names[0]).rpartition("/")[2]
