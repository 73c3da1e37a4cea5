"""`gpunode plugin serve --simulate` and `gpunode plugin inject`, as a cluster under test uses them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import Ran, gpunode
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import eventually
from tests.plugin.serving import Serving, Start, kubelet

GPU = "nvidia.com/gpu"
QUICK = ("--health-hold-down", "0s", "--health-poll-interval", "1s")


@pytest.fixture
def node(short: Path) -> Iterator[tuple[KubeletStub, Start]]:
    with kubelet(short) as made:
        yield made


def status(serving: Serving) -> str:
    own = ("--state-dir", serving.state, "--kubelet-socket", str(serving.directory / "kubelet.sock"))
    return gpunode("plugin", "status", "--no-nvml", *own).out


def inject(serving: Serving, *words: str) -> Ran:
    assert serving.says("faults can be injected"), serving.log()  # it may advertise its GPUs before that
    return gpunode("plugin", "inject", *words, "--state-dir", serving.state)


def test_node_without_gpus_has_eight_simulated_ones(node) -> None:
    stub, start = node
    serving = start("--simulate", "h100:8,node=n1", *QUICK)
    assert stub.wait_allocatable(GPU, 8, 60), serving.log()
    assert "these GPUs are simulated" in serving.log()
    assert eventually(lambda: "simulated: 8 of 8 nvidia.com/gpu healthy" in status(serving)), status(serving)
    given = stub.allocate(GPU, 2)
    assert given.envs == {"NVIDIA_VISIBLE_DEVICES": ",".join(given.ids), "GPUNODE_SIMULATED": "1"}
    real = {int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*")}
    assert set(stub.numa_nodes(GPU).values()) <= (real or {0, 1}), "the kubelet would refuse pods"
    assert serving.end() == 0
    assert "Traceback" not in serving.log()


def test_with_log_format_json_each_line_is_an_object(node) -> None:
    stub, start = node
    serving = start("--simulate", "h100:2", "--log-format", "json", *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    stub.allocate(GPU, 1)
    assert serving.says('"msg": "allocated'), serving.log()
    assert serving.end() == 0
    lines = [json.loads(line) for line in serving.log().splitlines()]
    assert all(list(line)[:3] == ["time", "level", "msg"] for line in lines)
    assert {line["msg"] for line in lines} >= {"starting", "stopped"}
    (first, *_) = lines
    assert first["log-format"] == "json" and first["level"] == "info"


def test_container_gets_no_device_that_does_not_exist(node) -> None:
    stub, start = node
    strategies = ("--device-list-strategy", "volume-mounts,cdi-annotations,cdi-cri", "--pass-device-specs")
    serving = start("--simulate", "a100:1,mig=3g.20gb*2", "--mig-strategy", "mixed", *strategies)
    name = "nvidia.com/mig-3g.20gb"
    assert stub.wait_allocatable(name, 2, 60), serving.log()
    given = serving.allocate(name, stub.allocate(name, 1).ids)
    assert not given.mounts and not given.devices and not given.cdi_devices and not given.annotations
    assert given.envs["GPUNODE_SIMULATED"] == "1"


def test_fault_is_detected_and_cleared(node) -> None:
    stub, start = node
    serving = start("--simulate", "h100:4", *QUICK)
    assert stub.wait_allocatable(GPU, 4, 60), serving.log()
    done = inject(serving, "lost", "--gpu", "2")
    assert (done.code, done.out.strip()) == (0, "injected lost, GPU 2"), done.err
    assert stub.wait_allocatable(GPU, 3, 30), serving.log()
    assert inject(serving, "return", "--gpu", "2").code == 0
    assert stub.wait_allocatable(GPU, 4, 30), serving.log()
    assert inject(serving, "unplug", "--gpu", "all").code == 0
    assert stub.wait_allocatable(GPU, 0, 30), serving.log()
    assert inject(serving, "plug", "--gpu", "all").code == 0
    assert stub.wait_allocatable(GPU, 4, 30), serving.log()


def test_xid_makes_its_gpu_unhealthy_until_a_reset(node) -> None:
    stub, start = node
    serving = start("--simulate", "h100:4", *QUICK)
    assert stub.wait_allocatable(GPU, 4, 60), serving.log()
    assert inject(serving, "xid", "95", "--gpu", "3").code == 0
    assert stub.wait_allocatable(GPU, 3, 30), serving.log()
    assert inject(serving, "reset", "--gpu", "3").code == 0
    assert stub.wait_allocatable(GPU, 4, 30), serving.log()


@pytest.mark.full
def test_unloaded_driver_affects_all_gpus_until_it_returns(node) -> None:
    stub, start = node
    serving = start("--simulate", "t4:2", *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    assert inject(serving, "driver", "gone").code == 0
    assert stub.wait_allocatable(GPU, 0, 30), serving.log()
    assert inject(serving, "driver", "back").code == 0
    assert stub.wait_allocatable(GPU, 2, 30), serving.log()


def test_repartition_changes_the_advertised_resources(node) -> None:
    stub, start = node
    serving = start("--simulate", "a100:2", "--mig-strategy", "mixed", *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    assert inject(serving, "mig", "3g.20gb/1g.5gb*3", "--gpu", "1").code == 0
    assert stub.wait_allocatable("nvidia.com/mig-1g.5gb", 3, 30), serving.log()
    assert stub.wait_allocatable(GPU, 1, 30), serving.log()


def test_script_runs_once(node, tmp_path: Path) -> None:
    stub, start = node
    serving = start("--simulate", "h100:4", *QUICK)
    assert stub.wait_allocatable(GPU, 4, 60), serving.log()
    script = tmp_path / "night.jsonl"
    script.write_text('{"at": 0.2, "gpu": 0, "unplug": true}\n{"gpu": 1, "unplug": true}\n')
    done = inject(serving, "--script", str(script), "-o", "json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert (document["kind"], [fault["gpu"] for fault in document["data"]["faults"]]) == (
        "InjectedFault",
        ["1", "0"],
    )
    assert stub.wait_allocatable(GPU, 2, 30), serving.log()


def test_invalid_fault_is_refused_with_a_hint(node) -> None:
    stub, start = node
    serving = start("--simulate", "h100:2", *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    done = inject(serving, "lost", "--gpu", "7")
    assert (done.code, "no simulated GPU '7'" in done.err) == (1, True), done.err
    assert inject(serving, "xid", "79").code == 2
    assert inject(serving).code == 2
    assert inject(serving, "--script", "/does/not/exist").code == 1
    assert stub.allocatable(GPU) == 2


def test_faults_are_sent_only_to_a_simulated_plugin(short: Path) -> None:
    done = gpunode("plugin", "inject", "xid", "79", "--gpu", "0", "--state-dir", str(short))
    assert done.code == 3
    assert "no simulated plugin accepts faults" in done.err
    assert "plugin serve --simulate" in done.err


def test_invalid_specification_is_refused_at_the_start(short: Path) -> None:
    done = gpunode("plugin", "serve", "--simulate", "h10:8")
    assert done.code == 2, done.err
    assert "did you mean h100?" in done.err


NONSENSE = (b"\xff\xfe\n", b"[]\n", b"{}\n", b'{"gpu": {}, "lost": []}\n', b"[" * 9000 + b"\n", b"{")


def test_invalid_control_message_is_answered_and_the_plugin_keeps_running(node) -> None:
    stub, start = node
    serving = start("--simulate", "h100:1", *QUICK)
    assert serving.says("faults can be injected"), serving.log()
    for line in NONSENSE:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            client.connect(str(Path(serving.state) / "simulated.sock"))
            client.sendall(line)
            client.shutdown(socket.SHUT_WR)
            with client.makefile("rb") as lines:
                assert b'{"error": ' in lines.readline(), line
    assert inject(serving, "unplug", "--gpu", "0").code == 0
    assert stub.wait_allocatable(GPU, 0, 30), serving.log()
    assert "Traceback" not in serving.log()


@pytest.mark.full
def test_silent_client_delays_others_only_briefly(node) -> None:
    _, start = node
    serving = start("--simulate", "h100:1", *QUICK)
    assert serving.says("faults can be injected"), serving.log()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(Path(serving.state) / "simulated.sock"))
        assert inject(serving, "unplug", "--gpu", "0").code == 0
        assert serving.end() == 0


def test_control_socket_is_private_and_removed_at_the_end(node) -> None:
    _, start = node
    serving = start("--simulate", "h100:1", *QUICK)
    assert serving.says("faults can be injected"), serving.log()
    path = Path(serving.state) / "simulated.sock"
    assert path.is_socket()
    assert path.stat().st_mode & 0o777 == 0o600
    assert serving.end() == 0
    assert not path.exists()


def test_state_directory_without_room_for_the_socket_is_named(node, short: Path) -> None:
    _, start = node
    serving = start("--simulate", "h100:1", "--state-dir", f"{short}/{'d' * 100}")
    assert serving.says("no faults can be injected"), serving.log()
    assert 'hint="choose another --state-dir"' in serving.log()


def test_ordinary_user_can_simulate(short: Path) -> None:
    """Scheduler tests run without root: directories for the sockets and the state suffice."""
    ordinary = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if shutil.which("unshare") is None or subprocess.run([*ordinary, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    (short / "dp").mkdir()
    at = ["--kubelet-socket", str(short / "dp/kubelet.sock"), "--state-dir", str(short / "state")]
    command = [*ordinary, sys.executable, "-m", "gpunode", "plugin", "serve", "--simulate", "h100:8", *at]
    log = short / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream)
    try:
        assert eventually((short / "dp/nvidia-gpu.sock").is_socket, 60), log.read_text()
        assert eventually((short / "state/simulated.sock").is_socket, 60), log.read_text()
    finally:
        process.terminate()
        assert process.wait(20) == 0, log.read_text()
