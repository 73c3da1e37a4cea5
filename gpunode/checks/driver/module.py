"""The kernel module: installed, built, accepted, loaded, new enough, and one version with its libraries."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.driver import packages
from gpunode.checks.model import HOST, HOST_OR_CONTAINER, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.facts import driver
from gpunode.facts.libraries import is_compat
from gpunode.facts.node import Node
from gpunode.result import Fix

MINIMUM = (384, 81)
_OPERATOR = "/run/nvidia/driver/usr"  # where the GPU operator mounts its driver container
# whose certificates shim or the kernel carries, so that their modules need no enrolment
_DISTRIBUTION_SIGNERS = (
    "Canonical", "Ubuntu", "Debian Secure Boot", "Red Hat", "Fedora", "CentOS", "Rocky", "AlmaLinux",
    "Oracle", "Amazon", "SUSE", "openSUSE",
)  # fmt: skip


def driver_not_installed(node: Node) -> Verdict:
    if node.module is not None:
        return ok(
            "the NVIDIA module is loaded",
            seen(f"/sys/module/{node.module.name}/version", node.module.version),
        )
    if node.module_built:
        return ok(
            "an NVIDIA module lies on disk", seen(f"/lib/modules/{node.kernel}/modules.dep", "nvidia.ko")
        )
    other = next((kernel.release for kernel in node.kernels if kernel.has_module), None)
    if other or node.dkms or node.host.is_dir(_OPERATOR):
        return ok("the driver is installed")
    installed = driver.driver_packages(node.host)
    if installed:
        return ok("driver packages are installed", seen("package database", ", ".join(installed[:5])))
    evidence = [
        seen(f"/lib/modules/{node.kernel}/modules.dep", "no nvidia.ko"),
        seen("/var/lib/dkms", "no nvidia"),
    ]
    if node.nvml_library:
        evidence.append(seen(node.nvml_library.path, "libraries without a kernel module"))
    return fail("no NVIDIA driver is installed", *evidence, fix=packages.install_driver(node))


def dkms_not_built(node: Node) -> Verdict:
    running = node.kernel
    if node.module is None and node.host.is_dir(_OPERATOR) and not node.dkms:
        return skip("the GPU operator's container builds and loads the module")
    if node.module is None and not node.module_built:
        with_module = [kernel.release for kernel in node.kernels if kernel.has_module]
        evidence = [seen(f"/lib/modules/{running}/modules.dep", "no nvidia.ko")]
        evidence += [seen("/var/lib/dkms", f"source of {version}") for version in node.dkms]
        evidence += [seen(f"/lib/modules/{release}/modules.dep", "nvidia.ko") for release in with_module]
        return fail(
            f"no NVIDIA module was built for the running kernel {running}",
            *evidence,
            fix=packages.build_module(node, running) if running else None,
        )
    if node.host.stat("/usr/sbin/akmods") or not node.module_built:
        return ok("the running kernel has its NVIDIA module")  # akmods builds for a new kernel while it boots
    missing = [kernel for kernel in driver.newer_kernels(node.kernels, running) if not kernel.has_module]
    if missing:
        release = missing[-1].release
        return warn(
            f"the next reboot breaks the GPUs: kernel {release} has no NVIDIA module",
            seen(f"/lib/modules/{release}/modules.dep", "no nvidia.ko"),
            seen("/proc/sys/kernel/osrelease", f"{running} (running) has one"),
            fix=packages.build_module(node, release),
        )
    return ok("every kernel that may boot next has its NVIDIA module")


def secureboot_unsigned(node: Node) -> Verdict:
    if not node.secure_boot:
        return ok("Secure Boot is off")
    if node.module is not None:
        return ok("Secure Boot is on and the kernel accepted the module")
    file = node.module_file
    if file is None:
        return skip("modinfo tells nothing of the module's signature")
    state = seen("/sys/firmware/efi/efivars/SecureBoot-*", "1 (on)")
    if not file.signer:
        signature = seen("modinfo -F signer nvidia", "(not signed)")
        fix = packages.enrol_key(node, signed=False)
        return fail("Secure Boot is on and the NVIDIA module isn't signed", state, signature, fix=fix)
    signed = seen("modinfo -F signer nvidia", file.signer)
    if any(name in file.signer for name in _DISTRIBUTION_SIGNERS):
        return ok("Secure Boot is on and the distribution signed the module", signed)
    enrolled = driver.enrolled_keys(node.host)
    if enrolled is None:
        return skip("mokutil can't tell whether the module's key is enrolled")
    if file.signer in enrolled:
        return ok("Secure Boot is on and the module's key is enrolled", signed)
    return fail(
        "Secure Boot is on and the key that signed the NVIDIA module isn't enrolled",
        state,
        signed,
        fix=packages.enrol_key(node, signed=True),
    )


def module_not_loaded(node: Node) -> Verdict:
    module = node.module
    if module is None and node.host.is_dir(_OPERATOR) and not node.module_built:
        where = seen(_OPERATOR, "the GPU operator's driver")
        fix = Fix("crictl ps --all --name nvidia-driver-ctr")
        return fail("the GPU operator's driver container hasn't loaded its module", where, fix=fix)
    if module is None:
        return fail("the NVIDIA module is not loaded", seen("/sys/module/nvidia", "absent"))
    if not module.live:
        place = f"/sys/module/{module.name}/initstate"
        return fail(
            "the NVIDIA module is stuck while loading or unloading",
            seen(place, (node.host.read_text(place) or "").strip()),
            fix=fixes.REBOOT.other,
        )
    flavour = "open" if module.open else "proprietary"
    return ok(
        f"driver {module.version or '(no version)'}, {flavour} kernel module",
        seen(f"/sys/module/{module.name}/version", module.version),
    )


def driver_too_old(node: Node) -> Verdict:
    module = node.module
    numbers = driver.version_numbers(module.version) if module else ()
    if module is None or not numbers:
        return skip("the module doesn't tell its version")
    evidence = seen(f"/sys/module/{module.name}/version", module.version)
    if numbers < MINIMUM:
        return fail(f"driver {module.version} is older than 384.81", evidence)
    return ok(f"driver {module.version} is new enough", evidence)


def driver_lib_mismatch(node: Node) -> Verdict:
    module = node.module
    both = (node.nvml_library, node.cuda_library)
    found = [one for one in both if one and one.version and not is_compat(one.path)]
    if module is None or not module.version or not found:
        return skip("the module or its libraries don't tell their version")
    evidence = [seen(f"/sys/module/{module.name}/version", f"{module.version} (loaded module)")]
    evidence += [seen(library.real, f"{library.version} ({library.soname})") for library in found]
    wrong = [library for library in found if library.version != module.version]
    if wrong:
        return fail(f"the loaded module is {module.version}, the libraries are {wrong[0].version}", *evidence)
    return ok(f"module and libraries are both {module.version}", *evidence)


def driver_upgrade_pending(node: Node) -> Verdict:
    module, file = node.module, node.module_file
    if module is None or not module.version or file is None:
        return skip("modinfo tells no version of the module on disk")
    if file.version == module.version:
        return ok(f"the module on disk is the loaded one, {module.version}")
    return warn(
        f"driver {file.version} is installed, {module.version} still runs until the next reboot",
        seen("modinfo -F version nvidia", file.version),
        seen(f"/sys/module/{module.name}/version", module.version),
    )


CHECKS = (
    Check(
        id="driver-not-installed",
        title="The NVIDIA driver is installed",
        layer="driver",
        severity="error",
        looks_at=(
            "/sys/module/nvidia, modules.dep of every kernel in /lib/modules, /var/lib/dkms, the GPU "
            "operator's /run/nvidia/driver and the package database."
        ),
        why=(
            "Without the kernel module nothing on this node can talk to the GPUs; the CUDA toolkit or the "
            "libraries alone are not the driver."
        ),
        remedy=fixes.INSTALL_DRIVER,
        run=driver_not_installed,
        blocked_by=("pci-no-gpu",),
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
    ),
    Check(
        id="dkms-not-built",
        title="The module is built for this kernel and the next",
        layer="driver",
        severity="error",
        looks_at=(
            "modules.dep of the running kernel and of every newer installed kernel of the same flavour, and "
            "/var/lib/dkms. Only a newer kernel without the module is a warning."
        ),
        why=(
            "A kernel module fits one kernel. After a kernel upgrade without headers DKMS builds nothing, "
            "and the GPUs are gone after the next boot."
        ),
        remedy=fixes.BUILD_MODULE,
        run=dkms_not_built,
        blocked_by=("driver-not-installed",),
    ),
    Check(
        id="secureboot-unsigned",
        title="Secure Boot accepts the module",
        layer="driver",
        severity="error",
        looks_at=(
            "the efivar SecureBoot, the module's signer (modinfo) and the enrolled keys (mokutil). A loaded "
            "module was accepted."
        ),
        why=(
            "With Secure Boot the kernel refuses a module whose signature it can't trace to an enrolled "
            "key: Key was rejected by service. Enrolling asks for a password at the console during the next "
            "boot."
        ),
        remedy=fixes.ENROL_KEY,
        run=secureboot_unsigned,
        blocked_by=("driver-not-installed", "dkms-not-built"),
    ),
    Check(
        id="module-not-loaded",
        title="The NVIDIA module is loaded",
        layer="driver",
        severity="error",
        looks_at="/sys/module/nvidia and its initstate.",
        why=(
            "Until the module is loaded there are no device files, NVML answers 'driver not loaded' and "
            "every GPU container fails to start."
        ),
        remedy=fixes.LOAD_MODULE,
        run=module_not_loaded,
        blocked_by=(
            "driver-not-installed",
            "gpu-bound-other-driver",
            "nouveau-loaded",
            "dkms-not-built",
            "secureboot-unsigned",
        ),
        classes=HOST_OR_CONTAINER,
    ),
    Check(
        id="driver-too-old",
        title="The driver is new enough",
        layer="driver",
        severity="error",
        looks_at="/sys/module/nvidia/version; 384.81 is the least.",
        why="CUDA 9, the container toolkit and device plugins need at least driver 384.81.",
        remedy=fixes.UPGRADE_DRIVER,
        run=driver_too_old,
        blocked_by=("module-not-loaded",),
        classes=HOST_OR_CONTAINER,
        refs=("https://github.com/NVIDIA/k8s-device-plugin#prerequisites",),
    ),
    Check(
        id="driver-lib-mismatch",
        title="Module and libraries are one version",
        layer="driver",
        severity="error",
        looks_at=(
            "/sys/module/nvidia/version against the version in the real file names of libnvidia-ml.so.1 and "
            "libcuda.so.1."
        ),
        why=(
            "The libraries refuse a module of another version (NVML: Driver/library version mismatch, code "
            "18). Usually an unattended upgrade replaced the libraries while the old module was still "
            "loaded."
        ),
        remedy=fixes.REBOOT,
        run=driver_lib_mismatch,
        blocked_by=("module-not-loaded", "libnvidia-ml-missing"),
        classes=HOST_OR_CONTAINER,
    ),
    Check(
        id="driver-upgrade-pending",
        title="No driver upgrade waits for a reboot",
        layer="driver",
        severity="warning",
        looks_at=(
            "modinfo -F version nvidia (what loads next) against /sys/module/nvidia/version (what runs)."
        ),
        why=(
            "The GPUs work now, but anything that reloads the module or refreshes the libraries changes the "
            "driver under running work. Reboot at a time of your choosing."
        ),
        remedy=fixes.REBOOT,
        run=driver_upgrade_pending,
        blocked_by=("module-not-loaded", "driver-lib-mismatch"),
        classes=HOST,
    ),
)
