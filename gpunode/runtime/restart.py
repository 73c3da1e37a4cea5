"""Making a daemon read its configuration: which command does it on this node, and doing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpunode.errors import DaemonError, PreconditionError, UsageError
from gpunode.facts.daemons import Daemon, systemd_runs
from gpunode.host import Host

_COMMAND_SECONDS = 120.0
_LOG_LINES = 15


@dataclass(frozen=True)
class Restarter:
    """How one daemon is restarted or reloaded. `command` is the user's own, empty for systemd's.

    `find` looks the daemon up again: after a restart it is another process.
    """

    host: Host
    daemon: Daemon
    find: Callable[[], Daemon | None]
    command: str = ""

    def shown(self, verb: str) -> str:
        """The command line that will run, as a person would type it."""
        import shlex

        argv = self._argv(verb)
        if argv:
            return shlex.join(argv)
        reloads = verb == "reload" and self.daemon.process is not None
        return f"kill -HUP {self.daemon.process.pid}" if reloads and self.daemon.process else ""

    def _argv(self, verb: str) -> tuple[str, ...]:
        if verb == "reload" and self.daemon.process is not None and not self._systemd():
            return ()
        if self.command:
            return _split(self.command)
        return ("systemctl", verb, self.daemon.unit or "") if self._systemd() else ()

    def _systemd(self) -> bool:
        return self.daemon.unit is not None and systemd_runs(self.host)

    def require(self, verb: str) -> None:
        """`PreconditionError` if nobody here can restart or reload it: said before anything is written."""
        if not self.shown(verb):
            raise PreconditionError(
                f"{self.daemon.name} must be {verb}ed for this, and systemd doesn't run it on this node",
                hint="say how with --restart-command 'COMMAND', or write only: --no-restart",
            )

    def perform(self, verb: str) -> float:
        """Do it; seconds that it took. `DaemonError` with what the command printed if it fails."""
        started = self.host.monotonic()
        argv = self._argv(verb)
        if not argv:
            self._hang_up()
            return self.host.monotonic() - started
        answer = self.host.run(argv, timeout=_COMMAND_SECONDS)
        if not answer.ok:
            what = "did not end" if answer.timed_out else f"failed with status {answer.code}"
            said = (answer.stderr or answer.stdout).strip()
            raise DaemonError(f"{self.shown(verb)} {what}" + (f": {said[-2000:]}" if said else ""))
        return self.host.monotonic() - started

    def _hang_up(self) -> None:
        process = (self.find() or self.daemon).process
        if process is None:
            raise DaemonError(f"{self.daemon.name} isn't running, so it can't reload")
        try:
            self.host.signal(process.pid, "HUP")
        except ProcessLookupError as error:
            raise DaemonError(f"{self.daemon.name} ended before it could reload") from error

    def last_words(self) -> str:
        """The daemon's own last log lines, where systemd keeps them; empty elsewhere."""
        if not self._systemd():
            return ""
        argv = ["journalctl", "-u", self.daemon.unit or "", "-n", str(_LOG_LINES), "--no-pager", "-o", "cat"]
        return self.host.run(argv, timeout=10.0).stdout.strip()


def _split(command: str) -> tuple[str, ...]:
    import shlex

    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"--restart-command can't be split into words: {error}") from error
