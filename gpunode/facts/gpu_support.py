"""Which GPUs a driver drives: by the branch it belongs to and by the kind of its kernel module.

The driver refuses others when it is offered them (`rm_is_supported_device` in the open modules' nv-pci.c), so
that a GPU which it has taken is supported, whatever the table says.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.facts.driver import version_numbers
from gpunode.facts.pci import PciGpu
from gpunode.tables import table

TABLE = "gpu_branches"
DROPPED, TOO_NEW, FLAVOUR = "dropped", "too-new", "flavour"


@dataclass(frozen=True)
class Supports:
    """A row of the table: branches are whole numbers, 0 for no limit; `module` is open, proprietary or empty
    for both."""

    name: str
    min: int
    max: int
    module: str


@dataclass(frozen=True)
class Unsuited:
    """A GPU that this driver doesn't take, and why: `DROPPED`, `TOO_NEW` or `FLAVOUR`."""

    gpu: PciGpu
    supports: Supports
    reason: str


def supports(device_id: str) -> Supports | None:
    """What drives a GPU of this PCI device id (``0x2330``); None for one that the table doesn't know."""
    try:
        number = int(device_id, 16)
    except ValueError:
        return None
    for row in table(TABLE).rows:
        if int(row["first"], 16) <= number <= int(row["last"], 16):
            return Supports(row["name"], row["min"], row["max"], row["module"])
    return None


def branch(version: str) -> int:
    """580 of ``580.159.03``; 0 if it can't be told."""
    return next(iter(version_numbers(version)), 0)


def unsuited(
    gpus: tuple[PciGpu, ...], version: str, opened: bool | None, unused: Container[str] = ()
) -> Iterator[Unsuited]:
    """GPUs that a driver of this version, with an open module or not, doesn't support: those without a
    driver, and those of `unused`, by address, which it failed to initialise. `opened` is None if unknown."""
    for gpu in gpus:
        row = supports(gpu.device_id) if gpu.driver is None or gpu.address in unused else None
        reason = refusal(row, branch(version), opened) if row else ""
        if row and reason:
            yield Unsuited(gpu, row, reason)


def refusal(row: Supports, number: int, opened: bool | None) -> str:
    """Why a driver of this branch doesn't take such a GPU; empty if it does, or for branch 0."""
    if row.max and number > row.max:
        return DROPPED
    if 0 < number < row.min:
        return TOO_NEW
    flavour = {True: "proprietary", False: "open", None: ""}[opened]
    return FLAVOUR if number and flavour and row.module == flavour else ""


@dataclass(frozen=True)
class Bulletin:
    """A security bulletin for drivers: its number, its date, and the branches that it has a fix for."""

    number: int
    published: str
    branches: tuple[int, ...]


def kept() -> tuple[int, ...]:
    """Branches that the last bulletin has a fix for, the newest first."""
    return tuple(sorted({branch(version) for version in _last_bulletin()["fixed"]}, reverse=True))


def _last_bulletin() -> Mapping[str, Any]:
    return max(table("driver_cves").rows, key=lambda row: str(row["published"]))


def ended(number: int) -> Bulletin | None:
    """The last bulletin that we know, if it passes this driver branch over and has newer ones; else None."""
    last = _last_bulletin()
    branches = kept()
    if number in branches or number > max(branches, default=0):
        return None
    return Bulletin(last["bulletin"], last["published"], branches)
