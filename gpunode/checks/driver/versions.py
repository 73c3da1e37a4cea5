"""One driver, one version: the loaded module, the one on disk, and the libraries."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.checks import fixes
from gpunode.checks.driver import packages
from gpunode.checks.model import (
    ANY_ENGINE,
    HOST,
    HOST_OR_CONTAINER,
    Check,
    Verdict,
    fail,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.errors import GpunodeError
from gpunode.facts import driver
from gpunode.facts.libraries import Library, is_compat
from gpunode.facts.node import Node
from gpunode.facts.traits import TRAITS
from gpunode.result import Evidence, Fix


def driver_libs_mixed(node: Node) -> Verdict:
    nvml, cuda = node.nvml_library, node.cuda_library
    if nvml is None or cuda is None or not nvml.version or not cuda.version:
        return skip("the libraries don't tell their version")
    evidence = [seen(one.real, f"{one.version} ({one.soname})") for one in (nvml, cuda)]
    if nvml.version == cuda.version:
        return ok(f"the libraries are both {nvml.version}", *evidence)
    if is_compat(cuda.real):
        return ok("libcuda.so.1 is cuda-compat's, which forward-compat-803-804 judges", *evidence)
    summary = f"two drivers' libraries are mixed: {nvml.version} and {cuda.version}"
    return fail(summary, *evidence, fix=packages.reinstall_libraries(node))


def driver_lib_mismatch(node: Node) -> Verdict:
    module, found = node.module, _libraries(node)
    if module is None or not module.version or not found:
        return skip("the module or its libraries don't tell their version")
    evidence = [seen(f"/sys/module/{module.name}/version", f"{module.version} (loaded module)")]
    evidence += [seen(library.real, f"{library.version} ({library.soname})") for library in found]
    wrong = next((library.version for library in found if library.version != module.version), None)
    if wrong is None:
        return ok(f"module and libraries are both {module.version}", *evidence)
    summary = f"the loaded module is {module.version}, the libraries are {wrong}"
    evidence += _who(node, wrong)
    if TRAITS["lxc"].holds(node):  # the host has loaded its module; the libraries in here must follow
        return fail(summary, *evidence, fix=packages.libraries_of_run_file(node, module.version))
    if not node.next_version or node.next_version == wrong:
        return fail(summary, *evidence)
    # a reboot would load a module that doesn't fit either
    evidence.append(seen(f"modinfo -k {node.next_kernel} -F version nvidia", node.next_version))
    return fail(
        f"{summary}, and the module on disk is {node.next_version}", *evidence, fix=_rebuild(node, wrong)
    )


def _libraries(node: Node) -> list[Library]:
    """Of the node itself: operator-host-driver-conflict judges those of the GPU operator's driver."""
    here = (node.nvml_library, node.cuda_library)
    return [one for one in here if one and one.version and not one.root and not is_compat(one.real)]


def _who(node: Node, version: str) -> Iterator[Evidence]:
    """The transaction that brought this version, as far as logs that we may read tell."""
    from gpunode.facts.package_history import brought

    try:
        change = brought(node.host, version, lambda: node.packages)
    except GpunodeError:
        return
    if change is not None:
        yield seen(change.source, change, change.line)


def _rebuild(node: Node, version: str) -> Fix:
    """The module of the libraries' version for the kernel that boots next."""
    if version in node.dkms:
        name = f"{driver.dkms_name(node.host, version)} -k {node.next_kernel}"
        return Fix(f"dkms install --force {name} && reboot", True, "reboot")
    if node.dkms:
        return packages.install_driver(node)
    build = packages.build_module(node, node.next_kernel).command.removesuffix(" && modprobe nvidia")
    return Fix(f"{build} && reboot", True, "reboot")


def driver_upgrade_pending(node: Node) -> Verdict:
    module, upcoming = node.module, node.next_version
    if module is None or not module.version or not upcoming:
        return skip("modinfo tells no version of the module on disk")
    if upcoming == module.version:
        return ok(f"the module on disk is the loaded one, {module.version}")
    evidence = (
        seen("modinfo -F version nvidia", f"{upcoming} (for kernel {node.next_kernel})"),
        seen(f"/sys/module/{module.name}/version", module.version),
    )
    stays = next((one for one in _libraries(node) if one.version == module.version), None)
    if stays is None:
        summary = f"driver {upcoming} is installed, {module.version} runs until the next reboot"
        return warn(summary, *evidence, fix=fixes.REBOOT.other)
    return warn(
        f"the next reboot breaks the GPUs: it loads module {upcoming}, and the libraries are {stays.version}",
        *evidence,
        seen(stays.real, f"{stays.version} ({stays.soname})"),
        fix=packages.reinstall_libraries(node),
    )


CHECKS = (
    Check(
        id="driver-libs-mixed",
        title="The libraries are of one driver",
        layer="driver",
        severity="error",
        looks_at="the versions in the real file names of libnvidia-ml.so.1 and libcuda.so.1.",
        why=(
            "CUDA and NVML come from one driver. Of two versions at least one doesn't fit the kernel module: "
            "left over from a .run installer, or from an upgrade that stopped half way."
        ),
        remedy=fixes.INSTALL_LIBRARIES,
        run=driver_libs_mixed,
        blocked_by=("libnvidia-ml-missing", "libcuda-missing"),
        classes=HOST_OR_CONTAINER,
        preflight=ANY_ENGINE,
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
    ),
    Check(
        id="driver-lib-mismatch",
        title="Module and libraries are one version",
        layer="driver",
        severity="error",
        looks_at=(
            "/sys/module/nvidia/version against the version in the real file names of libnvidia-ml.so.1 and "
            "libcuda.so.1, the module on disk, and the package manager's log for who brought the libraries."
        ),
        why=(
            "The libraries refuse a module of another version (NVML: Driver/library version mismatch, code "
            "18). Usually an unattended upgrade replaced the libraries while the old module was still "
            "loaded."
        ),
        remedy=fixes.REBOOT,
        run=driver_lib_mismatch,
        blocked_by=("module-not-loaded", "libnvidia-ml-missing", "driver-libs-mixed"),
        classes=HOST_OR_CONTAINER,
        preflight=ANY_ENGINE,
        reboot=True,
        refs=(
            "https://github.com/NVIDIA/ubuntu-packaging-nvidia-driver/issues/3",
            "https://docs.nvidia.com/deploy/nvml-api/",
        ),
    ),
    Check(
        id="driver-upgrade-pending",
        title="No driver upgrade waits for a reboot",
        layer="driver",
        severity="warning",
        looks_at=(
            "modinfo -F version nvidia for the kernel that boots next, against /sys/module/nvidia/version "
            "and the libraries."
        ),
        why=(
            "The GPUs work now, but anything that reloads the module or refreshes the libraries changes the "
            "driver under running work. Reboot at a time of your choosing."
        ),
        remedy=fixes.REBOOT,
        run=driver_upgrade_pending,
        blocked_by=("module-not-loaded", "driver-lib-mismatch"),
        classes=HOST,
        reboot=True,
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
    ),
)
