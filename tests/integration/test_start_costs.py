"""A run that finds nothing to change is cheap for a scheduled job: it starts no child and loads no library.

`make bench` measures the time against its budget; these are the causes that would show there.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.engines import CONTAINERD_CONFIG, start_containerd, start_dockerd
from gpunode.daemons.cri import Cri, running_version
from gpunode.facts.containerd import find_containerd
from gpunode.facts.daemons import daemon_version
from gpunode.facts.docker import find_docker
from gpunode.host import Host
from tests.integration.configuring import Cli, configuring
from tests.waiting import PATIENCE

pytestmark = pytest.mark.full

HEAVY = {"grpc", "pynvml", "rich", "tomlkit", "yaml", "asyncio", "lightkube", "logging", "distro"}
HEAVY |= {"urllib.request", "importlib.metadata", "tempfile", "concurrent"}
CRI = {"grpc", "asyncio", "logging", "tempfile", "concurrent"}
"""What a run on containerd loads to ask its CRI: grpc, and what grpc imports."""
ENGINES = {"containerd": HEAVY - CRI, "docker": HEAVY | {"google", "tomllib"}}
"""What a run on an engine doesn't load."""


@pytest.fixture(
    params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in ENGINES], ids=list(ENGINES)
)
def configured(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cli]:
    """An engine that has the runtime already."""
    engine = start_dockerd() if request.param == "docker" else start_containerd(CONTAINERD_CONFIG)
    with configuring(engine, tmp_path) as cli:
        assert cli.data("configure-runtime")["changes"]
        yield cli


def test_unchanged_run_starts_no_child_and_loads_no_heavy_module(configured: Cli) -> None:
    for more in ([], ["--dry-run"]):
        python, *rest = configured.argv("configure-runtime", "-v", *more)
        done = subprocess.run(
            [python, "-X", "importtime", *rest],
            env=configured.environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        said = done.stderr.splitlines()
        assert [line for line in said if line.lstrip().startswith("+ ")] == []
        loaded = {line.rpartition("|")[2].strip() for line in said if line.startswith("import time:")}
        assert "gpunode.runtime.workflow" in loaded
        parents = {name.partition(".")[0] for name in loaded} | loaded
        assert parents & ENGINES[configured.engine.kind] == set()


def test_version_of_the_running_program_is_read_without_starting_it(configured: Cli) -> None:
    """A package upgrade replaces the file; the plan must suit the daemon that is running now."""
    started: list[str] = []
    host = Host(environ=dict(os.environ), trace=started.append)
    find = find_docker if configured.engine.kind == "docker" else find_containerd
    found = find(host, str(configured.engine.config))
    assert found is not None and found.process is not None
    assert found.process.pid == configured.engine.pid
    assert started == []
    program = "dockerd" if configured.engine.kind == "docker" else "containerd"
    assert found.version == daemon_version(host, program, found.binary) != ()
    assert started == [f"{found.binary} --version"]


@pytest.mark.containerd
def test_real_containerd_returns_its_status_and_version() -> None:
    with start_containerd(CONTAINERD_CONFIG) as engine:
        with Cri(Host(), engine.socket) as cri:
            status = cri.status()
            version = cri.version()[1]
            assert cri.status() == status
            assert status.handlers and status.config and status.conditions["RuntimeReady"]
        assert running_version(Host(), engine.socket, PATIENCE) == version
