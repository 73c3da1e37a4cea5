"""NVIDIA's device files, and the device numbers that the kernel assigned to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpunode.errors import GpunodeError, Unreadable
from gpunode.host import Host
from gpunode.host.reading import DeviceNode

_GPUS = "/proc/driver/nvidia/gpus"
_CAPABILITIES = "/proc/driver/nvidia/capabilities"
CONTROL = "/dev/nvidiactl"
IMEX_CHANNELS = "/dev/nvidia-caps-imex-channels"


class DriverGpu(NamedTuple):
    """One GPU as the loaded driver lists it; `minor` is N of /dev/nvidiaN, None if unknown.

    `video_bios` is its version, ``00.00.00.00.00`` for a virtual GPU. `excluded` if the driver is configured
    to ignore it (NVreg_ExcludedGpus): NVML doesn't list it then.
    """

    address: str
    minor: int | None
    uuid: str
    model: str = ""
    video_bios: str = ""
    excluded: bool = False


def driver_gpus(host: Host) -> tuple[DriverGpu, ...]:
    """From /proc/driver/nvidia/gpus/*/information."""
    gpus = []
    for address in host.listdir(_GPUS):
        # reading a lost GPU fails here; it stays in the list without its numbers
        fields = dict(_pairs(host.text_or_empty(f"{_GPUS}/{address}/information")))
        minor = fields.get("Device Minor", "")
        gpus.append(
            DriverGpu(
                address,
                int(minor) if re.fullmatch(r"\d{1,5}", minor, re.ASCII) else None,
                fields.get("GPU UUID", ""),
                fields.get("Model", ""),
                fields.get("Video BIOS", ""),
                fields.get("GPU Excluded", "") == "Yes",
            )
        )
    return tuple(gpus)


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
    majors: dict[str, int] = {}
    for line in proc_devices.partition("Block devices")[0].splitlines():
        match = re.fullmatch(r"\s*(\d{1,6})\s+(\S+)\s*", line, re.ASCII)
        if match:
            majors[match[2]] = int(match[1])
    return majors


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


# Which of the driver's device files a process has open: /proc/PID/fd (proc(5)), by device number. A path
# proves nothing: a container's /dev/nvidia0 may be an ordinary file, or a leftover of a driver that is no
# longer loaded, and a device may be opened under any name. On a recorded machine only the names are known.

CONTROL_MINOR = 255
"""The minor number of /dev/nvidiactl beside the GPUs' (nvidia's kernel-open/common/inc/nv-linux.h)."""
_MODESET = 254
_NAMES = ("nvidia", "nvidia-frontend")  # of the GPUs' major number, newer and older drivers
_UVM, _CAPS = "nvidia-uvm", "nvidia-caps"
_PATH = re.compile(r"/dev/(?:nvidia(\d+|ctl|-uvm)|nvidia-caps/nvidia-cap(\d+))(?: \(deleted\))?", re.ASCII)


class OpenDevices(NamedTuple):
    """Minor numbers of GPUs and of capabilities; `control` for /dev/nvidiactl or /dev/nvidia-uvm."""

    gpus: frozenset[int] = frozenset()
    caps: frozenset[int] = frozenset()
    control: bool = False

    def __bool__(self) -> bool:
        return bool(self.gpus or self.caps or self.control)


def open_devices(host: Host, pid: int, majors: Mapping[str, int]) -> OpenDevices | None:
    """The driver's device files that a process has open; None without permission to see them, nothing if the
    process has ended.

    `majors` is driver name to major number, as in /proc/devices (`Node.majors`).
    """
    place = f"/proc/{pid}/fd"
    gpus, caps, control = set(), set(), False
    try:
        for name in host.listdir(place):
            for kind, minor in _driver_file(host, f"{place}/{name}", majors):
                if kind == _CAPS:
                    caps.add(minor)
                elif kind == _UVM or minor == CONTROL_MINOR:
                    control = True
                elif minor != _MODESET:
                    gpus.add(minor)
    except (Unreadable, PermissionError):
        return None
    except (GpunodeError, OSError):
        return OpenDevices()
    return OpenDevices(frozenset(gpus), frozenset(caps), control)


def is_the_drivers(major: int, majors: Mapping[str, int]) -> bool:
    """Whether a major number is one that every CUDA program opens a file of."""
    return any(majors.get(name) == major for name in (*_NAMES, _UVM))


def _driver_file(host: Host, path: str, majors: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """The driver and minor number of an open file; nothing if it is another file."""
    link = host.readlink(path) or ""
    if not host.live:
        yield from _by_name(link)
    # only possible devices are examined: a file on an unreachable network drive would block
    elif link.startswith("/dev/") or "nvidia" in link:
        node = host.device(path)
        for kind in (*_NAMES, _UVM, _CAPS) if node is not None else ():
            if node is not None and majors.get(kind) == node.major:
                yield kind, node.minor


def _by_name(link: str) -> Iterator[tuple[str, int]]:
    match = _PATH.fullmatch(link)
    if match is None:
        return
    number, capability = match.groups()
    if capability is not None:
        yield _CAPS, int(capability)
    elif number == "-uvm":
        yield _UVM, 0
    else:
        yield _NAMES[0], CONTROL_MINOR if number == "ctl" else int(number)
