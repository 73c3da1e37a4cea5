"""`gpunode verify` and `gpunode gpus` as a user starts them, on machines with stub libraries."""

import json
import sys
from dataclasses import replace

import pytest

from fixtures.machines import recorded_host
from fixtures.scenario import Fault, gpu_uuid, machine, mig_uuid, mixed_layout, with_mig
from fixtures.stubs import stub_node
from gpunode.commands import verify
from gpunode.errors import GpunodeError
from gpunode.gpu.model import Gpu, Inventory
from gpunode.host import Host
from gpunode.host.recording import RECORDING
from gpunode.output.typed import plain
from gpunode.runtime.verify.container import CdiReading, ContainerOutcome, ContainerRequest, GpuAccess
from tests.cli import gpunode
from tests.gpu_node import host_of
from tests.silent import SilentProgress
from tests.waiting import PATIENCE


def devices(ran):
    return ran.document["data"]["devices"]


def test_gpus_lists_mig_devices_under_their_gpu(make_node):
    ran = gpunode("gpus", env=make_node(with_mig(machine(2), 1, mixed_layout(1))).env)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == "driver 535.104.05, CUDA up to 12.2"
    at = next(number for number, line in enumerate(lines) if gpu_uuid(1) in line)
    assert [mig_uuid(1, i) in lines[at + 1 + i] for i in range(4)] == [True] * 4
    assert "1g.10gb+me" in lines[at + 3]


def test_gpus_reports_a_lost_gpu_and_lists_the_others(make_node):
    ran = gpunode("gpus", "-o", "json", env=make_node(machine(8).with_gpu(5, lost=True)).env)
    document = ran.document
    assert (ran.code, document["kind"], document["status"], document["exitCode"]) == (
        1,
        "GpuInventory",
        "fail",
        1,
    )
    assert [bool(gpu["error"]) for gpu in document["data"]["gpus"]].count(True) == 1
    assert "GPU 5" in document["errors"][0]["message"]
    assert document["errors"][0]["hint"]


@pytest.mark.parametrize(
    ("fault", "libraries", "says"),
    [
        (Fault("nvmlInitWithFlags", 18), "all", "NVML 18"),
        (Fault("nvmlInitWithFlags", 9), "all", "NVML 9"),
        (Fault("nvmlShutdown"), "cuda", "NVML 12"),
        (Fault("nvmlInitWithFlags", abort=True), "all", "SIGABRT"),
    ],
)
def test_gpus_without_nvml_prints_the_reason_and_a_hint(make_node, fault, libraries, says):
    ran = gpunode("gpus", env=make_node(machine(1).with_faults(fault), libraries).env)
    assert (ran.code, ran.out) == (1, "")
    assert says in ran.err
    assert "gpunode doctor" in ran.err
    assert "Traceback" not in ran.err


def test_verify_proves_every_gpu_and_mig_device(make_node):
    ran = gpunode("verify", "-o", "json", env=make_node(with_mig(machine(3), 1, mixed_layout(1))).env)
    assert ran.code == 0, ran.err
    assert ran.document["data"]["on"] == "host"
    wanted = [gpu_uuid(0), *(mig_uuid(1, i) for i in range(4)), gpu_uuid(2)]
    assert [one["uuid"] for one in devices(ran)] == wanted
    assert [one["index"] for one in devices(ran)] == [0, 1, 1, 1, 1, 2]
    assert {(one["status"], one["maxError"], one["elements"]) for one in devices(ran)} == {
        ("ok", 0.0, 1 << 20)
    }
    assert all(one["milliseconds"] > 0 for one in devices(ran))


def test_verify_supports_sixteen_gpus(make_node):
    ran = gpunode("verify", "-o", "json", env=make_node(machine(16)).env, timeout=120)
    assert (ran.code, [one["status"] for one in devices(ran)]) == (0, ["ok"] * 16)


@pytest.mark.full
def test_failures_have_distinct_messages_and_do_not_stop_other_devices(make_node):
    scenario = machine(6).with_gpu(1, wrong=True)
    node = make_node(
        scenario.with_faults(
            Fault("cuModuleLoadDataEx", 218, gpu_uuid(2)),
            Fault("cuLaunchKernel", 719, gpu_uuid(3)),
            Fault("cuCtxCreate", uuid=gpu_uuid(4), abort=True),
            Fault("cuCtxSynchronize", uuid=gpu_uuid(5), hang=600),
        )
    )
    for seconds in (3, 12, 60):  # a busy machine may not have examined the others within the first
        ran = gpunode("verify", "-o", "json", "--timeout", str(seconds), env=node.env)
        if [one["status"] for one in devices(ran)].count("timeout") == 1:
            break
    assert ran.code == 1
    assert [one["status"] for one in devices(ran)] == ["ok", "fail", "fail", "fail", "fail", "timeout"]
    says = [one["message"] for one in devices(ran)]
    for message, part in zip(says[1:], ["wrong", "(218)", "(719)", "SIGABRT", f"{seconds} s"], strict=True):
        assert part in message
    assert "stand-in rejects" in says[2], "the driver's own compiler log is reported"
    assert devices(ran)[1]["maxError"] == 1.0
    assert "5 of 6 devices failed (GPU 1, 2, 3, 4, 5)" in ran.document["errors"][0]["message"]


def test_lost_gpu_fails_and_the_others_are_proven(make_node):
    ran = gpunode("verify", "-o", "json", env=make_node(machine(3).with_gpu(0, lost=True)).env)
    assert (ran.code, [one["status"] for one in devices(ran)]) == (1, ["fail", "ok", "ok"])
    assert "lost" in devices(ran)[0]["message"]


def test_mig_gpu_without_devices_is_skipped_with_a_hint(make_node):
    ran = gpunode("verify", "-o", "json", env=make_node(with_mig(machine(2), 1, ())).env)
    assert (ran.code, [one["status"] for one in devices(ran)]) == (0, ["ok", "skip"])
    assert "nvidia-smi mig" in devices(ran)[1]["message"]


@pytest.mark.full
def test_without_nvml_the_devices_are_listed_by_cuda(make_node):
    ran = gpunode("verify", "-o", "json", env=make_node(machine(2), "cuda").env)
    assert (ran.code, [one["uuid"] for one in devices(ran)]) == (0, [gpu_uuid(0), gpu_uuid(1)])
    assert "libnvidia-ml.so.1" in ran.document["messages"][0]


def test_missing_libcuda_is_reported_with_a_hint(make_node):
    ran = gpunode("verify", env=make_node(machine(1), "nvml").env)
    assert ran.code == 1
    assert "libcuda.so.1 can't be loaded" in ran.err
    assert "hint: find out why: gpunode doctor" in ran.err


def test_inactive_fabric_names_the_fabric_manager(make_node):
    ran = gpunode("verify", env=make_node(machine(8).with_faults(Fault("cuInit", 802))).env)
    assert ran.code == 1
    assert "CUDA_ERROR_SYSTEM_NOT_READY (802)" in ran.err
    assert "hint: systemctl status nvidia-fabricmanager" in ran.err


def test_missing_gpu_is_a_failure(make_node):
    ran = gpunode("verify", env=make_node(machine(0)).env)
    assert ran.code == 1
    assert "CUDA_ERROR_NO_DEVICE" in ran.err


def test_file_in_the_current_directory_is_not_run(make_node, tmp_path, monkeypatch):
    (tmp_path / "array.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    node = make_node(machine(1))
    answer = verify.run(host_of(node), SilentProgress())
    assert answer.exit_code == 0


def test_image_option_on_the_host_is_a_usage_error():
    ran = gpunode("verify", "--image", "cuda")
    assert (ran.code, "an image needs a container engine" in ran.err) == (2, True)


def recorded(tmp_path, nvml):
    (tmp_path / RECORDING).parent.mkdir()
    (tmp_path / RECORDING).write_text(json.dumps({"nvml": nvml}))
    return tmp_path


def test_recorded_node_is_simulated_on_the_cpu_and_marked(tmp_path):
    gpus = tuple(Gpu(i, gpu_uuid(i), "NVIDIA H100", f"0000:{i:02x}:00.0") for i in range(8))
    root = recorded(tmp_path, {"inventory": plain(Inventory("570.86.15", "12.8", gpus, simulated=True))})
    ran = gpunode("verify", "-o", "json", "--root", str(root))
    assert (ran.code, [one["status"] for one in devices(ran)]) == (0, ["ok"] * 8)
    assert {one["message"] for one in devices(ran)} == {"simulated: computed on the CPU"}
    assert ran.document["messages"] == ["simulated: computed on the CPU"]
    last = gpunode("verify", "--root", str(root)).out.splitlines()[-1]
    assert last == "Simulated on the CPU for 8 of 8 devices: proves nothing about the GPUs"


@pytest.mark.parametrize(
    ("name", "cause"),
    [("nouveau-loaded", "nouveau controls them"), ("module-not-loaded", "no driver controls them")],
)
def test_recorded_node_without_the_nvidia_driver_fails(tmp_path, name, cause):
    recorded_host(name, tmp_path)
    ran = gpunode("verify", "--root", str(tmp_path))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.splitlines()[0] == f"error: no GPU can run CUDA: {cause}"


def test_recorded_node_without_nvml_fails_with_its_recorded_cause(tmp_path):
    root = recorded(tmp_path, {"error": {"code": 18, "message": "versions differ"}})
    ran = gpunode("verify", "--root", str(root))
    assert ran.code == 1
    assert "versions differ (NVML 18)" in ran.err


def test_vectoradd_of_an_image_passes_only_with_its_success_message(monkeypatch):
    """The container engines are tested where they run; here only the outcome matters, so it is fixed."""
    passed = ContainerOutcome(
        0, "[Vector addition]\nTest PASSED\nDone\n", "", 1.0, GpuAccess(CdiReading("docker"), "nvidia")
    )
    for outcome, code in (
        (passed, 0),
        (replace(passed, exit_code=1), 1),
        (replace(passed, stdout="Done\n"), 1),
        (replace(passed, exit_code=1, stdout="", stderr="no CUDA-capable device"), 1),
    ):
        monkeypatch.setattr(verify, "run_program", lambda *_, given=outcome: given)
        result = verify.run_in_container(
            Host(), ContainerRequest("docker", image="cuda-sample"), SilentProgress()
        )
        assert (int(result.exit_code), result.data.image) == (code, "cuda-sample")


def test_device_names_of_the_host_are_passed_into_the_container(make_node, monkeypatch):
    """The container engines are tested where they run; here a host process replaces the container."""
    node = make_node(with_mig(machine(1), 0, mixed_layout(0)))
    requests = []

    def run_here(host, request, progress):
        import sys

        requests.append(request)
        done = host.run((sys.executable, *request.argv), timeout=request.timeout)
        return ContainerOutcome(
            done.code, done.stdout, done.stderr, 1.0, GpuAccess(CdiReading(request.engine), "nvidia")
        )

    monkeypatch.setattr(verify, "run_program", run_here)
    result = verify.run_in_container(
        host_of(node), ContainerRequest("containerd", timeout=PATIENCE), SilentProgress()
    )
    assert [one.uuid for one in result.data.devices] == [mig_uuid(0, i) for i in range(4)]
    assert (int(result.exit_code), result.data.on, requests[0].engine) == (0, "containerd", "containerd")


def test_duplicate_uuid_does_not_prove_two_gpus(make_node):
    ran = gpunode("verify", "-o", "json", env=make_node(machine(2).with_gpu(1, uuid=gpu_uuid(0))).env)
    assert (ran.code, [one["status"] for one in devices(ran)]) == (1, ["ok", "fail"])
    assert "same UUID as for GPU 0" in devices(ran)[1]["message"]


@pytest.mark.parametrize(("shown", "named"), [(1, "GPU 1"), (0, "gave it no NVIDIA driver")])
def test_container_with_fewer_devices_than_the_host_fails_and_names_them(
    make_node, monkeypatch, tmp_path, shown, named
):
    """The engines are tested where they run; a host process with fewer GPUs replaces the container."""
    (tmp_path / "less").mkdir()
    less = stub_node(tmp_path / "less", machine(shown), libraries="all" if shown else "nvml")

    def run_here(host, request, progress):
        done = host.run((sys.executable, *request.argv), timeout=request.timeout, env=less.env)
        return ContainerOutcome(
            done.code, done.stdout, done.stderr, 1.0, GpuAccess(CdiReading(request.engine), "nvidia")
        )

    monkeypatch.setattr(verify, "run_program", run_here)
    host = host_of(make_node(machine(2)))
    if not shown:
        with pytest.raises(GpunodeError, match=named) as caught:
            verify.run_in_container(host, ContainerRequest("docker", timeout=PATIENCE), SilentProgress())
        assert "accept-nvidia-visible-devices" in caught.value.hint
        return
    result = verify.run_in_container(host, ContainerRequest("docker", timeout=PATIENCE), SilentProgress())
    assert [one.status for one in result.data.devices] == ["ok", "fail"]
    assert (int(result.exit_code), named in result.errors[0].message) == (1, True)


def test_missing_socket_in_the_option_is_named(tmp_path):
    ran = gpunode("verify", "--on", "docker", "--socket", str(tmp_path / "nope"))
    message = f"error: there is no socket at {tmp_path}/nope\nhint: leave out --socket, or start Docker\n"
    assert (ran.code, message in ran.err) == (3, True), ran.err
