"""Names of MIG devices as configurations write them, ``[Cc.]Gg.Mgb[+attr,...|-attr,...]``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpunode.dataclass import dataclass

_NAME = re.compile(r"(?:([1-9]\d?)c\.)?([1-9]\d?)g\.(\d{1,4})gb(?:([+-])(.+))?", re.ASCII)
_ATTRIBUTE = re.compile(r"[a-z](?:[a-z0-9.]*[a-z0-9])?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class DeviceName:
    """A MIG device: `compute` of the `slices` compute slices of the GPU instance `instance`.

    `added` and `removed` are the attributes of the instance's profile: ``+me,gfx`` or ``-me``.
    """

    compute: int
    slices: int
    gigabytes: int
    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()

    @property
    def instance(self) -> str:
        """The GPU instance's name, its attributes in the alphabet's order."""
        sign = "+" if self.added else "-" if self.removed else ""
        return f"{self.slices}g.{self.gigabytes}gb{sign}{','.join(sorted(self.added or self.removed))}"

    @property
    def text(self) -> str:
        """The name with nothing in it that goes without saying: ``3g.20gb``, ``1c.3g.20gb``."""
        return self.instance if self.compute == self.slices else f"{self.compute}c.{self.instance}"


def parse_name(text: str) -> DeviceName | None:
    """What a name means, None if it isn't one. Whether a GPU offers it is another question."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    compute, slices, gigabytes, sign, attributes = found.groups()
    names = attributes.split(",") if attributes else []
    if len(set(names)) < len(names) or not all(_ATTRIBUTE.fullmatch(name) for name in names):
        return None
    size = int(slices)
    parts = int(compute) if compute else size
    if parts > size:
        return None
    added = frozenset(names) if sign == "+" else frozenset()
    removed = frozenset(names) if sign == "-" else frozenset()
    return DeviceName(parts, size, int(gigabytes), added, removed)


def same_profile(wanted: DeviceName, offered: Iterable[str]) -> bool:
    """Whether one of the names that a GPU has for a profile means the wanted GPU instance."""
    for name in offered:
        known = parse_name(name)
        if name == wanted.instance or (known is not None and known.instance == wanted.instance):
            return True
    return False
