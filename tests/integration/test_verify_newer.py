"""Vector-add through containerd 1.7 and 2.x and through newer dockerds than the machine's own."""

import os
import shutil
import subprocess

import pytest

from fixtures.engines import CONTAINERD_2_CONFIG, CONTAINERD_CONFIG, start_containerd, start_dockerd
from fixtures.newer_engines import SUITES
from gpunode.daemons import cri_pods
from gpunode.daemons.cri import Cri
from gpunode.daemons.docker import DockerApi
from gpunode.facts.daemons import parse_version
from gpunode.gpu.vectoradd import read_answer
from gpunode.host import Host
from gpunode.runtime.verify import run_program
from gpunode.runtime.verify.container import ContainerRequest
from tests.integration.conftest import path_of, require
from tests.integration.test_verify_containerd import HANDLER
from tests.integration.verify_support import UUIDS, Notes, comes_to, gpu_node

pytestmark = [pytest.mark.full, pytest.mark.containers]


@pytest.fixture(params=SUITES)
def suite(request, monkeypatch):
    """Its engines, shims and ctr come first on PATH."""
    require("runc", "gcc")
    monkeypatch.setenv("PATH", path_of(request.param))
    return request.param


def version_of(program):
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return parse_version(said.stdout)


def verified(engine):
    request = ContainerRequest(engine.kind, socket=engine.socket, config=str(engine.config))
    answer = read_answer(run_program(Host(), request, Notes()).stdout)
    return [device.uuid for device in answer.devices if device.status == "ok"] == list(UUIDS)


@pytest.mark.containerd
def test_vector_add_in_a_pod_of_a_newer_containerd(suite, tmp_path):
    handler, config = HANDLER.format(name="nvidia", path=gpu_node(tmp_path).nvidia), CONTAINERD_CONFIG
    if version_of("containerd") >= (2,):
        handler = handler.replace("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime")
        config = CONTAINERD_2_CONFIG
    with start_containerd(config + handler, path=os.environ["PATH"]) as engine:
        assert verified(engine)
        with Cri(Host(), engine.socket) as cri:
            comes_to(lambda: (tuple(cri_pods.sandboxes(cri, {})), cri_pods.image_names(cri)), ((), ()))


@pytest.mark.docker
def test_vector_add_in_a_container_of_a_newer_docker(suite, tmp_path):
    assert shutil.which("dockerd", path=os.environ["PATH"].partition(":")[0])
    with start_dockerd({"runtimes": {"nvidia": {"path": str(gpu_node(tmp_path).nvidia)}}}) as engine:
        assert verified(engine)
        info = DockerApi(Host(), engine.socket).info()
        assert (info["Containers"], info["Images"]) == (0, 0)
