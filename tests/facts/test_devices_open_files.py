"""Processes with open device files of the driver: by number on a live node, by name on a recorded one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpunode.facts.devices import CONTROL_MINOR, OpenDevices, open_devices
from gpunode.facts.gpu_use import GpuUsers, gpu_users
from gpunode.facts.node import Node
from gpunode.host import Host

# /dev/null is 1:3 and /dev/zero 1:5 (null(4)): this process acts as one that uses a driver of that number
AS_GPU, AS_UVM, AS_CAPS = {"nvidia": 1}, {"nvidia-uvm": 1}, {"nvidia-caps": 1}


@pytest.mark.parametrize(
    ("majors", "expected"),
    [
        (AS_GPU, OpenDevices(frozenset({3, 5}))),
        (AS_UVM, OpenDevices(control=True)),
        (AS_CAPS, OpenDevices(caps=frozenset({3, 5}))),
        ({"nvidia": 195, "nvidia-uvm": 511}, OpenDevices()),
        ({}, OpenDevices()),
    ],
)
def test_device_is_recognized_by_its_number(
    tmp_path: Path, majors: dict[str, int], expected: OpenDevices
) -> None:
    fake = tmp_path / "nvidia0"
    fake.touch()
    with open("/dev/null"), open("/dev/zero"), fake.open():
        found = open_devices(Host(), os.getpid(), majors)
    assert found is not None and found.caps >= expected.caps and found.gpus >= expected.gpus
    assert (bool(found), found.control) == (bool(expected), expected.control)


def test_recorded_device_is_recognized_by_its_name(tmp_path: Path) -> None:
    place = tmp_path / "proc/7/fd"
    place.mkdir(parents=True)
    files = ("nvidia3 (deleted)", "nvidia-caps/nvidia-cap31", "nvidiactl", "null", "nvidia-modeset")
    for number, name in enumerate(files):
        (place / str(number)).symlink_to(f"/dev/{name}")
    expected = OpenDevices(frozenset({3}), frozenset({31}), control=True)
    assert open_devices(Host(root=tmp_path), 7, {}) == expected
    assert open_devices(Host(root=tmp_path), 8, {}) == OpenDevices(), "the process is gone"
    assert CONTROL_MINOR not in expected.gpus


def test_unloaded_driver_has_no_users_and_no_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regardless of containers with test device files on this machine."""
    node = Node(Host())
    monkeypatch.setattr(Node, "majors", {"mem": 1})
    monkeypatch.setattr(Node, "processes", property(lambda _: pytest.fail("no process has to be read")))
    assert gpu_users(node) == GpuUsers()


def test_own_process_is_listed_as_a_user_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(Host())
    monkeypatch.setattr(Node, "majors", AS_GPU)
    monkeypatch.setattr(Node, "gpu_containers", ())
    with open("/dev/null"):
        assert os.getpid() in {one.pid for one in gpu_users(node).users}
