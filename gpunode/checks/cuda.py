"""Checks of a requested image (--image) or CUDA release (--cuda), and of CUDA on this node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from shlex import quote

from gpunode.checks import driver_packages, fixes
from gpunode.checks.finding import DISRUPTS_NOTHING, Evidence, Fix
from gpunode.checks.model import EVERYWHERE_BUT_TEGRA, Verdict, check, fail, ok, seen, skip, warn
from gpunode.facts import cuda as releases
from gpunode.facts import driver, images
from gpunode.facts.bulletins import maintained_branches
from gpunode.facts.driver_targets import LONG_TERM, last_branch
from gpunode.facts.libraries import DriverLibrary, is_compat
from gpunode.facts.node import Node
from gpunode.facts.traits import TRAITS

cuda_check = partial(check, classes=EVERYWHERE_BUT_TEGRA)

# Fixes for a mismatch between a CUDA release and this node.


def other_release(release: str, others: str = "") -> Fix:
    """Suggest a CUDA release to build the program with, and `others` (``or later``); the command checks that
    release."""
    return fixes.look(
        f"gpunode doctor --cuda {release}",
        "Nothing is wrong with the node. "
        f"Build the program with CUDA {release}{others}, or use an image of it",
        needs_root=False,
    )


VERIFY = replace(
    fixes.look(
        "gpunode verify",
        "It computes on each GPU: if it succeeds, the node works, and the image must be replaced",
    ),
    disturbs=DISRUPTS_NOTHING,
)


def other_image(release: str) -> Fix:
    """No driver for these GPUs runs the image, so another image is needed."""
    return Fix(f"use an image of CUDA {release} or older", needs_root=False)


def newer_driver(
    node: Node, requested: tuple[int, int] | None, other: Callable[[str], Fix] = other_release
) -> Fix:
    """Install a driver of a newer branch. If none supports these GPUs or the requested CUDA, return the
    result of `other` for the last CUDA release that they support."""
    known = node.nvml.inventory
    for gpu in known.gpus if known and requested else ():
        if requested and releases.makes_code_for(requested, gpu.compute_capability) == "dropped":
            return other(releases.last_for(gpu.compute_capability))
    if TRAITS["operator-driver"].holds(node):
        return Fix("kubectl edit clusterpolicies.nvidia.com", needs_root=False, disruptive="drain")
    branch = _branch_above(node, requested)
    offered = releases.newest_of(node.driver_version)
    if not branch and offered:
        return other(f"{offered[0]}.{offered[1]}")
    return driver_packages.install_driver(node, branch)


def _branch_above(node: Node, requested: tuple[int, int] | None) -> int:
    """The branch to upgrade to; 0 if no newer one supports these GPUs."""
    known = releases.release(requested) if requested else None
    above = driver.branch(node.driver_version) + 1
    least = max(above, driver.branch(known.minimum) if known else 0)
    last = last_branch(node.gpus)
    fitting = (candidate for candidate in (LONG_TERM, *sorted(maintained_branches())) if candidate >= least)
    return next((branch for branch in fitting if not last or branch <= last), 0)


_NO_IMAGE_OPTION = "not requested: --image REF compares an image's requirements with this node"
_SHOWN = 200  # characters of a requirement; those of NVIDIA's images run to thousands
_PULL = {"Docker": "docker pull", "podman": "podman pull"}  # crictl for the others


@cuda_check(
    "image-needs-newer-driver",
    title="The driver meets the image's requirements",
    looks_at="with --image REF: NVIDIA_REQUIRE_* and CUDA_VERSION of the image, as reported by the engines "
    "that hold it (none is pulled), against the driver, its CUDA version and the GPUs.",
    fix=driver_packages.UPGRADE_DRIVER,
    blocked_by=("module-not-loaded", "driver-lib-mismatch", "nvml-hang"),
    refs=(
        "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html",
    ),
    table=releases.DRIVERS,
)
def image_needs_newer_driver(node: Node) -> Verdict:
    """The runtime refuses such a container: 'requirement error: unsatisfied condition: cuda>=...'. If the
    runtime doesn't check, CUDA fails in the container with error 35.
    """
    reference = node.questions.image
    if not reference:
        return skip(_NO_IMAGE_OPTION)
    image = node.image.image
    if image is None:
        return _not_pulled(reference, node.image)
    if not image.requirements:
        return _by_release(node, image)
    try:
        results = releases.judge_requirements(node, image.requirements)
    except ValueError as error:
        return fail(
            f"{reference} has a requirement that the runtime rejects: {error}",
            *(seen(f"{name} of {reference}", value[:_SHOWN]) for name, value in image.requirements.items()),
            fix=Fix(
                f"docker run --gpus all --env NVIDIA_DISABLE_REQUIRE=1 {quote(reference)}", needs_root=False
            ),
        )
    return _requirements(node, results)


def _requirements(node: Node, results: tuple[releases.RequirementResult, ...]) -> Verdict:
    reference = node.questions.image
    wrong = [result for result in results if result.holds is False]
    if not wrong:
        unsure = [result for result in results if result.holds is None]
        if unsure:
            return skip(
                f"{unsure[0].name} of {reference} can't be compared: facts about the GPUs are missing"
            )
        return ok(f"this node meets the requirements of {reference}", *_gpus_of_node(node))
    first = wrong[0]
    text = first.text if len(first.text) <= _SHOWN else f"{first.text[:_SHOWN]}..."
    evidence = (seen(f"{first.name} of {reference}", text), *_gpus_of_node(node))
    requirement = first.text.split(" ")[0].replace(",", " and ")
    requested = releases.requested_release(node)
    fix = newer_driver(node, requested.release if requested else None, other_image)
    if len(wrong) == len(results) or first.gpu is None:
        return fail(f"{reference} requires {requirement}, which this node doesn't meet", *evidence, fix=fix)
    name = f"GPU {first.gpu.index} ({first.gpu.name})"
    return warn(f"{reference} requires {requirement}, which {name} doesn't meet", *evidence, fix=fix)


def _gpus_of_node(node: Node) -> tuple[Evidence, ...]:
    cuda = releases.driver_cuda(node)
    offered = f", CUDA {cuda[0]}.{cuda[1]}" if cuda else ""
    return (seen("the loaded driver", f"{releases.driver_version(node) or 'unknown'}{offered}"),)


def _by_release(node: Node, image: images.Image) -> Verdict:
    """An image without requirements may still name the CUDA release that it was built with."""
    reference, driver = node.questions.image, releases.driver_version(node)
    built = releases.release_of(image.cuda)
    if built is None or not driver:
        return ok(
            f"{reference} has no requirements for the driver", seen(image.engine, "no NVIDIA_REQUIRE_*")
        )
    answer, needed = releases.runs(built, driver, releases.driver_cuda(node))
    evidence = (seen(f"CUDA_VERSION of {reference}", image.cuda), *_gpus_of_node(node))
    if answer is None:
        return skip(f"the driver that CUDA {image.cuda} of {reference} needs is unknown")
    if answer:
        return ok(f"driver {driver} supports CUDA {image.cuda} of {reference}", *evidence)
    what = f"{reference} uses CUDA {image.cuda}, which needs {needed}"
    return fail(what, *evidence, fix=newer_driver(node, built, other_image))


def _not_pulled(reference: str, search: images.Search) -> Verdict:
    """gpunode pulls nothing; if the user named the image, the finding shows the command that pulls it."""
    if search.held_not:
        engine = search.held_not[0]
        where = " and ".join(search.held_not)
        what = f"{reference} is not on this node, so its requirements are unknown"
        pull = f"{_PULL.get(engine, 'crictl pull')} {quote(reference)}"
        return warn(what, seen(where, "no such image"), fix=Fix(pull))
    if search.silent:
        return skip(f"no engine answered a query for {reference}: {'; '.join(search.silent)}")
    return skip(f"this node has no container engine to query for {reference}")


@cuda_check(
    "vectoradd-image-arch",
    title="The CUDA sample image supports these GPUs",
    severity="warning",
    looks_at="with --image REF of a CUDA sample: its CUDA version against each GPU.",
    fix=VERIFY,
    blocked_by=("module-not-loaded", "nvml-hang"),
    refs=("https://catalog.ngc.nvidia.com/orgs/nvidia/teams/k8s/containers/cuda-sample",),
    table=images.TABLE,
)
def vectoradd_image_arch(node: Node) -> Verdict:
    """Old sample images contain no code for newer GPUs: they compile for minutes or fail with error 209, so a
    working node looks broken. gpunode verify uses PTX that runs on any GPU.
    """
    cuda = images.sample_cuda(node.questions.image)
    release, known = releases.release_of(cuda), node.nvml.inventory
    if release is None or known is None:
        return skip("--image doesn't name a CUDA sample image" if release is None else "NVML lists no GPUs")
    late = {
        gpu.name: gpu.compute_capability
        for gpu in known.gpus
        if not gpu.error and releases.makes_code_for(release, gpu.compute_capability) == "too-early"
    }
    if not late:
        return ok(f"{node.questions.image} has code for this node's GPUs")
    return warn(
        f"{node.questions.image} is older than {', '.join(late)}: its failure doesn't mean that this "
        "node is broken",
        *(
            seen(
                name,
                f"compute capability {capability}, supported since CUDA {releases.first_for(capability)}",
            )
            for name, capability in late.items()
        ),
        seen(node.questions.image, f"built with CUDA {cuda}"),
        fix=VERIFY,
    )


# A requested CUDA release (--cuda), against the driver and the GPUs of this node.

_NO_CUDA_OPTION = "not requested: --cuda X.Y compares a CUDA release with this node"
_NO_RELEASE = "not requested: --cuda X.Y, or --image REF of an image that sets CUDA_VERSION"
_COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/"


@cuda_check(
    "cuda-driver-version",
    title="The driver is new enough for the requested CUDA release",
    looks_at="with --cuda X.Y: the loaded driver against the oldest one that this CUDA release runs on.",
    fix=driver_packages.UPGRADE_DRIVER,
    blocked_by=("module-not-loaded", "driver-lib-mismatch", "nvml-hang"),
    refs=(_COMPATIBILITY,),
    table=releases.DRIVERS,
)
def cuda_driver_version(node: Node) -> Verdict:
    """A program that uses a newer CUDA than the driver supports fails with error 35, 'CUDA driver version is
    insufficient for CUDA runtime version'. Within one major release, any driver of that release works.
    """
    requested = releases.release_of(node.questions.cuda)
    if requested is None:
        option = node.questions.cuda
        return skip(f"--cuda {option}: not a CUDA release, such as 12.8" if option else _NO_CUDA_OPTION)
    driver, name = releases.driver_version(node), f"{requested[0]}.{requested[1]}"
    if not driver:
        return skip("the driver doesn't report its version")
    answer, needed = releases.runs(requested, driver, releases.driver_cuda(node))
    evidence = seen("the loaded driver", driver)
    if answer is None:
        return skip(f"the driver that CUDA {name} needs is unknown")
    if not answer:
        what = f"CUDA {name} needs {needed}, but the driver is {driver}"
        return fail(what, evidence, fix=newer_driver(node, requested))
    return ok(f"driver {driver} runs CUDA {name} programs", evidence)


@cuda_check(
    "ptx-unsupported-toolchain",
    title="The driver can compile the PTX of the requested CUDA release",
    severity="warning",
    looks_at="the driver's own CUDA release against --cuda X.Y or CUDA_VERSION of --image REF.",
    fix=driver_packages.UPGRADE_DRIVER,
    blocked_by=("cuda-driver-version", "image-needs-newer-driver", "nvml-hang"),
    refs=(_COMPATIBILITY,),
    table=releases.DRIVERS,
)
def ptx_unsupported_toolchain(node: Node) -> Verdict:
    """Compatibility within a major release covers compiled code only. The driver rejects PTX of a newer CUDA
    with error 222, 'the provided PTX was compiled with an unsupported toolchain': JIT compilers and libraries
    without code for this GPU fail, other programs run.
    """
    requested, here = releases.requested_release(node), releases.driver_cuda(node)
    if requested is None or here is None:
        return skip(_NO_RELEASE if requested is None else "the driver doesn't report its CUDA version")
    known = releases.release(requested.release)
    offers = f"{here[0]}.{here[1]}"
    if requested.release <= here:
        return ok(f"the driver supports CUDA {offers} and can compile the PTX of {requested}")
    if known is None or requested.release[0] != here[0]:
        return skip(f"CUDA {requested} has a different major release than the driver's {offers}")
    return warn(
        f"the driver supports CUDA {offers}: programs of CUDA {requested} that contain only PTX don't start",
        seen("cuDriverGetVersion", offers),
        seen(requested.source, str(requested)),
        fix=newer_driver(node, requested.release),
    )


@cuda_check(
    "no-kernel-image",
    title="The requested CUDA release supports these GPUs",
    looks_at="each GPU's compute capability against the CUDA releases that can compile for it. The release "
    "is --cuda X.Y or CUDA_VERSION of --image REF.",
    fix=other_release("12.9"),
    blocked_by=("cuda-driver-version", "image-needs-newer-driver", "nvml-hang"),
    refs=("https://developer.nvidia.com/cuda-gpus",),
    table=releases.CAPABILITIES,
)
def no_kernel_image(node: Node) -> Verdict:
    """A program contains code for the GPUs that its CUDA release supports. On other GPUs CUDA fails with
    error 209, 'no kernel image is available for execution on the device', or compiles PTX for minutes at each
    start.
    """
    requested, known = releases.requested_release(node), node.nvml.inventory
    if requested is None or known is None:
        return skip(_NO_RELEASE if requested is None else "NVML lists no GPUs")
    if not node.questions.cuda and images.sample_cuda(node.questions.image):
        return skip("see vectoradd-image-arch for this image")
    support = {
        gpu.name: (gpu.compute_capability, releases.makes_code_for(requested.release, gpu.compute_capability))
        for gpu in known.gpus
        if not gpu.error
    }
    dropped = {name: capability for name, (capability, answer) in support.items() if answer == "dropped"}
    early = {name: capability for name, (capability, answer) in support.items() if answer == "too-early"}
    evidence = []
    for name, capability in (dropped or early).items():
        last = releases.last_for(capability) or "today"
        span = f"CUDA {releases.first_for(capability)} to {last}"
        evidence.append(seen(name, f"compute capability {capability}: {span}"))
    evidence.append(seen(requested.source, str(requested)))
    if dropped:
        last = releases.last_for(next(iter(dropped.values())))
        what = f"CUDA {requested} no longer supports {', '.join(dropped)}"
        return fail(what, *evidence, fix=other_release(last, " or older"))
    if early:
        first = releases.first_for(next(iter(early.values())))
        what = f"CUDA {requested} is older than {', '.join(early)}: only programs that contain PTX run there"
        return warn(what, *evidence, fix=other_release(first, " or later"))
    return ok(f"CUDA {requested} supports every GPU of this node")


# CUDA on the host itself: which libcuda programs load, and whether it initialises.

_LINKER_FILES = "/etc/ld.so.conf.d"
FIND_COMPAT = fixes.look(
    f"grep -rn compat /etc/ld.so.conf {_LINKER_FILES}",
    "Delete the file or the line that names the compat directory, then run ldconfig",
    needs_root=False,
)


@check(
    "forward-compat-803-804",
    title="No unsuitable forward compatibility library is active",
    looks_at="whether /etc/ld.so.cache resolves libcuda.so.1 to cuda-compat, and the version of that "
    "library.",
    fix=FIND_COMPAT,
    blocked_by=("module-not-loaded", "libcuda-missing"),
    refs=("https://docs.nvidia.com/deploy/cuda-compatibility/",),
)
def forward_compat_803_804(node: Node) -> Verdict:
    """cuda-compat provides a newer libcuda for an older driver of a data centre GPU. If it is older than the
    driver, it fails with error 803 (system has unsupported display driver / cuda driver combination); on a
    GeForce, with error 804.
    """
    library, module = node.cuda_library, node.module
    if library is None or not is_compat(library.path):
        return ok("programs load the driver's own libcuda")
    here, loaded = (
        driver.version_numbers(library.version or ""),
        driver.version_numbers(module.version if module else ""),
    )
    if module is None or not here or not loaded:
        return skip(f"{library.path} or the driver doesn't report its version")
    evidence = (seen("/etc/ld.so.cache", library.path), seen("the loaded driver", module.version))
    if here == loaded:
        return ok(f"libcuda of cuda-compat has the driver's version, {library.version}", *evidence)
    if here < loaded:
        what = f"programs load libcuda {library.version} of cuda-compat, which is older than the driver"
        why = "cuda-compat provides a newer libcuda for an older driver: it doesn't work with a newer driver."
        return fail(f"{what}: error 803", *evidence, fix=_without(node, library), why=why)
    game = next((gpu.model for gpu in node.driver_gpus if "geforce" in gpu.model.lower()), "")
    if game:
        what = (
            f"programs load libcuda {library.version} of cuda-compat, which {game} doesn't support: error 804"
        )
        why = "cuda-compat provides a newer libcuda for an older driver, but only of a data centre GPU."
        return fail(what, *evidence, fix=_without(node, library), why=why)
    return ok(f"libcuda {library.version} of cuda-compat is newer than the driver", *evidence)


def _without(node: Node, library: DriverLibrary) -> Fix:
    """Remove the file that adds the directory to the linker's cache, if it can be found."""
    directory = library.path.rpartition("/")[0]
    for path in node.host.glob(_LINKER_FILES, "*.conf"):
        lines = (line.strip().rstrip("/") for line in (node.host.read_text(path) or "").splitlines())
        if any(line and node.host.realpath(line) == node.host.realpath(directory) for line in lines):
            return Fix(f"rm {path} && ldconfig")
    return FIND_COMPAT


@check(
    "cuda-uninitialised",
    title="CUDA computes on every device",
    looks_at="with --deep: a vector addition on every GPU and MIG device, through libcuda, on the host.",
    fix=fixes.READ_KERNEL_LOG,
    blocked_by=(
        "module-not-loaded",
        "dev-nodes-missing",
        "dev-node-major-stale",
        "uvm-not-loaded",
        "libcuda-missing",
        "driver-lib-mismatch",
        "nvml-hang",
        "forward-compat-803-804",
        "fabricmanager-missing",
        "fabric-training",
        "mig-enabled-no-instances",
        "vgpu-driver-mismatch",
    ),
    deep=True,
    refs=("https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html",),
)
def cuda_uninitialised(node: Node) -> Verdict:
    """NVML may list GPUs that CUDA can't use: the fabric isn't ready (802), driver versions are mixed (803,
    804), unified memory is missing (999; uvm-not-loaded checks that), or a process uses the GPU exclusively
    (46). CUDA fails in containers too.
    """
    answer = releases.run_cuda(node.host)
    if answer is None:
        return skip("the CUDA test can't run on this machine")
    source = "vector-add in a child process"
    if answer.error:
        return fail("CUDA doesn't initialise on this node", seen(source, answer.error))
    broken = [device for device in answer.devices if device.status == "fail"]
    if broken:
        evidence = (
            seen(f"{source}, {device.name or device.uuid}", device.message or "fail") for device in broken
        )
        return fail(f"{len(broken)} of {len(answer.devices)} devices can't compute", *evidence)
    return ok(f"CUDA computes on {len(answer.devices)} devices")
