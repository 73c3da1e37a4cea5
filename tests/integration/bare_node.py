"""A node with only NVIDIA's driver, Docker and gpunode, as one mount namespace for the duration of a test.

The driver is stubs (driver_namespace.py), systemctl is a stub (systemd_stand_in.py); dockerd is real and
runs in the namespace, so that it mounts the files that the specification names.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fixtures.engines import Engine
from fixtures.stubs import SCENARIO_IN_CONTAINER
from tests.cli import checked
from tests.integration import driver_namespace
from tests.integration.conftest import refuse_for
from tests.integration.systemd_stand_in import Node
from tests.waiting import PATIENCE

# files of a node booted with systemd; all of them disappear with the namespace
_BOOT = """\
set -e
mkdir -p /run/systemd/system /run/etc/upper /run/etc/work
mount -t overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work overlay /etc
mount -t tmpfs -o mode=755 tmpfs /etc/systemd
cp "$1"/*.service /run/systemd/system/
echo ready
exec sleep 600
"""


@dataclass(frozen=True)
class BareNode:
    """The node; `inside` is the prefix of every command line that must run on it."""

    node: Node
    inside: tuple[str, ...]

    @property
    def engine(self) -> Engine:
        return self.node.engine

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Any command, on the node."""
        programs = self.node.directory / "bin"
        environ = {**os.environ, "GPUNODE_STATE_DIR": str(self.node.state), "NO_COLOR": "1"}
        environ["PATH"] = f"{programs}:{os.environ['PATH']}"
        return subprocess.run(
            [*self.inside, *argv], env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    def gpunode(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """The command line, without options for files."""
        return self.run(sys.executable, "-m", "gpunode", *argv)

    def data(self, *argv: str) -> Any:
        """`data` of a run that must succeed."""
        done = self.gpunode(*argv, "-o", "json")
        assert done.returncode == 0, done.stderr + done.stdout
        return checked(done.stdout)["data"]

    def files(self) -> set[str]:
        """gpunode's files on the node in addition to Docker's."""
        script = "find /run/cdi /etc/systemd /etc/udev -mindepth 1 ! -name system ! -name rules.d || true"
        return set(self.run("sh", "-c", script).stdout.split())

    def add_scenario_to_specification(self) -> None:
        """Add the scenario file to the specification: a real driver needs none."""
        tree = yaml.safe_load(self.run("cat", "/run/cdi/nvidia.yaml").stdout)
        scenario = {"hostPath": str(self.node.directory / "scenario.txt")}
        scenario |= {"containerPath": SCENARIO_IN_CONTAINER}
        tree["containerEdits"]["mounts"].append({**scenario, "options": ["ro", "rbind"]})
        new = self.node.directory / "specification.yaml"
        new.write_text(yaml.safe_dump(tree))
        moved = "cp $0 /run/cdi/.new && mv /run/cdi/.new /run/cdi/nvidia.yaml"
        assert self.run("sh", "-c", moved, str(new)).returncode == 0


@contextmanager
def bare_node(docker: Engine, directory: Path) -> Iterator[BareNode]:
    """Boot the node and start `docker` on it; without the toolkit's programs."""
    node = Node(docker, directory)
    node.prepare()
    (directory / "bin/nvidia-container-runtime").unlink()
    prefix = driver_namespace.enter(directory, alone=False)
    problem = driver_namespace.problem(prefix)
    refuse_for([f"a mount namespace with overlayfs ({problem})"] if problem else [])
    boot = [*prefix, "sh", "-c", _BOOT, "sh", str(directory)]
    with subprocess.Popen(boot, stdout=subprocess.PIPE, text=True, start_new_session=True) as booted:
        try:
            assert booted.stdout is not None and booted.stdout.readline() == "ready\n"
            inside = ("nsenter", "--mount", "--target", str(booted.pid), "--", *_environment(prefix))
            with dataclasses.replace(docker, argv=(*inside, *docker.argv)) as engine:
                yield BareNode(dataclasses.replace(node, engine=engine), inside)
        finally:
            os.killpg(booted.pid, signal.SIGKILL)


def _environment(prefix: tuple[str, ...]) -> tuple[str, ...]:
    """`env NAME=VALUE ...` of the namespace: how the stub of NVML finds its scenario."""
    start = prefix.index("env")
    return prefix[start : prefix.index("sh", start)]
