"""MIG layouts of simulated GPUs: ``3g.20gb/1g.5gb*4``, laid into the GPU's memory slots as the driver would.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gpunode.errors import UsageError
from gpunode.gpu.model import Gpu, MigDevice, MigSize
from gpunode.plugin.simulate.models import Model, Profile

Placed = tuple[Profile, int]


def stable_uuid(*of: object) -> str:
    """The same for the same node and index, and another for every other."""
    bits = Random("/".join(map(str, of))).getrandbits(128)  # noqa: S311 - a name; hashlib would load OpenSSL
    hexadecimal = f"{bits:032x}"
    return "-".join(hexadecimal[low:high] for low, high in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


def parse_layout(text: str, model: Model) -> tuple[Placed, ...]:
    """Each profile with the slot where it starts. `UsageError` if the GPU has no such profile, or no room."""
    known = {profile.name: profile for profile in model.profiles}
    if not known:
        raise UsageError(f"{model.name} has no MIG")
    wanted: list[Profile] = []
    for item in text.split("/"):
        name, _, count = item.strip().partition("*")
        if name not in known:
            raise UsageError(
                f"{model.name} has no MIG profile {name!r}", hint=f"its profiles: {', '.join(known)}"
            )
        if count and not (count.isdecimal() and 1 <= int(count[:3]) <= model.slots):
            raise UsageError(f"{item!r}: the count is a number from 1 to {model.slots}")
        wanted += [known[name]] * int(count or 1)
    wanted.sort(key=lambda profile: -profile.size)
    for profile in set(wanted):
        if wanted.count(profile) > profile.limit:
            raise UsageError(f"{model.name} can have {profile.limit} of {profile.name}, not {text!r}")
    placed = _place(wanted, frozenset())
    if placed is None:
        raise UsageError(f"the MIG layout {text!r} does not fit on {model.name}")
    return placed


def _place(wanted: Sequence[Profile], taken: frozenset[int]) -> tuple[Placed, ...] | None:
    """The first way to lay them side by side; at most seven, so trying is quick."""
    if not wanted:
        return ()
    for start in wanted[0].starts:
        slots = frozenset(range(start, start + wanted[0].size))
        rest = None if slots & taken else _place(wanted[1:], taken | slots)
        if rest is not None:
            return ((wanted[0], start), *rest)
    return None


def devices(gpu: Gpu, layout: Sequence[Placed], model: Model) -> tuple[MigDevice, ...]:
    """What NVML would list: instance ids count through the halves of the memory, as on hardware: 0 for all of
    it, 1 and 2 for its halves, 3 to 6 for the quarters, from 7 on the single slots."""
    made = []
    for index, (profile, start) in enumerate(layout):
        gi = model.slots // profile.size - 1 + start // profile.size
        uuid = "MIG-" + stable_uuid(gpu.uuid, profile.name, gi)
        memory = gpu.memory_bytes * profile.size // model.slots
        slices = int(profile.name.partition("g.")[0])
        made.append(MigDevice(index, uuid, profile.name, gi, 0, memory, MigSize(slices, slices)))
    return tuple(made)
