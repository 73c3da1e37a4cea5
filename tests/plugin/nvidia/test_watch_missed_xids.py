"""XIDs that only the kernel's log has: a file replaces /dev/kmsg."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpunode.gpu.nvml import GpuEvent
from gpunode.host import Host
from gpunode.host.files import LogReader
from gpunode.plugin.nvidia.watch import MissedXids
from tests.plugin.nodes import MemoryLog, eventually, inventory, uuid
from tests.plugin.nvidia.test_watch_discovery import GOOD, SILENT, Node

WATCHING = json.dumps({"watching": {"count": 4, "unsupported": [], "failed": {}}})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    path = tmp_path / "dev/kmsg"
    path.write_text(line(79, 3))
    return path


def line(xid: int, gpu: int, more: str = "", prefix: str = "4,1,2,-") -> str:
    return f"{prefix};NVRM: Xid (PCI:0000:{gpu:02x}:00{more}): {xid}, pid=1, name=a, text\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def missed(root: Path) -> tuple[MissedXids, MemoryLog]:
    said = MemoryLog()
    made = MissedXids(Host(root, {}), said)
    made.open()
    return made, said


def test_only_xids_after_the_last_output_were_missed(tmp_path: Path, log: Path) -> None:
    made, _ = missed(tmp_path)
    append(log, line(119, 1))
    made.heard()
    append(
        log,
        line(94, 2, " GPU-I:05 GPU-CI:00") + line(94, 2, " GPU-I:05 GPU-CI:00") + line(48, 0, " GPU-I:09"),
    )
    assert made.take(inventory(4)) == [
        GpuEvent("xid", uuid(2), 94, 5, 0),
        GpuEvent("xid", uuid(0), 48, 9, None),
    ]
    assert made.take(inventory(4)) == []
    made.close()


@pytest.mark.parametrize(
    "text",
    [
        line(79, 1, prefix="12,1,2,-"),  # a program's message, by its facility
        line(79, 1).replace(";NVRM", ";comm: NVRM"),
        " " + line(79, 1),
        line(79, 77),
        line(79, 1).replace("PCI:0000", "PCI:0001"),
        "4,1,2,-;NVRM: Xid (PCI:0000:01:00): x, text\n",
        "\xff\0;;;\n",
    ],
)
def test_unrelated_log_lines_are_no_missed_xids(tmp_path: Path, log: Path, text: str) -> None:
    made, _ = missed(tmp_path)
    append(log, text)
    assert made.take(inventory(4)) == []
    made.close()


def test_reloaded_driver_clears_missed_xids(tmp_path: Path, log: Path) -> None:
    made, _ = missed(tmp_path)
    made.ended()
    append(log, line(79, 1))
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    assert made.take(inventory(4)) == []
    made.close()


def test_unreadable_log_is_reported_once_and_only_if_needed(tmp_path: Path) -> None:
    made, said = missed(tmp_path)
    assert (made.take(inventory(4)), said.lines) == ([], [])
    for _ in range(2):
        made.ended()
        assert made.take(inventory(4)) == []
    assert said.messages() == ["XIDs that occurred while NVML was reopened can't be read"]


def test_kernel_log_can_be_read() -> None:
    try:
        reader = LogReader(Path("/dev/kmsg"))
    except OSError as error:
        pytest.skip(f"/dev/kmsg: {error.strerror}")
    assert len(list(reader.news())) <= 20_000
    reader.close()


def test_xid_between_two_children_is_reported_first(tmp_path: Path, log: Path) -> None:
    crash = "crash"
    with Node(tmp_path, [GOOD, WATCHING, SILENT], [WATCHING, GOOD, SILENT]).running() as node:
        assert eventually(lambda: len(node.started) == 1 and len(node.sink.of("seen")) == 1)
        assert eventually(lambda: node.started[0][1].lines == [SILENT])
        assert node.sink.of("event") == []
        append(log, line(119, 1))
        node.started[0][1].lines[:] = [crash]
        assert eventually(lambda: node.sink.of("event") == [GpuEvent("xid", uuid(1), 119, None, None)])
    assert "XID while NVML was reopened" in node.log.messages("warning")
