"""A signal that arrives while a program is being started."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpunode.host.process import Completed, run_process
from tests.waiting import PATIENCE


def _run(argv: tuple[str, ...]) -> Completed:
    return run_process(argv, 60.0, None, {"PATH": "/usr/bin:/bin"})


def _watched(argv: tuple[str, ...]) -> Completed:
    return run_process(argv, 60.0, None, {"PATH": "/usr/bin:/bin"}, argv[0], lambda _line: None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The children; Ctrl-C arrives when the child runs and Popen hasn't returned yet."""
    # gpunode leaves a child behind that SIGKILL doesn't end within a second, also on a busy machine
    monkeypatch.setattr("gpunode.host.process._GRACE_SECONDS", PATIENCE)
    children: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        child = real(*args, **options)
        children.append(child)
        signal.raise_signal(signal.SIGINT)
        return child

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    return children


@pytest.mark.parametrize("run", [_run, _watched])
def test_interrupted_start_leaves_no_child(
    started: list[subprocess.Popen[bytes]], run: Callable[[tuple[str, ...]], Completed], tmp_path: Path
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(("/bin/sh", "-c", f"sleep 300; touch {tmp_path}/late"))
    (child,) = started
    assert child.poll() == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_start_programs_without_touching_signals() -> None:
    answers: list[Completed] = []
    thread = threading.Thread(target=lambda: answers.append(_run(("/bin/echo", "ready"))))
    thread.start()
    thread.join()
    assert [answer.stdout for answer in answers] == ["ready\n"]


@pytest.mark.parametrize("run", [_run, _watched])
def test_program_that_does_not_exist_is_reported(run: Callable[[tuple[str, ...]], Completed]) -> None:
    answer = run(("/nowhere/program",))
    assert (answer.code, answer.stderr) == (127, "/nowhere/program: No such file or directory")
