"""Nodes whose GPUs can be cut: the stand-in of NVML with its nvidia-smi, and a state directory each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.scenario import Scenario
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.gpu.mig import MigSession
from gpunode.host import Host
from gpunode.mig.layout import GpuLayout, Layouts
from tests.cli import REPOSITORY, Ran, gpunode

EXAMPLES = str(REPOSITORY / "docs/mig-config.yaml")


@dataclass(frozen=True)
class MigNode:
    """One node; `run` is a command line on it, as root."""

    stub: StubNode
    directory: Path

    @property
    def env(self) -> dict[str, str]:
        path = f"{self.directory}/bin:{self.stub.programs}:{os.environ['PATH']}"
        return {**self.stub.env, "PATH": path, "GPUNODE_STATE_DIR": f"{self.directory}/state"}

    @property
    def host(self) -> Host:
        return Host(environ={**os.environ, **self.env})

    def run(self, *words: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> Ran:
        return gpunode("mig", *words, env={**self.env, **(env or {})}, prefix=prefix)

    def apply(self, label: str, *words: str, file: str = EXAMPLES) -> Ran:
        return self.run("apply", "-f", file, "-c", label, *words)

    def config(self, text: str) -> str:
        path = self.directory / "config.yaml"
        path.write_text(text)
        return str(path)

    def profiles(self, text: str, devices: str = "all") -> str:
        """A file with one label: these profiles."""
        return self.config(
            "version: v1\nmig-configs:\n  wanted:\n"
            f"    - devices: {devices}\n      mig-enabled: true\n      mig-devices: {{{text}}}\n"
        )

    def layouts(self) -> Layouts:
        with MigSession(self.host) as session:
            return session.layouts()

    def gpu(self, index: int = 0) -> GpuLayout:
        return self.layouts().gpus[index]

    def devices(self, index: int = 0) -> dict[str, int]:
        return dict(self.gpu(index).devices())

    def uuids(self, index: int = 0) -> set[str]:
        return {ci.uuid for gi in self.gpu(index).instances for ci in gi.compute}

    def program(self, name: str, script: str) -> Path:
        """Put a program in front of this node's PATH."""
        path = self.directory / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path


MigMaker = Callable[[Scenario], MigNode]


@pytest.fixture
def mig_node(tmp_path: Path) -> MigMaker:
    if not have_compiler():
        assert not os.environ.get("CI"), "gcc is missing: the stand-in libraries can't be built"
        pytest.skip("gcc is missing: the stand-in libraries can't be built")
    if os.geteuid() != 0:
        pytest.skip("changing MIG needs root")
    return lambda scenario: MigNode(stub_node(tmp_path, scenario), tmp_path)
