"""When sysfs is polled, and in which order the ledger is updated."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

from fixtures.amd import amd_machine
from gpunode.gpu.model import Inventory, Reading, Topology
from gpunode.host import Host
from gpunode.plugin.amd import AmdBackend
from gpunode.plugin.config.settings import HealthSettings, Settings
from tests.plugin.nodes import MemoryLog, eventually


def test_error_right_after_the_start_is_counted(tmp_path: Path) -> None:
    machine, stop = amd_machine(tmp_path, "mi210"), Event()
    counted: list[int | None] = []

    class Sink:
        """A pod that starts at once, and whose GPU fails at once."""

        def seen(self, inventory: Inventory, topology: Topology) -> None:
            machine.errors(0, 2)

        def readings(self, readings: list[Reading]) -> None:
            counted.append(readings[0].ecc_volatile)

    settings = Settings(vendor="amd", rediscover_seconds=0.05, health=HealthSettings(poll_seconds=0.1))
    backend = AmdBackend(Host(tmp_path, {}), settings, MemoryLog())
    running = Thread(target=backend.run, args=(Sink(), stop))
    running.start()
    try:
        assert eventually(lambda: 2 in counted)
    finally:
        stop.set()
        backend.hurry()
        running.join()
    assert counted[0] == 0
