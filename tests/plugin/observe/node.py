"""A simulated node with a kubelet stub, `plugin status` as a user runs it, and another plugin."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from gpunode.daemons.grpc_client import channel_to
from gpunode.plugin.kubelet import server as rpc
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from tests.cli import Ran, gpunode
from tests.plugin.nodes import eventually
from tests.plugin.serving import Serving

GPU = "nvidia.com/gpu"
QUICK = ("--health-hold-down", "0s", "--health-poll-interval", "1s")


def command(*words: str) -> Ran:
    """gpunode with the variables of this test, those of gpunode included."""
    return gpunode(*words, env=os.environ)


def status(place: Path, *words: str, nvml: bool = False) -> dict[str, Any]:
    """The envelope of `plugin status` for the kubelet at `place`."""
    own = ["--kubelet-socket", str(place / "dp/kubelet.sock"), "--state-dir", str(place / "state")]
    done = command("plugin", "status", *own, *([] if nvml else ["--no-nvml"]), *words, "-o", "json")
    assert done.code == 0, done.err
    return done.document


def inject(serving: Serving, *words: str) -> None:
    assert serving.says("faults can be injected"), serving.log()  # it may advertise its GPUs before that
    done = command("plugin", "inject", *words, "--state-dir", serving.state)
    assert done.code == 0, done.err


LISTEN = ("--listen", "127.0.0.1:0")


def port_of(serving: Serving) -> int:
    assert serving.says("serving metrics"), serving.log()
    found = re.search(r'msg="serving metrics".* port=(\d+)', serving.log())
    assert found
    return int(found[1])


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Values:
    """Every sample of an exposition; a duplicate is an error, as it is to Prometheus."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def scrape(port: int) -> Values:
    code, text = get(port, "/metrics")
    assert code == 200, text
    return parsed(text)


def scrape_when(port: int, ready: Callable[[Values], object]) -> Values:
    """The first metrics for which `ready` is true."""
    found: Values = {}

    def is_ready() -> bool:
        found.clear()
        found.update(scrape(port))
        return bool(ready(found))

    assert eventually(is_ready), found
    return found


def value(found: Values, name: str, **labels: str) -> float | None:
    """The one sample of this name that has these labels, among others; None if there is none."""
    values = [v for (n, own), v in found.items() if n == name and labels.items() <= set(own)]
    assert len(values) <= 1, (name, labels)
    return values[0] if values else None


@contextmanager
def another_plugin(directory: Path, endpoint: str, resource: str, ids: Sequence[str]) -> Iterator[list[str]]:
    """A minimal registered device plugin; yields the calls that it got, by name."""
    calls: list[str] = []
    stop = Event()

    def options(request: Any, context: Any) -> Any:
        calls.append("GetDevicePluginOptions")
        return pb.DevicePluginOptions()

    def watch(request: Any, context: Any) -> Iterator[Any]:
        calls.append("ListAndWatch")
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID=name, health="Healthy") for name in ids])
        stop.wait(300)

    def allocate(request: Any, context: Any) -> Any:
        calls.append("Allocate")
        return pb.AllocateResponse(container_responses=[pb.ContainerAllocateResponse()])

    functions = {
        "GetDevicePluginOptions": options,
        "ListAndWatch": watch,
        "GetPreferredAllocation": lambda request, context: pb.PreferredAllocationResponse(),
        "Allocate": allocate,
        "PreStartContainer": lambda request, context: pb.PreStartContainerResponse(),
    }
    server = grpc.server(ThreadPoolExecutor(4), handlers=[rpc.handlers(rpc.DEVICE_PLUGIN, functions)])
    server.add_insecure_port(rpc.target(directory / endpoint))
    server.start()
    try:
        with channel_to(directory / "kubelet.sock") as channel:
            request = pb.RegisterRequest(version=rpc.VERSION, endpoint=endpoint, resource_name=resource)
            rpc.method(channel, rpc.REGISTRATION, "Register")(request, timeout=30)
        yield calls
    finally:
        stop.set()
        server.stop(0).wait(2)
