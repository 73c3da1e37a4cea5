"""Whether the process that wrote a status file is alive, and which processes are not mistaken for it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from gpunode.facts.processes import own_identity
from gpunode.host import Host
from gpunode.plugin.observe.status_file import read_own_status


def state(place: Path, **changes: Any) -> str:
    """State of this process' own status file with these changes."""
    status = {**own_identity(Host()), "started": 1.0, "resources": [], **changes}
    (place / "status.json").write_text(json.dumps(status))
    found = read_own_status(Host(), str(place))
    assert found is not None
    return found.state


def test_process_that_wrote_the_file_is_serving(short: Path) -> None:
    assert state(short) == "serving"
    assert state(short, stopped=2.0) == "ended"


@pytest.mark.parametrize(
    "changes",
    [
        {"startTicks": 1},  # its number was reused by another process
        {"bootId": "another boot"},
        {"pid": 1 << 30},
        {"pid": 1 << 30, "startTicks": None},
        {"pid": "1", "startTicks": None},
        {"startTicks": None},
    ],
)
def test_other_process_is_not_mistaken_for_the_plugin(short: Path, changes: dict[str, Any]) -> None:
    assert state(short, **changes) == "gone"


def test_plugin_in_another_container_is_detected_by_its_sockets(short: Path) -> None:
    """Its process number means another process here, or none."""
    path = short / "nvidia-gpu.sock"
    there = {"pidNamespace": "pid:[1]", "pid": 1, "resources": [{"name": "a/b", "socket": str(path)}]}
    assert state(short, **there) == "gone"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert state(short, **there) == "gone"
        listening.listen()
        assert state(short, **there) == "serving"
        assert state(short, **there, bootId="another boot") == "gone"
    assert state(short, pidNamespace="pid:[1]") == "unknown"
