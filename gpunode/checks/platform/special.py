"""Kinds of systems with rules of their own: WSL, Jetson, LXC, and those that take no packages."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import ANY_ENGINE, Check, Verdict, fail, note, ok, seen, warn
from gpunode.checks.platform import remedies
from gpunode.checks.toolkit.installed import toolkit_missing
from gpunode.facts import lxc
from gpunode.facts.gates import TABLE, can, first
from gpunode.facts.node import Node
from gpunode.facts.system import BARE_METAL, CONTAINER, TEGRA, VM, WSL2
from gpunode.facts.toolkit_settings import NO_CGROUPS
from gpunode.result import FindingStatus, Fix

_DXG = "/dev/dxg"
_WSL_LIBRARIES = "/usr/lib/wsl/"
_CSV = "/etc/nvidia-container-runtime/host-files-for-container.d"
# the libraries alone come along with Ubuntu's CUDA packages, and WSL's own are found before them
_LINUX_DRIVER = ("nvidia-driver", "nvidia-dkms", "nvidia-open", "nvidia-kernel", "cuda-drivers")
_LINUX_LIBRARIES = "libnvidia-compute"
_UNINSTALL = "/usr/bin/nvidia-uninstall"


def wsl2(node: Node) -> Verdict:
    if node.host.stat(_DXG) is None:
        return fail("WSL gives no GPU to this distribution", seen(_DXG, "absent"))
    if not node.host.exists(f"{_WSL_LIBRARIES}lib/libcuda.so.1"):
        where = seen(f"{_WSL_LIBRARIES}lib", "no libcuda.so.1")
        return fail("Windows has no NVIDIA driver that knows WSL", where, fix=Fix(_WINDOWS_DRIVER))
    library = node.cuda_library
    family = node.distribution.family
    packages = [one.name for one in node.packages.starting(*_LINUX_DRIVER)]
    if library is not None and not library.real.startswith(_WSL_LIBRARIES):
        where = seen(library.path, f"{library.real}, not {_WSL_LIBRARIES}lib")
        packages += [one.name for one in node.packages.starting(_LINUX_LIBRARIES)]
        other = (
            "nvidia-uninstall" if node.host.executable(_UNINSTALL) else f"rm {library.path} {library.real}"
        )
        purge = remedies.remove_packages(family, packages) if packages else Fix(f"{other} && ldconfig")
        return fail("a Linux driver hides the one that Windows brings", where, fix=purge)
    if packages:
        shown = seen("package database", ", ".join(packages[:5]))
        purge = remedies.remove_packages(family, packages)
        return warn("a Linux driver is installed, which WSL has no use for", shown, fix=purge)
    return ok("the driver is the one that Windows brings", seen(_DXG, "there"))


_WINDOWS_DRIVER = "follow https://docs.nvidia.com/cuda/wsl-user-guide/ to install the driver in Windows"


_TOOLKIT = Fix("apt install nvidia-container-toolkit")  # JetPack's own repository has it


def jetson(node: Node) -> Verdict:
    if not node.toolkit.programs:
        return fail(
            "the NVIDIA Container Toolkit isn't installed", seen("PATH", "no nvidia-ctk"), fix=_TOOLKIT
        )
    lists = node.host.glob(_CSV, "*.csv")
    if not lists and not node.cdi_specs and node.host.is_dir("/sys/module/nvgpu"):
        return fail("nothing tells the toolkit which files a GPU container needs", seen(_CSV, "no *.csv"))
    served = node.kubelet is None or not node.kubelet.joined or can("toolkit", "tegra", node.toolkit.version)
    if served is False:
        shown = seen(node.toolkit.version_source, ".".join(map(str, node.toolkit.version)))
        upgrade = fixes.UPGRADE_TOOLKIT.other
        release = first("toolkit", "tegra")
        return warn(f"no device plugin serves this module's GPU before toolkit {release}", shown, fix=upgrade)
    return ok("the toolkit knows what a GPU container needs", seen(_CSV, f"{len(lists)} lists"))


def lxc_nested(node: Node) -> Verdict:
    there = {device.path for device in node.device_nodes}
    missing = [path for path in ("/dev/nvidiactl", "/dev/nvidia-uvm") if path not in there]
    if not any(path.removeprefix("/dev/nvidia").isdigit() for path in there):
        missing.append("/dev/nvidia0")
    if missing:
        evidence = [seen(path, "absent") for path in missing]
        given = remedies.pass_devices(missing)
        return fail("the LXC container wasn't given the GPUs' device files", *evidence, fix=given)
    if not node.toolkit.programs or not lxc.unprivileged(node.host):
        return ok("the container has the GPUs' device files")
    settings = node.toolkit_settings
    if settings.value(NO_CGROUPS):
        return ok("the toolkit leaves control groups alone, as it must in here")
    where = seen(settings.path, f"{NO_CGROUPS} = false", settings.line(NO_CGROUPS))
    inside = seen(lxc.UID_MAP, "root in here is an ordinary user outside")
    return warn(
        "the toolkit wants to change control groups, and may not in here",
        where,
        inside,
        fix=remedies.NO_CGROUPS,
    )


def immutable(node: Node) -> Verdict:
    missing = [
        *(["the driver"] if node.module is None and not node.module_built else []),
        *(["the container toolkit"] if toolkit_missing(node).status is FindingStatus.FAIL else []),
    ]
    name = node.distribution.name or node.distribution.id
    if not missing or not node.gpus:
        return ok(f"{name} brings driver and toolkit")
    how, command = remedies.WHOLE.get(node.distribution.id, remedies.OTHER_WHOLE)
    shown = seen("/etc/os-release", name)
    return note(f"{' and '.join(missing)} can't be had as packages: {how}", shown, fix=Fix(command))


CHECKS = (
    Check(
        id="wsl2",
        title="WSL brings the GPUs and their driver",
        layer="platform",
        severity="error",
        looks_at=(
            "/dev/dxg, /usr/lib/wsl/lib/libcuda.so.1, which libcuda.so.1 the loader takes, and Linux driver "
            "packages."
        ),
        why=(
            "In WSL the driver is that of Windows, and its libraries are put into /usr/lib/wsl/lib. A Linux "
            "driver inside hides them and has no GPU to drive."
        ),
        remedy=remedies.UPDATE_WSL,
        run=wsl2,
        blocked_by=("pci-no-gpu",),
        preflight=ANY_ENGINE,
        classes=(WSL2,),
        refs=("https://docs.nvidia.com/cuda/wsl-user-guide/",),
    ),
    Check(
        id="jetson",
        title="The toolkit knows this Jetson",
        layer="platform",
        severity="error",
        looks_at=(
            f"the toolkit's programs, the lists in {_CSV} or a CDI specification, and on a Kubernetes node "
            "the toolkit's release."
        ),
        why=(
            "A Jetson's GPU isn't on the PCI bus, and its libraries lie elsewhere: the toolkit takes files "
            "and devices from JetPack's lists. Containers need --runtime=nvidia; --gpus alone isn't enough."
        ),
        remedy=remedies.RESTORE_LISTS,
        run=jetson,
        blocked_by=("pci-no-gpu",),
        classes=(TEGRA,),
        table=TABLE,
        refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/",),
    ),
    Check(
        id="lxc-nested",
        title="The LXC container may use the GPUs",
        layer="platform",
        severity="error",
        looks_at=("inside an LXC container: device files, the user namespace, and the toolkit's no-cgroups."),
        why=(
            "An LXC container only has the device files that the machine around it hands in: there "
            "'pct set' does it on Proxmox, 'config device add NAME gpu gpu' with LXD and Incus. And an "
            "unprivileged one can't change the device rules of containers inside it."
        ),
        remedy=remedies.PASS_DEVICES,
        run=lxc_nested,
        blocked_by=("module-not-loaded",),
        preflight=ANY_ENGINE,
        classes=(CONTAINER,),
        needs=("gpu", "lxc"),
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/139",),
    ),
    Check(
        id="nixos-flatcar-immutable",
        title="Driver and toolkit come the way this system wants it",
        layer="platform",
        severity="info",
        looks_at="os-release and /run/ostree-booted, where driver or toolkit are missing.",
        why=(
            "This system is declared or built as a whole: what a package manager installs is gone after the "
            "next update, or there is none."
        ),
        remedy=remedies.OTHER_WAY,
        run=immutable,
        blocked_by=("pci-no-gpu",),
        classes=(BARE_METAL, VM),
        needs=("immutable",),
        unless=("operator-driver", "vfio-host"),
        refs=("https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/",),
    ),
)
