"""Kept labels: `gpunode labels --watch` and `plugin serve --labels`, with the C stub of NVML."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.machines import recorded_host
from fixtures.scenario import Fault, Scenario, machine, mixed_layout, with_mig
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.commands.labels import _Node as Labelled
from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.labels.make import label
from gpunode.plugin.labels.nvidia import vfio_inventory
from gpunode.plugin.logfmt import open_log
from gpunode.plugin.nvidia import platform
from tests.cli import clean_environment, start_gpunode
from tests.plugin.nodes import eventually

pytestmark = pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
DRIVER_NOT_LOADED = 9


class Kept:
    """A process that keeps running and keeps the labels in `file`."""

    def __init__(self, place: Path, node: StubNode, *argv: str, **environ: str) -> None:
        self.file = place / "features.d/gfd"
        self.log_path = place / "log"
        env = clean_environment({**node.env, "GFD_OUTPUT_FILE": str(self.file), **environ})
        env["GPUNODE_PLUGIN_SERVE_REDISCOVER_SECONDS"] = "0.5"
        self.process = start_gpunode(*argv, env=env, log=self.log_path)

    def labels(self) -> dict[str, str]:
        if not self.file.exists():
            return {}
        return dict(line.split("=", 1) for line in self.file.read_text().splitlines())

    def becomes(self, seconds: float = 30.0, **wanted: str) -> bool:
        def so() -> bool:
            found = self.labels()
            return all(found.get(f"nvidia.com/gpu.{key}") == value for key, value in wanted.items())

        return eventually(so, seconds)

    def log(self) -> str:
        return self.log_path.read_text()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def kept() -> Iterator[list[Kept]]:
    started: list[Kept] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            os.kill(one.process.pid, signal.SIGKILL)
            one.process.wait(30)


def cut(scenario: Scenario) -> Scenario:
    return with_mig(scenario, 0, mixed_layout(0))


def children(pid: int) -> list[str]:
    """Command lines of a process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == pid:
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except (OSError, IndexError):
                continue
    return found


def test_gpu_changes_are_soon_in_the_file(tmp_path: Path, kept: list[Kept]) -> None:
    node = stub_node(tmp_path, machine(2))
    kept.append(Kept(tmp_path, node, "labels", "--watch", "--mig-strategy", "mixed"))
    one = kept[0]
    assert one.becomes(count="2", replicas="1"), one.log()
    before = one.file.stat()
    node.write(cut(machine(2)))
    assert eventually(lambda: any("/mig-" in key for key in one.labels())), one.log()
    assert one.file.stat().st_ino != before.st_ino
    node.write(machine(2).with_faults(Fault("nvmlInitWithFlags", DRIVER_NOT_LOADED)))
    one.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: "reading the GPUs" in one.log()), one.log()
    assert one.labels()["nvidia.com/gpu.count"] == "2"
    assert one.end() == 0
    assert one.labels()["nvidia.com/gpu.count"] == "2"  # and it stays so


def test_changed_config_file_is_applied(tmp_path: Path, kept: list[Kept]) -> None:
    node, config = stub_node(tmp_path, machine(2)), tmp_path / "c.yaml"
    config.write_text("version: v1\nflags: {gfd: {oneshot: false}}\n")
    kept.append(Kept(tmp_path, node, "labels", "--config-file", str(config)))
    one = kept[0]
    assert one.becomes(replicas="1"), one.log()
    config.write_text("sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n")
    one.process.send_signal(signal.SIGHUP)
    assert one.becomes(replicas="3", product="NVIDIA-H100-80GB-HBM3-SHARED"), one.log()
    config.write_text("sharing: 7\n")  # an edit is enough
    assert eventually(lambda: "the config file was rejected" in one.log()), one.log()
    assert one.labels()["nvidia.com/gpu.replicas"] == "3"
    assert one.end() == 0


@pytest.mark.full
def test_unwritable_target_is_retried(tmp_path: Path, kept: list[Kept]) -> None:
    node = stub_node(tmp_path, machine(1))
    blocked = tmp_path / "features.d"
    blocked.write_text("a file where a directory should be")
    kept.append(Kept(tmp_path, node, "labels", "--watch", "--sleep-interval", "1s"))
    one = kept[0]
    assert eventually(lambda: "the labels are unchanged" in one.log()), one.log()
    blocked.unlink()
    assert one.becomes(count="1"), one.log()
    assert eventually(lambda: "the labels are updated again" in one.log()), one.log()


@pytest.mark.full
def test_tegra_is_queried_through_cuda_until_it_responds(tmp_path: Path, kept: list[Kept]) -> None:
    orin = machine(1, name="Orin", cc="8.7")
    node = stub_node(tmp_path, orin.with_faults(Fault("cuInit", 100)), libraries="cuda")
    argv = ("labels", "--watch", "--device-discovery-strategy", "tegra", "--sleep-interval", "1s")
    kept.append(Kept(tmp_path, node, *argv))
    one = kept[0]
    assert eventually(lambda: "the labels are unchanged" in one.log()), one.log()
    assert one.labels() == {}
    node.write(orin)
    assert one.becomes(product="Orin", count="1"), one.log()
    assert one.end() == 0


def test_tegra_without_nvml_is_detected_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "tegra_files", lambda host: True)
    node = stub_node(tmp_path, machine(1, name="Orin", cc="8.7"), libraries="cuda")
    host = Host(environ=clean_environment(node.env))
    assert label(host, Settings()).values["nvidia.com/gpu.product"] == "Orin"
    notified: list[bool] = []
    kept_by = Labelled(host, open_log(sys.stderr, {}), Settings())
    kept_by.on_change = lambda: notified.append(True)
    kept_by.broken("libnvidia-ml.so.1 isn't there", sure=True)
    assert (notified, kept_by.source()) == ([True], (Settings(), Inventory("")))


def test_gpus_of_virtual_machines_are_read_from_the_bus_again(tmp_path: Path) -> None:
    host = recorded_host("gpu-bound-vfio-rocky9", tmp_path)
    settings = Settings(device_discovery_strategy="vfio", rediscover_seconds=0.0)
    kept_by = Labelled(host, open_log(sys.stderr, {}), settings)
    kept_by.let_go()  # no driver is in use
    source = kept_by.source()
    assert source is not None and source[1] is not None and source[1].gpus
    shutil.rmtree(tmp_path / "sys/bus/pci/devices")
    assert kept_by.source() == (settings, vfio_inventory(host))
    assert not vfio_inventory(host).gpus


def test_plugin_keeps_labels_with_its_own_nvml(tmp_path: Path, short: Path, kept: list[Kept]) -> None:
    node = stub_node(tmp_path, machine(2))
    (short / "dp").mkdir()  # its kubelet never starts
    own = ("--kubelet-socket", str(short / "dp/kubelet.sock"), "--state-dir", str(short / "state"))
    kept.append(Kept(tmp_path, node, "plugin", "serve", "--labels", "file", *own))
    one = kept[0]
    assert one.becomes(count="2"), one.log()
    watchers = [line for line in children(one.process.pid) if "gpunode.gpu" in line]
    assert len(watchers) == 1
    node.write(machine(3))
    assert one.becomes(count="3"), one.log()
    assert one.end() == 0
    assert one.labels()["nvidia.com/gpu.count"] == "3"


def test_service_has_no_stdout(tmp_path: Path) -> None:
    from tests.cli import gpunode

    ran = gpunode("plugin", "serve", "--labels", "stdout")
    assert (ran.code, "a service has no stdout" in ran.err) == (1, True)
