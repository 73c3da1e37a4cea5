"""Health memory: the state known to a restarted plugin, and files that must not stop it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.host import Host
from gpunode.plugin.health import HealthMemory
from gpunode.plugin.health_marks import Mark
from tests.files import write
from tests.plugin.nodes import MemoryLog, uuid

MARK = Mark(uuid(1), "xid-119", "XID 119", "reset", 5.0, 6.0, gi=3, generation="a/1/550", ecc=2)
HARDWARE = Mark(uuid(2), "xid-54", "XID 54", "hardware", 5.0, 6.0)
STATE = "/var/lib/gpunode/plugin"


class Node:
    def __init__(self, root: Path, boot: str = "boot-1") -> None:
        self.root = root
        self.file = root / STATE.lstrip("/") / "health.json"
        self.boot(boot)

    def boot(self, boot: str) -> None:
        write(self.root, "/proc/sys/kernel/random/boot_id", boot + "\n")

    def memory(self) -> tuple[HealthMemory, MemoryLog]:
        log = MemoryLog()
        return HealthMemory(Host(self.root, {}), STATE, log), log

    def remember(self, *marks: Mark) -> None:
        memory, _ = self.memory()
        memory.source = lambda: marks
        memory.close()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_written_memory_is_read_again(node: Node) -> None:
    node.remember(MARK, HARDWARE)
    assert node.file.stat().st_mode & 0o777 == 0o644
    memory, log = node.memory()
    assert memory.load() == (MARK, HARDWARE)
    assert log.messages() == ["health memory read"]


def test_reboot_counts_as_a_reset_of_every_gpu(node: Node) -> None:
    node.remember(MARK, HARDWARE)
    node.boot("boot-2")
    memory, _ = node.memory()
    assert memory.load() == (HARDWARE,)


def test_missing_file_is_not_logged_and_nothing_is_written(node: Node) -> None:
    memory, log = node.memory()
    assert memory.load() == ()
    memory.tick(0.0)
    memory.close()
    assert (log.lines, node.file.exists()) == ([], False)


def test_file_is_written_only_on_changes(node: Node) -> None:
    memory, _ = node.memory()
    marks = [MARK]
    memory.source = lambda: tuple(marks)
    memory.tick(10.0)
    first = node.file.stat().st_mtime_ns, node.file.stat().st_ino
    memory.tick(20.0)
    assert (node.file.stat().st_mtime_ns, node.file.stat().st_ino) == first
    marks.append(HARDWARE)
    memory.tick(20.0)
    marks.clear()
    memory.tick(20.1)  # a storm of events is not a storm of writes
    assert len(json.loads(node.file.read_text())["marks"]) == 2
    memory.tick(23.0)
    assert json.loads(node.file.read_text())["marks"] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2, "bootId": "", "marks": []}',
        '{"version": 1, "bootId": "", "marks": [{"gpu": "GPU-1"}]}',
        '{"version": 1, "bootId": "", "marks": [{"surprise": 1}]}',
        '{"version": 1, "bootId": "", "marks": 5}',
        "[" * 100_000,
        '{"version": 1, "bootId": "", "marks": []}' + " " * (1 << 20),
    ],
    ids=["empty", "cut", "list", "null", "future", "short", "foreign", "number", "deep", "large"],
)
def test_invalid_file_is_renamed_and_logged(node: Node, text: str) -> None:
    node.file.parent.mkdir(parents=True)
    node.file.write_text(text)
    memory, log = node.memory()
    assert memory.load() == ()
    assert log.messages() == ["health memory is invalid and was renamed"]
    assert node.file.with_name("health.json.broken").read_text() == text
    assert not node.file.exists()


@given(
    field=st.sampled_from(["gpu", "code", "reason", "kind", "since", "gi", "ecc", "mended"]),
    value=st.none() | st.booleans() | st.lists(st.integers()) | st.dictionaries(st.text(), st.none()),
)
def test_mark_with_wrong_types_is_dropped(
    tmp_path_factory: pytest.TempPathFactory, field: str, value: object
) -> None:
    node = Node(tmp_path_factory.mktemp("memory"))
    node.remember(MARK)
    document = json.loads(node.file.read_text())
    document["marks"][0][field] = value
    node.file.write_text(json.dumps(document))
    memory, _ = node.memory()
    fits = value is None and field in ("gi", "ecc")
    assert bool(memory.load()) is fits


@pytest.mark.parametrize("when", ["NaN", "Infinity", "-Infinity"])
def test_mark_with_an_invalid_time_is_dropped(node: Node, when: str) -> None:
    node.remember(MARK)
    node.file.write_text(node.file.read_text().replace('"last": 6.0', f'"last": {when}'))
    memory, log = node.memory()
    assert memory.load() == ()
    assert log.messages() == ["health memory is invalid and was renamed"]


def test_marks_in_the_future_count_as_new(node: Node) -> None:
    node.remember(replace(MARK, since=9e12, last=9e12, mended=9e12))
    memory, _ = node.memory()
    (mark,) = memory.load()
    assert max(mark.since, mark.last, mark.mended) <= time.time()


def test_failed_write_is_retried(node: Node) -> None:
    (node.root / "var").write_text("a file")
    memory, log = node.memory()
    memory.source = lambda: (MARK,)
    memory.tick(10.0)
    (node.root / "var").unlink()
    memory.tick(20.0)
    assert not node.file.exists()
    memory.tick(41.0)
    assert len(json.loads(node.file.read_text())["marks"]) == 1
    assert len(log.lines) == 1


@pytest.mark.parametrize("kind", ["fifo", "directory", "dangling", "loop"])
def test_plugin_starts_whatever_is_in_place_of_the_file(node: Node, kind: str) -> None:
    node.file.parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(node.file)
    elif kind == "directory":
        node.file.mkdir()
    else:
        node.file.symlink_to("nowhere" if kind == "dangling" else node.file.name)
    memory, log = node.memory()
    assert memory.load() == ()
    memory.source = lambda: (MARK,)
    for now in (10.0, 50.0, 90.0):
        memory.tick(now)
    memory.close()
    assert len(log.messages("warning")) <= 2


def test_unwritable_directory_is_logged_once(node: Node) -> None:
    (node.root / "var").write_text("a file")
    memory, log = node.memory()
    memory.source = lambda: (MARK,)
    memory.tick(10.0)
    memory.source = lambda: (MARK, HARDWARE)
    memory.tick(20.0)
    assert log.messages() == ["health memory can't be written: it is lost when the plugin restarts"]
