"""The small gRPC client against the real library's server, and against servers that break off or babble."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gpunode.daemons import cri_status
from gpunode.daemons.cri import Cri
from gpunode.daemons.cri_status import Said, quick_status, quick_version
from gpunode.daemons.grpc_unary import fields, unary_call
from gpunode.daemons.proto import cri_pb2 as pb
from gpunode.errors import DaemonError
from gpunode.host import Host

PLENTY = 30.0  # seconds for a server that has said all or ended: only a busy machine takes any
Serve = Callable[[Callable[[object, grpc.ServicerContext], object]], str]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a server whose Status and Version both give what the function gives."""
    monkeypatch.setattr(cri_status, "_SECONDS", PLENTY)
    servers = []

    def start(answer: Callable[[object, grpc.ServicerContext], object]) -> str:
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=request.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for name, request in (("Status", pb.StatusRequest), ("Version", pb.VersionRequest))
        }
        server = grpc.server(ThreadPoolExecutor(2))
        service = grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", handlers)
        server.add_generic_rpc_handlers((service,))
        path = str(tmp_path / "cri.sock")
        server.add_insecure_port(f"unix:{path}")
        server.start()
        servers.append(server)
        return path

    yield start
    for server in servers:
        server.stop(None).wait()


def status(size: int) -> pb.StatusResponse:
    config = {"containerd": {"defaultRuntimeName": "nvidia", "runtimes": {"runc": {}, "nvidia": {}}}}
    answer = pb.StatusResponse(info={"config": json.dumps({**config, "padding": "x" * size}), "other": "{}"})
    answer.status.conditions.add(type="RuntimeReady", status=True)
    answer.status.conditions.add(type="NetworkReady", status=False, reason="cni")
    answer.runtime_handlers.add(name="kata")
    return answer


@pytest.mark.parametrize("size", [0, 20_000, 3_000_000])  # one frame, several, more than the default window
def test_the_status_is_what_the_library_reads(serve: Serve, size: int) -> None:
    path = serve(lambda request, context: status(size))
    found = quick_status(Host(), path, PLENTY)
    assert found is not None
    config, handlers, conditions = found
    assert json.loads(config)["containerd"]["defaultRuntimeName"] == "nvidia"
    assert handlers == ("kata",) and conditions == {"RuntimeReady": True, "NetworkReady": False}


def test_the_version_is_the_running_daemons(serve: Serve) -> None:
    answer = pb.VersionResponse(version="0.1.0", runtime_name="containerd", runtime_version="v2.1.9")
    assert quick_version(Host(), serve(lambda request, context: answer), PLENTY) == "v2.1.9"


def test_an_error_is_left_to_the_library(serve: Serve) -> None:
    def refuse(request: object, context: grpc.ServicerContext) -> object:
        return context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown service runtime.v1.RuntimeService")

    path = serve(refuse)
    assert quick_status(Host(), path, PLENTY) is None
    with Cri(Host(), path) as cri, pytest.raises(DaemonError) as caught:
        cri.status()
    assert caught.value.code == "cri-disabled"


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        assert unary_call(Host(), str(tmp_path / "s"), "/a.B/C", b"", 0.2) is None
    assert unary_call(Host(), str(tmp_path / "none"), "/a.B/C", b"", 0.2) is None


@dataclass(frozen=True)
class Scripted(Host):
    """A host whose sockets lead to a server that says `said` and no more; a real pair of sockets."""

    said: bytes = b""
    servers: list[socket.socket] = field(default_factory=list)

    def connect_unix(self, path: str, timeout: float = 5.0) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout)
        theirs.sendall(self.said)
        theirs.shutdown(socket.SHUT_WR)
        self.servers.append(theirs)
        return ours


@contextmanager
def saying(said: bytes) -> Iterator[Host]:
    host = Scripted(said=said)
    yield host
    for server in host.servers:
        server.close()


def call(said: bytes) -> bytes | None:
    with saying(said) as host:
        return unary_call(host, "/any", "/a.B/C", b"", PLENTY)


def quick(said: bytes) -> Said | None:
    with saying(said) as host:
        return quick_status(host, "/any", PLENTY)


def success(message: bytes) -> bytes:
    """The frames of a call that went well."""
    return BEGIN + frame(DATA, 0, 1, b"\0" + len(message).to_bytes(4, "big") + message) + END


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
BEGIN = frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, 1, 0, b"") + frame(HEADERS, END_HEADERS, 1, b"\x88")
END = frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x88")
MESSAGE = b"\0\0\0\0\x03abc"


def test_a_message_may_come_in_pieces_padded_and_between_other_frames() -> None:
    between = frame(PING, 0, 0, b"12345678") + frame(WINDOW, 0, 0, b"\0\0\0\1") + frame(DATA, 0, 1, b"")
    padded = frame(DATA, PADDED, 1, b"\x02" + MESSAGE[:4] + b"xx")
    assert call(BEGIN + padded + between + frame(DATA, 0, 1, MESSAGE[4:]) + END) == b"abc"


@given(cut=st.integers(0, len(BEGIN + frame(DATA, 0, 1, MESSAGE) + END) - 1))
def test_an_answer_that_breaks_off_is_none(cut: int) -> None:
    whole = BEGIN + frame(DATA, 0, 1, MESSAGE) + END
    assert call(whole) == b"abc"
    assert call(whole[:cut]) is None


@pytest.mark.parametrize(
    "said",
    [
        frame(SETTINGS, 0, 0, b"") + END,
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
        "trailers only", "reset", "reset after the message", "going away", "no padding length",
        "more padding than payload", "compressed", "two messages", "too short", "another stream",
        "headers in parts", "too large a frame", "HTTP/1.1",
    ],
)  # fmt: skip
def test_what_is_no_plain_success_is_left_to_the_library(said: bytes) -> None:
    assert call(said) is None


FRAMES = st.builds(
    frame,
    st.sampled_from([DATA, DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION, 200]),
    st.sampled_from([0, 0, END_STREAM, END_HEADERS, PADDED, PADDED | END_STREAM, 255]),
    st.sampled_from([0, 1, 1, 3, 0x80000001]),
    st.binary(max_size=12) | st.just(MESSAGE),
)


@given(said=st.binary(max_size=64) | st.lists(FRAMES, max_size=8).map(b"".join))
def test_nonsense_never_raises_and_gives_nothing_that_was_not_sent(said: bytes) -> None:
    found = call(said)
    assert found is None or len(found) <= len(said) - 5
    assert quick(said) is None or found is not None


@given(answer=st.binary(max_size=60))
def test_a_message_of_any_bytes_is_a_status_or_none(answer: bytes) -> None:
    with saying(success(answer)) as host:
        version = quick_version(host, "/any", PLENTY)
    found = quick(success(answer))
    with suppress(DecodeError):  # what is broken where nobody looks only the library notices
        assert version in ("", pb.VersionResponse.FromString(answer).runtime_version)
    with suppress(DecodeError):
        theirs = pb.StatusResponse.FromString(answer)
        if found is None:
            return
        assert dict(theirs.info).get("config", "") == found[0]
        assert tuple(one.name for one in theirs.runtime_handlers) == found[1]


STATUSES = st.builds(
    lambda config, names, conditions: (config, names, conditions),
    st.text(max_size=300),
    st.lists(st.text(max_size=8), max_size=4),
    st.dictionaries(st.text(max_size=8), st.booleans(), max_size=4),
)


@given(said=STATUSES)
def test_every_status_is_read_as_written(said: tuple[str, list[str], dict[str, bool]]) -> None:
    config, names, conditions = said
    answer = pb.StatusResponse(info={"config": config, "golang": "go1.22"})
    for name in names:
        answer.runtime_handlers.add(name=name)
    for kind, holds in conditions.items():
        answer.status.conditions.add(type=kind, status=holds, message="why")
    assert quick(success(answer.SerializeToString())) == (config, tuple(names), conditions)


def test_an_answer_that_drips_is_given_up_in_time(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                for byte in frame(DATA, 0, 1, b"x" * 60_000):
                    connection.sendall(bytes([byte]))
                    if over.wait(0.02):
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        started = Host().monotonic()
        found = unary_call(Host(), path, "/a.B/C", b"", 0.3)
        took = Host().monotonic() - started
        over.set()
        thread.join(10)
    assert found is None
    assert 0.3 <= took < 30.0  # to its end the answer would take twenty minutes


@given(data=st.binary(max_size=40))
def test_any_bytes_are_fields_or_refused(data: bytes) -> None:
    try:
        found = list(fields(data))
    except ValueError:
        return
    assert all(number >= 0 for number, _ in found)
