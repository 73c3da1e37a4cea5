"""Recorded nodes with GPUs, a log that keeps its lines, and a polling helper for the plugin's tests."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from gpunode.gpu.model import Gpu, Inventory
from gpunode.host import Host
from gpunode.output.typed import plain
from gpunode.plugin.background import BackgroundTask
from gpunode.plugin.ledger import Feed
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import KubeletDevice, Problem, Resource, Unit
from tests.waiting import eventually as eventually  # most tests of the plugin use both from here

RESOURCE = "nvidia.com/gpu"
DIRECTORY = "/var/lib/kubelet/device-plugins"


def uuid(index: int) -> str:
    return f"GPU-{index:08d}"


def gpu(index: int, numa: int | None = None, **more: str) -> Gpu:
    return Gpu(index, uuid(index), "NVIDIA H100 80GB HBM3", f"0000:{index:02x}:00.0", numa=numa, **more)  # type: ignore[arg-type]


def inventory(count: int = 8) -> Inventory:
    """Two sockets, as in most servers."""
    return Inventory("550.54.15", "12.4", tuple(gpu(index, index * 2 // count) for index in range(count)))


def resource(count: int = 8, name: str = RESOURCE, sick: Mapping[int, str] | None = None) -> Resource:
    """That many whole GPUs; `sick` maps an index to the reason."""
    devices = []
    for index in range(count):
        unit = Unit(uuid(index), uuid(index), str(index), numa=index * 2 // count)
        reason = (sick or {}).get(index)
        devices.append(KubeletDevice(unit.id, unit, Problem("xid-79", reason) if reason else None))
    return Resource(name, tuple(devices))


def feed(count: int = 8, sick: Mapping[int, str] | None = None) -> Feed:
    return Feed(resource(count, sick=sick))


def recorded_host(root: Path, count: int = 8, kind: type[Host] = Host) -> Host:
    """A node of `count` GPUs, as a recording in `root`."""
    (root / ".gpunode").mkdir()
    recording = {"nvml": {"inventory": plain(inventory(count))}}
    (root / ".gpunode/recording.json").write_text(json.dumps(recording))
    return kind(root, {})


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, dict[str, object]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname.lower(), record.getMessage(), vars(record)["fields"]))


class MemoryLog(Log):
    """Keeps the logged lines, as (level, message, fields)."""

    def __init__(self) -> None:
        handler = _Lines()
        super().__init__(handler)
        self.lines = handler.lines

    def messages(self, level: str = "") -> list[str]:
        return [message for kind, message, _ in list(self.lines) if level in ("", kind)]

    def text(self) -> str:
        """Every line, for the message of a failed assertion."""
        return "\n".join(map(str, list(self.lines)))

    def reasons(self) -> list[str]:
        return [str(fields["reason"]) for _, _, fields in list(self.lines) if "reason" in fields]


def texts(paths: Iterable[Path]) -> list[str]:
    """Contents of files in /proc, without those whose process or thread has ended meanwhile."""
    contents = []
    for path in paths:
        with suppress(OSError):
            contents.append(path.read_text())
    return contents


def content(path: Path) -> str:
    """The file's text, and nothing while the plugin has not written it yet: for use inside `eventually`."""
    return "".join(texts([path]))


def children(pid: int) -> list[int]:
    """The processes that any thread of this one has started, and that still run."""
    lists = texts(Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for listed in lists for child in listed.split()]


class AtOnce(BackgroundTask):
    """Work that is done when it is asked for."""

    def __init__(self) -> None:
        super().__init__("at once")

    def start(self, task: Callable[[], None]) -> None:
        task()
