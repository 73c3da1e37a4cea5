"""How the loaded driver runs: its parameters, its firmware, and whether it has crashed."""

from __future__ import annotations

import re

from gpunode.facts.driver import parameters
from gpunode.facts.kernel_log import KernelLine
from gpunode.host import Host

_CUSTOM_FIRMWARE = "/sys/module/firmware_class/parameters/path"
# a crash names its kind first and the place of the instruction some lines later
_KINDS = ("BUG: ", "Oops: ", "kernel BUG at ", "general protection fault", "Unable to handle kernel")
_LINES_OF_A_CRASH = 60


def switched_off(host: Host) -> tuple[str, ...]:
    """Parameters that somebody set to 0 and that decide who makes device files, or where the driver runs."""
    found = parameters(host)
    return tuple(name for name in ("ModifyDeviceFiles", "EnableGpuFirmware") if found.get(name) == "0")


def wants_firmware(host: Host) -> bool:
    """Whether the proprietary module runs its GPUs with GSP firmware: NVML knows, a file doesn't. Only what
    was switched on by hand counts here (NVreg_EnableGpuFirmware=1)."""
    return parameters(host).get("EnableGpuFirmware") == "1"


def firmware(host: Host, version: str, kernel: str) -> tuple[str, ...]:
    """The directory with this version's GSP firmware, then its files, compressed or not; () if there is none.

    Searched as the kernel does (Documentation/driver-api/firmware/fw_search_path.rst).
    """
    custom = (host.read_text(_CUSTOM_FIRMWARE) or "").strip()
    for base in (
        custom,
        f"/lib/firmware/updates/{kernel}",
        "/lib/firmware/updates",
        f"/lib/firmware/{kernel}",
        "/lib/firmware",
    ):
        place = f"{base}/nvidia/{version}"
        files = host.glob(place, "gsp*") if base.startswith("/") else ()
        if files:
            return (place, *(path.rpartition("/")[2] for path in files))
    return ()


def firmware_versions(host: Host) -> tuple[str, ...]:
    """Versions of NVIDIA's driver that /lib/firmware has a directory for; nouveau's are named after chips."""
    names = host.listdir("/lib/firmware/nvidia")
    return tuple(name for name in names if re.fullmatch(r"\d{3}\.[\d.]{2,9}", name))


def crash(log: tuple[KernelLine, ...]) -> tuple[KernelLine, ...]:
    """The first line of the last crash inside an NVIDIA module and the one that shows the place; () if none.

    x86 prints ``RIP: 0010:symbol+0x1/0x2 [nvidia]``, arm64 ``pc : symbol+0x1/0x2 [nvidia]``.
    """
    found: tuple[KernelLine, ...] = ()
    start, left = None, 0
    for line in log:
        if line.text.lstrip().startswith(_KINDS):
            start, left = start if left else line, _LINES_OF_A_CRASH
        elif left:
            left -= 1
            here = line.text.lstrip()
            if start and here.startswith(("RIP: ", "pc : ")) and re.search(r"\[nvidia[\w-]*\b", here):
                found, left = (start, line), 0
    return found
