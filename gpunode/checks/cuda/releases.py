"""A CUDA release that is asked for (--cuda), against the driver and the GPUs of this node."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.cuda import remedies
from gpunode.checks.model import EVERYWHERE_BUT_TEGRA, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.facts import cuda_releases as releases
from gpunode.facts.cuda_wanted import driver_cuda, driver_version, inventory, wanted_release
from gpunode.facts.node import Node
from gpunode.facts.sample_images import sample_cuda

_NOBODY = "nobody asked: --cuda X.Y compares a CUDA release with this node"
_NO_RELEASE = "nobody asked: --cuda X.Y, or --image REF of an image that names its CUDA_VERSION"
_COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/"


def cuda_driver_version(node: Node) -> Verdict:
    asked = releases.release_of(node.questions.cuda)
    if asked is None:
        given = node.questions.cuda
        return skip(f"--cuda {given}: no CUDA release, such as 12.8" if given else _NOBODY)
    driver, name = driver_version(node), f"{asked[0]}.{asked[1]}"
    if not driver:
        return skip("the driver doesn't tell its version")
    answer, needed = releases.runs(asked, driver, driver_cuda(node))
    evidence = seen("the loaded driver", driver)
    if answer is None:
        return skip(f"no table knows which driver CUDA {name} needs")
    if not answer:
        what = f"CUDA {name} needs {needed}, this is {driver}"
        return fail(what, evidence, fix=remedies.newer_driver(node, asked))
    return ok(f"driver {driver} runs programs of CUDA {name}", evidence)


def ptx_unsupported_toolchain(node: Node) -> Verdict:
    wanted, here = wanted_release(node), driver_cuda(node)
    if wanted is None or here is None:
        return skip(_NO_RELEASE if wanted is None else "the driver doesn't tell its CUDA")
    known = releases.release(wanted.release)
    offers = f"{here[0]}.{here[1]}"
    if wanted.release <= here:
        return ok(f"the driver is of CUDA {offers} and compiles the PTX of {wanted}")
    if known is None or wanted.release[0] != here[0]:
        return skip(f"CUDA {wanted} is of another major release than the driver's {offers}")
    return warn(
        f"the driver is of CUDA {offers}: programs of {wanted} that bring PTX alone won't start",
        seen("cuDriverGetVersion", offers),
        seen(wanted.source, str(wanted)),
        fix=remedies.newer_driver(node, wanted.release),
    )


def no_kernel_image(node: Node) -> Verdict:
    wanted, known = wanted_release(node), inventory(node)
    if wanted is None or known is None:
        return skip(_NO_RELEASE if wanted is None else "NVML lists no GPUs")
    if not node.questions.cuda and sample_cuda(node.questions.image):
        return skip("vectoradd-image-arch judges this image")
    found = {
        gpu.name: (gpu.compute_capability, releases.makes_code_for(wanted.release, gpu.compute_capability))
        for gpu in known.gpus
        if not gpu.error
    }
    dropped = {name: one for name, (one, answer) in found.items() if answer == "dropped"}
    early = {name: one for name, (one, answer) in found.items() if answer == "too-early"}
    evidence = tuple(
        seen(name, f"compute capability {one}: CUDA {releases.first_for(one)} to {_last(one)}")
        for name, one in (dropped or early).items()
    )
    if dropped:
        last = releases.last_for(next(iter(dropped.values())))
        what = f"CUDA {wanted} has no code for {', '.join(dropped)}"
        return fail(what, *evidence, fix=remedies.other_release(last))
    if early:
        first = releases.first_for(next(iter(early.values())))
        what = f"CUDA {wanted} is older than {', '.join(early)}: only programs that bring PTX run there"
        return warn(what, *evidence, fix=remedies.other_release(first))
    return ok(f"CUDA {wanted} makes code for every GPU of this node")


def _last(capability: str) -> str:
    return releases.last_for(capability) or "today"


CHECKS = (
    Check(
        id="cuda-driver-version",
        title="The driver is new enough for the CUDA asked for",
        layer="cuda",
        severity="error",
        looks_at="with --cuda X.Y: the loaded driver against the oldest one that this CUDA release runs on.",
        why=(
            "A program of a newer CUDA on an older driver fails with error 35, 'CUDA driver version is "
            "insufficient for CUDA runtime version'. Within one major release any driver of it will do."
        ),
        remedy=fixes.UPGRADE_DRIVER,
        run=cuda_driver_version,
        blocked_by=("module-not-loaded", "driver-lib-mismatch", "nvml-hang"),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=(_COMPATIBILITY,),
        table=releases.DRIVERS,
    ),
    Check(
        id="ptx-unsupported-toolchain",
        title="The driver compiles the PTX of the CUDA asked for",
        layer="cuda",
        severity="warning",
        looks_at="the driver's own CUDA release against --cuda X.Y, or CUDA_VERSION of --image REF.",
        why=(
            "Compatibility within a major release covers finished code only. PTX of a newer CUDA is refused "
            "with error 222, 'the provided PTX was compiled with an unsupported toolchain': JIT compilers "
            "and libraries without code for this GPU fail, everything else runs."
        ),
        remedy=fixes.UPGRADE_DRIVER,
        run=ptx_unsupported_toolchain,
        blocked_by=("cuda-driver-version", "image-needs-newer-driver", "nvml-hang"),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=(_COMPATIBILITY,),
        table=releases.DRIVERS,
    ),
    Check(
        id="no-kernel-image",
        title="The CUDA asked for knows these GPUs",
        layer="cuda",
        severity="error",
        looks_at=(
            "each GPU's compute capability against the CUDA releases that make code for it; the release is "
            "--cuda X.Y, or CUDA_VERSION of --image REF."
        ),
        why=(
            "A program holds code for the GPUs that its CUDA knew. Without it CUDA fails with error 209, 'no "
            "kernel image is available for execution on the device', or compiles PTX for minutes at each "
            "start."
        ),
        remedy=remedies.OTHER_RELEASE,
        run=no_kernel_image,
        blocked_by=("cuda-driver-version", "image-needs-newer-driver", "nvml-hang"),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=("https://developer.nvidia.com/cuda-gpus",),
        table=releases.CAPABILITIES,
    ),
)
