"""The few functions of CUDA's driver API that a kernel launch needs: the only module that opens libcuda.

Standard library only: it also runs inside containers. A process that has used it must not fork.

As a child process it lists the GPUs if NVML lists none or reports too little about them, as on Tegra. It
answers as `gpu.nvml_health` does, without a driver's version, PCI addresses and MIG.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from gpunode.gpu.child import Parent

# CUDA's driver errors (CUresult in cuda.h): their names, and the meaning of each for a node.

_ERRORS = {
    1: ("INVALID_VALUE", "the driver refused an argument"),
    2: ("OUT_OF_MEMORY", "the GPU's memory is full: see which processes use it with nvidia-smi"),
    3: ("NOT_INITIALIZED", "the driver could not be initialised: is /dev/nvidia-uvm there and accessible?"),
    4: ("DEINITIALIZED", "the driver is shutting down"),
    34: (
        "STUB_LIBRARY",
        "libcuda.so.1 is the toolkit's link-time stub, not the driver: fix the library path",
    ),
    35: ("INSUFFICIENT_DRIVER", "the driver is older than this CUDA: update the driver"),
    46: (
        "DEVICE_UNAVAILABLE",
        "the GPU is busy or in exclusive-process compute mode: see nvidia-smi -q -d COMPUTE",
    ),
    100: ("NO_DEVICE", "CUDA sees no GPU: are /dev/nvidia* there, and does CUDA_VISIBLE_DEVICES name one?"),
    101: ("INVALID_DEVICE", "no such GPU, or its device file is missing"),
    102: ("DEVICE_NOT_LICENSED", "the vGPU has no licence"),
    200: ("INVALID_IMAGE", "the driver can't read the kernel"),
    201: ("INVALID_CONTEXT", "the CUDA context is gone"),
    205: ("MAP_FAILED", "memory could not be mapped"),
    209: ("NO_BINARY_FOR_GPU", "the driver has no code for this GPU: it doesn't support this model"),
    214: ("ECC_UNCORRECTABLE", "an uncorrectable memory error: drain the node and reset the GPU"),
    218: ("INVALID_PTX", "the driver's compiler rejects the kernel"),
    220: ("NVLINK_UNCORRECTABLE", "an NVLink error: drain the node and reset the GPU"),
    221: ("JIT_COMPILER_NOT_FOUND", "libnvidia-ptxjitcompiler.so.1 is missing: install the whole driver"),
    222: ("UNSUPPORTED_PTX_VERSION", "the driver is too old for the kernel's PTX"),
    226: ("CONTAINED", "a contained memory error: start the program again"),
    300: ("INVALID_SOURCE", "the kernel can't be read"),
    301: ("FILE_NOT_FOUND", "a file is missing"),
    302: (
        "SHARED_OBJECT_SYMBOL_NOT_FOUND",
        "a driver library lacks a symbol: libraries of two drivers are mixed",
    ),
    303: ("SHARED_OBJECT_INIT_FAILED", "a driver library could not be initialised"),
    304: ("OPERATING_SYSTEM", "the operating system refused: cgroup, limits or permissions of /dev/nvidia*"),
    400: ("INVALID_HANDLE", "a handle is not valid"),
    500: ("NOT_FOUND", "a name was not found"),
    600: ("NOT_READY", "the GPU is not done"),
    700: ("ILLEGAL_ADDRESS", "the kernel touched memory that isn't its own"),
    701: ("LAUNCH_OUT_OF_RESOURCES", "the kernel needs more than the GPU has"),
    702: ("LAUNCH_TIMEOUT", "the kernel ran too long for a GPU that also drives a display"),
    709: ("CONTEXT_IS_DESTROYED", "the CUDA context was destroyed"),
    710: ("ASSERT", "an assertion failed on the GPU"),
    714: ("HARDWARE_STACK_ERROR", "the GPU reports a hardware error: see dmesg for an XID"),
    715: ("ILLEGAL_INSTRUCTION", "the GPU met an illegal instruction: see dmesg for an XID"),
    716: ("MISALIGNED_ADDRESS", "the kernel used a misaligned address"),
    717: ("INVALID_ADDRESS_SPACE", "the kernel used a wrong address space"),
    718: ("INVALID_PC", "the GPU's program counter went astray"),
    719: ("LAUNCH_FAILED", "the kernel failed on the GPU: see dmesg for an XID"),
    720: ("COOPERATIVE_LAUNCH_TOO_LARGE", "the launch is too large"),
    800: ("NOT_PERMITTED", "not permitted"),
    801: ("NOT_SUPPORTED", "not supported by this GPU or driver"),
    802: ("SYSTEM_NOT_READY", "the NVSwitch fabric isn't initialised: is nvidia-fabricmanager running?"),
    803: (
        "SYSTEM_DRIVER_MISMATCH",
        "libcuda and the kernel module have different versions: reboot after the update",
    ),
    804: (
        "COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "a CUDA forward-compatibility library is in use that this GPU can't take",
    ),
    805: ("MPS_CONNECTION_FAILED", "the MPS control daemon doesn't answer: is it running, for this user?"),
    806: ("MPS_RPC_FAILURE", "the MPS server doesn't answer"),
    807: ("MPS_SERVER_NOT_READY", "the MPS server is not ready: try again"),
    808: ("MPS_MAX_CLIENTS_REACHED", "MPS has no room for another client"),
    809: ("MPS_MAX_CONNECTIONS_REACHED", "MPS has no room for another connection"),
    810: ("MPS_CLIENT_TERMINATED", "the MPS server ended this client"),
    999: ("UNKNOWN", "unknown driver error: reload nvidia-uvm (after a suspend, for example) and see dmesg"),
}


def explain(code: int) -> str:
    """Name, number and meaning in one line: ``CUDA_ERROR_NO_DEVICE (100): CUDA sees no GPU: ...``."""
    known = _ERRORS.get(code)
    return f"CUDA_ERROR_{known[0]} ({code}): {known[1]}" if known else f"CUDA error {code}"


LIBRARY = "libcuda.so.1"
_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES = 5, 6  # CUjit_option
_LOG_BYTES = 4096
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class CudaError(Exception):
    """A CUDA call failed. `code` is its CUresult, None if the library itself is unusable."""

    def __init__(self, code: int | None, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Cuda:
    """libcuda, initialised. It has the devices that CUDA_VISIBLE_DEVICES named when it was made."""

    def __init__(self) -> None:
        """`CudaError` if the library is missing or cuInit fails."""
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaError(None, f"{LIBRARY} can't be loaded: {error}") from error
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, function: str, *arguments: Any) -> None:
        """Call one function; `CudaError` names it and the meaning of its error."""
        try:
            code = getattr(self._library, function)(*arguments)
        except AttributeError as error:
            raise CudaError(None, f"{LIBRARY} lacks {function}: the driver is too old") from error
        if code != 0:
            raise CudaError(code, f"{function.partition('_')[0]}: {explain(code)}")

    def version(self) -> str:
        """The newest CUDA that the driver supports: ``12.4``."""
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def device_count(self) -> int:
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def _handle(self, device: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        return handle

    def name(self, device: int) -> str:
        """Such as ``NVIDIA H100 80GB HBM3``; devices are numbered from 0."""
        buffer = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", buffer, ctypes.c_int(len(buffer)), self._handle(device))
        return buffer.value.decode("utf-8", "replace")

    def memory(self, device: int) -> int:
        """Total memory of the device in bytes."""
        size = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(size), self._handle(device))
        return size.value

    def compute_capability(self, device: int) -> str:
        """Such as ``8.7``."""
        value, parts = ctypes.c_int(), []
        for attribute in _CAPABILITY:
            self.call(
                "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), self._handle(device)
            )
            parts.append(str(value.value))
        return ".".join(parts)

    def uuid(self, device: int) -> str:
        """``GPU-...`` or ``MIG-...``; "" if the driver doesn't report it (before CUDA 9.2, MIG before CUDA
        11.4)."""
        is_mig = " MIG " in self.name(device)
        raw = (ctypes.c_ubyte * 16)()
        # the first version returns the GPU of a MIG device
        newest = hasattr(self._library, "cuDeviceGetUuid_v2")
        if not newest and (is_mig or not hasattr(self._library, "cuDeviceGetUuid")):
            return ""
        self.call("cuDeviceGetUuid_v2" if newest else "cuDeviceGetUuid", raw, self._handle(device))
        return f"{'MIG' if is_mig else 'GPU'}-{UUID(bytes=bytes(raw))}"

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """A new context on one device; everything allocated in it is freed with it."""
        context = ctypes.c_void_p()
        self.call("cuCtxCreate_v2", ctypes.byref(context), ctypes.c_uint(0), self._handle(device))
        try:
            yield
        finally:
            # after a failed kernel this fails too, without new information
            self._library.cuCtxDestroy_v2(context)

    def load(self, ptx: str, entry: str) -> ctypes.c_void_p:
        """Make the driver compile PTX for the current device; return the kernel `entry`."""
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(_JIT_ERROR_LOG, _JIT_ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            image = ctypes.c_char_p(ptx.encode("ascii"))
            self.call("cuModuleLoadDataEx", ctypes.byref(module), image, ctypes.c_uint(2), options, values)
        except CudaError as error:
            log_text = " ".join(log.value.decode("utf-8", "replace").split())
            raise CudaError(
                error.code, f"{error.message}: {log_text}" if log_text else error.message
            ) from error
        self.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(entry.encode()))
        return function

    def allocate(self, size: int) -> ctypes.c_uint64:
        """`size` bytes of device memory of the current context."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address

    def fill(self, target: ctypes.c_uint64, word: int, count: int) -> None:
        """Write the 32-bit `word` `count` times."""
        self.call("cuMemsetD32_v2", target, ctypes.c_uint(word), ctypes.c_size_t(count))

    def to_device(self, target: ctypes.c_uint64, source: int, size: int) -> None:
        """Copy `size` bytes from the host address `source`."""
        self.call("cuMemcpyHtoD_v2", target, ctypes.c_void_p(source), ctypes.c_size_t(size))

    def from_device(self, target: int, source: ctypes.c_uint64, size: int) -> None:
        """Copy `size` bytes to the host address `target`."""
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(target), source, ctypes.c_size_t(size))

    def launch(self, kernel: ctypes.c_void_p, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        """Run a kernel on a one-dimensional grid and wait until it ends; `arguments` are ctypes values."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(item) for item in arguments))
        single, none = ctypes.c_uint(1), ctypes.c_uint(0)
        grid, block = ctypes.c_uint(blocks), ctypes.c_uint(threads)
        self.call(
            "cuLaunchKernel", kernel, grid, single, single, block, single, single, none, None, pointers, None
        )
        self.call("cuCtxSynchronize")


# The child that lists the GPUs.


def main() -> int:
    """Always 0, so that anything else means a crash."""
    parent = Parent()
    try:
        cuda = Cuda()
        gpus = [_gpu(cuda, number) for number in range(cuda.device_count())]
        parent.send(inventory={"driverVersion": "", "cudaVersion": cuda.version(), "gpus": gpus})
    except CudaError as error:
        parent.send(error={"message": error.message})
    return 0


def _gpu(cuda: Cuda, number: int) -> dict[str, object]:
    """The devices in the form that `model.inventory_from_json` reads."""
    return {
        "index": number,
        "uuid": cuda.uuid(number) or f"GPU-{number}",
        "name": cuda.name(number),
        "pci": "",
        "memoryBytes": cuda.memory(number),
        "computeCapability": cuda.compute_capability(number),
    }


if __name__ == "__main__":
    sys.exit(main())
