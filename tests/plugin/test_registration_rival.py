"""Other plugins on the node that register our resource, or bind our socket's path, and then exit."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpunode.host import Host
from gpunode.plugin.kubelet.registration import AllocatableCheck
from gpunode.plugin.simulate.kubelet import KubeletStub
from tests.plugin.fakes import FakeBackend
from tests.plugin.nodes import DIRECTORY, RESOURCE, eventually
from tests.plugin.other_plugin import other_plugin
from tests.plugin.test_registration_links import Running, running

OTHER = "theirs.sock"
BACK_SECONDS = 15.0  # two checks are needed, the first of them half a second after the kubelet's update
Node = tuple[Host, KubeletStub, Running]


@pytest.fixture
def node(short: Path) -> Iterator[Node]:
    host = Host(short, {})
    stub = KubeletStub(host)
    stub.start()
    with running(host, FakeBackend({RESOURCE: 2, "nvidia.com/other": 1})) as made:
        assert stub.wait_allocatable(RESOURCE, 2, 30)
        assert eventually(lambda: made.service.ready)
        yield host, stub, made
    stub.stop()


def ours_again(stub: KubeletStub) -> bool:
    """Whether the kubelet allocates our two devices from our endpoint."""
    endpoint = stub.endpoints.find(RESOURCE)
    return (
        endpoint is not None
        and endpoint.path.name == "nvidia-gpu.sock"
        and stub.endpoints.healthy(RESOURCE) == {f"{RESOURCE}-0", f"{RESOURCE}-1"}
    )


@pytest.mark.full
def test_killed_plugin_that_replaced_our_socket_is_replaced_again(node: Node) -> None:
    host, stub, made = node
    with other_plugin(host.path(DIRECTORY), "nvidia-gpu.sock", RESOURCE, "X-0", "X-1", "X-2"):
        assert stub.wait_allocatable(RESOURCE, 3, 30)
        assert eventually(lambda: "another device plugin has put its socket" in made.service.status)
        assert not eventually(lambda: made.service.registrations > 2, 2.5), (
            "it is running: it keeps its socket"
        )
    assert eventually(lambda: ours_again(stub), BACK_SECONDS), made.log.text()
    assert eventually(lambda: made.service.ready)
    assert made.service.status.startswith(f"2 of 2 {RESOURCE} healthy, registered with the kubelet")


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.1, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside an unrelated plugin"])
def test_resource_is_reclaimed_from_a_plugin_that_exits(node: Node, seconds: float, beside: bool) -> None:
    host, stub, made = node
    with socket.socket(socket.AF_UNIX) as unrelated:
        if beside:
            unrelated.bind(str(host.path(f"{DIRECTORY}/rdma.sock")))
            unrelated.listen(8)
        with other_plugin(host.path(DIRECTORY), OTHER, RESOURCE, "X-0", "X-1", "X-2"):
            time.sleep(seconds)
        assert eventually(lambda: ours_again(stub), BACK_SECONDS), made.log.text()
        assert eventually(lambda: made.service.ready)
        assert "registering again" in made.log.messages("warning")


def test_running_plugin_that_registers_our_resource_is_reported_and_replaced(node: Node) -> None:
    host, stub, made = node
    with other_plugin(host.path(DIRECTORY), OTHER, RESOURCE, "X-0", "X-1", "X-2"):
        assert eventually(lambda: ours_again(stub), BACK_SECONDS), made.log.text()
        reason = "the kubelet allocates another plugin's devices: X-0, X-1, X-2"
        assert made.log.reasons() == [reason]
    assert eventually(lambda: ours_again(stub), BACK_SECONDS), made.log.text()
    assert eventually(lambda: made.service.ready)


def test_devices_of_another_plugin_are_detected_at_the_first_check(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a second check a list of ours may have replaced them, while the other plugin's endpoint is still the
    one that the kubelet allocates from."""
    monkeypatch.setattr(AllocatableCheck, "again", 3600.0)
    host, stub, made = node
    with other_plugin(host.path(DIRECTORY), OTHER, RESOURCE, "X-0"):
        assert eventually(lambda: ours_again(stub)), made.log.text()


def test_changed_ids_are_no_loss_while_the_kubelet_lists_the_old_ones(node: Node) -> None:
    host, _, made = node
    feed = made.service.ledger.feeds[RESOURCE]
    check = AllocatableCheck(host, made.service.settings, RESOURCE, feed, lambda: None)
    check.look(0.0)
    made.backend.shares = 2
    made.backend.look()
    check._trusted = True
    check._evaluate(1.0, frozenset({f"{RESOURCE}-0", f"{RESOURCE}-1"}))
    assert not check.lost
    check._evaluate(2.0, frozenset({"X-0"}))
    assert check.lost


def test_without_pod_resources_the_checkpoint_is_compared(node: Node) -> None:
    host, stub, made = node
    host.remove(stub.pod_resources_socket)
    with other_plugin(host.path(DIRECTORY), OTHER, RESOURCE, "X-0"):
        assert stub.wait_allocatable(RESOURCE, 1, 30)
    assert eventually(lambda: ours_again(stub), BACK_SECONDS), made.log.text()


@pytest.mark.full
def test_old_or_damaged_checkpoint_is_ignored(node: Node) -> None:
    host, stub, made = node
    path = host.path(f"{DIRECTORY}/kubelet_internal_checkpoint")
    foreign = f'{{"Data": {{"RegisteredDevices": {{"{RESOURCE}": ["X-0"]}}}}}}'
    for text in (foreign, "{", "[]", '{"Data": null}', '{"Data": {"RegisteredDevices": 3}}'):
        path.write_text(text)
        assert not eventually(lambda: bool(made.log.messages("warning")), 1.0), text
    assert made.service.ready
    assert len(stub.registrations) == 2


@pytest.mark.full
def test_pod_resources_of_another_kubelet_are_ignored(short: Path) -> None:
    host = Host(short, {})
    ours, theirs = KubeletStub(host), KubeletStub(host, "/other/kubelet/device-plugins")
    ours.start()
    theirs.start()
    settings = {"pod_resources_socket": theirs.pod_resources_socket}
    with running(host, FakeBackend({RESOURCE: 2}), **settings) as made:
        assert ours.wait_allocatable(RESOURCE, 2, 30)
        assert not eventually(lambda: "registering again" in made.log.messages(), 3.0)
        assert made.service.ready
    ours.stop()
    theirs.stop()


@pytest.mark.full
def test_all_devices_unhealthy_is_not_a_loss(node: Node) -> None:
    _, stub, made = node
    assert made.backend.sink is not None
    made.backend.show(gpu=0, other=1)
    assert stub.wait_allocatable(RESOURCE, 0, 30)
    assert not eventually(lambda: "registering again" in made.log.messages(), 3.0)
