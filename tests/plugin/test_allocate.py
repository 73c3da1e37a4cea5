"""What a container gets, and what it is told when it gets nothing."""

from __future__ import annotations

import pytest

from gpunode.plugin.allocate import AllocationError, environment
from tests.plugin.nodes import table, uuid


def test_uuids_come_in_request_order_each_once() -> None:
    asked = [uuid(3), uuid(1), uuid(3)]
    assert environment(table(4).snapshot(), asked) == {"NVIDIA_VISIBLE_DEVICES": f"{uuid(3)},{uuid(1)}"}


def test_an_unknown_device_is_named_with_the_known_ones() -> None:
    with pytest.raises(AllocationError) as caught:
        environment(table(2).snapshot(), [uuid(0), "GPU-nope"])
    assert caught.value.code == "not-found"
    assert caught.value.message == f"unknown device 'GPU-nope'; known devices: {uuid(0)}, {uuid(1)}"


def test_a_request_for_nothing_is_invalid() -> None:
    with pytest.raises(AllocationError) as caught:
        environment(table(2).snapshot(), [])
    assert caught.value.code == "invalid"


def test_an_unhealthy_device_is_refused_with_the_reason() -> None:
    made = table(2)
    made.event(uuid(1), "XID 79: the GPU has fallen off the bus")
    with pytest.raises(AllocationError, match="XID 79") as caught:
        environment(made.snapshot(), [uuid(1)])
    assert caught.value.code == "unhealthy"
