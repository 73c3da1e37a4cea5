"""Vector-add through a real containerd's CRI and runc; only driver and GPU are stubs."""

import signal

import pytest

from fixtures import images
from fixtures.engines import CONTAINERD_CONFIG, start_containerd
from gpunode.daemons import cri_pods
from gpunode.daemons.cri import Cri
from gpunode.errors import DaemonError, PreconditionError
from gpunode.gpu.vectoradd import MODULE, read_answer
from gpunode.host import Host
from gpunode.runtime.verify import run_program
from gpunode.runtime.verify.container import ContainerRequest
from tests.integration.conftest import require
from tests.integration.verify_support import GPUS, HANGING, UUIDS, Notes, comes_to, gpu_node, interrupt_when

pytestmark = [
    pytest.mark.xdist_group("verify_containerd"),
    pytest.mark.full,
    pytest.mark.containerd,
    pytest.mark.containers,
]
HANDLER = """
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}.options]
      BinaryName = "{path}"
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    require("containerd", "ctr", "runc", "gcc")
    return gpu_node(tmp_path_factory.mktemp("gpus"))


@pytest.fixture(scope="module")
def engine(node):
    runtimes = {"nvidia": node.nvidia, "broken": node.broken}
    runtimes["absent"] = "/nonexistent/nvidia-container-runtime"
    handlers = "".join(HANDLER.format(name=name, path=path) for name, path in runtimes.items())
    with start_containerd(CONTAINERD_CONFIG + handlers) as engine:
        yield engine


@pytest.fixture
def cri(engine, node):
    """The daemon, and afterwards the check that nothing was left in it."""
    node.stubs.write(GPUS)
    with Cri(Host(), engine.socket) as cri:
        before = held(cri)
        yield cri
        comes_to(lambda: held(cri), before)


def held(cri):
    return tuple(cri_pods.sandboxes(cri, {})), cri_pods.image_names(cri)


def running_tasks(engine):
    """Sandbox and container count as one task each."""
    done = Host().run(("ctr", "-a", engine.socket, "-n", "k8s.io", "tasks", "ls"))
    return done.stdout.count("RUNNING")


def run(engine, progress=None, **fields):
    request = ContainerRequest("containerd", socket=engine.socket, config=str(engine.config), **fields)
    return run_program(Host(), request, progress or Notes())


def test_every_gpu_adds_its_vectors_inside_a_pod(engine, cri):
    outcome = run(engine)
    answer = read_answer(outcome.stdout)
    assert [(device.uuid, device.status) for device in answer.devices] == [(uuid, "ok") for uuid in UUIDS]
    assert (outcome.exit_code, outcome.stderr) == (0, "")


def test_missing_sandbox_image_is_replaced_with_a_note(engine, cri):
    progress = Notes()
    run(engine, progress)
    assert [note for note in progress.notes if "gpunode.test/pause:1" in note]


def test_existing_sandbox_image_is_used_and_kept(engine, node):
    node.stubs.write(GPUS)
    images.load_pause(engine)
    progress = Notes()
    with Cri(Host(), engine.socket) as cri:
        try:
            assert run(engine, progress).exit_code == 0
            comes_to(lambda: held(cri), ((), ("gpunode.test/pause:1",)))
            assert progress.notes == []
        finally:
            images.remove(engine, "gpunode.test/pause:1")
        assert held(cri) == ((), ())


def test_gpu_with_wrong_results_is_reported_by_the_pod(engine, cri, node):
    node.stubs.write(GPUS.with_gpu(1, wrong=True))
    outcome = run(engine)
    assert [device.status == "ok" for device in read_answer(outcome.stdout).devices] == [True, False]
    assert outcome.exit_code == 1


def test_without_the_nvidia_handler_a_pod_sees_no_driver(engine, cri):
    answer = read_answer(run(engine, runtime_name="runc").stdout)
    assert not answer.devices
    assert "libcuda" in answer.error


def test_unknown_handler_is_reported_before_any_object_is_created(engine, cri):
    with pytest.raises(DaemonError) as caught:
        run(engine, runtime_name="nvidia-cdi")
    assert caught.value.code == "handler-missing"
    assert caught.value.hint == "gpunode configure-runtime --runtime containerd --also cdi"


def test_handler_that_refuses_is_explained(engine, cri):
    with pytest.raises(DaemonError) as caught:
        run(engine, runtime_name="broken")
    assert caught.value.code == "driver-not-loaded", caught.value.message


def test_handler_with_a_missing_program_is_explained(engine, cri):
    with pytest.raises(DaemonError) as caught:
        run(engine, runtime_name="absent")
    assert caught.value.code == "toolkit-missing"


def test_hanging_program_is_killed(engine, cri, node):
    node.stubs.write(HANGING)
    with pytest.raises(DaemonError) as caught:
        run(engine, timeout=1.0, argv=("-m", MODULE, "--timeout", "60"))
    assert caught.value.code == "timeout"


def test_missing_image_is_never_pulled(engine, cri):
    with pytest.raises(PreconditionError) as caught:
        run(engine, image="registry.invalid/cuda:12")
    assert "images pull registry.invalid/cuda:12" in caught.value.hint


def test_custom_image_runs_its_own_entry_point_and_is_kept(engine, node):
    images.load(engine, "gpunode.test/own:1", ("/bin/echo", "own"))
    with Cri(Host(), engine.socket) as cri:
        try:
            assert run(engine, image="gpunode.test/own:1", argv=("words",)).stdout == "own words\n"
            comes_to(lambda: held(cri), ((), ("gpunode.test/own:1",)))
        finally:
            images.remove(engine, "gpunode.test/own:1")


def test_interrupt_leaves_no_objects(engine, cri, node):
    node.stubs.write(HANGING)
    request = ContainerRequest("containerd", socket=engine.socket)
    assert interrupt_when(request, lambda: running_tasks(engine) == 2) == 130


def test_leftovers_of_a_killed_run_are_removed_by_the_next(engine, cri, node):
    node.stubs.write(HANGING)
    request = ContainerRequest("containerd", socket=engine.socket)
    assert interrupt_when(request, lambda: running_tasks(engine) == 2, signal.SIGKILL) == -signal.SIGKILL
    sandboxes, names = held(cri)
    assert len(sandboxes) == 1
    assert {name.partition(":")[0] for name in names} == {
        "gpunode.local/verify",
        "gpunode.local/stand-in",
        "gpunode.test/pause",
    }
    node.stubs.write(GPUS)
    assert run(engine).exit_code == 0


def test_concurrent_run_is_not_disturbed(engine, cri, node):
    node.stubs.write(HANGING)

    def another_ran_meanwhile():
        if not (lambda: running_tasks(engine) == 2)():
            return False
        before = held(cri)
        run(engine, argv=("-c", "pass"))
        comes_to(lambda: held(cri), before)
        return True

    assert interrupt_when(ContainerRequest("containerd", socket=engine.socket), another_ran_meanwhile) == 130


def test_stopped_daemon_has_a_hint_to_start_it(tmp_path):
    with pytest.raises(DaemonError) as caught:
        run_program(Host(), ContainerRequest("containerd", socket=str(tmp_path / "none.sock")), Notes())
    assert caught.value.exit_code == 3
    assert "systemctl start containerd" in caught.value.hint


def test_daemon_without_cri_has_a_hint_to_enable_it(tmp_path):
    require("containerd")
    with start_containerd('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n') as engine:
        with pytest.raises(DaemonError) as caught:
            run(engine)
    assert caught.value.code == "cri-disabled"
    assert "disabled_plugins" in caught.value.hint
