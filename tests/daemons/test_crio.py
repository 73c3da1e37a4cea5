"""CRI-O's running configuration: from the stub's own server, and from responses that no CRI-O sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.crio_stub import Daemon
from gpunode.daemons.crio import running_config
from gpunode.errors import DaemonError
from gpunode.host import Host
from tests.daemons.test_docker_api import answering, reply


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[str]:
    program = tmp_path / "crun"
    program.write_text("x")
    text = f'[crio.runtime.runtimes.crun]\nruntime_path = "{program}"\nmonitor_path = "{program}"\n'
    (tmp_path / "crio.conf").write_text(text)
    daemon = Daemon(str(tmp_path / "crio.conf"), str(tmp_path / "d"), str(tmp_path / "s"))
    thread = threading.Thread(target=daemon.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield str(tmp_path / "s")
    daemon.shutdown()
    thread.join(5)
    daemon.server_close()


def test_running_configuration_is_a_tree(socket: str) -> None:
    runtime = running_config(Host(), socket)["crio"]["runtime"]
    assert runtime["default_runtime"] == "crun" and list(runtime["runtimes"]) == ["crun"]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (reply(b"not [ toml"), "malformed"),
        (reply(b"a" * 10 + b"\xff\xfe"), "malformed"),
        (reply(b"404 page not found", "404 Not Found"), "not-found"),
        (reply(b"oops", "500 Internal Server Error"), "daemon"),
        (b"\x00\x00\x12\x04\x00", "broken"),
    ],
)
def test_malformed_response_is_an_error_with_a_code(tmp_path: Path, raw: bytes, code: str) -> None:
    with answering(tmp_path, raw) as (docker, _), pytest.raises(DaemonError) as caught:
        running_config(Host(), docker.socket, timeout=30.0)
    assert caught.value.code == code and caught.value.hint


def test_missing_socket_hints_how_to_start_the_daemon(tmp_path: Path) -> None:
    with pytest.raises(DaemonError) as caught:
        running_config(Host(), str(tmp_path / "none"))
    assert (caught.value.code, caught.value.hint) == ("absent", "start CRI-O: systemctl start crio")
