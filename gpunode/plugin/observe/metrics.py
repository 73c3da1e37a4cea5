"""The metrics in Prometheus' formats. Imported only with `--listen`.

A collector over the service's own state and a registry of its own: nothing is registered process-wide.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from gpunode import __version__
from gpunode.daemons.pod_resources import Holding, list_pods
from gpunode.errors import GpunodeError
from gpunode.gpu.model import Gpu, Reading
from gpunode.plugin.config.settings import pod_resources_socket
from gpunode.plugin.logfmt import OnChange
from gpunode.plugin.model import KubeletDevice, Problem

if TYPE_CHECKING:
    from gpunode.gpu.nvml import GpuEvent
    from gpunode.plugin.kubelet.server import Call
    from gpunode.plugin.serve import PluginService


# The metrics that `--listen` serves: names, kinds, labels and meanings. docs/metrics.md explains them.
#
# Prometheus' conventions: base units (seconds, bytes, ratios of 0 to 1), counters end in ``_total``. A label
# called `resource` is an extended resource's name, `uuid` a physical GPU's.


class Family(NamedTuple):
    """One metric."""

    name: str
    labels: tuple[str, ...]
    text: str

    @property
    def kind(self) -> str:
        """gauge, counter or histogram, by the convention for names."""
        if self.name.endswith("_duration_seconds"):
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


_CONTAINER = ("namespace", "pod", "container", "make", "accelerator_id", "model")

FAMILIES = {
    family.name: family
    for family in (
        Family("gpunode_build_info", ("version", "vendor"), "Always 1: what is serving."),
        Family("gpunode_plugin_start_time_seconds", (), "When the plugin started."),
        Family("gpunode_plugin_ready", (), "1 if GPUs are seen and the kubelet watches all of them."),
        Family("gpunode_plugin_driver_up", (), "1 if the driver answers and shows GPUs."),
        Family(
            "gpunode_plugin_settings_applied",
            (),
            "0 if the GPUs seen last can't be advertised with these settings; the previous ones still are.",
        ),
        Family(
            "gpunode_plugin_config_last_reload_successful",
            (),
            "0 if the config file as it is now was refused; the last good one is in effect.",
        ),
        Family(
            "gpunode_plugin_config_last_reload_success_timestamp_seconds",
            (),
            "When the settings in effect were taken.",
        ),
        Family(
            "gpunode_plugin_devices",
            ("resource", "health", "reason"),
            "Devices reported to the kubelet; reason is the problem's code, empty for healthy ones.",
        ),
        Family("gpunode_plugin_left_out", (), "GPUs and partitions that are not advertised."),
        Family(
            "gpunode_plugin_watched",
            ("resource",),
            "1 if the kubelet's ListAndWatch stream is open since the last registration.",
        ),
        Family(
            "gpunode_plugin_registrations_total", ("resource",), "Registrations that the kubelet accepted."
        ),
        Family(
            "gpunode_plugin_rpcs_total",
            ("resource", "method", "code"),
            "Calls that were answered; a ListAndWatch counts when its stream has ended.",
        ),
        Family(
            "gpunode_plugin_rpc_duration_seconds",
            ("method",),
            "How long calls took in the plugin, streams left out.",
        ),
        Family(
            "gpunode_plugin_allocations_total",
            ("resource", "outcome"),
            "Allocate calls; outcome is ok, not-found, invalid, unhealthy or error.",
        ),
        Family("gpunode_plugin_allocated_devices_total", ("resource",), "Devices that were handed out."),
        Family(
            "gpunode_plugin_preference_fallbacks_total",
            ("resource",),
            "Preferences that came from the simple rule because the good one failed.",
        ),
        Family("gpunode_plugin_mps_up", ("resource",), "1 if the resource's MPS daemon serves it."),
        Family(
            "gpunode_plugin_events_total",
            ("uuid", "xid"),
            "Critical events of the driver; xid is its number, or ecc-double or ecc-single.",
        ),
        Family(
            "gpunode_plugin_pod_resources_up",
            (),
            "1 if the kubelet's PodResources answered; without it there are no gpunode_container_ metrics.",
        ),
        Family(
            "gpunode_gpu_info",
            ("gpu", "uuid", "model", "make", "pci", "numa"),
            "Always 1: a GPU of this node; gpu is its index.",
        ),
        Family("gpunode_gpu_healthy", ("uuid",), "0 if the GPU or a part of it has a problem."),
        Family(
            "gpunode_gpu_problem_since_timestamp_seconds",
            ("uuid", "reason", "mend"),
            "When a GPU's problem started (0: unknown), and its fix.",
        ),
        Family("gpunode_gpu_duty_cycle_ratio", ("uuid",), "How much of the time a kernel ran."),
        Family("gpunode_gpu_memory_total_bytes", ("uuid",), "The GPU's memory."),
        Family("gpunode_gpu_memory_used_bytes", ("uuid",), "Its memory in use."),
        Family(
            "gpunode_container_devices",
            ("namespace", "pod", "container", "resource"),
            "Devices that a container holds.",
        ),
        Family(
            "gpunode_container_gpu_shares",
            _CONTAINER,
            "Shares of a shared GPU that a container holds; its share of the usage is unknown.",
        ),
        Family(
            "gpunode_container_gpu_duty_cycle_ratio",
            _CONTAINER,
            "How much of the time a kernel ran on a GPU that a container holds alone.",
        ),
        Family(
            "gpunode_container_gpu_memory_total_bytes",
            _CONTAINER,
            "Memory of a GPU or partition that a container holds alone.",
        ),
        Family(
            "gpunode_container_gpu_memory_used_bytes",
            _CONTAINER,
            "Memory in use on a GPU or partition that a container holds alone.",
        ),
    )
}


class Sample(NamedTuple):
    """A value of the family `name`; labels in the family's order."""

    name: str
    labels: tuple[str, ...]
    value: float


# Counters since the start: calls of the kubelet and the GPUs' events.
#
# Plain numbers under one lock, because they are counted while a pod waits; the metrics are made of them when
# a scraper requests them.

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper ends of the latency histogram's buckets, seconds; one more bucket has what took longer."""
_MOST_EVENTS = 512  # kinds that are distinguished; a faulty driver may report any number
STREAM = "ListAndWatch"
_OUTCOMES = {
    "OK": "ok",
    "NOT_FOUND": "not-found",
    "INVALID_ARGUMENT": "invalid",
    "FAILED_PRECONDITION": "unhealthy",
}


class Counters:
    """Any thread may count and read.

    `calls` are by resource, method and gRPC code; allocated `devices` and `fallbacks` by resource; `events`
    by the GPU's UUID and the XID, or the event's kind where it isn't an XID. The histogram has by method how
    many calls fell into each of its `buckets` (not cumulated), and the sum of their `seconds`.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.buckets: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self.devices: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.events: Counter[tuple[str, str]] = Counter()

    def call(self, call: Call) -> None:
        """An RPC was answered. The duration of a stream isn't a latency."""
        with self._lock:
            self.calls[call.resource, call.method, call.code] += 1
            if call.method != STREAM:
                buckets = self.buckets.setdefault(call.method, [0] * (len(BOUNDS) + 1))
                buckets[bisect_left(BOUNDS, call.seconds)] += 1
                self.seconds[call.method] = self.seconds.get(call.method, 0.0) + call.seconds
            if call.method == "Allocate" and call.code == "OK":
                self.devices[call.resource] += call.devices
            if call.fallback:
                self.fallbacks[call.resource] += 1

    def event(self, event: GpuEvent) -> None:
        """A GPU reported something."""
        key = (event.uuid, str(event.xid) if event.xid is not None else event.kind)
        with self._lock:
            if key not in self.events and len(self.events) >= _MOST_EVENTS:
                key = ("", "other")
            self.events[key] += 1

    def samples(self, resources: Collection[str] = ()) -> list[Sample]:
        """Calls and events; the histogram is not among them.

        Counters of `resources` exist from the start, as 0: Prometheus' increase() doesn't see the step to the
        first value of a counter that didn't exist before.
        """
        with self._lock:
            return list(self._samples(resources))

    def _samples(self, resources: Collection[str]) -> Iterator[Sample]:
        outcomes = {(name, outcome): 0 for name in resources for outcome in (*_OUTCOMES.values(), "error")}
        for (resource, method, code), number in self.calls.items():
            yield Sample("gpunode_plugin_rpcs_total", (resource, method, code), number)
            if method == "Allocate":
                key = (resource, _OUTCOMES.get(code, "error"))
                outcomes[key] = outcomes.get(key, 0) + number
        for key, number in outcomes.items():
            yield Sample("gpunode_plugin_allocations_total", key, number)
        for resource, number in {**dict.fromkeys(resources, 0), **self.devices}.items():
            yield Sample("gpunode_plugin_allocated_devices_total", (resource,), number)
        for resource, number in {**dict.fromkeys(resources, 0), **self.fallbacks}.items():
            yield Sample("gpunode_plugin_preference_fallbacks_total", (resource,), number)
        for key, number in self.events.items():
            yield Sample("gpunode_plugin_events_total", key, number)

    def histogram(self) -> Metric:
        """Latencies by method."""
        family = FAMILIES["gpunode_plugin_rpc_duration_seconds"]
        histogram = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        bounds = [*map(str, BOUNDS), "+Inf"]
        with self._lock:
            for method, buckets in sorted(self.buckets.items()):
                cumulated = list(zip(bounds, accumulate(buckets), strict=True))
                histogram.add_metric([method], cumulated, self.seconds[method])
        return histogram


# The present values of the metrics in `FAMILIES`, gathered from the service, in no exposition format yet.
#
# Values that can't be attributed are left out: a shared GPU's use can't be assigned to one container, and
# NVML doesn't report the utilization of a MIG device.

_MOST_HOLDINGS = 4096  # a node runs a few hundred pods; more is a mistake or an attack


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
        counts: dict[tuple[str, str], int] = {("healthy", ""): 0}
        for device in snapshot.devices:
            key = ("unhealthy", device.problem.code) if device.problem else ("healthy", "")
            counts[key] = counts.get(key, 0) + 1
        for (health, reason), count in counts.items():
            yield Sample("gpunode_plugin_devices", (name, health, reason), count)
        if snapshot.resource.sharing == "mps":
            down = any(device.problem and device.problem.code == "mps" for device in snapshot.devices)
            yield Sample("gpunode_plugin_mps_up", (name,), not down)
    for name, link in service.links.items():
        yield Sample("gpunode_plugin_watched", (name,), link.watched)
        yield Sample("gpunode_plugin_registrations_total", (name,), link.registrations)


def _driver_gone(service: PluginService) -> bool:
    """Whether every GPU is unhealthy because its backend doesn't answer."""
    devices = [device for snapshot in service.snapshots.values() for device in snapshot.devices]
    return bool(devices) and all(device.problem and device.problem.code == "driver" for device in devices)


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
        gpu_problems = problems.get(uuid, {})
        if gpu.error and not gpu_problems:
            gpu_problems = {"unreadable": Problem("unreadable", gpu.error)}
        yield Sample("gpunode_gpu_healthy", (uuid,), not gpu_problems)
        for problem in gpu_problems.values():
            labels = (uuid, problem.code, problem.mend)
            yield Sample("gpunode_gpu_problem_since_timestamp_seconds", labels, problem.since)
        yield from _use_of_gpu(gpu, uuid, readings.get(gpu.uuid))


def _problems(service: PluginService) -> dict[str, dict[str, Problem]]:
    """By GPU and code; of one kind the oldest."""
    by_gpu: dict[str, dict[str, Problem]] = {}
    for snapshot in service.snapshots.values():
        for device in snapshot.devices:
            if device.problem:
                known = by_gpu.setdefault(device.unit.gpu, {}).setdefault(device.problem.code, device.problem)
                if device.problem.since < known.since:
                    by_gpu[device.unit.gpu][device.problem.code] = device.problem
    return by_gpu


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
    """Our resources in use by containers, and their utilization where a container has the GPU alone."""
    snapshots = service.snapshots
    readings = service.ledger.readings_now
    make = service.settings.vendor
    for holding in holdings[:_MOST_HOLDINGS]:
        if holding.resource not in snapshots:
            continue
        holder = (holding.namespace, holding.pod, holding.container)
        yield Sample("gpunode_container_devices", (*holder, holding.resource), len(holding.ids))
        shares: dict[str, tuple[KubeletDevice, int]] = {}
        for device in filter(None, map(snapshots[holding.resource].by_id.get, holding.ids)):
            unit = device.unit
            if device.id != unit.id:
                shares[unit.id] = (device, shares.get(unit.id, (device, 0))[1] + 1)
                continue
            yield from _use_of_device(device, (*holder, make, unit.id, unit.name), readings.get(unit.gpu))
        for device, count in shares.values():
            labels = (*holder, make, device.unit.id, device.unit.name)
            yield Sample("gpunode_container_gpu_shares", labels, count)


def _use_of_device(
    device: KubeletDevice, labels: tuple[str, ...], reading: Reading | None
) -> Iterator[Sample]:
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


_PODS_SECONDS = 5.0  # the kubelet is queried no more often, however many clients scrape
_ASK_SECONDS = 1.0


class Metrics(Collector):
    """The metrics of a service and its process, in the format that a scraper accepts.

    `configured` is when the present settings were taken, seconds since the epoch.
    """

    def __init__(self, service: PluginService) -> None:
        self._service = service
        self._counters = Counters()
        service.observers.append(self._counters.call)
        service.ledger.event_observers.append(self._counters.event)
        self._pods = Pods(service)
        self._started = self.configured = service.host.now()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def page(self, accept: str) -> tuple[str, bytes]:
        """Content type and text, by the request's Accept header."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)

    def collect(self) -> Iterator[Metric]:
        holdings = self._pods.holdings()
        samples = [
            *of_service(self._service, self._started, self.configured),
            *self._counters.samples(self._service.snapshots),
            *of_gpus(self._service),
            Sample("gpunode_plugin_pod_resources_up", (), holdings is not None),
            *of_containers(self._service, holdings or ()),
        ]
        yield from _families(samples)
        yield self._counters.histogram()


def _families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """In the order of `FAMILIES`; families without a sample are left out, and of duplicates the last one
    counts."""
    by_name: dict[str, dict[tuple[str, ...], float]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, {})[sample.labels] = float(sample.value)
    for name, family in FAMILIES.items():
        if name in by_name:
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(name, family.text, labels=family.labels)
            for labels, value in by_name[name].items():
                metric.add_metric(labels, value)
            yield metric


class Pods:
    """Allocations of containers; queried only on request and at most every few seconds."""

    def __init__(self, service: PluginService) -> None:
        self._service = service
        self._say = OnChange(service.log)
        self._lock = Lock()
        self._next = 0.0
        self._known: tuple[Holding, ...] | None = None

    def holdings(self) -> tuple[Holding, ...] | None:
        """None if the kubelet doesn't report it."""
        with self._lock:
            now = self._service.host.monotonic()
            if now >= self._next:
                self._known = self._query_holdings()
                self._next = self._service.host.monotonic() + _PODS_SECONDS
            return self._known

    def _query_holdings(self) -> tuple[Holding, ...] | None:
        settings = self._service.settings
        socket = pod_resources_socket(settings.kubelet_socket, settings.pod_resources_socket)
        try:
            holdings = list_pods(self._service.host, socket, _ASK_SECONDS)
        except GpunodeError as error:
            self._say.warning("no metrics per container", reason=error.message, hint=error.hint)
            return None
        self._say.reset()
        return holdings
