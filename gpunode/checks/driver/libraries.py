"""The driver's libraries, and whether NVML answers through them."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.driver import packages
from gpunode.checks.model import EVERYWHERE_BUT_TEGRA, Check, Verdict, fail, ok, seen, skip
from gpunode.facts import libraries
from gpunode.facts.node import Node
from gpunode.result import Fix

_OPERATOR = "/run/nvidia/driver/usr"  # where the GPU operator mounts its driver container
_NO_PERMISSION = 4  # NVML_ERROR_NO_PERMISSION, nvml.h


def libnvidia_ml_missing(node: Node) -> Verdict:
    return _library(node, node.nvml_library, libraries.NVML)


def libcuda_missing(node: Node) -> Verdict:
    return _library(node, node.cuda_library, libraries.CUDA)


def _library(node: Node, library: libraries.Library | None, soname: str) -> Verdict:
    if library is None and node.host.is_dir(_OPERATOR):
        return skip(f"the driver comes from the GPU operator's container, with its libraries in {_OPERATOR}")
    if library is None:
        return fail(
            f"{soname} is not on this node",
            seen("/etc/ld.so.cache", f"no existing {soname} for 64-bit programs"),
            fix=packages.install_libraries(node),
        )
    if not library.linked:
        evidence = seen(library.path, "on disk, but not in /etc/ld.so.cache")
        return fail(f"the linker doesn't know {soname}", evidence, fix=Fix("ldconfig"))
    return ok(f"{soname} is {library.version or 'there'}", seen(library.path, library.real))


def nvml_hang(node: Node) -> Verdict:
    if node.nvml_library is None:
        return skip("there is no libnvidia-ml.so.1 to ask NVML with")
    probe = node.nvml
    source = "nvmlInit in a child process"
    if probe.timed_out:
        return fail("NVML does not answer", seen(source, probe.message), fix=fixes.REBOOT.other)
    if probe.code == _NO_PERMISSION and not node.host.is_root:
        return skip("needs root, or read and write access to /dev/nvidia*, to ask NVML")
    if probe.inventory is None:
        code = "" if probe.code is None else f" (code {probe.code})"
        return fail("NVML fails", seen(source, f"{probe.message}{code}"))
    broken = [gpu for gpu in probe.inventory.gpus if gpu.error]
    if broken:
        evidence = (seen(f"NVML, GPU {gpu.index} ({gpu.pci})", gpu.error) for gpu in broken)
        return fail(f"{len(broken)} of {len(probe.inventory.gpus)} GPUs don't answer NVML", *evidence)
    return ok(f"NVML lists {len(probe.inventory.gpus)} GPUs", seen(source, f"{probe.seconds:.1f} s"))


CHECKS = (
    Check(
        id="libnvidia-ml-missing",
        title="libnvidia-ml.so.1 is there",
        layer="driver",
        severity="error",
        looks_at="/etc/ld.so.cache and the linker's own directories for libnvidia-ml.so.1, 64-bit.",
        why=(
            "Everything that lists GPUs loads this library: nvidia-smi, the container toolkit, device "
            "plugins. It belongs to the driver, in a package of its own."
        ),
        remedy=fixes.INSTALL_LIBRARIES,
        run=libnvidia_ml_missing,
        blocked_by=("driver-not-installed",),
        classes=EVERYWHERE_BUT_TEGRA,
    ),
    Check(
        id="libcuda-missing",
        title="libcuda.so.1 is there",
        layer="driver",
        severity="error",
        looks_at="/etc/ld.so.cache and the linker's own directories for libcuda.so.1, 64-bit.",
        why=(
            "CUDA programs load libcuda.so.1 of the host, also in containers. A display-only or headless "
            "driver install lacks it: nvidia-smi works and CUDA doesn't."
        ),
        remedy=fixes.INSTALL_LIBRARIES,
        run=libcuda_missing,
        blocked_by=("driver-not-installed", "libnvidia-ml-missing"),
        classes=EVERYWHERE_BUT_TEGRA,
    ),
    Check(
        id="nvml-hang",
        title="NVML answers",
        layer="devices",
        severity="error",
        looks_at=(
            "NVML's initialisation and its list of GPUs, asked in a child process with a limit of 15 seconds."
        ),
        why=(
            "A sick GPU or a stuck driver makes NVML hang or fail, and with it nvidia-smi, device plugins "
            "and the start of every GPU container."
        ),
        remedy=fixes.READ_KERNEL_LOG,
        run=nvml_hang,
        blocked_by=(
            "module-not-loaded",
            "libnvidia-ml-missing",
            "driver-lib-mismatch",
            "dev-nodes-missing",
            "dev-node-major-stale",
            "aux-power",
        ),
        classes=EVERYWHERE_BUT_TEGRA,
    ),
)
