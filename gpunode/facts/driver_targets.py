"""Drivers that support a GPU, the one that a node's GPUs need, and its source.

A driver supports GPUs by its branch and by the kind of its kernel module. It refuses others
(`rm_is_supported_device` in the open modules' nv-pci.c), so a GPU that it controls is supported, regardless
of the table.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from gpunode.facts.driver import branch
from gpunode.facts.pci import PciGpu
from gpunode.facts.tables import table
from gpunode.host import Host

GPU_BRANCHES = "gpu_branches"
DROPPED, TOO_NEW, FLAVOUR = "dropped", "too-new", "flavour"
LONG_TERM = 580  # what Ubuntu has for all its releases, and the last branch for GPUs before Turing
REPOSITORY = "developer.download.nvidia.com/compute/cuda/repos"
RUN_INSTALLER = "/usr/bin/nvidia-uninstall"
_REPOSITORY_DIRECTORIES = ("/etc/apt/sources.list.d", "/etc/yum.repos.d", "/etc/zypp/repos.d")


class GpuSupport(NamedTuple):
    """A row of the table: branches are whole numbers, 0 for no limit; `module` is open, proprietary or empty
    for both."""

    name: str
    min: int
    max: int
    module: str


class UnsupportedGpu(NamedTuple):
    """A GPU that this driver doesn't support, and why: `DROPPED`, `TOO_NEW` or `FLAVOUR`."""

    gpu: PciGpu
    supports: GpuSupport
    reason: str


def supports(device_id: str) -> GpuSupport | None:
    """Drivers that support a GPU of this PCI device id (``0x2330``); None if it is not in the table."""
    try:
        number = int(device_id, 16)
    except ValueError:
        return None
    for row in table(GPU_BRANCHES).rows:
        if int(row["first"], 16) <= number <= int(row["last"], 16):
            return GpuSupport(row["name"], row["min"], row["max"], row["module"])
    return None


def unsupported_gpus(
    gpus: tuple[PciGpu, ...], version: str, open_module: bool | None, unused: Container[str] = ()
) -> Iterator[UnsupportedGpu]:
    """GPUs that a driver of this version, with an open module or not, doesn't support: those without a
    driver, and those of `unused`, by address, which it failed to initialise. `open_module` is None if
    unknown."""
    for gpu in gpus:
        row = supports(gpu.device_id) if gpu.driver is None or gpu.address in unused else None
        reason = refusal(row, branch(version), open_module) if row else ""
        if row and reason:
            yield UnsupportedGpu(gpu, row, reason)


def refusal(row: GpuSupport, number: int, open_module: bool | None) -> str:
    """Why a driver of this branch doesn't support such a GPU; empty if it does, or for branch 0."""
    if row.max and number > row.max:
        return DROPPED
    if 0 < number < row.min:
        return TOO_NEW
    flavour = {True: "proprietary", False: "open", None: ""}[open_module]
    return FLAVOUR if number and flavour and row.module == flavour else ""


def computing(gpus: tuple[PciGpu, ...]) -> tuple[PciGpu, ...]:
    """GPUs that need the driver: a display card doesn't count beside GPUs that compute."""
    compute_gpus = tuple(gpu for gpu in gpus if not gpu.for_vms)
    return tuple(gpu for gpu in compute_gpus if not gpu.display) or compute_gpus


def last_branch(gpus: tuple[PciGpu, ...]) -> int:
    """The last branch that supports the GPUs; 0 for no limit. An old GPU doesn't count if another one needs a
    driver that doesn't support it."""
    rows = [row for gpu in computing(gpus) if (row := supports(gpu.device_id))]
    limits = [row.max for row in rows if row.max]
    last = min(limits, default=0)
    alone = any(row.module == "open" or row.min > last for row in rows)
    return 0 if alone else last


def module_for_gpus(gpus: tuple[PciGpu, ...]) -> str:
    """The only kernel module that supports them: open, proprietary, or empty for either."""
    if last_branch(gpus):
        return "proprietary"
    rows = (supports(gpu.device_id) for gpu in gpus if not gpu.for_vms)
    return "open" if any(row is not None and row.module == "open" for row in rows) else ""


def has_repository(host: Host) -> bool:
    """Whether NVIDIA's repository is among this node's."""
    return any(REPOSITORY in line for line in repository_lines(host))


def repository_lines(host: Host) -> tuple[str, ...]:
    """All lines of the package manager's repository files; files that this user can't read are left out."""
    lines: list[str] = []
    for directory in _REPOSITORY_DIRECTORIES:
        for path in host.glob(directory, "*"):
            lines += host.text_or_empty(path).splitlines()
    return tuple(lines)
