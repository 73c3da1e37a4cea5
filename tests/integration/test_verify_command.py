"""`gpunode verify --on ENGINE` as a user starts it: MIG devices too, each proven inside one container."""

import pytest

from fixtures.engines import CONTAINERD_CONFIG, start_containerd, start_dockerd
from fixtures.scenario import mig_uuid, mixed_layout, with_mig
from tests.cli import gpunode
from tests.integration.conftest import require
from tests.integration.test_verify_containerd import HANDLER
from tests.integration.verify_support import GPUS, UUIDS, gpu_node

CUT = with_mig(GPUS, 1, mixed_layout(1))
EXPECTED = [UUIDS[0], *(mig_uuid(1, index) for index in range(4))]


def proven(node, engine, *argv):
    """Output of `verify` for a node with one whole GPU and one in MIG mode, then with a faulty GPU."""
    node.stubs.write(CUT)
    good = gpunode("verify", "--on", engine, "-o", "json", *argv, env=node.stubs.env)
    node.stubs.write(CUT.with_gpu(0, wrong=True))
    return good, gpunode("verify", "--on", engine, "-o", "json", *argv, env=node.stubs.env)


def assert_proven(runs, engine):
    good, bad = runs
    assert good.code == 0, good.err
    data = good.document["data"]
    assert data["on"] == engine
    assert [one["uuid"] for one in data["devices"]] == EXPECTED
    assert {(one["status"], one["maxError"]) for one in data["devices"]} == {("ok", 0.0)}
    assert [one["index"] for one in data["devices"]] == [0, 1, 1, 1, 1]
    assert bad.code == 1
    assert [one["status"] for one in bad.document["data"]["devices"]] == ["fail", "ok", "ok", "ok", "ok"]


@pytest.mark.containers
@pytest.mark.containerd
def test_verify_on_containerd_proves_each_device_of_the_host(tmp_path):
    require("containerd", "ctr", "runc", "gcc")
    node = gpu_node(tmp_path)
    with start_containerd(CONTAINERD_CONFIG + HANDLER.format(name="nvidia", path=node.nvidia)) as engine:
        runs = proven(node, "containerd", "--socket", engine.socket, "--config", str(engine.config))
    assert_proven(runs, "containerd")


@pytest.mark.containers
@pytest.mark.docker
def test_verify_on_docker_proves_each_device_of_the_host(tmp_path):
    require("dockerd", "containerd", "runc", "gcc")
    node = gpu_node(tmp_path)
    with start_dockerd({"runtimes": {"nvidia": {"path": str(node.nvidia)}}}) as engine:
        runs = proven(node, "docker", "--socket", engine.socket)
    assert_proven(runs, "docker")
