"""The plugin and the kubelet stub, over real gRPC and real sockets in a recorded node's root.

Debian has no kubelet package; tests/plugin/kubelet_stub.py lists what the stub implements of the real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from gpunode.daemons.grpc_client import channel_to
from gpunode.errors import PreconditionError
from gpunode.host import Host
from gpunode.plugin.compose import make_service
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.kubelet.registration import KubeletLink
from gpunode.plugin.kubelet.server import LinkContext
from gpunode.plugin.serve import PluginService
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import DIRECTORY, RESOURCE, MemoryLog, eventually, feed, recorded_host, uuid


@pytest.fixture(autouse=True)
def only_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn without an event, so that a kubelet's restart is noticed when it happens or not at all."""
    monkeypatch.setattr("gpunode.plugin.serve._CALM_SECONDS", 3600.0)


@pytest.fixture
def compared(only_news: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deleted or replaced socket is no event: each turn compares the sockets."""
    monkeypatch.setattr("gpunode.plugin.serve._CALM_SECONDS", 0.5)


@contextmanager
def running(host: Host, stream_wait: float = 0.5) -> Iterator[tuple[PluginService, MemoryLog]]:
    log = MemoryLog()
    service = make_service(host, Settings(stream_wait_seconds=stream_wait), log)
    service.start()
    try:
        yield service, log
    finally:
        service.stop()
        service.join()


@pytest.fixture
def host(short: Path) -> Host:
    return recorded_host(short)


@pytest.fixture
def kubelet(host: Host) -> Iterator[KubeletStub]:
    with KubeletStub(host) as stub:
        yield stub


def test_eight_gpus_become_allocatable_with_their_numa_nodes(host: Host, kubelet: KubeletStub) -> None:
    with running(host) as (service, _):
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
        assert eventually(lambda: service.registrations == 1)
        assert (kubelet.registrations[0].resource, kubelet.registrations[0].endpoint) == (
            RESOURCE,
            "nvidia-gpu.sock",
        )
        assert kubelet.numa_nodes(RESOURCE) == {uuid(index): index // 4 for index in range(8)}


def test_pods_get_gpus_of_one_node_and_no_gpu_twice(host: Host, kubelet: KubeletStub) -> None:
    with running(host):
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
        first, second = kubelet.allocate(RESOURCE, 3), kubelet.allocate(RESOURCE, 4)
    assert first.ids == (uuid(0), uuid(1), uuid(2))
    assert second.ids == tuple(uuid(index) for index in (4, 5, 6, 7))
    assert second.envs == {"NVIDIA_VISIBLE_DEVICES": ",".join(second.ids)}


def test_stopped_plugin_leaves_capacity_and_nothing_to_allocate(host: Host, kubelet: KubeletStub) -> None:
    with running(host):
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
    assert kubelet.wait_allocatable(RESOURCE, 0, 30)
    assert kubelet.capacity(RESOURCE) == 8
    # the streams end first, and the service's end is waited for only briefly
    assert eventually(lambda: not host.exists(f"{DIRECTORY}/nvidia-gpu.sock"))


def test_restarted_kubelet_gets_the_gpus_again(host: Host, kubelet: KubeletStub) -> None:
    with running(host, stream_wait=5.0) as (_, log):  # a slow machine is no reason to register again
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
        for _ in range(3):
            kubelet.restart()
            assert kubelet.wait_allocatable(RESOURCE, 8, 30)
        assert "registering again" not in log.messages()


def test_restarted_kubelet_with_the_same_inode_number_gets_the_gpus_again(
    host: Host, kubelet: KubeletStub
) -> None:
    with running(host):
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
        for _ in range(8):
            kubelet.stop()
            prepare_inode(host.path(DIRECTORY), kubelet.inodes[-1])
            kubelet.start()
            assert kubelet.wait_allocatable(RESOURCE, 8, 30)
            if kubelet.inodes[-1] == kubelet.inodes[-2]:
                return  # otherwise this file system repeats none; the next test has one that always does


def test_restarted_kubelet_gets_the_gpus_again_if_every_inode_number_repeats(short: Path) -> None:
    host = recorded_host(short, kind=OneInode)
    with KubeletStub(host) as stub:
        with running(host) as (service, _):
            for restarts in range(1, 4):
                assert stub.wait_allocatable(RESOURCE, 8, 30)
                assert eventually(lambda count=restarts: service.registrations >= count)  # type: ignore[misc]
                stub.restart()
            assert stub.wait_allocatable(RESOURCE, 8, 30)
            assert set(stub.inodes) == {1}


def prepare_inode(directory: Path, wanted: int) -> None:
    """Use up the numbers that ext4 assigns before `wanted`: the lowest free one of a group is first."""
    for _ in range(1000):
        taken = directory / f"taken-{uuid4()}"
        taken.touch()
        if taken.stat().st_ino == wanted:
            taken.unlink()
            return


class OneInode(Host):
    """A file system that assigns the same inode number to every socket; only the change time differs."""

    def stat(self, path: str) -> os.stat_result | None:
        found = super().stat(path)
        if found is None or not path.endswith("kubelet.sock"):
            return found
        same: Any = SimpleNamespace(st_mode=found.st_mode, st_dev=1, st_ino=1, st_ctime_ns=found.st_ctime_ns)
        return cast("os.stat_result", same)


def test_equal_inode_number_does_not_hide_a_new_kubelet(short: Path, compared: None) -> None:
    host = recorded_host(short, kind=OneInode)
    with KubeletStub(host) as stub:
        with running(host) as (service, _):
            assert stub.wait_allocatable(RESOURCE, 8, 30)
            assert eventually(lambda: service.registrations == 1)
            moved = host.path(f"{DIRECTORY}/nvidia-gpu.sock")
            os.utime(host.path(stub.socket))  # a new change time is the only sign of a new kubelet
            assert eventually(lambda: service.registrations == 2)
            assert moved.is_socket()


def test_deleted_own_socket_is_recreated(host: Host, kubelet: KubeletStub, compared: None) -> None:
    with running(host) as (service, log):
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
        assert eventually(lambda: service.registrations == 1)
        host.remove(f"{DIRECTORY}/nvidia-gpu.sock")
        assert eventually(lambda: service.registrations == 2)
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
        assert "the plugin's socket was deleted: serving again" in log.messages()


def test_removed_directory_is_waited_for(host: Host, kubelet: KubeletStub) -> None:
    with running(host) as (_, log):
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
        kubelet.stop()
        # renamed first: the plugin may create its socket again while the files are removed one by one
        shutil.rmtree(host.path(DIRECTORY).rename(host.path("/removed")))
        assert eventually(lambda: f"waiting for the kubelet: {DIRECTORY} is not there" in log.messages())
        kubelet.start()
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)


def test_kubelet_started_later_is_waited_for(host: Host) -> None:
    with running(host) as (_, log):
        assert eventually(lambda: any("waiting for the kubelet" in line for line in log.messages()))
        with KubeletStub(host) as stub:
            assert stub.wait_allocatable(RESOURCE, 8, 30)


def test_registration_without_a_stream_is_repeated(host: Host, kubelet: KubeletStub) -> None:
    kubelet.watch = False
    with running(host) as (_, log):
        assert eventually(lambda: len(kubelet.registrations) >= 2)
        kubelet.watch = True
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
    assert "the kubelet opened no ListAndWatch stream within 0.5 s" in log.reasons()


def test_registration_lost_with_an_older_stream_is_repeated(host: Host, kubelet: KubeletStub) -> None:
    with running(host) as (_, log):
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
        assert eventually(lambda: "the kubelet watches" in log.messages())
        kubelet.tear_down(RESOURCE)
        assert eventually(lambda: len(kubelet.registrations) == 2)
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
    assert "the kubelet ended its ListAndWatch stream" in log.reasons()


def test_refused_registration_is_logged_with_its_reason_and_retried(host: Host, kubelet: KubeletStub) -> None:
    kubelet.refuse = "the resource is taken"
    with running(host) as (service, log):
        assert eventually(lambda: any("the resource is taken" in line for line in log.messages()))
        assert service.running
        kubelet.refuse = ""
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)


def test_second_plugin_on_the_node_is_refused(host: Host, kubelet: KubeletStub) -> None:
    with running(host):
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
        with pytest.raises(PreconditionError, match="another device plugin is serving"):
            second = make_service(host, Settings(), MemoryLog())
            ended = Event()
            second.at_end = ended.set
            second.start()
            assert ended.wait(30)
            second.join()
        assert kubelet.allocatable(RESOURCE) == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_inaccessible_directory_is_named(short: Path) -> None:
    """In a child, since a process that has dropped root can't regain it."""
    (short / "private/dp").mkdir(parents=True)
    (short / "private").chmod(0o700)
    script = (
        "import os, sys; from gpunode.plugin.compose import make_service\n"
        "from gpunode.plugin.config.settings import Settings\nfrom gpunode.plugin.logfmt import open_log\n"
        "from gpunode.host import Host; from gpunode.errors import PreconditionError\n"
        "settings = Settings(kubelet_socket=sys.argv[1], state_dir=sys.argv[1] + '.state')\n"
        "service = make_service(Host(), settings, open_log(sys.stderr, {}))\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "try: service.start()\n"
        "except PreconditionError as error: print(error.message, error.hint)\n"
    )
    socket = str(short / "private/dp/kubelet.sock")
    short.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", script, socket], capture_output=True, text=True, timeout=30, check=False
    )
    assert str(short / "private/dp") in done.stdout, done.stderr
    assert done.stderr == ""


def test_kubelet_that_never_watches_does_not_fill_the_log(host: Host, kubelet: KubeletStub) -> None:
    kubelet.watch = False
    log = MemoryLog()
    unused: Any = None  # no client sends a request
    settings = Settings(stream_wait_seconds=0.0)
    context = LinkContext(host, settings, unused, unused, log, [], lambda: None)
    link = KubeletLink(context, RESOURCE, feed(8))
    link.claim()
    try:
        assert eventually(lambda: _tick(link) >= 12, 60)
    finally:
        link.close()
    assert len(log.messages("warning")) == 7
    assert log.messages("warning")[-1] == "registering repeatedly; further attempts are not logged"


def _tick(link: KubeletLink) -> int:
    link._next_try = 0.0  # the waiting in between is not measured
    link.tick()
    return link.registrations


def test_stop_is_quick_while_the_kubelet_is_stopped(host: Host) -> None:
    with running(host) as (service, _):
        started = time.monotonic()
        service.stop()
        service.join()
        assert time.monotonic() - started < 10


def test_the_end_waits_for_the_sockets_longer_than_for_the_driver(
    host: Host, kubelet: KubeletStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpunode.plugin.serve._STOP_SECONDS", 0.0)
    close = KubeletLink.close

    def close_late(link: KubeletLink) -> None:
        time.sleep(0.5)
        close(link)

    monkeypatch.setattr(KubeletLink, "close", close_late)
    with running(host):
        assert kubelet.wait_allocatable(RESOURCE, 8, 30)
    assert [path.name for path in host.path(DIRECTORY).glob("*.sock")] == ["kubelet.sock"]


def test_bug_in_a_thread_ends_the_whole_plugin(host: Host) -> None:
    service = make_service(host, Settings(), MemoryLog())

    def broken(sink: object, stop: object) -> None:
        raise RuntimeError("a bug")

    service.backend.run = broken  # type: ignore[method-assign]
    service.start()
    assert eventually(lambda: not service.running)
    with pytest.raises(RuntimeError, match="a bug"):
        service.join()


def test_stub_checks_version_and_name_as_the_kubelet_does(kubelet: KubeletStub, host: Host) -> None:
    import grpc

    from gpunode.plugin.kubelet import server
    from gpunode.plugin.proto import deviceplugin_pb2 as pb

    with channel_to(host.path(kubelet.socket)) as channel:
        register = server.method(channel, server.REGISTRATION, "Register")
        for version, name, words in (("v1alpha", RESOURCE, "v1alpha"), ("v1beta1", "gpu", "DOMAIN/NAME")):
            with pytest.raises(grpc.RpcError, match=words):
                register(pb.RegisterRequest(version=version, resource_name=name, endpoint="x"), timeout=30)
    assert kubelet.registrations == []
