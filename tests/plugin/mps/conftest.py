"""A node with stubs of NVML, of nvidia-cuda-mps-control and of the kubelet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.mps_control import MpsStub, mps_stub
from fixtures.scenario import machine
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.host import Host
from gpunode.plugin.mps import supervisor


@dataclass(frozen=True)
class MpsNode:
    """`host` finds the stubs; `root` is the MPS root."""

    place: Path
    gpus: StubNode
    mps: MpsStub
    host: Host

    @property
    def root(self) -> str:
        return str(self.place / "mps")

    def config(self, replicas: int, *lines: str, name: str = "nvidia.com/gpu") -> str:
        """A config file that shares every GPU; its path."""
        path = self.place / "config.yaml"
        text = ["version: v1", "sharing:", "  mps:", *(f"    {line}" for line in lines), "    resources:"]
        path.write_text("\n".join([*text, f"    - name: {name}", f"      replicas: {replicas}"]) + "\n")
        return str(path)


@pytest.fixture
def node(short: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MpsNode]:
    """Four GPUs; children of this process find the stubs, too."""
    if not have_compiler():
        pytest.skip("gcc is not installed")
    gpus = stub_node(short, machine(4), libraries="nvml")
    mps = mps_stub(short / "bin")
    for name, value in {**gpus.env, **mps.env}.items():
        monkeypatch.setenv(name, value)
    for name, seconds in {"_TURN_SECONDS": 0.03, "_CALM_SECONDS": 0.03, "_BACK_OFF": (0.1, 0.2, 0.5)}.items():
        monkeypatch.setattr(supervisor, name, seconds)  # in this process only
    yield MpsNode(short, gpus, mps, Host(environ=dict(os.environ)))
