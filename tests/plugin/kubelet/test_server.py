"""The gRPC server on its socket, with the kubelet's calls."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import Any

import grpc
import pytest

from gpunode.daemons.grpc_client import channel_to
from gpunode.errors import PreconditionError
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.kubelet import server
from gpunode.plugin.kubelet.link import Serving, listen_privately
from gpunode.plugin.kubelet.server import MAX_STREAMS, Call, LinkContext, Streams
from gpunode.plugin.ledger import Feed, Ledger
from gpunode.plugin.model import AllocationError, Answer, ContainerDevice, ContainerMount, Snapshot
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from tests.ordinary_user import AS_ORDINARY_USER, public_directory
from tests.plugin.fakes import FakeBackend, FakeChecker
from tests.plugin.nodes import MemoryLog, eventually, feed, resource, uuid

SOCKET = "/nvidia-gpu.sock"


class Backend(FakeBackend):
    """A minimal backend; `bug` is raised for each request."""

    bug: Exception | None = None

    def answer(self, settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        if self.bug is not None:
            raise self.bug
        if not ids:
            raise AllocationError("the request names no device")
        for one in ids:
            device = snapshot.by_id.get(one)
            if device is None:
                known = ", ".join(item.id for item in snapshot.devices)
                raise AllocationError(f"unknown device {one!r}; known devices: {known}", code="not-found")
            if device.problem:
                raise AllocationError(f"{one} is unhealthy: {device.problem.reason}", code="unhealthy")
        return Answer(
            {"IDS": ",".join(ids)},
            (ContainerMount("/h", "/c", read_only=True),),
            (ContainerDevice("/dev/h", "/dev/c"),),
            {"key": "value"},
            ("nvidia.com/gpu=0",),
        )


class Made:
    """A server with all its parts."""

    def __init__(self, root: Path, made: Feed, path: str = SOCKET) -> None:
        self.feed = made
        self.log = MemoryLog()
        self.backend = Backend()
        self.calls: list[Call] = []
        host, settings = Host(root), Settings()
        ledger = Ledger(self.backend, settings, FakeChecker(), self.log, time.time)
        context = LinkContext(
            host, settings, self.backend, ledger, self.log, [self.calls.append], lambda: None
        )
        self.server = Serving(context, path, made)

    def start(self) -> None:
        self.server.claim([])


@contextmanager
def serving(root: Path, made: Feed) -> Iterator[Made]:
    all_of_it = Made(root, made)
    all_of_it.start()
    try:
        yield all_of_it
    finally:
        all_of_it.server.close()


def call(root: Path, name: str, request: Any) -> Any:
    with channel_to(root / SOCKET[1:]) as channel:
        return server.method(channel, server.DEVICE_PLUGIN, name)(request, timeout=30)


class Watcher:
    """One client with one ListAndWatch stream; every list goes into a queue, None when the stream ended."""

    def __init__(self, root: Path) -> None:
        self.lists: Queue[dict[str, str] | None] = Queue()
        self.channel = channel_to(root / SOCKET[1:])
        self.stream = server.method(self.channel, server.DEVICE_PLUGIN, "ListAndWatch")(pb.Empty())
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
        return self.lists.get(timeout=30)

    def close(self) -> None:
        self.stream.cancel()
        self.thread.join(30)
        self.channel.close()


def test_list_has_every_gpu_with_health_and_one_numa_node(short: Path) -> None:
    with serving(short, feed(4)), channel_to(short / SOCKET[1:]) as channel:
        stream = server.method(channel, server.DEVICE_PLUGIN, "ListAndWatch")(pb.Empty())
        devices = next(stream).devices
        stream.cancel()
    assert [device.ID for device in devices] == [uuid(index) for index in range(4)]
    assert {device.health for device in devices} == {"Healthy"}
    assert [[node.ID for node in device.topology.nodes] for device in devices] == [[0], [0], [1], [1]]


def test_options_offer_preferred_allocation_and_no_pre_start(short: Path) -> None:
    with serving(short, feed(1)):
        options = call(short, "GetDevicePluginOptions", pb.Empty())
        assert (options.get_preferred_allocation_available, options.pre_start_required) == (True, False)
        assert (
            call(short, "PreStartContainer", pb.PreStartContainerRequest()) == pb.PreStartContainerResponse()
        )


def test_each_container_of_an_allocation_gets_its_own_response(short: Path) -> None:
    asked = [pb.ContainerAllocateRequest(devices_ids=ids) for ids in ([uuid(1), uuid(0)], [uuid(2)])]
    with serving(short, feed(4)):
        answer = call(short, "Allocate", pb.AllocateRequest(container_requests=asked))
    assert [dict(one.envs) for one in answer.container_responses] == [
        {"IDS": f"{uuid(1)},{uuid(0)}"},
        {"IDS": uuid(2)},
    ]
    first = answer.container_responses[0]
    assert [(m.host_path, m.container_path, m.read_only) for m in first.mounts] == [("/h", "/c", True)]
    assert [(d.host_path, d.container_path, d.permissions) for d in first.devices] == [
        ("/dev/h", "/dev/c", "rw")
    ]
    assert dict(first.annotations) == {"key": "value"}
    assert [one.name for one in first.cdi_devices] == ["nvidia.com/gpu=0"]


@pytest.mark.parametrize(
    ("ids", "code", "words"),
    [
        (["GPU-x"], grpc.StatusCode.NOT_FOUND, f"'GPU-x'; known devices: {uuid(0)}, {uuid(1)}"),
        ([], grpc.StatusCode.INVALID_ARGUMENT, "no device"),
        ([uuid(1)], grpc.StatusCode.FAILED_PRECONDITION, "XID 79"),
    ],
)
def test_refused_allocation_names_the_reason(
    short: Path, ids: list[str], code: grpc.StatusCode, words: str
) -> None:
    made = feed(2, {1: "XID 79"})
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
    with serving(short, made), pytest.raises(grpc.RpcError) as caught:
        call(short, "Allocate", request)
    assert caught.value.code() == code
    assert words in str(caught.value.details())


def test_preferred_allocation_is_never_an_error(short: Path) -> None:
    asked = [
        pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=9
        )
        for available, must in ((["GPU-x", uuid(1)], []), (["GPU-x"], []), ([uuid(1)], ["GPU-x"]))
    ]
    with serving(short, feed(2)) as made:
        answer = call(
            short, "GetPreferredAllocation", pb.PreferredAllocationRequest(container_requests=asked)
        )
    chosen = [list(container.deviceIDs) for container in answer.container_responses]
    assert chosen == [[uuid(1)], [], ["GPU-x", uuid(1)]]
    assert [(one.code, one.fallback) for one in made.calls] == [("OK", False)]


def test_every_open_stream_gets_every_change(short: Path) -> None:
    made = feed(2)
    with serving(short, made):
        watchers = [Watcher(short) for _ in range(3)]
        try:
            for watcher in watchers:
                assert watcher.next() == {uuid(0): "Healthy", uuid(1): "Healthy"}
            for index, sick in ((1, {1: "XID 79"}), (0, {1: "XID 79", 0: "XID 79"})):
                made.publish(resource(2, sick=sick))
                for watcher in watchers:
                    news = watcher.next()
                    assert news is not None
                    assert news[uuid(index)] == "Unhealthy"
        finally:
            for watcher in watchers:
                watcher.close()


def test_old_streams_do_not_block_new_ones(short: Path) -> None:
    with serving(short, feed(2)) as made:
        watchers = [Watcher(short) for _ in range(3 * MAX_STREAMS)]
        try:
            assert eventually(lambda: made.server.streams.last == 3 * MAX_STREAMS)
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


def test_disconnected_client_frees_its_stream(short: Path) -> None:
    with serving(short, feed(2)) as made:
        watcher = Watcher(short)
        watcher.next()
        assert made.server.streams.since(0)
        watcher.close()
        assert eventually(lambda: not made.server.streams.since(0))


def test_stop_ends_the_streams_and_removes_the_socket(short: Path) -> None:
    with serving(short, feed(2)):
        watcher = Watcher(short)
        watcher.next()
    assert watcher.next() is None
    watcher.close()
    assert not (short / SOCKET[1:]).exists()


def test_only_the_owner_may_connect(short: Path) -> None:
    with serving(short, feed(1)):
        assert stat.S_IMODE((short / SOCKET[1:]).stat().st_mode) == 0o600


def test_umask_of_other_threads_is_kept_while_binding(short: Path) -> None:
    """It applies to the whole process: a directory created meanwhile would be inaccessible."""
    seen: list[int] = []

    def bind() -> None:
        listening.bind(str(short / SOCKET[1:]))
        (short / "meanwhile").mkdir()
        seen.append(stat.S_IMODE((short / "meanwhile").stat().st_mode))

    with closing(socket.socket(socket.AF_UNIX)) as listening:
        (short / "before").mkdir()
        listen_privately(Host(short), SOCKET, bind)
    assert seen == [stat.S_IMODE((short / "before").stat().st_mode)]
    assert stat.S_IMODE((short / SOCKET[1:]).stat().st_mode) == 0o600


def test_socket_without_a_listener_is_replaced(short: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(short / SOCKET[1:]))
    left.close()
    with serving(short, feed(1)):
        assert call(short, "GetDevicePluginOptions", pb.Empty()).get_preferred_allocation_available


def test_second_plugin_is_refused_and_the_first_continues(short: Path) -> None:
    with serving(short, feed(1)):
        with pytest.raises(PreconditionError, match="another device plugin is serving"):
            Made(short, feed(1)).start()
        assert call(short, "GetDevicePluginOptions", pb.Empty()).get_preferred_allocation_available


def test_socket_of_a_process_without_grpc_is_not_replaced(short: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short / SOCKET[1:]))
        other.listen(8)
        with pytest.raises(PreconditionError, match="another device plugin is serving"):
            Made(short, feed(1)).start()
        assert (short / SOCKET[1:]).is_socket()


@pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
def test_file_that_is_no_socket_is_not_replaced(short: Path, kind: str) -> None:
    path = short / SOCKET[1:]
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/etc/passwd")
    with pytest.raises(PreconditionError, match="is not a socket"):
        Made(short, feed(1)).start()
    assert path.is_symlink() or path.exists()


def test_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreconditionError, match="107"):
        Made(tmp_path, feed(1), "/" + "d" * 100 + "/nvidia-gpu.sock").start()


def test_socket_that_replaced_ours_is_not_removed(short: Path) -> None:
    made = Made(short, feed(1))
    made.start()
    server = made.server
    (short / SOCKET[1:]).unlink()
    assert server.socket_is() == "gone"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short / SOCKET[1:]))
        assert server.socket_is() == "foreign"
        server.close()
        assert (short / SOCKET[1:]).is_socket()
        (short / SOCKET[1:]).unlink()
    server.close()


def test_stream_opened_after_the_end_holds_no_thread() -> None:
    streams = Streams(feed(1), lambda: None)
    streams.close_all()
    assert not streams.is_open(streams.open())


def test_many_other_clients_do_not_displace_the_kubelet() -> None:
    streams = Streams(feed(1), lambda: None)
    stale = streams.open()
    streams.registering()
    kubelet = streams.open()
    others = [streams.open() for _ in range(100)]
    assert streams.is_open(kubelet)
    assert not streams.is_open(stale)
    assert [number for number in others if streams.is_open(number)] == others[-(MAX_STREAMS - 1) :]


# --- bad input -----------------------------------------------------------------------------------------


def raw(root: Path, name: str, data: bytes) -> bytes:
    """A call with any bytes as its request."""
    with channel_to(root / SOCKET[1:]) as channel:
        ask: Any = channel.unary_unary(f"/{server.DEVICE_PLUGIN.name}/{name}")  # bytes in, bytes out
        return bytes(ask(data, timeout=30))


def still_serving(root: Path) -> bool:
    return bool(call(root, "GetDevicePluginOptions", pb.Empty()).get_preferred_allocation_available)


def allocate_request(*ids: str) -> pb.AllocateRequest:
    return pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])


@pytest.mark.parametrize("name", ["Allocate", "GetPreferredAllocation", "ListAndWatch"])
def test_invalid_message_bytes_are_an_error_with_a_reason(short: Path, name: str, capfd) -> None:
    with serving(short, feed(1)):
        with pytest.raises(grpc.RpcError) as caught:
            raw(short, name, b"\xff" * 64)
        assert still_serving(short)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "the request is not a v1beta1." in str(caught.value.details())
    assert capfd.readouterr().err == ""


def test_malformed_frame_ends_only_its_connection(short: Path, capfd) -> None:
    with serving(short, feed(1)):
        watcher = Watcher(short)
        watcher.next()
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096, b""):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(30)
                client.connect(str(short / SOCKET[1:]))
                client.sendall(garbage)
                client.shutdown(socket.SHUT_WR)
                while client.recv(4096):
                    pass
        assert still_serving(short)
        assert watcher.thread.is_alive()
        watcher.close()
    assert capfd.readouterr().err == ""


def test_ten_thousand_ids_are_refused_with_a_short_message(short: Path) -> None:
    with serving(short, feed(1)):
        with pytest.raises(grpc.RpcError) as caught:
            call(short, "Allocate", allocate_request(*(f"{index:044d}" for index in range(10_000))))
        assert still_serving(short)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "0" * 44 in str(caught.value.details())


def test_reason_longer_than_a_header_is_truncated(short: Path) -> None:
    with serving(short, feed(2000)), pytest.raises(grpc.RpcError) as caught:
        call(short, "Allocate", allocate_request("GPU-\N{SNOWMAN}"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    details = str(caught.value.details())
    assert details.startswith("unknown device 'GPU-\N{SNOWMAN}'")
    assert len(details.encode()) <= 1024


def test_oversized_request_is_refused(short: Path) -> None:
    with serving(short, feed(1)):
        with pytest.raises(grpc.RpcError) as caught:
            call(short, "Allocate", allocate_request("x" * (server.MAX_REQUEST_BYTES + 1)))
        assert still_serving(short)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_request_without_containers_gets_an_empty_response(short: Path) -> None:
    with serving(short, feed(1)):
        assert call(short, "Allocate", pb.AllocateRequest()) == pb.AllocateResponse()


def test_bug_in_a_response_is_an_internal_error_with_its_cause(short: Path) -> None:
    with serving(short, feed(1)) as made:
        made.backend.bug = ZeroDivisionError("a bug")
        with pytest.raises(grpc.RpcError) as caught:
            call(short, "Allocate", allocate_request(uuid(0)))
        assert still_serving(short)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "ZeroDivisionError: a bug" in str(caught.value.details())
    ((_, _, fields),) = [line for line in made.log.lines if line[1] == "Allocate failed"]
    assert "test_server.py" in str(fields["at"])
    assert made.calls[0][1:3] == ("Allocate", "INTERNAL")
    assert made.calls[0].devices == 1


def test_bug_in_a_preference_still_returns_devices_and_is_counted(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(server, "prefer", fail)
    asked = pb.ContainerPreferredAllocationRequest(
        available_deviceIDs=["a", "b", "c"], must_include_deviceIDs=["b"], allocation_size=2
    )
    with serving(short, feed(1)) as made:
        answer = call(
            short, "GetPreferredAllocation", pb.PreferredAllocationRequest(container_requests=[asked])
        )
    assert list(answer.container_responses[0].deviceIDs) == ["b", "a"]
    assert [(one.code, one.fallback, one.devices) for one in made.calls] == [("OK", True, 2)]
    assert any("choosing preferred devices failed" in line for line in made.log.messages("error"))


def test_every_call_is_reported_with_its_code_and_duration(short: Path) -> None:
    with serving(short, feed(1)) as made:
        call(short, "Allocate", allocate_request(uuid(0)))
        with pytest.raises(grpc.RpcError):
            call(short, "Allocate", allocate_request())
        watcher = Watcher(short)
        watcher.next()
        watcher.close()
        assert eventually(lambda: len(made.calls) == 3)
    assert [(one.method, one.code) for one in made.calls] == [
        ("Allocate", "OK"),
        ("Allocate", "INVALID_ARGUMENT"),
        ("ListAndWatch", "OK"),
    ]
    assert all(0 < one.seconds < 30 for one in made.calls)


def test_fifty_open_streams_leave_capacity_for_calls(short: Path) -> None:
    with serving(short, feed(2)) as made:
        watchers = [Watcher(short) for _ in range(50)]
        try:
            assert eventually(lambda: made.server.streams.last == 50)
            assert still_serving(short)
            made.feed.publish(resource(2, sick={0: "XID 79"}))
            assert eventually(lambda: sum(watcher.thread.is_alive() for watcher in watchers) <= MAX_STREAMS)
        finally:
            for watcher in watchers:
                watcher.close()


def test_other_users_cannot_connect() -> None:
    script = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with public_directory() as place, serving(place, feed(1)):
        tried = [*AS_ORDINARY_USER, sys.executable, "-c", script, str(place / SOCKET[1:])]
        done = subprocess.run(tried, capture_output=True, text=True, check=False)
        assert "PermissionError" in done.stderr
        assert subprocess.run(tried[len(AS_ORDINARY_USER) :], check=False).returncode == 0


def test_stop_does_not_wait_for_a_hanging_call(short: Path) -> None:
    made = Made(short, feed(1))
    begun, held = Event(), Queue[None]()

    def hang(settings: Settings, snapshot: Snapshot, ids: Sequence[str]) -> Answer:
        begun.set()
        held.get(timeout=60)
        return Answer()

    made.backend.answer = hang  # type: ignore[method-assign]
    made.start()
    with channel_to(short / SOCKET[1:]) as channel:
        waiting = server.method(channel, server.DEVICE_PLUGIN, "Allocate").future(allocate_request(uuid(0)))
        stopper = Thread(target=made.server.close)
        assert begun.wait(30)
        assert not waiting.done()
        stopper.start()
        stopper.join(30)
        assert not stopper.is_alive()
        held.put(None)
        with pytest.raises(grpc.RpcError):
            waiting.result(30)
