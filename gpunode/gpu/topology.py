"""How the GPUs of a node hang together, from an open NVML: common ancestors, NVLinks and links to NVSwitches.

One GPU that can't be asked costs its own pairs only. Runs in the process that has NVML, never in the one that
serves; ask again when the inventory has changed, as links come and go with GPUs and their drivers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Set
from itertools import combinations

from gpunode.gpu.model import Inventory, Pair, Topology
from gpunode.gpu.nvml import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    Handle,
    Nvml,
    NvmlError,
    sysfs_address,
)

_MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS of 2025's nvml.h; a GPU says which is its last by INVALID_ARGUMENT
_NPU, _SWITCH = 1, 2  # nvmlIntNvLinkDeviceType_t; an NPU is a processor, no GPU
_NO_SUCH_LINK = (INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND)


class _Links:
    """Active links of one GPU: to each PCI address, and to what can't be a GPU of this node."""

    def __init__(self) -> None:
        self.to: Counter[str] = Counter()
        self.switch = 0


def read_topology(
    nvml: Nvml,
    inventory: Inventory,
    seconds: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    skip: Collection[int] = (),
) -> Topology:
    """Pairs of all readable GPUs but those whose index is in `skip`, and their links to switches.

    Never raises for a GPU.

    What isn't read within `seconds` is left out, from the links on: then ancestors alone tell what is near.
    """
    until = clock() + seconds
    handles = _handles(nvml, inventory, skip)
    levels = {
        pair: _level(nvml, handles[pair[0]], handles[pair[1]]) if clock() < until else None
        for pair in combinations(sorted(handles), 2)
    }
    pci = {gpu.uuid: gpu.pci for gpu in inventory.gpus}
    places = frozenset(gpu.pci for gpu in inventory.gpus if gpu.pci)  # lost ones too: they are no switches
    links = {
        uuid: _links(nvml, handle, places) if clock() < until else _Links()
        for uuid, handle in handles.items()
    }
    pairs = tuple(
        Pair(a, b, level, min(links[a].to[pci[b]], links[b].to[pci[a]])) for (a, b), level in levels.items()
    )
    return Topology(pairs, {uuid: found.switch for uuid, found in links.items() if found.switch})


def _handles(nvml: Nvml, inventory: Inventory, skip: Collection[int]) -> dict[str, Handle]:
    found = {}
    for gpu in inventory.gpus:
        if gpu.uuid and not gpu.error and gpu.index not in skip:
            try:
                found[gpu.uuid] = nvml.handle(gpu.index)
            except NvmlError:
                continue  # lost since it was listed; the next inventory says so
    return found


def _level(nvml: Nvml, first: Handle, second: Handle) -> int | None:
    try:
        return nvml.common_ancestor(first, second)
    except NvmlError:
        return None


def _links(nvml: Nvml, gpu: Handle, places: Set[str]) -> _Links:
    """A GPU that fails in between keeps none: half of its links would rank it wrongly."""
    found = _Links()
    for link in range(_MOST_LINKS):
        try:
            if not int(nvml.call("nvmlDeviceGetNvLinkState", gpu, link)):
                continue
            _count(nvml, gpu, link, places, found)
        except NvmlError as error:
            if error.code == INVALID_ARGUMENT:
                break
            if error.code not in _NO_SUCH_LINK:
                return _Links()
    return found


def _count(nvml: Nvml, gpu: Handle, link: int, places: Set[str], found: _Links) -> None:
    try:
        kind = int(nvml.call("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link))
    except NvmlError:
        kind = -1  # drivers before 460 don't tell; the address does
    if kind == _NPU:
        return
    if kind == _SWITCH:
        found.switch += 1
        return
    address = sysfs_address(nvml.call("nvmlDeviceGetNvLinkRemotePciInfo", gpu, link).busId)
    if address in places:
        found.to[address] += 1
    else:
        found.switch += 1
