"""gRPC calls to a real server, and to servers that break off, refuse, send garbage or never respond."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.daemons import grpc_client
from gpunode.daemons.cri import Cri, image_config, running_containers, running_version
from gpunode.daemons.grpc_client import CallError, open_channel, unary_call
from gpunode.daemons.proto import cri_pb2 as pb
from gpunode.errors import DaemonError
from gpunode.host import Host

PLENTY = 30.0  # seconds for a server that responds or closes at once: only a busy machine needs any
SERVICE = "runtime.v1.RuntimeService"
Answer = Callable[[bytes, grpc.ServicerContext], bytes]
Serve = Callable[[Answer], str]
METHODS = {
    SERVICE: ("Status", "Version", "ListContainers", "ListPodSandbox"),
    "runtime.v1.ImageService": ("ImageStatus",),
}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a server of which every method returns the bytes that the function returns."""
    servers = []

    def start(answer: Answer) -> str:
        server = grpc.server(ThreadPoolExecutor(2))
        for service, names in METHODS.items():
            handlers: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(answer) for name in names}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        path = str(tmp_path / "cri.sock")
        server.add_insecure_port(f"unix:{path}")
        server.start()
        servers.append(server)
        return path

    yield start
    for server in servers:
        server.stop(None).wait()


def status(path: str, timeout: float = PLENTY, host: Host | None = None) -> pb.StatusResponse:
    with open_channel(host or Host(), path) as channel:
        return unary_call(channel, f"/{SERVICE}/Status", pb.StatusRequest(), pb.StatusResponse, timeout)


def response(size: int) -> pb.StatusResponse:
    config = {"containerd": {"defaultRuntimeName": "nvidia", "runtimes": {"runc": {}, "nvidia": {}}}}
    answer = pb.StatusResponse(info={"config": json.dumps({**config, "padding": "x" * size}), "other": "{}"})
    answer.status.conditions.add(type="RuntimeReady", status=True)
    answer.status.conditions.add(type="NetworkReady", status=False, reason="cni")
    answer.runtime_handlers.add(name="kata")
    return answer


@pytest.mark.parametrize("size", [0, 20_000, 6_000_000])  # one frame, several, more than gRPC's own limit
def test_status_is_read(serve: Serve, size: int) -> None:
    path = serve(lambda request, context: response(size).SerializeToString())
    with Cri(Host(), path, PLENTY) as cri:
        answer = cri.status()
    assert answer.default_handler == "nvidia"
    assert answer.handlers == ("runc", "nvidia", "kata")
    assert answer.conditions == {"RuntimeReady": True, "NetworkReady": False}


def test_response_beyond_the_limit_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_client, "MAX_RESPONSE_BYTES", 10_000)
    path = serve(lambda request, context: response(20_000).SerializeToString())
    with pytest.raises(CallError) as caught:
        status(path)
    assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_version_is_that_of_the_running_daemon(serve: Serve) -> None:
    answer = pb.VersionResponse(version="0.1.0", runtime_name="containerd", runtime_version="v2.1.9")
    assert running_version(Host(), serve(lambda request, context: answer.SerializeToString()), PLENTY) == (
        "v2.1.9"
    )


def test_failed_call_gives_no_version(serve: Serve, tmp_path: Path) -> None:
    assert running_version(Host(), str(tmp_path / "none"), PLENTY) == ""
    assert running_version(Host(), serve(lambda request, context: b"\xff\xff\xff"), PLENTY) == ""


def test_daemon_without_its_cri_plugin_is_reported(serve: Serve) -> None:
    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, f"unknown service {SERVICE}")
        raise AssertionError

    path = serve(refuse)
    with Cri(Host(), path) as cri, pytest.raises(DaemonError) as caught:
        cri.status()
    assert caught.value.code == "cri-disabled"


def test_server_that_never_responds_times_out(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        with pytest.raises(CallError) as caught:
            status(path, 0.2)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    with pytest.raises(CallError) as caught:
        status(str(tmp_path / "none"))
    assert caught.value.code == "UNAVAILABLE"


def test_verbose_image_status_contains_the_image_configuration(serve: Serve) -> None:
    asked: list[pb.ImageStatusRequest] = []
    info = {"imageSpec": {"config": {"Env": ["A=1"]}}}
    answer = pb.ImageStatusResponse(image=pb.Image(id="i"), info={"info": json.dumps(info)})

    def reply(request: bytes, context: object) -> bytes:
        asked.append(pb.ImageStatusRequest.FromString(request))
        return answer.SerializeToString()

    path = serve(reply)
    assert image_config(Host(), path, "busybox", PLENTY) == {"Env": ["A=1"]}
    assert asked == [pb.ImageStatusRequest(image=pb.ImageSpec(image="busybox"), verbose=True)]
    for text in ("{", "[]", "", '{"imageSpec": {"config": []}}'):
        answer.info["info"] = text
        assert image_config(Host(), path, "busybox", PLENTY) == {}
    answer.ClearField("image")
    assert image_config(Host(), path, "busybox", PLENTY) is None


def test_only_running_containers_are_listed(serve: Serve) -> None:
    asked = []

    def reply(request: bytes, context: object) -> bytes:
        asked.append(request)
        return b""

    assert running_containers(Host(), serve(reply), PLENTY) == ()
    # ListContainersRequest.filter (1) .state (2) .state (1) = CONTAINER_RUNNING (1)
    assert asked == [b"\x0a\x04\x12\x02\x08\x01", b""]


def test_host_that_is_not_live_contacts_no_socket(serve: Serve, tmp_path: Path) -> None:
    path = serve(lambda request, context: b"")
    with pytest.raises(DaemonError) as caught:
        status(path, host=Host(tmp_path))
    assert caught.value.code == "not-live"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts for another user")
def test_socket_owned_by_another_user_is_refused(serve: Serve, tmp_path: Path) -> None:
    path = serve(lambda request, context: b"")
    for_user = replace(Host(), behalf=65534)
    temporary = Path(tempfile.gettempdir())
    for directory in (tmp_path, *(one for one in tmp_path.parents if one.is_relative_to(temporary))):
        if directory != temporary:
            directory.chmod(0o755)
    Path(path).chmod(0o666)
    with pytest.raises(DaemonError) as caught:
        status(path, host=for_user)
    assert caught.value.code == "denied"
    os.chown(path, 65534, 65534)
    assert status(path, host=for_user) == pb.StatusResponse()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
BEGIN = frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, 1, 0, b"") + frame(HEADERS, END_HEADERS, 1, b"\x88")
END = frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x88")
MESSAGE = b"\0\0\0\0\x03abc"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends the bytes in the list to each client, then closes the connection."""
    path = str(tmp_path_factory.mktemp("scripted") / "s")
    script = [b""]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def run() -> None:
            with suppress(OSError):  # until the listener is shut down
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.sendall(script[0])

        thread = threading.Thread(target=run)
        thread.start()
        yield path, script
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize(
    "response",
    [
        b"",
        frame(SETTINGS, 0, 0, b"") + END,
        BEGIN,
        BEGIN + frame(DATA, 0, 1, MESSAGE[:6]),
        BEGIN + frame(RESET, 0, 1, b"\0\0\0\2"),
        BEGIN + frame(DATA, 0, 1, MESSAGE) + frame(RESET, 0, 1, b"\0\0\0\2") + END,
        BEGIN + frame(GOAWAY, 0, 0, b"\0" * 8),
        BEGIN + frame(DATA, PADDED, 1, b"") + END,
        BEGIN + frame(DATA, PADDED, 1, b"\x09" + MESSAGE) + END,
        BEGIN + frame(DATA, 0, 1, b"\1" + MESSAGE[1:]) + END,
        BEGIN + frame(DATA, 0, 1, MESSAGE + MESSAGE) + END,
        BEGIN + frame(DATA, 0, 1, MESSAGE[:-1]) + END,
        BEGIN + frame(DATA, 0, 3, MESSAGE) + END,
        frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, END_HEADERS, 1, b""),
        b"\xff\xff\xff\0\0\0\0\0\1",
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n400",
    ],
    ids=[
        "nothing", "trailers only", "no message", "half a message", "reset", "reset after the message",
        "going away", "no padding length", "more padding than payload", "compressed", "two messages",
        "too short", "another stream", "headers in parts", "too large a frame", "HTTP/1.1",
    ],
)  # fmt: skip
def test_truncated_or_invalid_grpc_response_is_an_error(
    scripted: tuple[str, list[bytes]], response: bytes
) -> None:
    path, script = scripted
    script[0] = response
    with pytest.raises(CallError):
        status(path, 1.0)


FRAMES = st.builds(
    frame,
    st.sampled_from([DATA, DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION, 200]),
    st.sampled_from([0, 0, END_STREAM, END_HEADERS, PADDED, PADDED | END_STREAM, 255]),
    st.sampled_from([0, 1, 1, 3, 0x80000001]),
    st.binary(max_size=12) | st.just(MESSAGE),
)


@settings(max_examples=25, deadline=None)
@given(data=st.binary(max_size=64) | st.lists(FRAMES, max_size=8).map(b"".join))
def test_random_frames_are_an_error_or_an_empty_message(
    scripted: tuple[str, list[bytes]], data: bytes
) -> None:
    path, script = scripted
    script[0] = data
    with suppress(CallError):
        assert len(status(path, 0.5).SerializeToString()) <= len(data)


@settings(deadline=None)
@given(answer=st.binary(max_size=60))
def test_any_bytes_are_a_status_or_an_error(answer: bytes) -> None:
    class Channel:
        def unary_unary(self, method: str) -> Any:
            return lambda request, timeout: answer

    channel: Any = Channel()
    try:
        expected = pb.StatusResponse.FromString(answer)
    except DecodeError:
        with pytest.raises(CallError) as caught:
            unary_call(channel, "/a.B/C", pb.StatusRequest(), pb.StatusResponse, PLENTY)
        assert caught.value.code == grpc_client.MALFORMED
    else:
        answered = unary_call(channel, "/a.B/C", pb.StatusRequest(), pb.StatusResponse, PLENTY)
        assert answered.SerializeToString() == expected.SerializeToString()


def test_slowly_dripping_response_times_out(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(BEGIN)
                for byte in frame(DATA, 0, 1, b"x" * 60_000):
                    connection.sendall(bytes([byte]))
                    if over.wait(0.02):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        started = Host().monotonic()
        with pytest.raises(CallError) as caught:
            status(path, 0.3)
        took = Host().monotonic() - started
        over.set()
        thread.join(10)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert 0.3 <= took < 30.0  # the whole response would take twenty minutes


def test_children_can_start_while_a_channel_is_open(serve: Serve) -> None:
    """gRPC has its own threads by then; neither fork(2), as for another user, nor vfork(2) may hang."""
    path = serve(lambda request, context: b"")
    program = (
        "import os, sys\n"
        "from gpunode.daemons.cri import Cri\n"
        "from gpunode.host import Host\n"
        "host = Host()\n"
        "with Cri(host, sys.argv[1]) as cri:\n"
        "    for number in range(20):\n"
        "        cri.status()\n"
        "        assert host.run(('true',), timeout=20).ok\n"
        "        pid = os.fork()\n"
        "        if pid == 0:\n"
        "            os._exit(0)\n"
        "        assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
