"""The metrics in Prometheus' formats. Imported only where `--listen` asks for them.

A collector over the service's own state and a registry of its own: nothing is registered process-wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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

from gpunode.daemons.pod_resources import Holding, list_pods
from gpunode.errors import GpunodeError
from gpunode.plugin.logfmt import OnChange
from gpunode.plugin.observe.counters import BOUNDS, Counters
from gpunode.plugin.observe.families import FAMILIES
from gpunode.plugin.observe.samples import Sample, of_containers, of_counts, of_gpus, of_service
from gpunode.plugin.observe.sockets import pod_resources_socket

if TYPE_CHECKING:
    from gpunode.plugin.serve import PluginService

_PODS_SECONDS = 5.0  # the kubelet is asked no more often, however many scrape
_ASK_SECONDS = 1.0


class Times(NamedTuple):
    """When the plugin started, and when its settings were taken; seconds since the epoch."""

    started: float
    configured: float


class Metrics:
    """Tells everything there is to tell, in the format that a scraper accepts."""

    def __init__(self, service: PluginService, counters: Counters, times: Callable[[], Times]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(ServiceCollector(service, counters, times))
        ProcessCollector(registry=self._registry)

    def page(self, accept: str) -> tuple[str, bytes]:
        """Content type and text, by the request's Accept header."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)


class ServiceCollector(Collector):
    """See families.py and samples.py."""

    def __init__(self, service: PluginService, counters: Counters, times: Callable[[], Times]) -> None:
        self._service = service
        self._counters = counters
        self._times = times
        self._pods = Pods(service)

    def collect(self) -> Iterator[Metric]:
        counts = self._counters.counts()
        holdings = self._pods.holdings()
        samples = [
            *of_service(self._service, *self._times()),
            *of_counts(counts, tuple(self._service.snapshots)),
            *of_gpus(self._service),
            Sample("gpunode_plugin_pod_resources_up", (), holdings is not None),
            *of_containers(self._service, holdings or ()),
        ]
        yield from _families(samples)
        family = FAMILIES["gpunode_plugin_rpc_duration_seconds"]
        histogram = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for method, latency in sorted(counts.latencies.items()):
            histogram.add_metric([method], list(_cumulated(latency.buckets)), latency.seconds)
        yield histogram


def _families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """In the order of families.py; one without a sample is left out, and of twins the last one counts."""
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


def _cumulated(buckets: Iterable[int]) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip([*map(str, BOUNDS), "+Inf"], buckets, strict=True):
        total += count
        yield bound, total


class Pods:
    """What containers hold, asked only when somebody wants to know and at most every few seconds."""

    def __init__(self, service: PluginService) -> None:
        self._service = service
        self._say = OnChange(service.log)
        self._lock = Lock()
        self._next = 0.0
        self._known: tuple[Holding, ...] | None = None

    def holdings(self) -> tuple[Holding, ...] | None:
        """None if the kubelet doesn't tell."""
        with self._lock:
            now = self._service.host.monotonic()
            if now >= self._next:
                self._known = self._ask()
                self._next = self._service.host.monotonic() + _PODS_SECONDS
            return self._known

    def _ask(self) -> tuple[Holding, ...] | None:
        settings = self._service.settings
        socket = pod_resources_socket(settings.kubelet_socket, settings.pod_resources_socket)
        try:
            found = list_pods(self._service.host, socket, _ASK_SECONDS)
        except GpunodeError as error:
            self._say.warning("no metrics per container", reason=error.message, hint=error.hint)
            return None
        self._say.reset()
        return found
