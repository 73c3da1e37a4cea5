"""Execution of a plan: journal, write, restart or reload the daemon, query it; and a rollback if any of it
fails."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpunode.errors import (
    ConfigError,
    DaemonError,
    GpunodeError,
    NotRestoredError,
    PreconditionError,
    RolledBackError,
    UsageError,
)
from gpunode.facts.daemons import Daemon
from gpunode.facts.registry import DISTRIBUTIONS
from gpunode.facts.users import places
from gpunode.host import Host
from gpunode.host.journal import Entry, FileEdit, Journal
from gpunode.host.transaction import Restart, Transaction, not_restored, roll_back_entry, write
from gpunode.output.result import Progress
from gpunode.runtime import find
from gpunode.runtime.engine import Active, Engine, Plan, Request

_ANSWER_SECONDS = 30.0
_RELOAD_SECONDS = 0.5  # a reload doesn't report when it is done, and no new runtime would show it
_UNRESTORED = "not-restored"  # the code of a file that still has what it had for a reload
WITHOUT_CRI = "cri-disabled"  # the code of a containerd that runs and has no CRI
_SETTLE_SECONDS = 8.0  # a daemon that answers but lacks the runtime may still be reading its files


# Restart or reload of a daemon, so that it reads its configuration, and the command for it on this node.

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


# Carrying out a plan.


class ApplyOutcome(NamedTuple):
    """The result. `seconds` is the restart's duration; `active` is None if the daemon wasn't queried."""

    journal: str = ""
    performed: bool = False
    seconds: float = 0.0
    active: Active | None = None


@dataclass(frozen=True)
class EngineJob:
    """A plan with everything needed to carry it out and to roll it back.

    `is_active` judges the daemon's answer. Without a `restarter` only files are written.
    """

    engine: Engine
    plan: Plan
    operation: str
    is_active: Callable[[Active], bool]
    restarter: Restarter | None
    progress: Progress
    query: bool = True
    context: Mapping[str, Any] = field(default_factory=dict)


def apply(job: EngineJob, journal: Journal) -> ApplyOutcome:
    """Carry the plan out under the lock that the caller holds.

    `RolledBackError` if the daemon doesn't run with the new files and everything was rolled back, else
    `NotRestoredError`. An interruption rolls back as well and is raised again.
    """
    if not job.plan.changed:
        try:
            seconds, active = _activate(job)
        except DaemonError as error:
            look = job.restarter.look if job.restarter else ""
            raise DaemonError(error.message, hint=error.hint or look, code=error.code) from error
        return ApplyOutcome("", job.restarter is not None, seconds, active)
    log: list[str] = []

    def restart(entry: Entry) -> None:
        log.append(job.restarter.last_words() if job.restarter else "")
        _restart_with_old_files(job, entry)

    change = Transaction(journal, job.operation, job.plan.changed, job.context, restart)
    try:
        seconds, active = change.run(lambda: _activate(job))
    except NotRestoredError as error:
        raise NotRestoredError("\n".join(filter(None, (error.message, *log))), hint=error.hint) from error
    except KeyboardInterrupt:
        if change.rolled_back:
            job.progress.note("interrupted: the files are as before")
        raise
    except GpunodeError as error:
        if isinstance(error, ConfigError) or not change.rolled_back:
            raise
        message = f"{error}; the files are as before and {job.plan.engine} runs with them"
        raise RolledBackError(
            "\n".join(filter(None, (message, *log))),
            hint="correct what the daemon complains about, then run this again",
        ) from error
    return ApplyOutcome(change.open().id, job.restarter is not None, seconds, active)


def _activate(job: EngineJob) -> tuple[float, Active | None]:
    """Restart or reload, and wait until the daemon reports the new configuration."""
    if job.restarter is None or job.plan.verb == "none":
        return 0.0, None
    seconds = 0.0
    if job.plan.verb != "wait":
        with job.progress.step(job.restarter.shown(job.plan.verb)):
            seconds = job.restarter.perform(job.plan.verb)
    if not job.query:
        job.engine.host.sleep(_RELOAD_SECONDS if job.plan.verb == "reload" else 0.0)
        return seconds, None
    with job.progress.step(f"querying {job.plan.engine}"):
        patience = _ANSWER_SECONDS if job.plan.verb == "wait" else _SETTLE_SECONDS
        active = wait_for_answer(job.engine, job.is_active, patience)
    if not job.is_active(active):
        listed = ", ".join(active.handlers) or "none"
        raise DaemonError(
            f"{job.plan.engine} answers, but not with what was configured (runtimes: {listed};"
            f" default: {active.default or 'none'})",
            hint=job.restarter.look,
        )
    return seconds, active


def wait_for_answer(engine: Engine, good: Callable[[Active], bool], patience: float) -> Active:
    """The daemon's answer once it is `good`, else the last one. `DaemonError` if it doesn't answer.

    `patience` is for how many seconds it may answer without the desired configuration.
    """
    host = engine.host
    deadline = host.monotonic() + _ANSWER_SECONDS
    settle: float | None = None
    while True:
        try:
            active = engine.query()
        except DaemonError as error:
            if error.code == WITHOUT_CRI:  # an answer too, and one that rarely changes
                settle = settle or host.monotonic() + patience
            if host.monotonic() >= min(settle or deadline, deadline):
                raise
        else:
            settle = settle or host.monotonic() + patience
            if good(active) or host.monotonic() >= min(settle, deadline):
                return active
        host.sleep(0.1)


def roll_back_all(
    done: Sequence[tuple[EngineJob, ApplyOutcome]], journal: Journal, error: BaseException
) -> None:
    """Roll back the engines that were changed before the one that failed with `error`, the last first."""
    problems: list[GpunodeError] = []
    written = [(job, applied) for job, applied in done if applied.journal]
    for job, applied in reversed(written):
        engine = job.plan.engine
        try:
            entry = next(entry for entry in journal.entries() if entry.id == applied.journal)
            restart = functools.partial(_restart_with_old_files, job)
            remaining = roll_back_entry(journal, entry, restart).problems
        except GpunodeError as failure:  # the others must be rolled back all the same
            remaining = (GpunodeError(f"{engine} was not rolled back: {failure.message}", hint=failure.hint),)
        else:
            job.progress.note(f"{engine} was rolled back as well")
        problems += remaining
    if problems:
        raise not_restored(error, problems) from error
    if written and isinstance(error, GpunodeError) and not isinstance(error, _ROLLED_BACK):
        raise RolledBackError(str(error), hint=error.hint) from error


_ROLLED_BACK = (RolledBackError, NotRestoredError)


def _restart_with_old_files(job: EngineJob, entry: Entry) -> None:
    """Restart with the old files, if the daemon may have read the new ones.

    `GpunodeError` if it doesn't answer then.
    """
    if entry.state == "begun" or job.restarter is None or job.plan.verb == "none":
        return
    try:
        if job.plan.verb == "reload" and _answers(job.engine):
            reload_undo(job.plan.changed, job.restarter)
        elif job.plan.verb != "wait":
            job.restarter.perform("restart")
        wait_until_up(job.engine)
    except GpunodeError as error:
        if error.code == _UNRESTORED:
            raise
        state = "did not read the old files again" if _answers(job.engine) else "does not run"
        raise DaemonError(f"{job.plan.engine} {state}: {error.message}", hint=job.restarter.look) from error


def wait_until_up(engine: Engine) -> None:
    """Wait for any answer; a containerd with the CRI disabled counts as running too."""

    def answers() -> bool:
        try:
            engine.query()
        except DaemonError as error:
            return error.code == WITHOUT_CRI
        return True

    if not engine.host.wait_until(answers, _ANSWER_SECONDS, 0.1):
        engine.query()  # reports the reason


def reload_undo(edits: tuple[FileEdit, ...], restarter: Restarter) -> None:
    """Let a daemon reload the old files; `undo` texts spell out what it would otherwise remember."""
    host = restarter.host
    for edit in edits:
        if edit.undo is not None:
            write(host, edit, edit.undo, edit.before)
    reload_error = ""
    try:
        restarter.perform("reload")
        host.sleep(_RELOAD_SECONDS)
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
            code=_UNRESTORED,
        ) from error


def _answers(engine: Engine) -> bool:
    try:
        engine.query()
    except DaemonError:
        return False
    return True


# Recovery of a run that was killed: its files are restored and its daemon reads them again.


def restarter_of(engine: Engine, command: str) -> Restarter:
    """How `engine` is restarted: by the user's own `command`, else as this node does it."""
    finder = find.FINDERS[find.name_of_daemon(engine.daemon)]
    again = functools.partial(finder, engine.host, engine.daemon.config_path)
    return Restarter(engine.host, engine.daemon, again, command)


def query_if_up(engine: Engine) -> Active | None:
    """What the daemon reports now; None if it doesn't run, isn't reachable or must not be contacted."""
    if not engine.host.live:
        return None
    try:
        return engine.query()
    except DaemonError:
        return None


def _restart_after_recovery(engine: Engine, restarter: Restarter, verb: str) -> None:
    """A reload is rolled back by a reload: a restart of Docker would stop its containers."""
    if verb == "wait":
        return  # the program that reads the files next reads the old ones
    edits = engine.reload_edits() if verb == "reload" and query_if_up(engine) is not None else ()
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
