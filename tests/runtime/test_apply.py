"""Applying a plan with a daemon that misbehaves.

The engine is a fake: no real one can be made to stay down, to come back without its runtime, or to be
interrupted at a chosen moment. tests/integration does the same with real ones if possible.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpunode.errors import (
    ConfigError,
    DaemonError,
    GpunodeError,
    NotRestoredError,
    PreconditionError,
    RolledBackError,
)
from gpunode.facts.daemons import Daemon
from gpunode.host import Host, transaction
from gpunode.host.journal import FileEdit, Journal
from gpunode.host.transaction import recover, uninterrupted
from gpunode.runtime import apply as apply_module
from gpunode.runtime import restart as restart_module
from gpunode.runtime.apply import EngineJob, apply, roll_back_all
from gpunode.runtime.docker import DockerEngine
from gpunode.runtime.engine import Active, DesiredConfig, Engine, Handler, Plan, Request, UnwantedConfig
from gpunode.runtime.restart import Restarter
from gpunode.runtime.workflow import refuse
from tests.silent import SilentProgress

WANTED = DesiredConfig((Handler("nvidia", "/n"),))
BEFORE = Active(("runc",), "runc")
AFTER = Active(("runc", "nvidia"), "runc", {"nvidia": "/n"})
DAEMON = Daemon("docker", None, (20, 10), "/etc/docker/daemon.json", "test", "/none", None)


@dataclass(frozen=True)
class FakeEngine(Engine):
    """Responds as configured, one response per query, the last one for ever."""

    answers: list[Active | DaemonError] = field(default_factory=list)

    def query(self) -> Active:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, DaemonError):
            raise answer
        return answer

    def query_if_up(self) -> Active | None:
        with suppress(DaemonError):  # also where the host's root isn't /
            return self.query()
        return None

    def plan(self, desired: DesiredConfig, active: Active | None) -> Plan:
        raise AssertionError("apply is given its plan")

    def plan_removal(self, unwanted: UnwantedConfig, active: Active | None) -> Plan:
        raise AssertionError("apply is given its plan")

    def plan_edits(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        raise AssertionError("apply is given its plan")

    def validate(self, plan: Plan, expected: DesiredConfig | None) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class FakeRestarter(Restarter):
    """Counts restarts; `fails` is called with the number of each."""

    fails: Callable[[int], None] = lambda number: None
    verbs: list[str] = field(default_factory=list)

    def shown(self, verb: str) -> str:
        return f"{verb} it"

    def perform(self, verb: str) -> float:
        self.verbs.append(verb)
        self.fails(len(self.verbs))
        return 0.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_module, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(apply_module, "_SETTLE_SECONDS", 0.2)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "etc/docker").mkdir(parents=True)
    (tmp_path / "etc/docker/daemon.json").write_bytes(b"old")
    return Host(tmp_path, environ={})


def job(host: Host, answers: list[Active | DaemonError], fails: Callable[[int], None]) -> EngineJob:
    edit = FileEdit("/etc/docker/daemon.json", b"old", b"new")
    plan = Plan("docker", (edit,), "restart")
    engine = FakeEngine(host, DAEMON, answers=answers)
    restarter = FakeRestarter(host, DAEMON, lambda: DAEMON, fails=fails)
    return EngineJob(engine, plan, "configure-runtime", lambda a: a.has(WANTED), restarter, SilentProgress())


def never(number: int) -> None:
    """No restart fails."""


def first(error: BaseException) -> Callable[[int], None]:
    def fails(number: int) -> None:
        if number == 1:
            raise error

    return fails


def content(host: Host) -> bytes | None:
    return host.read_bytes("/etc/docker/daemon.json")


def states(host: Host) -> list[str]:
    return [entry.state for entry in Journal.of(host).entries()]


def test_confirmed_change_is_committed(host: Host) -> None:
    applied = apply(job(host, [AFTER], never), Journal.of(host))
    assert applied.performed and applied.active == AFTER
    assert (content(host), states(host)) == (b"new", ["committed"])


def test_slow_daemon_is_waited_for(host: Host) -> None:
    down = DaemonError("not yet")
    applied = apply(job(host, [down, down, BEFORE, AFTER], never), Journal.of(host))
    assert applied.active == AFTER


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "make",
    [
        lambda host: job(host, [BEFORE], never),
        lambda host: job(host, [BEFORE], first(DaemonError("failed with status 1: bad key"))),
        lambda host: job(host, [BEFORE], first(RuntimeError("bug"))),
        lambda host: job(host, [BEFORE], first(KeyboardInterrupt())),
        lambda host: job(host, [BEFORE], first(SystemExit(1))),
    ],
    ids=["without the runtime", "restart fails", "bug", "Ctrl-C", "SIGTERM"],
)
def test_any_failure_restores_and_restarts_again(host: Host, make: Callable[[Host], EngineJob]) -> None:
    made = make(host)
    with pytest.raises((RolledBackError, RuntimeError, KeyboardInterrupt, SystemExit)) as caught:
        apply(made, Journal.of(host))
    assert (content(host), states(host)) == (b"old", ["rolled-back"])
    assert isinstance(made.restarter, FakeRestarter) and made.restarter.verbs == ["restart", "restart"]
    if isinstance(caught.value, RolledBackError):
        assert caught.value.exit_code == 4 and "runs with them" in caught.value.message


def test_reload_that_fails_twice_restores_the_file(host: Host) -> None:
    """The file that dockerd reads to drop the runtimes exists only for its reload."""

    def fails(number: int) -> None:
        raise DaemonError("no reload")

    made = job(host, [BEFORE], fails)
    edit = FileEdit("/etc/docker/daemon.json", b"old", b"new", undo=b"forget")
    made = dataclasses.replace(made, plan=Plan("docker", (edit,), "reload"))
    with pytest.raises(NotRestoredError, match="but docker did not read the old files again") as caught:
        apply(made, Journal.of(host))
    assert caught.value.message.count("no reload") == 1 and caught.value.exit_code == 1
    assert (content(host), states(host)) == (b"old", ["rolled-back"])


@pytest.mark.usefixtures("quick")
def test_daemon_that_stays_stopped_is_reported(host: Host) -> None:
    with pytest.raises(NotRestoredError, match="but docker does not run") as caught:
        apply(job(host, [DaemonError("down")], never), Journal.of(host))
    assert caught.value.message.count("down") == 1
    assert (caught.value.exit_code, content(host)) == (1, b"old")
    assert caught.value.hint.startswith("see why")
    assert "as before" not in caught.value.message


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [DaemonError("no start"), KeyboardInterrupt(), RuntimeError("bug")])
def test_file_changed_by_others_is_named_and_not_reported_as_restored(
    host: Host, error: BaseException
) -> None:
    def fails(number: int) -> None:
        host.write_atomic("/etc/docker/daemon.json", b"theirs")
        first(error)(number)

    with pytest.raises(NotRestoredError) as caught:
        apply(job(host, [BEFORE], fails), Journal.of(host))
    assert (caught.value.exit_code, content(host)) == (1, b"theirs")
    assert "rolled back, but /etc/docker/daemon.json was changed by another" in caught.value.message
    assert "as before" not in caught.value.message
    diff = caught.value.hint.removeprefix("look at it: ").split()
    assert diff[0] == "diff" and host.read_bytes(diff[1]) == b"old" and diff[2] == "/etc/docker/daemon.json"


def test_file_changed_since_it_was_read_is_kept(host: Host) -> None:
    made = job(host, [AFTER], never)
    host.write_atomic("/etc/docker/daemon.json", b"theirs")
    with pytest.raises(ConfigError, match="changed"):
        apply(made, Journal.of(host))
    assert (content(host), states(host)) == (b"theirs", ["rolled-back"])
    assert isinstance(made.restarter, FakeRestarter) and made.restarter.verbs == []


def test_recovery_restores_and_restarts_after_a_killed_run(host: Host) -> None:
    journal = Journal.of(host)
    edit = FileEdit("/etc/docker/daemon.json", b"old", b"new")
    journal.mark(journal.begin("configure-runtime", [edit], {}), "applied")
    host.write_atomic(edit.path, b"new")
    seen: list[str] = []
    notes = recover(host, journal, lambda entry: seen.append(entry.state))
    assert seen == ["applied"] and "killed half-way" in notes[0]
    assert (content(host), states(host)) == (b"old", ["rolled-back"])
    assert recover(host, journal, lambda entry: seen.append("again")) == () and len(seen) == 1


def test_running_containers_need_yes_unless_live_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    plan = Plan("docker", (), "restart", "why")
    restarter = FakeRestarter(host, DAEMON, lambda: DAEMON)
    engine = DockerEngine(host, DAEMON)
    busy: dict[str, Any] = {"handlers": (), "default": "runc", "running_containers": 2}
    with pytest.raises(PreconditionError, match=r"2 running container") as caught:
        refuse(engine, plan, Active(**busy), restarter, Request())
    assert caught.value.exit_code == 3 and "--yes" in caught.value.hint
    refuse(engine, plan, Active(**busy), restarter, Request(yes=True))
    refuse(engine, plan, Active(**busy, live_restore=True), restarter, Request())
    refuse(engine, Plan("docker", (), "reload", "why"), Active(**busy), restarter, Request())
    questions: list[str] = []

    def decline(question: str) -> bool:
        questions.append(question)
        return False

    for request in (Request(confirm=decline), Request(confirm=decline, dry_run=True)):
        with pytest.raises(PreconditionError, match=r"2 running container"):
            refuse(engine, plan, Active(**busy), restarter, request)
    assert questions == ["Restart docker and stop 2 containers?"]
    refuse(engine, plan, Active(**busy), restarter, Request(confirm=lambda _question: True))


def test_missing_root_is_refused_before_any_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gpunode.commands import configure_runtime

    monkeypatch.setattr("os.geteuid", lambda: 1000)
    host = Host(environ={"GPUNODE_STATE_DIR": str(tmp_path / "state")})
    with pytest.raises(PreconditionError, match="needs root"):
        configure_runtime.run(host, Request(("docker",)), SilentProgress())
    assert not (tmp_path / "state").exists()


def test_signals_are_deferred_and_a_new_daemon_inherits_no_ignored_ones() -> None:
    """A rollback restarts the daemon inside this; an ignored signal would stay ignored in it (signal(7))."""
    host = Host()
    with uninterrupted():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        status = host.run(["cat", "/proc/self/status"], timeout=30.0).stdout
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    assert not ignored & sum(1 << number - 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


def test_engine_that_cannot_be_rolled_back_does_not_stop_the_others(host: Host, quick: None) -> None:
    journal, done = Journal.of(host), []
    for name in ("first", "second"):
        path = f"/etc/docker/{name}"
        host.write_atomic(path, b"old")
        made = job(host, [AFTER], never)
        made = dataclasses.replace(made, plan=Plan("docker", (FileEdit(path, b"old", b"new"),), "restart"))
        done.append((made, apply(made, journal)))
    copy = f"{journal.directory}/{done[1][1].journal}/00-second"
    host.write_atomic(copy, b"damaged")
    with pytest.raises(
        NotRestoredError, match="the third is refused; rolled back, but docker was not"
    ) as caught:
        roll_back_all(done, journal, ConfigError("the third is refused"))
    assert caught.value.exit_code == 1 and "rm -r" in caught.value.hint
    assert (host.read_bytes("/etc/docker/first"), states(host)) == (b"old", ["rolled-back", "committed"])


@pytest.mark.parametrize("error", [ConfigError("refused"), NotRestoredError("docker does not run")])
def test_earlier_engine_with_a_foreign_edit_is_not_reported_as_rolled_back(
    host: Host, error: GpunodeError
) -> None:
    made = job(host, [AFTER], never)
    done = [(made, apply(made, Journal.of(host)))]
    host.write_atomic("/etc/docker/daemon.json", b"theirs")
    with pytest.raises(NotRestoredError, match=r"/etc/docker/daemon\.json was changed") as caught:
        roll_back_all(done, Journal.of(host), error)
    assert error.message in caught.value.message and "diff " in caught.value.hint


def test_unrestored_engine_does_not_stop_the_rollback_of_the_others(host: Host) -> None:
    made = job(host, [AFTER], never)
    done = [(made, apply(made, Journal.of(host)))]
    roll_back_all(done, Journal.of(host), NotRestoredError("crio does not run"))
    assert content(host) == b"old"


def test_first_engine_rolled_back_for_the_second_counts_as_rolled_back(host: Host) -> None:
    made = job(host, [AFTER], never)
    done = [(made, apply(made, Journal.of(host)))]
    with pytest.raises(RolledBackError, match="refused"):
        roll_back_all(done, Journal.of(host), ConfigError("the second is refused"))
    assert content(host) == b"old"


def test_daemon_that_fails_without_any_change_names_its_log(host: Host, quick: None) -> None:
    made = job(host, [DaemonError("can't connect")], never)
    made = dataclasses.replace(made, plan=Plan("docker", (), "restart"))
    with pytest.raises(DaemonError, match="can't connect") as caught:
        apply(made, Journal.of(host))
    assert "log of docker" in caught.value.hint and states(host) == []


def test_file_not_restored_after_a_failed_reload_is_named_with_both_errors(
    host: Host, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = FileEdit("/etc/docker/daemon.json", b"old", b"new", undo=b"forget")
    write = transaction.write

    def full(host: Host, edit: FileEdit, content: bytes | None, expect: bytes | None) -> None:
        if expect == b"forget":
            raise ConfigError("no space left on device")
        write(host, edit, content, expect)

    def fails(number: int) -> None:
        raise DaemonError(f"reload {number} failed")

    monkeypatch.setattr(restart_module, "write", full)
    made = dataclasses.replace(job(host, [BEFORE], fails), plan=Plan("docker", (edit,), "reload"))
    with pytest.raises(NotRestoredError) as caught:
        apply(made, Journal.of(host))
    message = caught.value.message
    assert (
        "daemon.json was not restored after the reload: no space left on device; reload 2 failed" in message
    )
    assert "the files are as before" not in message
