"""Making a daemon read its configuration: which command does it on this node, and doing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpunode.errors import DaemonError, PreconditionError, UsageError
from gpunode.facts.daemons import Daemon
from gpunode.facts.distributions import DISTRIBUTIONS
from gpunode.facts.users import places
from gpunode.host import Host

_COMMAND_SECONDS = 120.0
_MANAGED_SECONDS = 600.0  # a distribution's service is up when its Kubernetes is, which takes minutes on rke2
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
        if verb == "reload" and self.daemon.process is not None and (self._alone or not self._systemd()):
            return ()
        if self.command:
            return _split(self.command)
        return (*self._systemctl, verb, self.daemon.unit or "") if self._systemd() else ()

    @property
    def _alone(self) -> bool:
        """Whether only dockerd itself can be told to reload: the snap's unit has no ExecReload, and a user's
        unit sends the signal to RootlessKit.
        """
        return bool(self.daemon.user) or self.daemon.manager == "snap"

    @property
    def _systemctl(self) -> tuple[str, ...]:
        return ("systemctl", "--user") if self.daemon.user else ("systemctl",)

    @property
    def _environ(self) -> Mapping[str, str]:
        """What `systemctl --user` needs and sudo takes away: where the user's systemd listens."""
        return {"XDG_RUNTIME_DIR": places(self.host).runtime_directory} if self.daemon.user else {}

    def _systemd(self) -> bool:
        if self.daemon.user:
            return self.daemon.unit is not None and self.host.is_dir(
                f"{places(self.host).runtime_directory}/systemd"
            )
        return self.daemon.unit is not None and self.host.systemd_runs()

    def require(self, verb: str) -> None:
        """`PreconditionError` if nobody here can restart or reload it: said before anything is written."""
        if not self.shown(verb):
            raise PreconditionError(
                f"{self.daemon.manager or self.daemon.name} must be {verb}ed for this,"
                " and systemd doesn't run it on this node",
                hint="pass the command with --restart-command 'COMMAND', or only write: --no-restart",
            )

    def perform(self, verb: str) -> float:
        """Do it; seconds that it took. `DaemonError` with what the command printed if it fails."""
        started = self.host.monotonic()
        argv = self._argv(verb)
        if not argv:
            self._hang_up()
            return self.host.monotonic() - started
        if self.daemon.user and argv[: len(self._systemctl)] == self._systemctl:
            # its plan may bring a drop-in for the unit or take one away
            self.host.run((*self._systemctl, "daemon-reload"), timeout=_COMMAND_SECONDS, env=self._environ)
        limit = _MANAGED_SECONDS if self.daemon.manager in DISTRIBUTIONS else _COMMAND_SECONDS
        answer = self.host.run(argv, timeout=limit, env=self._environ)
        if not answer.ok and not self.command and self._clear_failed_starts():
            answer = self.host.run(argv, timeout=limit, env=self._environ)
        if not answer.ok:
            what = "did not end" if answer.timed_out else f"failed with status {answer.code}"
            said = (answer.stderr or answer.stdout).strip()
            raise DaemonError(
                f"{self.shown(verb)} {what}" + (f": {said[-2000:]}" if said else ""), hint=self.look
            )
        return self.host.monotonic() - started

    def _clear_failed_starts(self) -> bool:
        """Reset the count of starts by which systemd refuses more than five in ten seconds, so that
        the restart of a rollback works. Gives whether this restart was refused."""
        unit = self.daemon.unit or ""
        result = self.host.run(
            (*self._systemctl, "show", "-p", "Result", unit), env=self._environ, timeout=10.0
        )
        self.host.run((*self._systemctl, "reset-failed", unit), env=self._environ, timeout=10.0)
        return result.stdout.strip() == "Result=start-limit-hit"

    def _hang_up(self) -> None:
        process = (self.find() or self.daemon).process
        if process is None:
            raise DaemonError(f"{self.daemon.name} isn't running, so it can't reload", hint=self.look)
        try:
            self.host.signal(process.pid, "HUP")
        except ProcessLookupError as error:
            message = f"{self.daemon.name} ended before it could reload"
            raise DaemonError(message, hint=self.look) from error

    @property
    def look(self) -> str:
        """Where a person sees why the daemon doesn't do as it is told."""
        if self.daemon.log:
            return f"see why: tail -n 50 {self.daemon.log}"
        if not self._systemd():
            return f"see why in the log of {self.daemon.name}, where it was started to write it"
        whose = "--user " if self.daemon.user else ""
        return f"see why: journalctl {whose}-u {self.daemon.unit} -n 50 --no-pager"

    def last_words(self) -> str:
        """The daemon's own last log lines, from its file or from where systemd keeps them; else empty."""
        if self.daemon.log:
            argv = ["tail", "-n", str(_LOG_LINES), self.daemon.log]
            return self.host.run(argv, timeout=10.0).stdout.strip()
        if not self._systemd():
            return ""
        whose = ["--user"] if self.daemon.user else []
        argv = ["journalctl", *whose, "-u", self.daemon.unit or "", "-n", str(_LOG_LINES)]
        return self.host.run([*argv, "--no-pager", "-o", "cat"], timeout=10.0).stdout.strip()


def _split(command: str) -> tuple[str, ...]:
    import shlex

    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(
            f"--restart-command can't be split into words: {error}", hint="quote it as for a shell"
        ) from error
