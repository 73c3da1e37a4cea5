"""`gpunode gpus`: the inventory, as NVML reports it."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from gpunode.commands.session import Session, verb
from gpunode.errors import GpunodeError
from gpunode.gpu.model import Gpu, Inventory, short_uuid
from gpunode.gpu.probe import NvmlProbe, probe
from gpunode.host import Host
from gpunode.output.result import Block, Cell, ErrorInfo, ExitCode, Progress, Result, Style, Table, Text

_NVML_SECONDS = 30.0
_COLUMNS = ("GPU", "NAME", "UUID", "PCI", "MEMORY", "CC", "NUMA", "MIG")


def run(host: Host, progress: Progress) -> Result:
    """List GPUs and MIG devices. `GpunodeError` if NVML doesn't answer; exit 1 if one GPU can't be read."""
    with progress.step("querying NVML"):
        answer = probe(host, _NVML_SECONDS)
    if answer.inventory is None:
        raise explain_failure(answer)
    inventory = answer.inventory
    broken = [gpu for gpu in inventory.gpus if gpu.error]
    page = _blocks(inventory)
    if broken:
        error = ErrorInfo(
            "gpu-unreadable",
            f"{len(broken)} of {len(inventory.gpus)} GPUs can't be read: "
            + "; ".join(f"GPU {gpu.index}: {gpu.error}" for gpu in broken),
            "gpunode doctor; dmesg | grep -i xid",
        )
        return Result("GpuInventory", inventory, "fail", ExitCode.FAILED, (), (error,), page)
    messages = () if inventory.gpus else ("warning: no GPU was found; find out why: gpunode doctor",)
    return Result("GpuInventory", inventory, "warn" if messages else "ok", messages=messages, blocks=page)


def explain_failure(answer: NvmlProbe) -> GpunodeError:
    """Why there is no inventory, and the command that finds the cause."""
    code = f" (NVML {answer.code})" if answer.code is not None else ""
    stable = "nvml-hang" if answer.timed_out else "nvml"
    message = f"the GPUs can't be listed: {answer.message}{code}"
    return GpunodeError(message, hint="find out why: gpunode doctor", code=stable)


def _blocks(inventory: Inventory) -> tuple[Block, ...]:
    driver = f"driver {inventory.driver_version}"
    cuda = f", CUDA up to {inventory.cuda_version}" if inventory.cuda_version else ""
    simulated = " (simulated)" if inventory.simulated else ""
    heading = Text(f"{driver}{cuda}{simulated}", Style.HEADING)
    if not inventory.gpus:
        return (heading,)
    rows = tuple(row for gpu in inventory.gpus for row in _rows(gpu))
    return heading, Table(_COLUMNS, rows)


def _rows(gpu: Gpu) -> Iterator[tuple[Cell | str, ...]]:
    name = Cell(gpu.name or "unreadable", Style.BAD if gpu.error else Style.PLAIN)
    yield (
        str(gpu.index),
        name,
        Cell(gpu.uuid or "-", short=short_uuid(gpu.uuid)),
        gpu.pci or "-",
        _gib(gpu.memory_bytes),
        gpu.compute_capability or "-",
        "-" if gpu.numa is None else str(gpu.numa),
        Cell(_mig_state(gpu), Style.DIM),
    )
    for device in gpu.mig:
        position = f"{gpu.index}:{device.index}"
        uuid = Cell(device.uuid, short=short_uuid(device.uuid))
        yield (position, f"  MIG {device.profile}", uuid, "", _gib(device.memory_bytes), "", "", "")


def _mig_state(gpu: Gpu) -> str:
    """ "-" where the GPU doesn't support MIG, or can't be read."""
    if gpu.error or not (gpu.mig_capable or gpu.mig_enabled):
        return "-"
    if not gpu.mig_enabled:
        return "off"
    return f"{len(gpu.mig)} devices" if gpu.mig else "on, empty"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size else "-"


# `gpunode gpus`.

gpus_app = typer.Typer(rich_markup_mode=None)


@verb(gpus_app, "gpus", "GpuInventory")
def gpus(session: Session) -> Result:
    """List the GPUs and MIG devices. NVML, the driver's library, reports them.

    gpunode gpus -o json
    """
    return run(session.host, session.progress)
