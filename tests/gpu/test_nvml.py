"""The NVML wrapper in its own process: events, NUMA nodes, remembered data of a lost GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace

from fixtures.scenario import ECC_DOUBLE, Event, gpu_uuid, machine, mixed_layout, with_mig
from tests.gpu.children import run_python
from tests.waiting import PATIENCE

WATCH = """
import json, sys, time
from gpunode.gpu.nvml import EventSet, Nvml, NvmlError
from gpunode.output.typed import plain
from contextlib import closing
with Nvml() as nvml, closing(EventSet(nvml)) as events:
    for index, uuid in enumerate(sys.argv[1:]):
        events.watch(uuid, index)
    print(json.dumps([events.unsupported, list(events.failed)]), flush=True)
    for line in sys.stdin:
        try:
            answer = plain(events.wait(float(line)))
        except NvmlError as error:
            answer = error.code
        print(json.dumps(answer), flush=True)
"""


class Watcher:
    """A child that watches GPUs; each `wait` is one call there."""

    def __init__(self, env, *uuids):
        self.child = subprocess.Popen(
            [sys.executable, "-c", WATCH, *uuids],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.unsupported, self.failed = self.read()

    def read(self):
        assert self.child.stdout is not None
        return json.loads(self.child.stdout.readline())

    def wait(self, seconds):
        assert self.child.stdin is not None
        self.child.stdin.write(f"{seconds}\n")
        self.child.stdin.flush()
        return self.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.communicate(timeout=PATIENCE)
        assert self.child.returncode == 0


def test_xid_is_reported_once_with_its_gpu(make_node):
    scenario = machine(2)
    node = make_node(scenario)
    with Watcher(node.env, gpu_uuid(0), gpu_uuid(1)) as watcher:
        assert watcher.wait(0.05) is None
        node.write(scenario.with_event(Event(gpu_uuid(1), data=79)))
        seen = watcher.wait(PATIENCE)
        assert seen == {"kind": "xid", "uuid": gpu_uuid(1), "xid": 79, "gi": None, "ci": None}
        assert watcher.wait(0.05) is None


def test_ecc_events_and_mig_instances_are_reported(make_node):
    scenario = with_mig(machine(1), 0, mixed_layout(0))
    node = make_node(scenario)
    with Watcher(node.env, gpu_uuid(0)) as watcher:
        assert (watcher.unsupported, watcher.failed) == ([], [])
        first = scenario.with_event(Event(gpu_uuid(0), ECC_DOUBLE, 0))
        node.write(first.with_event(Event(gpu_uuid(0), data=94, gi=3, ci=0)))
        assert watcher.wait(PATIENCE) == {
            "kind": "ecc-double",
            "uuid": gpu_uuid(0),
            "xid": None,
            "gi": None,
            "ci": None,
        }
        assert watcher.wait(PATIENCE) == {"kind": "xid", "uuid": gpu_uuid(0), "xid": 94, "gi": 3, "ci": 0}
        assert watcher.wait(0.05) is None


def test_gpus_that_cannot_be_watched_are_reported_by_reason(make_node):
    node = make_node(machine(3).with_gpu(0, events=0).with_gpu(1, lost=True))
    with Watcher(node.env, *(gpu_uuid(i) for i in range(3))) as watcher:
        assert watcher.unsupported == [gpu_uuid(0)]
        assert watcher.failed == [gpu_uuid(1)]


def test_gpu_lost_while_watched_is_an_error_and_its_last_xid_is_named(make_node):
    scenario = machine(2)
    node = make_node(scenario)
    with Watcher(node.env, gpu_uuid(0), gpu_uuid(1)) as watcher:
        node.write(scenario.with_gpu(1, lost=True).with_event(Event(gpu_uuid(1), data=79)))
        assert watcher.wait(PATIENCE)["uuid"] == gpu_uuid(1)
        assert watcher.wait(PATIENCE) == 15


DISCOVER = """
import json, sys
from pathlib import Path
from gpunode.gpu.inventory import discover
from gpunode.gpu.nvml import Nvml
from gpunode.output.typed import plain
from fixtures.scenario import Scenario, machine
with Nvml() as nvml:
    before = discover(nvml, sys.argv[1])
    lost = machine(3).with_gpu(1, lost=True)
    lost.write(Path(sys.argv[2]))
    after = discover(nvml, previous=before)
    print(json.dumps([plain(before), plain(after)]))
"""


def test_numa_nodes_come_from_sysfs_and_a_lost_gpu_keeps_its_identity(make_node, tmp_path):
    scenario = machine(3)
    node = make_node(scenario)
    for number, text in ((0, "1\n"), (1, "-1\n"), (2, "none\n")):
        directory = (
            tmp_path / "root/sys/bus/pci/devices" / scenario.gpus[number].pci.lower().removeprefix("0000")
        )
        directory.mkdir(parents=True)
        (directory / "numa_node").write_text(text)
    before, after = run_python(DISCOVER, node.env, str(tmp_path / "root"), str(node.scenario_path))
    assert [gpu["numa"] for gpu in before["gpus"]] == [1, None, None]
    lost = after["gpus"][1]
    assert "lost" in lost["error"]
    assert (lost["uuid"], lost["pci"]) == (gpu_uuid(1), before["gpus"][1]["pci"])
    assert [gpu["error"] for gpu in after["gpus"]].count("") == 2


def test_common_ancestor_is_read(make_node):
    node = make_node(replace(machine(3), ancestors={(0, 1): 10}))
    script = (
        "import json\nfrom gpunode.gpu.nvml import Nvml\nwith Nvml() as n:\n"
        "    h = [n.handle(i) for i in range(3)]\n"
        "    print(json.dumps([n.common_ancestor(h[0], h[1]), n.common_ancestor(h[1], h[2])]))"
    )
    assert run_python(script, node.env) == [10, 50]
