"""The gRPC server on its socket, asked as the kubelet asks."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import grpc
import pytest

from gpunode.errors import PreconditionError
from gpunode.host import Host
from gpunode.plugin import rpc
from gpunode.plugin.devices import DeviceTable
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from gpunode.plugin.server import MAX_STREAMS, PluginServer, Streams
from tests.plugin.nodes import eventually, table, uuid

SOCKET = "/nvidia-gpu.sock"


@contextmanager
def serving(root: Path, made: DeviceTable) -> Iterator[PluginServer]:
    server = PluginServer(Host(root), SOCKET, made)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def call(root: Path, name: str, request: Any) -> Any:
    with rpc.channel(root / SOCKET[1:]) as channel:
        return rpc.method(channel, rpc.DEVICE_PLUGIN, name)(request, timeout=5)


class Watcher:
    """One client with one ListAndWatch stream; every list goes into a queue, None when the stream ended."""

    def __init__(self, root: Path) -> None:
        self.lists: Queue[dict[str, str] | None] = Queue()
        self.channel = rpc.channel(root / SOCKET[1:])
        self.stream = rpc.method(self.channel, rpc.DEVICE_PLUGIN, "ListAndWatch")(pb.Empty())
        self.thread = Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            for response in self.stream:
                self.lists.put({device.ID: device.health for device in response.devices})
        except grpc.RpcError:
            pass
        self.lists.put(None)

    def next(self) -> dict[str, str] | None:
        return self.lists.get(timeout=5)

    def close(self) -> None:
        self.stream.cancel()
        self.thread.join(5)
        self.channel.close()


def test_the_list_has_every_gpu_with_health_and_one_numa_node(short: Path) -> None:
    with serving(short, table(4)), rpc.channel(short / SOCKET[1:]) as channel:
        stream = rpc.method(channel, rpc.DEVICE_PLUGIN, "ListAndWatch")(pb.Empty())
        devices = next(stream).devices
        stream.cancel()
    assert [device.ID for device in devices] == [uuid(index) for index in range(4)]
    assert {device.health for device in devices} == {"Healthy"}
    assert [[node.ID for node in device.topology.nodes] for device in devices] == [[0], [0], [1], [1]]


def test_the_options_offer_preferred_allocation_and_no_pre_start(short: Path) -> None:
    with serving(short, table(1)):
        options = call(short, "GetDevicePluginOptions", pb.Empty())
        assert (options.get_preferred_allocation_available, options.pre_start_required) == (True, False)
        assert (
            call(short, "PreStartContainer", pb.PreStartContainerRequest()) == pb.PreStartContainerResponse()
        )


def test_each_container_of_an_allocation_gets_its_own_answer(short: Path) -> None:
    asked = [pb.ContainerAllocateRequest(devices_ids=ids) for ids in ([uuid(1), uuid(0)], [uuid(2)])]
    with serving(short, table(4)):
        answer = call(short, "Allocate", pb.AllocateRequest(container_requests=asked))
    assert [dict(one.envs) for one in answer.container_responses] == [
        {"NVIDIA_VISIBLE_DEVICES": f"{uuid(1)},{uuid(0)}"},
        {"NVIDIA_VISIBLE_DEVICES": uuid(2)},
    ]


@pytest.mark.parametrize(
    ("ids", "code", "words"),
    [
        (["GPU-x"], grpc.StatusCode.NOT_FOUND, f"'GPU-x'; known devices: {uuid(0)}, {uuid(1)}"),
        ([], grpc.StatusCode.INVALID_ARGUMENT, "no device"),
        ([uuid(1)], grpc.StatusCode.FAILED_PRECONDITION, "XID 79"),
    ],
)
def test_a_refused_allocation_says_why(
    short: Path, ids: list[str], code: grpc.StatusCode, words: str
) -> None:
    made = table(2)
    made.event(uuid(1), "XID 79")
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
    with serving(short, made), pytest.raises(grpc.RpcError) as caught:
        call(short, "Allocate", request)
    assert caught.value.code() == code
    assert words in str(caught.value.details())


def test_a_preference_is_never_an_error(short: Path) -> None:
    asked = pb.ContainerPreferredAllocationRequest(available_deviceIDs=["GPU-x"], allocation_size=9)
    with serving(short, table(2)):
        answer = call(
            short, "GetPreferredAllocation", pb.PreferredAllocationRequest(container_requests=[asked])
        )
    assert list(answer.container_responses[0].deviceIDs) == ["GPU-x"]


def test_every_open_stream_gets_every_change(short: Path) -> None:
    made = table(2)
    with serving(short, made):
        watchers = [Watcher(short) for _ in range(3)]
        try:
            for watcher in watchers:
                assert watcher.next() == {uuid(0): "Healthy", uuid(1): "Healthy"}
            for index in (1, 0):
                made.event(uuid(index), "XID 79")
                for watcher in watchers:
                    news = watcher.next()
                    assert news is not None
                    assert news[uuid(index)] == "Unhealthy"
        finally:
            for watcher in watchers:
                watcher.close()


def test_stale_streams_starve_nobody(short: Path) -> None:
    with serving(short, table(2)) as server:
        watchers = [Watcher(short) for _ in range(3 * MAX_STREAMS)]
        try:
            assert eventually(lambda: server.streams.last == 3 * MAX_STREAMS)
            newest = [watcher for watcher in watchers if watcher.next() is not None]
            assert newest
            assert call(short, "GetDevicePluginOptions", pb.Empty()).get_preferred_allocation_available
            ended = [watcher for watcher in watchers if not watcher.thread.is_alive()]
            assert eventually(
                lambda: sum(watcher.thread.is_alive() for watcher in watchers) == MAX_STREAMS
            ), len(ended)
        finally:
            for watcher in watchers:
                watcher.close()


def test_a_client_that_goes_away_frees_its_stream(short: Path) -> None:
    with serving(short, table(2)) as server:
        watcher = Watcher(short)
        watcher.next()
        assert server.streams.since(0)
        watcher.close()
        assert eventually(lambda: not server.streams.since(0))


def test_stopping_ends_the_streams_and_removes_the_socket(short: Path) -> None:
    with serving(short, table(2)):
        watcher = Watcher(short)
        watcher.next()
    assert watcher.next() is None
    watcher.close()
    assert not (short / SOCKET[1:]).exists()


def test_only_the_owner_may_connect(short: Path) -> None:
    with serving(short, table(1)):
        assert stat.S_IMODE((short / SOCKET[1:]).stat().st_mode) == 0o600


def test_a_socket_that_nobody_listens_on_is_replaced(short: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(short / SOCKET[1:]))
    left.close()
    with serving(short, table(1)):
        assert call(short, "GetDevicePluginOptions", pb.Empty()).get_preferred_allocation_available


def test_a_second_plugin_is_refused_and_the_first_goes_on(short: Path) -> None:
    with serving(short, table(1)):
        with pytest.raises(PreconditionError, match="another device plugin is serving"):
            PluginServer(Host(short), SOCKET, table(1)).start()
        assert call(short, "GetDevicePluginOptions", pb.Empty()).get_preferred_allocation_available


def test_a_process_that_speaks_no_grpc_is_not_robbed_of_its_socket(short: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short / SOCKET[1:]))
        other.listen(8)
        with pytest.raises(PreconditionError, match="another device plugin is serving"):
            PluginServer(Host(short), SOCKET, table(1)).start()
        assert (short / SOCKET[1:]).is_socket()


@pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
def test_what_is_no_socket_is_left_alone(short: Path, kind: str) -> None:
    path = short / SOCKET[1:]
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/etc/passwd")
    with pytest.raises(PreconditionError, match="is not a socket"):
        PluginServer(Host(short), SOCKET, table(1)).start()
    assert path.is_symlink() or path.exists()


def test_a_path_that_is_too_long_for_a_socket_says_so(tmp_path: Path) -> None:
    with pytest.raises(PreconditionError, match="107"):
        PluginServer(Host(tmp_path), "/" + "d" * 100 + "/nvidia-gpu.sock", table(1)).start()


def test_a_socket_that_took_our_place_is_not_removed(short: Path) -> None:
    server = PluginServer(Host(short), SOCKET, table(1))
    server.start()
    (short / SOCKET[1:]).unlink()
    assert server.socket_is() == "gone"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short / SOCKET[1:]))
        assert server.socket_is() == "foreign"
        server.stop()
        assert (short / SOCKET[1:]).is_socket()
        (short / SOCKET[1:]).unlink()
    server.stop()


def test_a_stream_that_is_opened_after_the_end_holds_no_thread() -> None:
    streams = Streams(table(1))
    streams.close_all()
    assert not streams.is_open(streams.open())


def test_a_crowd_of_other_clients_does_not_push_the_kubelet_out() -> None:
    streams = Streams(table(1))
    stale = streams.open()
    streams.registering()
    kubelet = streams.open()
    others = [streams.open() for _ in range(100)]
    assert streams.is_open(kubelet)
    assert not streams.is_open(stale)
    assert [number for number in others if streams.is_open(number)] == others[-(MAX_STREAMS - 1) :]
