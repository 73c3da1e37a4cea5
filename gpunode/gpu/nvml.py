"""NVML with types: the only module that imports pynvml.

NVML can hang or crash the process with a failing GPU, so it is opened in child processes only (`gpu.child`):
`gpu.probe` queries one with a time limit, and the device plugin reads from a `gpu.nvml_watcher` that runs as
long as the driver.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from gpunode.gpu.child import Note, Parent
from gpunode.gpu.model import GPU_IS_LOST

_T = TypeVar("_T")

# NVML's return codes and the meaning of each for a node.

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
CORRUPTED_INFOROM = 14
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
IN_USE = 19
INSUFFICIENT_RESOURCES = 23
UNKNOWN = 999

_MEANINGS = {
    1: "NVML is not initialised",
    INVALID_ARGUMENT: "NVML refused an argument",
    NOT_SUPPORTED: "not supported by this GPU or driver",
    NO_PERMISSION: "no permission: the device files, a cgroup or SELinux forbid it",
    NOT_FOUND: "not found",
    7: "NVML's answer did not fit the buffer",
    8: "the GPU lacks external power",
    DRIVER_NOT_LOADED: "the NVIDIA kernel module is not loaded",
    TIMEOUT: "the driver did not answer in time",
    11: "the kernel has a problem with the GPU's interrupts",
    LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found",
    FUNCTION_NOT_FOUND: "the driver's NVML lacks a function: the driver is too old",
    CORRUPTED_INFOROM: "the GPU's infoROM is corrupted",
    GPU_IS_LOST: "the GPU is lost: it fell off the bus or can't be reached",
    RESET_REQUIRED: "the GPU must be reset before it can be used",
    17: "the operating system (a cgroup, for example) blocks access to the GPU",
    VERSION_MISMATCH: "the driver's library and kernel module have different versions",
    IN_USE: "the GPU is in use",
    20: "out of memory",
    21: "no data",
    INSUFFICIENT_RESOURCES: "not enough resources",
    27: "the system is not ready",
    28: "no GPU was found",
    29: "the GPU is in a state that doesn't allow this",
    UNKNOWN: "unknown NVML error",
}


class NvmlError(Exception):
    """An NVML call failed: `code` is NVML's return code (nvmlReturn_t), `message` its meaning."""

    def __init__(self, code: int, message: str = "") -> None:
        self.code = code
        self.message = message or _MEANINGS.get(code, "NVML failed")
        super().__init__(f"{self.message} (NVML {code})")

    @property
    def document(self) -> dict[str, Any]:
        """The error in a child's answer to its parent."""
        return {"code": self.code, "message": self.message}


# Waiting for NVML's critical events: XIDs and ECC errors.

_KINDS = {8: "xid", 2: "ecc-double", 1: "ecc-single"}  # nvmlEventType*
_WATCHED = sum(_KINDS)
_NO_INSTANCE = 0xFFFFFFFF


class GpuEvent(NamedTuple):
    """An event of NVML. `kind` is xid, ecc-double or ecc-single.

    `uuid` is the GPU's, "" if unknown. `xid` is set for that kind only; `gi` and `ci` are the MIG
    instances concerned, None if the whole GPU is.
    """

    kind: str
    uuid: str
    xid: int | None = None
    gi: int | None = None
    ci: int | None = None


class EventSet:
    """Watches GPUs for XIDs and ECC errors until it is closed. `unsupported` don't report events, `failed`
    couldn't be watched, with the reason.
    """

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._set: Any = nvml.call("nvmlEventSetCreate")
        self._uuids: dict[int, str] = {}
        self.unsupported: list[str] = []
        self.failed: dict[str, NvmlError] = {}

    def watch(self, uuid: str, index: int) -> None:
        """Add one GPU. To find it by its UUID NVML would query every GPU, including one that hangs."""
        try:
            gpu = self._nvml.handle(index)
            mask = _WATCHED & int(self._nvml.call("nvmlDeviceGetSupportedEventTypes", gpu))
            if mask:
                self._nvml.call("nvmlDeviceRegisterEvents", gpu, mask, self._set)
        except NvmlError as error:
            if error.code != NOT_SUPPORTED:
                self.failed[uuid] = error
                return
            mask = 0
        if mask:
            self._uuids[_address(gpu.raw)] = uuid
        else:
            self.unsupported.append(uuid)

    def wait(self, timeout_seconds: float) -> GpuEvent | None:
        """The next event, None if there was none in time.

        `NvmlError` if waiting fails; GPU_IS_LOST is returned at once, repeatedly, so pause before the next
        wait.
        """
        try:
            data = self._nvml.call("nvmlEventSetWait", self._set, max(0, round(timeout_seconds * 1000)))
        except NvmlError as error:
            if error.code == TIMEOUT:
                return None
            raise
        kind = _KINDS.get(int(data.eventType))
        if kind is None:
            return None
        return GpuEvent(
            kind,
            self._uuid_of(data.device),
            int(data.eventData) if kind == "xid" else None,
            instance_id(data.gpuInstanceId),
            instance_id(data.computeInstanceId),
        )

    def _uuid_of(self, device: Any) -> str:
        """The GPU's UUID from the record: a lost GPU can't be queried any more."""
        known = self._uuids.get(_address(device))
        if known is not None:
            return known
        try:
            return str(self._nvml.call("nvmlDeviceGetUUID", device))
        except NvmlError:
            return ""

    def close(self) -> None:
        """Stop watching; does nothing the second time."""
        if self._set is not None:
            events, self._set = self._set, None
            self._nvml.call("nvmlEventSetFree", events)


def _address(device: Any) -> int:
    return ctypes.cast(device, ctypes.c_void_p).value or 0


def instance_id(number: int | None) -> int | None:
    """The id of a MIG instance; None for the whole GPU."""
    return None if number is None or int(number) == _NO_INSTANCE else int(number)


GPU_INSTANCE_PROFILES = 18  # NVML_GPU_INSTANCE_PROFILE_COUNT
MOST_LINKS = 36  # NVML_NVLINK_MAX_LINKS of 2025's nvml.h; INVALID_ARGUMENT marks the end of a GPU's links


def _load(path: str) -> None:
    """Load NVML by its path; the loader then returns it to every user of its soname."""
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise NvmlError(LIBRARY_NOT_FOUND, f"{path} can't be loaded: {error}") from error


def load_bindings() -> Any:
    """pynvml, which loads NVML only when it is initialised."""
    import pynvml

    return pynvml


class Handle(NamedTuple):
    """A GPU, or a part of one, in NVML's form (for `Nvml.handle` its index); valid while NVML stays open.

    `gpu` is the index of the GPU, None if it is unknown for this handle.
    """

    raw: Any
    gpu: int | None = None


Asking = Callable[[str, Sequence[int]], AbstractContextManager[None]]
"""Entered with a function's name and the indices of the GPUs that it is about, for as long as NVML takes."""
_UNNOTED = Note().asking


FABRIC_STATES = (None, "not-started", "in-progress", "completed")
"""NVML_GPU_FABRIC_STATE_* from 0, not supported, on."""


class Fabric(NamedTuple):
    """The NVLink fabric (nvmlGpuFabricInfoV_t). `state` is one of `FABRIC_STATES`, `status` NVML's return
    code of the training, `cluster` the cluster's UUID without hyphens (zeros for none), `health` the mask
    NVML_GPU_FABRIC_HEALTH_MASK_*: two bits each, 1 is true (degraded bandwidth, route recovery, unhealthy
    route, access timeout recovery from bit 0 on), then four bits of an incorrect configuration."""

    state: str | None = None
    status: int | None = None
    cluster: str | None = None
    clique: int | None = None
    health: int | None = None

    @property
    def error(self) -> str:
        """What is wrong with it; empty for nothing."""
        if self.state == "completed" and self.status:
            return str(NvmlError(self.status))
        # NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY; 1 is true
        unhealthy = (self.health or 0) >> 4 & 3 == 1
        return "a route through the NVLink fabric is unhealthy" if unhealthy else ""


def name_at(names: Sequence[str | None], number: int) -> str | None:
    """The name of an enumeration's value; None for one that is not known."""
    return names[number] if 0 <= number < len(names) else None


class Queries:
    """Queries one value after another; one that NVML doesn't report is None. An error of which the code
    `ends` the queries is kept, and nothing more is queried after it."""

    def __init__(self, ends: Callable[[int], bool]) -> None:
        self.error: NvmlError | None = None
        self._ends = ends

    def query(self, question: Callable[[], _T], *, optional: bool = False) -> _T | None:
        """With `optional` the queries go on where the GPU doesn't support this one."""
        if self.error is not None:
            return None
        try:
            return question()
        except NvmlError as error:
            if self._ends(error.code) and not (optional and error.code == NOT_SUPPORTED):
                self.error = error
            return None


def sysfs_address(bus_id: bytes | str) -> str:
    """NVML's ``00000000:3B:00.0`` as sysfs spells it, ``0000:3b:00.0``."""
    text = (bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else bus_id).lower()
    domain, colon, rest = text.partition(":")
    return f"{domain[-4:] if len(domain) == 8 and domain[:4] == '0000' else domain}{colon}{rest}"


class Nvml:
    """An open NVML. Every method raises `NvmlError` with NVML's own code."""

    def __init__(self, library: str = "", asking: Asking = _UNNOTED, fallback: str = "") -> None:
        """Load libnvidia-ml.so.1 and initialise it: by the path `library`, or else as the dynamic loader
        finds it, or else by the path `fallback`."""
        self._library = load_bindings()
        self._asking = asking
        if library:
            _load(library)
        try:
            self.call("nvmlInit")
        except NvmlError as error:
            if library or not fallback or error.code != LIBRARY_NOT_FOUND:
                raise
            _load(fallback)
            self.call("nvmlInit")

    @classmethod
    def for_parent(cls, parent: Parent) -> Nvml:
        """Open NVML in a child, by the options that `library_paths.nvml_options` made.

        With `root`, the root directory of a driver container becomes the root of this process; no module can
        be imported after that.
        """
        library, fallback, root = (parent.options.get(name, "") for name in ("library", "fallback", "root"))
        if root:
            load_bindings()
            try:
                os.chroot(root)
                os.chdir("/")
            except OSError as error:
                raise NvmlError(NO_PERMISSION, f"can't enter {root}: {error.strerror}") from error
        return cls(library, parent.note.asking, fallback)

    def close(self) -> None:
        """Shut NVML down; does nothing if it is down already."""
        try:
            self.call("nvmlShutdown")
        except NvmlError:
            return

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a pynvml function by name and turn its errors into `NvmlError`.

        Handles are passed unchanged: they identify the GPUs that the query concerns.
        """
        handles = [argument for argument in arguments if isinstance(argument, Handle)]
        gpus = [handle.gpu for handle in handles if handle.gpu is not None]
        raw = (argument.raw if isinstance(argument, Handle) else argument for argument in arguments)
        try:
            with self._asking(function, gpus):
                return getattr(self._library, function)(*raw)
        except self._library.NVMLError as error:
            raise NvmlError(int(error.value)) from error
        except UnicodeDecodeError as error:
            raise NvmlError(UNKNOWN, f"{function} gave bytes that are not text") from error

    def part(self, function: str, of: Handle, *arguments: Any) -> Handle:
        """The handle that a function returns for a part of this GPU, or for the GPU that contains this
        part."""
        return Handle(self.call(function, of, *arguments), of.gpu)

    def structure(self, name: str, count: int = 0) -> Any:
        """An empty pynvml structure by name, or an array of `count` of them, for a call to fill."""
        kind = getattr(self._library, name)
        return (kind * count)() if count else kind()

    # --- the node --------------------------------------------------------------------------------------

    def driver_version(self) -> str:
        """Such as ``550.54.15``."""
        return str(self.call("nvmlSystemGetDriverVersion"))

    def cuda_version(self) -> str:
        """The newest CUDA that the driver supports, such as ``12.4``."""
        number = int(self.call("nvmlSystemGetCudaDriverVersion"))
        return f"{number // 1000}.{number % 1000 // 10}"

    def device_count(self) -> int:
        return int(self.call("nvmlDeviceGetCount"))

    # --- one GPU ---------------------------------------------------------------------------------------

    def handle(self, index: int) -> Handle:
        return self.part("nvmlDeviceGetHandleByIndex", Handle(index, index))

    def handle_by_uuid(self, uuid: str) -> Handle:
        """Handle of a GPU or of a MIG device. To find it NVML queries every GPU, including one that hangs."""
        return Handle(self.call("nvmlDeviceGetHandleByUUID", uuid))

    def uuid(self, device: Handle) -> str:
        return str(self.call("nvmlDeviceGetUUID", device))

    def name(self, device: Handle) -> str:
        return str(self.call("nvmlDeviceGetName", device))

    def pci(self, device: Handle) -> str:
        """PCI address as sysfs spells it."""
        return sysfs_address(self.call("nvmlDeviceGetPciInfo", device).busId)

    def minor(self, device: Handle) -> int:
        """N of /dev/nvidiaN."""
        return int(self.call("nvmlDeviceGetMinorNumber", device))

    def memory_bytes(self, device: Handle) -> int:
        """Total memory of a GPU or MIG device, in bytes."""
        return int(self.call("nvmlDeviceGetMemoryInfo", device).total)

    def compute_capability(self, device: Handle) -> str:
        """Such as ``9.0``."""
        major, minor = self.call("nvmlDeviceGetCudaComputeCapability", device)
        return f"{major}.{minor}"

    def compute_mode(self, gpu: Handle) -> int:
        """Which processes may use it: 0 all, 2 none, 3 one at a time (nvmlComputeMode_t)."""
        return int(self.call("nvmlDeviceGetComputeMode", gpu))

    def set_compute_mode(self, gpu: Handle, mode: int) -> None:
        """Needs root, else NO_PERMISSION. Lasts until the driver is unloaded."""
        self.call("nvmlDeviceSetComputeMode", gpu, mode)

    def fabric(self, device: Handle) -> Fabric:
        """The GPU's state in the NVLink fabric."""
        info, health = self._library.c_nvmlGpuFabricInfo_v2_t(), True
        try:
            self.call("nvmlDeviceGetGpuFabricInfoV", device, ctypes.byref(info))
        except NvmlError as error:
            if error.code != FUNCTION_NOT_FOUND:
                raise
            info, health = self._library.c_nvmlGpuFabricInfo_t(), False
            self.call("nvmlDeviceGetGpuFabricInfo", device, ctypes.byref(info))
        return Fabric(
            name_at(FABRIC_STATES, int(info.state)),
            int(info.status),
            bytes(info.clusterUuid).hex(),
            int(info.cliqueId),
            int(info.healthMask) if health else None,
        )

    # --- MIG -------------------------------------------------------------------------------------------

    def mig_mode(self, gpu: Handle) -> bool | None:
        """Whether MIG mode is on now, None if the GPU or the driver does not support MIG."""
        try:
            return bool(self.call("nvmlDeviceGetMigMode", gpu)[0])
        except NvmlError as error:
            if error.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                return None
            raise

    def mig_handles(self, gpu: Handle) -> tuple[tuple[int, Handle], ...]:
        """Slot number and handle of every MIG device; empty slots are left out."""
        handles = []
        for slot in range(int(self.call("nvmlDeviceGetMaxMigDeviceCount", gpu))):
            try:
                handles.append((slot, self.part("nvmlDeviceGetMigDeviceHandleByIndex", gpu, slot)))
            except NvmlError as error:
                if error.code not in (NOT_FOUND, INVALID_ARGUMENT):
                    raise
        return tuple(handles)

    def mig_instances(self, mig: Handle) -> tuple[int, int]:
        """Ids of the GPU instance and of the compute instance behind a MIG device."""
        gi = self.call("nvmlDeviceGetGpuInstanceId", mig)
        return int(gi), int(self.call("nvmlDeviceGetComputeInstanceId", mig))

    def gpu_instance_profile(self, gpu: Handle, gi: int) -> int | None:
        """The profile of a GPU instance as NVML_GPU_INSTANCE_PROFILE_*, None if no profile has its id.

        Needs root or read access to the capability mig/monitor; NO_PERMISSION without.
        """
        instance = self.part("nvmlDeviceGetGpuInstanceById", gpu, gi)
        desired = int(self.call("nvmlGpuInstanceGetInfo", instance).profileId)
        for profile in range(GPU_INSTANCE_PROFILES):
            try:
                info = self.call("nvmlDeviceGetGpuInstanceProfileInfo", gpu, profile, 1)
            except NvmlError as error:
                if error.code in (NOT_SUPPORTED, INVALID_ARGUMENT):
                    continue
                raise
            if int(info.id) == desired:
                return profile
        return None

    # --- topology --------------------------------------------------------------------------------------

    def common_ancestor(self, first: Handle, second: Handle) -> int:
        """Proximity of two GPUs: 0 board, 10 switch, 20 switches, 30 host bridge, 40 NUMA node, 50 system."""
        return int(self.call("nvmlDeviceGetTopologyCommonAncestor", first, second))
