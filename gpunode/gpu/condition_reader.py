"""How each GPU is, from an open NVML, which is asked in a child process only (probe.py).

One question that a GPU, a driver or this user's rights leave unanswered costs its own item; an answer that
means the GPU itself (lost, to be reset) ends that GPU's questions. Nothing is changed on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gpunode.dataclass import replace
from gpunode.gpu.condition import (
    ADDRESSING,
    COMPUTE_MODES,
    SLOWDOWNS,
    VIRTUALIZATION,
    Condition,
    Fabric,
    GpuProcess,
    Licence,
)
from gpunode.gpu.model import Inventory
from gpunode.gpu.nvml import Handle, Nvml
from gpunode.gpu.nvml_errors import (
    CORRUPTED_INFOROM,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    TIMEOUT,
    NvmlError,
)
from gpunode.gpu.readings import FABRIC_STATES, read_gpu

SAMPLE_SECONDS = 0.1  # between two looks at what holds the clocks back
_MOST_SECONDS = 5.0  # for all GPUs: what isn't told by then isn't asked
_MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS of 2025's nvml.h
_SLOWDOWN_THRESHOLD = 1  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_RETIRED_FOR = (0, 1)  # NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS, _DOUBLE_BIT_ECC_ERROR
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2: with what the driver keeps for itself
_THE_GPU_ITSELF = (TIMEOUT, GPU_IS_LOST, RESET_REQUIRED)
_T = TypeVar("_T")


def read_conditions(nvml: Nvml, inventory: Inventory) -> Iterator[Condition]:
    """One after another, as NVML lists the GPUs. Never raises for a GPU. One that something holds back is
    told again at the end, with what still does: the second look waits once for all of them."""
    until = time.monotonic() + _MOST_SECONDS
    cc = _confidential(nvml)
    held: list[tuple[_Gpu, Condition, int]] = []
    for gpu in inventory.gpus:
        if time.monotonic() > until:
            break
        names = (gpu.index, gpu.uuid, gpu.pci)
        try:
            device = nvml.handle(gpu.index)
        except NvmlError as error:
            yield Condition(*names, str(error), error.code)
            continue
        asked = _Gpu(nvml, device)
        first = _slowdown_bits(asked)
        told = _condition(asked, names, cc)
        holds = any((first or 0) & bit for bit in SLOWDOWNS)
        yield _ended(asked, told, None if holds or first is None else 0)
        if holds:
            held.append((asked, told, first or 0))
    if held:
        time.sleep(SAMPLE_SECONDS)
    for asked, told, bits in held:
        yield _ended(asked, told, bits & (_slowdown_bits(asked) or 0))


def _ended(gpu: _Gpu, told: Condition, bits: int | None) -> Condition:
    """With what holds the clocks back, and with what ended the questions, if anything did."""
    slowdowns = None if bits is None else tuple(name for bit, name in SLOWDOWNS.items() if bits & bit)
    error = gpu.error
    return replace(
        told, slowdowns=slowdowns, error=str(error or ""), error_code=error.code if error else None
    )


def _confidential(nvml: Nvml) -> tuple[bool | None, bool | None]:
    """Whether the node's GPUs compute in confidence, and then whether they take work."""
    node = _Questions()
    enabled = node.ask(lambda: bool(nvml.call("nvmlSystemGetConfComputeState").ccFeature))
    ready = node.ask(lambda: bool(nvml.call("nvmlSystemGetConfComputeGpusReadyState"))) if enabled else None
    return enabled, ready


class _Questions:
    """Asks one after another; what isn't told is None. `error` is what ended the questions."""

    def __init__(self) -> None:
        self.error: NvmlError | None = None

    def ask(self, question: Callable[[], _T]) -> _T | None:
        if self.error is not None:
            return None
        try:
            return question()
        except NvmlError as error:
            if error.code in _THE_GPU_ITSELF:
                self.error = error
            return None


class _Gpu(_Questions):
    """Asks one GPU."""

    def __init__(self, nvml: Nvml, device: Handle) -> None:
        super().__init__()
        self.nvml, self.device = nvml, device

    def call(self, function: str, *arguments: Any) -> Any:
        return self.ask(lambda: self.nvml.call(function, self.device, *arguments))

    def number(self, function: str, *arguments: Any) -> int | None:
        answer = self.call(function, *arguments)
        return None if answer is None else int(answer)

    def switch(self, function: str) -> bool | None:
        answer = self.call(function)
        return None if answer is None else bool(answer)

    def switches(self, function: str) -> tuple[bool | None, bool | None]:
        """Two, such as a mode now and after the next reset."""
        answer = self.call(function)
        return (None, None) if answer is None else (bool(answer[0]), bool(answer[1]))

    def word(self, function: str, words: tuple[str, ...]) -> str | None:
        number = self.number(function)
        return words[number] if number is not None and 0 <= number < len(words) else None


def _condition(gpu: _Gpu, names: tuple[int, str, str], cc: tuple[bool | None, bool | None]) -> Condition:
    reading = read_gpu(gpu.nvml, gpu.device, names[1])
    remapped, pages = gpu.call("nvmlDeviceGetRemappedRows"), _retired_pages(gpu)
    repair = gpu.switches("nvmlDeviceGetRepairStatus")
    # in this order: a process that ends meanwhile must not leave memory that seems to be nobody's
    processes = _processes(gpu)
    memory = _memory(gpu)
    ecc, mig = gpu.switches("nvmlDeviceGetEccMode"), gpu.switches("nvmlDeviceGetMigMode")
    gsp = gpu.switches("nvmlDeviceGetGspFirmwareMode")
    virtualization = gpu.word("nvmlDeviceGetVirtualizationMode", VIRTUALIZATION)
    return Condition(
        *names,
        reading=reading,
        sram_threshold_exceeded=gpu.ask(lambda: gpu.nvml.sram_threshold_exceeded(gpu.device)),
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
        gsp_enabled=gsp[0],
        gsp_default=gsp[1],
        gsp_version=_text(gpu.call("nvmlDeviceGetGspFirmwareVersion")),
        addressing=gpu.word("nvmlDeviceGetAddressingMode", ADDRESSING),
        temperature=gpu.number("nvmlDeviceGetTemperature", 0),
        temperature_slowdown=gpu.number("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN_THRESHOLD),
        power_limit=gpu.number("nvmlDeviceGetEnforcedPowerLimit"),
        power_limit_default=gpu.number("nvmlDeviceGetPowerManagementDefaultLimit"),
        pcie_width=gpu.number("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=gpu.number("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation=gpu.number("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=gpu.number("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_replays=gpu.number("nvmlDeviceGetPcieReplayCounter"),
        nvlinks=_nvlinks(gpu),
        fabric=_fabric(gpu),
        memory_total=memory[0],
        memory_used=memory[1],
        memory_reserved=memory[2],
        processes=processes,
        display_active=gpu.switch("nvmlDeviceGetDisplayActive"),
        licence=_licence(gpu) if virtualization == "vgpu" else Licence(),
        cc_enabled=cc[0],
        cc_ready=cc[1],
    )


def _slowdown_bits(gpu: _Gpu) -> int | None:
    bits = gpu.number("nvmlDeviceGetCurrentClocksEventReasons")
    return gpu.number("nvmlDeviceGetCurrentClocksThrottleReasons") if bits is None else bits  # before 535


def _inforom(gpu: _Gpu) -> bool | None:
    def valid() -> bool:
        try:
            gpu.nvml.call("nvmlDeviceValidateInforom", gpu.device)
        except NvmlError as error:
            if error.code != CORRUPTED_INFOROM:
                raise
            return False
        return True

    return gpu.ask(valid)


def _retired_pages(gpu: _Gpu) -> tuple[int | None, int | None]:
    """Pages retired for single-bit and for double-bit errors; before Ampere."""
    counts = []
    for cause in _RETIRED_FOR:
        pages = gpu.call("nvmlDeviceGetRetiredPages", cause)
        counts.append(None if pages is None else len(pages))
    return counts[0], counts[1]


def _memory(gpu: _Gpu) -> tuple[int | None, int | None, int | None]:
    """Total, used and reserved bytes. Drivers before 510 count the reserved as used and don't tell it."""
    memory = gpu.call("nvmlDeviceGetMemoryInfo", _MEMORY_V2)
    if memory is not None:
        return int(memory.total), int(memory.used), int(memory.reserved)
    memory = gpu.call("nvmlDeviceGetMemoryInfo")
    return (None, None, None) if memory is None else (int(memory.total), int(memory.used), None)


def _nvlinks(gpu: _Gpu) -> tuple[bool, ...] | None:
    """The states of the links that this GPU has; () if it has none, None if it doesn't tell."""
    found: list[bool] = []
    for link in range(_MOST_LINKS):
        try:
            state = gpu.nvml.call("nvmlDeviceGetNvLinkState", gpu.device, link)
        except NvmlError as error:
            return tuple(found) if error.code in (INVALID_ARGUMENT, NOT_SUPPORTED) else None
        found.append(bool(state))
    return tuple(found)


def _fabric(gpu: _Gpu) -> Fabric:
    info = gpu.ask(lambda: gpu.nvml.fabric_info(gpu.device))
    if info is None:
        return Fabric()
    state = FABRIC_STATES[info.state] if 0 <= info.state < len(FABRIC_STATES) else None
    return Fabric(state, info.status, info.cluster, info.clique, info.health)


def _processes(gpu: _Gpu) -> tuple[GpuProcess, ...] | None:
    """None unless both lists are told, since from their emptiness something follows."""
    found: list[GpuProcess] = []
    for graphics in (False, True):
        kind = "Graphics" if graphics else "Compute"
        running = gpu.call(f"nvmlDeviceGet{kind}RunningProcesses")
        if running is None:
            return None
        found += [GpuProcess(int(one.pid), graphics, one.usedGpuMemory) for one in running]
    return tuple(found)


def _licence(gpu: _Gpu) -> Licence:
    told = gpu.call("nvmlDeviceGetGridLicensableFeatures")
    if told is None:
        return Licence()
    features = told.gridLicensableFeatures[: told.licensableFeaturesCount]
    products = tuple(text for one in features if (text := _text(one.productName)))
    licensed = any(one.featureState for one in features)  # nvml.h: non-zero if it is licensed now
    return Licence(bool(told.isGridLicenseSupported), licensed, products)


def _text(value: bytes | str | None) -> str | None:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value
