"""Docker's API client against a scripted server on a real unix socket: real ones don't respond this badly."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.daemons.docker import DockerApi, split_streams
from gpunode.errors import DaemonError
from gpunode.host import Host
from tests.daemons.test_http import serving


@contextmanager
def answering(directory: Path, raw: bytes, *, close: bool = True) -> Iterator[tuple[DockerApi, list[bytes]]]:
    """A server that sends `raw` to its one caller, whatever it requests, and keeps the request."""
    path = str(directory / "d.sock")
    asked: list[bytes] = []
    release = threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            asked.append(whole_request(connection))
            connection.sendall(raw)
            if not close:
                release.wait(10)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        # only a server that sends nothing may reach the limit
        yield DockerApi(Host(), path, timeout=30.0 if close else 0.3), asked
    finally:
        release.set()
        thread.join(10)
        listener.close()


def whole_request(connection: socket.socket) -> bytes:
    """Head and body: closing on a sending caller breaks its pipe before it reads the response."""
    data = b""
    while more := connection.recv(65536):
        data += more
        head, end, body = data.partition(b"\r\n\r\n")
        announced = re.search(rb"content-length: (\d+)", head.lower())
        if end and len(body) >= (int(announced[1]) if announced else 0):
            break
    return data


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_info_is_the_object_that_the_daemon_sends(tmp_path):
    with answering(tmp_path, reply(b'{"Runtimes": {"nvidia": {}}}')) as (api, asked):
        assert api.info() == {"Runtimes": {"nvidia": {}}}
    assert asked[0].startswith(b"GET /info HTTP/1.1\r\n")


def test_requests_name_no_api_version(tmp_path):
    with answering(tmp_path, reply(b'{"Version": "29.0.0"}')) as (api, asked):
        api.info()
    assert b" /info " in asked[0]


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"text"', b"{", b"\xff\xfe", b"[" * 100_000])
def test_response_that_is_not_an_object_is_malformed(tmp_path, body):
    with answering(tmp_path, reply(body)) as (api, _), pytest.raises(DaemonError) as caught:
        api.info()
    assert caught.value.code == "malformed"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("status", "code"),
    [("404 Not Found", "not-found"), ("409 Conflict", "conflict"), ("500 Internal Server Error", "daemon")],
)
def test_error_status_carries_the_daemons_own_message(tmp_path, status, code):
    body = json.dumps({"message": "it went wrong"}).encode()
    with answering(tmp_path, reply(body, status)) as (api, _), pytest.raises(DaemonError) as caught:
        api.info()
    assert (caught.value.code, caught.value.message) == (code, "it went wrong")


def test_error_status_without_a_message_has_a_fallback_text(tmp_path):
    with (
        answering(tmp_path, reply(b'{"message": 7}', "500 X")) as (api, _),
        pytest.raises(DaemonError) as caught,
    ):
        api.info()
    assert "7" in caught.value.message


@pytest.mark.parametrize(
    "raw", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"]
)
def test_peer_that_is_not_docker_is_reported(tmp_path, raw):
    with answering(tmp_path, raw) as (api, _), pytest.raises(DaemonError) as caught:
        api.info()
    assert caught.value.code == "broken"


def test_daemon_that_sends_nothing_times_out(tmp_path):
    with answering(tmp_path, b"", close=False) as (api, _), pytest.raises(DaemonError) as caught:
        api.info()
    assert caught.value.code == "timeout"
    assert "journalctl" in caught.value.hint


def test_missing_socket_hints_how_to_start_docker(tmp_path):
    api = DockerApi(Host(), str(tmp_path / "none.sock"))
    with pytest.raises(DaemonError) as caught:
        api.info()
    assert caught.value.code == "absent"
    assert "systemctl start docker" in caught.value.hint


def test_socket_without_a_listener_is_refused(tmp_path):
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(DaemonError) as caught:
        DockerApi(Host(), str(path)).info()
    assert caught.value.code == "refused"


def test_failed_load_is_found_in_a_stream_of_status_200(tmp_path):
    body = b'{"stream":"Loading"}\nnot json\n{"errorDetail":{},"error":"no space left on device"}\n'
    with answering(tmp_path, reply(body)) as (api, _), pytest.raises(DaemonError, match="no space left"):
        api.load_image(b"tar")


@pytest.mark.parametrize("status", ["404 Not Found", "409 Conflict", "204 No Content", "304 Not Modified"])
def test_removing_a_missing_container_succeeds(tmp_path, status):
    with answering(tmp_path, reply(b"", status)) as (api, asked):
        api.remove_container("gpunode-x")
    assert asked[0].startswith(b"DELETE /containers/gpunode-x?force=1&v=1 ")


def test_failed_removal_is_reported(tmp_path):
    with answering(tmp_path, reply(b'{"message":"busy"}', "500 X")) as (api, _):
        with pytest.raises(DaemonError, match="busy"):
            api.remove_image("a:b")


@pytest.mark.parametrize("body", [b"{}", b'{"StatusCode": "0"}', b'{"StatusCode": null}'])
def test_exit_status_of_another_type_is_malformed(tmp_path, body):
    with answering(tmp_path, reply(body)) as (api, _), pytest.raises(DaemonError) as caught:
        api.wait_container("x", 1.0)
    assert caught.value.code == "malformed"


def recorded(tmp_path: Path, recording: dict[str, object]) -> DockerApi:
    (tmp_path / ".gpunode").mkdir()
    (tmp_path / ".gpunode/recording.json").write_text(json.dumps(recording))
    return DockerApi(Host(root=tmp_path), "/run/docker.sock")


def test_recorded_machine_responds_from_its_recording(tmp_path):
    answers = {"info": {"DefaultRuntime": "runc"}}
    api = recorded(tmp_path, {"daemons": {"/run/docker.sock": answers}})
    assert api.info()["DefaultRuntime"] == "runc"


@pytest.mark.parametrize("answers", [{}, {"version": {}}])
def test_recording_without_a_response_is_a_stopped_daemon(tmp_path, answers):
    api = recorded(
        tmp_path, {"daemons": {"/run/docker.sock": answers}, "sockets": {"/run/docker.sock": "denied"}}
    )
    with pytest.raises(DaemonError) as caught:
        api.info()
    assert caught.value.code == "denied"
    assert "group docker" in caught.value.hint


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary())))
def test_multiplexed_streams_are_split_as_joined(frames):
    raw = b"".join(frame(stream, data) for stream, data in frames)
    assert split_streams(raw) == tuple(
        b"".join(data for stream, data in frames if stream == wanted) for wanted in (1, 2)
    )


@given(st.binary())
def test_any_bytes_are_split_without_an_error(raw):
    out, err = split_streams(raw)
    assert len(out) + len(err) <= len(raw)


@pytest.mark.parametrize(
    "body", [b"", b"null", b"{}", b"[7, null]", b'[{"Id": 7}]', b'[{"Id": "a", "Labels": []}]']
)
def test_malformed_list_gives_no_names(tmp_path, body):
    with answering(tmp_path, reply(body)) as (api, _):
        assert api.labelled_containers({"a": "b"}) == {}
    (tmp_path / "d.sock").unlink()
    with answering(tmp_path, reply(body.replace(b"Labels", b"RepoTags"))) as (api, _):
        assert api.image_names("x") == ()


def test_containers_and_images_are_queried_with_filters(tmp_path):
    body = b'[{"Id": "a", "Labels": {"x": "y"}, "RepoTags": ["n:2", "n:1", 7]}, {"RepoTags": null}]'
    with answering(tmp_path, reply(body)) as (api, asked):
        assert api.labelled_containers({"x": "y"}) == {"a": {"x": "y"}}
    assert asked[0].startswith(
        b"GET /containers/json?filters=%7B%22label%22%3A%20%5B%22x%3Dy%22%5D%7D&all=1 "
    )
    (tmp_path / "d.sock").unlink()
    with answering(tmp_path, reply(body)) as (api, asked):
        assert api.image_names("n") == ("n:1", "n:2")
    assert asked[0].startswith(b"GET /images/json?filters=%7B%22reference%22%3A%20%5B%22n%22%5D%7D ")


def test_response_before_the_body_was_read_is_received(tmp_path: Path) -> None:
    def refuse(connection: socket.socket) -> None:
        connection.sendall(reply(b'{"message": "no space left on device"}', "500 Internal Server Error"))
        connection.shutdown(socket.SHUT_RD)  # a client that is still sending gets a broken pipe

    with serving(tmp_path / "d.sock", refuse) as path:
        with pytest.raises(DaemonError, match="no space left on device"):
            DockerApi(Host(), path, timeout=30.0).load_image(b"x" * (8 << 20))


def test_container_removed_while_containers_are_listed_is_skipped(tmp_path: Path) -> None:
    container = b'{"Name": "/b", "HostConfig": {"Runtime": "nvidia"}}'
    listed = b'[{"Id": "1", "State": "exited"}, {"Id": "2", "State": "running"}]'
    replies = iter((reply(listed), reply(b'{"message": "gone"}', "404 Not Found"), reply(container)))
    with serving(tmp_path / "d.sock", lambda connection: connection.sendall(next(replies))) as path:
        assert DockerApi(Host(), path, timeout=30.0).containers_of(("nvidia",), 5) == (("b", True),)
