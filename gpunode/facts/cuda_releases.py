"""CUDA releases: which driver runs them and which GPUs they make code for, from the tables."""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.facts.driver import version_numbers
from gpunode.tables import table

DRIVERS = "cuda_drivers"
CAPABILITIES = "compute_capabilities"
_RELEASE = re.compile(r"(\d{1,3})\.(\d{1,3})(?:\.[\w.+-]*)?", re.ASCII)


def release_of(text: str) -> tuple[int, int] | None:
    """``12.8`` and ``12.8.1`` as (12, 8); None for what is no release."""
    found = _RELEASE.fullmatch(text.strip())
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class Release:
    """`minimum` is the oldest driver that runs the release's programs, `own` the one that came with it and is
    the oldest that compiles its PTX."""

    cuda: str
    minimum: str
    own: str

    def runs_on(self, driver: str) -> bool:
        return version_numbers(driver) >= version_numbers(self.minimum)


def release(wanted: tuple[int, int]) -> Release | None:
    """What the table has of a release; a point release that it lacks is judged as the newest before it of the
    same major one. None for a major one that it doesn't know."""
    best: tuple[tuple[int, int], Release] | None = None
    for row in table(DRIVERS).rows:
        known = release_of(row["cuda"])
        if known is None or known[0] != wanted[0] or known > wanted:
            continue
        if best is None or known > best[0]:
            best = known, Release(row["cuda"], row["minimum"], row["own"])
    return best[1] if best else None


def runs(wanted: tuple[int, int], driver: str, offered: tuple[int, int] | None) -> tuple[bool | None, str]:
    """Whether programs of a release run on a driver that offers the CUDA `offered`, None if that can't be
    told, and which driver they need. Of a release that the table doesn't know only this much is sure: it runs
    on a driver of its own or a later CUDA, and on none of an earlier major one."""
    known = release(wanted)
    if known is not None:
        return known.runs_on(driver), f"driver {known.minimum} or later"
    if offered is None or (wanted > offered and wanted[0] == offered[0]):
        return None, ""
    return wanted <= offered, f"a driver of CUDA {wanted[0]}"


def newest_of(driver: str) -> tuple[int, int] | None:
    """The newest release whose own driver is this one or older: what the driver itself calls its CUDA."""
    here = version_numbers(driver)
    known = (release_of(row["cuda"]) for row in table(DRIVERS).rows if version_numbers(row["own"]) <= here)
    return max(filter(None, known), default=None)


def makes_code_for(wanted: tuple[int, int], capability: str) -> str:
    """Whether a release makes code for GPUs of a compute capability: yes, too-early, dropped or unknown."""
    for row in table(CAPABILITIES).rows:
        if row["capability"] == capability:
            first, last = release_of(row["first"]), release_of(row["last"])
            if first is not None and wanted < first:
                return "too-early"
            return "dropped" if last is not None and wanted > last else "yes"
    return "unknown"


def first_for(capability: str) -> str:
    """The first release that makes code for such GPUs; empty if the table doesn't know."""
    rows = (row["first"] for row in table(CAPABILITIES).rows if row["capability"] == capability)
    return next(rows, "")


def last_for(capability: str) -> str:
    """The last release that makes code for such GPUs; empty if there is none or the table doesn't know."""
    rows = (row["last"] for row in table(CAPABILITIES).rows if row["capability"] == capability)
    return next(rows, "")
