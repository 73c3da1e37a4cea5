"""configure-runtime on a node where systemd runs: the right unit, the right verb, the daemon's own log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fixtures.engines import CONTAINERD_CONFIG, Engine, start_containerd, start_dockerd
from tests.integration.systemd_stand_in import Node, require_namespace

# the CRI is off, and can't start once it is on: containerd reads the file without a word all the same
BROKEN_CRI = """\
version = 2
disabled_plugins = ["io.containerd.grpc.v1.cri"]

[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "/etc/containerd/certs.d"
  [plugins."io.containerd.grpc.v1.cri".registry.mirrors."docker.io"]
    endpoint = ["https://mirror.test"]
"""


@contextmanager
def running(engine: Engine, directory: Path) -> Iterator[Node]:
    require_namespace()
    with engine:
        node = Node(engine, directory)
        node.prepare()
        yield node


@pytest.mark.containerd
def test_containerd_is_restarted_through_its_unit_and_has_the_runtime(tmp_path: Path) -> None:
    with running(start_containerd(CONTAINERD_CONFIG), tmp_path) as node:
        pid, before = node.engine.pid, node.engine.config.read_bytes()
        done = node.gpunode("configure-runtime", "-o", "json")
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)["data"]
        assert data["config"] == str(node.engine.config)
        assert data["restart"]["command"] == "systemctl restart containerd.service"
        assert "nvidia" in data["active"]["handler"] and node.engine.pid != pid
        assert node.calls() == ["systemctl restart containerd.service"]
        assert node.gpunode("rollback").returncode == 0
        assert node.engine.config.read_bytes() == before and node.engine.running


@pytest.mark.containerd
def test_daemon_that_fails_after_its_restart_is_rolled_back_with_its_own_words(tmp_path: Path) -> None:
    with running(start_containerd(BROKEN_CRI), tmp_path) as node:
        before = node.engine.config.read_bytes()
        done = node.gpunode("configure-runtime")
        assert done.returncode == 4, done.stderr
        assert "containerd runs with them" in done.stderr
        assert "cannot be set when `config_path` is provided" in done.stderr
        assert node.calls() == [
            "systemctl restart containerd.service",
            "journalctl -u containerd.service -n 15 --no-pager -o cat",
            "systemctl restart containerd.service",
        ]
        assert node.engine.config.read_bytes() == before and node.engine.running


@pytest.mark.docker
def test_docker_is_reloaded_through_its_unit(tmp_path: Path) -> None:
    with running(start_dockerd({}), tmp_path) as node:
        pid = node.engine.pid
        done = node.gpunode("configure-runtime", "-o", "json")
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)["data"]
        assert "nvidia" in data["active"]["handler"] and node.engine.pid == pid
        assert node.calls() == ["systemctl reload docker.service"]
