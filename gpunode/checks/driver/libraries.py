"""The driver's libraries, and whether NVML answers through them."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.driver import packages, remedies
from gpunode.checks.driver.logged import failures, xid_storms
from gpunode.checks.driver.module import operator_driver
from gpunode.checks.model import (
    ANY_ENGINE,
    EVERYWHERE_BUT_TEGRA,
    HOST,
    Check,
    Verdict,
    fail,
    note,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.facts import libraries
from gpunode.facts.node import Node
from gpunode.facts.system import WSL2
from gpunode.facts.traits import OPERATOR_DRIVER, TRAITS
from gpunode.gpu.library_paths import DRIVER_ROOT, PROGRAM_DIRECTORIES
from gpunode.result import Evidence, Fix

_NO_PERMISSION = 4  # NVML_ERROR_NO_PERMISSION, nvml.h
_RESET_REQUIRED = "(NVML 16)"  # as NvmlError words it; gpu-reset-required tells it


def libnvidia_ml_missing(node: Node) -> Verdict:
    return _library(node, node.nvml_library, libraries.NVML)


def libcuda_missing(node: Node) -> Verdict:
    return _library(node, node.cuda_library, libraries.CUDA)


def _library(node: Node, library: libraries.Library | None, soname: str) -> Verdict:
    if library is None and TRAITS["operator-driver"].holds(node):
        if node.host.is_dir(OPERATOR_DRIVER):
            return skip(f"the libraries are the GPU operator's, in its driver container at {DRIVER_ROOT}")
        if node.module is None:
            return skip("the GPU operator's driver container, which has the libraries, is not running")
        logs, fix = operator_driver(node)
        absent = seen(DRIVER_ROOT, f"no {soname}")
        return fail("the GPU operator's driver container is not running", absent, *logs, fix=fix)
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


def libcuda_stub(node: Node) -> Verdict:
    library = node.cuda_library
    if library is None:
        return skip("there is no libcuda.so.1")
    if "/stubs/" not in library.real and "/stubs/" not in library.path:
        return ok("libcuda.so.1 is the driver's", seen(library.path, library.real))
    return warn(
        "libcuda.so.1 is the CUDA toolkit's stub, which drives nothing", seen(library.path, library.real)
    )


def nvidia_smi_missing(node: Node) -> Verdict:
    for directory in PROGRAM_DIRECTORIES:
        if node.host.executable(f"{directory}/nvidia-smi"):
            return ok("nvidia-smi is there", seen(f"{directory}/nvidia-smi", "executable"))
    elsewhere = node.host.which("nvidia-smi")
    if elsewhere:
        return ok("nvidia-smi is there", seen(elsewhere, "executable"))
    unsafe = node.host.unsafe_program("nvidia-smi")
    if unsafe is not None:
        return warn(
            "nvidia-smi can be written by other users",
            seen(*unsafe),
            fix=Fix(f"namei -l {unsafe[0]}", needs_root=False),
        )
    broken = [f"{one}/nvidia-smi" for one in PROGRAM_DIRECTORIES if node.host.exists(f"{one}/nvidia-smi")]
    evidence = [seen(path, "empty or not executable") for path in broken]
    return warn(
        "nvidia-smi is not on this node",
        *(evidence or [seen(", ".join(PROGRAM_DIRECTORIES[:4]), "no nvidia-smi")]),
        fix=packages.install_libraries(node),
    )


def nvml_hang(node: Node) -> Verdict:
    probe = node.nvml
    source = "nvmlInit in a child process"
    if probe.timed_out:
        evidence = (seen(source, probe.message), *_from_the_log(node))
        return fail("NVML does not answer", *evidence, fix=fixes.REBOOT.other)
    if probe.code == _NO_PERMISSION and not node.host.is_root:
        return skip("needs root, or read and write access to /dev/nvidia*, to ask NVML")
    if not probe.asked:
        return skip(probe.message)
    if probe.inventory is None:
        code = "" if probe.code is None else f" (code {probe.code})"
        return fail("NVML fails", seen(source, f"{probe.message}{code}"), *_from_the_log(node))
    broken = [gpu for gpu in probe.inventory.gpus if gpu.error and _RESET_REQUIRED not in gpu.error]
    if broken:
        errors = [seen(f"NVML, GPU {gpu.index} ({gpu.pci})", gpu.error) for gpu in broken]
        errors += _from_the_log(node, *(gpu.pci for gpu in broken if gpu.pci))
        return fail(f"{len(broken)} of {len(probe.inventory.gpus)} GPUs don't answer NVML", *errors)
    if probe.untold:
        return note("NVML lists the GPUs and stops when it is asked how they are", seen(source, probe.untold))
    return ok(f"NVML lists {len(probe.inventory.gpus)} GPUs", seen(source, f"{probe.seconds:.1f} s"))


def _from_the_log(node: Node, *addresses: str) -> tuple[Evidence, ...]:
    """XIDs that come again and again, or else the driver's first failures."""
    return tuple(xid_storms(node)) or failures(node, *addresses)


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
        preflight=ANY_ENGINE,
        blocked_by=("driver-not-installed", "wsl2"),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/154",),
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
        preflight=ANY_ENGINE,
        blocked_by=("driver-not-installed", "libnvidia-ml-missing"),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=("https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",),
    ),
    Check(
        id="libcuda-stub",
        title="libcuda.so.1 is the real one",
        layer="driver",
        severity="warning",
        looks_at="whether libcuda.so.1 leads into a directory stubs/ of a CUDA toolkit.",
        why=(
            "The stub is for linking on machines without a driver. Programs of this node that load it get "
            "CUDA error 34: stub library."
        ),
        remedy=remedies.DROP_STUBS,
        run=libcuda_stub,
        blocked_by=("libcuda-missing",),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=("https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/",),
    ),
    Check(
        id="nvidia-smi-missing",
        title="nvidia-smi is there",
        layer="driver",
        severity="warning",
        looks_at=("an executable nvidia-smi in PATH and where systems keep the driver's programs."),
        why=(
            "NVIDIA's CDI refresh service starts only beside it, and the GPU operator takes a node without "
            "it for one without a driver and installs a second one."
        ),
        remedy=fixes.INSTALL_LIBRARIES,
        run=nvidia_smi_missing,
        blocked_by=("driver-not-installed", "libnvidia-ml-missing"),
        classes=(*HOST, WSL2),
        unless=("operator-driver", "immutable"),
        refs=("https://docs.nvidia.com/deploy/nvidia-smi/",),
    ),
    Check(
        id="nvml-hang",
        title="NVML answers",
        layer="devices",
        severity="error",
        looks_at=(
            "NVML's initialisation and its list of GPUs, asked in a child process with a limit of 15 seconds "
            "(20 for more than four GPUs)."
        ),
        why=(
            "A sick GPU or a stuck driver makes NVML hang or fail, and with it nvidia-smi, device plugins "
            "and the start of every GPU container."
        ),
        remedy=fixes.READ_KERNEL_LOG,
        run=nvml_hang,
        preflight=ANY_ENGINE,
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
        refs=(
            "https://docs.nvidia.com/deploy/nvml-api/",
            "https://github.com/NVIDIA/nvidia-docker/issues/1648",
        ),
    ),
)
