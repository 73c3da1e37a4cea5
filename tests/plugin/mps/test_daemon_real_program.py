"""Debian's real nvidia-cuda-mps-control, supervised. Its daemon runs without a GPU; its servers don't."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.mps_control import fetch_real_program
from gpunode.plugin.mps.daemon import MpsControl, has_listener
from tests.plugin.mps.conftest import MpsNode
from tests.plugin.mps.test_supervisor import kept, spec, up
from tests.plugin.nodes import MemoryLog, eventually

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return fetch_real_program()
    except RuntimeError as error:
        pytest.skip(f"Debian's nvidia-cuda-mps can't be fetched: {error}")


@pytest.fixture
def real(node: MpsNode, program: Path) -> MpsNode:
    path = f"{program.parent}:{os.environ['PATH']}"
    return replace(node, host=replace(node.host, environ={**node.host.environ, "PATH": path}))


def test_real_daemon_is_supervised(real: MpsNode, program: Path) -> None:
    log = MemoryLog()
    wanted = spec(real, 0, 1)
    with kept(real, wanted, log) as made:
        assert up(made), log.lines
        control = MpsControl(real.host, str(program), wanted.pipe)
        assert has_listener(real.host, wanted.pipe)
        assert control.query("get_default_device_pinned_mem_limit 1")[0] == "1000M"
        assert control.query("get_default_active_thread_percentage")[0] == "25.0"
        limit = f"get_default_device_pinned_mem_limit {wanted.gpus[1]}"
        control.send(f"set_default_device_pinned_mem_limit {wanted.gpus[1]} 1000M")
        assert "1000M" not in control.query(limit)  # why limits are set by index
        first = json.loads(Path(f"{wanted.directory}/daemon.json").read_text())
        assert first["program"] == str(program.resolve())
        os.kill(first["pid"], signal.SIGKILL)
        assert eventually(lambda: made.problem is not None)
        assert up(made), log.lines
        assert control.query("get_default_active_thread_percentage")[0] == "25.0"
    assert not Path(wanted.directory).exists()
    assert log.messages("warning") == []


def test_real_servers_fail_without_a_driver(real: MpsNode, program: Path) -> None:
    log = MemoryLog()
    wanted = spec(real)
    with kept(real, wanted, log) as made:
        assert up(made), log.lines
        control = MpsControl(real.host, str(program), wanted.pipe)

        def another_fails() -> bool:
            # the daemon starts none while one is starting, so not every command is a failure
            control.send("start_server -uid 0")
            return eventually(lambda: made.problem is not None, 2.0)

        assert any(another_fails() for _ in range(30)), log.lines
        assert made.problem and "exited with status" in made.problem.reason
    messages = [str(fields.get("said")) for level, _, fields in log.lines if level == "warning"]
    assert any("exited with status" in line for line in messages), log.lines


def test_real_daemon_beside_another_one(real: MpsNode, program: Path) -> None:
    log = MemoryLog()
    wanted = spec(real)
    with kept(real, wanted) as first:
        assert up(first)
        Path(f"{wanted.directory}/daemon.json").rename(f"{real.place}/kept.json")
        with kept(real, wanted, log) as second:
            assert eventually(lambda: log.messages("error") != [])
            assert second.problem and "already running" in second.problem.reason
        assert first.problem is None
        control = MpsControl(real.host, str(program), wanted.pipe)
        assert control.answers()
