"""The status file: rewritten after a failed write, and whether its writer is alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from gpunode.facts.processes import start_ticks
from gpunode.host import Host
from gpunode.plugin.compose import make_service
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.kubelet.link import Link
from gpunode.plugin.ledger import Feed
from gpunode.plugin.observe.status_file import StatusFile, read_own_status
from gpunode.plugin.serve import PluginService
from tests.plugin.fakes import FakeBackend, FakeChecker
from tests.plugin.nodes import MemoryLog, content, eventually, recorded_host
from tests.waiting import PATIENCE


def test_zombie_process_is_not_alive() -> None:
    host = Host()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert start_ticks(host, child.pid) is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{child.pid}").exists()
        assert eventually(lambda: start_ticks(host, child.pid) is None)
    finally:
        child.communicate()
    assert start_ticks(host, child.pid) is None


def test_failed_write_is_retried_without_changes(tmp_path: Path) -> None:
    blocked = tmp_path / "state"
    blocked.write_text("no directory")
    log = MemoryLog()
    status = StatusFile(make_service(recorded_host(tmp_path), Settings(state_dir="/state"), log))
    status.tick(100.0)
    assert eventually(
        lambda: (
            log.messages("warning") == ["the status file can't be written: plugin status shows no reasons"]
        )
    )
    blocked.unlink()
    status.tick(110.0)
    assert not blocked.exists()

    def written() -> bool:
        status.tick(131.0)  # again, as the failed task may not have ended yet
        return (blocked / "status.json").exists()

    assert eventually(written)
    assert len(log.messages("warning")) == 1


def test_change_within_a_second_of_a_write_is_written_later(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    service = make_service(recorded_host(tmp_path), Settings(state_dir="/state"), MemoryLog())
    status = StatusFile(service)
    assert status.tick(100.0) is None
    assert eventually((tmp_path / "state/status.json").exists)
    assert status.tick(100.2) is None
    service.ledger.config_trouble = "a bad edit"
    assert status.tick(100.4) == pytest.approx(0.6)

    def is_written() -> bool:
        status.tick(101.1)  # again, as the earlier task may not have ended yet
        return "a bad edit" in content(tmp_path / "state/status.json")

    assert eventually(is_written)


def test_resources_are_in_the_file_before_they_are_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `plugin status` would show them as another plugin's until the next write."""
    # on a busy machine the write may take longer than registration waits for it
    monkeypatch.setattr("gpunode.plugin.observe.status_file._FIRST_SECONDS", PATIENCE)
    host, backend = recorded_host(tmp_path), FakeBackend()
    service = PluginService(host, Settings(state_dir="/state"), MemoryLog(), backend, FakeChecker())
    service.parts.append(StatusFile(service))
    backend.sink = service.ledger
    named: list[list[str]] = []

    def make_link(name: str, feed: Feed) -> Link:
        own = read_own_status(host, "/state")
        named.append([resource.name for resource in own.resources] if own else [])
        return cast(Link, NoLink())

    monkeypatch.setattr(service, "_make_link", make_link)
    service._turn()
    assert eventually((tmp_path / "state/status.json").exists)
    backend.show(gpu=2)
    service._turn()
    backend.show(gpu=2, more=1)
    service._turn()
    assert named == [["nvidia.com/gpu"], ["nvidia.com/gpu", "nvidia.com/more"]]


class NoLink:
    """A link that does nothing."""

    registrations, status, socket, watched = 0, "", "", False

    def claim(self) -> None: ...

    def tick(self) -> None: ...

    def close(self) -> None: ...
