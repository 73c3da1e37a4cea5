"""Responses of the kubelet's PodResources service, and the error for each of its failures."""

from __future__ import annotations

import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.daemons.pod_resources import Holding, allocatable, holdings_of, list_pods
from gpunode.daemons.proto import podresources_pb2 as pb
from gpunode.errors import DaemonError
from gpunode.gpu.nvml import GpuEvent
from gpunode.host import Host
from gpunode.plugin.config.settings import pod_resources_socket
from gpunode.plugin.kubelet.server import Call
from gpunode.plugin.observe.metrics import Counters
from tests.ordinary_user import AS_ORDINARY_USER, public_directory

TEXTS = st.text(max_size=12)
DEVICES = st.lists(st.tuples(st.sampled_from(["a/b", "c/d", ""]), st.lists(TEXTS, max_size=4)), max_size=4)
PODS = st.lists(st.tuples(TEXTS, TEXTS, st.lists(st.tuples(TEXTS, DEVICES), max_size=3)), max_size=4)


def message(pods: Any) -> pb.ListPodResourcesResponse:
    made = pb.ListPodResourcesResponse()
    for namespace, name, containers in pods:
        pod = made.pod_resources.add(namespace=namespace, name=name)
        for called, devices in containers:
            container = pod.containers.add(name=called, cpu_ids=[0, 1, 300])
            for resource, ids in devices:
                one = container.devices.add(resource_name=resource, device_ids=ids)
                one.topology.nodes.add(ID=1)
    return made


@settings(deadline=None, max_examples=100)
@given(PODS)
def test_devices_are_grouped_by_resource(pods: Any) -> None:
    expected = []
    for namespace, name, containers in pods:
        for called, devices in containers:
            held: dict[str, list[str]] = {}
            for resource, ids in devices:
                held.setdefault(resource, []).extend(ids)
            expected += [Holding(namespace, name, called, key, tuple(ids)) for key, ids in held.items()]
    assert list(holdings_of(message(pods))) == expected


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_error_or_an_empty_list(data: bytes) -> None:
    try:
        answer = pb.ListPodResourcesResponse.FromString(data)
    except DecodeError:
        return
    assert all(isinstance(holding, Holding) for holding in holdings_of(answer))


@contextmanager
def serving(socket: Path, methods: dict[str, Any]) -> Iterator[None]:
    """A PodResources service that responds with bytes."""
    table: Any = {name: grpc.unary_unary_rpc_method_handler(function) for name, function in methods.items()}
    handler = grpc.method_handlers_generic_handler("v1.PodResourcesLister", table)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait(2)


def refused(socket: Path, ask: Any = list_pods, timeout: float = 30.0) -> DaemonError:
    with pytest.raises(DaemonError) as error:
        ask(Host(), str(socket), timeout)
    return error.value


def test_old_kubelet_error_names_the_missing_method(short: Path) -> None:
    answer = message([("ml", "train", [("main", [("a/b", ["x"])])])]).SerializeToString()
    with serving(short / "s", {"List": lambda request, context: answer}):
        assert list_pods(Host(), str(short / "s")) == (Holding("ml", "train", "main", "a/b", ("x",)),)
        error = refused(short / "s", allocatable)
    assert error.code == "unsupported"
    assert "doesn't offer GetAllocatableResources" in error.message
    assert "1.23" in error.hint


def test_refusal_keeps_the_kubelets_message(short: Path) -> None:
    def refuse(request: Any, context: Any) -> bytes:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        return b""

    with serving(short / "s", {"List": refuse}):
        error = refused(short / "s")
    assert "rejected by rate limit (RESOURCE_EXHAUSTED)" in error.message


def test_invalid_response_is_an_error(short: Path) -> None:
    with serving(short / "s", {"List": lambda request, context: b"\xff\xff\xff"}):
        assert refused(short / "s").code == "protocol"


def test_missing_or_invalid_socket_is_named(short: Path) -> None:
    assert "is not there" in refused(short / "s").message
    assert "--pod-resources-socket" in refused(short / "s").hint
    (short / "s").write_text("")
    assert "is not a socket" in refused(short / "s").message
    assert refused(Path("/any"), lambda host, path, timeout: list_pods(Host(short), path)).code == "not-live"


def test_user_without_access_gets_a_hint_to_use_root() -> None:
    with public_directory() as place, serving(place / "s", {}):
        (place / "s").chmod(0o600)
        (place / "dp").mkdir(0o700)
        at = [f"--pod-resources-socket={place}/s", f"--kubelet-socket={place}/dp/kubelet.sock"]
        own = [
            *AS_ORDINARY_USER,
            sys.executable,
            "-m",
            "gpunode",
            "plugin",
            "status",
            "--no-nvml",
            "--state-dir",
            str(place),
        ]
        done = subprocess.run([*own, *at], capture_output=True, text=True, timeout=30)
    assert done.returncode == 3, done.stdout
    assert "ermission denied" in done.stderr
    assert "hint: run as root" in done.stderr


def test_socket_is_searched_beside_a_custom_kubelet_socket() -> None:
    usual = "/var/lib/kubelet/pod-resources/kubelet.sock"
    assert pod_resources_socket("/var/lib/kubelet/device-plugins/kubelet.sock", usual) == usual
    assert pod_resources_socket("", usual) == usual
    assert pod_resources_socket("/k/device-plugins/kubelet.sock", usual) == "/k/pod-resources/kubelet.sock"
    assert pod_resources_socket("/k/device-plugins/kubelet.sock", "/x.sock") == "/x.sock"


def test_counting_a_call_takes_microseconds() -> None:
    counters = Counters()
    call = Call("a/b", "Allocate", "OK", 0.0003, 2)
    taken = timeit.repeat(lambda: counters.call(call), number=2000, repeat=5, timer=time.thread_time)
    seconds = min(taken) / 2000
    assert seconds < 20e-6
    assert counters.calls == {("a/b", "Allocate", "OK"): 10_000}
    assert counters.devices == {"a/b": 20_000}
    assert counters.buckets["Allocate"][2] == 10_000


def test_events_of_a_faulty_driver_are_bounded() -> None:
    counters = Counters()
    for number in range(10_000):
        counters.event(GpuEvent("xid", "GPU-1", number))
    events = counters.events
    assert len(events) <= 513
    assert sum(events.values()) == 10_000
    assert events["", "other"] > 0
