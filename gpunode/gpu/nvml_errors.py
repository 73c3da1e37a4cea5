"""NVML's return codes and what each means for a node."""

from __future__ import annotations

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
CORRUPTED_INFOROM = 14
GPU_IS_LOST = 15
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
    """An NVML call failed: `code` is NVML's return code (nvmlReturn_t), `message` says what that means."""

    def __init__(self, code: int, message: str = "") -> None:
        self.code = code
        self.message = message or _MEANINGS.get(code, "NVML failed")
        super().__init__(f"{self.message} (NVML {code})")
