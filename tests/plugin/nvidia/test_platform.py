"""Tegra through the command line: one device, without NVML."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpunode.host import Host
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import RESOURCE


def test_tegra_is_served_without_nvml(short: Path) -> None:
    (short / "dp").mkdir()
    argv = [sys.executable, "-m", "gpunode", "plugin", "serve", "--device-discovery-strategy", "tegra"]
    argv += ["--kubelet-socket", str(short / "dp/kubelet.sock"), "--state-dir", str(short / "state")]
    with KubeletStub(Host(), str(short / "dp")) as kubelet:
        with (short / "log").open("w") as log:
            process = subprocess.Popen(argv, env=os.environ, stdout=log, stderr=log)
        try:
            assert kubelet.wait_allocatable(RESOURCE, 1, 60.0), (short / "log").read_text()
            given = kubelet.allocate(RESOURCE, 1)
            assert (given.ids, given.envs) == (("tegra",), {"NVIDIA_VISIBLE_DEVICES": "tegra"})
        finally:
            process.terminate()
            assert process.wait(20.0) == 0, (short / "log").read_text()
