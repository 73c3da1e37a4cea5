"""What has happened since the start, counted: calls of the kubelet and the GPUs' events.

Plain numbers under one lock, as they are counted while a pod waits; the metrics are made of them when
somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING

from gpunode.dataclass import dataclass

if TYPE_CHECKING:
    from gpunode.gpu.events import GpuEvent
    from gpunode.plugin.kubelet.handlers import Call

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper ends of the latency histogram's buckets, seconds; one more bucket has what took longer."""
_MOST_EVENTS = 512  # kinds that are told apart; a confused driver may report any number
STREAM = "ListAndWatch"


@dataclass(frozen=True)
class Latency:
    """A histogram: how many calls fell into each bucket (not cumulated), and their seconds together."""

    buckets: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Counts:
    """`calls` by resource, method and gRPC code; `devices` handed out and `fallbacks` by resource.

    `events` are by the GPU's UUID and the XID, or the event's kind where it is none.
    """

    calls: Mapping[tuple[str, str, str], int]
    latencies: Mapping[str, Latency]
    devices: Mapping[str, int]
    fallbacks: Mapping[str, int]
    events: Mapping[tuple[str, str], int]


class Counters:
    """Any thread may count; `counts` is a copy."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._calls: dict[tuple[str, str, str], int] = {}
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        self._devices: dict[str, int] = {}
        self._fallbacks: dict[str, int] = {}
        self._events: dict[tuple[str, str], int] = {}

    def call(self, call: Call) -> None:
        """One RPC was answered. How long a stream lived is no latency."""
        key = (call.resource, call.method, call.code)
        with self._lock:
            self._calls[key] = self._calls.get(key, 0) + 1
            if call.method != STREAM:
                buckets = self._buckets.setdefault(call.method, [0] * (len(BOUNDS) + 1))
                buckets[bisect_left(BOUNDS, call.seconds)] += 1
                self._seconds[call.method] = self._seconds.get(call.method, 0.0) + call.seconds
            if call.method == "Allocate" and call.code == "OK":
                self._devices[call.resource] = self._devices.get(call.resource, 0) + call.devices
            if call.fallback:
                self._fallbacks[call.resource] = self._fallbacks.get(call.resource, 0) + 1

    def event(self, event: GpuEvent) -> None:
        """A GPU reported something."""
        key = (event.uuid, str(event.xid) if event.xid is not None else event.kind)
        with self._lock:
            if key not in self._events and len(self._events) >= _MOST_EVENTS:
                key = ("", "other")
            self._events[key] = self._events.get(key, 0) + 1

    def counts(self) -> Counts:
        with self._lock:
            return Counts(
                dict(self._calls),
                {
                    method: Latency(tuple(buckets), self._seconds[method])
                    for method, buckets in self._buckets.items()
                },
                dict(self._devices),
                dict(self._fallbacks),
                dict(self._events),
            )
