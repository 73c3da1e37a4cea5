"""Whether the process that wrote the status file still lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpunode.host import Host
from gpunode.plugin.observe.status_file import start_ticks
from tests.plugin.nodes import eventually


def test_a_process_that_has_died_and_that_nobody_waited_for_does_not_live() -> None:
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
