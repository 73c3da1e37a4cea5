"""The NVIDIA kernel module: loaded, on disk for each kernel, in DKMS, and its security bulletins."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

from gpunode.facts.kernel_log import KernelLine
from gpunode.facts.packages import Packages
from gpunode.facts.pci import PciGpu
from gpunode.facts.tables import numbers, table
from gpunode.facts.toolkit import MODE, RUNTIMES, Settings
from gpunode.host import Host

PARAMETERS = "/proc/driver/nvidia/params"
# Debian builds the same module as nvidia-current and the kernel shows it with an underscore
MODULE_NAMES = ("nvidia", "nvidia_current")
_MODULES = ("nvidia", "nvidia-current")  # the same as their files are called
SHIM_KEY = "/var/lib/shim-signed/mok/MOK.der"
DKMS_KEY = "/var/lib/dkms/mok.pub"
AKMODS_KEY = "/etc/pki/akmods/certs/public_key.der"
_KEYS = (SHIM_KEY, DKMS_KEY, AKMODS_KEY)
_LONGEST = 64  # characters; a version has ten
_NUMBERS = re.compile(r"\d{1,9}", re.ASCII)


class LoadedModule(NamedTuple):
    """The running module; `live` is False while it is loading or unloading."""

    name: str
    version: str
    live: bool
    open: bool


class Kernel(NamedTuple):
    """One installed kernel and whether an NVIDIA module was built for it."""

    release: str
    has_module: bool


class ModuleFile(NamedTuple):
    """The module that the next ``modprobe nvidia`` would load; empty strings for unknown values."""

    version: str
    signer: str


def version_numbers(text: str) -> tuple[int, ...]:
    """``550.54.14`` as numbers that compare; () if it has none. Drivers have two or three parts."""
    return tuple(int(part) for part in _NUMBERS.findall(text)[:4])


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


def modules_dep(release: str) -> str:
    """The index of a kernel's modules on disk (modules.dep(5))."""
    return f"/lib/modules/{release}/modules.dep"


def has_module_file(host: Host, release: str, *names: str) -> bool:
    """Whether a kernel has one of these modules on disk, by default NVIDIA's."""
    return lists_module(host.read_text(modules_dep(release)) or "", *names)


def initramfs_of(host: Host, release: str) -> os.stat_result | None:
    """The initramfs of a kernel, as update-initramfs(8), dracut(8) or kernel-install(8) names it."""
    names = (f"initrd.img-{release}", f"initramfs-{release}.img", f"initrd-{release}")
    return next((status for name in names if (status := host.stat(f"/boot/{name}"))), None)


def installed_kernels(host: Host) -> tuple[Kernel, ...]:
    """Kernels that could be booted: a module index and an image. Removed ones leave no image behind."""
    kernels = []
    for release in host.listdir("/lib/modules"):
        index = host.read_text(modules_dep(release))
        image = host.stat(f"/boot/vmlinuz-{release}") or host.stat(f"/lib/modules/{release}/vmlinuz")
        if index is not None and image:
            kernels.append(Kernel(release, lists_module(index)))
    return tuple(kernels)


def lists_module(index: str, *names: str) -> bool:
    """Whether a modules.dep has one of these modules, by default NVIDIA's (compressed or not) anywhere below
    the kernel's directory."""
    ends = (":", ".gz:", ".xz:", ".zst:")
    return any(f"/{name}.ko{end}" in index for name in names or _MODULES for end in ends)


def flavour(release: str) -> str:
    """The part that distinguishes kernels of one version: ``generic`` of 6.8.0-45-generic, ``x86_64+rt`` on
    RHEL, and Oracle's own kernels from Red Hat's. Arch Linux appends the release to it (arch1-1)."""
    match = re.search(r"-([a-z][a-z0-9-]*|64kb)$", release)
    if match:
        return "arch" if match[1].startswith("arch") else match[1]
    return f"{release.rpartition('.')[2]}{'+uek' if 'uek.' in release else ''}"


def newer_kernels(kernels: tuple[Kernel, ...], running: str) -> tuple[Kernel, ...]:
    """Installed kernels of the running one's flavour that are newer: one of them boots next."""
    now = version_key(running)
    same = (kernel for kernel in kernels if flavour(kernel.release) == flavour(running))
    return tuple(kernel for kernel in same if version_key(kernel.release) > now)


def version_key(release: str) -> tuple[int, ...]:
    """A kernel release as numbers, without the digits of the distribution's release (el9_4, deb13) and of the
    architecture: 55.9.1.el10_0 is newer than 55.el10."""
    bare = re.sub(r"\.el\d\w*|\.x86_64|\.aarch64|-(?:cloud-|rt-)?(?:amd64|arm64)$", "", release)
    return tuple(int(part) for part in _NUMBERS.findall(bare))


def dkms_name(host: Host, version: str) -> str:
    """DKMS's name for this driver version: ``nvidia/580.159.03``, with Debian's packages
    ``nvidia-current/550.163.01``."""
    names = (name for name, here in dkms_trees(host) if here == version)
    return f"{next(names, 'nvidia')}/{version}"


def dkms_trees(host: Host) -> Iterator[tuple[str, str]]:
    """DKMS's names of drivers and their versions with source in DKMS, whether built or not."""
    for module in host.listdir("/var/lib/dkms"):
        if module == "nvidia" or module.startswith(("nvidia-current", "nvidia-open", "nvidia-srv")):
            yield from (
                (module, name) for name in host.listdir(f"/var/lib/dkms/{module}") if name[:1].isdigit()
            )


def module_file(host: Host) -> ModuleFile | None:
    """modinfo(8)'s output for the module on disk; None if modinfo finds none or isn't installed."""
    for name in _MODULES:
        if version := modinfo(host, "version", names=(name,)):
            return ModuleFile(version, modinfo(host, "signer", names=(name,)))
    return None


def modinfo(host: Host, field: str, *options: str, names: tuple[str, ...] = _MODULES) -> str:
    """A field of the first of these modules on disk that has one; empty if modinfo finds none."""
    for name in names:
        answer = host.run(["modinfo", *options, "-F", field, name], timeout=5.0)
        if answer.ok and answer.stdout.strip():
            return answer.stdout.strip()
    return ""


def has_headers(host: Host, release: str) -> bool:
    """Whether modules can be built for this kernel: its build directory exists and is configured."""
    return host.stat(f"/lib/modules/{release}/build/include/generated/autoconf.h") is not None


def waiting_keys(host: Host) -> bytes | None:
    """Certificates for which MokManager prompts during the next boot (mokutil --import); None if there are
    none. shim keeps them in the variable MokNew of its vendor's GUID, which mokutil writes."""
    return host.read_bytes("/sys/firmware/efi/efivars/MokNew-605dab50-e046-4300-abb6-3dd810dd8b23")


def signing_key(host: Host) -> str:
    """The certificate with which this node's own builds of modules are signed (DKMS, akmods); empty if it has
    none."""
    return next((path for path in _KEYS if host.exists(path)), "")


def key_enrolled(host: Host, path: str) -> bool | None:
    """Whether Secure Boot accepts modules signed with this certificate, according to mokutil(1); None if it
    doesn't report it."""
    answer = host.run(["mokutil", "--test-key", path], timeout=5.0)
    if "is already enrolled" in answer.stdout:
        return True
    known = ("is not enrolled", "is already in the enrollment")
    return False if any(words in answer.stdout for words in known) else None


def enrolled_keys(host: Host) -> str | None:
    """The certificates that Secure Boot accepts beside the firmware's, as mokutil(1) prints them."""
    answer = host.run(["mokutil", "--list-enrolled"], timeout=5.0)
    return answer.stdout if answer.ok else None


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


# Which GPUs a driver supports: by its branch and by the kind of its kernel module. The driver refuses others
# (`rm_is_supported_device` in the open modules' nv-pci.c), so a GPU that it controls is supported, regardless
# of the table.

TABLE = "gpu_branches"
DROPPED, TOO_NEW, FLAVOUR = "dropped", "too-new", "flavour"


class Supports(NamedTuple):
    """A row of the table: branches are whole numbers, 0 for no limit; `module` is open, proprietary or empty
    for both."""

    name: str
    min: int
    max: int
    module: str


class Unsuited(NamedTuple):
    """A GPU that this driver doesn't support, and why: `DROPPED`, `TOO_NEW` or `FLAVOUR`."""

    gpu: PciGpu
    supports: Supports
    reason: str


def supports(device_id: str) -> Supports | None:
    """Drivers that support a GPU of this PCI device id (``0x2330``); None if it is not in the table."""
    try:
        number = int(device_id, 16)
    except ValueError:
        return None
    for row in table(TABLE).rows:
        if int(row["first"], 16) <= number <= int(row["last"], 16):
            return Supports(row["name"], row["min"], row["max"], row["module"])
    return None


def branch(version: str) -> int:
    """580 of ``580.159.03``; 0 if unknown."""
    return next(iter(version_numbers(version)), 0)


def unsuited(
    gpus: tuple[PciGpu, ...], version: str, opened: bool | None, unused: Container[str] = ()
) -> Iterator[Unsuited]:
    """GPUs that a driver of this version, with an open module or not, doesn't support: those without a
    driver, and those of `unused`, by address, which it failed to initialise. `opened` is None if unknown."""
    for gpu in gpus:
        row = supports(gpu.device_id) if gpu.driver is None or gpu.address in unused else None
        reason = refusal(row, branch(version), opened) if row else ""
        if row and reason:
            yield Unsuited(gpu, row, reason)


def refusal(row: Supports, number: int, opened: bool | None) -> str:
    """Why a driver of this branch doesn't support such a GPU; empty if it does, or for branch 0."""
    if row.max and number > row.max:
        return DROPPED
    if 0 < number < row.min:
        return TOO_NEW
    flavour = {True: "proprietary", False: "open", None: ""}[opened]
    return FLAVOUR if number and flavour and row.module == flavour else ""


# NVIDIA's security bulletins against installed releases: which vulnerabilities a release still has. A
# bulletin is a row of tables/driver_cves.json or tables/toolkit_cves.json, newest first. A table doesn't
# contain later bulletins: nothing here says that a release has no vulnerability.

DRIVER, TOOLKIT = "driver_cves", "toolkit_cves"
Bulletin = Mapping[str, Any]


def kept() -> tuple[int, ...]:
    """Branches that the last bulletin has a fix for, the newest first."""
    return tuple(sorted({branch(version) for version in _last_bulletin()["fixed"]}, reverse=True))


def _last_bulletin() -> Bulletin:
    rows: tuple[Bulletin, ...] = table(DRIVER).rows
    return max(rows, key=lambda row: str(row["published"]))


def ended(number: int) -> Bulletin | None:
    """The last known bulletin, if it has no fix for this driver branch but for newer ones; else None."""
    branches = kept()
    return None if number in branches or number > max(branches, default=0) else _last_bulletin()


def name_of(bulletin: Bulletin) -> str:
    """Text for users."""
    return f"NVIDIA's security bulletin {bulletin['bulletin']} of {bulletin['published']}"


def driver_bulletins(version: str) -> tuple[tuple[Bulletin, str], ...]:
    """Bulletins with a fix in this driver's own branch that it lacks, each with the release that has it."""
    here = version_numbers(version)
    bulletins = []
    for bulletin in table(DRIVER).rows:
        for fixed in bulletin["fixed"]:
            release = version_numbers(fixed)
            if release[:1] == here[:1] and here < release:
                bulletins.append((bulletin, str(fixed)))
    return tuple(bulletins)


def toolkit_bulletins(host: Host, version: tuple[int, ...], settings: Settings) -> tuple[Bulletin, ...]:
    """Bulletins with a vulnerability that this release has, as it is configured here."""
    return tuple(row for row in table(TOOLKIT).rows if _concerns(row, host, version, settings))


def _concerns(row: Bulletin, host: Host, version: tuple[int, ...], settings: Settings) -> bool:
    by_cdi = settings.value(MODE) == "cdi"
    if version >= numbers(row["fixed"]) or (row["not_by_cdi"] and by_cdi):
        return False
    if row["cdi_only_below"] and version < numbers(row["cdi_only_below"]) and not by_cdi:
        return False
    if row["mitigation"] and settings.value(row["mitigation"]) is True:
        return False
    return not row["not_with"] or _low_level(host, settings) != row["not_with"]


def _low_level(host: Host, settings: Settings) -> str:
    """The first low-level runtime of the list that exists on this node: the toolkit uses that one."""
    names = [str(element) for element in settings.value(RUNTIMES)]
    here = (name for name in names if host.executable(name) or host.which(name))
    return next(here, names[0]).rpartition("/")[2]
