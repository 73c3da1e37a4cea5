"""The present values of the metrics in families.py, gathered from the service, in no exposition format yet.

What can't be attributed isn't invented: a shared GPU's use is nobody's in particular, and NVML doesn't tell
how busy a MIG device is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from gpunode import __version__
from gpunode.daemons.pod_resources import Holding
from gpunode.gpu.model import Gpu, Reading
from gpunode.plugin.model import Device, Problem
from gpunode.plugin.observe.counters import Counts

if TYPE_CHECKING:
    from gpunode.plugin.serve import PluginService

_OUTCOMES = {
    "OK": "ok",
    "NOT_FOUND": "not-found",
    "INVALID_ARGUMENT": "invalid",
    "FAILED_PRECONDITION": "unhealthy",
}
_MOST_HOLDINGS = 4096  # a node runs a few hundred pods; what is above is a mistake or an attack


class Sample(NamedTuple):
    """A value of the family `name`; labels in the family's order."""

    name: str
    labels: tuple[str, ...]
    value: float


def of_service(service: PluginService, started: float, configured: float) -> Iterator[Sample]:
    """The plugin itself and what it advertises; since when it runs, and with these settings."""
    settings, ledger = service.settings, service.ledger
    yield Sample("gpunode_build_info", (__version__, settings.vendor), 1)
    yield Sample("gpunode_plugin_start_time_seconds", (), started)
    yield Sample("gpunode_plugin_ready", (), service.ready)
    yield Sample("gpunode_plugin_driver_up", (), not service.backend.waiting and not _driver_gone(service))
    yield Sample("gpunode_plugin_settings_applied", (), not ledger.trouble)
    yield Sample("gpunode_plugin_config_last_reload_successful", (), not ledger.config_trouble)
    yield Sample("gpunode_plugin_config_last_reload_success_timestamp_seconds", (), configured)
    yield Sample("gpunode_plugin_left_out", (), len(ledger.plan.left_out))
    for name, snapshot in service.snapshots.items():
        found: dict[tuple[str, str], int] = {("healthy", ""): 0}
        for device in snapshot.devices:
            key = ("unhealthy", device.problem.code) if device.problem else ("healthy", "")
            found[key] = found.get(key, 0) + 1
        for (health, reason), count in found.items():
            yield Sample("gpunode_plugin_devices", (name, health, reason), count)
        if snapshot.resource.sharing == "mps":
            down = any(device.problem and device.problem.code == "mps" for device in snapshot.devices)
            yield Sample("gpunode_plugin_mps_up", (name,), not down)
    for name, link in service.links.items():
        yield Sample("gpunode_plugin_watched", (name,), link.watched)
        yield Sample("gpunode_plugin_registrations_total", (name,), link.registrations)


def _driver_gone(service: PluginService) -> bool:
    """Whether every GPU is unhealthy because nobody answers for any of them."""
    devices = [device for snapshot in service.snapshots.values() for device in snapshot.devices]
    return bool(devices) and all(device.problem and device.problem.code == "driver" for device in devices)


def of_counts(counts: Counts, resources: Collection[str] = ()) -> Iterator[Sample]:
    """Calls and events; the histogram is not among them.

    What is counted of `resources` is there from the start, as 0: Prometheus' increase() doesn't see the step
    to the first value of a counter that wasn't there before.
    """
    outcomes = {(name, outcome): 0 for name in resources for outcome in (*_OUTCOMES.values(), "error")}
    for (resource, method, code), number in counts.calls.items():
        yield Sample("gpunode_plugin_rpcs_total", (resource, method, code), number)
        if method == "Allocate":
            key = (resource, _OUTCOMES.get(code, "error"))
            outcomes[key] = outcomes.get(key, 0) + number
    for key, number in outcomes.items():
        yield Sample("gpunode_plugin_allocations_total", key, number)
    for resource, number in {**dict.fromkeys(resources, 0), **counts.devices}.items():
        yield Sample("gpunode_plugin_allocated_devices_total", (resource,), number)
    for resource, number in {**dict.fromkeys(resources, 0), **counts.fallbacks}.items():
        yield Sample("gpunode_plugin_preference_fallbacks_total", (resource,), number)
    for key, number in counts.events.items():
        yield Sample("gpunode_plugin_events_total", key, number)


def of_gpus(service: PluginService) -> Iterator[Sample]:
    """Every GPU of the node, advertised or not."""
    inventory = service.ledger.inventory
    if inventory is None:
        return
    problems = _problems(service)
    readings = service.ledger.readings_now
    for gpu in inventory.gpus:
        uuid = gpu.uuid or gpu.pci
        numa = "" if gpu.numa is None else str(gpu.numa)
        make = service.settings.vendor
        yield Sample("gpunode_gpu_info", (str(gpu.index), uuid, gpu.name, make, gpu.pci, numa), 1)
        found = problems.get(uuid, {})
        if gpu.error and not found:
            found = {"unreadable": Problem("unreadable", gpu.error)}
        yield Sample("gpunode_gpu_healthy", (uuid,), not found)
        for problem in found.values():
            labels = (uuid, problem.code, problem.mend)
            yield Sample("gpunode_gpu_problem_since_timestamp_seconds", labels, problem.since)
        yield from _use_of_gpu(gpu, uuid, readings.get(gpu.uuid))


def _problems(service: PluginService) -> dict[str, dict[str, Problem]]:
    """By GPU and code; the oldest of a kind."""
    found: dict[str, dict[str, Problem]] = {}
    for snapshot in service.snapshots.values():
        for device in snapshot.devices:
            if device.problem:
                known = found.setdefault(device.unit.gpu, {}).setdefault(device.problem.code, device.problem)
                if device.problem.since < known.since:
                    found[device.unit.gpu][device.problem.code] = device.problem
    return found


def _use_of_gpu(gpu: Gpu, uuid: str, reading: Reading | None) -> Iterator[Sample]:
    if gpu.memory_bytes:
        yield Sample("gpunode_gpu_memory_total_bytes", (uuid,), gpu.memory_bytes)
    if reading is None or reading.error:
        return
    if reading.busy_percent is not None:
        yield Sample("gpunode_gpu_duty_cycle_ratio", (uuid,), reading.busy_percent / 100)
    if reading.memory_used_bytes is not None:
        yield Sample("gpunode_gpu_memory_used_bytes", (uuid,), reading.memory_used_bytes)


def of_containers(service: PluginService, holdings: tuple[Holding, ...]) -> Iterator[Sample]:
    """What containers hold of our resources, and its use where it is theirs alone."""
    snapshots = service.snapshots
    readings = service.ledger.readings_now
    make = service.settings.vendor
    for one in holdings[:_MOST_HOLDINGS]:
        if one.resource not in snapshots:
            continue
        who = (one.namespace, one.pod, one.container)
        yield Sample("gpunode_container_devices", (*who, one.resource), len(one.ids))
        shares: dict[str, tuple[Device, int]] = {}
        for device in filter(None, map(snapshots[one.resource].find, one.ids)):
            unit = device.unit
            if device.id != unit.id:
                shares[unit.id] = (device, shares.get(unit.id, (device, 0))[1] + 1)
                continue
            yield from _use_of_device(device, (*who, make, unit.id, unit.name), readings.get(unit.gpu))
        for device, count in shares.values():
            labels = (*who, make, device.unit.id, device.unit.name)
            yield Sample("gpunode_container_gpu_shares", labels, count)


def _use_of_device(device: Device, labels: tuple[str, ...], reading: Reading | None) -> Iterator[Sample]:
    unit = device.unit
    if unit.memory_bytes:
        yield Sample("gpunode_container_gpu_memory_total_bytes", labels, unit.memory_bytes)
    if reading is None or reading.error:
        return
    used = reading.parts_used_bytes.get(unit.id) if unit.partition else reading.memory_used_bytes
    if reading.busy_percent is not None and not unit.partition:
        yield Sample("gpunode_container_gpu_duty_cycle_ratio", labels, reading.busy_percent / 100)
    if used is not None:
        yield Sample("gpunode_container_gpu_memory_used_bytes", labels, used)
