"""The child that keeps NVML open for the device plugin and reports changes, one JSON document per line.

``{"inventory": {...}, "topology": {...}}`` first, after a change, and once more some time after that, so that
the reader sees twice that a recovered GPU works; ``{"readings": [...]}`` of the GPUs whose reading has
changed; ``{"event": {...}}`` as it happens; ``{"watching": {...}}``, the GPUs that report events;
``{"beat": 1}`` when there was nothing else to report for a while.

It ends by itself with ``{"error": {"code": 18, "message": "..."}}`` when NVML fails as a whole, with
``{"again": "..."}`` when a new process must open NVML: the driver's traces have changed, and with
``{"stuck": "..."}`` when NVML doesn't return to the thread that waits for events. A line on its stdin makes
it read at once; the end of its stdin, or of its parent, ends it. The `child.Note` has the unanswered query
and its GPU, so that a hang or a crash can be attributed; the option `without` has the queries given up after
that.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Set
from contextlib import suppress
from itertools import combinations
from threading import Condition, Thread
from typing import NamedTuple

from gpunode.gpu.child import EVENTS, GPU, LINKS, Parent
from gpunode.gpu.driver_traces import driver_traces, generation
from gpunode.gpu.inventory import discover
from gpunode.gpu.model import GPU_IS_LOST, Inventory, Pair, Reading, Topology
from gpunode.gpu.nvml import (
    INVALID_ARGUMENT,
    MOST_LINKS,
    NOT_FOUND,
    NOT_SUPPORTED,
    EventSet,
    Handle,
    Nvml,
    NvmlError,
    sysfs_address,
)
from gpunode.gpu.nvml_health import read_gpu
from gpunode.host import Host
from gpunode.output.typed import from_plain, plain

# Topology: common ancestors, NVLinks and links to NVSwitches. A GPU that can't be queried only lacks its own
# pairs. Read again when the inventory has changed, because links change with GPUs and their drivers.

_NPU, _SWITCH = 1, 2  # nvmlIntNvLinkDeviceType_t; an NPU is a processor, not a GPU
_TO_SWITCH = "switch"  # in place of a GPU's address
_TOPOLOGY_SECONDS = 10.0
_NO_SUCH_LINK = (INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND)


def read_topology(
    nvml: Nvml,
    inventory: Inventory,
    skip: Collection[int] = (),
) -> Topology:
    """Pairs of all readable GPUs but those whose index is in `skip`, and their links to switches.

    Never raises for a GPU.

    What isn't read within ten seconds is left out, starting with the links: then only ancestors determine
    proximity.
    """
    until = time.monotonic() + _TOPOLOGY_SECONDS
    handles: dict[str, Handle] = {}
    for gpu in inventory.gpus:
        if gpu.uuid and not gpu.error and gpu.index not in skip:
            with suppress(NvmlError):  # lost since it was listed; the next inventory reports that
                handles[gpu.uuid] = nvml.handle(gpu.index)
    levels: dict[tuple[str, str], int | None] = dict.fromkeys(combinations(sorted(handles), 2))
    for first, second in levels:
        if time.monotonic() < until:
            with suppress(NvmlError):
                levels[first, second] = nvml.common_ancestor(handles[first], handles[second])
    pci = {gpu.uuid: gpu.pci for gpu in inventory.gpus}
    places = frozenset(gpu.pci for gpu in inventory.gpus if gpu.pci)  # lost ones too: they aren't switches
    links = {
        uuid: _links(nvml, handle, places) if time.monotonic() < until else Counter()
        for uuid, handle in handles.items()
    }
    pairs = tuple(
        Pair(a, b, level, min(links[a][pci[b]], links[b][pci[a]])) for (a, b), level in levels.items()
    )
    return Topology(pairs, {uuid: to[_TO_SWITCH] for uuid, to in links.items() if to[_TO_SWITCH]})


def _links(nvml: Nvml, gpu: Handle, places: Set[str]) -> Counter[str]:
    """Active links of one GPU to each PCI address of `places`, and to switches: addresses that can't be a GPU
    of this node. A GPU that fails meanwhile keeps no links: half of them would rank it wrongly."""
    links: Counter[str] = Counter()
    for link in range(MOST_LINKS):
        try:
            if int(nvml.call("nvmlDeviceGetNvLinkState", gpu, link)):
                links.update(_other_end(nvml, gpu, link, places))
        except NvmlError as error:
            if error.code == INVALID_ARGUMENT:
                break
            if error.code not in _NO_SUCH_LINK:
                return Counter()
    return links


def _other_end(nvml: Nvml, gpu: Handle, link: int, places: Set[str]) -> tuple[str, ...]:
    try:
        kind = int(nvml.call("nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link))
    except NvmlError:
        kind = -1  # drivers before 460 don't report it; the address decides
    if kind in (_NPU, _SWITCH):
        return (_TO_SWITCH,) if kind == _SWITCH else ()
    address = sysfs_address(nvml.call("nvmlDeviceGetNvLinkRemotePciInfo", gpu, link).busId)
    return (address if address in places else _TO_SWITCH,)


# The watcher's thread that waits for NVML's events and reports each when it occurs.

_WAIT_SECONDS = 5.0  # the maximum delay until it watches changed GPUs, which are looked for less often
_PAUSE_SECONDS = 0.5  # a lost GPU ends every wait at once
_LONGEST_PAUSE_SECONDS = 30.0
_RETRY_LOOKS = 10  # reads, after which a GPU that couldn't be watched is tried again

READ, LOOK = b"r", b"l"


class Listener:
    """Watches the GPUs that `watch` names. `wake_end` receives READ or LOOK to make the main thread do
    that."""

    def __init__(
        self, nvml: Nvml, tell: Callable[..., None], patience: float, skip: Collection[int] | None
    ) -> None:
        """`patience` is how many seconds NVML may take. GPUs whose index is in `skip` aren't watched; with
        None no GPU is."""
        self._patience = patience
        self._skip = skip
        self._nvml = nvml
        self._tell = tell
        self._changed = Condition()
        self._wanted: tuple[tuple[str, int], ...] = ()
        self._version = 0
        self._failed = False
        self._looks = 0
        self._reports: object = None
        self._alive = 0.0
        self.wake_end, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._thread = Thread(target=self._run, name="events", daemon=True)

    def watch(self, inventory: Inventory) -> None:
        """Watch every GPU that can be queried; another one would make every wait fail."""
        if self._skip is None:
            self._report({"count": 0, "unsupported": [], "failed": {}})
            return
        desired = tuple(
            (gpu.uuid, gpu.index)
            for gpu in inventory.gpus
            if gpu.uuid and not gpu.error and gpu.index not in self._skip
        )
        with self._changed:
            self._looks += 1
            if desired != self._wanted or (self._failed and self._looks >= _RETRY_LOOKS):
                self._wanted = desired
                self._version += 1
                self._looks = 0
                self._changed.notify_all()
        if self._thread.ident is None:
            self._alive = time.monotonic()
            self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the thread has died."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def stuck(self, now: float) -> bool:
        """Whether NVML has not returned to the thread within its time limit."""
        return self._thread.ident is not None and now > self._alive + self._patience + _WAIT_SECONDS

    def _run(self) -> None:
        events: EventSet | None = None
        version = errors = 0
        while True:
            self._alive = time.monotonic()
            try:
                if version != self._version:
                    version, fresh = self._version, self._open()
                    if events is not None:  # only now, so that no event is lost between the two
                        events.close()
                    events = fresh
                if events is None:
                    self._rest(_WAIT_SECONDS, version)
                    continue
                event = events.wait(_WAIT_SECONDS)
                errors = 0
            except NvmlError as error:
                if error.code != GPU_IS_LOST:
                    version = 0  # reopen the set
                    self._report({"error": str(error)})
                self._nudge(LOOK)
                errors += error.code != GPU_IS_LOST
                self._rest(min(_PAUSE_SECONDS * 2.0 ** min(errors, 10), _LONGEST_PAUSE_SECONDS), version)
                continue
            if event is not None:
                self._tell(event=plain(event))
                self._nudge(READ)

    def _open(self) -> EventSet | None:
        if not self._wanted:
            return None
        events = EventSet(self._nvml)
        for uuid, index in self._wanted:
            self._alive = time.monotonic()
            events.watch(uuid, index)
        self._failed = bool(events.failed)
        self._report(
            {
                "count": len(self._wanted) - len(events.unsupported) - len(events.failed),
                "unsupported": events.unsupported,
                "failed": {uuid: str(error) for uuid, error in events.failed.items()},
            }
        )
        return events

    def _report(self, state: dict[str, object]) -> None:
        """Report which GPUs are watched, once for each change."""
        if state != self._reports:
            self._reports = state
            self._tell(watching=state)

    def _rest(self, seconds: float, version: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, seconds)

    def _nudge(self, what: bytes) -> None:
        with suppress(BlockingIOError):  # the main thread has enough to read
            os.write(self._wake, what)


BEAT_SECONDS = 5.0
_TRACE_SECONDS = BEAT_SECONDS  # one wake-up for both
_BEAT_EARLY_SECONDS = 0.5  # a beat that is due this soon doesn't need another wake-up
_SECOND_LOOK_SECONDS = 2.0  # after a change: a recovered GPU must be seen twice
_LINK_LOOKS = 10  # reads of the inventory per read of the links: a failed link needn't change anything else
_EVENT_PAUSE_SECONDS = 1.0  # the minimum time between reads because of events
_STDIN = 0
_SKIPPED = "NVML hung or crashed when it was queried about this GPU"


class Options(NamedTuple):
    """`poll` and `rediscover`: seconds between readings and between reads of the inventory. `use`: also
    report utilisation and memory. `patience`: seconds that NVML may take. `without`: GPU, LINKS or EVENTS of
    the GPU with an index, or of all with None, for which NVML is not queried."""

    poll: float = 10.0
    rediscover: float = 30.0
    use: bool = False
    patience: float = 15.0
    without: tuple[tuple[str, int | None], ...] = ()

    def gpus_without(self, part: str) -> frozenset[int]:
        """The indices of the GPUs that aren't queried for their links, their events or anything at all."""
        return frozenset(index for name, index in self.without if name == part and index is not None)


class NvmlWatcher:
    """One open NVML. `run` returns when it must be reopened."""

    def __init__(self, nvml: Nvml, host: Host, options: Options, tell: Callable[..., None]) -> None:
        self._nvml = nvml
        self._host = host
        self._options = options
        self._tell = tell
        self._inventory: Inventory | None = None
        self._reports = 0
        self._reports_at = 0.0
        self._second_look = min(options.rediscover, _SECOND_LOOK_SECONDS)
        self._topology = Topology()
        self._readings: dict[str, Reading] = {}
        self._skip = dict.fromkeys(options.gpus_without(GPU), _SKIPPED)
        self._library = loaded_library()
        self._traces = driver_traces(host, self._library)
        self._generation = generation(host, nvml.driver_version())
        deaf = None if (EVENTS, None) in options.without else options.gpus_without(EVENTS)
        self.listener = Listener(nvml, tell, options.patience, deaf)
        self._due = dict.fromkeys(("look", "read", "traces", "links"), 0.0)
        self._done = dict(self._due)

    def turn(self, now: float) -> str:
        """Do what is due. Return why NVML must be reopened, "" if it need not."""
        if now >= self._due["traces"]:
            self._due["traces"] = now + _TRACE_SECONDS
            if driver_traces(self._host, self._library) != self._traces:
                return "the driver's traces in /proc and /sys have changed"
        if now >= self._due["look"]:
            self._done["look"] = now
            self.look(now)
            self._due["look"] = now + (self._options.rediscover if self._reports > 1 else self._second_look)
        if now >= self._due["read"]:
            self._done["read"] = now
            self._due["read"] = now + self._options.poll
            if self.read():
                self._due["look"] = now
                self._reports = 0  # a reader that marked that GPU as lost must see it twice
        if now >= self._due["links"]:
            self.look_at_links(now)
        return "the thread that waits for events has ended" if self.listener.ended else ""

    def hurry(self, *what: str, pause: float = 0.0) -> None:
        """Make a task due now, or `pause` seconds after its last run: a storm must not block the loop."""
        now = time.monotonic()
        for name in what:
            self._due[name] = min(self._due[name], max(now, self._done[name] + pause))

    def wait(self, now: float) -> float:
        """Seconds until something is due."""
        return max(0.0, min(self._due.values()) - now)

    def look(self, now: float) -> None:
        """The inventory, reported if it changed or was reported only once."""
        seen = discover(self._nvml, str(self._host.root), self._inventory, self._skip)
        changed = seen != self._inventory
        if changed:
            self._inventory, self._reports = seen, 0
            self._topology = self._links(seen)
            self._due["links"] = now + self._options.rediscover * _LINK_LOOKS
        self.listener.watch(seen)
        if not self._reports or (self._reports == 1 and now >= self._reports_at + self._second_look / 2):
            self._reports += 1
            self._reports_at = now
            self._tell(inventory=plain(seen), topology=plain(self._topology))
        if changed:
            self._due["read"] = 0.0

    def look_at_links(self, now: float) -> None:
        """The links between GPUs, reported if they changed; then read again soon, as it may be temporary."""
        assert self._inventory is not None  # `look` comes first
        links = self._links(self._inventory)
        changed = links != self._topology
        self._due["links"] = now + self._options.rediscover * (1 if changed else _LINK_LOOKS)
        if changed:
            self._topology = links
            self._tell(inventory=plain(self._inventory), topology=plain(links))

    def _links(self, inventory: Inventory) -> Topology:
        return read_topology(self._nvml, inventory, skip=self._options.gpus_without(LINKS))

    def read(self) -> bool:
        """All readings; reports those that changed. True if a GPU has failed or recovered."""
        now = self._read_all()
        changed = [reading for uuid, reading in now.items() if reading != self._readings.get(uuid)]
        failed = [uuid for uuid, reading in now.items() if reading.error]
        before = [uuid for uuid, reading in self._readings.items() if reading.error]
        self._readings = now
        if changed:
            self._tell(readings=[plain(reading) for reading in changed])
        return failed != before

    def _read_all(self) -> dict[str, Reading]:
        result = {}
        for gpu in self._inventory.gpus if self._inventory else ():
            if not gpu.uuid or gpu.index in self._skip:
                continue
            try:
                device = self._nvml.handle(gpu.index)
            except NvmlError as error:
                result[gpu.uuid] = Reading(
                    gpu.uuid, str(error), generation=self._generation, error_code=error.code
                )
                continue
            result[gpu.uuid] = read_gpu(
                self._nvml, device, gpu.uuid, use=self._options.use, generation=self._generation
            )
        return result


def loaded_library() -> str:
    """The file of NVML that this process has loaded, by its name at that time."""
    maps = Host().read_text("/proc/self/maps") or ""
    lines = (line for line in maps.splitlines() if "libnvidia-ml.so" in line)
    return next((line.split(maxsplit=5)[5] for line in lines), "")


def run(watcher: NvmlWatcher, parent: Parent) -> None:
    """Run until the parent ends, or NVML must be reopened."""
    wake = watcher.listener.wake_end
    while True:
        again = watcher.turn(time.monotonic())
        if again:
            parent.send(again=again)
            return
        if watcher.listener.stuck(time.monotonic()):
            parent.send(stuck="NVML does not return to the thread that waits for events")
            return
        if time.monotonic() - parent.last >= BEAT_SECONDS - _BEAT_EARLY_SECONDS:
            parent.send(beat=1)
        now = time.monotonic()
        limit = min(watcher.wait(now), max(0.0, parent.last + BEAT_SECONDS - now))
        ready, _, _ = select.select([_STDIN, wake], [], [], limit)
        if _STDIN in ready:
            if not os.read(_STDIN, 4096):
                return
            watcher.hurry("look", "read")
        if wake in ready:
            what = ("look", "read") if LOOK in os.read(wake, 4096) else ("read",)
            watcher.hurry(*what, pause=_EVENT_PAUSE_SECONDS)


def main() -> int:
    """Always 0, so that anything else means a crash."""
    parent = Parent()
    try:
        nvml = Nvml.for_parent(parent)
        run(NvmlWatcher(nvml, Host(), from_plain(Options, parent.options), parent.send), parent)
    except NvmlError as error:
        parent.send(error=error.document)
    except BrokenPipeError:
        pass  # the parent has ended
    sys.stdout.flush()
    os._exit(0)  # not nvmlShutdown: the listener may be inside NVML, and the kernel cleans up as well


if __name__ == "__main__":
    sys.exit(main())
