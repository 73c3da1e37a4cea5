"""The system around the driver: its access control, clock, kernel, control groups and pending reboots."""

from __future__ import annotations

from datetime import UTC, datetime

from gpunode.checks import fixes
from gpunode.checks.driver.packages import newer_for_kernel
from gpunode.checks.model import (
    ANY_ENGINE,
    HOST,
    HOST_OR_CONTAINER,
    Check,
    Verdict,
    fail,
    note,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.checks.platform import remedies
from gpunode.facts.clock import NOT_BEFORE, clock
from gpunode.facts.daemons import parse_version
from gpunode.facts.driver import newer_kernels, version_key
from gpunode.facts.gates import TABLE, can, first
from gpunode.facts.kubelet import CONFIG, setting
from gpunode.facts.node import Node
from gpunode.result import Fix

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


def selinux_nvml(node: Node) -> Verdict:
    from gpunode.facts import mac

    for name in _BOOLEANS:
        if mac.selinux_boolean(node.host, name):
            return ok("SELinux lets containers use devices", seen(f"/sys/fs/selinux/booleans/{name}", "on"))
    denials = mac.selinux_denials(node.host, node.kernel_log)
    if not denials:
        return ok("SELinux denied no container a GPU")
    last = denials[-1]
    evidence = seen(last.source, last.text)
    if clock(node.host) - last.when > _DAY_SECONDS:
        return note("SELinux denied a container a GPU, more than a day ago", evidence)
    often = f"{len(denials)} times" if len(denials) > 1 else "once"
    return fail(f"SELinux denied containers a GPU {often}", evidence)


def apparmor_denied(node: Node) -> Verdict:
    from gpunode.facts.mac import apparmor_denials

    denials = apparmor_denials(node.kernel_log)
    if not denials:
        return ok("AppArmor denied no container a GPU")
    last = denials[-1]
    evidence = seen(last.source, last.text)
    if clock(node.host) - last.when > _DAY_SECONDS:
        return note("AppArmor denied a container a GPU, more than a day ago", evidence)
    fix = remedies.teach_apparmor(last.subject)
    return warn(f"AppArmor's profile {last.subject} denied a container a GPU", evidence, fix=fix)


def clock_skew(node: Node) -> Verdict:
    now = clock(node.host)
    if not now:
        return skip("it isn't known when this was recorded")
    day = datetime.fromtimestamp(now, UTC).date().isoformat()
    if now < NOT_BEFORE:
        return warn(f"the clock says {day}", seen("the system's clock", day))
    states = [node.units[name] for name in _TIME_SERVICES if name in node.units]
    if any(state.runs for state in states):
        return ok(f"the clock says {day}, and a time service runs")
    failed = next((state for state in states if state.active == "failed"), None)
    if failed is not None:
        shown = seen(f"systemctl status {failed.name}", str(failed))
        return warn(f"{failed.name} has failed", shown, fix=Fix(f"systemctl restart {failed.name}"))
    return ok(f"the clock says {day}")


def reboot_required(node: Node) -> Verdict:
    from gpunode.facts.pending_reboot import GRUB, PACKAGES, chosen_kernel, kernel_waiting

    newer = newer_kernels(node.kernels, node.kernel)
    upcoming = max(newer, key=lambda one: version_key(one.release), default=None)
    if upcoming is None or (node.module_built and not upcoming.has_module):
        return ok("no kernel that is ready waits for a reboot")
    running = seen("/proc/sys/kernel/osrelease", f"{node.kernel} (running)")
    if node.distribution.family == "debian":
        asked = kernel_waiting(node.host, node.kernels, node.kernel)
        if asked is None:
            return ok("no kernel asks for a reboot")
        return warn(f"kernel {asked} waits for a reboot", seen(PACKAGES, f"linux-image-{asked}"), running)
    chosen = chosen_kernel(node.host)
    if chosen.endswith(node.kernel):
        return ok("the next boot takes the running kernel, as somebody chose", seen(GRUB, chosen))
    installed = seen(f"/lib/modules/{upcoming.release}", "installed")
    return warn(f"kernel {upcoming.release} waits for a reboot", installed, running)


def kernel_unsupported(node: Node) -> Verdict:
    from gpunode.facts.dkms_log import failed_build

    if node.module is not None or node.module_built:
        return ok("the running kernel has its module")
    found = failed_build(node.host, node.kernel)
    if found is None:
        return ok("no build of the module failed for this kernel")
    evidence = [seen(found.path, found.text)]
    if found.realtime:
        build = Fix(f"IGNORE_PREEMPT_RT_PRESENCE=1 dkms autoinstall -k {node.kernel} && modprobe nvidia")
        return fail(f"driver {found.version} refuses the realtime kernel {node.kernel}", *evidence, fix=build)
    others = (kernel.release for kernel in node.kernels if kernel.has_module)
    evidence += [seen(f"/lib/modules/{one}/modules.dep", "nvidia.ko: this kernel has it") for one in others]
    summary = f"driver {found.version} doesn't compile for kernel {node.kernel}"
    return fail(summary, *evidence, fix=newer_for_kernel(node, node.kernel))


def memory_cgroup_v1(node: Node) -> Verdict:
    if node.host.exists(f"{_CGROUPS}/cgroup.controllers") or not node.host.is_dir(f"{_CGROUPS}/memory"):
        return ok("control groups are version 2")
    evidence = seen(f"{_CGROUPS}/memory", "version 1")
    refused = first("kubelet", "cgroup-v1-refused")
    program = None if node.kubelet is None or node.kubelet.process else node.host.which("kubelet")
    allowed = setting(node.host.read_text(CONFIG) or "", "failCgroupV1") == "false"
    answer = node.host.run([program, "--version"], timeout=5.0) if program and not allowed else None
    shown = answer.stdout.strip() if answer is not None and answer.ok else ""
    if can("kubelet", "cgroup-v1-refused", parse_version(shown.removeprefix("Kubernetes v"))):
        told = seen(f"{program} --version", shown)
        return fail("control groups are version 1, on which this kubelet doesn't start", evidence, told)
    fix = remedies.UNIFIED_CGROUPS.for_family(node.distribution.family)
    return note(
        f"control groups are version 1, which the kubelet refuses from {refused} on", evidence, fix=fix
    )


CHECKS = (
    Check(
        id="selinux-nvml",
        title="SELinux lets containers use the GPUs",
        layer="platform",
        severity="error",
        looks_at=(
            "the booleans container_use_devices and container_use_xserver_devices, and denials of the last "
            "day that name a container's domain and NVIDIA's devices or files: kernel's log and audit.log."
        ),
        why=(
            "A confined container may not open /dev/nvidia*: NVML says Insufficient Permissions. The boolean "
            "allows it for all containers; a single one can be given another label."
        ),
        remedy=remedies.ALLOW_DEVICES,
        run=selinux_nvml,
        blocked_by=("module-not-loaded",),
        needs=("gpu", "selinux-enforcing"),
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/33",),
    ),
    Check(
        id="apparmor-denied",
        title="AppArmor denied no container a GPU",
        layer="platform",
        severity="warning",
        looks_at="denials in the kernel's log: containers' profiles, and files of the NVIDIA driver.",
        why="The profile of these containers doesn't know the driver's files, and CUDA fails in them.",
        remedy=remedies.TEACH_APPARMOR,
        run=apparmor_denied,
        blocked_by=("module-not-loaded",),
        classes=HOST_OR_CONTAINER,
        needs=("gpu",),
        refs=("https://kubernetes.io/docs/tutorials/security/apparmor/",),
    ),
    Check(
        id="clock-skew",
        title="The clock is right",
        layer="platform",
        severity="warning",
        looks_at="a date that can't be (before 2025), and time services that have failed.",
        why=(
            "With a wrong clock every certificate looks expired or not yet valid: images can't be pulled, "
            "packages not verified, licences of virtual GPUs not fetched."
        ),
        remedy=remedies.SET_CLOCK,
        run=clock_skew,
        blocked_by=("pci-no-gpu",),
        refs=("https://www.freedesktop.org/software/systemd/man/latest/timedatectl.html",),
    ),
    Check(
        id="reboot-required",
        title="No kernel waits for a reboot",
        layer="platform",
        severity="warning",
        looks_at=(
            "kernels in /run/reboot-required.pkgs on Debian and Ubuntu; elsewhere a newer installed kernel "
            "of the running one's flavour, unless GRUB was told to boot another one. A kernel without the "
            "NVIDIA module isn't ready, which dkms-not-built tells."
        ),
        why=(
            "What was installed isn't what runs. It comes into force with the next reboot, planned or not; "
            "choose the time while somebody looks."
        ),
        remedy=fixes.REBOOT,
        run=reboot_required,
        blocked_by=("pci-no-gpu", "driver-lib-mismatch"),
        unless=("immutable",),
        refs=("https://ubuntu.com/server/docs/how-to/software/automatic-updates/",),
    ),
    Check(
        id="kernel-unsupported",
        title="The driver compiles for this kernel",
        layer="platform",
        severity="error",
        looks_at=(
            "the compiler's errors in /var/lib/dkms/nvidia*/*/build/make.log, if they are of the running "
            "kernel and it has no module."
        ),
        why=(
            "A driver knows the kernels of its time. A newer kernel has changed what the module calls, and a "
            "realtime kernel is refused: a newer driver, or an older kernel, is needed."
        ),
        remedy=fixes.UPGRADE_DRIVER,
        run=kernel_unsupported,
        blocked_by=("driver-not-installed",),
        preflight=ANY_ENGINE,
        needs=("gpu",),
        refs=("https://github.com/NVIDIA/open-gpu-kernel-modules#readme",),
    ),
    Check(
        id="memory-cgroup-v1",
        title="Control groups are version 2",
        layer="platform",
        severity="error",
        looks_at=(
            "/sys/fs/cgroup; where it is version 1 and the kubelet doesn't run, also the kubelet's release "
            "and failCgroupV1 in its configuration. A kubelet that runs gets a note."
        ),
        why=(
            "Kubernetes gives up control groups version 1: the kubelet doesn't start on them from 1.35 on, "
            "unless failCgroupV1 is false."
        ),
        remedy=remedies.UNIFIED_CGROUPS,
        run=memory_cgroup_v1,
        blocked_by=("pci-no-gpu",),
        preflight=("kubernetes",),
        classes=HOST,
        needs=("kubelet",),
        table=TABLE,
        refs=("https://kubernetes.io/docs/concepts/architecture/cgroups/",),
    ),
)
