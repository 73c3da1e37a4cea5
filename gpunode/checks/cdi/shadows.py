"""Which specification counts where two name the same device: the one in the later directory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpunode.facts.cdi import CdiSpec


def rank(spec: CdiSpec) -> int:
    """Its directory's place in the engines' order."""
    from gpunode.facts.cdi import DIRECTORIES

    directory = spec.path.rpartition("/")[0]
    return DIRECTORIES.index(directory) if directory in DIRECTORIES else -1


def hidden_by(specs: Iterable[CdiSpec], spec: CdiSpec) -> CdiSpec | None:
    """The specification in a later directory that names every device of this one, None if there is none."""
    if not spec.devices:
        return None
    later = (other for other in specs if rank(other) > rank(spec) and other.kind == spec.kind)
    return next((other for other in later if set(spec.names) <= set(other.names)), None)
