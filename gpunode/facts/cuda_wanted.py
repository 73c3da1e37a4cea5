"""What the user asks of CUDA on this node, and what the node has: the driver, its CUDA, its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpunode.dataclass import dataclass
from gpunode.facts.cuda_releases import newest_of, release_of
from gpunode.facts.driver import version_numbers

if TYPE_CHECKING:
    from gpunode.facts.node import Node
    from gpunode.gpu.model import Gpu, Inventory

# product names (nvmlDeviceGetName) and the brands that drivers have given such products (nvmlBrandType_t):
# it changed with the driver's branch for some
_BRANDS = (
    ("geforce rtx", ("geforce", "geforcertx")),
    ("geforce", ("geforce",)),
    ("quadro rtx", ("quadro", "quadrortx", "nvidiartx")),
    ("quadro", ("quadro",)),
    ("titan rtx", ("titan", "titanrtx")),
    ("titan", ("titan",)),
    ("tesla", ("tesla", "nvidia")),
    ("nvidia rtx", ("nvidiartx", "quadrortx", "quadro")),
    ("grid", ()),
    ("nvidia ", ("nvidia", "tesla")),
)


@dataclass(frozen=True)
class Wanted:
    """A CUDA release that is asked for, and who asks: ``--cuda`` or the image."""

    release: tuple[int, int]
    source: str

    def __str__(self) -> str:
        return f"{self.release[0]}.{self.release[1]}"


def wanted_release(node: Node) -> Wanted | None:
    """--cuda, else what the image was built with; None if nobody asks, or the image doesn't say."""
    named = release_of(node.questions.cuda)
    if named is not None:
        return Wanted(named, "--cuda")
    built = release_of(node.image.image.cuda) if node.image.image else None
    return Wanted(built, f"CUDA_VERSION of {node.questions.image}") if built else None


def inventory(node: Node) -> Inventory | None:
    """What NVML lists; None if it can't be asked, or lists nothing."""
    return node.nvml.inventory


def driver_version(node: Node) -> str:
    """The loaded driver, ``550.54.14``; empty if it doesn't say. WSL2 has no module to ask."""
    known = inventory(node) if node.module is None else None
    told = node.module.version if node.module else (known.driver_version if known else "")
    return told if version_numbers(told) else ""


def driver_cuda(node: Node) -> tuple[int, int] | None:
    """The newest CUDA that the driver offers: NVML's own word, else by the table."""
    known = inventory(node)
    told = release_of(known.cuda_version) if known else None
    version = driver_version(node)
    return told or (newest_of(version) if version else None)


def brands_of(name: str) -> tuple[str, ...]:
    """The brands that a driver may give a GPU of this name; () if it can't be told."""
    lowered = name.lower()
    return next((brands for words, brands in _BRANDS if words in lowered), ())


@dataclass(frozen=True)
class Judged:
    """One NVIDIA_REQUIRE_* against one GPU, or against the node (`gpu` None)."""

    name: str
    text: str
    gpu: Gpu | None
    holds: bool | None


def judge_requirements(node: Node, requirements: Mapping[str, str]) -> tuple[Judged, ...]:
    """Every requirement on every GPU. ValueError for one that is no expression."""
    known = inventory(node)
    facts: dict[str, tuple[str, ...]] = {}
    if driver_version(node):
        facts["driver"] = (driver_version(node),)
    cuda = driver_cuda(node)
    if cuda is not None:
        facts["cuda"] = (f"{cuda[0]}.{cuda[1]}",)
    gpus: list[Gpu | None] = [gpu for gpu in known.gpus if not gpu.error] if known else []
    return tuple(
        Judged(name, text, gpu, _holds(text, facts, gpu))
        for name, text in sorted(requirements.items())
        for gpu in gpus or [None]
    )


def _holds(text: str, facts: Mapping[str, tuple[str, ...]], gpu: Gpu | None) -> bool | None:
    from gpunode.facts.image_requirements import parse, satisfied

    alternatives = parse(text)
    told = dict(facts)
    if gpu is not None and _version(gpu.compute_capability):
        told["arch"] = (gpu.compute_capability,)
    brands = brands_of(gpu.name) if gpu is not None else ()
    # one brand is the right one: where all of them lead to one answer, that is it
    answers = {satisfied(alternatives, {**told, "brand": (brand,)}) for brand in brands}
    return answers.pop() if len(answers) == 1 else satisfied(alternatives, told)


def _version(text: str) -> bool:
    from gpunode.facts.image_requirements import numbers

    try:
        return bool(numbers(text))
    except ValueError:
        return False
