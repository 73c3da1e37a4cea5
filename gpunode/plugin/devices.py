"""The resource table: what is advertised, and whether it is healthy. Discovery and health events feed it.

Two things make a GPU unhealthy, and they heal differently:

- An *event*: an XID that is no application fault, a double-bit ECC error. The hardware or the driver's
  state is in doubt although NVML may answer as if nothing had happened, so this stays until the plugin is
  started again.
- A *failed sighting*: rediscovery can't describe the GPU, doesn't list it any more, or NVML as a whole is
  broken. This heals when the GPU was seen whole twice running, so that a GPU that comes and goes does not
  flap.

A GPU in MIG mode is sound and still no whole GPU: CUDA runs on its MIG devices only. It stays in the list,
unhealthy with that reason, so that the node shows that it has one and no pod gets it; this heals as soon as
MIG mode is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Condition

from gpunode.gpu.model import Gpu, Inventory

SIGHTINGS_TO_HEAL = 2
_DISPLAY_ONLY = {"DGX Display", "NVIDIA DGX Display"}  # drives a monitor, runs no CUDA


@dataclass(frozen=True)
class Device:
    """One advertised GPU. `id` is its UUID; `numa` is None if the platform doesn't say.

    `event`, `missing` and `mode` say why it is unhealthy, empty if they don't make it so. `seen` counts whole
    sightings since the last failed one.
    """

    id: str
    index: int
    numa: int | None = None
    name: str = ""
    pci: str = ""
    event: str = ""
    missing: str = ""
    mode: str = ""
    seen: int = 0

    @property
    def healthy(self) -> bool:
        return not self.problem

    @property
    def problem(self) -> str:
        """Why the kubelet must not hand it out; empty for a healthy one."""
        return self.event or self.missing or self.mode


@dataclass(frozen=True)
class HealthChange:
    """One device's turn for the worse or the better; `problem` is empty when it healed."""

    device: Device
    problem: str


@dataclass(frozen=True)
class Snapshot:
    """The table at one moment, ordered by index. `version` grows with every visible change."""

    version: int
    devices: tuple[Device, ...]

    def find(self, device_id: str) -> Device | None:
        return next((device for device in self.devices if device.id == device_id), None)


class DeviceTable:
    """Thread-safe. Every visible change wakes all who wait in `wait_newer`."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._snapshot = Snapshot(0, ())

    def snapshot(self) -> Snapshot:
        return self._snapshot  # one reference, replaced as a whole

    def wait_newer(self, version: int, wanted: Callable[[], bool]) -> Snapshot | None:
        """Block until there is something newer than `version`; None once `wanted` says no (see `wake`)."""
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot.version > version or not wanted())
            return self._snapshot if wanted() else None

    def wake(self) -> None:
        """Let every waiter ask its `wanted` again."""
        with self._changed:
            self._changed.notify_all()

    def sighting(self, inventory: Inventory) -> tuple[HealthChange, ...]:
        """Take over what rediscovery saw: new GPUs are added, known ones fail or heal, none is dropped."""
        return self._change(lambda devices: _after_sighting(devices, inventory))

    def all_missing(self, reason: str) -> tuple[HealthChange, ...]:
        """NVML as a whole is broken: nothing new can run on any GPU until it answers again."""
        return self._change(lambda devices: tuple(_lost(device, reason) for device in devices))

    def event(self, device_id: str, reason: str) -> tuple[HealthChange, ...]:
        """Mark exactly one GPU; the first reason is kept. An unknown id changes nothing."""
        return self._change(
            lambda devices: tuple(
                replace(device, event=device.event or reason) if device.id == device_id else device
                for device in devices
            )
        )

    def _change(self, step: Callable[[tuple[Device, ...]], tuple[Device, ...]]) -> tuple[HealthChange, ...]:
        with self._changed:
            before = {device.id: device for device in self._snapshot.devices}
            after = tuple(sorted(step(self._snapshot.devices), key=lambda device: (device.index, device.id)))
            changes = tuple(
                HealthChange(device, device.problem)
                for device in after
                if device.problem != (before[device.id].problem if device.id in before else "")
            )
            visible = [(device.id, device.healthy, device.numa) for device in after] != [
                (device.id, device.healthy, device.numa) for device in self._snapshot.devices
            ]
            self._snapshot = Snapshot(self._snapshot.version + visible, after)
            if visible:
                self._changed.notify_all()
            return changes


def _after_sighting(devices: tuple[Device, ...], inventory: Inventory) -> tuple[Device, ...]:
    seen = {gpu.uuid: gpu for gpu in reversed(inventory.gpus) if gpu.uuid and gpu.name not in _DISPLAY_ONLY}
    errors = {gpu.pci: gpu.error for gpu in inventory.gpus if gpu.error and gpu.pci}
    known = {device.id for device in devices}
    return (
        *(_again(device, seen.get(device.id), errors.get(device.pci, "")) for device in devices),
        *(_first(gpu) for uuid, gpu in seen.items() if uuid not in known),
    )


def _first(gpu: Gpu) -> Device:
    whole = 0 if gpu.error else SIGHTINGS_TO_HEAL
    return Device(
        gpu.uuid, gpu.index, gpu.numa, gpu.name, gpu.pci, missing=gpu.error, mode=_mode(gpu), seen=whole
    )


def _again(device: Device, gpu: Gpu | None, error_at_its_address: str) -> Device:
    """A GPU off the bus may be listed without its UUID; its PCI address still tells which it was."""
    if gpu is None:
        return _lost(device, error_at_its_address or "lost: NVML does not list it any more")
    if gpu.error:
        return _lost(device, gpu.error)
    seen = min(device.seen + 1, SIGHTINGS_TO_HEAL)
    missing = "" if seen == SIGHTINGS_TO_HEAL else device.missing
    return replace(
        device,
        index=gpu.index,
        numa=gpu.numa,
        name=gpu.name,
        pci=gpu.pci,
        seen=seen,
        missing=missing,
        mode=_mode(gpu),
    )


def _mode(gpu: Gpu) -> str:
    return f"MIG mode is on: no container can use GPU {gpu.index} as a whole" if gpu.mig_enabled else ""


def _lost(device: Device, reason: str) -> Device:
    return replace(device, missing=reason, seen=0)
