"""containerd's program is started once for the same files, however many steps of a change need its view."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.runtime.containerd import ContainerdEngine
from gpunode.runtime.engine import DesiredConfig, Handler

DESIRED = DesiredConfig((Handler("nvidia", "/usr/bin/nvidia-container-runtime"),))
RUNC = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\n'


@pytest.fixture
def engine(tmp_path: Path) -> ContainerdEngine:
    """A containerd 1.7 whose program prints the file that it reads, with runc if that has no runtimes."""
    program = tmp_path / "containerd"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/starts\ncat "$2"\n'
        f'grep -q runtimes "$2" || echo \'{RUNC}runtime_type = "io.containerd.runc.v2"\'\n'
    )
    program.chmod(0o755)
    config = tmp_path / "config.toml"
    config.write_text("version = 2\n")
    return ContainerdEngine(Host(), Daemon("containerd", str(program), (1, 7), str(config), "", "", None))


def starts(engine: ContainerdEngine) -> int:
    return len((Path(engine.daemon.config_path).parent / "starts").read_text().splitlines())


def test_restored_file_is_read_once(engine: ContainerdEngine) -> None:
    path = engine.daemon.config_path
    before = Path(path).read_bytes()
    plan = engine.plan_edits((FileEdit(path, before, before + b"# as it was\n"),), ("nvidia",), None)
    assert plan.restores
    engine.validate(plan, None)
    engine.validate(plan, None)
    assert starts(engine) == 1


def test_new_runtime_needs_the_views_before_and_after(engine: ContainerdEngine) -> None:
    plan = engine.plan(DESIRED, None)
    engine.validate(plan, DESIRED)
    assert starts(engine) == 2
