"""NVIDIA's device files, and the numbers that the kernel gave out for them."""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.host import DeviceNode, Host

_GPUS = "/proc/driver/nvidia/gpus"
_CAPABILITIES = "/proc/driver/nvidia/capabilities"
_PARAMS = "/proc/driver/nvidia/params"
CONTROL = "/dev/nvidiactl"
IMEX_CHANNELS = "/dev/nvidia-caps-imex-channels"


@dataclass(frozen=True)
class DriverGpu:
    """One GPU as the loaded driver lists it; `minor` is N of /dev/nvidiaN, None if it doesn't say.

    `video_bios` is its version, ``00.00.00.00.00`` for a virtual GPU. `excluded` if the driver was told to
    leave it alone (NVreg_ExcludedGpus): NVML doesn't list it then.
    """

    address: str
    minor: int | None
    uuid: str
    model: str = ""
    video_bios: str = ""
    excluded: bool = False


def driver_gpus(host: Host) -> tuple[DriverGpu, ...]:
    """From /proc/driver/nvidia/gpus/*/information."""
    found = []
    for address in host.listdir(_GPUS):
        try:
            text = host.read_text(f"{_GPUS}/{address}/information") or ""
        except GpunodeError:
            text = ""  # a lost GPU fails here; it stays in the list without its numbers
        fields = dict(_pairs(text))
        minor = fields.get("Device Minor", "")
        found.append(
            DriverGpu(
                address,
                int(minor) if re.fullmatch(r"\d{1,5}", minor, re.ASCII) else None,
                fields.get("GPU UUID", ""),
                fields.get("Model", ""),
                fields.get("Video BIOS", ""),
                fields.get("GPU Excluded", "") == "Yes",
            )
        )
    return tuple(found)


def _pairs(text: str) -> list[tuple[str, str]]:
    split = (line.partition(":") for line in text.splitlines())
    return [(key.strip(), value.strip()) for key, colon, value in split if colon]


def mig_capability_nodes(host: Host) -> tuple[str, ...]:
    """Device files of the MIG instances that the driver has: each GPU instance's and compute instance's."""
    places = [
        f"{_CAPABILITIES}/{gpu}/mig/{instance}"
        for gpu in host.listdir(_CAPABILITIES)
        if gpu.startswith("gpu")
        for instance in host.listdir(f"{_CAPABILITIES}/{gpu}/mig")
    ]
    places += [f"{place}/{name}" for place in places for name in host.listdir(place) if name.startswith("ci")]
    texts = (host.read_text(f"{place}/access") or "" for place in places)
    minors = {dict(_pairs(text)).get("DeviceFileMinor", "") for text in texts}
    numbers = sorted(int(minor) for minor in minors if re.fullmatch(r"\d{1,7}", minor, re.ASCII))
    return tuple(f"/dev/nvidia-caps/nvidia-cap{number}" for number in numbers)


def character_majors(proc_devices: str) -> dict[str, int]:
    """Driver name to major number, from the first half of /proc/devices."""
    found: dict[str, int] = {}
    for line in proc_devices.partition("Block devices")[0].splitlines():
        match = re.fullmatch(r"\s*(\d{1,6})\s+(\S+)\s*", line, re.ASCII)
        if match:
            found[match[2]] = int(match[1])
    return found


def nvidia_nodes(host: Host) -> tuple[DeviceNode, ...]:
    """Every NVIDIA character device under /dev."""
    here = [node for node in host.devices("/dev") if node.path.startswith("/dev/nvidia")]
    return (*here, *host.devices("/dev/nvidia-caps"))


def expected_major(path: str, majors: dict[str, int]) -> int | None:
    """The major number that the kernel uses now for a device file; None if the driver isn't registered.

    Drivers call the GPU major ``nvidia-frontend``, newer ones ``nvidia``; both are 195.
    """
    name = path.rpartition("/")[2]
    if path.startswith("/dev/nvidia-caps/"):
        owners: tuple[str, ...] = ("nvidia-caps",)
    elif name.startswith("nvidia-uvm"):
        owners = ("nvidia-uvm",)
    elif re.fullmatch(r"nvidia\d+|nvidiactl", name):
        owners = ("nvidia", "nvidia-frontend")
    elif name == "nvidia-modeset":
        owners = ("nvidia-modeset", "nvidia", "nvidia-frontend")
    else:
        return None
    return next((majors[owner] for owner in owners if owner in majors), None)


def needed(path: str) -> bool:
    """Whether every CUDA program opens this device file."""
    return re.fullmatch(r"/dev/nvidia(\d+|ctl|-uvm)", path) is not None


def device_file_mode(host: Host) -> int | None:
    """The mode that the loaded driver wants for its files (the decimal DeviceFileMode); None if untold."""
    fields = dict(_pairs(host.read_text(_PARAMS) or ""))
    told = fields.get("DeviceFileMode", "")
    return int(told) if re.fullmatch(r"\d{1,4}", told, re.ASCII) else None
