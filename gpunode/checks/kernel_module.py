"""Checks of the kernel module: installed, built for the kernels that run and boot, accepted, loaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from gpunode.checks import driver_packages, fixes
from gpunode.checks.cdi import cdi_lost_at_reboot, enabled_writer, readers
from gpunode.checks.device_plugin import shown
from gpunode.checks.finding import Evidence, FindingStatus, Fix
from gpunode.checks.model import (
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
from gpunode.facts import driver
from gpunode.facts.boot import OPERATOR, loaded, started
from gpunode.facts.cgroups import systemd_engines
from gpunode.facts.device_plugins import driver_failure
from gpunode.facts.kernel_log import SOURCE, KernelLine, matching
from gpunode.facts.kernel_modules import COMMAND_LINE, Directive
from gpunode.facts.kernels import has_headers
from gpunode.facts.module_builds import enrolled_keys, failed_build, waiting_keys
from gpunode.facts.node import Node
from gpunode.facts.toolkit import MODE
from gpunode.facts.traits import TRAITS
from gpunode.facts.xids import xid_lines
from gpunode.gpu.library_paths import DRIVER_ROOT


@prerequisite_check(
    "driver-not-installed",
    title="The NVIDIA driver is installed",
    looks_at="/sys/module/nvidia, modules.dep of every kernel in /lib/modules, /var/lib/dkms, the GPU "
    "operator's driver (/run/nvidia/driver and its pods' logs) and the package database.",
    fix=driver_packages.INSTALL_DRIVER,
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def driver_not_installed(node: Node) -> Verdict:
    """Without the kernel module no program on this node can use the GPUs. The CUDA toolkit or the libraries
    alone are not the driver.
    """
    if node.module is not None:
        return ok(
            "the NVIDIA module is loaded",
            seen(f"/sys/module/{node.module.name}/version", node.module.version),
        )
    if node.module_built:
        return ok("an NVIDIA module is on disk", seen(f"/lib/modules/{node.kernel}/modules.dep", "nvidia.ko"))
    release = next((kernel.release for kernel in node.kernels if kernel.has_module), None)
    if release or node.dkms or TRAITS["operator-driver"].holds(node):
        return ok("the driver is installed")
    installed = driver.driver_packages(node.packages)
    if installed:
        return ok("driver packages are installed", seen("package database", ", ".join(installed[:5])))
    evidence = [
        seen(f"/lib/modules/{node.kernel}/modules.dep", "no nvidia.ko"),
        seen("/var/lib/dkms", "no nvidia"),
    ]
    if node.nvml_library:
        evidence.append(seen(node.nvml_library.path, "libraries without a kernel module"))
    if node.host.is_dir("/usr/local/cuda"):
        evidence.append(seen("/usr/local/cuda", "the CUDA toolkit, which is not the driver"))
    return fail("no NVIDIA driver is installed", *evidence, fix=driver_packages.install_driver(node))


@prerequisite_check(
    "dkms-not-built",
    title="The module is built for the running and the next kernel",
    looks_at="modules.dep of the running kernel and of the newest installed one of the same flavour, and "
    "/var/lib/dkms or /var/cache/akmods with the log of the last build. If only the next kernel "
    "has no module, this is a warning.",
    fix=driver_packages.BUILD_MODULE,
    blocked_by=("driver-not-installed", "kernel-unsupported"),
    reboot=True,
    refs=("https://github.com/dell/dkms#readme", "https://github.com/NVIDIA/nvidia-docker/issues/365"),
)
def dkms_not_built(node: Node) -> Verdict:
    """A kernel module works with one kernel only: each kernel needs its own, from DKMS, akmods or a package.
    The GPUs don't work while a kernel without one runs.
    """
    running, upcoming = node.kernel, node.next_kernel
    if node.module is None and TRAITS["operator-driver"].holds(node) and not node.dkms:
        return skip("the GPU operator's container builds and loads the module")
    with_module = [kernel.release for kernel in node.kernels if kernel.has_module]
    if node.module is None and not node.module_built:
        evidence = [seen(f"/lib/modules/{release}/modules.dep", "nvidia.ko") for release in with_module]
        summary = f"no NVIDIA module was built for the running kernel {running}"
        fix = driver_packages.build_module(node, running) if running else None
        if upcoming in with_module:  # headers of an old kernel leave the repositories
            summary += f"; a reboot starts {upcoming}, which has one"
            fix = fixes.REBOOT
        elif fix is not None and with_module:
            older = driver_packages.older_kernel(node)
            fix = replace(fix, note=f"If this fails, another kernel has a module. {older}")
        return fail(summary, *_lacking(node, running), *evidence, fix=fix)
    if node.host.stat("/usr/sbin/akmods") or not node.module_built:
        return ok("the running kernel has an NVIDIA module")  # akmods builds for a new kernel while it boots
    if upcoming != running and upcoming not in with_module:
        failed = failed_build(node.host, upcoming)
        reason = f": driver {next(iter(node.dkms), '')} can't be built for it" if failed else ""
        return warn(
            f"the next reboot breaks the GPUs: kernel {upcoming} has no NVIDIA module{reason}",
            *_lacking(node, upcoming),
            seen("/proc/sys/kernel/osrelease", f"{running} (running) has a module"),
            fix=_for_next(node, upcoming),
        )
    return ok("the kernel of the next boot has an NVIDIA module")


def _lacking(node: Node, release: str) -> Iterator[Evidence]:
    """What is missing for this kernel, and the reason."""
    yield seen(f"/lib/modules/{release}/modules.dep", "no nvidia.ko")
    yield from (seen("/var/lib/dkms", f"source of {version}") for version in node.dkms)
    if node.dkms and not has_headers(node.host, release):
        yield seen(f"/lib/modules/{release}/build", "no kernel headers for the build")
    failed = failed_build(node.host, release)
    if failed is not None:
        yield seen(failed.path, failed.text, failed.line)


def _for_next(node: Node, release: str) -> Fix:
    """A build that has failed for this kernel isn't repeated; a newer driver is needed."""
    failed = failed_build(node.host, release) if node.dkms else None
    if failed is None:
        return driver_packages.build_module(node, release)
    if failed.realtime:
        return Fix(f"IGNORE_PREEMPT_RT_PRESENCE=1 dkms autoinstall -k {release}")
    return driver_packages.newer_for_kernel(node, release)


@check(
    "kernel-headers-missing",
    title="DKMS can build the module for the next driver",
    severity="warning",
    looks_at="/lib/modules/KERNEL/build/include/generated/autoconf.h, if DKMS has the driver's source.",
    fix=driver_packages.INSTALL_HEADERS,
    blocked_by=("driver-not-installed", "dkms-not-built"),
    unless=("operator-driver", "immutable"),
    refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
)
def kernel_headers_missing(node: Node) -> Verdict:
    """DKMS builds the module with the kernel's headers. Without them, the next driver upgrade replaces the
    libraries but not the module.
    """
    if not node.dkms:
        return skip("/var/lib/dkms has no driver source")
    release = node.next_kernel  # the next boot leaves this kernel, so it needs no module
    if not any(kernel.release == release and kernel.has_module for kernel in node.kernels):
        return skip(f"kernel {release} has no NVIDIA module yet")
    there = next(
        (candidate for candidate in (release, node.kernel) if has_headers(node.host, candidate)), None
    )
    if there is not None:
        return ok(f"the headers of kernel {there} are installed")
    build = f"/lib/modules/{release}/build"
    state = "no include/generated/autoconf.h" if node.host.is_dir(build) else "absent"
    fix = driver_packages.install_headers(release, node.distribution.family)
    return warn(f"the headers of kernel {release} are not installed", seen(build, state), fix=fix)


# Secure Boot: whether the firmware's keys accept the module, now and at the next boot.

# shim or the kernel includes these certificates, so their modules need no enrolment
_DISTRIBUTION_SIGNERS = (
    "Canonical", "Ubuntu", "Debian Secure Boot", "Red Hat", "Fedora", "CentOS", "Rocky", "AlmaLinux",
    "Oracle", "Amazon", "SUSE", "openSUSE",
)  # fmt: skip


@prerequisite_check(
    "secureboot-unsigned",
    title="Secure Boot accepts the module",
    looks_at="the efivar SecureBoot, the module's signer (modinfo) and the enrolled keys (mokutil). A "
    "module that is loaded was accepted.",
    fix=driver_packages.ENROL_KEY,
    blocked_by=("driver-not-installed", "dkms-not-built"),
    reboot=True,
    refs=(
        "https://wiki.debian.org/SecureBoot",
        "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
    ),
)
def secureboot_unsigned(node: Node) -> Verdict:
    """With Secure Boot the kernel rejects a module that isn't signed with an enrolled key: Key was rejected
    by service. Enrolling a key requires its password at the console during the next boot.
    """
    if not node.secure_boot:
        return ok("Secure Boot is off")
    if node.module is not None:
        return ok("Secure Boot is on and the kernel accepted the module")
    file = node.module_file
    if file is None:
        return skip("modinfo doesn't report the module's signature")
    state = seen("/sys/firmware/efi/efivars/SecureBoot-*", "1 (on)")
    if not file.signer:
        signature = seen("modinfo -F signer nvidia", "(not signed)")
        fix = driver_packages.enrol_key(node, signed=False)
        what = "Secure Boot is on and the NVIDIA module isn't signed"
        # no module is loaded that the next boot could reject
        return fail(what, state, signature, fix=fix, reboot=False)
    signed = seen("modinfo -F signer nvidia", file.signer)
    if any(name in file.signer for name in _DISTRIBUTION_SIGNERS):
        return ok("Secure Boot is on and the distribution signed the module", signed)
    enrolled = enrolled_keys(node.host)
    if enrolled is None:
        return skip("mokutil doesn't report whether the module's key is enrolled")
    if file.signer in enrolled:
        return ok("Secure Boot is on and the module's key is enrolled", signed)
    if file.signer.encode() in (waiting_keys(node.host) or b""):
        return fail(
            "the NVIDIA module's key must be confirmed at the console during the next boot",
            state,
            signed,
            fix=driver_packages.LIST_NEW_KEYS.then_reboot(),
        )
    return fail(
        "Secure Boot is on and the key that signed the NVIDIA module isn't enrolled",
        state,
        signed,
        fix=driver_packages.enrol_key(node, signed=True),
        reboot=False,
    )


@next_boot_check(
    "mok-pending",
    title="No key is waiting to be enrolled at the next boot",
    looks_at="the efivar MokNew, where mokutil --import stores a key for MokManager, on a node with Secure "
    "Boot.",
    fix=driver_packages.LIST_NEW_KEYS,
    blocked_by=("driver-not-installed", "secureboot-unsigned"),
    unless=("operator-driver",),
    refs=("https://wiki.debian.org/SecureBoot",),
)
def mok_pending(node: Node) -> Verdict:
    """MokManager prompts for the key's password at the console (or the BMC's) and times out after ten
    seconds. Without an answer the key is dropped, and the kernel rejects modules signed with it. Open the
    console before you reboot, and choose Enroll MOK.
    """
    if not node.secure_boot:
        return ok("Secure Boot is off")
    waiting = waiting_keys(node.host)
    if not waiting:
        return ok("no key is waiting to be enrolled")
    signer = node.module_file.signer if node.module_file else ""
    if not signer:
        return skip("modinfo doesn't report who signed the module")
    if signer.encode() not in waiting:
        return ok("a key is waiting to be enrolled, but it isn't the NVIDIA module's")
    return warn(
        "the NVIDIA module's key must be confirmed at the console during the next boot",
        seen("/sys/firmware/efi/efivars/MokNew-*", f"a certificate of {len(waiting)} bytes"),
        seen("modinfo -F signer nvidia", signer),
    )


# What a reboot doesn't restore: modules that were loaded manually, links to device files.

_UVM = "nvidia_uvm"
_LINKS = ("create-dev-char-symlinks",)


@next_boot_check(
    "uvm-lost-at-reboot",
    title="The unified memory module is loaded at the next boot",
    looks_at="modules-load.d, modprobe.d, udev rules, units and scripts that load nvidia_uvm, if containers "
    "get GPUs only through CDI.",
    fix=Fix("echo nvidia_uvm > /etc/modules-load.d/nvidia-uvm.conf"),
    blocked_by=("module-not-loaded", "uvm-not-loaded"),
    unless=("operator-driver", "immutable"),
    refs=("https://www.freedesktop.org/software/systemd/man/latest/modules-load.d.html",),
)
def uvm_lost_at_reboot(node: Node) -> Verdict:
    """The kernel doesn't load nvidia_uvm itself. Without the toolkit's hook, nothing loads it for a
    container: after a reboot the first containers fail with CUDA error 999.
    """
    if not driver.module_loaded(node.host, _UVM):
        return skip(f"{_UVM} isn't loaded")
    cdi_alone = [reader.name for reader in readers(node) if reader.needs]
    if not cdi_alone and _mode(node) != "cdi":
        return ok("the toolkit loads it for the first container that needs it")
    if name := enabled_writer(node):  # it loads the module, or creates its device files, when it starts
        return ok(f"{name} loads it at boot")
    loader = _operator(node) or loaded(node.host, "nvidia-uvm")
    if loader:
        return ok(f"{_UVM} is loaded at the next boot", seen(loader, "loads it"))
    if not node.units:
        return skip("systemd doesn't report which units start at boot")
    if cdi_lost_at_reboot.run(node).status is FindingStatus.WARN:
        return skip("the service that writes the CDI specification also loads it")
    return warn(
        f"nothing loads {_UVM} after the next reboot, and containers get GPUs only through CDI",
        seen(f"/sys/module/{_UVM}", "loaded"),
        seen("/etc/modules-load.d", f"no {_UVM}"),
    )


def _mode(node: Node) -> object:
    try:
        return node.toolkit_settings.value(MODE)
    except GpunodeError:
        return ""  # toolkit-config-invalid reports it


def _operator(node: Node) -> str:
    return OPERATOR if node.host.is_dir(OPERATOR) else ""


@next_boot_check(
    "dev-char-lost-at-reboot",
    title="The links in /dev/char are created at the next boot",
    looks_at="links in /dev/char to NVIDIA's device files, if runc 1.1.3 to 1.1.6 needs them, and what "
    "creates them at boot: a udev rule, a unit or script of this node, the GPU operator.",
    fix=driver_packages.LINK_AT_BOOT,
    blocked_by=("module-not-loaded", "dev-nodes-missing"),
    unless=("operator-driver", "immutable"),
    refs=("https://github.com/opencontainers/runc/issues/3708",),
)
def dev_char_lost_at_reboot(node: Node) -> Verdict:
    """This runc reports a container's device files to systemd through these links. They exist now, but only
    in memory: after a reboot, each daemon-reload removes the GPUs from running containers.
    """
    links = (f"/dev/char/{file.major}:{file.minor}" for file in node.device_nodes)
    here = [link for link in links if node.host.is_symlink(link)]
    if not here:
        return skip("no NVIDIA device file has a link in /dev/char")
    needing = [engine for engine in systemd_engines(node) if engine.forgets and not engine.by_hook]
    if not needing:
        return ok("no engine here needs the links in /dev/char")
    maker = _operator(node) or started(node.host, _LINKS, rules=True)
    if maker:
        return ok("the links are created again at the next boot", seen(maker, "creates them"))
    return warn(
        f"nothing creates the {len(here)} links to NVIDIA's device files after a reboot",
        seen(here[0], node.host.readlink(here[0]) or ""),
        seen(needing[0].source, needing[0].forgets),
        seen("/etc/udev/rules.d", f"no rule with {_LINKS[0]}"),
    )


# Lines of the kernel's log as evidence for findings of other sources.

# nvidia 0000:01:00.0: Unable to change power state from D3cold to D0, device inaccessible
_DRIVER = (
    r"^(?:NVRM: |nvidia[\w-]*(?: [0-9a-f:.]+)?: |Lockdown: modprobe|Loading of |PKCS#7 )"
    r"|Key was rejected|nvidia.*Required key not available"
)
_FAILURE = re.compile(
    r"fail|error|unable|can'?t|cannot|could not|not supported|requires use|is invalid|is 0M|inaccessible"
    r"|no nvidia|none of the nvidia|not called|obtained ownership|fallen|time[d ]?-?out|reject|refus|denied"
    r"|restrict|conflict|mismatch|unsigned|disagrees|unknown symbol|version magic|not initialized|does not"
    r"|xid \(|installed in this system|PCI ID|not signed|power cables|is already bound",
    re.IGNORECASE,
)
# the kernel always logs that an out-of-tree module is unsigned and taints it; it loads anyway
_HARMLESS = re.compile(r"taint", re.IGNORECASE)
_SHOWN = 5
_STORM = 3  # an XID that one GPU repeats this often is reported once, with its count


def logged(node: Node, pattern: str) -> tuple[Evidence, ...]:
    """Lines of this boot that match the pattern, oldest first; () if this user has no permission to read
    them."""
    return tuple(_evidence(line) for line, _ in matching(node.readable_log, pattern))


def failures(node: Node, *addresses: str) -> tuple[Evidence, ...]:
    """The driver's failures of this boot, oldest first: the first of a series causes the others.

    With `addresses`, only those of these GPUs. The driver retries, so a line that differs from an earlier one
    only in numbers isn't repeated.
    """
    places = [address.rpartition(".")[0].lower() for address in addresses]
    lines: dict[str, KernelLine] = {}
    for line, _ in matching(node.readable_log, _DRIVER):
        text = line.text.lower()
        if not _FAILURE.search(text) or _HARMLESS.search(text):
            continue
        if not places or any(place in text for place in places):
            lines.setdefault(re.sub(r"\b(?:0x[0-9a-f]+|\d+)\b", "N", text), line)
    return tuple(_evidence(line) for line in list(lines.values())[:_SHOWN])


def xid_storms(node: Node) -> Iterator[Evidence]:
    """XIDs that one GPU repeats: the first line of each and its count."""
    lines = xid_lines(node.readable_log)
    counts = Counter((line.address, line.number) for line in lines)
    for place, count in counts.items():
        first = next(line for line in lines if (line.address, line.number) == place)
        if count >= _STORM:
            yield Evidence(SOURCE, f"[{first.seconds:.6f}] {first.text} (the first of {count})", None)


def _evidence(line: KernelLine) -> Evidence:
    return Evidence(SOURCE, f"[{line.seconds:.6f}] {line.text}", None)


# The kernel module: loaded, with its firmware and its options, and not crashed.


def operator_driver(node: Node) -> tuple[tuple[Evidence, ...], Fix]:
    """The last failure in the logs of the GPU operator's driver pod, and the command that shows more."""
    failure = driver_failure(node.host, node.operator)
    if failure is None:
        return (seen(DRIVER_ROOT, "the driver's pod has no log"),), fixes.look(
            "crictl ps --all --name nvidia-driver-ctr",
            "If it lists no container, look for the pod: kubectl get pods --all-namespaces | grep "
            "nvidia-driver",
        )
    path, line = failure
    return (seen(path, shown(line)),), fixes.look(
        f"tail -n 50 {path}", "Fix what the last error names; the pod then retries by itself"
    )


@prerequisite_check(
    "module-not-loaded",
    title="The NVIDIA module is loaded",
    looks_at="/sys/module/nvidia and its initstate; modprobe.d and the kernel's log for what blocked it.",
    fix=fixes.LOAD_MODULE,
    blocked_by=(
        "driver-not-installed",
        "gpu-bound-other-driver",
        "nouveau-loaded",
        "gpu-arch-dropped",
        "driver-too-old",
        "kmod-flavour",
        "dkms-not-built",
        "secureboot-unsigned",
    ),
    classes=HOST_OR_CONTAINER,
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1269",),
)
def module_not_loaded(node: Node) -> Verdict:
    """Until the module is loaded, no device files exist, NVML fails with 'driver not loaded', and GPU
    containers don't start.
    """
    module = node.module
    if module is None and not node.module_built and TRAITS["operator-driver"].holds(node):
        logs, fix = operator_driver(node)
        return fail(
            "the GPU operator's driver container hasn't loaded its module",
            seen("/sys/module/nvidia", "absent"),
            *logs,
            *failures(node),
            fix=fix,
        )
    if module is None:
        evidence = [seen("/sys/module/nvidia", "absent"), *_obstacles(node)]
        return fail("the NVIDIA module is not loaded", *evidence, fix=_allow(node) or _after_failure(node))
    if not module.live:
        place = f"/sys/module/{module.name}/initstate"
        return fail(
            "the NVIDIA module is stuck while loading or unloading",
            seen(place, (node.host.read_text(place) or "").strip()),
            fix=fixes.REBOOT,
        )
    flavour = "open" if module.open else "proprietary"
    return ok(
        f"driver {module.version or '(no version)'}, {flavour} kernel module",
        seen(f"/sys/module/{module.name}/version", module.version),
    )


def _refused(node: Node, *modules: str) -> tuple[Directive, ...]:
    try:
        return tuple(directive for name in modules for directive in node.module_options.refused(name))
    except GpunodeError:
        return ()


def _obstacles(node: Node) -> Iterator[Evidence]:
    """Why nothing has loaded it, as far as this user has permission to see."""
    for directive in _refused(node, "nvidia"):
        yield seen(directive.source, _directive_text(directive), directive.line)
    if (node.host.read_text("/proc/sys/kernel/modules_disabled") or "").strip() == "1":
        yield seen(
            "/proc/sys/kernel/modules_disabled", "1 (the kernel accepts no modules until the next boot)"
        )
    yield from failures(node)


def _directive_text(directive: Directive) -> str:
    return (
        directive.value
        if directive.source == COMMAND_LINE
        else f"{directive.kind} {directive.module} {directive.value}".strip()
    )


def _allow(node: Node, last: str = " && modprobe nvidia && modprobe nvidia-uvm") -> Fix | None:
    """Comment out the lines that block the module; None if no file has any."""
    lines = [directive for directive in _refused(node, "nvidia", "nvidia_uvm") if directive.line is not None]
    if not lines:
        return None
    edits = " && ".join(f"sed -i '{line.line}s/^/# /' {line.source}" for line in lines)
    return Fix(edits + last)


def _after_failure(node: Node) -> Fix | None:
    """Fix if the kernel's log has failures of the driver: loading it has failed before."""
    if not failures(node):
        return None
    # a GPU that stays in D3cold has no power or doesn't respond: a reboot alone doesn't power-cycle it
    if logged(node, r"^nvidia \S+ Unable to change power state from D3cold"):
        return fixes.POWER_OFF
    return fixes.READ_KERNEL_LOG


@next_boot_check(
    "module-disabled-next-boot",
    title="The module can be loaded at the next boot",
    looks_at="install lines that load nothing and aliases to off, for nvidia and nvidia_uvm in modprobe.d.",
    fix=driver_packages.SHOW_MODPROBE,
    blocked_by=("module-not-loaded",),
    unless=("operator-driver",),
    refs=("https://man7.org/linux/man-pages/man5/modprobe.d.5.html",),
)
def module_disabled_next_boot(node: Node) -> Verdict:
    """modprobe applies these lines even if the module is requested by name. The module is loaded now, but
    won't be after the next boot.
    """
    refused = _refused(node, "nvidia", "nvidia_uvm")
    # a blacklisted module can still be loaded by its name, as nvidia-modprobe and persistenced do
    hard = [directive for directive in refused if directive.kind in ("install", "alias")]
    if not hard:
        return ok("nothing blocks the NVIDIA module")
    evidence = [seen(directive.source, _directive_text(directive), directive.line) for directive in hard]
    return warn(
        "the next reboot breaks the GPUs: modprobe.d blocks the module", *evidence, fix=_allow(node, "")
    )


@prerequisite_check(
    "gsp-firmware",
    title="The GPU firmware matches the driver",
    looks_at="gsp_*.bin of the loaded version in the kernel's firmware directories, and failed firmware "
    "loads in its log. The open modules always need it, the proprietary one from Turing on.",
    fix=driver_packages.REINSTALL_FIRMWARE,
    blocked_by=("module-not-loaded",),
    unless=("operator-driver", "vgpu-guest"),
    reboot=True,
    refs=("https://github.com/NVIDIA/open-gpu-kernel-modules/issues/446",),
)
def gsp_firmware(node: Node) -> Verdict:
    """Most of the driver runs on the GPU's own processor, and it loads this firmware each time a GPU starts:
    after a reboot, after a reset and, if persistence mode is off, each time a program starts. Without a file
    of exactly the driver's version the GPU doesn't start: RmInitAdapter failed.
    """
    module = node.module
    if module is None or not module.version:
        return skip("the module's version is unknown")
    if not module.open and not driver.wants_firmware(node.host):
        return ok("this module runs without GSP firmware")
    there = driver.firmware(node.host, module.version, node.kernel)
    if there:
        return ok(f"the GSP firmware of {module.version} is installed", seen(there[0], ", ".join(there[1:])))
    if node.next_version not in ("", module.version):
        return skip("the firmware matches the driver that becomes active after a reboot")
    place = f"/lib/firmware/nvidia/{module.version}"
    failed = logged(node, r"firmware load for nvidia/\S*gsp\S* failed with error -2")
    fix = driver_packages.reinstall_firmware(node, module.version, reboot=bool(failed))
    if failed:
        return fail(
            "the kernel found no GSP firmware for this driver",
            *failed[:1],
            seen(place, "no gsp_*.bin"),
            fix=fix,
        )
    others = driver.firmware_versions(node.host)
    if not others:
        return skip("/lib/firmware/nvidia has no driver firmware")
    return warn(
        f"the GSP firmware of {module.version} was removed: the next reboot or reset breaks the GPUs",
        seen(place, "no gsp_*.bin"),
        seen("/lib/firmware/nvidia", f"firmware of {', '.join(others)}"),
        fix=fix,
    )


@check(
    "driver-persist-modprobe-conf",
    title="The module has its default parameters",
    severity="info",
    looks_at="ModifyDeviceFiles and EnableGpuFirmware in /proc/driver/nvidia/params.",
    fix=driver_packages.SHOW_MODPROBE,
    blocked_by=("module-not-loaded",),
    refs=("https://github.com/NVIDIA/nvidia-modprobe",),
)
def driver_persist_modprobe_conf(node: Node) -> Verdict:
    """An options line in modprobe.d disables these parameters. They determine what creates the device files,
    and whether the driver uses the GPU's own processor.
    """
    odd = driver.switched_off(node.host)
    if not odd:
        return ok("the module runs with its default parameters")
    evidence = [seen(driver.PARAMETERS, f"{name}: 0") for name in odd]
    names = ", ".join(f"NVreg_{name}=0" for name in odd)
    return note(f"the module was loaded with {names}", *evidence)


@check(
    "driver-oops",
    title="The module has not crashed",
    severity="warning",
    looks_at="BUG, Oops and general protection faults in the NVIDIA modules during this boot.",
    fix=fixes.REBOOT,
    blocked_by=("module-not-loaded",),
    refs=("https://docs.kernel.org/admin-guide/tainted-kernels.html",),
)
def driver_oops(node: Node) -> Verdict:
    """After a crash the kernel continues in a damaged state: locks stay held and processes can't be killed.
    Only a reboot clears it.
    """
    crash_lines = driver.crash(node.kernel_log)
    if not crash_lines:
        return ok("the kernel's log reports no crash in the NVIDIA module")
    evidence = [seen("dmesg", f"[{line.seconds:.6f}] {line.text}") for line in crash_lines]
    return warn("the NVIDIA module has crashed in the kernel", *evidence)
