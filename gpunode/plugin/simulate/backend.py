"""The backend of a simulated node: it plans, answers and places as NVIDIA's does, without any GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import Event

from gpunode.errors import GpunodeError
from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import Answer, ReportReceiver, ResourcePlan, Snapshot
from gpunode.plugin.nvidia.resources import plan
from gpunode.plugin.nvidia.response import answer
from gpunode.plugin.simulate.faults import Fault, FaultServer
from gpunode.plugin.simulate.node import SimulatedNode, on_machine

MARK = "GPUNODE_SIMULATED"
_TURN_SECONDS = 0.25
_LOOK_SECONDS = 1.0


class SimulatedBackend:
    """See `gpunode.plugin.model.Backend`. `UsageError` if `settings.simulate` describes no node."""

    def __init__(self, host: Host, settings: Settings, log: Log) -> None:
        self._host = host
        self._settings = settings
        self._log = log
        self._node = SimulatedNode(settings.simulate, host)
        self._reported = False
        self._next_look = math.inf

    @property
    def waiting(self) -> str:
        return "" if self._reported else self._node.driver_gone or "making the simulated GPUs"

    def run(self, sink: ReportReceiver, stop: Event) -> None:
        spec = self._settings.simulate
        self._log.warning("these GPUs are simulated", simulate=spec, gpus=len(self._node.inventory.gpus))
        self._report(sink)
        control = self._control(sink)
        next_reading = 0.0
        while not stop.is_set():
            now = self._host.monotonic()
            if now >= self._next_look:
                self._report(sink)
                self._next_look = math.inf
            if now >= next_reading:
                sink.readings(self._node.readings)
                next_reading = now + self._settings.health.poll_seconds
            if control is None:
                stop.wait(_TURN_SECONDS)
            else:
                control.serve(_TURN_SECONDS)
        if control is not None:
            control.close()

    def _control(self, sink: ReportReceiver) -> FaultServer | None:
        """None without a state directory, or if nothing can listen in it."""
        if not self._settings.state_dir:
            return None
        try:
            control = FaultServer(
                self._host, self._settings.state_dir, lambda fault: self._happens(sink, fault)
            )
        except GpunodeError as error:
            self._log.warning(
                "no faults can be injected", reason=error.message, hint=error.hint or "set --state-dir"
            )
            return None
        self._log.info("faults can be injected", socket=control.path)
        return control

    def _happens(self, sink: ReportReceiver, fault: Fault) -> None:
        events = self._node.apply(fault)
        self._log.info("injected", fault=fault.line)
        for event in events:
            sink.event(event)
        self._report(sink)
        sink.readings(self._node.readings)
        self._next_look = self._host.monotonic() + _LOOK_SECONDS  # each change is checked twice, as with NVML

    def _report(self, sink: ReportReceiver) -> None:
        self._reported = not self._node.driver_gone
        if self._reported:
            sink.seen(self._node.inventory, self._node.topology)
        else:
            sink.broken(self._node.driver_gone, True)

    def hurry(self) -> None:
        """Does nothing: events are reported at once."""

    def let_go(self) -> None:
        """Does nothing: no handle is kept open."""

    def plan(self, settings: Settings, inventory: Inventory) -> ResourcePlan:
        return plan(self._host, settings, on_machine(inventory, self._host))

    def prepare(self, settings: Settings, inventory: Inventory, plan: ResourcePlan) -> None:
        """No CDI specification, because it would name missing device nodes."""

    def answer(self, settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        """Only the variables: a container with a missing mount or device node doesn't start."""
        return Answer(envs={**answer(settings, snapshot, ids).envs, MARK: "1"})
