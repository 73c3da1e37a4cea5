"""Waiting for NVML's critical events: XIDs and ECC errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpunode.dataclass import dataclass
from gpunode.gpu.nvml_errors import NOT_SUPPORTED, TIMEOUT, NvmlError

if TYPE_CHECKING:
    from gpunode.gpu.nvml import Handle, Nvml

_KINDS = {8: "xid", 2: "ecc-double", 1: "ecc-single"}  # nvmlEventType*
_WATCHED = sum(_KINDS)
_NO_INSTANCE = 0xFFFFFFFF


@dataclass(frozen=True)
class GpuEvent:
    """What NVML reported. `kind` is xid, ecc-double or ecc-single.

    `uuid` is the GPU's, "" if it can't be told. `xid` is set for that kind only; `gi` and `ci` are the MIG
    instances concerned, None if the whole GPU is.
    """

    kind: str
    uuid: str
    xid: int | None = None
    gi: int | None = None
    ci: int | None = None


class EventSet:
    """The events of some GPUs. `unsupported` know no such events, `failed` couldn't be watched, and why."""

    def __init__(self, nvml: Nvml, uuids: Sequence[str], handles: Mapping[str, Handle] | None = None) -> None:
        self._nvml = nvml
        self._handles = handles or {}
        self._set: Any = nvml.call("nvmlEventSetCreate")
        self._uuids: dict[int, str] = {}
        self.failed: dict[str, NvmlError] = {}
        unsupported = []
        for uuid in uuids:
            try:
                if not self._register(uuid):
                    unsupported.append(uuid)
            except NvmlError as error:
                self.failed[uuid] = error
        self.unsupported: tuple[str, ...] = tuple(unsupported)

    def _register(self, uuid: str) -> bool:
        """Watch one GPU, once however many of its MIG devices are named; False if it knows no such events."""
        gpu, gpu_uuid = self._gpu_of(uuid)
        if _address(gpu.raw) in self._uuids:
            return True
        try:
            mask = _WATCHED & int(self._nvml.call("nvmlDeviceGetSupportedEventTypes", gpu))
            if mask:
                self._nvml.call("nvmlDeviceRegisterEvents", gpu, mask, self._set)
        except NvmlError as error:
            if error.code == NOT_SUPPORTED:
                return False
            raise
        if mask:
            self._uuids[_address(gpu.raw)] = gpu_uuid
        return bool(mask)

    def _gpu_of(self, uuid: str) -> tuple[Handle, str]:
        device = self._handles.get(uuid) or self._nvml.handle_by_uuid(uuid)
        if not uuid.startswith("MIG-"):
            return device, uuid
        parent = self._nvml.mig_parent(device)
        return parent, self._nvml.uuid(parent)

    def wait(self, timeout_seconds: float) -> GpuEvent | None:
        """The next event, None if there was none in time.

        `NvmlError` if waiting fails; GPU_IS_LOST comes back at once and again, so pause before the next wait.
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
            _instance(data.gpuInstanceId),
            _instance(data.computeInstanceId),
        )

    def _uuid_of(self, device: Any) -> str:
        """The GPU's UUID as remembered: a lost GPU can't be asked any more."""
        known = self._uuids.get(_address(device))
        if known is not None:
            return known
        try:
            return str(self._nvml.call("nvmlDeviceGetUUID", device))
        except NvmlError:
            return ""

    def close(self) -> None:
        """Stop watching; nothing to do the second time."""
        if self._set is not None:
            events, self._set = self._set, None
            self._nvml.call("nvmlEventSetFree", events)

    def __enter__(self) -> EventSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _address(device: Any) -> int:
    import ctypes  # here, as the plugin's serving process needs nothing of this module but `GpuEvent`

    return ctypes.cast(device, ctypes.c_void_p).value or 0


def _instance(number: int) -> int | None:
    return None if int(number) == _NO_INSTANCE else int(number)
