"""A child that prints lines, and all its failures."""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpunode.host.process import LineChild
from tests.waiting import PATIENCE, eventually

Start = Callable[[str], LineChild]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a child that runs this Python code."""
    # gpunode leaves a child behind that SIGKILL doesn't end within a second, also on a busy machine
    monkeypatch.setattr("gpunode.host.process._GRACE_SECONDS", PATIENCE)
    children: list[LineChild] = []

    def started(code: str) -> LineChild:
        children.append(LineChild((sys.executable, "-ISc", "import os, sys, time\n" + code), os.environ))
        return children[-1]

    yield started
    for child in children:
        child.end()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_lines_are_whole_and_in_order(start: Start) -> None:
    child = start("os.write(1, b'one\\n\\ntwo\\nthr'); sys.stdin.readline(); os.write(1, b'ee\\n\\xff')")
    assert [child.read_line(PATIENCE) for _ in range(3)] == ["one", " ", "two"]
    child.tell("go on")
    assert [child.read_line(PATIENCE) for _ in range(2)] == ["three", ""]
    assert child.end() == 0


def test_incomplete_line_is_not_returned(start: Start) -> None:
    child = start("os.write(1, b'half'); os.write(2, b'written\\n'); time.sleep(600)")
    assert eventually(lambda: child.read_line(0.05) is not None or child.last_words == "written")
    assert child.read_line(0.05) is None


def test_endless_line_ends_the_child(start: Start) -> None:
    child = start("while True: os.write(1, b'x' * 65536)")
    begun = time.monotonic()
    assert child.read_line(30.0) == ""
    assert time.monotonic() - begun < 25.0
    assert child.end() == -9


@pytest.mark.parametrize("stream", [1, 2])
def test_endless_drip_of_bytes_respects_the_timeout(start: Start, stream: int) -> None:
    child = start(f"while True: os.write({stream}, b'.'); time.sleep(0.001)")
    begun = time.monotonic()
    assert child.read_line(0.5) is None
    assert time.monotonic() - begun < 20.0


def test_last_words_are_the_last_line_and_bounded(start: Start) -> None:
    child = start("os.write(2, b'noise\\n' * 100000 + b'the end\\n'); os._exit(3)")
    assert child.read_line(30.0) == ""
    assert child.last_words == "the end"
    assert child.end() == 3


def test_child_that_does_not_read_does_not_block_the_writer(start: Start) -> None:
    child = start("time.sleep(60)")
    for _ in range(5000):
        child.tell("look" * 10)
    assert child.end() == -9
    child.tell("gone")


def test_many_children_leave_neither_descriptors_nor_zombies(start: Start) -> None:
    gc.collect()  # descriptors left open by an earlier test must not be closed meanwhile
    before = descriptors()
    for _ in range(5):
        child = start("print('here')")
        assert child.read_line(30.0) == "here"
        child.end()
        child.wake()
        child.end()
    assert descriptors() == before
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if " Z " in Path(f"/proc/{pid}/stat").read_text()]


def test_child_works_with_descriptors_beyond_the_limit_of_select(start: Start) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("too few descriptors allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1050)]
    try:
        assert start("print('here')").read_line(30.0) == "here"
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
