"""What a vendor brings, and what it tells: the two ends between which the ledger sits.

`Backend` is NVIDIA (nvidia/), AMD (amd/) or a simulated node (simulate/). Its `run` loop, in a thread of its
own, tells a `Sink` (the ledger) what it sees; the other methods are called by the ledger and the RPC
handlers, with values only, and must stay quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import TYPE_CHECKING, Protocol

from gpunode.gpu.model import Inventory, Reading, Topology
from gpunode.plugin.model import Answer, Plan, Snapshot
from gpunode.plugin.settings import Settings

if TYPE_CHECKING:
    from gpunode.gpu.events import GpuEvent


class Sink(Protocol):
    """Takes news from a backend, from any thread."""

    def seen(self, inventory: Inventory, topology: Topology) -> None:
        """The node's GPUs now: every one that is there, readable or not."""

    def readings(self, readings: Sequence[Reading]) -> None:
        """What the GPUs say of their own condition."""

    def event(self, event: GpuEvent) -> None:
        """A critical event."""

    def broken(self, reason: str, sure: bool) -> None:
        """The driver as a whole doesn't answer. Unless `sure` it may have been this node's bad moment."""


class Backend(Protocol):
    """One kind of GPU."""

    @property
    def waiting(self) -> str:
        """What is waited for, empty when GPUs are seen."""

    def run(self, sink: Sink, stop: Event) -> None:
        """Tell `sink` what is there and what happens to it, until `stop`."""

    def hurry(self) -> None:
        """Look again now."""

    def let_go(self) -> None:
        """Close the driver for a while, so that it can be unloaded; safe in a signal handler."""

    def plan(self, settings: Settings, inventory: Inventory) -> Plan:
        """What these GPUs are advertised as. `ConfigError` if the settings can't hold for this node."""

    def prepare(self, settings: Settings, inventory: Inventory, plan: Plan) -> None:
        """Make what containers will need (CDI specifications) before the plan is advertised."""

    def answer(self, settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        """What a container gets for these devices. `AllocationError` says why not."""

    def prefer(
        self,
        settings: Settings,
        snapshot: Snapshot,
        topology: Topology,
        available: Sequence[str],
        must_include: Sequence[str],
        size: int,
    ) -> tuple[str, ...]:
        """Which of the available devices a container should get: never an error."""
