"""A container image that is asked about (--image), against the driver and the GPUs of this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunode.checks import fixes
from gpunode.checks.cuda import remedies
from gpunode.checks.model import EVERYWHERE_BUT_TEGRA, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.facts import cuda_releases as releases
from gpunode.facts import sample_images
from gpunode.facts.cuda_wanted import (
    Judged,
    driver_cuda,
    driver_version,
    inventory,
    judge_requirements,
    wanted_release,
)
from gpunode.facts.node import Node
from gpunode.result import Evidence, Fix

if TYPE_CHECKING:
    from gpunode.facts.images import Image, Search

_NOBODY = "nobody asked: --image REF compares what an image requires with this node"
_SHOWN = 200  # characters of a requirement; those of NVIDIA's images run to thousands
_PULL = {"Docker": "docker pull", "podman": "podman pull"}  # crictl for the others


def image_needs_newer_driver(node: Node) -> Verdict:
    reference = node.questions.image
    if not reference:
        return skip(_NOBODY)
    image = node.image.image
    if image is None:
        return _nobody_holds_it(reference, node.image)
    if not image.requirements:
        return _by_release(node, image)
    try:
        judged = judge_requirements(node, image.requirements)
    except ValueError as error:
        return fail(
            f"{reference} has a requirement that the runtime refuses: {error}",
            *(seen(f"{name} of {reference}", value[:_SHOWN]) for name, value in image.requirements.items()),
            fix=Fix(f"docker run --gpus all --env NVIDIA_DISABLE_REQUIRE=1 {_quoted(reference)}", False),
        )
    return _told(node, judged)


def _told(node: Node, judged: tuple[Judged, ...]) -> Verdict:
    reference = node.questions.image
    wrong = [one for one in judged if one.holds is False]
    if not wrong:
        unsure = [one for one in judged if one.holds is None]
        if unsure:
            return skip(f"{unsure[0].name} of {reference} can't be compared with what is known of the GPUs")
        return ok(f"this node has what {reference} requires", *_here(node))
    first = wrong[0]
    evidence = (seen(f"{first.name} of {reference}", _shortened(first.text)), *_here(node))
    asked = first.text.split(" ")[0].replace(",", " and ")
    wanted = wanted_release(node)
    fix = remedies.newer_driver(node, wanted.release if wanted else None, remedies.other_image)
    if len(wrong) == len(judged) or first.gpu is None:
        return fail(f"{reference} requires {asked}, which this node does not meet", *evidence, fix=fix)
    name = f"GPU {first.gpu.index} ({first.gpu.name})"
    return warn(f"{reference} requires {asked}, which {name} hasn't", *evidence, fix=fix)


def _here(node: Node) -> tuple[Evidence, ...]:
    cuda = driver_cuda(node)
    offered = f", CUDA {cuda[0]}.{cuda[1]}" if cuda else ""
    return (seen("the loaded driver", f"{driver_version(node) or 'unknown'}{offered}"),)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _by_release(node: Node, image: Image) -> Verdict:
    """An image that requires nothing may still say what CUDA it was built with."""
    reference, driver = node.questions.image, driver_version(node)
    built = releases.release_of(image.cuda)
    if built is None or not driver:
        return ok(f"{reference} requires nothing of the driver", seen(image.engine, "no NVIDIA_REQUIRE_*"))
    answer, needed = releases.runs(built, driver, driver_cuda(node))
    evidence = (seen(f"CUDA_VERSION of {reference}", image.cuda), *_here(node))
    if answer is None:
        return skip(f"no table knows which driver CUDA {image.cuda} of {reference} needs")
    if answer:
        return ok(f"driver {driver} runs CUDA {image.cuda} of {reference}", *evidence)
    what = f"{reference} is of CUDA {image.cuda}, which needs {needed}"
    return fail(what, *evidence, fix=remedies.newer_driver(node, built, remedies.other_image))


def _nobody_holds_it(reference: str, search: Search) -> Verdict:
    """Nothing is pulled; a user who asked by name is told so, and how to get it."""
    if search.held_not:
        engine = search.held_not[0]
        where = " and ".join(search.held_not)
        what = f"{reference} is not on this node, so what it requires isn't known"
        pull = f"{_PULL.get(engine, 'crictl pull')} {_quoted(reference)}"
        return warn(what, seen(where, "no such image"), fix=Fix(pull))
    if search.silent:
        return skip(f"no engine could be asked for {reference}: {'; '.join(search.silent)}")
    return skip(f"there is no container engine to ask for {reference}")


def _quoted(reference: str) -> str:
    from shlex import quote

    return quote(reference)


def vectoradd_image_arch(node: Node) -> Verdict:
    cuda = sample_images.sample_cuda(node.questions.image)
    release, known = releases.release_of(cuda), inventory(node)
    if release is None or known is None:
        return skip("--image names no image of CUDA's samples" if release is None else "NVML lists no GPUs")
    late = {
        gpu.name: gpu.compute_capability
        for gpu in known.gpus
        if not gpu.error and releases.makes_code_for(release, gpu.compute_capability) == "too-early"
    }
    if not late:
        return ok(f"{node.questions.image} has code for the GPUs of this node")
    return warn(
        f"{node.questions.image} is older than {', '.join(late)}: its failure says nothing about this node",
        *(
            seen(name, f"compute capability {one}, known since CUDA {releases.first_for(one)}")
            for name, one in late.items()
        ),
        seen(node.questions.image, f"built with CUDA {cuda}"),
        fix=Fix("gpunode verify"),
    )


CHECKS = (
    Check(
        id="image-needs-newer-driver",
        title="The driver has what the image requires",
        layer="cuda",
        severity="error",
        looks_at=(
            "with --image REF: NVIDIA_REQUIRE_* and CUDA_VERSION of the image, asked of the engines that "
            "hold it (none is pulled), against the driver, its CUDA and the GPUs."
        ),
        why=(
            "The runtime refuses such a container: 'requirement error: unsatisfied condition: cuda>=...'. "
            "Where it doesn't look, CUDA fails inside with error 35."
        ),
        remedy=fixes.UPGRADE_DRIVER,
        run=image_needs_newer_driver,
        blocked_by=("module-not-loaded", "driver-lib-mismatch", "nvml-hang"),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=(
            "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html",
        ),
        table=releases.DRIVERS,
    ),
    Check(
        id="vectoradd-image-arch",
        title="The sample's image knows these GPUs",
        layer="cuda",
        severity="warning",
        looks_at="with --image REF of a CUDA sample: the CUDA it was built with against each GPU.",
        why=(
            "Old samples hold no code for newer GPUs: they compile for minutes or fail with error 209, and a "
            "node that is fine looks broken. gpunode verify brings PTX that any GPU takes."
        ),
        remedy=fixes.everywhere("gpunode verify"),
        run=vectoradd_image_arch,
        blocked_by=("module-not-loaded", "nvml-hang"),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=("https://catalog.ngc.nvidia.com/orgs/nvidia/teams/k8s/containers/cuda-sample",),
        table=sample_images.TABLE,
    ),
)
