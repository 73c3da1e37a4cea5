"""`gpunode plugin serve` without a kubelet: on purpose, and while it is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.plugin.nodes import DIRECTORY, eventually


@contextmanager
def serving(root: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "gpunode", "--root", str(root), "plugin", "serve", *options]
    environ = {**os.environ, "GPUNODE_PLUGIN_SERVE_STATE_DIR": "/state"}
    with (
        (root / "log").open("w") as log,
        subprocess.Popen(command, env=environ, stderr=log, stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_commands_do_not_wait_for_a_missing_kubelet(short: Path) -> None:
    with serving(short, "--simulate", "h100:8", "--kubelet-socket=") as process:
        path = short / DIRECTORY[1:] / "nvidia-gpu.sock"
        assert eventually(path.is_socket), (short / "log").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "served 8 nvidia.com/gpu\n"
    assert "waiting for the kubelet" not in (short / "log").read_text()
    assert not path.exists()


def test_last_line_says_that_no_device_was_served_and_why(short: Path) -> None:
    with serving(short, "--simulate", "h100:8") as process:
        reason = f"waiting for the kubelet: {DIRECTORY} is not there"
        assert eventually(lambda: reason in (short / "log").read_text())
        for _ in range(2):  # as timeout(1) and terminals do for a process group
            process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0] == f"served none of 8 nvidia.com/gpu: {reason}\n"
    assert (short / "log").read_text().count("msg=stopped") == 1


def test_first_line_has_the_version(short: Path) -> None:
    with serving(short):
        assert eventually(lambda: "\n" in (short / "log").read_text())
    assert "msg=starting version=" in (short / "log").read_text().splitlines()[0]
