"""A GPU that was seen once stays known: lost or unreadable it is still listed, with the reason. Pure."""

from __future__ import annotations

from gpunode.dataclass import replace
from gpunode.gpu.model import Gpu, Inventory

NOT_LISTED = "lost: the driver does not list it any more"


def remembered(now: Inventory, before: Inventory | None) -> Inventory:
    """`now`, with what `before` knows of GPUs that can't be read or aren't listed, ordered by index.

    A GPU off the bus may be listed without its UUID; its PCI address, or else its index if nothing else has
    that UUID now, still tells which it was. Such a GPU keeps its old description, MIG devices included, and
    has `error` set. What a sound GPU says replaces what it said before.
    """
    if before is None:
        return now
    whole = {gpu.uuid for gpu in now.gpus if gpu.uuid}
    gone = {gpu.uuid: gpu for gpu in before.gpus if gpu.uuid and gpu.uuid not in whole}
    described = {gpu.uuid: gpu for gpu in before.gpus if gpu.uuid}
    gpus = []
    for gpu in now.gpus:
        if gpu.error and gpu.uuid in described:
            gpus.append(_filled(described[gpu.uuid], gpu))
        elif gpu.uuid:
            gpus.append(gpu)
        else:
            old = _recognised(gpu, gone)
            gpus.append(gpu if old is None else replace(gone.pop(old.uuid), error=gpu.error or NOT_LISTED))
    gpus += [replace(gpu, error=gpu.error or NOT_LISTED) for gpu in gone.values()]
    return replace(now, gpus=tuple(sorted(gpus, key=lambda gpu: (gpu.index, gpu.uuid))))


def _filled(old: Gpu, now: Gpu) -> Gpu:
    """The old description of a GPU that can't be read whole now; what it didn't have is taken from `now`."""
    return replace(
        old,
        index=now.index,
        error=now.error,
        name=old.name or now.name,
        pci=old.pci or now.pci,
        minor=old.minor if old.minor is not None else now.minor,
        memory_bytes=old.memory_bytes or now.memory_bytes,
        compute_capability=old.compute_capability or now.compute_capability,
        numa=old.numa if old.numa is not None else now.numa,
    )


def _recognised(unreadable: Gpu, gone: dict[str, Gpu]) -> Gpu | None:
    same_place = [gpu for gpu in gone.values() if unreadable.pci and gpu.pci == unreadable.pci]
    same_index = [gpu for gpu in gone.values() if not unreadable.pci and gpu.index == unreadable.index]
    return next(iter(same_place or same_index), None)
