"""A hostile API server, and hostile kubeconfigs, or ones with a secret next to an error."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from traceback import format_exception
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.commands.verify_kubernetes import sweep
from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.kubernetes import changes, client
from gpunode.kubernetes.access import Access, find
from gpunode.kubernetes.api import ClusterError, Unreachable, is_object
from gpunode.kubernetes.changes import patiently
from gpunode.kubernetes.client import Cluster
from gpunode.kubernetes.kubeconfig import to_server
from gpunode.plugin.config.settings import LabelSettings
from gpunode.plugin.labels.sinks import NodeFeature, _Plan
from tests.silent import SilentProgress
from tests.waiting import PATIENCE

SECRET = "s3cr3t-t0ken"
Answer = Callable[[socket.socket, bytes], None]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """Its URL; `answer` gets the connection and the head of each request, and returns to close it."""
    stopped = False

    def serve() -> None:
        while not stopped:
            connection, _ = listening.accept()
            with connection:
                try:
                    while not stopped and (head := connection.recv(65536)):
                        answer(connection, head)
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        thread = Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{address[1]}"
        finally:
            stopped = True
            socket.create_connection(address).close()
            thread.join(PATIENCE)


def failing_call(answer: Answer, ask: Callable[[Any], Any], seconds: float = PATIENCE) -> ClusterError:
    with server(answer) as url:
        cluster = Cluster(Host(), to_server(url, "a test"), seconds)
        try:
            with pytest.raises(ClusterError) as caught:
                ask(cluster)
        finally:
            cluster.close()
    return caught.value


def the_node(cluster: Any) -> Any:
    return cluster.get("Node", "n")


def plain(body: bytes, more: bytes = b"", start: bytes = HEAD) -> Answer:
    whole = start + more + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    return lambda connection, _: connection.sendall(whole)


def dripping(start: bytes, drop: bytes) -> Answer:
    def answer(connection: socket.socket, _: bytes) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(drop)
            time.sleep(0.05)  # a hundred headers take longer than any caller here waits

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        dripping(HEAD + b"Content-Length: 99999\r\n\r\n", b" "),
        dripping(HEAD, b"X: y\r\n"),
        dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["body", "head", "continue"],
)
def test_dripping_response_times_out(answer: Answer) -> None:
    assert "no answer in time" in failing_call(answer, the_node, 0.1).message


class ClockHost(Host):
    """A host with a clock set by the test."""

    seconds = 0.0

    def monotonic(self) -> float:
        return ClockHost.seconds

    def sleep(self, seconds: float) -> None:
        ClockHost.seconds += seconds


@pytest.mark.parametrize(("each", "attempts"), [(0.1, 5), (9.0, 4), (30.0, 1)])
def test_retries_of_a_slow_server_end_after_half_a_minute(each: float, attempts: int) -> None:
    host, asked_at = ClockHost(), []

    def ask() -> None:
        asked_at.append(host.monotonic())
        host.sleep(each)
        raise Unreachable("no answer in time")

    ClockHost.seconds = 1000.0
    with pytest.raises(Unreachable):
        patiently(host, SilentProgress(), ask)
    assert len(asked_at) == attempts
    assert asked_at[-1] - 1000.0 <= 30.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (plain(b'{"metadata":' + b"[" * 100_000), "not a response of an API server"),
        (plain(b"[" * 100_000, start=HEAD.replace(b"200", b"404")), "not a response of an API server"),
        (plain(b"x" * 200_000), "larger than"),
        (
            plain(gzip.compress(b'"' + b" " * 9_000_000), b"Content-Encoding: gzip\r\n"),
            "no compression was requested",
        ),
        (plain(b"", b"Location: http://127.0.0.1:1/\r\n", HEAD.replace(b"200", b"302")), "not a response of"),
    ],
    ids=["deep", "deep error", "huge", "packed", "elsewhere"],
)
def test_response_size_and_redirects_are_limited(
    monkeypatch: pytest.MonkeyPatch, answer: Answer, message: str
) -> None:
    monkeypatch.setattr(client, "MAX_BYTES", 100 << 10 if message == "larger than" else client.MAX_BYTES)
    assert message in failing_call(answer, the_node).message


def test_endless_list_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BYTES", 10_000)
    page = {"kind": "PodList", "apiVersion": "v1", "metadata": {"continue": "more"}, "items": []}
    found = failing_call(plain(json.dumps(page).encode()), lambda cluster: cluster.list("Pod", "n"))
    assert "larger than" in found.message


# --- kubeconfigs ----------------------------------------------------------------------------------------

PARTS = """apiVersion: v1
current-context: c
contexts: [{{name: c, context: {{cluster: k, user: u}}}}]
clusters: [{{name: k, cluster: {{server: {server}}}}}]
users: [{{name: u, user: {user}}}]
"""
LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + one)}: &{chr(98 + one)} [{','.join([f'*{chr(97 + one)}'] * 9)}]\n" for one in range(9)
)
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + one)}: &{chr(98 + one)} {{<<: [{','.join([f'*{chr(97 + one)}'] * 9)}]}}\n" for one in range(9)
)


def written(server: str = "http://127.0.0.1:9", user: str = "{}") -> str:
    return PARTS.format(server=server, user=user)


def refusal(tmp_path: Path, text: str, trace: Any = None) -> str:
    """Everything that --debug would print of the refusal."""
    (tmp_path / "k").write_bytes(text.encode("utf-8", "surrogatepass"))
    host = Host(Path("/"), {"PATH": "/usr/bin:/bin"}, trace)
    with pytest.raises(GpunodeError) as caught:
        connection = find(host, Access(kubeconfig=str(tmp_path / "k")))
        Cluster(Host(), connection, 1.0).get("Node", "n")
    assert caught.value.code == "kubernetes-no-access"
    return "".join((*format_exception(caught.value), caught.value.message, caught.value.hint))


@pytest.mark.parametrize(
    "text",
    [
        f"users:\n- user:\n    token: {SECRET}: x\n",
        f"users:\n- user:\n    token: !{SECRET} x\n",
        f"users:\n- user:\n    token: *{SECRET}\n",
        f"users:\n- user:\n    token: !!int {SECRET}\n",
        f"users:\n- user:\n    token: '{SECRET}\n",
        f"users:\n- user:\n    token: {SECRET}\x01\n",
        f"users: [{{name: u, user: {{token: {SECRET}}}, ]",
        written(user=f'{{token: "{SECRET}\\n{SECRET}"}}'),
        written(user=f'{{token: "{SECRET}\\u00e9"}}'),
        written(user=f"{{token: [{SECRET}]}}"),
        written(server=f"http://me:{SECRET}@127.0.0.1:9"),
        written(server=f"http://me:{SECRET}@127.0.0.1:9999999/"),
        written(server=f"'https://127.0.0.1:9', proxy-url: 'socks9://me:{SECRET}@h:1'"),
    ],
)
def test_no_secret_of_a_kubeconfig_is_printed(tmp_path: Path, text: str) -> None:
    assert SECRET not in refusal(tmp_path, text)


def test_arguments_and_token_of_a_credential_program_are_not_printed(tmp_path: Path) -> None:
    program = tmp_path / "p"
    program.write_text(f'#!/bin/sh\necho \'{{"status": {{"token": ["{SECRET}"]}}}}\'\n')
    program.chmod(0o755)
    spec = f"{{apiVersion: client.authentication.k8s.io/v1, command: ./p, args: [--key={SECRET}]}}"
    notes: list[str] = []
    assert SECRET not in refusal(tmp_path, written(user=f"{{exec: {spec}}}"), notes.append)
    assert notes == [f"{program} ..."]


@pytest.mark.parametrize(
    "part",
    ['command: "a\\0b"', 'command: x, env: [{name: "a=b", value: ""}]', 'command: x, args: ["\\0"]'],
)
def test_invalid_credential_program_entry_is_refused(tmp_path: Path, part: str) -> None:
    spec = f"{{apiVersion: client.authentication.k8s.io/v1, {part}}}"
    assert "exec must have" in refusal(tmp_path, written(user=f"{{exec: {spec}}}"))


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS + written(server="*i"),
        LAUGHS + written(user="{as: me, as-groups: *i}"),
        MERGED + written(),
        "a: &a [*a]\n" + written(server="*a"),
        "[" * 100_000,
        "a: [" + "1," * 300_000,
        "- " * 100_000,
    ],
    ids=["laughs", "groups", "merged", "itself", "deep", "many", "dashes"],
)
def test_small_kubeconfig_cannot_expand_into_a_large_one(tmp_path: Path, text: str) -> None:
    before = time.process_time()
    assert len(refusal(tmp_path, text)) < 20_000
    assert time.process_time() - before < 20


def test_impersonation_adds_no_other_header(tmp_path: Path) -> None:
    assert "line break" in refusal(tmp_path, written(user='{as: "me\\r\\nImpersonate-Group: admins"}'))


yaml_words = st.sampled_from(
    [
        *"{}[]:,&*!|>-?#'\"%@\n\t \x00\x85",
        *(
            "<<: ",
            "*a",
            "&a ",
            "\n- ",
            "\n  ",
            "null",
            "0x",
            "1e9",
            "2001-1-1",
            "\ud800",
            "!!binary ",
            "!!set ",
        ),
        *(
            "!!int ",
            "!!timestamp ",
            "!!bool ",
            "!!float ",
            "!!omap ",
            "!!pairs ",
            "exec: ",
            "command: /nowhere",
        ),
        *(
            "users",
            "name: u",
            "user: ",
            "clusters",
            "server: ",
            "contexts",
            "current-context: c",
            "as-groups: ",
        ),
        written(),
    ]
)


@given(parts=st.lists(yaml_words, max_size=25))
def test_any_kubeconfig_is_read_or_refused(
    parts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "strange"
    path.write_bytes("".join(parts).encode("utf-8", "surrogatepass"))
    try:
        find(Host(Path("/"), {}), Access(kubeconfig=str(path)))
    except GpunodeError as error:
        assert error.exit_code


# --- objects --------------------------------------------------------------------------------------------

keys = st.sampled_from(
    [
        *("labels", "annotations", "ownerReferences", "managedFields", "taints", "capacity", "nodeSelector"),
        *("f:status", "f:capacity", "fieldsV1", "activeDeadlineSeconds", "creationTimestamp", "x", "kind"),
    ]
)
nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | keys | st.just("9" * 400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
objects = st.fixed_dictionaries(
    {"metadata": st.dictionaries(keys, nonsense, max_size=5)},
    optional={"spec": st.dictionaries(keys, nonsense) | nonsense, "status": nonsense},
)


@pytest.mark.full
@given(first=objects, second=objects)
def test_any_object_is_compared_without_an_error(first: Any, second: Any) -> None:
    for one in (first, second):
        one["metadata"] |= {"name": "n"}
    if not (is_object(first) and is_object(second)):
        return
    cluster = SimpleNamespace(
        get=lambda kind, *_: first if kind == "NodeFeature" else second,
        replace=json.dumps,
        list=lambda *_, **__: [first, second],
        delete=lambda *_: None,
        namespace="d",
        node="",
    )
    server: Any = cluster
    host, settings = Host(Path("/"), {}), LabelSettings(node_name="n", pod_name="p", namespace="d")
    NodeFeature(host, lambda: server, SilentProgress(), settings, "nvidia").put({"a/b": "1"}, dry_run=False)
    sweep(host, server, "d", "n")
    _Plan(first, {"a/b": "1"}, "gpunode/nvidia-labels").patch()
    patch = [*changes.label_patch(first, {"x": "1"}), *changes.capacity_patch(first, "x", 3)]
    assert {one["op"] for one in patch} <= {"test", "add", "replace"}
    assert all(
        one["path"].startswith(("/metadata/", "/status/")) or one["path"] == "/status" for one in patch
    )
    assert isinstance(changes.writer_of(first, "x"), str)
