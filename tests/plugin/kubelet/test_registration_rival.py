"""Other plugins on the node that register our resource, or bind our socket's path, and then exit."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.kubelet.registration import AllocatableCheck
from gpunode.plugin.ledger import Feed
from gpunode.plugin.model import KubeletDevice, Resource, Unit
from tests.plugin.fakes import FakeBackend
from tests.plugin.kubelet.test_registration_links import Running, running
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import DIRECTORY, RESOURCE, eventually
from tests.plugin.other_plugin import other_plugin

OTHER = "theirs.sock"
Node = tuple[Host, KubeletStub, Running]
Checked = Callable[[], bool]


@pytest.fixture(autouse=True)
def no_periodic_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss must be noticed by the kubelet's update, not by the check every half minute."""
    monkeypatch.setattr(AllocatableCheck, "every", 3600.0)


@pytest.fixture
def checked(no_periodic_checks: None, monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Waits for four more checks of our devices: the first may have begun before, the next two would find a
    loss, and the loss is logged before the fourth."""
    monkeypatch.setattr(AllocatableCheck, "every", 0.1)
    monkeypatch.setattr(AllocatableCheck, "again", 0.1)
    evaluate = AllocatableCheck._evaluate
    times: list[float] = []

    def recorded(check: AllocatableCheck, now: float, listed: frozenset[str] | None) -> None:
        evaluate(check, now, listed)
        if check._resource == RESOURCE:
            times.append(now)

    def four_more() -> bool:
        before = len(times)
        return eventually(lambda: len(times) >= before + 4)

    monkeypatch.setattr(AllocatableCheck, "_evaluate", recorded)
    return four_more


@pytest.fixture
def node(short: Path) -> Iterator[Node]:
    host = Host(short, {})
    with KubeletStub(host) as stub, running(host, FakeBackend({RESOURCE: 2, "nvidia.com/other": 1})) as made:
        assert stub.wait_allocatable(RESOURCE, 2, 30)
        assert eventually(lambda: made.service.ready)
        yield host, stub, made


def ours_again(stub: KubeletStub) -> bool:
    """Whether the kubelet allocates our two devices from our endpoint."""
    endpoint = stub.endpoints.find(RESOURCE)
    return (
        endpoint is not None
        and endpoint.path.name == "nvidia-gpu.sock"
        and stub.endpoints.healthy(RESOURCE) == {f"{RESOURCE}-0", f"{RESOURCE}-1"}
    )


@pytest.mark.full
def test_killed_plugin_that_replaced_our_socket_is_replaced_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, stub, made = node
    is_dead_socket = Host.is_dead_socket
    probes: list[str] = []

    def probed(node: Host, path: str) -> bool:
        probes.append(path)
        return is_dead_socket(node, path)

    monkeypatch.setattr(Host, "is_dead_socket", probed)
    monkeypatch.setattr("gpunode.plugin.kubelet.link._PROBE_SECONDS", 0.1)
    with other_plugin(host.path(DIRECTORY), "nvidia-gpu.sock", RESOURCE, "X-0", "X-1", "X-2"):
        assert stub.wait_allocatable(RESOURCE, 3, 30)
        assert eventually(lambda: "another device plugin has put its socket" in made.service.status)
        seen = len(probes)
        assert eventually(lambda: len(probes) >= seen + 3)
        assert made.service.registrations == 2, "it is running: it keeps its socket"
    assert eventually(lambda: ours_again(stub)), made.log.text()
    assert eventually(lambda: made.service.ready)
    assert made.service.status.startswith(f"2 of 2 {RESOURCE} healthy, registered with the kubelet")


@pytest.mark.full
@pytest.mark.parametrize(
    "exits", ["once listed", "as we register again", "once we have", "once we are ready"]
)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside an unrelated plugin"])
def test_resource_is_reclaimed_from_a_plugin_that_exits(node: Node, exits: str, beside: bool) -> None:
    host, stub, made = node

    def listed_or_noticed() -> bool:
        listed = exits == "once listed" and "X-0" in stub.endpoints.healthy(RESOURCE)
        return listed or "registering again" in made.log.messages("warning")

    with socket.socket(socket.AF_UNIX) as unrelated:
        if beside:
            unrelated.bind(str(host.path(f"{DIRECTORY}/rdma.sock")))
            unrelated.listen(8)
        with other_plugin(host.path(DIRECTORY), OTHER, RESOURCE, "X-0", "X-1", "X-2"):
            assert eventually(listed_or_noticed)
            if exits.startswith("once we"):
                assert eventually(lambda: ours_again(stub)), made.log.text()
            if exits == "once we are ready":
                assert eventually(lambda: made.service.ready)
        assert eventually(lambda: ours_again(stub)), made.log.text()
        assert eventually(lambda: made.service.ready)
        assert "registering again" in made.log.messages("warning")


def test_running_plugin_that_registers_our_resource_is_reported_and_replaced(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, stub, made = node
    # the list of the next stream may reach the kubelet late; until then it would count as another loss
    monkeypatch.setattr(AllocatableCheck, "settle", 5.0)
    with other_plugin(host.path(DIRECTORY), OTHER, RESOURCE, "X-0", "X-1", "X-2"):
        assert eventually(lambda: ours_again(stub)), made.log.text()
        reason = "the kubelet allocates another plugin's devices: X-0, X-1, X-2"
        assert made.log.reasons() == [reason]
    assert eventually(lambda: ours_again(stub)), made.log.text()
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


def test_two_checks_of_one_list_are_no_loss(short: Path) -> None:
    """The kubelet writes its checkpoint after each list, and each write causes a check."""
    first, second = (
        Resource(RESOURCE, (KubeletDevice(unit.id, unit),))
        for unit in (Unit("A", "A", "0"), Unit("B", "B", "0"))
    )
    feed = Feed(first)
    check = AllocatableCheck(Host(short, {}), Settings(), RESOURCE, feed, lambda: None)
    check.look(0.0)

    def is_lost(now: float, listed: str) -> bool:
        check._trusted = True
        check._answer = SimpleQueue()
        check._answer.put(frozenset({listed}))
        check.look(now)
        return check.lost

    feed.publish(second)
    assert not is_lost(10.000, "A")
    assert not is_lost(10.002, "A")
    feed.publish(first)
    assert not is_lost(10.004, "B"), "the second check, but the first one of this list"
    assert not is_lost(11.003, "B")
    assert is_lost(11.005, "B"), "a second later"


def test_without_pod_resources_the_checkpoint_is_compared(node: Node) -> None:
    host, stub, made = node
    host.remove(stub.pod_resources_socket)
    with other_plugin(host.path(DIRECTORY), OTHER, RESOURCE, "X-0"):
        assert stub.wait_allocatable(RESOURCE, 1, 30)
    assert eventually(lambda: ours_again(stub)), made.log.text()


@pytest.mark.full
def test_old_or_damaged_checkpoint_is_ignored(checked: Checked, node: Node) -> None:
    host, stub, made = node
    path = host.path(f"{DIRECTORY}/kubelet_internal_checkpoint")
    foreign = f'{{"Data": {{"RegisteredDevices": {{"{RESOURCE}": ["X-0"]}}}}}}'
    for text in (foreign, "{", "[]", '{"Data": null}', '{"Data": {"RegisteredDevices": 3}}'):
        path.write_text(text)
        assert checked()
        assert made.log.messages("warning") == [], text
    assert made.service.ready
    assert len(stub.registrations) == 2


@pytest.mark.full
def test_pod_resources_of_another_kubelet_are_ignored(checked: Checked, short: Path) -> None:
    host = Host(short, {})
    with KubeletStub(host) as ours, KubeletStub(host, "/other/kubelet/device-plugins") as theirs:
        settings = {"pod_resources_socket": theirs.pod_resources_socket}
        with running(host, FakeBackend({RESOURCE: 2}), **settings) as made:
            assert ours.wait_allocatable(RESOURCE, 2, 30)
            assert checked()
            assert "registering again" not in made.log.messages()
            assert made.service.ready


@pytest.mark.full
def test_all_devices_unhealthy_is_not_a_loss(checked: Checked, node: Node) -> None:
    _, stub, made = node
    assert made.backend.sink is not None
    made.backend.show(gpu=0, other=1)
    assert stub.wait_allocatable(RESOURCE, 0, 30)
    assert checked()
    assert "registering again" not in made.log.messages()
