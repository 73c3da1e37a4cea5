"""Watching a daemon of another supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpunode.plugin.config.settings import Settings
from gpunode.plugin.mps import layout, supervisor
from gpunode.plugin.mps.daemon import start
from gpunode.plugin.mps.layout import DaemonSpec
from gpunode.plugin.mps.supervisor import Onlooker
from tests.plugin.mps.conftest import MpsNode
from tests.plugin.mps.resources import NAME, uuid
from tests.plugin.nodes import MemoryLog, eventually

pytestmark = pytest.mark.full


@contextmanager
def watched(node: MpsNode, spec: DaemonSpec) -> Iterator[Onlooker]:
    made = Onlooker(node.host, Settings(mps_root=node.root), spec)
    made.start()
    try:
        yield made
    finally:
        made.stop()
        made.join(30.0)


@pytest.mark.parametrize("with_program", [True, False])
def test_devices_wait_for_the_daemon_and_follow_it(
    node: MpsNode, with_program: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a container that has the sockets mounted, but not the driver's programs."""
    monkeypatch.setattr(supervisor, "_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "_SOON_SECONDS", 0.05)
    spec = DaemonSpec(NAME, (uuid(0),), f"{node.root}/{NAME}")
    layout.prepare(node.host, spec, node.root, MemoryLog())
    program = str(node.mps.program)
    if not with_program:
        node.mps.program.rename(node.mps.directory / "elsewhere")
        monkeypatch.setattr("gpunode.gpu.library_paths.PROGRAM_DIRECTORIES", ())
        program = str(node.mps.directory / "elsewhere")
    with watched(node, spec) as made:
        assert made.problem and "no MPS control daemon answers at" in made.problem.reason
        daemon = start(node.host, program, spec)
        try:
            assert eventually(lambda: made.problem is None)
        finally:
            daemon.signal("KILL")
        assert eventually(lambda: daemon.ended() is not None)
        assert eventually(lambda: made.problem is not None)


def test_root_mounted_elsewhere_by_nvidias_deployment(node: MpsNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_MOUNTED", node.root)
    here = DaemonSpec(NAME, (uuid(0),), f"{node.root}/{NAME}")
    layout.prepare(node.host, here, node.root, MemoryLog())
    daemon = start(node.host, str(node.mps.program), here)
    try:
        with watched(node, DaemonSpec(NAME, (uuid(0),), f"/nowhere/{NAME}")) as made:
            assert eventually(lambda: made.problem is None)
    finally:
        daemon.signal("TERM")
        assert eventually(lambda: daemon.ended() is not None)
