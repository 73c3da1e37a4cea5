"""Data of AMD GPUs from sysfs trees: complete, partitioned, damaged, absent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.amd import DRIVER, KFD, MI210, MI300X, MI300X_CPX, AmdMachine, amd_machine
from gpunode.errors import Unreadable
from gpunode.gpu.amd import (
    AmdGpu,
    missing,
    parse_ids,
    parse_properties,
    read_condition,
    read_inventory,
    read_nodes,
    read_topology,
    trace,
    uncorrectable,
)
from gpunode.gpu.model import Pair
from gpunode.host import Host


def gpus(root: Path) -> list[AmdGpu]:
    return [gpu for gpu in read_inventory(Host(root, {})).gpus if isinstance(gpu, AmdGpu)]


def pairs(root: Path) -> dict[tuple[int, int], Pair]:
    host = Host(root, {})
    nodes = read_nodes(host)
    inventory = read_inventory(host, nodes)
    index = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    return {(index[p.first], index[p.second]): p for p in read_topology(inventory, nodes).pairs}


def test_eight_mi300x_are_described_in_full(tmp_path: Path) -> None:
    machine = amd_machine(tmp_path, "mi300x")
    found = gpus(tmp_path)
    assert [gpu.uuid for gpu in found] == [machine.address(index) for index in range(8)]
    assert found[5] == AmdGpu(
        5,
        "0000:af:00.0",
        "AMD Instinct MI300X OAM",
        "0000:af:00.0",
        minor=133,
        memory_bytes=192 << 30,
        compute_capability="gfx942",
        numa=1,
        partition_type="spx_nps1",
        paths=("/dev/dri/card6", "/dev/dri/renderD133"),
    )
    assert {(pair.level, pair.nvlinks) for pair in pairs(tmp_path).values()} == {(40, 1), (50, 1)}


def test_sixty_four_partitions_are_assigned_and_spare_ones_skipped(tmp_path: Path) -> None:
    amd_machine(tmp_path, "mi300x-cpx")
    found = gpus(tmp_path)
    assert [len(gpu.mig) for gpu in found] == [8] * 8
    assert [part.uuid for part in found[1].mig] == [found[1].pci, *(f"amdgpu_xcp_{n}" for n in range(7, 14))]
    assert {part.memory_bytes for part in found[1].mig} == {24 << 30}
    assert found[1].mig[7].paths == ("/dev/dri/card16", "/dev/dri/renderD143")  # type: ignore[attr-defined]
    names = {part.uuid for gpu in found for part in gpu.mig}
    assert len(names) == 64
    assert {(pair.level, pair.nvlinks) for pair in pairs(tmp_path).values()} == {(40, 1), (50, 1)}


def test_partition_name_with_a_dot_is_read(tmp_path: Path) -> None:
    AmdMachine(tmp_path, [MI300X_CPX], [0])
    platform = tmp_path / "sys/devices/platform"
    for name in sorted(platform.glob("amdgpu_xcp_*")):
        name.rename(platform / name.name.replace("xcp_", "xcp."))
    (gpu,) = gpus(tmp_path)
    assert [part.uuid for part in gpu.mig][1:3] == ["amdgpu_xcp.0", "amdgpu_xcp.1"]


def test_two_hives_of_four_are_linked_within_and_not_between(tmp_path: Path) -> None:
    amd_machine(tmp_path, "mi210")
    found = pairs(tmp_path)
    assert all((pair.nvlinks > 0) == (a // 4 == b // 4) for (a, b), pair in found.items())
    assert found[0, 4].level == 50


def test_pair_without_a_link_record_is_the_farthest(tmp_path: Path) -> None:
    machine = AmdMachine(tmp_path, [MI210] * 3, [0, 0, 0])
    machine.remove(f"{KFD}/nodes/{machine.first_node(0)}/io_links/{machine.first_node(2)}")
    found = pairs(tmp_path)
    assert found[0, 2] == Pair("0000:05:00.0", "0000:49:00.0", None, 0)
    assert (found[0, 1].level, found[0, 1].nvlinks) == (40, 1)


@pytest.mark.parametrize("board", [MI300X, MI300X_CPX], ids=["whole", "divided"])
def test_unknown_numa_node_is_accepted(tmp_path: Path, board) -> None:
    AmdMachine(tmp_path, [board] * 2, [-1, -1])
    found = gpus(tmp_path)
    assert [gpu.numa for gpu in found] == [None, None]
    assert [len(gpu.mig) for gpu in found] == [board.partitions if board.partitions > 1 else 0] * 2


def test_desktop_card_and_integrated_graphics_have_names(tmp_path: Path) -> None:
    amd_machine(tmp_path, "desktop")
    assert [(gpu.name, gpu.compute_capability, gpu.partition_type) for gpu in gpus(tmp_path)] == [
        ("AMD Radeon RX 7900 XTX", "gfx1100", ""),
        ("AMD GPU 164e", "gfx1036", ""),
    ]


class Closed(Host):
    """Some paths are unreadable."""

    closed = ""

    def listdir(self, path: str) -> tuple[str, ...]:
        if path == self.closed:
            raise Unreadable(f"{path} may not be read")
        return super().listdir(path)


def test_unreadable_gpu_does_not_hide_the_others(tmp_path: Path) -> None:
    machine = amd_machine(tmp_path, "mi300x")
    Closed.closed = machine.at(2)
    host = Closed(tmp_path, {})
    found = read_inventory(host).gpus
    assert [gpu.error for gpu in found if gpu.error] == [f"{machine.at(2)} may not be read"]
    assert found[2].uuid == machine.address(2)
    assert read_condition(host, found[2]).error == f"{machine.at(2)} may not be read"
    assert read_condition(host, found[3]).error == ""


def test_gpu_missing_in_kfd_has_an_error(tmp_path: Path) -> None:
    machine = amd_machine(tmp_path, "mi300x")
    machine.remove(f"{KFD}/nodes/{machine.first_node(6)}")
    assert [bool(gpu.error) for gpu in gpus(tmp_path)] == [False] * 6 + [True, False]


def test_missing_driver_and_missing_kfd_have_distinct_messages(tmp_path: Path) -> None:
    machine = amd_machine(tmp_path, "mi210", loaded=False)
    host = Host(tmp_path, {})
    assert "not loaded" in missing(host)
    machine.directory(DRIVER)
    assert "compute side" in missing(host)
    machine.load()
    assert missing(host) == ""


def test_uncorrectable_errors_of_all_blocks_are_counted(tmp_path: Path) -> None:
    machine = amd_machine(tmp_path, "mi300x")
    machine.errors(4, 3)
    machine.write(f"{machine.at(4)}/ras/sdma_err_count", "ue: 2\nce: 0\n")
    machine.write(f"{machine.at(4)}/ras/mmhub_err_count", "Query currently inaccessible\n")
    host = Host(tmp_path, {})
    readings = [read_condition(host, gpu) for gpu in gpus(tmp_path)]
    assert [reading.ecc_volatile for reading in readings] == [0, 0, 0, 0, 5, 0, 0, 0]
    assert (readings[0].busy_percent, readings[0].memory_used_bytes) == (3, 1 << 20)


@pytest.mark.parametrize(("parameter", "want"), [("-1", "none"), ("1", "none"), ("0", None)])
def test_recovery_action_follows_the_driver_parameter(tmp_path: Path, parameter, want) -> None:
    machine = AmdMachine(tmp_path, [MI210], [0])
    machine.write("/sys/module/amdgpu/parameters/gpu_recovery", f"{parameter}\n")
    assert read_condition(Host(tmp_path, {}), gpus(tmp_path)[0]).recovery_action == want


def test_suspended_gpu_is_not_woken(tmp_path: Path) -> None:
    machine = amd_machine(tmp_path, "desktop")
    machine.write(f"{machine.at(0)}/power/runtime_status", "suspended\n")
    first, second = (read_condition(Host(tmp_path, {}), gpu) for gpu in gpus(tmp_path))
    assert (first.busy_percent, second.busy_percent) == (None, 3)


def changes() -> Sequence[str]:
    return ("unplug", "divide", "node", "generation")


@pytest.mark.parametrize("change", changes())
def test_change_is_visible_in_the_trace(tmp_path: Path, change: str) -> None:
    machine = amd_machine(tmp_path, "mi300x")
    host = Host(tmp_path, {})
    before = trace(host)
    assert trace(host) == before
    if change == "unplug":
        machine.remove(machine.at(3))
    elif change == "divide":
        machine.write(f"{machine.at(3)}/current_compute_partition", "DPX\n")
    elif change == "node":
        machine.remove(f"{KFD}/nodes/{machine.first_node(3)}")
    else:
        machine.write(f"{KFD}/generation_id", "3\n")
    assert trace(host) != before


@given(st.text())
def test_any_text_is_parsed_without_an_error(text: str) -> None:
    assert all(isinstance(value, int) for value in parse_properties(text).values())
    assert uncorrectable(text) is None or "ue" in text
    assert all(len(key) == 2 for key in parse_ids(text))


def files(root: Path) -> list[Path]:
    found = [path for path in root.rglob("*") if path.is_file()]
    return sorted(found)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_file_affects_only_its_gpu(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    root = tmp_path_factory.mktemp("amd")
    AmdMachine(root, [MI300X, MI210], [0, 1])
    victim = data.draw(st.sampled_from(files(root)))
    victim.write_bytes(data.draw(st.binary(max_size=80)))
    found = gpus(root)
    pairs(root)
    assert len(found) == 2
    assert sum(not gpu.error for gpu in found) >= 1
    for gpu in found:
        read_condition(Host(root, {}), gpu)


@given(number=st.integers(0, 1 << 40), name=st.from_regex(r"[a-z_]{1,20}", fullmatch=True))
def test_kfd_properties_are_parsed(number: int, name: str) -> None:
    assert parse_properties(f"{name} {number}\n") == {name: number}
