"""The CRI client: recorded and malformed responses here, real daemons in tests/integration."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest

from gpunode.daemons import cri_pods
from gpunode.daemons.cri import Cri, parse_status
from gpunode.daemons.proto import cri_pb2 as pb
from gpunode.errors import ConfigError, DaemonError
from gpunode.host import Host

CONFIG = {
    "containerd": {
        "defaultRuntimeName": "runc",
        "runtimes": {"runc": {}, "nvidia": {"options": {"SystemdCgroup": True}}},
    },
    "sandboxImage": "registry.k8s.io/pause:3.8",
}


def test_handlers_and_default_are_read_from_the_verbose_status():
    status = parse_status(json.dumps(CONFIG), (), {"RuntimeReady": True})
    assert status.handlers == ("runc", "nvidia")
    assert status.default_handler == "runc"
    assert status.conditions == {"RuntimeReady": True}
    assert status.systemd_cgroup("nvidia")
    assert not status.systemd_cgroup("runc")
    assert not status.systemd_cgroup("absent")


def test_named_handlers_are_merged_without_the_empty_default():
    assert parse_status(json.dumps(CONFIG), ("", "nvidia", "kata"), {}).handlers == ("runc", "nvidia", "kata")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"containerd": 3}', '{"containerd": {"runtimes": []}}']
)
def test_malformed_configuration_gives_no_handlers(text):
    status = parse_status(text, (), {})
    assert (status.handlers, status.default_handler) == ((), "")


def on_recorded(tmp_path, answers):
    (tmp_path / ".gpunode").mkdir()
    recording = {"daemons": {"/run/c.sock": answers}, "sockets": {"/run/c.sock": "refused"}}
    (tmp_path / ".gpunode/recording.json").write_text(json.dumps(recording))
    return Cri(Host(root=tmp_path), "/run/c.sock")


def test_recorded_machine_responds_from_its_recording(tmp_path):
    seen = {"handlers": ["runc", "nvidia"], "defaultHandler": "nvidia", "config": {"a": 1}}
    with on_recorded(tmp_path, {"version": ["containerd", "1.7.2"], "status": seen}) as cri:
        assert cri.version() == ("containerd", "1.7.2")
        assert cri.status().handlers == ("runc", "nvidia")
        assert cri.status().default_handler == "nvidia"


@pytest.mark.parametrize("answers", [{}, {"status": {}}, {"version": ["containerd", "1"]}])
def test_recording_without_a_response_is_a_stopped_daemon(tmp_path, answers):
    with on_recorded(tmp_path, answers) as cri, pytest.raises(DaemonError) as caught:
        cri.status()
    assert caught.value.code == "refused"


@pytest.mark.parametrize("status", ["text", {"handlers": "nvidia"}, {"defaultHandler": 3}, {"config": []}])
def test_recorded_status_with_wrong_types_is_refused(tmp_path, status):
    with on_recorded(tmp_path, {"status": status}) as cri, pytest.raises(ConfigError, match="must be a"):
        cri.status()


def test_missing_socket_is_reported_before_grpc_is_used(tmp_path):
    with Cri(Host(), str(tmp_path / "none.sock")) as cri, pytest.raises(DaemonError) as caught:
        cri.version()
    assert caught.value.code == "absent"
    assert "systemctl start containerd" in caught.value.hint


def test_file_in_place_of_the_socket_is_not_a_socket(tmp_path):
    (tmp_path / "c.sock").touch()
    with Cri(Host(), str(tmp_path / "c.sock")) as cri, pytest.raises(DaemonError) as caught:
        cri.version()
    assert caught.value.code == "not-a-socket"


def test_listener_that_never_responds_times_out(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "c.sock"))
        listener.listen()
        with Cri(Host(), str(tmp_path / "c.sock"), timeout=0.3) as cri, pytest.raises(DaemonError) as caught:
            cri.version()
    assert caught.value.code in ("timeout", "refused")


def test_peer_without_http2_is_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "c.sock"))
        listener.listen()

        def serve():
            with suppress(OSError):  # until the listener is shut down
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with Cri(Host(), str(tmp_path / "c.sock"), timeout=2.0) as cri, pytest.raises(DaemonError) as caught:
            cri.version()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert caught.value.code in ("refused", "timeout")


@pytest.fixture
def server(tmp_path):
    """A gRPC server without any service, like a containerd whose CRI plugin is disabled."""
    path = str(tmp_path / "c.sock")
    running = grpc.server(ThreadPoolExecutor(2))
    running.add_insecure_port(f"unix:{path}")
    yield running, path
    running.stop(None).wait(5)


def handler(answer):
    return grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=pb.StatusRequest.FromString, response_serializer=lambda data: data
    )


def test_malformed_message_is_a_daemon_error(server):
    running, path = server
    methods = {"Status": handler(lambda request, context: b"\xff\xff\xff")}
    running.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", methods)]
    )
    running.start()
    with Cri(Host(), path) as cri, pytest.raises(DaemonError) as caught:
        cri.status()
    assert caught.value.code == "daemon"


def test_daemon_error_keeps_its_message(server):
    running, path = server

    def refuse(request, context):
        context.abort(grpc.StatusCode.UNKNOWN, 'no runtime for "nvidia" is configured')

    methods = {"Status": handler(refuse)}
    running.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", methods)]
    )
    running.start()
    with Cri(Host(), path) as cri, pytest.raises(DaemonError, match='no runtime for "nvidia" is configured'):
        cri.status()


def test_log_is_split_by_stream_and_partial_lines_are_joined():
    text = "t stdout P one \nt stderr F oops\nt stdout F two\nnonsense\nt other F x\nt stdout F \n"
    assert cri_pods.read_log(text) == ("one two\n\n", "oops\n")


def test_only_a_newline_ends_a_log_line():
    text = "t stdout F 50%\rdone\x0b\u2028 Test PASSED\n"
    assert cri_pods.read_log(text) == ("50%\rdone\x0b\u2028 Test PASSED\n", "")
