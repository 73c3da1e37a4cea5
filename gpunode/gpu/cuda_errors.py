"""CUDA's driver errors (CUresult in cuda.h): their names, and what each means for a node."""

from __future__ import annotations

_ERRORS = {
    1: ("INVALID_VALUE", "the driver refused an argument"),
    2: ("OUT_OF_MEMORY", "the GPU's memory is full: see which processes use it with nvidia-smi"),
    3: ("NOT_INITIALIZED", "the driver could not be initialised: is /dev/nvidia-uvm there and accessible?"),
    4: ("DEINITIALIZED", "the driver is shutting down"),
    34: (
        "STUB_LIBRARY",
        "libcuda.so.1 is the toolkit's link-time stub, not the driver: mend the library path",
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
