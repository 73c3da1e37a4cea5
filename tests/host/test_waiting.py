"""`waiting.Waiter` on real directories: only a wake or a change ends the wait."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpunode.host.waiting import Waiter
from tests.waiting import PATIENCE

LONG = 60.0


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    made = Waiter()
    yield made
    made.close()


def waited(waiter: Waiter, seconds: float) -> float:
    start = time.monotonic()
    waiter.wait(seconds)
    return time.monotonic() - start


def test_several_wakes_end_only_one_wait(waiter: Waiter) -> None:
    for _ in range(3):
        waiter.wake()
    assert waited(waiter, LONG) < 20.0
    assert waited(waiter, 0.1) >= 0.09


def test_wake_from_another_thread_ends_the_wait(waiter: Waiter) -> None:
    timer = threading.Timer(0.1, waiter.wake)
    timer.start()
    assert waited(waiter, LONG) < 20.0
    timer.join()


@pytest.mark.parametrize("change", ["come", "go", "rename", "anew", "directory goes"])
def test_created_and_removed_names_end_the_wait(waiter: Waiter, tmp_path: Path, change: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "there").touch()
    assert waiter.watch([place])
    waiter.wait(0.0)
    if change == "come":
        (place / "new").touch()
    elif change == "go":
        (place / "there").unlink()
    elif change == "rename":
        (place / "there").rename(tmp_path / "away")
    elif change == "anew":
        os.utime(place / "there")
    else:
        place.rename(tmp_path / "elsewhere")
    assert waited(waiter, LONG) < 20.0
    assert waited(waiter, 0.1) >= 0.09


def test_closing_a_written_file_ends_the_wait_and_reading_does_not(waiter: Waiter, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("one")
    assert waiter.watch([tmp_path])
    assert (tmp_path / "there").read_text() == "one"
    assert waited(waiter, 0.1) >= 0.09
    with (tmp_path / "there").open("a") as stream:
        stream.write("two")
        stream.flush()
        assert waited(waiter, 0.1) >= 0.09
    assert waited(waiter, LONG) < 20.0


def test_missing_directory_does_not_affect_the_others(waiter: Waiter, tmp_path: Path) -> None:
    assert not waiter.watch([tmp_path / "absent", tmp_path])
    (tmp_path / "new").touch()
    assert waited(waiter, LONG) < 20.0


def test_recreated_directory_is_watched_by_the_next_call(waiter: Waiter, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    assert waiter.watch([place])
    place.rmdir()
    waiter.wait(0.0)
    assert not waiter.watch([place])
    place.mkdir()
    assert waiter.watch([place])
    (place / "new").touch()
    assert waited(waiter, LONG) < 20.0


def test_without_an_inotify_instance_watch_fails_and_wake_still_works(tmp_path: Path) -> None:
    waiter = Waiter()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    fill = [os.open("/dev/null", os.O_RDONLY)]
    while fill[-1] < used + 1:  # every number below the limit is in use, so that the kernel returns EMFILE
        fill.append(os.open("/dev/null", os.O_RDONLY))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (fill[-1] + 1, before[1]))
        assert not waiter.watch([tmp_path])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in fill:
            os.close(descriptor)
    waiter.wake()
    assert waited(waiter, LONG) < 20.0
    waiter.close()


def test_wake_after_close_is_ignored(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    waiter = Waiter()
    assert waiter.watch([tmp_path])
    waiter.close()
    waiter.close()
    waiter.wake()
    assert len(os.listdir("/proc/self/fd")) == before


def test_signal_ends_the_wait_after_its_handler_ran(waiter: Waiter) -> None:
    waiter.hear_signals()
    came: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: came.append(number))
    try:
        timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGHUP))
        timer.start()
        assert waited(waiter, LONG) < 20.0
        timer.join()
        assert came == [signal.SIGHUP]
        assert waited(waiter, 0.1) >= 0.09  # it is over
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_signal_is_lost_among_busy_threads(waiter: Waiter) -> None:
    """Without a byte in a pipe one in some thousand signals was lost, if threads take turns all the time."""
    waiter.hear_signals()
    rounds, came, turn = 1000, threading.Semaphore(0), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    before = signal.signal(signal.SIGHUP, lambda number, frame: came.release())
    over = threading.Event()

    def send() -> None:
        for _ in range(rounds):
            os.kill(os.getpid(), signal.SIGHUP)
            if not came.acquire(timeout=PATIENCE):
                break
            sent.append(1)
        over.set()
        waiter.wake()

    sent: list[int] = []
    busy = [threading.Thread(target=lambda: spin(over)) for _ in range(2)]
    for one in (*busy, threading.Thread(target=send)):
        one.start()
    try:
        while not over.is_set():
            waiter.wait(LONG)
    finally:
        over.set()
        for one in busy:
            one.join()
        signal.signal(signal.SIGHUP, before)
        sys.setswitchinterval(turn)
    assert len(sent) == rounds


def spin(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(50))


def test_only_the_main_thread_receives_signals() -> None:
    """And close() restores Python's own wakeup file."""
    made = Waiter()
    other = threading.Thread(target=made.hear_signals)
    other.start()
    other.join()
    assert signal.set_wakeup_fd(-1) == -1
    made.hear_signals()
    made.close()
    assert signal.set_wakeup_fd(-1) == -1
