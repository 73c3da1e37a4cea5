"""A second plugin that registers our resource's name from a socket of its own: the kubelet tells nobody."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

from gpunode.host import Host
from gpunode.plugin.kubelet import rpc
from gpunode.plugin.kubelet_stub import KubeletStub
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from tests.plugin.fakes import FakeBackend
from tests.plugin.nodes import DIRECTORY, RESOURCE, eventually
from tests.plugin.test_links import Running, running

SOCKET = "theirs.sock"


@contextmanager
def stranger(host: Host, ids: tuple[str, ...]) -> Iterator[None]:
    """A small plugin that takes the name."""
    stop = Event()

    def watch(request: Any, context: grpc.ServicerContext) -> Iterator[pb.ListAndWatchResponse]:
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID=one, health="Healthy") for one in ids])
        stop.wait(300.0)

    functions: dict[str, rpc.Handler] = dict.fromkeys(rpc.METHODS[rpc.DEVICE_PLUGIN], lambda *_: pb.Empty())
    functions |= {"ListAndWatch": watch, "GetDevicePluginOptions": lambda *_: pb.DevicePluginOptions()}
    server = grpc.server(ThreadPoolExecutor(4), handlers=[rpc.handlers(rpc.DEVICE_PLUGIN, functions)])
    server.add_insecure_port(rpc.target(host.path(f"{DIRECTORY}/{SOCKET}")))
    server.start()
    try:
        with rpc.channel(host.path(f"{DIRECTORY}/kubelet.sock")) as channel:
            request = pb.RegisterRequest(version=rpc.VERSION, endpoint=SOCKET, resource_name=RESOURCE)
            rpc.method(channel, rpc.REGISTRATION, "Register")(request, timeout=5.0)
        yield
    finally:
        stop.set()
        server.stop(0.0).wait()


@pytest.fixture
def node(short: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, KubeletStub, Running]]:
    monkeypatch.setattr("gpunode.plugin.kubelet.rival._EVERY_SECONDS", 0.1)
    host = Host(short, {})
    stub = KubeletStub(host)
    stub.start()
    with running(host, FakeBackend({RESOURCE: 2, "nvidia.com/other": 1})) as made:
        assert stub.wait_allocatable(RESOURCE, 2, 30)
        yield host, stub, made
    stub.stop()


def test_who_takes_our_name_is_told_and_the_name_is_taken_back_after_them(
    node: tuple[Host, KubeletStub, Running],
) -> None:
    host, stub, made = node
    with stranger(host, ("X-0", "X-1", "X-2")):
        assert stub.wait_allocatable(RESOURCE, 3, 30)
        told = f"another device plugin has registered {RESOURCE}, with X-0, X-1, X-2; "
        told += f"sockets beside ours: {SOCKET}"
        assert eventually(lambda: told in made.log.messages("warning")), made.log.lines
        assert told in made.service.status
        assert made.log.messages("warning").count(told) == 1
        assert "registering again" not in made.log.messages(), "two that take it from each other help nobody"
    assert stub.wait_allocatable(RESOURCE, 2, 30), made.log.lines
    assert eventually(lambda: "another device plugin" not in made.service.status)
    assert made.log.reasons() == [f"the other plugin that had registered {RESOURCE} is gone"]


def test_a_checkpoint_that_is_old_or_nonsense_alarms_nobody(node: tuple[Host, KubeletStub, Running]) -> None:
    host, stub, made = node
    path = host.path(f"{DIRECTORY}/kubelet_internal_checkpoint")
    old = f'{{"Data": {{"RegisteredDevices": {{"{RESOURCE}": ["X-0"]}}}}}}'
    for text in (old, "{", "[]", '{"Data": null}', '{"Data": {"RegisteredDevices": 3}}'):
        path.write_text(text)
        assert not eventually(lambda: bool(made.log.messages("warning")), 0.4), text
    assert made.service.ready
    assert len(stub.registrations) == 2
