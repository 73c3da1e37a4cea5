"""Restart or reload of a daemon, so that it reads its configuration, and the command for it on this node."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpunode.errors import DaemonError, PreconditionError, UsageError
from gpunode.facts.daemons import Daemon
from gpunode.facts.distributions import DISTRIBUTIONS
from gpunode.facts.users import places
from gpunode.host import Host

_COMMAND_SECONDS = 120.0
_MANAGED_SECONDS = 600.0  # a distribution's service is active once its Kubernetes is: minutes on rke2
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
        """The command line that will run, as a user would type it."""
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
        """Whether the reload signal must be sent to dockerd itself.

        The snap's unit has no ExecReload, and a user's unit sends the signal to RootlessKit.
        """
        return bool(self.daemon.user) or self.daemon.manager == "snap"

    @property
    def _systemctl(self) -> tuple[str, ...]:
        return ("systemctl", "--user") if self.daemon.user else ("systemctl",)

    @property
    def _environ(self) -> Mapping[str, str]:
        """The variables for `systemctl --user` that sudo removes: the socket of the user's systemd."""
        return {"XDG_RUNTIME_DIR": places(self.host).runtime_directory} if self.daemon.user else {}

    def _systemd(self) -> bool:
        if self.daemon.user:
            return self.daemon.unit is not None and self.host.is_dir(
                f"{places(self.host).runtime_directory}/systemd"
            )
        return self.daemon.unit is not None and self.host.systemd_runs()

    def require(self, verb: str) -> None:
        """`PreconditionError` if it can't be restarted or reloaded here: raised before any write."""
        if not self.shown(verb):
            raise PreconditionError(
                f"{self.daemon.manager or self.daemon.name} must be {verb}ed for this,"
                " and systemd doesn't run it on this node",
                hint="pass the command with --restart-command 'COMMAND', or only write: --no-restart",
            )

    def perform(self, verb: str) -> float:
        """Restart or reload; return its duration in seconds. `DaemonError` with the command's output if it
        fails."""
        started = self.host.monotonic()
        argv = self._argv(verb)
        if not argv:
            self._hang_up()
            return self.host.monotonic() - started
        if self.daemon.user and argv[: len(self._systemctl)] == self._systemctl:
            # its plan may add or remove a drop-in of the unit
            self.host.run((*self._systemctl, "daemon-reload"), timeout=_COMMAND_SECONDS, env=self._environ)
        limit = _MANAGED_SECONDS if self.daemon.manager in DISTRIBUTIONS else _COMMAND_SECONDS
        answer = self.host.run(argv, timeout=limit, env=self._environ)
        if not answer.ok and not self.command and self._clear_failed_starts():
            answer = self.host.run(argv, timeout=limit, env=self._environ)
        if not answer.ok:
            what = "did not end" if answer.timed_out else f"failed with status {answer.code}"
            output = (answer.stderr or answer.stdout).strip()
            raise DaemonError(
                f"{self.shown(verb)} {what}" + (f": {output[-2000:]}" if output else ""), hint=self.look
            )
        return self.host.monotonic() - started

    def _clear_failed_starts(self) -> bool:
        """Reset the start counter for the restart of a rollback. Return whether this restart was refused.

        systemd refuses more than five starts in ten seconds.
        """
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
        """The command that shows why the daemon failed."""
        if self.daemon.log:
            return f"see why: tail -n 50 {self.daemon.log}"
        if not self._systemd():
            return f"see why in the log of {self.daemon.name}, where it was started to write it"
        whose = "--user " if self.daemon.user else ""
        return f"see why: journalctl {whose}-u {self.daemon.unit} -n 50 --no-pager"

    def last_words(self) -> str:
        """The daemon's own last log lines, from its file or from systemd's journal; else empty."""
        if self.daemon.log:
            argv = ["tail", "-n", str(_LOG_LINES), self.daemon.log]
            return self.host.run(argv, timeout=10.0).stdout.strip()
        if not self._systemd():
            return ""
        whose = ["--user"] if self.daemon.user else []
        argv = ["journalctl", *whose, "-u", self.daemon.unit or "", "-n", str(_LOG_LINES)]
        return self.host.run([*argv, "--no-pager", "-o", "cat"], timeout=10.0).stdout.strip()


def _split(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(
            f"--restart-command can't be split into words: {error}", hint="quote it as for a shell"
        ) from error
