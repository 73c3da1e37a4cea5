"""`threads.Waiter`: threads and signal handlers end the wait."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from gpunode.plugin.threads import Waiter
from tests.waiting import PATIENCE

LONG = 60.0


@pytest.fixture
def waiter() -> Waiter:
    return Waiter()


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


def test_signal_ends_the_wait_after_its_handler_ran(waiter: Waiter) -> None:
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        came.append(number)
        waiter.wake()

    before = signal.signal(signal.SIGHUP, handle)
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
    """Threads that take turns all the time delay a handler, at most to the end of the interval."""
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
            waiter.wait(0.5)
    finally:
        over.set()
        for one in busy:
            one.join()
        signal.signal(signal.SIGHUP, before)
        sys.setswitchinterval(turn)
    assert len(sent) == rounds


def test_wait_ends_in_time_though_handlers_interrupt_its_end(waiter: Waiter) -> None:
    """`SimpleQueue.get` with a time limit doesn't: it then waits without one."""
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    over = threading.Event()

    def send() -> None:
        for turn in range(2000):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(turn % 10 * 1e-4)
        over.set()

    rescue = threading.Timer(30.0, waiter.wake)
    longest = 0.0
    for thread in (rescue, sender := threading.Thread(target=send)):
        thread.start()
    try:
        while not over.is_set():
            longest = max(longest, waited(waiter, 0.001))
    finally:
        sender.join()
        rescue.cancel()
        signal.signal(signal.SIGHUP, before)
    assert longest < 20.0


def spin(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(50))
