"""NVIDIA's XIDs: what each means, and what brings a GPU back after it.

After the XID catalogue in NVIDIA's "Xid Errors" (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors
with the Xid Catalog", October 2025: Ampere and newer), whose resolution buckets became classes:

- RESTART_APP -> application; RESTART_APP of a contained memory error -> restart-app; IGNORE -> ignore
- RESET_GPU -> reset; RESTART_BM and RESTART_VM -> reboot; CHECK_MECHANICALS -> hardware
- CONTACT_SUPPORT, the workflows, UPDATE_SWFW, CHECK_UVM and none -> by-driver: the driver's recovery action
  decides, as NVIDIA asks for. The codes that newer GPUs don't use have their older meaning.

The codes are in tables/xids.json. Differences to NVIDIA's device plugin, which counts every XID but 13, 31,
43, 45, 68 and 109, are told in docs/health.md.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType

from gpunode.dataclass import dataclass
from gpunode.tables import table

APPLICATION, IGNORE, RESTART_APP = "application", "ignore", "restart-app"
BY_DRIVER, RESET, REBOOT, HARDWARE = "by-driver", "reset", "reboot", "hardware"

NOT_COUNTED = frozenset({109})
"""Beside application and ignore. 109 needs a reset by the catalogue, but mostly a program has caused it and
NVIDIA's plugin ignores it; where the driver does ask for a reset, the recovery action tells."""

_ALL_INSTANCES = "*"


@dataclass(frozen=True)
class Xid:
    """One code. With `whole` it concerns the GPU, whichever MIG instance was told with it."""

    number: int
    meaning: str
    kind: str
    whole: bool = False

    @property
    def counts(self) -> bool:
        """Whether it makes a device unhealthy unless the settings say otherwise."""
        return self.kind not in (APPLICATION, IGNORE) and self.number not in NOT_COUNTED

    @property
    def text(self) -> str:
        """For people: ``XID 79: the GPU has fallen off the bus``."""
        return f"XID {self.number}: {self.meaning}" if self.meaning else f"XID {self.number}"


def xid(number: int) -> Xid:
    """The code as catalogued; one that isn't counts, and the driver decides when it is over."""
    return catalogue().get(number) or Xid(number, "", BY_DRIVER)


@cache
def catalogue() -> MappingProxyType[int, Xid]:
    """Every documented code."""
    found = {}
    for number, kind, meaning in table("xids").rows:
        name = kind.removesuffix(_ALL_INSTANCES)
        found[number] = Xid(number, meaning, name, kind != name)
    return MappingProxyType(found)
