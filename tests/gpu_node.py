"""Machines whose NVML and CUDA are stubs (fixtures/stubs), reached through the real loader and ctypes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.scenario import Scenario
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.host import Host

NodeMaker = Callable[..., StubNode]


@pytest.fixture
def make_node(tmp_path: Path) -> NodeMaker:
    """Makes a node from a scenario; `libraries` leaves one of the two out."""
    if not have_compiler():
        assert not os.environ.get("CI"), "gcc is missing: the stub libraries can't be built"
        pytest.skip("gcc is missing: the stub libraries can't be built")

    def make(scenario: Scenario, libraries: str = "all") -> StubNode:
        return stub_node(tmp_path, scenario, libraries=libraries)

    return make


def host_of(node: StubNode) -> Host:
    """This machine, with the node's libraries for its children."""
    return Host(environ={**os.environ, **node.env})
