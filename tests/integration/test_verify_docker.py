"""Vector-add through a real dockerd, its runtime setting and runc; only driver and GPU are stubs."""

import signal
import socket

import pytest

from fixtures import images
from fixtures.engines import start_dockerd
from gpunode.daemons.docker import DockerApi
from gpunode.errors import DaemonError, PreconditionError
from gpunode.gpu.vectoradd import MODULE, read_answer
from gpunode.host import Host
from gpunode.runtime.verify import run_program
from gpunode.runtime.verify.container import ContainerRequest
from tests.integration.conftest import require
from tests.integration.verify_support import GPUS, HANGING, UUIDS, Notes, gpu_node, interrupt_when

pytestmark = [
    pytest.mark.xdist_group("verify_docker"),
    pytest.mark.full,
    pytest.mark.docker,
    pytest.mark.containers,
]


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    require("dockerd", "containerd", "runc", "gcc")
    return gpu_node(tmp_path_factory.mktemp("gpus"))


@pytest.fixture(scope="module")
def engine(node):
    runtimes = {"nvidia": {"path": str(node.nvidia)}, "broken": {"path": str(node.broken)}}
    runtimes["absent"] = {"path": "/nonexistent/nvidia-container-runtime"}
    with start_dockerd({"runtimes": runtimes}) as engine:
        yield engine


@pytest.fixture
def api(engine, node):
    """The daemon, and afterwards the check that nothing was left in it."""
    node.stubs.write(GPUS)
    api = DockerApi(Host(), engine.socket)
    before = held(api)
    yield api
    assert held(api) == before


def held(api):
    info = api.info()
    return info["Containers"], info["Images"]


def run(engine, **fields):
    return run_program(Host(), ContainerRequest("docker", socket=engine.socket, **fields), Notes())


def test_every_gpu_adds_its_vectors_inside_a_container(engine, api):
    outcome = run(engine)
    answer = read_answer(outcome.stdout)
    assert [(device.uuid, device.status) for device in answer.devices] == [(uuid, "ok") for uuid in UUIDS]
    assert (outcome.exit_code, outcome.stderr) == (0, "")


def test_gpu_with_wrong_results_is_reported_by_the_container(engine, api, node):
    node.stubs.write(GPUS.with_gpu(1, wrong=True))
    outcome = run(engine)
    assert [device.status == "ok" for device in read_answer(outcome.stdout).devices] == [True, False]
    assert outcome.exit_code == 1


def test_without_the_nvidia_runtime_a_container_sees_no_driver(engine, api):
    answer = read_answer(run(engine, runtime_name="runc").stdout)
    assert not answer.devices
    assert "libcuda" in answer.error


def test_unknown_runtime_is_reported_before_any_object_is_created(engine, api):
    with pytest.raises(DaemonError) as caught:
        run(engine, runtime_name="nvidia-cdi")
    assert caught.value.code == "handler-missing"
    assert caught.value.hint == "gpunode configure-runtime --runtime docker --also cdi"


def test_runtime_that_refuses_is_explained(engine, api):
    with pytest.raises(DaemonError) as caught:
        run(engine, runtime_name="broken")
    assert caught.value.code == "driver-not-loaded", caught.value.message
    assert "modprobe nvidia" in caught.value.hint


def test_runtime_with_a_missing_program_is_explained(engine, api):
    with pytest.raises(DaemonError) as caught:
        run(engine, runtime_name="absent")
    assert caught.value.code == "toolkit-missing"


def test_hanging_program_is_killed(engine, api, node):
    node.stubs.write(HANGING)
    with pytest.raises(DaemonError) as caught:
        run(engine, timeout=1.0, argv=("-m", MODULE, "--timeout", "60"))
    assert caught.value.code == "timeout"


def test_missing_image_is_never_pulled(engine, api):
    with pytest.raises(PreconditionError) as caught:
        run(engine, image="registry.invalid/cuda:12")
    assert caught.value.hint == "docker pull registry.invalid/cuda:12"


def test_custom_image_runs_its_own_entry_point_and_is_kept(engine, node):
    api = DockerApi(Host(), engine.socket)
    images.load(engine, "gpunode.test/own:1", ("/bin/echo", "own"))
    try:
        assert run(engine, image="gpunode.test/own:1", argv=("words",)).stdout == "own words\n"
        assert held(api) == (0, 1)
    finally:
        api.remove_image("gpunode.test/own:1")


def test_interrupt_leaves_no_objects(engine, api, node):
    node.stubs.write(HANGING)
    request = ContainerRequest("docker", socket=engine.socket)
    assert interrupt_when(request, lambda: api.info()["ContainersRunning"] == 1) == 130


def test_leftovers_of_a_killed_run_are_removed_by_the_next(engine, api, node):
    node.stubs.write(HANGING)
    request = ContainerRequest("docker", socket=engine.socket)
    assert (
        interrupt_when(request, lambda: api.info()["ContainersRunning"] == 1, signal.SIGKILL)
        == -signal.SIGKILL
    )
    assert held(api) == (1, 1)
    node.stubs.write(GPUS)
    assert run(engine).exit_code == 0


def test_concurrent_run_is_not_disturbed(engine, api, node):
    node.stubs.write(HANGING)

    def another_ran_meanwhile():
        if not (lambda: api.info()["ContainersRunning"] == 1)():
            return False
        before = held(api)
        run(engine, argv=("-c", "pass"))
        assert held(api) == before
        return True

    assert interrupt_when(ContainerRequest("docker", socket=engine.socket), another_ran_meanwhile) == 130


def test_stopped_daemon_has_a_hint_to_start_it(tmp_path):
    """Its socket was removed, or is left of a daemon that was killed."""
    with pytest.raises(PreconditionError) as missing:
        run_program(Host(), ContainerRequest("docker", socket=str(tmp_path / "none.sock")), Notes())
    assert missing.value.exit_code == 3
    assert missing.value.hint == "leave out --socket, or start Docker"
    left = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(left))
    with pytest.raises(DaemonError) as refused:
        run_program(Host(), ContainerRequest("docker", socket=str(left)), Notes())
    assert refused.value.exit_code == 3
    assert refused.value.hint == "no process listens on the socket: systemctl restart docker"


def test_daemon_with_an_unreadable_log_driver_still_returns_the_output(node):
    node.stubs.write(GPUS)
    settings = {"runtimes": {"nvidia": {"path": str(node.nvidia)}}, "log-driver": "none"}
    with start_dockerd(settings) as engine:
        assert len(read_answer(run(engine).stdout).devices) == 2
