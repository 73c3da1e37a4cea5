"""`gpunode plugin status` with our plugin and with another one."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpunode.output.typed import plain
from tests.plugin import nodes
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import content, eventually
from tests.plugin.observe.node import GPU, QUICK, another_plugin, command, inject, status
from tests.plugin.serving import Start, kubelet

SHARED = """
version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    resources:
    - {name: nvidia.com/gpu, replicas: 4}
"""


@pytest.fixture
def node(short: Path) -> Iterator[tuple[Path, KubeletStub, Start]]:
    with kubelet(short) as (stub, start):
        yield short, stub, start


def units(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {unit["index"]: unit for unit in found["data"]["units"]}


def reported(place: Path) -> bool:
    """Wait until the plugin's own status says that the kubelet follows its devices."""
    return eventually(lambda: '"watched": true' in content(place / "state/status.json"))


def holders(unit: dict[str, Any]) -> list[str]:
    return [f"{one['namespace']}/{one['pod']}/{one['container']}" for one in unit["holders"]]


@pytest.mark.full
def test_holders_and_unhealthy_devices_are_listed(node) -> None:
    place, stub, start = node
    serving = start("--simulate", "h100:4", *QUICK)
    assert stub.wait_allocatable(GPU, 4, 60), serving.log()
    assert reported(place), serving.log()
    held = stub.admit("ml/train-0", "main", {GPU: 2})
    inject(serving, "xid", "79", "--gpu", "3")
    assert stub.wait_allocatable(GPU, 3, 30), serving.log()
    found = status(place)  # at once: devices that only the kubelet knows are waited for
    assert (found["kind"], found["status"], found["exitCode"]) == ("PluginStatus", "warn", 0)
    data = found["data"]
    assert data["kubelet"] == "listening"
    assert (data["plugin"]["state"], data["plugin"]["ready"]) == ("serving", True)
    assert data["plugin"]["pid"] == serving.process.pid
    [resource] = data["resources"]
    assert (resource["plugin"], resource["registered"]) == ("gpunode", True)
    assert (resource["capacity"], resource["allocatable"], resource["held"]) == (4, 3, 2)
    ill = units(found)["3"]
    assert (ill["health"], ill["problem"]["code"], ill["problem"]["mend"]) == (
        "unhealthy",
        "xid-79",
        "reboot",
    )
    assert ill["problem"]["reason"] and ill["problem"]["since"].endswith("Z")
    by_id = {unit["id"]: unit for unit in data["units"]}
    assert [holders(by_id[device]) for device in held.ids] == [["ml/train-0/main"]] * 2
    assert {unit["model"] for unit in data["units"]} == {"NVIDIA H100 80GB HBM3"}
    [listening] = data["sockets"]
    assert (listening["state"], listening["pid"]) == ("listening", serving.process.pid)
    assert listening["resource"] == GPU
    inject(serving, "reset", "--gpu", "3")
    assert stub.wait_allocatable(GPU, 4, 30), serving.log()
    assert eventually(lambda: status(place)["status"] == "ok")


def test_table_has_holders_and_problems(node) -> None:
    place, stub, start = node
    serving = start("--simulate", "h100:2", *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    assert reported(place), serving.log()
    held = stub.admit("ml/train-0", "main", {GPU: 1})
    inject(serving, "xid", "79", "--gpu", "all")
    assert stub.wait_allocatable(GPU, 0, 30), serving.log()
    assert eventually(lambda: content(place / "state/status.json").count("xid-79") == 2)
    done = command("plugin", "status", "--state-dir", f"{place}/state")
    assert done.code == 0, done.err
    [row] = [line for line in done.out.splitlines() if held.ids[0] in line]
    assert "model: NVIDIA H100 80GB HBM3" in done.out
    assert row.split()[:2] == [row[0], held.ids[0]]
    assert "unhealthy (xid-79)" in row and "ml/train-0/main" in row
    assert "XID 79: the GPU has fallen off the bus, since 20" in done.out
    assert "reboot the node" in done.out


@pytest.mark.full
def test_narrow_terminal_gets_one_line_per_device(node, monkeypatch) -> None:
    place, stub, start = node
    serving = start("--simulate", "h100:4", *QUICK)
    assert stub.wait_allocatable(GPU, 4, 60), serving.log()
    assert reported(place), serving.log()
    stub.admit("ml/train-0", "main", {GPU: 2})
    monkeypatch.setenv("COLUMNS", "60")
    given = ("--kubelet-socket", f"{place}/dp/kubelet.sock", "--state-dir", serving.state, "--no-nvml")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", command("plugin", "status", *given, "--color", "always").out)
    rows = [line for line in lines.splitlines() if re.match(r"\d+ ", line)]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert all(re.search(r" GPU-[0-9a-f]{8} ", row) and len(row) <= 60 for row in rows)
    assert sum("ml/train-0/main" in row for row in rows) == 2


def test_empty_node_gets_the_next_step(node) -> None:
    place, stub, _ = node
    given = ("--kubelet-socket", f"{place}/dp/kubelet.sock", "--state-dir", f"{place}/state", "--no-nvml")
    done = command("plugin", "status", *given)
    assert (done.code, "gpunode plugin serve" in done.out) == (0, True), done.out
    stub.stop()
    output = command("plugin", "status", *given).out
    assert "systemctl status kubelet" in output
    assert "gpunode plugin serve" not in output  # which would find no kubelet to register with


def test_planted_symlink_is_not_written_through(node) -> None:
    place, stub, start = node
    precious = place / "precious"
    precious.write_text("root's own")
    (place / "state").mkdir()
    for name in ("status.json", "health.json"):
        (place / "state" / name).symlink_to(precious)
    serving = start("--simulate", "h100:1", *QUICK)
    assert stub.wait_allocatable(GPU, 1, 60), serving.log()
    inject(serving, "xid", "79", "--gpu", "0")
    assert eventually(lambda: "xid-79" in content(place / "state/status.json"), 60)
    assert serving.end() == 0
    assert precious.read_text() == "root's own"
    for name in ("status.json", "health.json"):
        kept = (place / "state" / name).lstat()
        assert (stat.S_ISREG(kept.st_mode), kept.st_mode & 0o022) == (True, 0)


def test_shares_are_counted_on_their_gpu(node) -> None:
    place, stub, start = node
    config = place / "config.yaml"
    config.write_text(SHARED)
    name = f"{GPU}.shared"
    serving = start("--simulate", "h100:2", "--config-file", str(config), *QUICK)
    assert stub.wait_allocatable(name, 8, 60), serving.log()
    assert reported(place), serving.log()
    for number in range(3):
        stub.admit(f"ml/pod-{number}", "main", {name: 1})
    found = status(place)
    [resource] = found["data"]["resources"]
    assert (resource["capacity"], resource["held"], resource["sharing"]) == (8, 3, "time-slicing")
    assert len(found["data"]["units"]) == 2
    assert sum(len(unit["holders"]) for unit in found["data"]["units"]) == 3
    assert {unit["devices"] for unit in found["data"]["units"]} == {4}
    table = command("plugin", "status", "--state-dir", f"{place}/state").out
    assert "2 of 4 shares, ml/pod-" in table and "1 of 4 shares, ml/pod-" in table


def test_mig_devices_are_listed_under_their_gpu(node) -> None:
    place, stub, start = node
    serving = start("--simulate", "a100:2,mig=3g.20gb*2", "--mig-strategy", "mixed", *QUICK)
    assert stub.wait_allocatable("nvidia.com/mig-3g.20gb", 4, 60), serving.log()
    assert reported(place), serving.log()
    stub.admit("ml/small", "main", {"nvidia.com/mig-3g.20gb": 1})
    found = status(place)
    assert list(units(found)) == ["0:0", "0:1", "1:0", "1:1"]
    assert sum(len(unit["holders"]) for unit in found["data"]["units"]) == 1
    rows = command("plugin", "status", "--state-dir", f"{place}/state").out.splitlines()
    numbers = [row.split()[0] for row in rows if row[:1].isdigit()]
    assert numbers == ["0", "0:0", "0:1", "1", "1:0", "1:1"]


def test_another_plugin_is_listed_and_its_stream_not_opened(node) -> None:
    place, stub, _ = node
    ids = [nodes.uuid(index) for index in range(2)]
    with another_plugin(place / "dp", "nvidia-gpu.sock", GPU, ids) as calls:
        assert stub.wait_allocatable(GPU, 2, 30)
        held = stub.admit("ml/train-0", "main", {GPU: 1})
        before = list(calls)
        for _ in range(3):
            found = status(place)
        assert calls == before
        assert stub.allocatable(GPU) == 2
    assert found["status"] == "ok"
    assert found["data"]["plugin"] is None
    [resource] = found["data"]["resources"]
    assert (resource["plugin"], resource["registered"], resource["allocatable"]) == ("other", True, 2)
    by_id = {unit["id"]: unit for unit in found["data"]["units"]}
    assert set(by_id) == set(ids)
    assert holders(by_id[held.ids[0]]) == ["ml/train-0/main"]
    [listening] = found["data"]["sockets"]
    assert (listening["state"], listening["resource"]) == ("listening", GPU)


@pytest.mark.full
def test_resource_registered_by_another_plugin_is_not_reported_as_ours(node) -> None:
    """Our plugin is suspended, so that it can't register again."""
    place, stub, start = node
    serving = start("--simulate", "h100:2", *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    assert reported(place), serving.log()
    serving.process.send_signal(signal.SIGSTOP)
    shares = [f"{nodes.uuid(7)}::{number}" for number in range(3)]
    with another_plugin(place / "dp", "other-gpu.sock", GPU, shares):
        assert stub.wait_allocatable(GPU, 3, 30)
        stub.admit("ml/train-0", "main", {GPU: 1})
        found = status(place)
        table = command("plugin", "status", "--state-dir", f"{place}/state", "--no-nvml").out
    try:
        assert stub.wait_allocatable(GPU, 0, 30)
        after = command("plugin", "status", "--state-dir", f"{place}/state", "--no-nvml").out
    finally:
        serving.process.send_signal(signal.SIGCONT)
    assert found["status"] == "warn"
    [resource] = found["data"]["resources"]
    assert (resource["plugin"], resource["capacity"], resource["allocatable"]) == ("other", None, 3)
    health = {unit["id"]: (unit["health"], len(unit["holders"])) for unit in found["data"]["units"]}
    assert health.pop(nodes.uuid(7)) == ("healthy", 1)
    assert list(health.values()) == [("not-allocatable", 0)] * 2
    assert f"{GPU}: gpunode is registered, but the kubelet allocates another plugin's devices" in table
    [row] = [line for line in table.splitlines() if line.startswith(f"{GPU} ")]
    assert row.rstrip().endswith("another plugin")
    [row] = [line for line in after.splitlines() if line.startswith(f"{GPU} ")]
    assert row.rstrip().endswith("registered, but the kubelet lists none of its devices")
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    [resource] = status(place)["data"]["resources"]
    assert (resource["plugin"], resource["registered"], resource["allocatable"]) == ("gpunode", True, 2)


def test_other_devices_are_listed_only_on_request(node) -> None:
    place, stub, _ = node
    with another_plugin(place / "dp", "kvm.sock", "devices.kubevirt.io/kvm", ["kvm0"]):
        assert stub.wait_allocatable("devices.kubevirt.io/kvm", 1, 30)
        assert status(place)["data"]["resources"] == []
        [resource] = status(place, "--all")["data"]["resources"]
    assert resource["name"] == "devices.kubevirt.io/kvm"


def test_dead_plugin_is_detected(node) -> None:
    place, stub, start = node
    serving = start("--simulate", "h100:2", *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    assert reported(place), serving.log()
    assert eventually((place / "state/status.json").exists)
    serving.process.kill()
    serving.process.wait()
    assert stub.wait_allocatable(GPU, 0, 30)
    found = status(place)
    assert (found["status"], found["data"]["plugin"]["state"]) == ("warn", "gone")
    assert {unit["health"] for unit in found["data"]["units"]} <= {"not-allocatable"}
    [dead] = found["data"]["sockets"]
    assert dead["state"] == "refused"
    table = command("plugin", "status", "--kubelet-socket", f"{place}/dp/kubelet.sock", "--no-nvml").out
    assert f"{place}/dp/nvidia-gpu.sock: no process listens on it" in table


@pytest.mark.full
def test_clean_exit_is_reported_as_such(node) -> None:
    place, stub, start = node
    serving = start("--simulate", "h100:2", *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    assert reported(place), serving.log()
    assert serving.end() == 0
    data = status(place)["data"]
    assert (data["plugin"]["state"], data["plugin"]["ready"]) == ("ended", False)
    assert data["plugin"]["stopped"].endswith("Z")


@pytest.mark.full
def test_without_pod_resources_the_checkpoint_is_used(node) -> None:
    place, stub, start = node
    serving = start("--simulate", "h100:2", *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    assert reported(place), serving.log()
    stub.admit("ml/train-0", "main", {GPU: 2})
    absent = str(place / "none.sock")
    found = status(place, "--pod-resources-socket", absent)
    [resource] = found["data"]["resources"]
    assert (resource["allocatable"], resource["held"]) == (2, 2)
    asked = {source["name"]: source["state"] for source in found["data"]["sources"]}
    assert (asked["pods"], asked["checkpoint"]) == ("absent", "read")


def test_hanging_kubelet_is_not_waited_for(short: Path) -> None:
    (short / "pod-resources").mkdir()
    (short / "dp").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(short / "pod-resources/kubelet.sock"))
        listening.listen(8)
        found = status(short, "--timeout", "0.3")
    [pods] = [source for source in found["data"]["sources"] if source["name"] == "pods"]
    assert pods["state"] == "failed"
    assert "did not answer List within 0.3 s" in pods["problem"]


def test_recorded_machine_is_read_from_its_files(tmp_path: Path) -> None:
    root = tmp_path / "machine"
    directory = root / "var/lib/kubelet/device-plugins"
    directory.mkdir(parents=True)
    (root / ".gpunode").mkdir()
    recording = {"nvml": {"inventory": plain(nodes.inventory(3))}}
    (root / ".gpunode/recording.json").write_text(json.dumps(recording))
    entry = {
        "PodUID": "9a1c",
        "ContainerName": "main",
        "ResourceName": GPU,
        "DeviceIDs": {"0": [nodes.uuid(0)]},
        "AllocResp": "",
    }
    other = {**entry, "PodUID": "77", "DeviceIDs": [nodes.uuid(1)]}  # as kubelets before 1.20 wrote it
    registered = {GPU: [nodes.uuid(0)], "example.com/nic": ["n0"]}
    checkpoint = {
        "Data": {"PodDeviceEntries": [entry, other], "RegisteredDevices": registered},
        "Checksum": 1,
    }
    (directory / "kubelet_internal_checkpoint").write_text(json.dumps(checkpoint))
    (root / "var/log/pods/ml_train-0_9a1c").mkdir(parents=True)
    done = command("--root", str(root), "plugin", "status", "-o", "json")
    assert done.code == 0, done.err
    found = units(done.document)
    assert [unit["health"] for unit in found.values()] == ["healthy", "not-allocatable", "not-advertised"]
    assert holders(found["0"]) == ["ml/train-0/main"]
    assert found["1"]["holders"][0]["podUid"] == "77"
    table = command("--root", str(root), "plugin", "status").out
    assert "pod 77/main" in table


@pytest.mark.parametrize("damage", ["{", "[]", '{"resources": 7, "leftOut": [1], "pid": "x"}', "\x00"])
def test_damaged_status_file_causes_no_crash(short: Path, damage: str) -> None:
    (short / "state").mkdir()
    (short / "state/status.json").write_text(damage)
    data = status(short)["data"]
    [own] = [source for source in data["sources"] if source["name"] == "plugin"]
    assert own["state"] == ("read" if damage.startswith('{"') else "failed")
    assert data["units"] == []
