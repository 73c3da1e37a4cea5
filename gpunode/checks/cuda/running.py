"""CUDA on the host itself: which libcuda programs get, and whether it starts."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import HOST, Check, Verdict, fail, ok, seen, skip
from gpunode.facts.driver import version_numbers
from gpunode.facts.libraries import Library, is_compat
from gpunode.facts.node import Node
from gpunode.result import Fix

_LINKER_FILES = "/etc/ld.so.conf.d"


def forward_compat_803_804(node: Node) -> Verdict:
    library, driver = node.cuda_library, node.module
    if library is None or not is_compat(library.path):
        return ok("programs get the driver's own libcuda")
    here, loaded = version_numbers(library.version or ""), version_numbers(driver.version if driver else "")
    if driver is None or not here or not loaded:
        return skip(f"{library.path} or the driver doesn't tell its version")
    evidence = (seen("/etc/ld.so.cache", library.path), seen("the loaded driver", driver.version))
    if here == loaded:
        return ok(f"libcuda of cuda-compat is the driver's own version, {library.version}", *evidence)
    if here < loaded:
        what = f"programs get libcuda {library.version} of cuda-compat, which is older than the driver"
        return fail(f"{what}: error 803", *evidence, fix=_without(node, library))
    game = next((gpu.model for gpu in node.driver_gpus if "geforce" in gpu.model.lower()), "")
    if game:
        what = f"programs get libcuda {library.version} of cuda-compat, which {game} can't use: error 804"
        return fail(what, *evidence, fix=_without(node, library))
    return ok(f"libcuda {library.version} of cuda-compat is newer than the driver", *evidence)


def _without(node: Node, library: Library) -> Fix:
    """Take the file away that brings the directory into the linker's cache, if one can be found."""
    directory = library.path.rpartition("/")[0]
    for path in node.host.glob(_LINKER_FILES, "*.conf"):
        lines = (line.strip().rstrip("/") for line in (node.host.read_text(path) or "").splitlines())
        if any(line and node.host.realpath(line) == node.host.realpath(directory) for line in lines):
            return Fix(f"rm {path} && ldconfig")
    return Fix(f"grep -rn compat /etc/ld.so.conf {_LINKER_FILES}", False)


def cuda_uninitialised(node: Node) -> Verdict:
    from gpunode.facts.cuda_run import run_cuda

    answer = run_cuda(node.host)
    if answer is None:
        return skip("CUDA was not tried on this machine")
    source = "vector-add in a child process"
    if answer.error:
        return fail("CUDA doesn't start on this node", seen(source, answer.error))
    broken = [device for device in answer.devices if device.status == "fail"]
    if broken:
        evidence = (seen(f"{source}, {one.name or one.uuid}", one.message or "fail") for one in broken)
        return fail(f"{len(broken)} of {len(answer.devices)} devices can't compute", *evidence)
    return ok(f"CUDA computes on {len(answer.devices)} devices")


CHECKS = (
    Check(
        id="forward-compat-803-804",
        title="No forward compatibility library is in the way",
        layer="cuda",
        severity="error",
        looks_at="whether /etc/ld.so.cache leads libcuda.so.1 to cuda-compat, and the version there.",
        why=(
            "cuda-compat brings a newer libcuda for an older driver of a data centre GPU. Older than the "
            "driver, it fails with error 803 (system has unsupported display driver / cuda driver "
            "combination), on a GeForce with 804."
        ),
        remedy=fixes.everywhere(f"grep -rn compat /etc/ld.so.conf {_LINKER_FILES}", needs_root=False),
        run=forward_compat_803_804,
        blocked_by=("module-not-loaded", "libcuda-missing"),
        preflight=(),
        classes=HOST,
        refs=("https://docs.nvidia.com/deploy/cuda-compatibility/",),
    ),
    Check(
        id="cuda-uninitialised",
        title="CUDA computes on every device",
        layer="cuda",
        severity="error",
        looks_at="with --deep: a vector addition on every GPU and MIG device, through libcuda, on the host.",
        why=(
            "NVML can list GPUs that CUDA can't use: a fabric that isn't ready (802), a mixture of drivers "
            "(803, 804), no unified memory (999), a GPU held exclusively (46). No container will fare better."
        ),
        remedy=fixes.everywhere("gpunode verify"),
        run=cuda_uninitialised,
        blocked_by=(
            *("module-not-loaded", "dev-nodes-missing", "dev-node-major-stale", "uvm-not-loaded"),
            *("libcuda-missing", "driver-lib-mismatch", "nvml-hang", "forward-compat-803-804"),
            *("fabricmanager-missing", "fabric-training", "mig-enabled-no-instances", "vgpu-driver-mismatch"),
        ),
        classes=HOST,
        deep=True,
        refs=("https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html",),
    ),
)
