"""A daemon's program that other users can write is refused as such, not as the daemon's own verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.errors import PreconditionError
from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.runtime import docker
from gpunode.runtime.containerd import ConfigReader


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "daemon"
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o777)
    return str(path)


def test_dockerd_writable_by_others_is_not_run(program: str) -> None:
    daemon = Daemon("docker", program, (28, 0), "/etc/docker/daemon.json", "", "/run/docker.sock", None)
    edit = FileEdit(daemon.config_path, b"{}\n", b'{"debug": true}\n')
    with pytest.raises(PreconditionError, match="can be written by other users") as caught:
        docker.validate_docker(Host(), daemon, edit)
    assert "chmod go-w" in caught.value.hint


def test_containerd_writable_by_others_is_not_run(program: str) -> None:
    main = "/etc/containerd/config.toml"
    with pytest.raises(PreconditionError, match="can be written by other users"):
        ConfigReader(Host(), program, main).staged({main: "version = 2\n"})
