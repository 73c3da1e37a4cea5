"""The small gRPC client against the real library's server, and against servers that break off or babble."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.daemons.cri import Cri
from gpunode.daemons.cri_status import quick_status, quick_version
from gpunode.daemons.grpc_unary import fields, unary_call
from gpunode.daemons.proto import cri_pb2 as pb
from gpunode.errors import DaemonError
from gpunode.host import Host

Serve = Callable[[Callable[[object, grpc.ServicerContext], object]], str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a server whose Status and Version both give what the function gives."""
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
    quick = quick_status(Host(), path, 5.0)
    assert quick is not None
    config, handlers, conditions = quick
    assert json.loads(config)["containerd"]["defaultRuntimeName"] == "nvidia"
    assert handlers == ("kata",) and conditions == {"RuntimeReady": True, "NetworkReady": False}


def test_the_version_is_the_running_daemons(serve: Serve) -> None:
    answer = pb.VersionResponse(version="0.1.0", runtime_name="containerd", runtime_version="v2.1.9")
    assert quick_version(Host(), serve(lambda request, context: answer), 5.0) == "v2.1.9"


def test_an_error_is_left_to_the_library(serve: Serve) -> None:
    def refuse(request: object, context: grpc.ServicerContext) -> object:
        return context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown service runtime.v1.RuntimeService")

    path = serve(refuse)
    assert quick_status(Host(), path, 5.0) is None
    with Cri(Host(), path) as cri, pytest.raises(DaemonError) as caught:
        cri.status()
    assert caught.value.code == "cri-disabled"


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        started = Host().monotonic()
        assert unary_call(Host(), str(tmp_path / "s"), "/a.B/C", b"", 0.2) is None
        assert Host().monotonic() - started < 3.0
    assert unary_call(Host(), str(tmp_path / "none"), "/a.B/C", b"", 0.2) is None


@given(said=st.binary(max_size=64))
def test_nonsense_is_no_answer(said: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("s") / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def talk() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(said)

        thread = threading.Thread(target=talk)
        thread.start()
        assert quick_status(Host(), path, 0.5) is None
        thread.join()


@given(data=st.binary(max_size=40))
def test_any_bytes_are_fields_or_refused(data: bytes) -> None:
    try:
        found = list(fields(data))
    except ValueError:
        return
    assert all(number >= 0 for number, _ in found)
