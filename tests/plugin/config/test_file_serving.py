"""`gpunode plugin serve` with a config file, as a process with the kubelet stub."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpunode.host import Host
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import eventually
from tests.plugin.serving import Serving

GPU = "nvidia.com/gpu"
SLICED = (
    "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {{name: nvidia.com/gpu, replicas: {}}}\n"
)


@pytest.fixture
def kubelet(short: Path) -> Iterator[KubeletStub]:
    (short / "dp").mkdir()
    with KubeletStub(Host(), str(short / "dp")) as made:
        yield made


@pytest.fixture
def serving(short: Path, kubelet: KubeletStub) -> Iterator[Serving]:
    (short / "config.yaml").write_text(SLICED.format(2))
    made = Serving(short, ["--simulate", "h100:4", "--config-file", str(short / "config.yaml")])
    yield made
    assert made.end() == 0
    assert "Traceback" not in made.log()


def test_valid_edits_take_effect_and_invalid_ones_do_not(
    serving: Serving, kubelet: KubeletStub, short: Path
) -> None:
    file = short / "config.yaml"
    assert kubelet.wait_allocatable(GPU, 8, 30), serving.log()
    assert 'simulate=h100:4 time-slicing="nvidia.com/gpu by 2"' in serving.log()
    registered = list(kubelet.registrations)
    file.write_text(SLICED.format(4))
    assert kubelet.wait_allocatable(GPU, 16, 30), serving.log()
    file.write_text(SLICED.format(1) + "nope: 3\n")
    assert serving.says("the config file was rejected; the last valid one stays active")
    assert serving.says("nope: unknown key")
    assert kubelet.allocatable(GPU) == 16
    file.write_text(SLICED.format(3) + "flags: {gpunode: {listen: ':9400'}}\n")
    assert kubelet.wait_allocatable(GPU, 12, 30), serving.log()
    assert serving.says('msg="these changes need a restart" options=--listen')
    # no stream ended: the kubelet needed no new registration
    assert list(kubelet.registrations) == registered


def test_sighup_rereads_the_file_without_a_restart(
    serving: Serving, kubelet: KubeletStub, short: Path
) -> None:
    assert kubelet.wait_allocatable(GPU, 8, 30), serving.log()
    (short / "config.yaml").write_text(SLICED.format(5))
    serving.process.send_signal(signal.SIGHUP)
    assert kubelet.wait_allocatable(GPU, 20, 30), serving.log()
    assert serving.says("signal=SIGHUP")
    assert serving.process.poll() is None
    assert eventually(lambda: "config file loaded" in serving.log())


def test_sigquit_exits_cleanly(serving: Serving, kubelet: KubeletStub) -> None:
    assert kubelet.wait_allocatable(GPU, 8, 30), serving.log()
    serving.process.send_signal(signal.SIGQUIT)
    assert serving.process.wait(20) == 0
    assert "signal=SIGQUIT" in serving.log()


def test_command_line_of_an_existing_deployment_serves(short: Path, kubelet: KubeletStub) -> None:
    flags = ["--fail-on-init-error=false", "--pass-device-specs=true", "--device-list-strategy=envvar"]
    flags += ["--device-id-strategy=index", "-mig-strategy=none", "--nvidia-driver-root=/run/nvidia/driver"]
    serving = Serving(short, ["--simulate", "h100:2", *flags])
    try:
        assert kubelet.wait_allocatable(GPU, 2, 30), serving.log()
        given = kubelet.allocate(GPU, 2)
        assert set(given.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == {"0", "1"}
    finally:
        assert serving.end() == 0
