"""Every query to NVML about a GPU hangs and crashes in turn, and only that GPU may be affected.

The C stub responds behind the real loader and ctypes, and `Watch` judges real child processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from fixtures.scenario import Event as StubEvent
from fixtures.scenario import Fault, Scenario, gpu_uuid, machine, mixed_layout, with_mig, with_nvswitch
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.nvidia.watch import Watch
from tests.cli import REPOSITORY
from tests.plugin.hanging_nvml import ENDLESS, HangingHost
from tests.plugin.nodes import RESOURCE, MemoryLog, eventually
from tests.plugin.nvidia.test_watch_discovery import Sink
from tests.plugin.serving import kubelet
from tests.warm_child import ForkedPopen

pytestmark = [pytest.mark.full, pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")]
SICK, OTHER, GPUS = 1, 2, 4
FUNCTION_NOT_FOUND, UNKNOWN_ERROR = 13, 999
LINK_QUESTIONS = {
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetTopologyCommonAncestor",
}
PAIRS = {"nvmlDeviceGetTopologyCommonAncestor"}  # about two GPUs, of which either may be the sick one
EVENT_QUESTIONS = {"nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"}
NOT_QUERIED = {
    *("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount"),
    *("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion"),  # about the driver
    *("nvmlEventSetCreate", "nvmlEventSetWait", "nvmlEventSetFree"),  # about all GPUs that are watched
    "nvmlDeviceGetHandleByUUID",  # indices avoid it
    *("nvmlDeviceGetComputeMode", "nvmlDeviceSetComputeMode"),
}
"""Functions in the modules of the watcher that it doesn't call, or that aren't about one GPU."""

RECORD = """
import inspect, json, os, re, sys, time
from contextlib import nullcontext
from pathlib import Path
from gpunode.gpu import nvml_health
from gpunode.gpu.nvml import Nvml
from gpunode.gpu.nvml_watcher import Options, NvmlWatcher
from gpunode.host import Host
asked, documents = set(), []
def asking(function, gpus):
    asked.update((function, gpu) for gpu in gpus)
    return nullcontext()
def tell(**document):
    documents.append(document)
watcher = NvmlWatcher(Nvml(asking=asking), Host(), Options(use=True), tell)
watcher.turn(time.monotonic())
while not any("watching" in document for document in documents):
    time.sleep(0.01)
modules = [module for name, module in sys.modules.items() if name.startswith("gpunode.gpu.")]
others = {"gpunode.gpu.child", "gpunode.gpu.nvml_health"}  # names of kinds; what the doctor asks
sources = [Path(module.__file__).read_text() for module in modules if module.__name__ not in others]
own = {name: inspect.getsource(part) for name, part in vars(nvml_health).items()
       if inspect.getmodule(part) is nvml_health}
reached, rest = set(), {"read_gpu"}
while rest:  # and what it calls
    reached |= rest
    rest = {word for name in rest for word in re.findall(r"\\w+", own[name])} & own.keys() - reached
sources += map(own.get, reached)
named = {name for source in sources for name in re.findall('"(nvml[A-Z][A-Za-z0-9]+)"', source)}
print(json.dumps([sorted(function for function, gpu in asked if gpu == int(sys.argv[1])), sorted(named)]))
sys.stdout.flush()
os._exit(0)
"""


def scenario() -> Scenario:
    """Four GPUs; about the sick one NVML gets every query that the plugin may make."""
    sick = with_mig(with_nvswitch(machine(GPUS)), SICK, mixed_layout(SICK)).with_gpu(SICK, remap=None)
    links = {**sick.nvlinks, (SICK, 17): sick.gpus[OTHER].pci}
    return replace(sick, nvlinks=links).with_faults(
        Fault("nvmlDeviceGetGpuFabricInfoV", uuid=gpu_uuid(SICK), code=FUNCTION_NOT_FOUND)
    )


def questions(node: StubNode) -> tuple[set[str], set[str]]:
    """Queries to NVML about the sick GPU, and the functions that occur in the watcher's modules."""
    argv = [sys.executable, "-c", RECORD, str(SICK)]
    done = subprocess.run(argv, env={**os.environ, **node.env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    asked, named = json.loads(done.stdout)
    return set(asked), set(named)


@contextmanager
def watching(place: Path, node: StubNode) -> Iterator[tuple[Watch, Sink, MemoryLog]]:
    log, sink, stop = MemoryLog(), Sink(), Event()
    settings = Settings(
        probe_seconds=45.0,  # a hanging query uses it up at once; after a minute a child counts as healthy
        rediscover_seconds=0.3,
        container_driver_root="",
        listen="127.0.0.1:0",  # then the utilization of the GPUs is read, too
    )
    watch = Watch(HangingHost(environ={**os.environ, **node.env}), settings, log)
    thread = Thread(target=watch.run, args=(sink, stop))
    thread.start()
    try:
        yield watch, sink, log
    finally:
        stop.set()
        watch.hurry()
        thread.join(30)


def problem(place: Path, function: str, fault: Fault) -> str:
    """Problem if this query about the sick GPU hangs or crashes; "" if there is none."""
    place.mkdir()
    base = scenario().with_faults(replace(fault, call=function, uuid=gpu_uuid(SICK)))
    node = stub_node(place, base, libraries="nvml")
    left_out = function not in LINK_QUESTIONS | EVENT_QUESTIONS
    expected = [left_out and index == SICK for index in range(GPUS)]
    with watching(place, node) as (_, sink, log):

        def errors() -> list[bool]:
            seen = sink.of("seen")
            return [bool(gpu.error) for gpu in seen[-1][0].gpus] if seen else []

        def excluded() -> bool:
            return any(fields.get("function") == function for _, _, fields in log.lines)

        if not eventually(excluded, 60.0):
            return f"{function}: not given up, {log.lines}"
        before = len(sink.of("seen"))  # a child that starts later doesn't get an earlier event
        if not eventually(lambda: len(sink.of("seen")) > before and errors() == expected, 60.0):
            return f"{function}: GPUs with an error {errors()}, {log.lines}"
        watched = GPUS - (function not in LINK_QUESTIONS)
        ready = ("info", "watching health events", {"count": watched})
        if not eventually(lambda: ready in log.lines, 60.0):
            return f"{function}: events aren't watched, {log.lines}"
        node.write(base.with_event(StubEvent(gpu_uuid(OTHER), data=79)))
        if not eventually(lambda: [event.uuid for event in sink.of("event")] == [gpu_uuid(OTHER)], 60.0):
            return f"{function}: the XID of another GPU was not noticed, {log.lines}"
        if errors() != expected or any(sure for _, sure in sink.of("broken")):
            return f"{function}: GPUs with an error {errors()}, {sink.of('broken')}"
        indices = {fields["index"] for _, _, fields in log.lines if "function" in fields}
        pair = function == "nvmlDeviceGetTopologyCommonAncestor"  # about two GPUs: either may be the sick one
        exact = SICK in indices and len(indices) == 1 + pair
        return "" if exact else f"{function}: given up for GPUs {indices}"


def test_every_function_that_the_plugin_may_call_is_in_the_matrix(tmp_path: Path) -> None:
    asked, named = questions(stub_node(tmp_path, scenario(), libraries="nvml"))
    assert named - asked == NOT_QUERIED
    assert (LINK_QUESTIONS | EVENT_QUESTIONS) - asked == set()


@pytest.mark.full
@pytest.mark.parametrize("fault", [ENDLESS, Fault("", abort=True)], ids=["hangs", "crashes"])
def test_failing_query_affects_only_its_gpu(
    tmp_path: Path, short: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, _ = questions(stub_node(tmp_path, scenario(), libraries="nvml"))
    monkeypatch.setattr("subprocess.Popen", ForkedPopen)
    with ThreadPoolExecutor(8) as pool:
        problems = pool.map(
            lambda name: problem(short / re.sub("nvml", "", name), name, fault), sorted(asked)
        )
        assert [text for text in problems if text] == []


@pytest.mark.parametrize(
    ("fault", "program"),
    [
        (Fault("", abort=True), ("-m", "gpunode")),
        (ENDLESS, ("-m", "tests.plugin.hanging_nvml")),
    ],
    ids=["crash", "hang"],
)
def test_served_node_loses_only_gpus_with_queries_that_stop_nvml(
    tmp_path: Path, short: Path, fault: Fault, program: tuple[str, ...]
) -> None:
    """`plugin serve` as a whole: each query fails for a different GPU, and the kubelet counts."""
    asked, _ = questions(stub_node(tmp_path, with_nvswitch(machine(GPUS)), libraries="nvml"))
    sick = {function: gpu_uuid(index) for index, function in enumerate(sorted(asked - PAIRS))}
    left_out = {uuid for name, uuid in sick.items() if name not in LINK_QUESTIONS | EVENT_QUESTIONS}
    faults = [replace(fault, call=name, uuid=uuid) for name, uuid in sick.items()]
    healthy = with_nvswitch(machine(len(sick) + 2))
    node = stub_node(short, healthy, libraries="nvml")
    with kubelet(short, program=program) as (stub, start), pytest.MonkeyPatch.context() as patch:
        for name, value in {**node.env, "PYTHONPATH": str(REPOSITORY)}.items():
            patch.setenv(name, value)
        serving = start("--rediscover-seconds", "0.3", "--listen", "127.0.0.1:0")
        assert stub.wait_allocatable(RESOURCE, len(sick) + 2, 60), serving.log()
        broken = healthy.with_faults(*faults)
        node.write(broken)
        for function in sick:
            assert serving.says(f"function={function} ", 120), f"{function} not excluded: {serving.log()}"
        assert stub.wait_allocatable(RESOURCE, len(sick) + 2 - len(left_out), 60), serving.log()
        assert set(stub.unhealthy(RESOURCE)) == left_out
        excluded = re.findall(r"device=(\S+) function=(\S+)", serving.log())
        assert {function: uuid for uuid, function in excluded} == sick
        assert len(excluded) == len(sick)
        assert serving.says(f'msg="watching health events" count={len(sick) + 2 - len(left_out) - 2}', 60)
        last = gpu_uuid(len(sick) + 1)
        node.write(broken.with_event(StubEvent(last, data=79)))
        assert stub.wait_allocatable(RESOURCE, len(sick) + 1 - len(left_out), 60), serving.log()
        assert set(stub.unhealthy(RESOURCE)) == left_out | {last}


def test_served_node_loses_no_other_gpu_to_failing_queries(tmp_path: Path, short: Path) -> None:
    asked, _ = questions(stub_node(tmp_path, with_nvswitch(machine(GPUS)), libraries="nvml"))
    sick = {function: gpu_uuid(index) for index, function in enumerate(sorted(asked))}
    faults = [Fault(name, uuid=uuid, code=UNKNOWN_ERROR, times=10**6) for name, uuid in sick.items()]
    healthy = with_nvswitch(machine(len(sick) + 2))
    node = stub_node(short, healthy, libraries="nvml")
    with kubelet(short) as (stub, start), pytest.MonkeyPatch.context() as patch:
        for name, value in node.env.items():
            patch.setenv(name, value)
        timing = ("--rediscover-seconds", "0.3", "--health-poll-interval", "300ms")
        serving = start(*timing, "--listen", "127.0.0.1:0")
        assert stub.wait_allocatable(RESOURCE, len(sick) + 2, 60), serving.log()
        broken = healthy.with_faults(*faults)
        node.write(broken)
        serving.process.send_signal(signal.SIGHUP)
        met = range(len(faults))
        for number in met:
            assert eventually(lambda number=number: node.fault_calls(number) > 0, 30), faults[number]  # type: ignore[misc]
        last = gpu_uuid(len(sick) + 1)
        node.write(broken.with_event(StubEvent(last, data=79)))
        assert eventually(lambda: last in stub.unhealthy(RESOURCE), 60), serving.log()
        assert set(stub.unhealthy(RESOURCE)) - {last} <= set(sick.values())
        assert "GPU is left out" not in serving.log()
