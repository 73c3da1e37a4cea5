"""The kernel module is installed, and built for the kernels that run and boot."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.checks import fixes
from gpunode.checks.driver import packages, remedies
from gpunode.checks.model import ANY_ENGINE, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.facts import driver
from gpunode.facts.node import Node
from gpunode.facts.traits import TRAITS
from gpunode.result import Evidence, Fix


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
    if other or node.dkms or TRAITS["operator-driver"].holds(node):
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
    return fail("no NVIDIA driver is installed", *evidence, fix=packages.install_driver(node))


def dkms_not_built(node: Node) -> Verdict:
    running, upcoming = node.kernel, node.next_kernel
    if node.module is None and TRAITS["operator-driver"].holds(node) and not node.dkms:
        return skip("the GPU operator's container builds and loads the module")
    with_module = [kernel.release for kernel in node.kernels if kernel.has_module]
    if node.module is None and not node.module_built:
        evidence = [seen(f"/lib/modules/{release}/modules.dep", "nvidia.ko") for release in with_module]
        return fail(
            f"no NVIDIA module was built for the running kernel {running}",
            *_lacking(node, running),
            *evidence,
            # headers of an old kernel leave the repositories, and the next boot mends it
            fix=fixes.REBOOT.other if upcoming in with_module else _build(node, running),
        )
    if node.host.stat("/usr/sbin/akmods") or not node.module_built:
        return ok("the running kernel has its NVIDIA module")  # akmods builds for a new kernel while it boots
    if upcoming != running and upcoming not in with_module:
        return warn(
            f"the next reboot breaks the GPUs: kernel {upcoming} has no NVIDIA module",
            *_lacking(node, upcoming),
            seen("/proc/sys/kernel/osrelease", f"{running} (running) has one"),
            fix=_for_next(node, upcoming),
        )
    return ok("the kernel that boots next has its NVIDIA module")


def _lacking(node: Node, release: str) -> Iterator[Evidence]:
    """What is missing for this kernel, and why."""
    from gpunode.facts.dkms_log import failed_build

    yield seen(f"/lib/modules/{release}/modules.dep", "no nvidia.ko")
    yield from (seen("/var/lib/dkms", f"source of {version}") for version in node.dkms)
    if node.dkms and not driver.has_headers(node.host, release):
        yield seen(f"/lib/modules/{release}/build", "no kernel headers to build with")
    failed = failed_build(node.host, release)
    if failed is not None:
        yield seen(failed.path, failed.text, failed.line)


def _for_next(node: Node, release: str) -> Fix | None:
    """What was tried for this kernel and doesn't compile isn't built again, but with a newer driver."""
    from gpunode.facts.dkms_log import failed_build

    failed = failed_build(node.host, release) if node.dkms else None
    if failed is None:
        return _build(node, release)
    if failed.realtime:
        return Fix(f"IGNORE_PREEMPT_RT_PRESENCE=1 dkms autoinstall -k {release}")
    return packages.newer_for_kernel(node, release)


def _build(node: Node, release: str) -> Fix | None:
    return packages.build_module(node, release) if release else None


def kernel_headers_missing(node: Node) -> Verdict:
    if not node.dkms:
        return skip("no driver's source waits in /var/lib/dkms")
    release = node.next_kernel  # what is built for a kernel that the next boot leaves matters no more
    if not any(kernel.release == release and kernel.has_module for kernel in node.kernels):
        return skip(f"kernel {release} has no NVIDIA module yet")
    there = next((one for one in (release, node.kernel) if driver.has_headers(node.host, one)), None)
    if there is not None:
        return ok(f"the headers of kernel {there} are installed")
    build = f"/lib/modules/{release}/build"
    state = "no include/generated/autoconf.h" if node.host.is_dir(build) else "absent"
    fix = remedies.install_headers(release).for_family(node.distribution.family)
    return warn(f"there are no headers of kernel {release}", seen(build, state), fix=fix)


CHECKS = (
    Check(
        id="driver-not-installed",
        title="The NVIDIA driver is installed",
        layer="driver",
        severity="error",
        looks_at=(
            "/sys/module/nvidia, modules.dep of every kernel in /lib/modules, /var/lib/dkms, the GPU "
            "operator's driver (/run/nvidia/driver, its pods' logs) and the package database."
        ),
        why=(
            "Without the kernel module nothing on this node can talk to the GPUs; the CUDA toolkit or the "
            "libraries alone are not the driver."
        ),
        remedy=fixes.INSTALL_DRIVER,
        run=driver_not_installed,
        blocked_by=("pci-no-gpu",),
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
        preflight=ANY_ENGINE,
    ),
    Check(
        id="dkms-not-built",
        title="The module is built for this kernel and the next",
        layer="driver",
        severity="error",
        looks_at=(
            "modules.dep of the running kernel and of the newest installed one of the same flavour, and "
            "/var/lib/dkms or /var/cache/akmods with the log of the last build. Only a next kernel without "
            "it is a warning."
        ),
        why=(
            "A kernel module fits one kernel. After a kernel upgrade without headers DKMS builds nothing, "
            "and the GPUs are gone after the next boot."
        ),
        remedy=fixes.BUILD_MODULE,
        run=dkms_not_built,
        blocked_by=("driver-not-installed", "kernel-unsupported"),
        preflight=ANY_ENGINE,
        reboot=True,
        refs=("https://github.com/dell/dkms#readme", "https://github.com/NVIDIA/nvidia-docker/issues/365"),
    ),
    Check(
        id="kernel-headers-missing",
        title="DKMS can build the next driver",
        layer="driver",
        severity="warning",
        looks_at=(
            "/lib/modules/KERNEL/build/include/generated/autoconf.h, where DKMS has the driver's source."
        ),
        why=(
            "DKMS builds the module against the kernel's headers. Without them the next driver "
            "upgrade replaces the libraries and leaves the module behind."
        ),
        remedy=remedies.install_headers("$(uname -r)"),
        run=kernel_headers_missing,
        blocked_by=("driver-not-installed", "dkms-not-built"),
        unless=("operator-driver", "immutable"),
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
    ),
)
