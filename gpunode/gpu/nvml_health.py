"""NVML's report of one GPU's health, settings and use: the doctor's input for its checks of GPUs.

Every item is None where this GPU or its driver doesn't report it, or this user lacks the rights. The words
are nvml.h's own, spelled with hyphens. `read_conditions` queries NVML; a recording has the same under
``nvml.conditions``.

As a child process it answers ``{"inventory": {...}}``, as `gpunode gpus -o json` has it under `data`, or
``{"error": {"code": 18, "message": "..."}}``. With the option `conditions` it then answers ``{"condition":
{"index": 0, ...}}`` for each GPU as soon as it is known, so that a hang or crash keeps the earlier answers,
and ``{"done": true}`` at the end.
"""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gpunode.gpu.child import Parent
from gpunode.gpu.inventory import discover
from gpunode.gpu.model import GPU_IS_LOST, Gpu, Inventory, Reading
from gpunode.gpu.nvml import (
    CORRUPTED_INFOROM,
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    MOST_LINKS,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    TIMEOUT,
    Fabric,
    Handle,
    Nvml,
    NvmlError,
    Queries,
    name_at,
)
from gpunode.output.typed import PlainError, from_plain, plain

_INDEX = re.compile(r"[0-9]{1,5}")

COMPUTE_MODES = ("default", "exclusive-thread", "prohibited", "exclusive-process")
"""NVML_COMPUTEMODE_* from 0 on."""

VIRTUALIZATION = ("none", "passthrough", "vgpu", "host-vgpu", "host-vsga")
"""NVML_GPU_VIRTUALIZATION_MODE_* from 0 on; vgpu is a virtual GPU as its guest sees it."""

SLOWDOWNS = {0x8: "hw-slowdown", 0x20: "sw-thermal", 0x40: "hw-thermal", 0x80: "hw-power-brake"}
"""Bits of nvmlClocksEventReasons that say that something holds a GPU back. Idle clocks, chosen clocks, the
power cap and the like are no such reason."""


class GpuProcess(NamedTuple):
    """A process on a GPU: its number in this process's PID namespace, 0 if it isn't visible there."""

    pid: int
    graphics: bool = False
    memory_bytes: int | None = None


class Licence(NamedTuple):
    """Licensing of a virtual GPU: `supported` is whether it needs a licence, `licensed` whether one of its
    features has one."""

    supported: bool | None = None
    licensed: bool | None = None
    products: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Condition:
    """One GPU. `index`, `uuid` and `pci` are those of the inventory's `Gpu`.

    `error` is NVML's error if the GPU can't be queried, `error_code` its return code. Temperatures are in
    degrees Celsius, power in milliwatts, memory in bytes. `remapped` and `retired` count memory rows and
    pages that were disabled because of uncorrectable errors, `retired_pages` those of either cause.
    `ecc_mode`, `mig_mode`: on or off now, with `_next` after the next reset. `slowdowns` are the `SLOWDOWNS`
    that were active in two samples. `nvlinks` are the states of links 0, 1, ... `cc_enabled` and `cc_ready`
    are the whole node's: confidential computing, and whether its GPUs accept work.
    """

    index: int = 0
    uuid: str = ""
    pci: str = ""
    error: str = ""
    error_code: int | None = None
    reading: Reading = field(default_factory=lambda: Reading(""))
    sram_threshold_exceeded: bool | None = None
    remapped: int | None = None
    retired: int | None = None
    retired_pages: int | None = None
    channel_repair_pending: bool | None = None
    tpc_repair_pending: bool | None = None
    inforom_valid: bool | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    ecc_mode: bool | None = None
    ecc_mode_next: bool | None = None
    mig_mode: bool | None = None
    mig_mode_next: bool | None = None
    virtualization: str | None = None
    slowdowns: tuple[str, ...] | None = None
    temperature: int | None = None
    temperature_slowdown: int | None = None
    power_limit: int | None = None
    power_limit_default: int | None = None
    nvlinks: tuple[bool, ...] | None = None
    fabric: Fabric = field(default_factory=Fabric)
    memory_used: int | None = None
    memory_reserved: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    display_active: bool | None = None
    licence: Licence = field(default_factory=Licence)
    cc_enabled: bool | None = None
    cc_ready: bool | None = None


def conditions_from_json(
    data: Mapping[str, Any], inventory: Inventory, *, lenient: bool = False
) -> tuple[Condition, ...]:
    """Read an object of conditions by index ("0"). The names of a GPU are those of the inventory.

    `PlainError` for another key, and for a value of a wrong type, which counts as missing with `lenient`.
    """
    if unexpected := [key for key in data if not _INDEX.fullmatch(key)]:
        raise PlainError(f"nvml.conditions.{unexpected[0][:100]}: the key must be the index of a GPU")
    known = {gpu.index: gpu for gpu in inventory.gpus}
    conditions = []
    for key, item in sorted(data.items(), key=lambda pair: int(pair[0])):
        gpu = known.get(int(key)) or Gpu(int(key), "", "", "")
        if isinstance(item, dict) and isinstance(item.get("reading"), dict):
            item = {**item, "reading": {**item["reading"], "uuid": gpu.uuid}}
        condition = from_plain(Condition, item, lenient=lenient, where=f"nvml.conditions.{key}")
        conditions.append(replace(condition, index=gpu.index, uuid=gpu.uuid, pci=gpu.pci))
    return tuple(conditions)


# A GPU's reading of its own health, from an open NVML. Values that it, or its driver, doesn't report are
# None.
#
# ECC counts, remapped rows, retired pages and the fabric as nvml.h describes them; the recovery action is the
# field value NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, which drivers report from 570 on.

RECOVERY_ACTIONS = (
    *("none", "reset", "reboot", "drain-p2p", "drain-and-reset"),
    *("recover-imex", "bus-reset", "system-reboot"),
)
"""NVML_GPU_RECOVERY_ACTION_* from 0 on."""

_VERSION_UNKNOWN = 25  # NVML_ERROR_ARGUMENT_VERSION_MISMATCH
_UNTOLD = {
    *(NOT_SUPPORTED, NO_PERMISSION, INVALID_ARGUMENT, NOT_FOUND, FUNCTION_NOT_FOUND, _VERSION_UNKNOWN),
}
_FIELD_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_UNCORRECTABLE = 1  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED


class _Gpu(Queries):
    """Queries one GPU."""

    def __init__(self, nvml: Nvml, device: Handle, ends: Callable[[int], bool]) -> None:
        super().__init__(ends)
        self.nvml, self.device = nvml, device

    def call(self, function: str, *arguments: Any) -> Any:
        return self.query(lambda: self.nvml.call(function, self.device, *arguments))

    def number(self, function: str, *arguments: Any) -> int | None:
        answer = self.call(function, *arguments)
        return None if answer is None else int(answer)

    def switch(self, function: str) -> bool | None:
        answer = self.call(function)
        return None if answer is None else bool(answer)

    def switches(self, function: str) -> tuple[bool | None, bool | None]:
        """Two values, such as a mode now and after the next reset."""
        answer = self.call(function)
        return (None, None) if answer is None else (bool(answer[0]), bool(answer[1]))

    def word(self, function: str, words: tuple[str, ...]) -> str | None:
        number = self.number(function)
        return None if number is None else name_at(words, number)


def read_gpu(nvml: Nvml, device: Handle, uuid: str, *, use: bool = False, generation: str = "") -> Reading:
    """One GPU's reading; `use` adds utilisation and memory, including those of MIG devices. Never raises."""
    gpu = _Gpu(nvml, device, lambda code: code not in _UNTOLD)
    volatile, aggregate = (
        gpu.number("nvmlDeviceGetTotalEccErrors", _UNCORRECTABLE, counter) for counter in (0, 1)
    )
    remap = gpu.call("nvmlDeviceGetRemappedRows")  # Ampere and newer
    retired = gpu.switch("nvmlDeviceGetRetiredPagesPendingStatus") if remap is None else None
    action = gpu.query(lambda: _recovery_action(nvml, device))
    fabric = gpu.query(lambda: nvml.fabric(device)) or Fabric()
    busy = gpu.call("nvmlDeviceGetUtilizationRates") if use else None  # not supported in MIG mode
    memory = gpu.call("nvmlDeviceGetMemoryInfo") if use else None
    return Reading(
        uuid,
        str(gpu.error or ""),
        volatile,
        aggregate,
        remap_pending=None if remap is None else bool(remap[2]),
        remap_failed=None if remap is None else bool(remap[3]),
        retired_pending=retired,
        recovery_action=action,
        fabric_state=fabric.state,
        fabric_error=fabric.error,
        busy_percent=None if busy is None else int(busy.gpu),
        memory_used_bytes=None if memory is None else int(memory.used),
        generation=generation,
        parts_used_bytes=_parts(nvml, device) if use and gpu.error is None else {},
        error_code=gpu.error.code if gpu.error else None,
    )


def _recovery_action(nvml: Nvml, device: Handle) -> str:
    """The action that the driver requests."""
    (value,) = nvml.call("nvmlDeviceGetFieldValues", device, [_FIELD_RECOVERY_ACTION])
    if value.nvmlReturn:
        raise NvmlError(int(value.nvmlReturn))
    number = int(value.value.uiVal)
    return name_at(RECOVERY_ACTIONS, number) or f"unknown-{number}"


def _parts(nvml: Nvml, gpu: Handle) -> Mapping[str, int]:
    """Memory in use by MIG device. Compute instances of one GPU instance share its memory, so each instance's
    part is unknown; a MIG device that disappears meanwhile is no failure of its GPU."""
    parts: dict[str, tuple[int, int]] = {}
    with suppress(NvmlError):
        for _, mig in nvml.mig_handles(gpu) if nvml.mig_mode(gpu) else ():
            with suppress(NvmlError):
                used = int(nvml.call("nvmlDeviceGetMemoryInfo", mig).used)
                parts[nvml.uuid(mig)] = nvml.mig_instances(mig)[0], used
    shared = Counter(gi for gi, _ in parts.values())
    return {uuid: used for uuid, (gi, used) in parts.items() if shared[gi] == 1}


# The condition of each GPU, from an open NVML, which is queried in a child process only (probe.py).
#
# An error of one query, because of the GPU, the driver or this user's rights, only affects its own item; an
# error that concerns the GPU itself (lost, to be reset) ends that GPU's queries. Nothing is changed on the
# GPU.

SAMPLE_SECONDS = 0.1  # between two samples of the active slowdowns
_MOST_SECONDS = 5.0  # for all GPUs: after this time the remaining values are not queried
_SLOWDOWN_THRESHOLD = 1  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_RETIRED_FOR = (0, 1)  # NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS, _DOUBLE_BIT_ECC_ERROR
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2: includes the driver's reserved memory
_THE_GPU_ITSELF = (TIMEOUT, GPU_IS_LOST, RESET_REQUIRED)


def read_conditions(nvml: Nvml, inventory: Inventory) -> Iterator[Condition]:
    """One after another, in NVML's order. Never raises for a GPU. One with an active slowdown is read again
    at the end, to see which are still active: one wait serves all of them."""
    until = time.monotonic() + _MOST_SECONDS
    cc = _confidential(nvml)
    slowed: list[tuple[_Gpu, Condition, int]] = []
    for gpu in inventory.gpus:
        if time.monotonic() > until:
            break
        names = (gpu.index, gpu.uuid, gpu.pci)
        try:
            device = nvml.handle(gpu.index)
        except NvmlError as error:
            yield Condition(*names, str(error), error.code)
            continue
        queries = _Gpu(nvml, device, _THE_GPU_ITSELF.__contains__)
        first = _slowdown_bits(queries)
        condition = _read_condition(queries, names, cc)
        holds = any((first or 0) & bit for bit in SLOWDOWNS)
        yield _ended(queries, condition, None if holds or first is None else 0)
        if holds:
            slowed.append((queries, condition, first or 0))
    if slowed:
        time.sleep(SAMPLE_SECONDS)
    for queries, condition, bits in slowed:
        yield _ended(queries, condition, bits & (_slowdown_bits(queries) or 0))


def _ended(gpu: _Gpu, condition: Condition, bits: int | None) -> Condition:
    """Add the active slowdowns, and the error that ended the queries, if any."""
    slowdowns = None if bits is None else tuple(name for bit, name in SLOWDOWNS.items() if bits & bit)
    error = gpu.error
    return replace(
        condition, slowdowns=slowdowns, error=str(error or ""), error_code=error.code if error else None
    )


def _confidential(nvml: Nvml) -> tuple[bool | None, bool | None]:
    """Whether confidential computing is enabled on the node's GPUs, and then whether they accept work."""
    node = Queries(_THE_GPU_ITSELF.__contains__)
    enabled = node.query(lambda: bool(nvml.call("nvmlSystemGetConfComputeState").ccFeature))
    ready = node.query(lambda: bool(nvml.call("nvmlSystemGetConfComputeGpusReadyState"))) if enabled else None
    return enabled, ready


def _read_condition(gpu: _Gpu, names: tuple[int, str, str], cc: tuple[bool | None, bool | None]) -> Condition:
    reading = read_gpu(gpu.nvml, gpu.device, names[1])
    remapped, pages = gpu.call("nvmlDeviceGetRemappedRows"), _retired_pages(gpu)
    repair = gpu.switches("nvmlDeviceGetRepairStatus")
    # in this order: a process that ends meanwhile must not leave memory that seems to belong to no process
    processes = _processes(gpu)
    memory = _memory(gpu)
    ecc, mig = gpu.switches("nvmlDeviceGetEccMode"), gpu.switches("nvmlDeviceGetMigMode")
    virtualization = gpu.word("nvmlDeviceGetVirtualizationMode", VIRTUALIZATION)
    return Condition(
        *names,
        reading=reading,
        sram_threshold_exceeded=_sram_threshold_exceeded(gpu),
        remapped=None if remapped is None else int(remapped[1]),
        retired=pages[1],
        retired_pages=None if pages[0] is None or pages[1] is None else pages[0] + pages[1],
        channel_repair_pending=repair[0],
        tpc_repair_pending=repair[1],
        inforom_valid=_inforom(gpu),
        persistence=gpu.switch("nvmlDeviceGetPersistenceMode"),
        compute_mode=gpu.word("nvmlDeviceGetComputeMode", COMPUTE_MODES),
        ecc_mode=ecc[0],
        ecc_mode_next=ecc[1],
        mig_mode=mig[0],
        mig_mode_next=mig[1],
        virtualization=virtualization,
        temperature=gpu.number("nvmlDeviceGetTemperature", 0),
        temperature_slowdown=gpu.number("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN_THRESHOLD),
        power_limit=gpu.number("nvmlDeviceGetEnforcedPowerLimit"),
        power_limit_default=gpu.number("nvmlDeviceGetPowerManagementDefaultLimit"),
        nvlinks=_nvlinks(gpu),
        fabric=gpu.query(lambda: gpu.nvml.fabric(gpu.device)) or Fabric(),
        memory_used=memory[0],
        memory_reserved=memory[1],
        processes=processes,
        display_active=gpu.switch("nvmlDeviceGetDisplayActive"),
        licence=_licence(gpu) if virtualization == "vgpu" else Licence(),
        cc_enabled=cc[0],
        cc_ready=cc[1],
    )


def _slowdown_bits(gpu: _Gpu) -> int | None:
    bits = gpu.number("nvmlDeviceGetCurrentClocksEventReasons")
    return gpu.number("nvmlDeviceGetCurrentClocksThrottleReasons") if bits is None else bits  # before 535


def _sram_threshold_exceeded(gpu: _Gpu) -> bool | None:
    """Whether errors of the chip's own memory exceed NVIDIA's limit; Ampere and newer."""

    def exceeded() -> bool:
        status = gpu.nvml.structure("c_nvmlEccSramErrorStatus_v1_t")
        gpu.nvml.call("nvmlDeviceGetSramEccErrorStatus", gpu.device, ctypes.byref(status))
        return bool(status.bThresholdExceeded)

    return gpu.query(exceeded)


def _inforom(gpu: _Gpu) -> bool | None:
    def valid() -> bool:
        try:
            gpu.nvml.call("nvmlDeviceValidateInforom", gpu.device)
        except NvmlError as error:
            if error.code != CORRUPTED_INFOROM:
                raise
            return False
        return True

    return gpu.query(valid)


def _retired_pages(gpu: _Gpu) -> list[int | None]:
    """Pages retired for single-bit and for double-bit errors; before Ampere."""
    lists = [gpu.call("nvmlDeviceGetRetiredPages", cause) for cause in _RETIRED_FOR]
    return [None if pages is None else len(pages) for pages in lists]


def _memory(gpu: _Gpu) -> tuple[int | None, int | None]:
    """Used and reserved bytes. Drivers before 510 count the reserved as used and don't report it
    separately."""
    memory = gpu.call("nvmlDeviceGetMemoryInfo", _MEMORY_V2)
    if memory is not None:
        return int(memory.used), int(memory.reserved)
    memory = gpu.call("nvmlDeviceGetMemoryInfo")
    return (None if memory is None else int(memory.used)), None


def _nvlinks(gpu: _Gpu) -> tuple[bool, ...] | None:
    """The states of this GPU's links; () if it has none, None if it doesn't report them."""
    nvlinks: list[bool] = []
    for link in range(MOST_LINKS):
        try:
            state = gpu.nvml.call("nvmlDeviceGetNvLinkState", gpu.device, link)
        except NvmlError as error:
            return tuple(nvlinks) if error.code in (INVALID_ARGUMENT, NOT_SUPPORTED) else None
        nvlinks.append(bool(state))
    return tuple(nvlinks)


def _processes(gpu: _Gpu) -> tuple[GpuProcess, ...] | None:
    """None unless NVML reports both lists, because an empty list is information, too."""
    processes: list[GpuProcess] = []
    for graphics in (False, True):
        kind = "Graphics" if graphics else "Compute"
        running = gpu.call(f"nvmlDeviceGet{kind}RunningProcesses")
        if running is None:
            return None
        processes += [GpuProcess(int(process.pid), graphics, process.usedGpuMemory) for process in running]
    return tuple(processes)


def _licence(gpu: _Gpu) -> Licence:
    licensable = gpu.call("nvmlDeviceGetGridLicensableFeatures")
    if licensable is None:
        return Licence()
    features = licensable.gridLicensableFeatures[: licensable.licensableFeaturesCount]
    names = (feature.productName for feature in features)
    products = tuple(
        name.decode("ascii", "replace") if isinstance(name, bytes) else str(name) for name in names if name
    )
    licensed = any(feature.featureState for feature in features)  # nvml.h: non-zero if it is licensed now
    return Licence(bool(licensable.isGridLicenseSupported), licensed, products)


def main() -> int:
    """Always 0, so that anything else means a crash."""
    parent = Parent()
    try:
        with Nvml.for_parent(parent) as nvml:
            inventory = discover(nvml)
            parent.send(inventory=plain(inventory))
            if parent.options.get("conditions"):
                for condition in read_conditions(nvml, inventory):
                    parent.send(condition=plain(condition))
                parent.send(done=True)
    except NvmlError as error:
        parent.send(error=error.document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
