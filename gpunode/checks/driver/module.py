"""The kernel module: loaded, with its firmware and its options, and alive."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.checks import fixes
from gpunode.checks.driver import packages, remedies
from gpunode.checks.driver.logged import failures, logged
from gpunode.checks.hardware import remedies as hardware
from gpunode.checks.kubelet.plugin import shown
from gpunode.checks.model import (
    ANY_ENGINE,
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
from gpunode.errors import GpunodeError
from gpunode.facts import driver_state
from gpunode.facts.gpu_operator import driver_failure
from gpunode.facts.module_options import COMMAND_LINE, Directive
from gpunode.facts.node import Node
from gpunode.facts.traits import TRAITS
from gpunode.gpu.library_paths import DRIVER_ROOT
from gpunode.result import Evidence, Fix


def operator_driver(node: Node) -> tuple[tuple[Evidence, ...], Fix]:
    """The last failure in the logs of the GPU operator's driver pod, and the command that shows more."""
    found = driver_failure(node.host, node.operator)
    if found is None:
        return (seen(DRIVER_ROOT, "no log of the driver's pod"),), Fix(
            "crictl ps --all --name nvidia-driver-ctr"
        )
    path, line = found
    return (seen(path, shown(line)),), Fix(f"tail -n 50 {path}")


def module_not_loaded(node: Node) -> Verdict:
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
            fix=fixes.REBOOT.other,
        )
    flavour = "open" if module.open else "proprietary"
    return ok(
        f"driver {module.version or '(no version)'}, {flavour} kernel module",
        seen(f"/sys/module/{module.name}/version", module.version),
    )


def _refused(node: Node, *modules: str) -> tuple[Directive, ...]:
    try:
        return tuple(one for name in modules for one in node.module_options.refused(name))
    except GpunodeError:
        return ()


def _obstacles(node: Node) -> Iterator[Evidence]:
    """Why nothing has loaded it, as far as this user may see."""
    for one in _refused(node, "nvidia"):
        yield seen(one.source, _shown(one), one.line)
    if (node.host.read_text("/proc/sys/kernel/modules_disabled") or "").strip() == "1":
        yield seen("/proc/sys/kernel/modules_disabled", "1 (no module can be loaded until the next boot)")
    yield from failures(node)


def _shown(one: Directive) -> str:
    return one.value if one.source == COMMAND_LINE else f"{one.kind} {one.module} {one.value}".strip()


def _allow(node: Node, last: str = " && modprobe nvidia && modprobe nvidia-uvm") -> Fix | None:
    """Take the lines back that keep the module out; None where nothing that lies in a file does."""
    lines = [one for one in _refused(node, "nvidia", "nvidia_uvm") if one.line is not None]
    if not lines:
        return None
    edits = " && ".join(f"sed -i '{one.line}s/^/# /' {one.source}" for one in lines)
    return Fix(edits + last)


def _after_failure(node: Node) -> Fix | None:
    """What helps where the kernel's log has failures of the driver: loading it has been tried already."""
    if not failures(node):
        return None
    # a GPU that stays in D3cold has no power or answers nothing: a reboot alone doesn't switch it off
    if logged(node, r"^nvidia \S+ Unable to change power state from D3cold"):
        return hardware.POWER_OFF.other
    return fixes.READ_KERNEL_LOG.other


def module_disabled_next_boot(node: Node) -> Verdict:
    refused = _refused(node, "nvidia", "nvidia_uvm")
    # what is blacklisted can still be loaded by its name, as nvidia-modprobe and persistenced do
    hard = [one for one in refused if one.kind in ("install", "alias")]
    if not hard:
        return ok("nothing keeps the NVIDIA module from being loaded")
    evidence = [seen(one.source, _shown(one), one.line) for one in hard]
    return warn(
        "the next reboot breaks the GPUs: the module may not be loaded again", *evidence, fix=_allow(node, "")
    )


def gsp_firmware(node: Node) -> Verdict:
    module = node.module
    if module is None or not module.version:
        return skip("the module doesn't tell its version")
    if not module.open and not driver_state.wants_firmware(node.host):
        return ok("this module runs without GSP firmware")
    there = driver_state.firmware(node.host, module.version, node.kernel)
    if there:
        return ok(f"the GSP firmware of {module.version} is there", seen(there[0], ", ".join(there[1:])))
    if node.next_version not in ("", module.version):
        return skip("the firmware is that of the driver which waits for a reboot")
    place = f"/lib/firmware/nvidia/{module.version}"
    failed = logged(node, r"firmware load for nvidia/\S*gsp\S* failed with error -2")
    fix = packages.reinstall_firmware(node)
    if failed:
        return fail(
            "the kernel found no GSP firmware for this driver",
            *failed[:1],
            seen(place, "no gsp_*.bin"),
            fix=fix,
        )
    others = driver_state.firmware_versions(node.host)
    if not others:
        return skip("no driver's firmware lies in /lib/firmware/nvidia")
    return warn(
        f"the GSP firmware of {module.version} is gone: a GPU fails at its next start",
        seen(place, "no gsp_*.bin"),
        seen("/lib/firmware/nvidia", f"that of {', '.join(others)}"),
        fix=fix,
    )


def driver_persist_modprobe_conf(node: Node) -> Verdict:
    odd = driver_state.switched_off(node.host)
    if not odd:
        return ok("the module runs with its usual parameters")
    evidence = [seen("/proc/driver/nvidia/params", f"{name}: 0") for name in odd]
    names = ", ".join(f"NVreg_{name}=0" for name in odd)
    return note(f"the module was loaded with {names}", *evidence)


def driver_oops(node: Node) -> Verdict:
    found = driver_state.crash(node.kernel_log)
    if not found:
        return ok("the kernel's log knows no crash in the NVIDIA module")
    evidence = [seen("dmesg", f"[{line.seconds:.6f}] {line.text}") for line in found]
    return warn("the NVIDIA module has crashed inside the kernel", *evidence)


CHECKS = (
    Check(
        id="module-not-loaded",
        title="The NVIDIA module is loaded",
        layer="driver",
        severity="error",
        looks_at=(
            "/sys/module/nvidia and its initstate; modprobe.d and the kernel's log for what kept it out."
        ),
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
            "gpu-arch-dropped",
            "driver-too-old",
            "kmod-flavour",
            "dkms-not-built",
            "secureboot-unsigned",
        ),
        classes=HOST_OR_CONTAINER,
        preflight=ANY_ENGINE,
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1269",),
    ),
    Check(
        id="module-disabled-next-boot",
        title="The next boot may load the module",
        layer="driver",
        severity="warning",
        looks_at=(
            "install lines that load nothing and aliases to off, for nvidia and nvidia_uvm in modprobe.d."
        ),
        why=(
            "modprobe obeys these lines also when somebody asks for the module by its name. It is loaded "
            "now; after the next boot the GPUs are without a driver."
        ),
        remedy=remedies.SHOW_MODPROBE,
        run=module_disabled_next_boot,
        blocked_by=("module-not-loaded",),
        unless=("operator-driver",),
        reboot=True,
        refs=("https://man7.org/linux/man-pages/man5/modprobe.d.5.html",),
    ),
    Check(
        id="gsp-firmware",
        title="The GPUs' firmware fits the driver",
        layer="driver",
        severity="error",
        looks_at=(
            "gsp_*.bin of the loaded version in the kernel's firmware directories, and failed firmware "
            "loads in its log; the open modules always need it, the proprietary one from Turing on."
        ),
        why=(
            "The driver runs most of itself on the GPU's own processor and loads this firmware whenever a "
            "GPU starts. Without the file of exactly its version the GPU stays down: RmInitAdapter failed."
        ),
        remedy=remedies.REINSTALL_FIRMWARE,
        run=gsp_firmware,
        blocked_by=("module-not-loaded",),
        unless=("operator-driver", "vgpu-guest"),
        preflight=ANY_ENGINE,
        refs=("https://github.com/NVIDIA/open-gpu-kernel-modules/issues/446",),
    ),
    Check(
        id="driver-persist-modprobe-conf",
        title="The module has its usual parameters",
        layer="driver",
        severity="info",
        looks_at="ModifyDeviceFiles and EnableGpuFirmware in /proc/driver/nvidia/params.",
        why=(
            "Somebody switched these off with an options line in modprobe.d. They decide who makes the "
            "device files, and whether the driver runs on the GPU's own processor."
        ),
        remedy=remedies.SHOW_MODPROBE,
        run=driver_persist_modprobe_conf,
        blocked_by=("module-not-loaded",),
        refs=("https://github.com/NVIDIA/nvidia-modprobe",),
    ),
    Check(
        id="driver-oops",
        title="The module has not crashed",
        layer="driver",
        severity="warning",
        looks_at=(
            "BUG, Oops and general protection faults of this boot that happened inside the NVIDIA modules."
        ),
        why=(
            "After a crash the kernel goes on with whatever the module left behind: locks that are never "
            "given back, processes that can't be ended. Only a reboot starts it clean."
        ),
        remedy=fixes.REBOOT,
        run=driver_oops,
        blocked_by=("module-not-loaded",),
        refs=("https://docs.kernel.org/admin-guide/tainted-kernels.html",),
    ),
)
