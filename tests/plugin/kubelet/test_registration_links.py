"""Several resources at once, and registration through the plugin watcher, with the kubelet stub."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

from gpunode.daemons.grpc_client import channel_to
from gpunode.daemons.proto import podresources_pb2 as pods
from gpunode.errors import PreconditionError
from gpunode.gpu.nvml import GpuEvent
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.kubelet import server
from gpunode.plugin.kubelet.watcher import PLUGIN_REGISTRATION
from gpunode.plugin.proto import pluginregistration_pb2 as question
from gpunode.plugin.serve import PluginService
from tests.plugin.fakes import FakeBackend, FakeChecker
from tests.plugin.kubelet_stub import POD_RESOURCES, AdmissionError, KubeletStub, Times
from tests.plugin.nodes import DIRECTORY, MemoryLog, eventually
from tests.waiting import PATIENCE

GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
REGISTRY = "/var/lib/kubelet/plugins_registry"
LEFT = "nvidia-gpu@0123abcd.sock"


@pytest.fixture(autouse=True)
def only_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn without an event, so that an event is noticed at once or not at all."""
    monkeypatch.setattr("gpunode.plugin.serve._CALM_SECONDS", 3600.0)


class Running:
    def __init__(self, host: Host, backend: FakeBackend, **settings: Any) -> None:
        self.backend, self.log = backend, MemoryLog()
        self.service = PluginService(host, Settings(**settings), self.log, backend, FakeChecker())


@contextmanager
def running(host: Host, backend: FakeBackend, **settings: Any) -> Iterator[Running]:
    made = Running(host, backend, **settings)
    made.service.start()
    try:
        yield made
    finally:
        made.service.stop()
        made.service.join()


@pytest.fixture
def host(short: Path) -> Host:
    return Host(short, {})


@pytest.fixture
def kubelet(host: Host) -> Iterator[KubeletStub]:
    with KubeletStub(host) as stub:
        yield stub


def registry_socket(host: Host) -> str:
    """The path of the one socket in plugins_registry."""
    (path,) = host.glob(REGISTRY, "nvidia-gpu@*.sock")
    return path


both = pytest.mark.parametrize("registration", ["kubelet", "watcher"])


@both
def test_each_resource_is_registered_and_counted(host: Host, kubelet: KubeletStub, registration: str) -> None:
    with running(host, FakeBackend({GPU: 2, MIG: 7}), registration=registration) as made:
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert kubelet.wait_allocatable(MIG, 7, 30)
        assert eventually(lambda: made.service.ready)
        assert {one.resource for one in kubelet.registrations} == {GPU, MIG}
        expected = (
            f"2 of 2 {GPU} healthy, registered with the kubelet; "
            f"7 of 7 {MIG} healthy, registered with the kubelet"
        )
        assert eventually(lambda: made.service.status == expected), made.service.status
    assert kubelet.wait_allocatable(GPU, 0, 30)
    assert kubelet.wait_allocatable(MIG, 0, 30)
    # the streams end first, and the service's end is waited for only briefly
    assert eventually(lambda: host.glob(DIRECTORY, "nvidia*") == host.glob(REGISTRY, "*") == ())


def test_resource_appearing_later_gets_a_socket_and_a_disappearing_one_keeps_its_own(
    host: Host, kubelet: KubeletStub
) -> None:
    with running(host, FakeBackend({GPU: 2, MIG: 0})) as made:
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert set(made.service.links) == {GPU}, "nothing is registered before it has devices"
        made.backend.show(**{"gpu": 1, "mig-1g.10gb": 7})
        assert kubelet.wait_allocatable(MIG, 7, 30)
        assert kubelet.wait_allocatable(GPU, 1, 30)
        made.backend.show(**{"mig-1g.10gb": 7})
        assert kubelet.wait_allocatable(GPU, 0, 30)
        assert kubelet.capacity(GPU) == 0
        assert kubelet.wait_allocatable(MIG, 7, 30)
        assert kubelet.endpoints.find(GPU) is not None, "its stream continues"
        made.backend.show(gpu=3)
        assert kubelet.wait_allocatable(GPU, 3, 30)
        assert len(kubelet.registrations) == 2


@both
def test_foreign_socket_is_an_error_at_the_start(host: Host, kubelet: KubeletStub, registration: str) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        directory = REGISTRY if registration == "watcher" else DIRECTORY
        name = "nvidia-mig-1g.10gb@0123abcd.sock" if registration == "watcher" else "nvidia-mig-1g.10gb.sock"
        other.bind(str(host.path(f"{directory}/{name}")))
        other.listen(8)
        made = Running(host, FakeBackend({GPU: 1, MIG: 1}), registration=registration)
        ended = Event()
        made.service.at_end = ended.set
        made.service.start()
        assert ended.wait(30)
        with pytest.raises(PreconditionError, match="another device plugin is serving"):
            made.service.join()
        assert host.exists(f"{directory}/{name}")


def test_foreign_socket_is_waited_for_later(host: Host, kubelet: KubeletStub) -> None:
    path = host.path(f"{DIRECTORY}/nvidia-mig-1g.10gb.sock")
    with running(host, FakeBackend({GPU: 1})) as made:
        assert kubelet.wait_allocatable(GPU, 1, 30)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen(8)
            made.backend.show(**{"gpu": 1, "mig-1g.10gb": 2})
            assert eventually(lambda: any("another device plugin" in line for line in made.log.messages()))
            assert "another device plugin" in made.service.status
            assert made.service.running
            assert kubelet.wait_allocatable(GPU, 1, 30)
        assert kubelet.wait_allocatable(MIG, 2, 30)


@both
def test_resources_that_differ_only_in_their_domain_are_all_served(
    host: Host, kubelet: KubeletStub, registration: str
) -> None:
    counts = {"nvidia.com/gpu": 1, "nvidia.org/gpu": 2, f"{'long.' * 20}example.com/{'n' * 63}": 3}
    with running(host, FakeBackend(counts), registration=registration):
        for name, count in counts.items():
            assert kubelet.wait_allocatable(name, count, 30)


@both
def test_kubelet_restarts_register_every_resource_again(
    host: Host, kubelet: KubeletStub, registration: str
) -> None:
    with running(host, FakeBackend({GPU: 2, MIG: 7}), registration=registration) as made:
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert kubelet.wait_allocatable(MIG, 7, 30)
        for _ in range(4):
            kubelet.restart()
            assert kubelet.wait_allocatable(GPU, 2, 30)
            assert kubelet.wait_allocatable(MIG, 7, 30)
        assert "registering again" not in made.log.messages()


def test_without_a_kubelet_socket_the_plugin_serves_unregistered(host: Host, kubelet: KubeletStub) -> None:
    with running(host, FakeBackend({GPU: 1}), kubelet_socket="") as made:
        assert eventually(lambda: "serving without a registration" in made.service.status)
        assert host.path(f"{DIRECTORY}/nvidia-gpu.sock").is_socket()
    assert kubelet.registrations == []


# --- the plugin watcher --------------------------------------------------------------------------------


def test_watcher_socket_serves_registration_and_plugin(host: Host, kubelet: KubeletStub) -> None:
    with running(host, FakeBackend({GPU: 2}), registration="watcher") as made:
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert kubelet.registrations[0].endpoint == str(host.path(registry_socket(host)))
        assert host.glob(DIRECTORY, "nvidia*") == ()
        assert eventually(lambda: made.service.registrations == 1)


def test_refusal_by_the_watcher_is_reported_and_ends(host: Host, kubelet: KubeletStub) -> None:
    kubelet.refuse = "the resource is taken"
    with running(host, FakeBackend({GPU: 2}), registration="watcher") as made:
        refused = (
            "the kubelet refused the registration: plugin registration failed with err: the resource is taken"
        )
        assert eventually(lambda: refused in made.log.messages())
        assert refused in made.service.status
        kubelet.refuse = ""
        assert kubelet.wait_allocatable(GPU, 2, 30), "only a new socket is another attempt"
        assert eventually(lambda: "registered with the kubelet" in made.service.status)
        assert "the kubelet has not registered us: using a new socket" in made.log.messages()


def test_get_info_on_the_socket_changes_nothing(host: Host, kubelet: KubeletStub) -> None:
    """A kubelet may query a registered plugin, too, to see whether it lives."""
    with running(host, FakeBackend({GPU: 2}), registration="watcher") as made:
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert eventually(lambda: made.service.ready)
        assert eventually(lambda: made.service.registrations == 1)  # it notifies us after it has the list
        with channel_to(host.path(registry_socket(host))) as channel:
            info = server.method(channel, PLUGIN_REGISTRATION, "GetInfo")(question.InfoRequest(), timeout=30)
        assert (info.type, info.name, list(info.supported_versions)) == ("DevicePlugin", GPU, ["v1beta1"])
        assert not eventually(lambda: not made.service.ready, 1.5)
        assert len(kubelet.registrations) == 1
        assert kubelet.allocatable(GPU) == 2


def test_deleted_watched_socket_is_recreated(host: Host, kubelet: KubeletStub) -> None:
    with running(host, FakeBackend({GPU: 2}), registration="watcher") as made:
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert eventually(lambda: made.service.registrations == 1)  # it notifies us after it has the list
        host.remove(registry_socket(host))
        assert eventually(lambda: len(kubelet.registrations) == 2)
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert eventually(lambda: made.service.registrations == 2)


def test_stream_ended_by_a_running_kubelet_brings_a_new_socket(host: Host, kubelet: KubeletStub) -> None:
    with running(host, FakeBackend({GPU: 2}), registration="watcher") as made:
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert eventually(lambda: made.service.ready)
        kubelet.tear_down(GPU)
        assert eventually(lambda: len(kubelet.registrations) == 2)
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert "the kubelet has not registered us: using a new socket" in made.log.messages()


@both
def test_stale_socket_of_the_other_registration_method_is_removed(host: Host, registration: str) -> None:
    stale = f"{DIRECTORY}/nvidia-gpu.sock" if registration == "watcher" else f"{REGISTRY}/{LEFT}"
    for directory in (DIRECTORY, REGISTRY):
        host.make_dirs(directory)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(host.path(stale)))
    with running(host, FakeBackend({GPU: 1}), registration=registration) as made:
        assert eventually(lambda: "serving" in made.log.messages())
        assert not host.exists(stale)


def left_socket(host: Host) -> None:
    """A file that a killed plugin leaves in plugins_registry."""
    host.make_dirs(REGISTRY)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(host.path(f"{REGISTRY}/{LEFT}")))


def test_delay_for_the_socket_of_a_killed_plugin_does_not_block_its_successor(host: Host) -> None:
    """The kubelet has restarted while the plugin was stopped, and has failed to connect to the old socket."""
    left_socket(host)
    times = Times(dial=0.2, first_retry=3600.0)
    with KubeletStub(host, times=times) as stub:
        assert eventually(lambda: stub.watcher.delays(LEFT))
        times.dial = times.info = PATIENCE  # the successor is connected, however busy the machine is
        with running(host, FakeBackend({GPU: 2}), registration="watcher"):
            assert stub.wait_allocatable(GPU, 2, PATIENCE)
            assert not host.exists(f"{REGISTRY}/{LEFT}")


@pytest.mark.full
def test_plugin_returning_while_the_kubelet_dials_is_registered_once(host: Host) -> None:
    left_socket(host)
    with KubeletStub(host, times=Times(reconcile=0.3)) as stub:
        assert eventually(lambda: stub.watcher.dials(LEFT))
        with running(host, FakeBackend({GPU: 2}), registration="watcher"):
            assert stub.wait_allocatable(GPU, 2, PATIENCE)
            assert not stub.wait_allocatable(GPU, 0, 3), "registered, removed and registered again"
            assert len(stub.registrations) == 1


# --- pods ----------------------------------------------------------------------------------------------


def test_container_with_two_resources_gets_both_merged(host: Host, kubelet: KubeletStub) -> None:
    with running(host, FakeBackend({GPU: 2, MIG: 7})):
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert kubelet.wait_allocatable(MIG, 7, 30)
        given = kubelet.admit("team/one", "main", {GPU: 1, MIG: 2})
        assert given.envs == {"IDS": f"{GPU}-0", GPU: "here", MIG: "here"}
        assert given.ids == (f"{GPU}-0", f"{MIG}-0", f"{MIG}-1")
        assert given.conflicts == ("IDS",)
        with pytest.raises(AdmissionError, match="1 of 2"):
            kubelet.admit("team/two", "main", {GPU: 2})


def test_restarted_container_keeps_its_device_unless_unhealthy(host: Host, kubelet: KubeletStub) -> None:
    with running(host, FakeBackend({GPU: 2})) as made:
        assert kubelet.wait_allocatable(GPU, 2, 30)
        given = kubelet.admit("team/one", "main", {GPU: 1})
        kubelet.restart()
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert kubelet.admit("team/one", "main", {GPU: 1}) == given
        made.service.ledger.event(GpuEvent("xid", given.ids[0], 79))
        assert kubelet.wait_allocatable(GPU, 1, 30)
        with pytest.raises(AdmissionError, match="no longer healthy"):
            kubelet.admit("team/one", "main", {GPU: 1})
        kubelet.remove("team/one")
        assert kubelet.admit("team/one", "main", {GPU: 1}).ids == (f"{GPU}-1",)


def test_checkpoint_and_pod_resources_list_the_holders(host: Host, kubelet: KubeletStub) -> None:
    with running(host, FakeBackend({GPU: 2})):
        assert kubelet.wait_allocatable(GPU, 2, 30)
        kubelet.admit("team/one", "main", {GPU: 1})
        document = json.loads(host.path(f"{DIRECTORY}/kubelet_internal_checkpoint").read_text())
        (entry,) = document["Data"]["PodDeviceEntries"]
        assert (entry["PodUID"], entry["ResourceName"]) == ("team/one", GPU)
        assert entry["DeviceIDs"] == {"-1": [f"{GPU}-0"]}
        assert document["Data"]["RegisteredDevices"] == {GPU: [f"{GPU}-0", f"{GPU}-1"]}
        with channel_to(host.path(kubelet.pod_resources_socket)) as channel:
            (pod,) = server.method(channel, POD_RESOURCES, "List")(
                pods.ListPodResourcesRequest()
            ).pod_resources
            assert (pod.namespace, pod.name, pod.containers[0].name) == ("team", "one", "main")
            assert [list(one.device_ids) for one in pod.containers[0].devices] == [[f"{GPU}-0"]]
            everything = server.method(channel, POD_RESOURCES, "GetAllocatableResources")
            assert len(everything(pods.AllocatableResourcesRequest()).devices) == 2
            with pytest.raises(grpc.RpcError, match="not found"):
                server.method(channel, POD_RESOURCES, "Get")(pods.GetPodResourcesRequest(pod_name="x"))


def test_failing_observer_fails_no_call(host: Host, kubelet: KubeletStub) -> None:
    def fail(call: object) -> None:
        raise ZeroDivisionError("a bug")

    made = Running(host, FakeBackend({GPU: 2}))
    made.service.observers.append(fail)
    made.service.start()
    try:
        assert kubelet.wait_allocatable(GPU, 2, 30)
        assert kubelet.allocate(GPU, 1).ids == (f"{GPU}-0",)
        assert made.log.messages("error") == ["counting a call failed"]
    finally:
        made.service.stop()
        made.service.join()
