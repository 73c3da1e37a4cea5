"""Checks of the driver's libraries, their versions, and NVML."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from gpunode.checks import driver_packages, fixes
from gpunode.checks.finding import DISRUPTS_NOTHING, REPLACES_DRIVER, Evidence, Fix
from gpunode.checks.health import on_gpu
from gpunode.checks.kernel_module import failures, logged, operator_driver, xid_storms
from gpunode.checks.model import (
    EVERYWHERE_BUT_TEGRA,
    HOST,
    HOST_OR_CONTAINER,
    Verdict,
    check,
    fail,
    next_boot_check,
    note,
    ok,
    prerequisite_check,
    seen,
    skip,
    warn,
)
from gpunode.errors import GpunodeError
from gpunode.facts import driver, libraries
from gpunode.facts.bulletins import end_of_life, maintained_branches, title
from gpunode.facts.driver_targets import DROPPED, FLAVOUR, GPU_BRANCHES, TOO_NEW, last_branch, supports
from gpunode.facts.kernel_log import UNSUPPORTED
from gpunode.facts.module_builds import dkms_name
from gpunode.facts.node import Node
from gpunode.facts.packages import Package, brought, locked, module_stream
from gpunode.facts.system import WSL2
from gpunode.facts.traits import OPERATOR_DRIVER, TRAITS
from gpunode.gpu.library_paths import DRIVER_ROOT, PROGRAM_DIRECTORIES
from gpunode.gpu.nvml import NO_PERMISSION, RESET_REQUIRED


@prerequisite_check(
    "libnvidia-ml-missing",
    title="libnvidia-ml.so.1 is installed",
    looks_at="/etc/ld.so.cache and the linker's own directories for libnvidia-ml.so.1, 64-bit.",
    fix=driver_packages.INSTALL_LIBRARIES,
    blocked_by=("driver-not-installed", "wsl2"),
    classes=EVERYWHERE_BUT_TEGRA,
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/154",),
)
def libnvidia_ml_missing(node: Node) -> Verdict:
    """Every program that lists GPUs loads this library: nvidia-smi, the container toolkit, device plugins.
    The dynamic linker must find it.
    """
    return _library(node, node.nvml_library, libraries.NVML)


@prerequisite_check(
    "libcuda-missing",
    title="libcuda.so.1 is installed",
    looks_at="/etc/ld.so.cache and the linker's own directories for libcuda.so.1, 64-bit.",
    fix=driver_packages.INSTALL_LIBRARIES,
    blocked_by=("driver-not-installed", "libnvidia-ml-missing"),
    classes=EVERYWHERE_BUT_TEGRA,
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def libcuda_missing(node: Node) -> Verdict:
    """CUDA programs load the host's libcuda.so.1, also in containers. A display-only or headless driver
    installation doesn't include it: nvidia-smi works, but CUDA doesn't.
    """
    return _library(node, node.cuda_library, libraries.CUDA)


def _library(node: Node, library: libraries.DriverLibrary | None, soname: str) -> Verdict:
    if library is None and TRAITS["operator-driver"].holds(node):
        if node.host.is_dir(OPERATOR_DRIVER):
            return skip(f"the GPU operator's driver container provides the libraries at {DRIVER_ROOT}")
        if node.module is None:
            return skip("the GPU operator's driver container, which provides the libraries, is not running")
        logs, fix = operator_driver(node)
        absent = seen(DRIVER_ROOT, f"no {soname}")
        return fail("the GPU operator's driver container is not running", absent, *logs, fix=fix)
    if library is None:
        return fail(
            f"{soname} is not installed on this node",
            seen("/etc/ld.so.cache", f"no existing 64-bit {soname}"),
            fix=driver_packages.install_libraries(node),
        )
    if not library.linked:
        evidence = seen(library.path, "on disk, but not in /etc/ld.so.cache")
        return fail(f"{soname} is not in the linker's cache", evidence, fix=_link(node, library.path))
    return ok(f"{soname} is {library.version or 'installed'}", seen(library.path, library.real))


def _link(node: Node, path: str) -> Fix:
    """ldconfig reads the system's own directories and those that a file lists; this one may be neither."""
    directory = path.rpartition("/")[0]
    files = ("/etc/ld.so.conf", *node.host.glob("/etc/ld.so.conf.d", "*.conf"))
    listed = {line.strip() for file in files for line in (node.host.read_text(file) or "").splitlines()}
    if directory in listed:
        return Fix("ldconfig", disturbs=DISRUPTS_NOTHING)
    add = f"echo {shlex.quote(directory)} >> /etc/ld.so.conf.d/nvidia-driver.conf"
    return Fix(f"{add} && ldconfig", disturbs=DISRUPTS_NOTHING)


@check(
    "libcuda-stub",
    title="libcuda.so.1 is the driver's library",
    severity="warning",
    looks_at="whether libcuda.so.1 resolves to a file in the directory stubs/ of a CUDA toolkit.",
    fix=Fix("sed -i '\\#/stubs#d' /etc/ld.so.conf.d/*.conf /etc/ld.so.conf && ldconfig"),
    blocked_by=("libcuda-missing",),
    classes=EVERYWHERE_BUT_TEGRA,
    refs=("https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/",),
)
def libcuda_stub(node: Node) -> Verdict:
    """The stub is only for linking on machines without a driver. Programs that load it fail with CUDA error
    34: stub library.
    """
    library = node.cuda_library
    if library is None:
        return skip("libcuda.so.1 doesn't exist")
    if "/stubs/" not in library.real and "/stubs/" not in library.path:
        return ok("libcuda.so.1 is the driver's library", seen(library.path, library.real))
    return warn(
        "libcuda.so.1 is the CUDA toolkit's stub, which can't access GPUs", seen(library.path, library.real)
    )


@check(
    "nvidia-smi-missing",
    title="nvidia-smi is installed",
    severity="warning",
    looks_at="an executable nvidia-smi in PATH and in the usual directories of the driver's programs.",
    fix=driver_packages.INSTALL_LIBRARIES,
    blocked_by=("driver-not-installed", "libnvidia-ml-missing"),
    classes=(*HOST, WSL2),
    unless=("operator-driver", "immutable"),
    refs=("https://docs.nvidia.com/deploy/nvidia-smi/",),
)
def nvidia_smi_missing(node: Node) -> Verdict:
    """NVIDIA's CDI refresh service starts only if nvidia-smi exists, and the GPU operator treats a node
    without it as a node without a driver and installs a second driver.
    """
    for directory in PROGRAM_DIRECTORIES:
        if node.host.executable(f"{directory}/nvidia-smi"):
            return ok("nvidia-smi is installed", seen(f"{directory}/nvidia-smi", "executable"))
    elsewhere = node.host.which("nvidia-smi")
    if elsewhere:
        return ok("nvidia-smi is installed", seen(elsewhere, "executable"))
    unsafe = node.host.unsafe_program("nvidia-smi")
    if unsafe is not None:
        return warn(
            "other users can write to nvidia-smi",
            seen(*unsafe),
            fix=fixes.look(f"namei -l {unsafe[0]}", fixes.UNSAFE_PATH, needs_root=False),
        )
    broken = [
        f"{directory}/nvidia-smi"
        for directory in PROGRAM_DIRECTORIES
        if node.host.exists(f"{directory}/nvidia-smi")
    ]
    evidence = [seen(path, "empty or not executable") for path in broken]
    return warn(
        "nvidia-smi is not installed on this node",
        *(evidence or [seen(", ".join(PROGRAM_DIRECTORIES[:4]), "no nvidia-smi")]),
        fix=driver_packages.install_libraries(node),
    )


@prerequisite_check(
    "nvml-hang",
    title="NVML answers",
    looks_at="NVML's initialisation and its list of GPUs, queried in a child process with a limit of 15 "
    "seconds (20 for more than four GPUs).",
    fix=fixes.READ_KERNEL_LOG,
    blocked_by=(
        "module-not-loaded",
        "libnvidia-ml-missing",
        "driver-lib-mismatch",
        "operator-host-driver-conflict",
        "gsp-firmware",
        "dev-nodes-missing",
        "lxc-nested",
        "dev-node-major-stale",
        "aux-power",
        "gpu-lost",
    ),
    classes=EVERYWHERE_BUT_TEGRA,
    refs=("https://docs.nvidia.com/deploy/nvml-api/", "https://github.com/NVIDIA/nvidia-docker/issues/1648"),
)
def nvml_hang(node: Node) -> Verdict:
    """An unhealthy GPU or a stuck driver makes NVML hang or fail, and with it nvidia-smi, device plugins and
    the start of every GPU container.
    """
    probe = node.nvml
    source = "nvmlInit in a child process"
    if probe.timed_out:
        evidence = (seen(source, probe.message), *_from_the_log(node))
        return fail("NVML does not answer", *evidence, fix=_REBOOT_OR_RESET)
    if probe.code == NO_PERMISSION and not node.host.is_root:
        return skip("needs root, or read and write access to /dev/nvidia*, to query NVML")
    if not probe.asked:
        return skip(probe.message)
    if probe.inventory is None:
        code = "" if probe.code is None else f" (code {probe.code})"
        return fail("NVML fails", seen(source, f"{probe.message}{code}"), *_from_the_log(node))
    # gpu-reset-required reports the others
    broken = [gpu for gpu in probe.inventory.gpus if gpu.error and gpu.error_code != RESET_REQUIRED]
    if broken:
        errors = [on_gpu(gpu, gpu.error) for gpu in broken]
        errors += _from_the_log(node, *(gpu.pci for gpu in broken if gpu.pci))
        return fail(f"{len(broken)} of {len(probe.inventory.gpus)} GPUs don't answer NVML", *errors)
    if probe.untold:
        return note("NVML lists the GPUs, but fails when it reads their state", seen(source, probe.untold))
    return ok(f"NVML lists {len(probe.inventory.gpus)} GPUs", seen(source, f"{probe.seconds:.1f} s"))


_REBOOT_OR_RESET = replace(
    fixes.REBOOT,
    note="If it hangs too, because processes wait for the driver, reset the node at its management "
    "controller (BMC)",
)


def _from_the_log(node: Node, *addresses: str) -> tuple[Evidence, ...]:
    """XIDs that repeat, or else the driver's first failures."""
    return tuple(xid_storms(node)) or failures(node, *addresses)


# One driver, one version: the loaded module, the one on disk, and the libraries.


@prerequisite_check(
    "driver-libs-mixed",
    title="All libraries come from one driver version",
    looks_at="the versions in the real file names of libnvidia-ml.so.1 and libcuda.so.1.",
    fix=driver_packages.INSTALL_LIBRARIES,
    blocked_by=("libnvidia-ml-missing", "libcuda-missing"),
    classes=HOST_OR_CONTAINER,
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def driver_libs_mixed(node: Node) -> Verdict:
    """CUDA and NVML belong to one driver. If their versions differ, at least one doesn't match the kernel
    module: it is left over from a .run installer or from an interrupted upgrade.
    """
    nvml, cuda = node.nvml_library, node.cuda_library
    if nvml is None or cuda is None or not nvml.version or not cuda.version:
        return skip("the libraries' versions are unknown")
    evidence = [seen(library.real, f"{library.version} ({library.soname})") for library in (nvml, cuda)]
    if nvml.version == cuda.version:
        return ok(f"both libraries have version {nvml.version}", *evidence)
    if libraries.is_compat(cuda.real):
        return ok("libcuda.so.1 is cuda-compat's: see forward-compat-803-804", *evidence)
    summary = f"libraries of two driver versions are mixed: {nvml.version} and {cuda.version}"
    return fail(summary, *evidence, fix=driver_packages.reinstall_libraries(node))


@prerequisite_check(
    "driver-lib-mismatch",
    title="The kernel module and the libraries have the same version",
    looks_at="/sys/module/nvidia/version against the version in the real file names of libnvidia-ml.so.1 "
    "and libcuda.so.1, the module on disk, and the package manager's log for what installed the "
    "libraries.",
    fix=fixes.REBOOT,
    blocked_by=("module-not-loaded", "libnvidia-ml-missing", "driver-libs-mixed"),
    classes=HOST_OR_CONTAINER,
    reboot=True,
    refs=(
        "https://github.com/NVIDIA/ubuntu-packaging-nvidia-driver/issues/3",
        "https://docs.nvidia.com/deploy/nvml-api/",
    ),
)
def driver_lib_mismatch(node: Node) -> Verdict:
    """The libraries refuse a module of another version (NVML: Driver/library version mismatch, code 18).
    Usually an unattended upgrade replaced the libraries while the old module was still loaded. Running GPU
    programs continue; new ones fail.
    """
    module, versioned = node.module, _libraries(node)
    if module is None or not module.version or not versioned:
        return skip("the version of the module or of its libraries is unknown")
    evidence = [seen(f"/sys/module/{module.name}/version", f"{module.version} (loaded module)")]
    evidence += [seen(library.real, f"{library.version} ({library.soname})") for library in versioned]
    wrong = next((library.version for library in versioned if library.version != module.version), None)
    if wrong is None:
        return ok(f"module and libraries both have version {module.version}", *evidence)
    summary = f"the loaded module is {module.version}, the libraries are {wrong}"
    evidence += _installed_by(node, wrong)
    if TRAITS["lxc"].holds(node):
        return _in_lxc(node, module.version, wrong, summary, evidence)
    if not node.next_version or node.next_version == wrong:
        return fail(summary, *evidence)
    # a reboot would load a module that doesn't match either
    evidence.append(seen(f"modinfo -k {node.next_kernel} -F version nvidia", node.next_version))
    return fail(
        f"{summary}, and the module on disk is {node.next_version}", *evidence, fix=_rebuild(node, wrong)
    )


def _in_lxc(node: Node, version: str, wrong: str, summary: str, evidence: list[Evidence]) -> Verdict:
    """The host has loaded the module, so the container's libraries must match it. A reboot of the container
    changes nothing."""
    fix, family = driver_packages.libraries_of_version(node, version), node.distribution.family
    before = (
        f"Run this on the host: if it prints {wrong}, only reboot the host, which ends all its containers, "
        "and go no further. After each upgrade of the host's driver, this container needs the same version"
    )
    if fix == driver_packages.libraries_of_run_file(node, version):
        remove = fixes.packages(
            family, "remove", [package.name for package in driver_packages.library_packages(node)]
        )
        fix = fix.after(remove) if remove else fix
        if family == "other":
            before += ". The installer overwrites the libraries of packages: first remove those, if any"
    effect = "GPU programs that start meanwhile in this container fail"
    fix = replace(fix, disruptive="restart", effect=effect, before=f"{before}\nmodinfo -F version nvidia")
    why = (
        "The libraries refuse a module of another version (NVML: Driver/library version mismatch, code 18). "
        "Either the host's driver was upgraded, or this container's libraries."
    )
    summary += "; this LXC container needs the host's version"
    return fail(summary, *evidence, fix=fix, why=why, reboot=False)


def _libraries(node: Node) -> list[libraries.DriverLibrary]:
    """The node's own libraries: operator-host-driver-conflict checks those of the GPU operator."""
    here = (node.nvml_library, node.cuda_library)
    return [
        library
        for library in here
        if library and library.version and not library.root and not libraries.is_compat(library.real)
    ]


def _installed_by(node: Node, version: str) -> Iterator[Evidence]:
    """The transaction that installed this version, as far as the readable logs show."""
    try:
        change = brought(node.host, version, lambda: node.packages)
    except GpunodeError:
        return
    if change is not None:
        yield seen(change.source, change, change.line)


def _rebuild(node: Node, version: str) -> Fix:
    """Build the module of the libraries' version for the kernel of the next boot."""
    if version in node.dkms:
        name = f"{dkms_name(node.host, version)} -k {node.next_kernel}"
        return Fix(f"dkms install --force {name}").then_reboot()
    if node.dkms:
        return driver_packages.install_driver(node)
    return driver_packages.build_module(node, node.next_kernel, load=False).then_reboot()


@next_boot_check(
    "driver-upgrade-pending",
    title="No driver upgrade is waiting for a reboot",
    looks_at="modinfo -F version nvidia for the kernel of the next boot, against /sys/module/nvidia/version "
    "and the libraries.",
    fix=fixes.REBOOT,
    blocked_by=("module-not-loaded", "driver-lib-mismatch"),
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def driver_upgrade_pending(node: Node) -> Verdict:
    """The GPUs work now, but reloading the module or refreshing the libraries changes the driver under
    running workloads. Schedule a reboot.
    """
    module, upcoming = node.module, node.next_version
    if module is None or not module.version or not upcoming:
        return skip("modinfo reports no version of the module on disk")
    if upcoming == module.version:
        return ok(f"the loaded module is the one on disk, {module.version}")
    evidence = (
        seen("modinfo -F version nvidia", f"{upcoming} (for kernel {node.next_kernel})"),
        seen(f"/sys/module/{module.name}/version", module.version),
    )
    stays = next((library for library in _libraries(node) if library.version == module.version), None)
    if stays is None:
        summary = f"driver {upcoming} is installed; {module.version} stays loaded until the next reboot"
        return warn(summary, *evidence, fix=fixes.REBOOT)
    return warn(
        f"the next reboot breaks the GPUs: it loads module {upcoming}, but the libraries are {stays.version}",
        *evidence,
        seen(stays.real, f"{stays.version} ({stays.soname})"),
        fix=driver_packages.before_reboot(driver_packages.reinstall_libraries(node)),
        why="The GPUs work now. Libraries refuse a module of another version, so no GPU program can start "
        "after the reboot.",
    )


# The driver against the GPUs: its branch, and the kind of its kernel module.

MINIMUM = (384, 81)


@prerequisite_check(
    "driver-too-old",
    title="The driver is new enough",
    looks_at="/sys/module/nvidia/version. The minimum is 384.81; GPUs without a driver may need a newer "
    "branch.",
    fix=driver_packages.UPGRADE_DRIVER,
    blocked_by=("driver-not-installed", "nouveau-loaded"),
    classes=HOST_OR_CONTAINER,
    refs=("https://github.com/NVIDIA/k8s-device-plugin#prerequisites",),
    table=GPU_BRANCHES,
)
def driver_too_old(node: Node) -> Verdict:
    """CUDA 9, the container toolkit and device plugins need driver 384.81 or newer, and a driver doesn't
    support GPUs that are newer than itself.
    """
    version = node.driver_version
    numbers = driver.version_numbers(version)
    if not numbers:
        return skip("the module's version is unknown")
    evidence = _version(node)
    if node.module is not None and numbers < MINIMUM:
        why = "CUDA 9, the container toolkit and device plugins need driver 384.81 or newer."
        fix = driver_packages.install_driver(node)
        return fail(f"driver {version} is older than 384.81", evidence, fix=fix, why=why)
    verdict = _judge(node, TOO_NEW, "a driver of branch {0.min} or newer")
    if verdict is not None:
        return verdict._replace(why="A driver doesn't support GPUs that are newer than itself.")
    return ok(f"driver {version} is new enough", evidence)


@prerequisite_check(
    "gpu-arch-dropped",
    title="The driver still supports these GPUs",
    looks_at="PCI device ids of GPUs without a driver against the driver's branch. For GPUs with a known "
    "last supported branch, also whether the package cuda-drivers would upgrade past it.",
    fix=driver_packages.HOLD_BRANCH,
    blocked_by=("driver-not-installed", "nouveau-loaded"),
    unless=("operator-driver", "vfio-host"),
    table=GPU_BRANCHES,
    refs=("https://www.nvidia.com/en-us/drivers/unix/legacy-gpu/",),
)
def gpu_arch_dropped(node: Node) -> Verdict:
    """Branch 580 is the last one that supports Maxwell, Pascal and Volta. A newer driver ignores these GPUs:
    nvidia-smi finds no devices.
    """
    if not node.driver_version:
        return skip("the module's version is unknown")
    verdict = _judge(node, DROPPED, "a driver of branch {0.max} or older")
    if verdict is not None:
        return verdict
    # this driver controls the GPU, or will once it is loaded
    controlled = (gpu for gpu in node.gpus if gpu.driver in ("nvidia", None))
    rows = (supports(gpu.device_id) for gpu in controlled if gpu.address not in _refused(node))
    last = next((row for row in rows if row and row.max), None)
    if last is None:
        return ok("newer drivers still support every GPU on this node")
    followed = node.packages.installed.get("cuda-drivers")
    if followed is None or _stays(node, followed):
        return ok(f"the driver stays on branch {last.max}, which a GPU on this node ({last.name}) needs")
    return warn(
        f"the next upgrade of cuda-drivers leaves branch {last.max}, the last one for a GPU on this "
        f"node ({last.name})",
        seen("package database", f"cuda-drivers {followed.version}, which follows the newest branch"),
        fix=driver_packages.HOLD_BRANCH.for_family(node.distribution.family),
    )


def _stays(node: Node, package: Package) -> bool:
    """Whether something keeps this package, or the driver that it depends on, within its branch."""
    if package.held or module_stream(node.host, "nvidia-driver")[:1].isdigit():
        return True
    return locked(node.host, node.distribution.family, package.name, "nvidia-driver")


@prerequisite_check(
    "kmod-flavour",
    title="The kernel module type (open or proprietary) supports the GPUs",
    looks_at="PCI device ids of GPUs without a driver, and whether the module is the open one: "
    "/proc/driver/nvidia/version, or the module's license if it isn't loaded.",
    fix=driver_packages.INSTALL_DRIVER,
    blocked_by=("driver-not-installed", "nouveau-loaded"),
    unless=("operator-driver", "vfio-host"),
    refs=("https://github.com/NVIDIA/open-gpu-kernel-modules/issues/862",),
    table=GPU_BRANCHES,
)
def kmod_flavour(node: Node) -> Verdict:
    """GPUs before Turing work only with the proprietary module; Blackwell and Grace Hopper only with the open
    one. The wrong module ignores the GPU: No devices were found, although lspci lists the card.
    """
    if node.module_open is None:
        return skip("neither the module nor modinfo reports whether it is the open one")
    kind = "open" if node.module_open else "proprietary"
    verdict = _judge(node, FLAVOUR, "the {0.module} kernel module")
    if verdict is not None:
        return verdict._replace(why=_ONLY_PROPRIETARY if node.module_open else _ONLY_OPEN)
    return ok(f"the {kind} kernel module supports these GPUs")


_ONLY_OPEN = "Blackwell and Grace Hopper work only with the open module: the proprietary one ignores them."
_ONLY_PROPRIETARY = "GPUs before Turing work only with the proprietary module: the open one ignores them."


def _judge(node: Node, reason: str, needs: str) -> Verdict | None:
    """Findings for GPUs without a driver for this reason: an error if no other GPU has one; no fault if they
    are old display cards, or if the others would lose their driver."""
    gpus = [gpu for gpu in node.unsuited_gpus if gpu.reason == reason]
    if not gpus:
        return None
    first = gpus[0]
    count = f"{len(gpus)} of {len(node.gpus)} GPUs" if len(node.gpus) > 1 else "the GPU"
    verb = "need" if len(gpus) > 1 else "needs"
    what = needs.format(first.supports)
    evidence = [
        seen(f"/sys/bus/pci/devices/{gpu.gpu.address}/device", f"{gpu.gpu.device_id} ({gpu.supports.name})")
        for gpu in gpus
    ]
    flavour = {True: ", open", False: ", proprietary", None: ""}[node.module_open]
    lines = (*logged(node, UNSUPPORTED)[:1], *failures(node, *(gpu.gpu.address for gpu in gpus)))
    evidence += [_version(node, flavour), *dict.fromkeys(lines)]
    summary = f"{count} {verb} {what}"
    driven = any(gpu.driver == "nvidia" and gpu.address not in _refused(node) for gpu in node.gpus)
    if driven and all(gpu.supports.max and gpu.gpu.display for gpu in gpus):
        return note(f"{summary}; this matters only if the GPU is for computing", *evidence)
    if driven and not driver_packages.spares(node, first.supports):
        moved = fixes.look(
            f"lspci -nnks {first.gpu.address}",
            "Move this GPU to a node of its own, or ignore it: --ignore kmod-flavour",
            needs_root=False,
        )
        return warn(
            f"{summary}, which doesn't support the others: no driver supports all of them",
            *evidence,
            fix=moved,
        )
    fix = driver_packages.install_driver(node)
    if fix.disturbs == REPLACES_DRIVER:
        what = f"This installs driver branch {driver_packages.chosen(node).branch}"
        fix = replace(
            fix,
            before=f"{what}. To see its packages, and whether it needs a reboot: gpunode driver plan",
        )
    installed = "" if reason == FLAVOUR else f"; {node.driver_version} is installed"
    return (warn if driven else fail)(f"{summary}{installed}", *evidence, fix=fix)


def _refused(node: Node) -> frozenset[str]:
    return frozenset(gpu.gpu.address for gpu in node.unsuited_gpus)


def _version(node: Node, flavour: str = "") -> Evidence:
    if node.module is not None:
        return seen(f"/sys/module/{node.module.name}/version", f"{node.driver_version}{flavour}")
    return seen("modinfo -F version nvidia", f"{node.driver_version}{flavour}")


@check(
    "driver-eol",
    title="The driver's branch still gets security fixes",
    severity="warning",
    looks_at="the driver's branch against the branches that NVIDIA's last security bulletin has fixes for.",
    fix=driver_packages.UPGRADE_DRIVER,
    blocked_by=("module-not-loaded", "driver-too-old"),
    unless=("operator-driver", "vgpu-guest"),
    refs=("https://github.com/NVIDIA/product-security",),
    table="driver_cves",
)
def driver_eol(node: Node) -> Verdict:
    """NVIDIA fixes only a few branches. New vulnerabilities in this branch stay open: plan the change to a
    supported branch for the next maintenance window.
    """
    number = driver.branch(node.driver_version)
    if not number:
        return skip("the module's version is unknown")
    bulletin = end_of_life(number)
    if bulletin is None:
        return ok(f"branch {number} still gets security fixes", _version(node))
    last = last_branch(node.gpus)
    if last and last <= number:
        summary = f"driver branch {number} gets no more fixes, and is the last one for such GPUs"
        return note(summary, _version(node))
    branches = ", ".join(str(branch) for branch in maintained_branches())
    return warn(
        f"driver branch {number} gets no more security fixes",
        _version(node),
        seen(title(bulletin), f"fixes branches {branches}"),
        fix=replace(
            driver_packages.install_driver(node),
            before="In the next maintenance window:",
        ),
    )
