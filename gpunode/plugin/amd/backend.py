"""The AMD backend: sysfs tells (watch.py), resources.py plans; a container gets device nodes and nothing
else."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

from gpunode.gpu.model import Inventory, Topology
from gpunode.host import Host
from gpunode.plugin.amd.resources import plan
from gpunode.plugin.amd.watch import Watch
from gpunode.plugin.backend import Sink
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Answer, DeviceNode, Plan, Snapshot
from gpunode.plugin.placement.choose import prefer
from gpunode.plugin.requested import requested
from gpunode.plugin.settings import Settings

_MENDS = {
    "reset": "; reset it: amd-smi reset --gpureset -g {0}",
    "reboot": "; reboot the node",
    "replace": "; the GPU has to be replaced",
}


class AmdBackend:
    """See `gpunode.plugin.backend.Backend`."""

    def __init__(self, host: Host, settings: Settings, log: Log) -> None:
        self._watch = Watch(host, settings, log)

    @property
    def waiting(self) -> str:
        return self._watch.waiting

    def run(self, sink: Sink, stop: Event) -> None:
        self._watch.run(sink, stop)

    def hurry(self) -> None:
        self._watch.hurry()

    def let_go(self) -> None:
        """Nothing is held open."""

    def plan(self, settings: Settings, inventory: Inventory) -> Plan:
        return plan(settings, inventory)

    def prepare(self, settings: Settings, inventory: Inventory, plan: Plan) -> None:
        """Nothing: device nodes are all that a container needs."""

    def answer(self, settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        """/dev/kfd once, and each unit's /dev/dri nodes. `AllocationError` for what can't be met."""
        devices = requested(snapshot, ids, _MENDS)
        own = (path for device in devices for path in device.unit.paths)
        paths = dict.fromkeys((*snapshot.resource.common.nodes, *own))
        return Answer(nodes=tuple(DeviceNode(path, path) for path in paths))

    def prefer(
        self,
        settings: Settings,
        snapshot: Snapshot,
        topology: Topology,
        available: Sequence[str],
        must_include: Sequence[str],
        size: int,
    ) -> tuple[str, ...]:
        return prefer(settings, snapshot, topology, available, must_include, size, together=True)
