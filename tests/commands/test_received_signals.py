"""`session.until_signal`: threads and signals end the main thread's wait."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from gpunode.commands.session import ReceivedSignals, until_signal
from tests.waiting import PATIENCE

LONG = 60.0


@pytest.fixture
def signals() -> Iterator[ReceivedSignals]:
    with until_signal() as received:
        yield received


def waited(signals: ReceivedSignals, seconds: float) -> float:
    start = time.monotonic()
    signals.wait(seconds)
    return time.monotonic() - start


def test_several_wakes_end_only_one_wait(signals: ReceivedSignals) -> None:
    for _ in range(3):
        signals.wake()
    assert waited(signals, LONG) < 20.0
    assert waited(signals, 0.1) >= 0.09


def test_wake_from_another_thread_ends_the_wait(signals: ReceivedSignals) -> None:
    timer = threading.Timer(0.1, signals.wake)
    timer.start()
    assert waited(signals, LONG) < 20.0
    timer.join()


@pytest.mark.parametrize("early", [True, False], ids=["before the wait", "in it"])
def test_signal_ends_the_wait_after_its_handler_ran(signals: ReceivedSignals, early: bool) -> None:
    timer = threading.Timer(0.0 if early else 0.1, lambda: os.kill(os.getpid(), signal.SIGHUP))
    timer.start()
    if early:
        timer.join()
    assert waited(signals, LONG) < 20.0
    timer.join()
    assert signals.take_hangup() and not signals.take_hangup()
    assert waited(signals, 0.1) >= 0.09  # it is over


def test_signal_that_another_thread_gets_ends_the_wait(signals: ReceivedSignals) -> None:
    """The kernel may choose any thread; a wait for a lock in the main thread would not end."""
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(other.ident or 0, signal.SIGTERM))
    timer.start()
    try:
        assert waited(signals, LONG) < 20.0 and signals == ["SIGTERM"]
    finally:
        over.set()
        for thread in (timer, other):
            thread.join()


def test_no_signal_is_lost_among_busy_threads(signals: ReceivedSignals) -> None:
    rounds, came, turn = 1000, threading.Semaphore(0), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    signals.let_go = came.release
    over = threading.Event()

    def send() -> None:
        for _ in range(rounds):
            os.kill(os.getpid(), signal.SIGUSR1)
            if not came.acquire(timeout=PATIENCE):
                break
            sent.append(1)
        over.set()
        signals.wake()

    sent: list[int] = []
    busy = [threading.Thread(target=lambda: spin(over)) for _ in range(2)]
    for one in (*busy, threading.Thread(target=send)):
        one.start()
    try:
        while not over.is_set():
            signals.wait()
    finally:
        over.set()
        for one in busy:
            one.join()
        sys.setswitchinterval(turn)
    assert len(sent) == rounds


def test_wait_ends_in_time_though_signals_interrupt_its_end(signals: ReceivedSignals) -> None:
    over = threading.Event()

    def send() -> None:
        for turn in range(2000):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(turn % 10 * 1e-4)
        over.set()

    rescue = threading.Timer(30.0, signals.wake)
    longest = 0.0
    for thread in (rescue, sender := threading.Thread(target=send)):
        thread.start()
    try:
        while not over.is_set():
            longest = max(longest, waited(signals, 0.001))
    finally:
        sender.join()
        rescue.cancel()
    assert longest < 20.0


def spin(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(50))
