"""How this node gets its driver: checks of its packages, and the fixes that depend on it (repositories, DKMS,
prebuilt modules, keys).

Package names are those of NVIDIA's own repositories (the CUDA driver installation guide) and of the
distributions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpunode.checks import fixes
from gpunode.checks.finding import DISRUPTS_NOTHING, REPLACES_DRIVER, Evidence, Fix
from gpunode.checks.fixes import DRIVER_GUIDE, per_family
from gpunode.checks.model import Verdict, check, ok, seen, warn
from gpunode.facts import driver
from gpunode.facts.driver_targets import (
    LONG_TERM,
    RUN_INSTALLER,
    GpuSupport,
    has_repository,
    last_branch,
    refusal,
    supports,
)
from gpunode.facts.kernels import flavour, header_package, kernel_devel, linux_headers, version_key
from gpunode.facts.libraries import is_compat
from gpunode.facts.module_builds import AKMODS_KEY, DKMS_KEY, SHIM_KEY, dkms_name, signing_key
from gpunode.facts.node import Node
from gpunode.facts.packages import Automatic, Package
from gpunode.facts.traits import OPERATOR_DRIVER
from gpunode.gpu.library_paths import CUDA

if TYPE_CHECKING:
    from gpunode.packages.driver_choice import Choice

# Fixes for the driver.

_GUIDE = f"follow {DRIVER_GUIDE}"

# checks/preconditions.py has the command for systems where these fail
INSTALL_DRIVER = Fix("gpunode driver install --yes", disturbs=REPLACES_DRIVER)
UPGRADE_DRIVER = INSTALL_DRIVER.then_reboot()

# SUSE's names in these are those for one driver, for gpunode explain: on a node suse_modules and
# suse_libraries have the names for its driver
BUILD_MODULE = per_family(
    "apt install linux-headers-$(uname -r) && dkms autoinstall -k $(uname -r) && modprobe nvidia",
    "dnf install kernel-devel-$(uname -r) && dkms autoinstall -k $(uname -r) && modprobe nvidia",
    "zypper install --force nvidia-open-driver-G06-signed-kmp-default && modprobe nvidia",
    "dkms autoinstall -k $(uname -r) && modprobe nvidia",
)
APT_LIBRARIES = ("libnvidia-compute", "nvidia-utils")
INSTALL_LIBRARIES = per_family(
    f"{fixes.packages('debian', 'install', APT_LIBRARIES)} && ldconfig",
    "dnf install nvidia-driver-cuda && ldconfig",
    "zypper install nvidia-compute-utils-G06 && ldconfig",
    "ldconfig",
)


def build_module_for(release: str, family: str) -> Fix:
    """Build the module with DKMS for a kernel that isn't running yet."""
    headers = {
        "debian": f"apt install {linux_headers(release)} && ",
        "rhel": f"dnf install {kernel_devel(release)} && ",
    }
    return Fix(f"{headers.get(family, '')}dkms autoinstall -k {release}", disturbs=DISRUPTS_NOTHING)


ENROL_NOTE = (
    "mokutil asks for a new password. Enter it at the node's console (or its BMC's) during the reboot, under "
    "Enroll MOK"
)
ENROL_KEY = per_family(
    "mokutil --import /var/lib/shim-signed/mok/MOK.der",
    "mokutil --import /var/lib/dkms/mok.pub",
    "mokutil --import /var/lib/dkms/mok.pub",
    "mokutil --import /var/lib/dkms/mok.pub",
    note=ENROL_NOTE,
).then_reboot()


# what DKMS needs to build for the running kernel
INSTALL_HEADERS = per_family(
    "apt install linux-headers-$(uname -r)",
    "dnf install kernel-devel-$(uname -r)",
    "zypper install kernel-default-devel=$(echo $(uname -r) | sed 's/-default$//')",
    _GUIDE,
)


def install_headers(release: str, family: str) -> Fix:
    """The same for this kernel, by the names that its flavour has."""
    name, version = header_package(family, release)
    versioned = {"rhel": kernel_devel(release), "suse": f"{name}={version}"}.get(family, name)
    return Fix(fixes.packages(family, "install", [versioned]) or _GUIDE)


# MokManager times out after ten seconds: before the reboot, an administrator must know what it will prompt
# for
LIST_NEW_KEYS = fixes.look(
    "mokutil --list-new",
    "Have the password ready that was set when the key was imported. Open the node's console (or "
    "its BMC's) before the reboot, press a key within ten seconds, choose Enroll MOK and enter it",
)

SHOW_MODPROBE = fixes.look(
    "grep -rn nvidia /etc/modprobe.d /usr/lib/modprobe.d /run/modprobe.d",
    "Delete the line that sets it, rebuild the initramfs and reboot",
    needs_root=False,
)

_RHEL_FIRMWARE = "nvidia-kmod-common"
REINSTALL_FIRMWARE = (
    fixes.package_fix("reinstall", ("firmware-nvidia-gsp", _RHEL_FIRMWARE, "nvidia-common-G06"), _GUIDE)
    .then_reboot()
    ._replace(
        other=Fix(_GUIDE, disruptive="reboot"),
    )
)

_KEEP = "/etc/apt/apt.conf.d/52keep-nvidia-driver"

# cuda-drivers-580 is also available, and stays on its branch
HOLD_BRANCH = per_family(
    "apt-mark hold cuda-drivers",
    "dnf install 'dnf-command(versionlock)' && dnf versionlock add '*nvidia*'",
    "zypper addlock '*nvidia*'",
    _GUIDE,
)


NO_OPERATOR_DRIVER = Fix(
    "kubectl patch clusterpolicies.nvidia.com cluster-policy --type merge "
    '--patch \'{"spec":{"driver":{"enabled":false}}}\'',
    disruptive="drain",
    needs_root=False,
    note="This removes the operator's driver from all nodes of the cluster",
)


_LINK_RULE = (
    'ACTION=="add", DEVPATH=="/bus/pci/drivers/nvidia", '
    'RUN+="/usr/bin/nvidia-ctk system create-dev-char-symlinks --create-all"'
)


LINK_AT_BOOT = Fix(f"echo '{_LINK_RULE}' > /etc/udev/rules.d/71-nvidia-dev-char.rules")


# Which driver this node should have: the newest that supports its GPUs, under its packages' names.

# Ubuntu's names carry branch and kind: nvidia-headless-no-dkms-535-server-open, and modules of a kernel's
# flavour
_UBUNTU = re.compile(
    r"(nvidia-driver|nvidia-headless|nvidia-headless-no-dkms|linux-modules-nvidia)"
    r"-\d{3}(-server)?(-open)?(-[a-z][a-z0-9.-]*)?"
)


def from_ubuntu(node: Node) -> bool:
    """Whether Ubuntu's own driver packages are installed here."""
    installed = node.packages.installed.items() if node.distribution.id == "ubuntu" else ()
    return any(_UBUNTU.fullmatch(name) and _of_archive(node, package) for name, package in installed)


def _of_archive(node: Node, package: Package) -> bool:
    """NVIDIA's repository has packages with the same names, with releases such as 580.95.05-0ubuntu1."""
    return "-0ubuntu0." in package.version or not has_repository(node.host)


def spares(node: Node, need: GpuSupport) -> bool:
    """Whether the driver that GPUs with this support need also supports the GPUs that have one now."""
    branch = driver.branch(node.driver_version)
    branch = max(min(branch, need.max or branch), need.min)
    open_module = {"open": True, "proprietary": False}.get(need.module, node.module_open)
    rows = (supports(gpu.device_id) for gpu in node.gpus if gpu.driver == "nvidia")
    return not any(row and refusal(row, branch, open_module) for row in rows)


_DOWNLOADS = "https://www.nvidia.com/en-us/drivers/"
_RUN_FILES = "https://us.download.nvidia.com"
_SET_DEFAULT = "grubby --set-default=/boot/vmlinuz-"
_DESKTOP = {"x86_64": "XFree86/Linux-x86_64", "aarch64": "XFree86/aarch64"}
_ARM_LOADER = "/lib/ld-linux-aarch64.so.1"
_COMMON_HAS_FIRMWARE = 570  # nvidia-common provides and obsoletes kernel-firmware-nvidia-gspx (its spec file)
_FIRST_G07 = 590  # SUSE's and NVIDIA's packages for SUSE have G07 in their names from this branch
_LEGACY = "https://www.nvidia.com/en-us/drivers/unix/legacy-gpu/"
# Ubuntu's prebuilt modules: kernel/nvidia-550srv-open/nvidia.ko is linux-modules-nvidia-550-server-open-...
_PREBUILT = re.compile(r"^kernel/nvidia-(\d+)(srv)?(-open)?/nvidia\.ko", re.MULTILINE)
# kmod-nvidia-580.159.03-5.14.0-427.13.1
_FOR_ONE_KERNEL = re.compile(r"(kmod-nvidia(?:-open)?-\d+\.[\d.]+)-\d+\.\d+\.\d+-")


def chosen(node: Node) -> Choice:
    """The driver that `gpunode driver plan` chooses. Its planner is imported only for the fixes that need
    it."""
    from gpunode.packages.driver_choice import choose
    from gpunode.packages.driver_model import Wish, read_situation

    return choose(read_situation(node), Wish())


def install_driver(node: Node, branch: int = 0) -> Fix:
    """The driver that `gpunode driver plan` chooses, or of this branch; replacing a loaded one needs a
    reboot."""
    last = last_branch(node.gpus)
    if 0 < last < LONG_TERM and node.distribution.id != "ubuntu":
        return Fix(f"follow {_LEGACY}")
    option = f"--branch {branch} " if branch and branch != chosen(node).branch else ""
    fix = Fix(f"gpunode driver install {option}--yes", disturbs=REPLACES_DRIVER)
    if node.module is None:
        return fix
    number = branch or chosen(node).branch
    what = f"It installs branch {number}. " if number else ""
    failure = "If this fails, it restores the old packages. If it reports that it couldn't, don't reboot"
    return replace(fix, note=f"{what}{failure}").then_reboot()


# for a driver from NVIDIA's .run installer: packages would overwrite its files
NEWER_RUN_FILE = Fix(f"follow {_DOWNLOADS} to a newer .run installer: this driver was installed with one")


def reinstall(node: Node, names: Sequence[str]) -> Fix | None:
    """Install these packages again, over other copies of their files; None on an unknown distribution."""
    command = fixes.packages(node.distribution.family, "reinstall", names)
    return Fix(command).then_reboot() if command else None


def before_reboot(fix: Fix) -> Fix:
    """A fix that replaces the libraries, which then don't match the loaded module until a reboot."""
    note = fix.note or fixes.NO_REBOOT
    return replace(fix.then_reboot(), disruptive="drain", effect=REPLACES_DRIVER, note=note)


def newer_for_kernel(node: Node, release: str) -> Fix:
    """A driver that supports a kernel; the node boots that kernel once it has the module, else the running
    one again."""
    return with_module(node, install_driver(node), release)


def with_module(node: Node, install: Fix, release: str) -> Fix:
    """Reboot after an installation only if this kernel has a module. If it isn't the running one, which has a
    module, the installation can wait."""
    command = f"{install.before_reboot or install.command} && modinfo -k {release} -F version nvidia"
    note = f"If this fails or prints no version, don't reboot into kernel {release}: it still has no module. "
    if release == node.kernel:
        return replace(install, command=command, note=note + older_kernel(node)).then_reboot()
    if node.distribution.family == "rhel":  # undoes what `before` offers, only if there is a module
        command += f" && {_SET_DEFAULT}{release}"
    check = f"Into kernel {node.kernel} only if this prints one:\nmodinfo -k {node.kernel} -F version nvidia"
    before = (
        f"Nothing to do now, but don't reboot yet. {_running_kernel(node, release)}. "
        "In the next maintenance window:"
    )
    return replace(install, command=command, before=before, note=note + check).then_reboot()


def older_kernel(node: Node) -> str:
    """What to do instead of a reboot into the running kernel, which has no module."""
    built = (kernel.release for kernel in node.kernels if kernel.has_module)
    keep = max(built, key=version_key, default="")
    if not keep:
        if node.distribution.family == "rhel":
            return "Install an older kernel of this list and boot it:\ndnf list --showduplicates kernel-core"
        return "Install an older kernel and boot that one"
    which = f"kernel {keep}, which has one"
    if node.distribution.family == "rhel":
        return f"To have the next boot start {which}:\n{_SET_DEFAULT}{keep}"
    return f"At the next boot, choose {which}, in the boot loader's menu"


def _running_kernel(node: Node, release: str) -> str:
    """How to make a reboot safe before the installation: by the running kernel, which has a module."""
    commands = {"rhel": f"{_SET_DEFAULT}{node.kernel}", "debian": f"apt remove linux-image-{release}"}
    command = commands.get(node.distribution.family)
    if command is None:
        return f"A reboot is safe if you choose kernel {node.kernel} in the boot loader's menu"
    return f"To make a reboot safe at once, run {command} (the running kernel then boots; disrupts nothing)"


def build_module(node: Node, release: str, *, load: bool = True) -> Fix:
    """Get the module for kernel `release` by the method of the other kernels: DKMS, akmods or packages. Then
    `load` it, if that kernel is running."""
    fix = _without_dkms(node, release) or build_module_for(release, node.distribution.family)
    if not load or release != node.kernel:
        return fix
    return replace(fix, command=f"{fix.command} && modprobe nvidia")


def _without_dkms(node: Node, release: str) -> Fix | None:
    """Get the module from akmods or packages; None if DKMS builds it, except on SUSE, or if unknown."""
    if node.host.stat("/usr/sbin/akmods"):
        return Fix(f"dnf install {kernel_devel(release)} && akmods --force --kernels {release}")
    if node.distribution.family == "suse":
        return Fix(f"zypper install --force {suse_modules(node)}")
    if node.dkms:
        return None
    for kernel in node.kernels:
        match = _PREBUILT.search(node.host.read_text(f"/lib/modules/{kernel.release}/modules.dep") or "")
        if match:
            server, flavour = "-server" if match[2] else "", match[3] or ""
            name = f"linux-modules-nvidia-{match[1]}{server}{flavour}-{release}"
            return Fix(f"apt update && apt install {name}")
    if node.host.executable(RUN_INSTALLER) and node.module and node.module.version:
        return _run_file(node, node.module.version, f"--kernel-name={release}")
    return _precompiled(node, release) if node.distribution.family == "rhel" else None


def _precompiled(node: Node, release: str) -> Fix:
    """NVIDIA's repository has one package per driver and kernel, ELRepo one for all kernels."""
    for package in node.packages.starting("kmod-nvidia"):
        match = _FOR_ONE_KERNEL.match(package.name)
        if match:
            name = f"{match[1]}-{re.sub(r'[.]el[0-9].*', '', release)}"
            return Fix(f"dnf install {name}", disturbs=REPLACES_DRIVER)
    return Fix("dnf upgrade 'kmod-nvidia*'", disturbs=REPLACES_DRIVER)


def enrol_key(node: Node, *, signed: bool) -> Fix | None:
    """Enrol the key that is on this node; a module that DKMS left unsigned is first built again."""
    key = signing_key(node.host)
    if not key:
        return None
    again = "" if signed else _build_again(node)
    return _enrolment(f"{again}mokutil --import {key}")


def _enrolment(command: str) -> Fix:
    return Fix(command, note=ENROL_NOTE).then_reboot()


def make_key(node: Node) -> Fix:
    """Create a key, sign the module with it and enrol it, with this node's build tool."""
    if node.host.stat("/usr/sbin/akmods"):
        steps = "kmodgenca --auto && akmods --force --rebuild && "
        return _enrolment(f"{steps}mokutil --import {AKMODS_KEY}")
    if not node.dkms:
        return Fix(_GUIDE)
    if node.distribution.id == "ubuntu":
        steps, key = "update-secureboot-policy --new-key", SHIM_KEY
    else:
        steps, key = "dkms generate_mok", DKMS_KEY
    return _enrolment(f"{steps} && {_build_again(node)}mokutil --import {key}")


def _build_again(node: Node) -> str:
    version = next(iter(node.dkms), None)
    if version is None:
        return ""
    name = f"{dkms_name(node.host, version)} -k $(uname -r)"
    return f"dkms build --force {name} && dkms install --force {name} && "


def install_libraries(node: Node) -> Fix | None:
    """Install the library packages of the installed driver; None if their names don't depend on it."""
    version = node.driver_version
    if version and node.run_installed:
        return libraries_of_run_file(node, version)
    command = fixes.packages(node.distribution.family, "install", _library_names(node))
    return Fix(f"{command} && ldconfig") if command else None


def _library_names(node: Node) -> tuple[str, ...]:
    """Names of the library packages; empty if they don't depend on the driver.

    Ubuntu's names carry the driver's branch and its server flavour, those of NVIDIA's repository for Ubuntu
    the branch until 590.
    """
    if node.distribution.family == "suse":
        return (suse_libraries(node),)
    if node.distribution.family != "debian":
        return ()
    if node.host.listdir("/var/lib/dkms/nvidia-current"):
        return ("libnvidia-ml1", "libcuda1", "nvidia-smi")  # Debian's own packages
    if node.distribution.id == "debian":
        return ("nvidia-driver-cuda",)  # of NVIDIA's repository
    numbers = driver.version_numbers(node.module.version if node.module else next(iter(node.dkms), ""))
    if not numbers or (numbers[0] >= 590 and not from_ubuntu(node)):
        return ()
    branch = f"{numbers[0]}{_server(node)}"
    return (f"libnvidia-compute-{branch}", f"nvidia-utils-{branch}")


def _server(node: Node) -> str:
    """Part of Ubuntu's package names, if the installed driver is of the server flavour."""
    return "-server" if any("-server" in name for name in driver.driver_packages(node.packages)) else ""


def suse_modules(node: Node) -> str:
    """The packages of the kernel module on SUSE: the installed ones, else those for the installed driver or,
    without one, for the driver that gpunode chooses."""
    built = [package.name for package in node.packages.containing("nvidia") if "-kmp-" in package.name]
    if built:
        return " ".join(built)
    from gpunode.packages.driver_model import OPEN

    choice = chosen(node)
    branch = driver.branch(node.driver_version) or choice.branch
    is_open = choice.flavour == OPEN if node.module_open is None else node.module_open
    kernel = flavour(node.kernel)
    if branch < _FIRST_G07:
        return f"nvidia-open-driver-G06-signed-kmp-{kernel}" if is_open else f"nvidia-driver-G06-kmp-{kernel}"
    return f"nvidia-open-driver-G07-signed-cuda-kmp-{kernel}" if is_open else "nvidia-driver-G07"


def suse_libraries(node: Node) -> str:
    """The package of the libraries and programs for computing, for the driver's branch."""
    number = "G06" if driver.branch(node.driver_version) < _FIRST_G07 else "G07"
    return f"nvidia-compute-utils-{number}"


def suse_firmware(version: str) -> str:
    """The package of a driver's GSP firmware."""
    branch = driver.branch(version)
    if branch < _COMMON_HAS_FIRMWARE:
        return "kernel-firmware-nvidia-gspx-G06"
    return "nvidia-common-G06" if branch < _FIRST_G07 else "nvidia-common-G07"


def libraries_of_version(node: Node, version: str) -> Fix:
    """Exactly this version's libraries: of the packages that are installed, else of NVIDIA's installer."""
    run_file, family = libraries_of_run_file(node, version), node.distribution.family
    branch = version.partition(".")[0]
    names = [package.name for package in library_packages(node)]
    other = [re.sub(r"-\d{3}(?=-|$)", f"-{branch}", name) for name in names]  # Ubuntu's names have the branch
    exact = {
        "debian": " ".join(f"'{name}={version}*'" for name in other),
        "rhel": " ".join(f"{name}-{version}" for name in other),
    }.get(family)
    if not exact:
        return run_file
    install = {"debian": f"apt install --allow-downgrades {exact} && apt-mark hold {' '.join(other)}"}
    command = install.get(family, f"dnf install {exact}")
    remove = fixes.packages(family, "remove", names)
    note = f"If the repositories don't have {version} any more:\n{remove} && {run_file.command}"
    return Fix(command, note=note)


def libraries_of_run_file(node: Node, version: str) -> Fix:
    """NVIDIA's .run installer contains exactly one version's libraries, for any distribution."""
    return _run_file(node, version, "--no-kernel-modules")


def _run_file(node: Node, version: str, option: str) -> Fix:
    """Download the installer and run it, because it leaves no copy behind. NVIDIA keeps its data centre
    releases and its desktop releases in two directories, and many releases in both."""
    architecture = "aarch64" if node.host.exists(_ARM_LOADER) else "x86_64"
    name = f"NVIDIA-Linux-{architecture}-{version}.run"
    places = (f"{_RUN_FILES}/{part}/{version}/{name}" for part in ("tesla", _DESKTOP[architecture]))
    fetch = " || ".join(f"curl -fO {place}" for place in places)
    return Fix(f"cd /root && {{ {fetch}; }} && sh {name} {option}", disturbs=REPLACES_DRIVER)


def reinstall_libraries(node: Node) -> Fix:
    """Install the libraries again, in the version that the repositories have with the module. apt skips a
    package whose newest version is installed, even if its files were replaced."""
    fix = install_libraries(node) or INSTALL_LIBRARIES.for_family(node.distribution.family)
    names = _library_names(node) or APT_LIBRARIES
    by_apt = node.distribution.family == "debian" and not node.run_installed
    if not by_apt or not any(name in node.packages.installed for name in names):
        return fix
    return Fix(f"{fixes.packages('debian', 'reinstall', names)} && ldconfig")


_FIRMWARE = ("nvidia-firmware", "firmware-nvidia-gsp")


def reinstall_firmware(node: Node, version: str, *, reboot: bool) -> Fix:
    """Install the firmware of the module's version again; with `reboot` the GPUs don't work until then. The
    repositories may have only another version, so the command ends with, or before the reboot has, a listing
    of the files."""
    fix = _firmware_packages(node, version) or REINSTALL_FIRMWARE.for_family(node.distribution.family)
    if not fix.before_reboot:
        return fix
    listed = replace(
        fix,
        command=f"{fix.before_reboot} && ls /lib/firmware/nvidia/{version}/gsp*",
        before_reboot="",
        disruptive="none",
        note=f"If this fails, don't reboot: the repositories don't have the firmware of {version} any more. "
        "Install another driver instead (gpunode driver install), and reboot soon: GPU programs that start "
        "in between fail",
        disturbs=DISRUPTS_NOTHING,
    )
    return listed.then_reboot() if reboot else listed


def _firmware_packages(node: Node, version: str) -> Fix | None:
    """Ubuntu has one firmware package per version; on SUSE an update of the module alone leaves the firmware
    of the earlier version, so the version is named."""
    if node.distribution.family == "suse":
        return reinstall(node, [f"{suse_firmware(version)}={version}"])
    here = [package.name for package in node.packages.starting(*_FIRMWARE)]
    if len(here) == 1 and node.distribution.family == "debian":
        return reinstall(node, here)
    if node.distribution.family == "rhel":
        here_already = not node.packages.manager or node.packages.version(_RHEL_FIRMWARE) == version
        verb = "reinstall" if here_already else "install"  # each does nothing in the other's case
        return Fix(f"dnf {verb} {_RHEL_FIRMWARE}-{version}").then_reboot()
    if node.distribution.id != "ubuntu":
        return None
    name = f"nvidia-firmware-{driver.version_numbers(version)[0]}{_server(node)}-{version}"
    return Fix(f"apt install --reinstall {name}").then_reboot()


# Automatic upgrades, and two driver installations at once.

# the packages of the libraries themselves, Ubuntu's with the branch in their names: packages that depend on
# them can't upgrade them while they are held
_LIBRARIES = (
    "libnvidia-compute",
    "libnvidia-ml1",
    "libcuda1",
    "nvidia-driver-cuda",
    "nvidia-compute-G0",
    "nvidia-compute-utils-G0",
)
_APT_TIMER = "apt-daily-upgrade.timer"
_WIDE = ("nvidia", "*", "developer.download")


def library_packages(node: Node) -> tuple[Package, ...]:
    """The installed packages of the driver's libraries."""
    return node.packages.starting(*_LIBRARIES)


@check(
    "unattended-upgrades-driver",
    title="Automatic upgrades don't replace the driver",
    severity="warning",
    looks_at="unattended-upgrades, dnf-automatic and SUSE's online update, and whether holds, locks, pins "
    "or their own exclusion lists keep them from upgrading the driver's libraries.",
    # a list in apt's configuration grows with every file that names it
    fix=per_family(
        'printf \'Unattended-Upgrade::Package-Blacklist { "nvidia-"; "libnvidia-"; "cuda-"; };\\n\' > '
        + _KEEP,
        "dnf install 'dnf-command(versionlock)' && dnf versionlock add '*nvidia*'",
        "zypper addlock '*nvidia*'",
        _GUIDE,
    ),
    blocked_by=("driver-not-installed",),
    unless=("operator-driver", "immutable"),
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def unattended_upgrades_driver(node: Node) -> Verdict:
    """Such an upgrade replaces the libraries while the old module is loaded: from then on every new GPU
    container fails with Driver/library version mismatch until the node is rebooted.
    """
    upgrades = node.automatic_upgrades
    if upgrades is None:
        return ok("automatic upgrades are disabled")
    timer = node.units.get(_APT_TIMER) if upgrades.tool == "unattended-upgrades" else None
    if timer is not None and timer.installed and not (timer.runs or timer.at_boot):
        return ok("the timer of unattended-upgrades is disabled", seen(_APT_TIMER, timer))
    exposed = [package for package in library_packages(node) if _exposed(node, upgrades, package)]
    if not exposed:
        return ok(
            f"{upgrades.tool} doesn't upgrade the driver",
            seen(upgrades.source, upgrades.value, upgrades.line),
        )
    names = ", ".join(f"{package.name} {package.upstream}" for package in exposed[:3])
    return warn(
        f"{upgrades.tool} may replace the driver while GPUs are in use",
        seen(upgrades.source, upgrades.value, upgrades.line),
        seen("package database", f"{names}: not held, locked or excluded"),
    )


def _exposed(node: Node, upgrades: Automatic, package: Package) -> bool:
    """Whether this upgrade would include that package."""
    if package.held or upgrades.leaves(package.name):
        return False
    if node.distribution.family != "debian":
        return True
    wide = any(word in origin.lower() for origin in upgrades.origins for word in _WIDE)
    # Ubuntu ships the driver among its security updates; NVIDIA's repository must be listed
    return bool(upgrades.origins) and (wide or _of_archive(node, package))


@check(
    "driver-two-installs",
    title="Only one driver installation exists",
    severity="warning",
    looks_at="nvidia-uninstall of the .run installer beside driver packages, the GPU operator's driver "
    "beside the host's, and several versions of libcuda.so.1 in the linker's cache.",
    fix=per_family(
        "nvidia-uninstall && apt install --reinstall nvidia-open",
        "nvidia-uninstall && dnf reinstall nvidia-open",
        "nvidia-uninstall && zypper install --force nvidia-open",
        "nvidia-uninstall",
    ).then_reboot(),
    blocked_by=(
        "driver-not-installed",
        "driver-libs-mixed",
        "driver-lib-mismatch",
        "operator-host-driver-conflict",
    ),
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def driver_two_installs(node: Node) -> Verdict:
    """Two installations overwrite each other's files. An upgrade of one leaves libraries of the other behind,
    and the versions of module and libraries diverge.
    """
    if node.host.is_dir(OPERATOR_DRIVER):
        return _beside_operator(node)
    if node.host.executable(RUN_INSTALLER):
        packaged = library_packages(node)
        if packaged:
            names = ", ".join(f"{package.name} {package.upstream}" for package in packaged[:3])
            return warn(
                "the driver was installed both by a .run installer and from packages",
                seen(RUN_INSTALLER, "left over from the .run installer"),
                seen("package database", names),
                fix=_remove(node, packaged),
            )
    copies = tuple(_copies(node))
    if len({copy.value for copy in copies}) > 1:
        return warn("the linker's cache has libraries of two driver versions", *copies)
    return ok("only one driver installation exists")


def _beside_operator(node: Node) -> Verdict:
    if not node.dkms:
        return ok("the GPU operator's driver is the only one")
    return warn(
        "the GPU operator installs a driver, but this node has its own driver",
        seen(OPERATOR_DRIVER, "the GPU operator's driver"),
        *(seen("/var/lib/dkms", f"source of {version}") for version in node.dkms),
        fix=NO_OPERATOR_DRIVER,
    )


def _copies(node: Node) -> Iterator[Evidence]:
    """Existing files that the linker knows as libcuda.so.1, with their versions."""
    for entry in node.linked_libraries:
        if entry.soname == CUDA and not is_compat(entry.path) and node.host.is_file(entry.path):
            version = re.search(r"\.so\.(\d+\.\d[\d.]*)$", node.host.realpath(entry.path))
            if version:
                yield seen(entry.path, version[1])


def _remove(node: Node, packaged: tuple[Package, ...]) -> Fix | None:
    again = reinstall(node, [package.name for package in packaged])
    return before_reboot(Fix(f"nvidia-uninstall && {again.before_reboot}")) if again else None
