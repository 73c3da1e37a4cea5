"""Restart or reload of an engine's daemon, so that it reads its configuration: the command for it on this
node, and why it failed; also after the rollback of a run that was killed."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpunode.errors import ConfigError, DaemonError, GpunodeError, PreconditionError, UsageError
from gpunode.facts.daemons import Daemon
from gpunode.facts.registry import DISTRIBUTIONS
from gpunode.facts.users import places
from gpunode.host import Host
from gpunode.host.journal import Entry, FileEdit
from gpunode.host.transaction import Restart, write
from gpunode.output.result import Progress
from gpunode.runtime import find
from gpunode.runtime.engine import Engine, Request

_COMMAND_SECONDS = 120.0
_MANAGED_SECONDS = 600.0  # a distribution's service is active once its Kubernetes is: minutes on rke2
_LOG_LINES = 15
RELOAD_SECONDS = 0.5  # a reload doesn't report when it is done, and no new runtime would show it
NOT_RESTARTED = "not-restarted"  # the code of a user's own command that failed and restarted nothing
UNRESTORED = "not-restored"  # the code of a file that still has what it had for a reload


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
        if verb == "reload" and self.daemon.process is not None and self._takes_signal:
            return ()
        if self.command:
            return _split(self.command)
        return (*self._systemctl, verb, self.daemon.unit or "") if self._systemd() else ()

    @property
    def _takes_signal(self) -> bool:
        """Whether the reload signal must be sent to dockerd itself: without systemd, or where the unit can't.

        The snap's unit has no ExecReload, and a user's unit sends the signal to RootlessKit.
        """
        return bool(self.daemon.user) or self.daemon.manager == "snap" or not self._systemd()

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

    def require(self, verb: str, hint: str = "") -> None:
        """`PreconditionError` if it can't be restarted or reloaded here: raised before any write."""
        if not self.shown(verb):
            raise PreconditionError(
                f"{self.daemon.manager or self.daemon.name} must be {verb}ed for this,"
                " and systemd doesn't run it on this node",
                hint=hint or "pass the command with --restart-command 'COMMAND', or only write: --no-restart",
                code="no-systemd",
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
            untouched = verb == "restart" and not answer.timed_out and self._is_same_process()
            raise DaemonError(
                f"{self.shown(verb)} {what}" + (f": {output[-2000:]}" if output else ""),
                hint="correct --restart-command, then run this again" if untouched else self.look,
                code=NOT_RESTARTED if untouched else "",
            )
        return self.host.monotonic() - started

    def _is_same_process(self) -> bool:
        """Whether the user's own command left the daemon running as it was."""
        daemon = self.find() if self.command else None
        return daemon is not None and daemon.process is not None and daemon.process == self.daemon.process

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


def restarter_of(engine: Engine, command: str) -> Restarter:
    """How `engine` is restarted: by the user's own `command`, else as this node does it."""
    finder = find.FINDERS[find.name_of_daemon(engine.daemon)]
    again = functools.partial(finder, engine.host, engine.daemon.config_path)
    return Restarter(engine.host, engine.daemon, again, command)


def reload_undo(edits: tuple[FileEdit, ...], restarter: Restarter) -> None:
    """Let a daemon reload the old files; `undo` texts spell out what it would otherwise remember."""
    host = restarter.host
    for edit in edits:
        if edit.undo is not None:
            write(host, edit, edit.undo, edit.before)
    reload_error = ""
    try:
        restarter.perform("reload")
        host.sleep(RELOAD_SECONDS)
    except GpunodeError as error:
        reload_error = f"; {error.message}"
        raise
    finally:  # also where the reload fails
        for edit in edits:
            if edit.undo is not None:
                _restore_after_reload(host, edit, reload_error)


def _restore_after_reload(host: Host, edit: FileEdit, reload_error: str) -> None:
    try:
        write(host, edit, edit.before, edit.undo)
    except GpunodeError as error:
        raise ConfigError(
            f"{edit.path} was not restored after the reload: {error.message}{reload_error}",
            hint=error.hint,
            code=UNRESTORED,
        ) from error


# Recovery of a run that was killed: its files are restored and its daemon reads them again.


def _restart_after_recovery(engine: Engine, restarter: Restarter, verb: str) -> None:
    """A reload is rolled back by a reload: a restart of Docker would stop its containers.

    A failed run does the same in `apply._restart_with_old_files`, with the edits of its plan.
    """
    if verb == "wait":
        return  # the program that reads the files next reads the old ones
    edits = engine.reload_edits() if verb == "reload" and engine.query_if_up() is not None else ()
    if edits:
        reload_undo(edits, restarter)
    else:
        restarter.perform("restart")


def engine_restart(host: Host, progress: Progress, request: Request | None = None) -> Restart:
    """Lets the engine of a killed run read the files again, once they are restored.

    The request's restart command is only used for the engine that the request names; another one is restarted
    with the command of the killed run. `DaemonError` if the engine doesn't restart.
    """

    def restart(entry: Entry) -> None:
        if entry.state != "applied" or entry.verb in ("", "none") or not host.live:
            return  # the daemon never read the new files
        name = find.name_of(entry)
        try:
            engine = find.engine(host, name, entry.config, "", entry.socket)
        except GpunodeError as error:  # an engine that was removed since must not make every later run fail
            progress.note(f"{name} could not be restarted: {error.message}")
            return
        command = entry.restart_command
        if request is not None and request.restart_command and _is_named(engine, request):
            command = request.restart_command
        restarter = restarter_of(engine, command)
        try:
            with progress.step(f"restarting {name} with its previous files"):
                _restart_after_recovery(engine, restarter, entry.verb)
        except GpunodeError as error:
            raise DaemonError(
                f"{name} could not be restarted: {error.message}", hint=error.hint or restarter.look
            ) from error

    return restart


def _is_named(engine: Engine, request: Request) -> bool:
    """Whether a request is for this engine; false if it can't be resolved, which the run itself reports."""
    try:
        engines = find.engines(engine.host, request)
    except GpunodeError:
        return False
    return any(candidate.daemon.config_path == engine.daemon.config_path for candidate in engines)
