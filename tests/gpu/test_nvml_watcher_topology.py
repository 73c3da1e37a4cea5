"""Links between GPUs, read in a separate process through the stub of NVML."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fixtures.scenario import Fault, Scenario, gpu_uuid, machine, with_nvswitch
from gpunode.gpu.model import Pair, Topology
from gpunode.output.typed import from_plain, plain
from tests.gpu.children import run_python

NOT_SUPPORTED, UNKNOWN = 3, 999
READ = """
import json
from gpunode.gpu.inventory import discover
from gpunode.gpu.nvml import Nvml
from gpunode.gpu.nvml_watcher import read_topology
from gpunode.output.typed import plain
with Nvml() as nvml:
    print(json.dumps(plain(read_topology(nvml, discover(nvml)))))
"""


@pytest.fixture
def read(make_node):
    def ask(scenario: Scenario) -> Topology:
        return from_plain(Topology, run_python(READ, make_node(scenario).env))

    return ask


def pair(topology: Topology, a: int, b: int) -> Pair:
    low, high = sorted((gpu_uuid(a), gpu_uuid(b)))
    return next(one for one in topology.pairs if (one.first, one.second) == (low, high))


def test_smaller_link_count_of_both_directions_is_used(read) -> None:
    base = machine(3)
    pci = {gpu.index: gpu.pci for gpu in base.gpus}
    links = {(0, link): pci[1] for link in range(4)} | {(1, link): pci[0] for link in range(2)}
    found = read(replace(base, nvlinks=links, ancestors={(0, 1): 20, (0, 2): 40}))
    assert pair(found, 0, 1) == Pair(gpu_uuid(0), gpu_uuid(1), 20, 2)
    assert (pair(found, 0, 2).level, pair(found, 0, 2).nvlinks) == (40, 0)
    assert found.switch_links == {}


def test_switch_links_are_counted_for_each_gpu(read) -> None:
    found = read(with_nvswitch(machine(4)))
    assert found.switch_links == {gpu_uuid(index): 18 for index in range(4)}
    assert {one.nvlinks for one in found.pairs} == {0}


def test_device_kind_falls_back_to_the_address(read) -> None:
    faults = Fault("nvmlDeviceGetNvLinkRemoteDeviceType", code=NOT_SUPPORTED)
    found = read(with_nvswitch(machine(2)).with_faults(faults))
    assert found.switch_links == {gpu_uuid(index): 18 for index in range(2)}


def test_lost_gpu_has_no_pairs_and_is_not_a_switch(read) -> None:
    base = machine(3)
    pci = {gpu.index: gpu.pci for gpu in base.gpus}
    links = {(0, 0): pci[2], (0, 1): pci[1], (1, 0): pci[0]}
    found = read(
        replace(base, nvlinks=links).with_faults(
            Fault("nvmlDeviceGetMemoryInfo", code=15, uuid=gpu_uuid(2)),
            Fault("nvmlDeviceGetTopologyCommonAncestor", code=15, uuid=gpu_uuid(2)),
        )
    )
    assert [(one.first, one.second, one.nvlinks) for one in found.pairs] == [(gpu_uuid(0), gpu_uuid(1), 1)]
    assert found.switch_links == {}


def test_gpu_with_failing_links_keeps_its_ancestors(read) -> None:
    fault = Fault("nvmlDeviceGetNvLinkState", code=UNKNOWN, uuid=gpu_uuid(0))
    found = read(replace(with_nvswitch(machine(2)), ancestors={(0, 1): 30}).with_faults(fault))
    assert pair(found, 0, 1).level == 30
    assert found.switch_links == {gpu_uuid(1): 18}


def test_topology_survives_json() -> None:
    topology = Topology((Pair("GPU-a", "GPU-b", None, 2), Pair("GPU-a", "GPU-c", 10)), {"GPU-a": 18})
    assert from_plain(Topology, json.loads(json.dumps(plain(topology)))) == topology
