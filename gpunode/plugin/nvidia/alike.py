"""MIG strategy `single`: under one name only what can stand in for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpunode.plugin.model import Unit
from gpunode.plugin.nvidia.units import Candidate


def keep_alike(
    name: str, candidates: Sequence[Candidate], leave_out: Callable[[Unit, str], None]
) -> list[Candidate]:
    """The units of one kind, whole GPUs or one MIG profile; `leave_out` is told of the others.

    The kind that is on the most GPUs is kept, so that one GPU which lost its layout, or was cut otherwise,
    doesn't change what the others are. Of two such kinds MIG goes before whole GPUs, as it is what the
    strategy is chosen for, then the kind with more devices, then the one of the first GPU. A GPU that can't
    be read has no vote while another one has.
    """
    voters = [one for one in candidates if one.sound] or list(candidates)
    kinds = {one.likeness for one in voters}
    if not kinds:
        return []

    def votes(kind: str) -> tuple[int, bool, int]:
        same = [one for one in voters if one.likeness == kind]
        return len({one.unit.gpu for one in same}), kind != "", len(same)

    ordered = list(dict.fromkeys(one.likeness for one in voters))
    kept = max(ordered, key=votes)  # the first of several that are equal
    for one in candidates:
        if one.likeness != kept:
            leave_out(
                one.unit,
                f"mig-strategy is single and {name} means {_told(kept)} here, this is {_told(one.likeness)}; "
                "mig-strategy mixed gives each kind a name of its own",
            )
    return [one for one in candidates if one.likeness == kept]


def _told(likeness: str) -> str:
    return f"a MIG device {likeness}" if likeness else "a whole GPU"
