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
_POLL_SECONDS = 0.2
_RETRY_SECONDS = 1.0
_TELL_SECONDS = 15.0


def run_command(
    host: Host,
    manager: Manager,
    command: Command,
    progress: Progress,
    *,
    wait_seconds: float = WAIT_SECONDS,
    whole: Callable[[Command], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Completed:
    """Run it to its end. Another process's lock is waited for, said on stderr, `wait_seconds` at most.

    `whole` keeps a command that changes packages from being interrupted. `PackagesError` if it fails; its
    code is the `Trouble`, and `package-manager-locked` has the exit code of a precondition.
    """
    deadline = host.monotonic() + wait_seconds
    wait_for_others(host, manager, progress, wait_seconds)
    waiting = _Waiting(host, progress, deadline)
    with progress.following(command.text, command.name) as alive:
        while True:
            with whole(command) if command.changes else nullcontext():
                done = host.run(command.argv, timeout=command.seconds, env=command.environ, watch=alive)
            failure = manager.explain(done)
            if failure is None:
                return done
            if failure.trouble is not Trouble.LOCKED:
                raise failed(command, failure)
            # a lock that wasn't seen, or that somebody else was quicker to take
            if waiting.over:
                raise _too_long(None, failure.said)
            waiting.tell(f"waiting: {failure.said}")
            host.sleep(_RETRY_SECONDS)
            wait_for_others(host, manager, progress, deadline - host.monotonic())


class _Waiting:
    """Says what is waited for at once and then four times a minute; nobody shall think that it hangs."""

    def __init__(self, host: Host, progress: Progress, deadline: float) -> None:
        self.host, self.progress, self.deadline = host, progress, deadline
        self.next = 0.0

    @property
    def over(self) -> bool:
        return self.host.monotonic() >= self.deadline

    def tell(self, what: str) -> None:
        now = self.host.monotonic()
        if now >= self.next:
            self.next = now + _TELL_SECONDS
            self.progress.note(f"{what} ({max(0, round(self.deadline - now))} s at most)")


def failed(command: Command, failure: Failure) -> PackagesError:
    """The error that a command's failure is."""
    return PackagesError(
        f"{command.name}: {failure.said}",
        hint=failure.hint or "run it by hand to see all that it says",
        code=str(failure.trouble),
    )


def wait_for_others(host: Host, manager: Manager, progress: Progress, seconds: float) -> None:
    """Until no other process holds the manager's lock, as far as is seen. `PackagesError` if one stays."""
    waiting = _Waiting(host, progress, host.monotonic() + seconds)
    while (lock := holder(host, manager.lock_files)) is not None:
        if waiting.over:
            raise _too_long(lock, "")
        waiting.tell(f"waiting for {lock}, which holds {lock.path}")
        host.sleep(_POLL_SECONDS)


def _too_long(lock: Lock | None, said: str) -> PackagesError:
    return PackagesError(
        f"{lock} holds {lock.path} and doesn't let go of it" if lock else said,
        hint="wait for it to end, then run this again; --lock-timeout SECONDS waits longer",
        code=LOCKED,
        exit_code=ExitCode.PRECONDITION,
    )
