"""The test engines themselves: restarted from another process, ended without leftovers."""

import subprocess
from pathlib import Path

import pytest

from fixtures.engines import EngineFailed, start_containerd, start_dockerd
from gpunode.daemons.cri import Cri
from gpunode.daemons.docker import DockerApi
from gpunode.host import Host
from tests.integration.conftest import require
from tests.waiting import PATIENCE, eventually

BOTH = [
    pytest.param(start_containerd, "containerd", marks=pytest.mark.containerd),
    pytest.param(start_dockerd, "dockerd", marks=pytest.mark.docker),
]


@pytest.mark.parametrize(("make", "program"), BOTH)
def test_restart_command_restarts_the_daemon_and_exit_stops_the_new_one(make, program):
    require(program)
    with make() as engine:
        first = engine.pid
        subprocess.run([engine.restart_command], check=True, capture_output=True, timeout=PATIENCE)
        assert engine.pid != first
        assert engine.running
        assert eventually(engine.answers)  # the command waits until it listens
    assert not engine.running
    assert not engine.directory.exists()
    assert str(engine.directory) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize(("make", "program"), BOTH)
def test_restart_with_a_broken_configuration_fails_with_the_reason(make, program):
    require(program)
    with make() as engine:
        engine.config.write_text("{{{")
        done = subprocess.run([engine.restart_command], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode != 0
        assert engine.config.name in done.stderr
        assert not engine.running


@pytest.mark.parametrize(("make", "program"), BOTH)
def test_daemon_that_does_not_start_leaves_no_files(make, program):
    require(program)
    engine = make("{{{")
    with pytest.raises(EngineFailed, match=engine.config.name), engine:
        pytest.fail("it started")
    assert not engine.directory.exists()


@pytest.mark.docker
def test_docker_api_reports_version_and_runtimes(docker):
    api = DockerApi(Host(), docker.socket)
    assert api.program_version()
    assert "runc" in api.info()["Runtimes"]
    assert not api.has_image("gpunode.test/none:1")


@pytest.mark.containerd
def test_cri_reports_version_handlers_and_default(containerd):
    with Cri(Host(), containerd.socket) as cri:
        name, version = cri.version()
        status = cri.status()
    assert name == "containerd"
    assert version[0].isdigit()
    assert (status.handlers, status.default_handler) == (("runc",), "runc")
    assert status.conditions["RuntimeReady"]
