"""Device plugins against the limits of their speed: ours, and any other with the same client in the same run.

Each plugin runs on a stub of NVML with a kubelet stub. The calls to both, and the empty ones that
they are compared with, take turns, so that other load of the machine is shared. Exit 1 if ours misses a
limit.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

from fixtures.scenario import Event, Scenario, gpu_uuid, machine, with_nvswitch
from scripts.bench_plugin_process import OURS, Plugin

_ACROSS, _WITHIN, _SWITCH = 50, 40, 20  # nvmlGpuTopologyLevel_t
_XID = 79
_XID_SECONDS = 10.0
_SETTLE_SECONDS = 5.0
_SHARES = 128
_PEER_HELP = """how to start another plugin, for example
  --peer '/usr/bin/nvidia-device-plugin --kubelet-socket {kubelet_socket}'.
{socket_dir}, {kubelet_socket}, {config} (a config file of NVIDIA's format, empty where none is
needed) and {scratch} (a directory of its own) are filled in; KUBELET_SOCKET and CONFIG_FILE are
in its environment, as is the library path of the NVML stand-in. Its socket must appear in
{socket_dir}. NVIDIA's plugin always serves in /var/lib/kubelet/device-plugins: give it a mount
namespace, as docs/placement.md shows."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `unit` is x, ms or MiB; a limit of None is for information only."""

    what: str
    unit: str
    limit: float | None
    ours: float
    peer: float | None = None

    @property
    def kept(self) -> bool:
        return self.limit is None or self.ours <= self.limit


@dataclass(frozen=True)
class Measure:
    """How long to measure."""

    rounds: int = 400
    starts: int = 5
    idle_seconds: float = 10.0
    peer: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", metavar="COMMAND", default="", help=_PEER_HELP)
    parser.add_argument("--rounds", type=int, default=400, help="calls of each kind (400)")
    parser.add_argument("--starts", type=int, default=5, help="how often to start, with 8 XIDs each (5)")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="how long to watch it idle (10)")
    parser.add_argument("-o", dest="output", choices=("text", "json"), default="text")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # the plugins are ended on exit
    rows = measure(Measure(arguments.rounds, arguments.starts, arguments.idle_seconds, arguments.peer))
    kept = all(row.kept for row in rows)
    if arguments.output == "json":
        print(
            json.dumps({"kept": kept, "rows": [asdict(row) | {"kept": row.kept} for row in rows]}, indent=2)
        )
    else:
        _print(rows)
    return 0 if kept else 1


def measure(how: Measure) -> list[Row]:
    """Every row of the table."""
    with tempfile.TemporaryDirectory(prefix="gb-") as name:
        directory = Path(name)
        return [
            *_starts(how, directory / "s"),
            *_eight(how, directory / "8"),
            *_sixteen(how, directory / "16"),
            *_shares(how, directory / "r"),
        ]


# --- machines -------------------------------------------------------------------------------------------


def hgx(count: int) -> Scenario:
    """GPUs on NVSwitches, two sockets, two GPUs behind each PCIe switch."""
    scenario = with_nvswitch(machine(count))

    def level(a: int, b: int) -> int:
        return _SWITCH if a // 2 == b // 2 else _WITHIN if a * 2 // count == b * 2 // count else _ACROSS

    return replace(scenario, ancestors={(a, b): level(a, b) for a, b in combinations(range(count), 2)})


def shared(replicas: int) -> str:
    """A config file that shares every GPU so often."""
    return (
        "version: v1\nsharing:\n  timeSlicing:\n    resources:\n"
        f"    - name: nvidia.com/gpu\n      replicas: {replicas}\n"
    )


def _plugins(
    how: Measure, directory: Path, scenario: Scenario, ends: ExitStack, config: str = ""
) -> list[Plugin]:
    """Ours, and the peer if there is one; listed by their kubelets."""
    directory.mkdir()
    plugins = []
    for name, template in (("ours", OURS), ("peer", how.peer)):
        if template:
            plugins.append(Plugin(template, directory / name, scenario, config))
            ends.callback(plugins[-1].end)
    for plugin in plugins:
        plugin.wait_ready(len(scenario.gpus) * (_SHARES if config else 1))
    return plugins


# --- measurements ---------------------------------------------------------------------------------------


def _starts(how: Measure, directory: Path) -> list[Row]:
    """Start to Register, one plugin at a time, and from an XID to the stream."""
    directory.mkdir()
    starts: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    for number in range(how.starts + 1):
        for name, template in (("ours", OURS), ("peer", how.peer)):
            if not template:
                continue
            plugin = Plugin(template, directory / f"{name}{number}", hgx(8))
            try:
                plugin.wait_ready(8)
                if number:  # the first one only warms the files up
                    starts.setdefault(name, []).append(plugin.start_seconds)
                    late.setdefault(name, []).extend(_xids(plugin))
            finally:
                plugin.end()
    return [
        _row("start to registered, 8 GPUs, p50", "ms", 600, starts, _median),
        _row("XID to unhealthy on the stream, p99", "ms", 100, late, _p99),
    ]


def _xids(plugin: Plugin) -> list[float]:
    """Seconds for each GPU in turn. An XID that never arrives counts as the whole waiting time."""
    time.sleep(0.5)  # health watching begins after the list
    delays = []
    for index in range(8):
        uuid = gpu_uuid(index)
        injected = plugin.inject(plugin.scenario.with_event(Event(uuid, data=_XID)))
        seen = plugin.kubelet.wait_unhealthy(uuid, _XID_SECONDS)
        delays.append(_XID_SECONDS if seen is None else max(0.0, seen - injected))
        if seen is None:
            break
    return delays


def _eight(how: Measure, directory: Path) -> list[Row]:
    with ExitStack() as ends:
        plugins = _plugins(how, directory, hgx(8), ends)
        rows = _memory(plugins, "8 GPUs", 48)
        rows.append(_idle(plugins, how.idle_seconds))
        chance = random.Random(8)
        allocated: dict[str, list[float]] = {}
        empty: dict[str, list[float]] = {}
        for _ in range(how.rounds):
            ids = [gpu_uuid(chance.randrange(8))]
            for plugin in plugins:
                empty.setdefault(plugin.place.name, []).append(plugin.kubelet.empty())
                allocated.setdefault(plugin.place.name, []).append(plugin.kubelet.allocate(ids))
        ratio = {name: [_median(samples) / _median(empty[name])] for name, samples in allocated.items()}
        rows.append(Row("empty RPC, p50", "ms", None, *_each(empty, lambda samples: _median(samples) * 1000)))
        rows.append(Row("Allocate, p50, over the empty RPC", "x", 1.3, *_each(ratio, _median)))
        rows.append(
            _prefer(plugins, how.rounds, "8 GPUs, any size", 20, list(plugins[0].kubelet.seen.devices))
        )
    return rows


def _sixteen(how: Measure, directory: Path) -> list[Row]:
    with ExitStack() as ends:
        plugins = _plugins(how, directory, hgx(16), ends)
        ids = list(plugins[0].kubelet.seen.devices)
        return [_prefer(plugins, how.rounds, "16 GPUs with NVSwitch, any size", 20, ids)]


def _shares(how: Measure, directory: Path) -> list[Row]:
    with ExitStack() as ends:
        plugins = _plugins(how, directory, hgx(8), ends, shared(_SHARES))
        time.sleep(min(_SETTLE_SECONDS, how.idle_seconds))
        rows = _memory(plugins, "1024 shares", 52)
        ids = list(plugins[0].kubelet.seen.devices)
        rows.append(_prefer(plugins, how.rounds, "64 of 1024 shares", 20, ids, 64))
    return rows


def _prefer(
    plugins: Sequence[Plugin], rounds: int, what: str, limit: float, ids: Sequence[str], size: int = 0
) -> Row:
    """The 99th percentile minus that of the empty RPC. Without `size` each request has another size; the
    available devices, unordered as the kubelet sends them, are another part of all.
    """
    chance = random.Random(len(ids))
    durations: dict[str, list[float]] = {}
    empty: dict[str, list[float]] = {}
    for number in range(rounds):
        count = len(ids) if number % 2 else chance.randint(max(size, 2), len(ids))
        available = chance.sample(list(ids), count)
        request_size = size or chance.randint(1, count)
        must = chance.sample(available, 1) if number % 8 == 7 else []
        for plugin in plugins:
            name = plugin.place.name
            empty.setdefault(name, []).append(plugin.kubelet.empty())
            durations.setdefault(name, []).append(plugin.kubelet.prefer(available, must, request_size))
    over = {name: [max(0.0, _p99(samples) - _p99(empty[name]))] for name, samples in durations.items()}
    return _row(f"GetPreferredAllocation, {what}, p99 over the empty RPC's", "ms", limit, over, _median)


def _memory(plugins: Sequence[Plugin], what: str, limit: float) -> list[Row]:
    time.sleep(1.0)
    seen = {plugin.place.name: plugin.memory() for plugin in plugins}
    return [
        Row(
            f"resident memory, {what}",
            "MiB",
            limit,
            *_each({name: [process_memory.resident] for name, process_memory in seen.items()}, _median),
        ),
        Row(
            f"proportional memory of all processes, {what}",
            "MiB",
            None,
            *_each({name: [process_memory.tree] for name, process_memory in seen.items()}, _median),
        ),
    ]


def _idle(plugins: Sequence[Plugin], seconds: float) -> Row:
    """Processor time of all threads of all processes, counted for 10 s."""
    time.sleep(min(_SETTLE_SECONDS, seconds))
    before = [plugin.processor_seconds() for plugin in plugins]
    start = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - start
    used = {
        plugin.place.name: [(plugin.processor_seconds() - earlier) * 10 / took]
        for plugin, earlier in zip(plugins, before, strict=True)
    }
    return _row("processor time idle, per 10 s", "ms", 20, used, _median)


# --- the table ------------------------------------------------------------------------------------------


def _row(
    what: str,
    unit: str,
    limit: float | None,
    seconds: Mapping[str, Sequence[float]],
    pick: Callable[[Sequence[float]], float],
) -> Row:
    return Row(what, unit, limit, *_each(seconds, lambda samples: pick(samples) * 1000))


def _each(
    seen: Mapping[str, Sequence[float]], pick: Callable[[Sequence[float]], float]
) -> tuple[float, float | None]:
    return pick(seen["ours"]), pick(seen["peer"]) if "peer" in seen else None


def _median(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 2]


def _p99(samples: Sequence[float]) -> float:
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * 0.99))]


def _print(rows: Sequence[Row]) -> None:
    print(f"{'':82} {'limit':>9} {'ours':>9} {'peer':>9}")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:g} {row.unit}"
        peer = "" if row.peer is None else f"{row.peer:9.2f}"
        print(
            f"{row.what:82} {limit:>9} {row.ours:9.2f} {peer:>9} {row.unit:3}{'' if row.kept else '  OVER'}"
        )


if __name__ == "__main__":
    sys.exit(main())
