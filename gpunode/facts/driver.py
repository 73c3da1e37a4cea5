"""NVIDIA's driver on this node: its kernel module, settings, firmware, packages and crashes."""

from __future__ import annotations

import re
from typing import NamedTuple

from gpunode.facts.kernel_log import KernelLine
from gpunode.facts.packages import Packages
from gpunode.host import Host

PARAMETERS = "/proc/driver/nvidia/params"
# Debian builds the same module as nvidia-current and the kernel shows it with an underscore
MODULE_NAMES = ("nvidia", "nvidia_current")
MODULE_FILES = ("nvidia", "nvidia-current")  # the same as their files are called
_LONGEST = 64  # characters; a version has ten
_NUMBERS = re.compile(r"\d{1,9}", re.ASCII)


class LoadedModule(NamedTuple):
    """The running module; `live` is False while it is loading or unloading."""

    name: str
    version: str
    live: bool
    open: bool


class ModuleFile(NamedTuple):
    """The module that the next ``modprobe nvidia`` would load; empty strings for unknown values."""

    version: str
    signer: str


def version_numbers(text: str) -> tuple[int, ...]:
    """``550.54.14`` as numbers that compare; () if it has none. Drivers have two or three parts."""
    return tuple(int(part) for part in _NUMBERS.findall(text)[:4])


def branch(version: str) -> int:
    """580 of ``580.159.03``; 0 if unknown."""
    return next(iter(version_numbers(version)), 0)


def loaded_module(host: Host) -> LoadedModule | None:
    """From /sys/module; None if the kernel has no NVIDIA module."""
    for name in MODULE_NAMES:
        place = f"/sys/module/{name}"
        if not host.is_dir(place):
            continue
        state = (host.read_text(f"{place}/initstate") or "live").strip()
        version = (host.read_text(f"{place}/version") or "").strip()
        version = version if len(version) <= _LONGEST else ""  # it becomes part of paths
        banner = host.read_text("/proc/driver/nvidia/version") or ""
        return LoadedModule(name, version, state == "live", "Open Kernel Module" in banner)
    return None


def module_loaded(host: Host, name: str) -> bool:
    """Whether the kernel has a module of this name (with underscores), built in or loaded."""
    return host.is_dir(f"/sys/module/{name}")


def parameters(host: Host) -> dict[str, str]:
    """The loaded driver's settings, names without NVreg_, strings without their quotes; {} if
    /proc/driver/nvidia/params doesn't exist."""
    pairs = (line.partition(":") for line in (host.read_text(PARAMETERS) or "").splitlines())
    return {name.strip(): value.strip().strip('"') for name, colon, value in pairs if colon}


def module_file(host: Host) -> ModuleFile | None:
    """modinfo(8)'s output for the module on disk; None if modinfo finds none or isn't installed."""
    for name in MODULE_FILES:
        if version := modinfo(host, "version", names=(name,)):
            return ModuleFile(version, modinfo(host, "signer", names=(name,)))
    return None


def modinfo(host: Host, field: str, *options: str, names: tuple[str, ...] = MODULE_FILES) -> str:
    """A field of the first of these modules on disk that has one; empty if modinfo finds none."""
    for name in names:
        answer = host.run(["modinfo", *options, "-F", field, name], timeout=5.0)
        if answer.ok and answer.stdout.strip():
            return answer.stdout.strip()
    return ""


def driver_packages(packages: Packages) -> tuple[str, ...]:
    """Installed driver packages by name; libraries and tools aren't the driver."""
    return tuple(package.name for package in packages.containing("nvidia") if _is_driver(package.name))


def _is_driver(package: str) -> bool:
    match = re.match(r"(kmod-|akmod-)?nvidia-(driver|open|dkms|kernel|kmod|gfx)", package)
    return match is not None or package == "akmod-nvidia"  # RPM Fusion's


# State of the loaded driver: its parameters, its firmware, and whether it has crashed.

_CUSTOM_FIRMWARE = "/sys/module/firmware_class/parameters/path"
# a crash names its kind first and the place of the instruction some lines later
_KINDS = ("BUG: ", "Oops: ", "kernel BUG at ", "general protection fault", "Unable to handle kernel")
_LINES_OF_A_CRASH = 60


def switched_off(host: Host) -> tuple[str, ...]:
    """Parameters set to 0 that determine what creates device files, or where the driver runs."""
    values = parameters(host)
    return tuple(name for name in ("ModifyDeviceFiles", "EnableGpuFirmware") if values.get(name) == "0")


def wants_firmware(host: Host) -> bool:
    """Whether the proprietary module runs its GPUs with GSP firmware: NVML knows, a file doesn't. Only an
    explicit setting counts here (NVreg_EnableGpuFirmware=1)."""
    return parameters(host).get("EnableGpuFirmware") == "1"


def firmware_directories(host: Host, kernel: str) -> tuple[str, ...]:
    """Where the kernel searches firmware (Documentation/driver-api/firmware/fw_search_path.rst), in its
    order."""
    custom = (host.read_text(_CUSTOM_FIRMWARE) or "").strip()
    parts = (f"/{kernel}", "") if kernel else ("",)
    usual = (f"{place}{part}" for place in ("/lib/firmware/updates", "/lib/firmware") for part in parts)
    return (*((custom,) if custom.startswith("/") else ()), *usual)


def firmware(host: Host, version: str, kernel: str) -> tuple[str, ...]:
    """The directory with this version's GSP firmware, then its files, compressed or not; () if there is
    none."""
    for base in firmware_directories(host, kernel):
        place = f"{base}/nvidia/{version}"
        files = host.glob(place, "gsp*")
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
    result: tuple[KernelLine, ...] = ()
    start, left = None, 0
    for line in log:
        if line.text.lstrip().startswith(_KINDS):
            start, left = start if left else line, _LINES_OF_A_CRASH
        elif left:
            left -= 1
            here = line.text.lstrip()
            if start and here.startswith(("RIP: ", "pc : ")) and re.search(r"\[nvidia[\w-]*\b", here):
                result, left = (start, line), 0
    return result
