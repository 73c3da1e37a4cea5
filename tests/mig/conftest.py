"""Nodes with MIG GPUs: the stub of NVML with its nvidia-smi, and a state directory each.

A change of MIG searches and signals the device plugins of the whole machine, and other tests run some: so
the command line sees only its own processes, or those of one test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fixtures.scenario import Scenario
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.host import Host
from gpunode.mig.model import GpuLayout, Layouts
from gpunode.mig.session import MigSession
from tests.cli import REPOSITORY, Ran, clean_environment, gpunode
from tests.cluster import api, certificates
from tests.gpu_node import make_node
from tests.waiting import eventually

__all__ = ["api", "certificates", "make_node"]

EXAMPLES = str(REPOSITORY / "docs/mig-config.yaml")


_SPACE = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc")


@cache
def alone() -> tuple[str, ...]:
    """Prefix for a program that sees only its own processes; empty if that is not permitted."""
    return () if subprocess.run([*_SPACE, "true"], capture_output=True).returncode else _SPACE


@dataclass(frozen=True)
class MigNode:
    """One node; `run` is a command line on it, as root. `space` starts it among other processes."""

    stub: StubNode
    directory: Path
    space: tuple[str, ...] = ()

    @property
    def env(self) -> dict[str, str]:
        path = f"{self.directory}/bin:{self.stub.programs}:{os.environ['PATH']}"
        return {**self.stub.env, "PATH": path, "GPUNODE_STATE_DIR": f"{self.directory}/state"}

    @property
    def host(self) -> Host:
        return Host(environ={**os.environ, **self.env})

    def run(self, *words: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> Ran:
        environ = {**self.env, **(env or {})}
        if self.space == alone():
            return gpunode("mig", *words, env=environ, space=self.space, prefix=prefix)
        return gpunode("mig", *words, env=environ, prefix=(*self.space, *prefix))

    def start(self, *argv: str, **streams: Any) -> subprocess.Popen[Any]:
        """A program on it that continues while the test does something else."""
        return subprocess.Popen([*self.space, *argv], env=clean_environment(self.env), **streams)

    def pid(self, started: subprocess.Popen[Any]) -> int:
        """The process id, in this test's namespace, of a program that `start` has started: it may be the
        child of the one that enters the node's."""
        if not self.space:
            return started.pid
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
        assert eventually(lambda: children.read_text() or started.poll() is not None)
        return int(children.read_text().split()[0])

    @contextmanager
    def sleeping(self) -> Iterator[tuple[subprocess.Popen[Any], int]]:
        """A program named sleep that runs meanwhile, and its process id in the node's namespace."""
        with self.start("sleep", "600") as started:
            try:
                place = Path(f"/proc/{self.pid(started)}")
                assert eventually(lambda: (place / "comm").read_text() == "sleep\n")
                status = (place / "status").read_text()
                yield started, int(re.findall(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)[0])
            finally:
                started.kill()

    def kill(self, started: subprocess.Popen[Any], number: signal.Signals) -> None:
        """Send such a program a signal."""
        os.kill(self.pid(started), number)

    @contextmanager
    def shared(self) -> Iterator[MigNode]:
        """The same, with the processes that `space` starts, for the duration of the context."""
        if not self.space:
            yield self
            return
        keeper = [word for word in self.space if word != "--kill-child"]
        with subprocess.Popen(
            [*keeper, "sh", "-c", "echo ready; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            inside = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
            yield replace(self, space=("nsenter", "--target", inside, "--mount", "--pid"))
            process.communicate()

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
        """Put a program first in this node's PATH."""
        path = self.directory / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path


MigMaker = Callable[[Scenario], MigNode]


@pytest.fixture
def mig_node(tmp_path: Path) -> MigMaker:
    if not have_compiler():
        assert not os.environ.get("CI"), "gcc is missing: the stub libraries can't be built"
        pytest.skip("gcc is missing: the stub libraries can't be built")
    if os.geteuid() != 0:
        pytest.skip("changing MIG needs root")
    return lambda scenario: MigNode(stub_node(tmp_path, scenario), tmp_path, alone())
