"""`gpunode labels` as a user runs it: the C stub of NVML, files, flags and variables of another tool."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fixtures.scenario import Fault, Scenario, StubMig, machine, mig_uuid, with_mig
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.plugin.labels.sinks import FeatureFile
from tests.cli import Ran, gpunode

needs_stub = pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
DRIVER_NOT_LOADED = 9


def a100(count: int) -> Scenario:
    """A100s of which the first has 1g.5gb and 1g.5gb+me devices, as hardware reports them."""
    found = machine(count, name="NVIDIA A100-SXM4-40GB", cc="8.0")
    for index in range(count):
        found = found.with_gpu(index, memory=40960 << 20)
    slices = (
        StubMig(0, mig_uuid(0, 0), gi=7, profile=0, megabytes=4864, sms=14, engines=(1, 0, 0, 0, 0)),
        StubMig(1, mig_uuid(0, 1), gi=8, profile=7, megabytes=4864, sms=14, engines=(1, 1, 0, 1, 1)),
    )
    return with_mig(found, 0, slices)


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    return stub_node(tmp_path, a100(2))


def labels(node: StubNode, *argv: str, **env: str) -> Ran:
    return gpunode("labels", *argv, env={**node.env, **env})


def values(ran: Ran) -> dict[str, str]:
    assert ran.code == 0, ran.err
    return dict(line.split("=", 1) for line in ran.out.splitlines())


def labels_below(labels: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The labels under a name, without it."""
    return {k.removeprefix(f"{prefix}."): v for k, v in labels.items() if k.startswith(f"{prefix}.")}


@needs_stub
def test_labels_from_nvml(node: StubNode) -> None:
    found = values(labels(node, "--mig-strategy", "mixed"))
    assert labels_below(found, "nvidia.com/mig-1g.5gb.me") == {
        "product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.me",
        "count": "1",
        "replicas": "1",
        "sharing-strategy": "none",
        "memory": "4864",
        "multiprocessors": "14",
        "slices.gi": "1",
        "slices.ci": "1",
        "engines.copy": "1",
        "engines.decoder": "1",
        "engines.encoder": "0",
        "engines.jpeg": "1",
        "engines.ofa": "1",
    }
    assert found["nvidia.com/mig-1g.5gb.engines.ofa"] == "0"
    assert found["nvidia.com/gpu.count"] == "2"
    assert found["nvidia.com/gpu.memory"] == "40960"
    assert found["nvidia.com/mig.capable"] == "true"
    assert abs(int(found["nvidia.com/gfd.timestamp"]) - time.time()) < 60


@pytest.mark.full
@needs_stub
def test_clique_and_gpus_without_mig(tmp_path: Path) -> None:
    linked = machine(2).with_gpu(0, fabric=(3, 0, 0), reported={"cluster": 0xA1, "clique": 7})
    found = values(labels(stub_node(tmp_path, linked)))
    assert found["nvidia.com/gpu.clique"] == "a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1.7"
    for fabric in ((2, 0, 0), (3, 999, 0)):
        other = linked.with_gpu(0, fabric=fabric)
        assert "nvidia.com/gpu.clique" not in values(labels(stub_node(tmp_path, other)))
    old = values(labels(stub_node(tmp_path, machine(1, name="Tesla T4", cc="7.5"))))
    assert (old["nvidia.com/mig.capable"], old["nvidia.com/gpu.family"]) == ("false", "turing")


@needs_stub
def test_flags_variables_and_file_of_gpu_feature_discovery(node: StubNode, tmp_path: Path) -> None:
    config, product = tmp_path / "c.yaml", tmp_path / "product"
    product.write_text("DGX A100\n")
    config.write_text(
        "version: v1\n"
        "flags: {migStrategy: mixed, gfd: {oneshot: true, noTimestamp: true, sleepInterval: 60s}}\n"
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
    )
    found = values(labels(node, "--config-file", str(config), GFD_MACHINE_TYPE_FILE=str(product)))
    assert "nvidia.com/gfd.timestamp" not in found
    assert found["nvidia.com/mig.strategy"] == "mixed"
    assert found["nvidia.com/gpu.machine"] == "DGX-A100"
    assert found["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB-SHARED"
    first = values(labels(node, GFD_CONFIG_FILE=str(config), GFD_MIG_STRATEGY="none", MIG_STRATEGY="single"))
    assert "nvidia.com/mig.strategy" not in first
    for name in ("GPUNODE_LABELS_TO", "GPUNODE_PLUGIN_SERVE_LABELS"):
        refused = labels(node, **{name: "nowhere"})
        assert refused.code == 2 and name in refused.err and "nowhere" in refused.err, refused.err
    go = values(labels(node, "-oneshot", "-no-timestamp", "-mig-strategy=single"))
    assert "nvidia.com/gfd.timestamp" not in go
    assert go["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB-MIG-INVALID"


@pytest.mark.full
@needs_stub
@pytest.mark.parametrize("flag", ["--output", "-o"])
def test_feature_file_under_its_other_option_names(node: StubNode, tmp_path: Path, flag: str) -> None:
    path = tmp_path / "gfd"
    assert f"{path}: would be created" in labels(node, flag, str(path), "--dry-run").out


@needs_stub
def test_feature_file(node: StubNode, tmp_path: Path) -> None:
    path = tmp_path / "features.d/gfd"
    flag = "--output-file"
    dry = labels(node, flag, str(path), "--dry-run")
    assert dry.code == 0, dry.err
    assert f"{path}: would be created" in dry.out
    assert "+nvidia.com/gpu.count=2" in dry.out
    assert not path.parent.exists()
    assert f"{path}: created" in labels(node, flag, str(path)).out
    assert path.stat().st_mode & 0o7777 == 0o644
    text = path.read_text()
    lines = text.splitlines()
    assert lines == sorted(lines)
    assert "nvidia.com/gpu.product=NVIDIA-A100-SXM4-40GB" in lines
    stamp = next(line for line in lines if "gfd.timestamp" in line)
    path.write_text(text.replace(stamp, "nvidia.com/gfd.timestamp=1"))
    before = path.stat()
    assert f"{path}: unchanged" in labels(node, flag, str(path)).out  # a different time is no change
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    node.write(a100(3))
    assert f"{path}: updated" in labels(node, flag, str(path)).out
    assert "nvidia.com/gpu.count=3" in path.read_text()
    assert "nvidia.com/gfd.timestamp=1\n" not in path.read_text()
    assert sorted(path.parent.iterdir()) == [path]


def test_feature_file_changed_concurrently_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gfd"
    path.write_text("nvidia.com/gpu.count=1\n")
    numbers, write = iter(range(5, 8)), Host.write_atomic

    def busy(host: Host, *args: Any, **more: Any) -> None:
        """Another tool writes right before each of our writes."""
        for number in numbers:
            path.write_text(f"nvidia.com/gpu.count={number}\n")
            break
        write(host, *args, **more)

    monkeypatch.setattr(Host, "write_atomic", busy)
    put = FeatureFile(Host(), str(path)).put
    assert put({"nvidia.com/gpu.count": "2"}, dry_run=False).action == "updated"
    assert path.read_text() == "nvidia.com/gpu.count=2\n"
    numbers = iter(range(10, 99))
    with pytest.raises(ConfigError, match="changed while"):
        put({"nvidia.com/gpu.count": "3"}, dry_run=False)


def test_symlink_in_place_of_the_feature_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, precious = tmp_path / "gfd", tmp_path / "ld.so.preload"
    precious.touch()
    path.symlink_to(precious)
    put = FeatureFile(Host(), str(path)).put
    for dry_run in (True, False):
        with pytest.raises(ConfigError, match="is a symlink to"):
            put({"nvidia.com/gpu.count": "2"}, dry_run=dry_run)
    monkeypatch.setattr(Host, "is_symlink", lambda *_: False)  # as if it came a moment later
    assert put({"nvidia.com/gpu.count": "2"}, dry_run=False).action == "updated"
    assert (precious.read_text(), path.is_symlink()) == ("", False)


@needs_stub
def test_other_file_is_not_overwritten(node: StubNode, tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0:root:/root:/bin/bash\n")
    ran = labels(node, "--output-file", str(path))
    assert ran.code == 1
    assert "is not a feature file" in ran.err
    assert path.read_text().startswith("root:x")
    path.write_text("# +expiry-time=2030-01-01T00:00:00Z\nnvidia.com/gpu.count=1\n\n")
    assert labels(node, "--output-file", str(path)).code == 0


@needs_stub
def test_labels_as_json(node: StubNode, tmp_path: Path) -> None:
    path = tmp_path / "gfd"
    found = labels(node, "--output-file", str(path), "-o", "json", "--mig-strategy", "single").document
    assert found["kind"] == "NodeLabels"
    assert found["status"] == "warn"
    assert found["data"]["vendor"] == "nvidia"
    assert found["data"]["labels"]["nvidia.com/gpu.replicas"] == "0"
    (change,) = found["data"]["changes"]
    assert (change["path"], change["action"]) == (str(path), "created")
    assert "MIG-INVALID" in found["messages"][0]


@needs_stub
def test_unresponsive_driver(node: StubNode) -> None:
    node.write(a100(2).with_faults(Fault("nvmlInitWithFlags", DRIVER_NOT_LOADED)))
    found = values(labels(node, "--fail-on-init-error=false"))
    assert found.keys() - {"nvidia.com/vgpu.present"} == {"nvidia.com/gfd.timestamp"}


def test_missing_gpu_and_unresponsive_gpu(tmp_path: Path) -> None:
    """A recorded machine with an empty bus, and one with a GPU unknown to every driver."""
    (tmp_path / ".gpunode").mkdir()
    nvml = {"error": {"code": DRIVER_NOT_LOADED, "message": "driver not loaded"}}
    (tmp_path / ".gpunode/recording.json").write_text(json.dumps({"nvml": nvml}))
    bus = tmp_path / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    found = values(gpunode("labels", "--root", str(tmp_path)))
    assert found.keys() == {"nvidia.com/gfd.timestamp", "nvidia.com/vgpu.present"}
    gpu = bus / "0000:3b:00.0"
    gpu.mkdir()
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x2330")):
        (gpu / name).write_text(text + "\n")
    ran = gpunode("labels", "--root", str(tmp_path))
    assert ran.code == 1
    assert "the GPUs can't be labelled: driver not loaded" in ran.err
    assert f"hint: find out why: gpunode --root {tmp_path} doctor" in ran.err
    assert gpunode("labels", "--root", str(tmp_path), "--fail-on-init-error=false").code == 0


def test_gpus_reserved_for_virtual_machines(tmp_path: Path) -> None:
    gpu = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    gpu.mkdir(parents=True)
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x2330")):
        (gpu / name).write_text(text + "\n")
    window = "0x{:016x} 0x{:016x} 0x{:016x}\n"
    (gpu / "resource").write_text(
        window.format(0, (1 << 24) - 1, 0)
        + window.format(1 << 40, (1 << 40) + (128 << 30) - 1, 0x14220C)
        + window.format(0x3000, 0x307F, 0x40101)
        + 3 * window.format(0, 0, 0)
    )
    (tmp_path / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    (gpu / "driver").symlink_to("../../drivers/vfio-pci")
    ids = tmp_path / "usr/share/pci.ids"  # SUSE's path
    ids.parent.mkdir(parents=True)
    ids.write_text(
        "10dd  Enhanced\n\t2330  Not this\n10de  NVIDIA\n\t232f  x\n\t2330  GH100 [H100 SXM5]\n"
        "\t\t10de 16c1  H100\n10df  E\n\t2330  nor this\n"
    )
    found = values(
        gpunode("labels", "--root", str(tmp_path), "--device-discovery-strategy=vfio", "--no-timestamp")
    )
    assert {
        k: found[f"nvidia.com/{k}"] for k in ("gpu.product", "gpu.memory", "gpu.count", "gpu.replicas")
    } == {
        "gpu.product": "GH100-H100-SXM5",
        "gpu.memory": str(128 << 10),
        "gpu.count": "1",
        "gpu.replicas": "1",
    }
    assert found["nvidia.com/cuda.driver-version.full"] == "unknown.unknown.unknown"
    assert found["nvidia.com/gpu.mode"] == "compute"
    by_nvml = gpunode("labels", "--root", str(tmp_path))
    assert (by_nvml.code, "--device-discovery-strategy vfio labels them" in by_nvml.err) == (1, True)
    assert not any("cuda.runtime" in key or "family" in key for key in found)
    served = gpunode("plugin", "check-config", "--device-discovery-strategy=vfio")
    assert "can't be served to containers" in served.err


@needs_stub
def test_tegra_is_queried_through_cuda(tmp_path: Path) -> None:
    """NVML doesn't exist: CUDA's values for an AGX Orin, and the resulting labels."""
    orin = machine(1, name="Orin", cc="8.7").with_gpu(0, memory=31378 << 20)
    node = stub_node(tmp_path, orin, libraries="cuda")
    found = values(labels(node, "--device-discovery-strategy", "tegra", "--no-timestamp"))
    for left in ("gpu.machine", "vgpu.present"):
        found.pop(f"nvidia.com/{left}", "")
    assert found == {
        "nvidia.com/cuda.driver-version.full": "unknown.unknown.unknown",
        "nvidia.com/cuda.driver-version.major": "unknown",
        "nvidia.com/cuda.driver-version.minor": "unknown",
        "nvidia.com/cuda.driver-version.revision": "unknown",
        "nvidia.com/cuda.driver.major": "unknown",
        "nvidia.com/cuda.driver.minor": "unknown",
        "nvidia.com/cuda.driver.rev": "unknown",
        "nvidia.com/cuda.runtime-version.full": "12.2",
        "nvidia.com/cuda.runtime-version.major": "12",
        "nvidia.com/cuda.runtime-version.minor": "2",
        "nvidia.com/cuda.runtime.major": "12",
        "nvidia.com/cuda.runtime.minor": "2",
        "nvidia.com/gpu.compute.major": "8",
        "nvidia.com/gpu.compute.minor": "7",
        "nvidia.com/gpu.count": "1",
        "nvidia.com/gpu.family": "ampere",
        "nvidia.com/gpu.memory": "31378",
        "nvidia.com/gpu.mode": "unknown",
        "nvidia.com/gpu.product": "Orin",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/mig.capable": "false",
        "nvidia.com/mps.capable": "false",
    }
    node.write(orin.with_faults(Fault("cuInit", 100)))
    ran = labels(node, "--device-discovery-strategy", "tegra")
    assert (ran.code, "the GPUs can't be labelled: cuInit: " in ran.err) == (1, True), ran.err
    node.write(orin.with_faults(Fault("cuDeviceGetName", abort=True)))
    assert (
        "CUDA crashed the process that queried it (SIGABRT)"
        in labels(node, "--device-discovery-strategy", "tegra").err
    )


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--mig-strategy", "all"), 2, "'all' is not one of none, single, mixed"),
        (("--to", "disk"), 2, "'disk' is not one of stdout, file, node-feature, node"),
        (("--output-file", "gfd"), 2, "'gfd' is not an absolute path"),
        (("--watch",), 2, "--watch needs a place for the labels"),
        (("--to", "node", "--root", "/var/empty-not"), 2, "is not a directory"),
        (("--simulate", "h100:8,mig=9g"), 2, "has no MIG profile '9g'"),
    ],
)
def test_invalid_input(argv: tuple[str, ...], code: int, words: str) -> None:
    ran = gpunode("labels", *argv)
    assert (ran.code, words in ran.err) == (code, True), ran.err


@needs_stub
def test_one_shot_run_opens_nvml_once_and_queries_each_gpu_once(node: StubNode) -> None:
    """On hardware opening NVML takes seconds, and so does each call. Unused faults count the calls."""
    calls = {"nvmlInitWithFlags": 1, "nvmlDeviceGetHandleByIndex": 2, "nvmlDeviceGetUUID": 4}
    calls |= {"nvmlDeviceGetName": 2, "nvmlDeviceGetMemoryInfo": 2, "nvmlDeviceGetMigMode": 2}
    node.write(a100(2).with_faults(*(Fault(call, after=10**6) for call in calls)))
    assert values(labels(node, "--mig-strategy", "mixed"))["nvidia.com/gpu.count"] == "2"
    seen = {}
    for number, call in enumerate(calls):
        counter = node.scenario_path.with_name(f"{node.scenario_path.name}.calls.{number}")
        seen[call] = counter.stat().st_size if counter.exists() else 0
    assert all(1 <= seen[call] <= most for call, most in calls.items()), seen


@needs_stub
def test_one_shot_run_loads_only_needed_libraries(node: StubNode) -> None:
    done = labels(node, PYTHONPROFILEIMPORTTIME="1")
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.err.splitlines()}
    assert "gpunode" in loaded
    assert not loaded & {
        "kubernetes",
        "grpc",
        "google",
        "ssl",
        "yaml",
        "asyncio",
        "urllib3",
        "jinja2",
    }
