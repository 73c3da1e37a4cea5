"""Running a package manager's command: never while another process is at work, and never half of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from gpunode.host import Completed, Host
from gpunode.packages.locks import holder
from gpunode.packages.manager import Command, Failure, Lock, Manager, PackagesError, Trouble
from gpunode.result import ExitCode, Progress

WAIT_SECONDS = 600.0
LOCKED = "package-manager-locked"
_POLL_SECONDS = 1.0


def run_command(
    host: Host,
    manager: Manager,
    command: Command,
    progress: Progress,
    *,
    wait_seconds: float = WAIT_SECONDS,
    whole: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Completed:
    """Run it to its end. Another process's lock is waited for, said on stderr, `wait_seconds` at most.

    `whole` keeps a command that changes packages from being interrupted. `PackagesError` if it fails; its
    code is the `Trouble`, and `package-manager-locked` has the exit code of a precondition.
    """
    deadline = host.monotonic() + wait_seconds
    while True:
        wait_for_others(host, manager, progress, deadline - host.monotonic())
        with progress.step(command.text), whole() if command.changes else nullcontext():
            done = host.run(command.argv, timeout=command.seconds, env=command.environ)
        failure = manager.explain(done)
        if failure is None:
            return done
        if failure.trouble is not Trouble.LOCKED:
            raise failed(command, failure)
        # a lock that wasn't seen, or that somebody else was quicker to take
        _wait_blindly(host, failure, progress, deadline)


def failed(command: Command, failure: Failure) -> PackagesError:
    """The error that a command's failure is."""
    words = (
        command.argv[:2] if not command.argv[1:2] or not command.argv[1].startswith("-") else command.argv[:1]
    )
    return PackagesError(
        f"{' '.join(words)}: {failure.said}",
        hint=failure.hint or "run it by hand to see all that it says",
        code=str(failure.trouble),
    )


def wait_for_others(host: Host, manager: Manager, progress: Progress, seconds: float) -> None:
    """Until no other process holds the manager's lock, as far as is seen. `PackagesError` if one stays."""
    lock = holder(host, manager.lock_files)
    if lock is None:
        return
    with progress.step(f"waiting for {lock}, which holds {lock.path}, {max(0, round(seconds))} s at most"):
        host.wait_until(lambda: holder(host, manager.lock_files) is None, seconds, _POLL_SECONDS)
    now = holder(host, manager.lock_files)
    if now is not None:
        raise _too_long(now, "")


def _wait_blindly(host: Host, failure: Failure, progress: Progress, deadline: float) -> None:
    left = deadline - host.monotonic()
    if left <= 0:
        raise _too_long(None, failure.said)
    with progress.step(f"waiting, {round(left)} s at most: {failure.said}"):
        host.sleep(min(_POLL_SECONDS, left))


def _too_long(lock: Lock | None, said: str) -> PackagesError:
    return PackagesError(
        f"{lock} holds {lock.path} and doesn't let go of it" if lock else said,
        hint="wait for it to end, then run this again; --lock-timeout SECONDS waits longer",
        code=LOCKED,
        exit_code=ExitCode.PRECONDITION,
    )
