"""Checks of the platform: WSL, Jetson, LXC, image-based systems, access control, clock and kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone

from gpunode.checks import driver_packages, fixes
from gpunode.checks.finding import DISRUPTS_NOTHING, FindingStatus, Fix
from gpunode.checks.hardware import kernel_argument
from gpunode.checks.model import (
    HOST_OR_CONTAINER,
    Verdict,
    check,
    fail,
    note,
    ok,
    prerequisite_check,
    seen,
    skip,
    warn,
)
from gpunode.checks.toolkit import then_register, toolkit_missing
from gpunode.checks.units import after_reading_log, seen_unit
from gpunode.facts import access_control, system
from gpunode.facts.boot import GRUB, PACKAGES, chosen_kernel, kernel_waiting
from gpunode.facts.daemons import parse_version
from gpunode.facts.driver_targets import RUN_INSTALLER
from gpunode.facts.kernels import newer_kernels, version_key
from gpunode.facts.kubelet import CONFIG, setting
from gpunode.facts.module_builds import failed_build
from gpunode.facts.node import Node
from gpunode.facts.system import CONTAINER, NOT_BEFORE, TEGRA, WSL2, clock
from gpunode.facts.tables import TABLE, can, first
from gpunode.facts.toolkit import NO_CGROUPS

EDIT_APPARMOR = Fix("aa-logprof")
# profiles that an engine creates as it starts: no file contains them, so a container needs another profile
_MADE_BY = {
    "docker-default": "https://docs.docker.com/engine/security/apparmor/",
    "snap.docker.": "https://docs.docker.com/engine/security/apparmor/",
    "containers-default": "https://docs.podman.io/en/latest/markdown/podman-run.1.html",
    "cri-containerd": "https://kubernetes.io/docs/tutorials/security/apparmor/",
    "crio-default": "https://kubernetes.io/docs/tutorials/security/apparmor/",
}
_BY_OPTION = (
    "Load a profile that also allows what was denied, and start the container with --security-opt "
    "apparmor=PROFILE. To try whether the profile is the cause: --security-opt apparmor=unconfined"
)
_BY_POD = (
    "Load a profile that also allows what was denied, and name it in the pod's "
    "securityContext.appArmorProfile (type Localhost). To try whether the profile is "
    "the cause: type Unconfined"
)
_LXC_NUMBER = re.compile(r"^lxc-(\d+)_")  # Proxmox VE names the profile after the container
_LXC_GUIDE = "https://pve.proxmox.com/wiki/Linux_Container"
UNIFIED_CGROUPS = kernel_argument("systemd.unified_cgroup_hierarchy=1")
RESTART_WSL = Fix(
    "wsl.exe --shutdown",
    needs_root=False,
    disruptive="restart",
    disturbs="ends everything that runs in WSL",
)


def pass_devices(paths: Sequence[str]) -> Fix:
    """Pass the devices on the LXC container's host. The container can't see its own number, and an invented
    one would be another container's."""
    options = " ".join(f"-dev{number} {path}" for number, path in enumerate(paths))
    return Fix(
        f"pass {', '.join(paths)} to this container on its host",
        needs_root=False,
        note="On a host with Proxmox VE, VMID is this container's number. Leave out the GPUs that it must "
        "not use, and change each number that pct config VMID lists as dev already: pct set replaces a "
        "device with the same number. pct reboot ends everything that runs in this container:\n"
        f"pct set VMID {options} && pct reboot VMID",
    )


def allow_in_apparmor(profile: str) -> Fix:
    """Fix in the place that sets this profile: an LXC container's features, or an engine's option per
    container."""
    if number := _LXC_NUMBER.match(profile):
        command = f"pct set {number[1]} -features nesting=1 && pct reboot {number[1]}"
        return Fix(command, disruptive="restart", disturbs="reboots this LXC container")
    if profile.startswith("lxc-"):
        return Fix(f"follow {_LXC_GUIDE} to allow nesting in this container", needs_root=False)
    guide = next((url for name, url in _MADE_BY.items() if profile.startswith(name)), None)
    if guide is None:
        return EDIT_APPARMOR
    how = _BY_POD if guide.startswith("https://kubernetes.io/") else _BY_OPTION
    return Fix(f"follow {guide}", needs_root=False, note=how)


def remove_packages(family: str, names: Sequence[str]) -> Fix:
    """Remove packages that don't belong on this system, and the libraries that the loader finds instead."""
    command = fixes.packages(family, "remove", names)
    return Fix(f"{command} && ldconfig" if command else "ldconfig")


# systems that are declared or built as a whole: how driver and toolkit are added (from their own manuals)
WHOLE = {
    "nixos": (
        "set services.xserver.videoDrivers, hardware.nvidia.open and "
        "hardware.nvidia-container-toolkit.enable in the system's configuration",
        "nixos-rebuild switch",
    ),
    "flatcar": (
        "Flatcar builds the driver itself; NVIDIA_DRIVER_VERSION in /etc/flatcar/nvidia-metadata chooses it",
        "systemctl restart nvidia.service",
    ),
    "talos": (
        "Talos needs the extensions nvidia-open-gpu-kernel-modules and nvidia-container-toolkit",
        "follow https://factory.talos.dev/ to build an image with both",
    ),
    "bottlerocket": (
        "Bottlerocket has driver and toolkit only in its NVIDIA variants, such as aws-k8s-1.33-nvidia",
        "follow https://bottlerocket.dev/en/os/latest/#/concepts/variants/",
    ),
    "cos": ("Container-Optimized OS has an installer for the driver", "cos-extensions install gpu"),
}
OTHER_WHOLE = (
    "this system is an image: include driver and toolkit in the image, or use NVIDIA's GPU operator",
    "follow https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/",
)
_TOOLKIT_NAME = "the container toolkit"
# download and load the newest release of a system extension (flatcar/sysext-bakery docs/nvidia_runtime.md)
FLATCAR_TOOLKIT = (
    "Flatcar has it as the system extension nvidia-runtime",
    "mkdir -p /etc/sysupdate.nvidia-runtime.d /etc/extensions /opt/extensions/nvidia-runtime && "
    "curl -fLo /etc/sysupdate.nvidia-runtime.d/nvidia-runtime.conf "
    "https://extensions.flatcar.org/extensions/nvidia-runtime.conf && "
    "/usr/lib/systemd/systemd-sysupdate -C nvidia-runtime update && systemd-sysext refresh",
)
# systemd-sysext(8): refresh unmounts all extensions for a moment
FLATCAR_EFFECT = (
    "for a moment /usr lacks all system extensions, such as Docker's: containers that start then fail, "
    "running ones continue"
)


# Systems with rules of their own: WSL, Jetson, LXC, and those without package installation.

_DXG = "/dev/dxg"
_WSL_LIBRARIES = "/usr/lib/wsl/"
_CSV = "/etc/nvidia-container-runtime/host-files-for-container.d"
# Ubuntu's CUDA packages install the libraries too, but the loader finds WSL's own first
_LINUX_DRIVER = ("nvidia-driver", "nvidia-dkms", "nvidia-open", "nvidia-kernel", "cuda-drivers")
_LINUX_LIBRARIES = "libnvidia-compute"


@prerequisite_check(
    "wsl2",
    title="WSL provides the GPUs and their driver",
    looks_at="/dev/dxg, /usr/lib/wsl/lib/libcuda.so.1, the libcuda.so.1 that the loader uses, and Linux "
    "driver packages.",
    fix=RESTART_WSL.after("wsl.exe --update"),
    classes=(WSL2,),
    refs=("https://docs.nvidia.com/cuda/wsl-user-guide/",),
)
def wsl2(node: Node) -> Verdict:
    """In WSL the driver is the Windows driver, with its libraries in /usr/lib/wsl/lib. A Linux driver hides
    these libraries and has no GPU to control.
    """
    if node.host.stat(_DXG) is None:
        why = "WSL passes the GPU of Windows to Linux through this device file."
        return fail("WSL provides no GPU to this distribution", seen(_DXG, "absent"), why=why)
    if not node.host.exists(f"{_WSL_LIBRARIES}lib/libcuda.so.1"):
        where = seen(f"{_WSL_LIBRARIES}lib", "no libcuda.so.1")
        why = "In WSL the driver is the Windows driver, with its libraries in /usr/lib/wsl/lib."
        return fail("Windows has no NVIDIA driver with WSL support", where, fix=Fix(_WINDOWS_DRIVER), why=why)
    library = node.cuda_library
    family = node.distribution.family
    packages = [package.name for package in node.packages.starting(*_LINUX_DRIVER)]
    if library is not None and not library.real.startswith(_WSL_LIBRARIES):
        where = seen(library.path, f"{library.real}, not {_WSL_LIBRARIES}lib")
        packages += [package.name for package in node.packages.starting(_LINUX_LIBRARIES)]
        owner = {"debian": "dpkg -S", "rhel": "rpm -qf", "suse": "rpm -qf"}.get(family)
        command = (
            "nvidia-uninstall" if node.host.executable(RUN_INSTALLER) else f"rm {library.path} {library.real}"
        )
        first = f"First run {owner} {library.real}: if it names a package, remove that package instead"
        by_hand = Fix(f"{command} && ldconfig", before=first if owner and command.startswith("rm ") else "")
        purge = remove_packages(family, packages) if packages else by_hand
        return fail("a Linux driver hides the driver that Windows provides", where, fix=purge)
    if packages:
        evidence = seen("package database", ", ".join(packages[:5]))
        purge = remove_packages(family, packages)
        return warn("a Linux driver is installed, but WSL doesn't use it", evidence, fix=purge)
    return ok("the driver is the one that Windows provides", seen(_DXG, "there"))


_WINDOWS_DRIVER = "follow https://docs.nvidia.com/cuda/wsl-user-guide/ to install the driver in Windows"


# JetPack's own repository contains it
_TOOLKIT = Fix("apt install nvidia-container-toolkit", disturbs=DISRUPTS_NOTHING)


@check(
    "jetson",
    title="The toolkit is configured for this Jetson",
    looks_at=f"the toolkit's programs, the lists in {_CSV} or a CDI specification, and on a Kubernetes node "
    "the toolkit's release.",
    # the package that owns the lists (NVIDIA/nvidia-container-runtime#123)
    fix=Fix("apt install --reinstall nvidia-l4t-init"),
    classes=(TEGRA,),
    table=TABLE,
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/",),
)
def jetson(node: Node) -> Verdict:
    """A Jetson's GPU isn't on the PCI bus, and its libraries are in other directories: the toolkit gets files
    and devices from JetPack's lists. Containers need --runtime=nvidia; --gpus alone isn't enough.
    """
    if not node.toolkit.programs:
        absent = seen("PATH", "no nvidia-ctk")
        why = "The toolkit adds the GPU's device files and JetPack's libraries to a container."
        install = then_register(node, _TOOLKIT)
        return fail("the NVIDIA Container Toolkit isn't installed", absent, fix=install, why=why)
    lists = node.host.glob(_CSV, "*.csv")
    if not lists and not node.cdi_specs and node.host.is_dir("/sys/module/nvgpu"):
        return fail("the toolkit has no list of the files that a GPU container needs", seen(_CSV, "no *.csv"))
    served = node.kubelet is None or not node.kubelet.joined or can("toolkit", "tegra", node.toolkit.version)
    if served is False:
        evidence = seen(node.toolkit.version_source, ".".join(map(str, node.toolkit.version)))
        upgrade = fixes.UPGRADE_TOOLKIT
        release = first("toolkit", "tegra")
        return warn(
            f"device plugins can't use this module's GPU with a toolkit before {release}",
            evidence,
            fix=upgrade,
        )
    return ok(
        "the toolkit has the lists of files that a GPU container needs", seen(_CSV, f"{len(lists)} lists")
    )


@prerequisite_check(
    "lxc-nested",
    title="The LXC container can use the GPUs",
    looks_at="inside an LXC container: device files, the user namespace, and the toolkit's no-cgroups.",
    fix=pass_devices(("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")),
    blocked_by=("module-not-loaded",),
    classes=(CONTAINER,),
    needs=("gpu", "lxc"),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/139",),
)
def lxc_nested(node: Node) -> Verdict:
    """An LXC container has only the device files that its host passes to it: use 'pct set' on Proxmox,
    'config device add NAME gpu gpu' with LXD and Incus. In an unprivileged one, the toolkit can't set the
    device rules of the containers that run inside it.
    """
    there = {device.path for device in node.device_nodes}
    missing = [path for path in ("/dev/nvidiactl", "/dev/nvidia-uvm") if path not in there]
    if not any(path.removeprefix("/dev/nvidia").isdigit() for path in there):
        missing += [f"/dev/nvidia{number}" for number in range(max(1, len(node.gpus)))]
    if missing:
        evidence = [seen(path, "absent") for path in missing]
        passing = pass_devices(missing)
        what = "the LXC container has no device files of the GPUs"
        why = "An LXC container has only the device files that its host passes to it."
        return fail(what, *evidence, fix=passing, why=why)
    if not node.toolkit.programs or not system.unprivileged(node.host):
        return ok("the container has the GPUs' device files")
    settings = node.toolkit_settings
    if settings.value(NO_CGROUPS):
        return ok("the toolkit doesn't change control groups, as this container requires")
    where = seen(settings.path, f"{NO_CGROUPS} = false", settings.line(NO_CGROUPS))
    inside = seen(system.UID_MAP, "root in this container is an ordinary user on its host")
    return warn(
        "the toolkit is configured to change control groups, but has no permission in this container",
        where,
        inside,
        fix=Fix(f"gpunode toolkit config set {NO_CGROUPS}=true"),
        why="Root in an unprivileged LXC container can't set the device rules of the containers inside it.",
    )


@check(
    "nixos-flatcar-immutable",
    title="Driver and toolkit were installed by this system's own method",
    severity="info",
    looks_at="os-release and /run/ostree-booted, if driver or toolkit are missing.",
    fix=Fix(OTHER_WHOLE[1]),
    needs=("immutable",),
    unless=("operator-driver", "vfio-host"),
    refs=("https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/",),
)
def immutable(node: Node) -> Verdict:
    """This system is declared or built as a whole: the next update removes what a package manager installed,
    or the system has no package manager.
    """
    missing = [
        *(["the driver"] if node.module is None and not node.module_built else []),
        *([_TOOLKIT_NAME] if toolkit_missing.run(node).status is FindingStatus.FAIL else []),
    ]
    name = node.distribution.name or node.distribution.id
    if not missing or not node.gpus:
        return ok(f"{name} includes driver and toolkit")
    how, command = WHOLE.get(node.distribution.id, OTHER_WHOLE)
    if node.distribution.id == "flatcar" and missing == [_TOOLKIT_NAME]:
        how, command = FLATCAR_TOOLKIT
    release_file = seen("/etc/os-release", name)
    return note(
        f"{' and '.join(missing)} can't be installed as packages: {how}", release_file, fix=Fix(command)
    )


# The system around the driver: its access control, clock, kernel, control groups and pending reboots.

_BOOLEANS = ("container_use_devices", "container_use_xserver_devices")
_DAY_SECONDS = 86400
_TIME_SERVICES = (
    "chrony.service",
    "chronyd.service",
    "systemd-timesyncd.service",
    "ntpd.service",
    "ntpsec.service",
)
_CGROUPS = "/sys/fs/cgroup"


@check(
    "selinux-nvml",
    title="SELinux allows containers to use the GPUs",
    looks_at="the booleans container_use_devices and container_use_xserver_devices, and denials of the last "
    "day for a container's domain and NVIDIA's devices or files: kernel's log and audit.log.",
    fix=Fix("setsebool -P container_use_devices on"),
    blocked_by=("module-not-loaded",),
    needs=("gpu", "selinux-enforcing"),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/33",),
)
def selinux_nvml(node: Node) -> Verdict:
    """SELinux prevents confined containers from opening /dev/nvidia*: NVML reports Insufficient Permissions.
    The boolean allows it for all containers; for a single container, set another label instead.
    """
    for name in _BOOLEANS:
        if access_control.selinux_boolean(node.host, name):
            return ok(
                "SELinux allows containers to use devices", seen(f"/sys/fs/selinux/booleans/{name}", "on")
            )
    denials = access_control.selinux_denials(node.host, node.kernel_log)
    if not denials:
        return ok("SELinux denied no container access to a GPU")
    last = denials[-1]
    evidence = seen(last.source, last.text)
    if clock(node.host) - last.when > _DAY_SECONDS:
        return note("SELinux denied a container access to a GPU, but more than a day ago", evidence)
    often = f"{len(denials)} times" if len(denials) > 1 else "once"
    return fail(f"SELinux denied containers access to a GPU {often}", evidence)


@check(
    "apparmor-denied",
    title="AppArmor denied no container access to a GPU",
    severity="warning",
    looks_at="denials in the kernel's log for containers' profiles and files of the NVIDIA driver.",
    fix=EDIT_APPARMOR,
    blocked_by=("module-not-loaded",),
    classes=HOST_OR_CONTAINER,
    needs=("gpu",),
    refs=("https://kubernetes.io/docs/tutorials/security/apparmor/",),
)
def apparmor_denied(node: Node) -> Verdict:
    """The profile of these containers doesn't allow the driver's files, and CUDA fails in them."""
    denials = access_control.apparmor_denials(node.kernel_log)
    if not denials:
        return ok("AppArmor denied no container access to a GPU")
    last = denials[-1]
    evidence = seen(last.source, last.text)
    if clock(node.host) - last.when > _DAY_SECONDS:
        return note("AppArmor denied a container access to a GPU, but more than a day ago", evidence)
    fix = allow_in_apparmor(last.subject)
    return warn(f"AppArmor's profile {last.subject} denied a container access to a GPU", evidence, fix=fix)


@check(
    "clock-skew",
    title="The clock is set correctly",
    severity="warning",
    looks_at="an impossible date (before 2025), and failed time services.",
    # packages can't be verified while the clock is wrong, so the fix installs nothing
    fix=Fix("timedatectl set-ntp true"),
    refs=("https://www.freedesktop.org/software/systemd/man/latest/timedatectl.html",),
)
def clock_skew(node: Node) -> Verdict:
    """With a wrong clock, certificates look expired or not yet valid: images can't be pulled, packages not
    verified, licences of virtual GPUs not fetched.
    """
    now = clock(node.host)
    if not now:
        return skip("the time of this recording is unknown")
    day = datetime.fromtimestamp(now, timezone.utc).date().isoformat()
    if now < NOT_BEFORE:
        return warn(f"the clock is at {day}", seen("the system's clock", day))
    states = [node.units[name] for name in _TIME_SERVICES if name in node.units]
    if any(state.runs for state in states):
        return ok(f"the clock is at {day}, and a time service is running")
    failed = next((state for state in states if state.active == "failed"), None)
    if failed is not None:
        fix = after_reading_log(failed.name, Fix(f"systemctl restart {failed.name}"))
        return warn(f"{failed.name} has failed", *seen_unit(node, failed.name), fix=fix)
    return ok(f"the clock is at {day}")


@check(
    "reboot-required",
    title="No kernel is waiting for a reboot",
    severity="warning",
    looks_at="kernels in /run/reboot-required.pkgs on Debian and Ubuntu; elsewhere a newer installed kernel "
    "of the running one's flavour, unless GRUB is set to boot another one. A kernel without the "
    "NVIDIA module is a matter for dkms-not-built.",
    fix=fixes.REBOOT,
    blocked_by=("pci-no-gpu", "driver-lib-mismatch"),
    unless=("immutable",),
    refs=("https://ubuntu.com/server/docs/how-to/software/automatic-updates/",),
)
def reboot_required(node: Node) -> Verdict:
    """The running kernel isn't the newest installed one. The new kernel becomes active at the next reboot,
    planned or not: schedule the reboot for a time when you can watch it.
    """
    newer = newer_kernels(node.kernels, node.kernel)
    upcoming = max(newer, key=lambda kernel: version_key(kernel.release), default=None)
    if upcoming is None or (node.module_built and not upcoming.has_module):
        return ok("no kernel that is ready is waiting for a reboot")
    running = seen("/proc/sys/kernel/osrelease", f"{node.kernel} (running)")
    if node.distribution.family == "debian":
        release = kernel_waiting(node.host, node.kernels, node.kernel)
        if release is None:
            return ok("no kernel requests a reboot")
        return warn(
            f"kernel {release} is waiting for a reboot", seen(PACKAGES, f"linux-image-{release}"), running
        )
    entry = chosen_kernel(node.host)
    if entry.endswith(node.kernel):
        return ok("the boot loader is set to boot the running kernel again", seen(GRUB, entry))
    installed = seen(f"/lib/modules/{upcoming.release}", "installed")
    return warn(f"kernel {upcoming.release} is waiting for a reboot", installed, running)


@prerequisite_check(
    "kernel-unsupported",
    title="The driver supports this kernel",
    looks_at="compiler errors in /var/lib/dkms/nvidia*/*/build/make.log, if they are for the running kernel "
    "and it has no module.",
    fix=driver_packages.UPGRADE_DRIVER,
    blocked_by=("driver-not-installed",),
    needs=("gpu",),
    refs=("https://github.com/NVIDIA/open-gpu-kernel-modules#readme",),
)
def kernel_unsupported(node: Node) -> Verdict:
    """Each driver release supports kernels up to a certain version. A newer kernel has changed functions that
    the module calls. Install a newer driver or an older kernel.
    """
    if node.module is not None or node.module_built:
        return ok("the running kernel has its module")
    failure = failed_build(node.host, node.kernel)
    if failure is None:
        return ok("no build of the module failed for this kernel")
    evidence = [seen(failure.path, failure.text)]
    if failure.realtime:
        build = Fix(f"IGNORE_PREEMPT_RT_PRESENCE=1 dkms autoinstall -k {node.kernel} && modprobe nvidia")
        return fail(
            f"driver {failure.version} doesn't support the realtime kernel {node.kernel}",
            *evidence,
            fix=build,
        )
    others = (kernel.release for kernel in node.kernels if kernel.has_module)
    evidence += [
        seen(f"/lib/modules/{release}/modules.dep", "nvidia.ko exists for this kernel") for release in others
    ]
    summary = f"driver {failure.version} can't be compiled for kernel {node.kernel}"
    return fail(summary, *evidence, fix=driver_packages.newer_for_kernel(node, node.kernel))


@check(
    "memory-cgroup-v1",
    title="The node uses control groups version 2",
    looks_at="/sys/fs/cgroup; with version 1 and a kubelet that isn't running, also the kubelet's release "
    "and failCgroupV1 in its configuration. With a running kubelet, version 1 is a note.",
    fix=UNIFIED_CGROUPS,
    preflight=("kubernetes",),
    needs=("kubelet",),
    table=TABLE,
    refs=("https://kubernetes.io/docs/concepts/architecture/cgroups/",),
)
def memory_cgroup_v1(node: Node) -> Verdict:
    """Kubernetes drops support for control groups version 1: from 1.35 on, the kubelet doesn't start with
    them unless failCgroupV1 is false.
    """
    if node.host.exists(f"{_CGROUPS}/cgroup.controllers") or not node.host.is_dir(f"{_CGROUPS}/memory"):
        return ok("the node uses control groups version 2")
    evidence = seen(f"{_CGROUPS}/memory", "version 1")
    refused = first("kubelet", "cgroup-v1-refused")
    program = None if node.kubelet is None or node.kubelet.process else node.host.which("kubelet")
    allowed = setting(node.host.read_text(CONFIG) or "", "failCgroupV1") == "false"
    answer = node.host.run([program, "--version"], timeout=5.0) if program and not allowed else None
    version = answer.stdout.strip() if answer is not None and answer.ok else ""
    if can("kubelet", "cgroup-v1-refused", parse_version(version.removeprefix("Kubernetes v"))):
        reported = seen(f"{program} --version", version)
        refused = "the node uses control groups version 1, and this kubelet doesn't start with them"
        return fail(refused, evidence, reported, reboot=True)
    fix = UNIFIED_CGROUPS.for_family(node.distribution.family)
    return note(
        f"the node uses control groups version 1, which the kubelet refuses from {refused} on",
        evidence,
        fix=fix,
    )
