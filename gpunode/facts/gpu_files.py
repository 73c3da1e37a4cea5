"""Which of the driver's device files a process has open: /proc/PID/fd (proc(5)), by device number.

A path proves nothing: a container's /dev/nvidia0 may be a file that somebody made, or what a driver left
that is no longer loaded, and a device may be opened under any name. Of a recorded machine only the names are
known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError, Unreadable
from gpunode.host import Host

CONTROL = 255
"""The minor number of /dev/nvidiactl beside the GPUs' (nvidia's kernel-open/common/inc/nv-linux.h)."""
_MODESET = 254
_NAMES = ("nvidia", "nvidia-frontend")  # of the GPUs' major number, newer and older drivers
_UVM, _CAPS = "nvidia-uvm", "nvidia-caps"
_PATH = re.compile(r"/dev/(?:nvidia(\d+|ctl|-uvm)|nvidia-caps/nvidia-cap(\d+))(?: \(deleted\))?", re.ASCII)


@dataclass(frozen=True)
class Opened:
    """Minor numbers of GPUs and of capabilities; `control` for /dev/nvidiactl or /dev/nvidia-uvm."""

    gpus: frozenset[int] = frozenset()
    caps: frozenset[int] = frozenset()
    control: bool = False

    def __bool__(self) -> bool:
        return bool(self.gpus or self.caps or self.control)


def opened(host: Host, pid: int, majors: Mapping[str, int]) -> Opened | None:
    """What a process has open of the driver's; None if that isn't ours to see, nothing if it is gone.

    `majors` is driver name to major number, as /proc/devices has them (`Node.majors`).
    """
    place = f"/proc/{pid}/fd"
    gpus, caps, control = set(), set(), False
    try:
        for name in host.listdir(place):
            for kind, minor in _driver_file(host, f"{place}/{name}", majors):
                if kind == _CAPS:
                    caps.add(minor)
                elif kind == _UVM or minor == CONTROL:
                    control = True
                elif minor != _MODESET:
                    gpus.add(minor)
    except (Unreadable, PermissionError):
        return None
    except (GpunodeError, OSError):
        return Opened()
    return Opened(frozenset(gpus), frozenset(caps), control)


def is_the_drivers(major: int, majors: Mapping[str, int]) -> bool:
    """Whether a major number is one that every CUDA program opens a file of."""
    return any(majors.get(name) == major for name in (*_NAMES, _UVM))


def _driver_file(host: Host, path: str, majors: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Whose device an open file is, and its minor number; nothing if it is another one."""
    link = host.readlink(path) or ""
    if not host.live:
        yield from _by_name(link)
    # only what may be a device is looked at: a file on a dead network drive would let us wait
    elif link.startswith("/dev/") or "nvidia" in link:
        node = host.device(path)
        for kind in (*_NAMES, _UVM, _CAPS) if node is not None else ():
            if node is not None and majors.get(kind) == node.major:
                yield kind, node.minor


def _by_name(link: str) -> Iterator[tuple[str, int]]:
    found = _PATH.fullmatch(link)
    if found is None:
        return
    number, capability = found.groups()
    if capability is not None:
        yield _CAPS, int(capability)
    elif number == "-uvm":
        yield _UVM, 0
    else:
        yield _NAMES[0], CONTROL if number == "ctl" else int(number)
