"""The one transaction of changes to the node: the state after a failure of its last steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gpunode.commands import setup_steps
from gpunode.errors import ConfigError, DaemonError, NotRestoredError, PreconditionError, RolledBackError
from gpunode.host import Host, transaction
from gpunode.host.journal import Entry, FileEdit, Journal, JournalledFile
from gpunode.host.process import Completed
from gpunode.host.transaction import (
    Transaction,
    attempt,
    begin,
    change_files,
    recover,
    roll_back_entry,
    uninterrupted,
)
from tests.silent import SilentProgress

DEBIAN = {"engine": "", "units": [], "packageManager": "apt", "packages": {"a": ""}, "stays": True}


@pytest.mark.parametrize("edits", [(), (FileEdit("/etc/a", None, b"new"),)], ids=["no files", "a file"])
def test_installed_packages_stay_in_the_journal_if_the_commit_fails(
    edits: tuple[FileEdit, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    host = Host(tmp_path, environ={})
    mark = Journal.mark

    def full_disk(journal: Journal, entry: Entry, state: str) -> Entry:
        if state == "committed":
            raise OSError(28, "No space left on device")
        return mark(journal, entry, state)

    def nothing(_entry: Entry) -> None:
        """No daemon has to restart."""

    with begin(host, nothing) as (journal, _):
        change = Transaction(journal, "toolkit", edits, DEBIAN)
        monkeypatch.setattr(Journal, "mark", full_disk)
        with pytest.raises(OSError, match="No space left"):
            change.run(change.open)
        monkeypatch.undo()
    with begin(host, nothing) as (journal, notes):
        (entry,) = journal.entries()
    assert entry.state == "committed" and len(notes) == 1
    assert [host.read_bytes(edit.path) for edit in edits] == [b"new" for _ in edits]


A, B = FileEdit("/etc/a", b"old", b"new"), FileEdit("/etc/b", b"old", b"new")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/a").write_bytes(b"old")
    (tmp_path / "etc/b").write_bytes(b"old")
    return Host(tmp_path, environ={})


def nothing(_entry: Entry) -> None:
    """No daemon has to restart."""


def contents(host: Host) -> list[bytes | None]:
    return [host.read_bytes(edit.path) for edit in (A, B)]


def states(host: Host) -> list[str]:
    return [entry.state for entry in Journal.of(host).entries()]


def committed(host: Host) -> Entry:
    """An entry of both files, written and committed."""
    journal = Journal.of(host)
    change = Transaction(journal, "test", (A, B), {"engine": "docker", "verb": "restart"})
    change.run(lambda: None)
    return journal.entries()[-1]


def killed(run: Callable[[], object]) -> None:
    """Run in a child that `die` kills."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["between the files", "before the daemon restarts"])
def test_killed_rollback_of_a_committed_change_is_finished_by_the_next_run(
    host: Host, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    journal, entry = Journal.of(host), committed(host)
    restore_file = Journal._restore_file

    def killed_at_b(self: Journal, entry: Entry, file: JournalledFile, edit: FileEdit) -> None:
        if file.path == B.path:
            die()
        restore_file(self, entry, file, edit)

    with monkeypatch.context() as patch:
        if when == "between the files":
            patch.setattr(Journal, "_restore_file", killed_at_b)
        killed(lambda: roll_back_entry(journal, entry, die))
    assert contents(host)[0] == b"old" and states(host) == ["applied"]
    restarted: list[str] = []
    recover(host, journal, lambda one: restarted.append(one.state))
    assert (contents(host), states(host), restarted) == ([b"old", b"old"], ["rolled-back"], ["applied"])


def test_damaged_backup_leaves_a_committed_change_unchanged(host: Host) -> None:
    journal, entry = Journal.of(host), committed(host)
    host.write_atomic(f"{entry.directory}/01-b", b"damaged")
    with pytest.raises(ConfigError, match="damaged"):
        roll_back_entry(journal, entry, nothing)
    assert (contents(host), states(host)) == ([b"new", b"new"], ["committed"])


def fail() -> None:
    raise DaemonError("no start")


def test_files_changed_by_others_are_named_and_no_rollback_is_claimed(host: Host) -> None:
    def activate() -> None:
        host.write_atomic(A.path, b"theirs")
        fail()

    with pytest.raises(NotRestoredError, match="no start; rolled back, but /etc/a was changed") as caught:
        change_files(host, "test", lambda: (A, B), nothing, activate=activate)
    assert caught.value.exit_code == 1 and caught.value.hint.endswith("00-a /etc/a")
    assert contents(host) == [b"theirs", b"old"]


def test_failing_rollback_keeps_the_first_error_and_names_the_next_command(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_journal: Journal, _entry: Entry) -> tuple[str, ...]:
        raise PreconditionError("can't write /etc/a: it is immutable")

    monkeypatch.setattr(Journal, "restore_files", refuse)
    with pytest.raises(NotRestoredError, match="no start; not rolled back: can't write /etc/a") as caught:
        change_files(host, "test", lambda: (A, B), nothing, activate=fail)
    (entry,) = Journal.of(host).entries()
    assert caught.value.exit_code == 1
    assert caught.value.hint == f"correct it, then run: gpunode --root {host.root} rollback {entry.id}"
    assert contents(host) == [b"new", b"new"] and entry.state == "applied"


def test_complete_rollback_is_reported(host: Host) -> None:
    with pytest.raises(RolledBackError, match="no start; the files are as before"):
        change_files(host, "test", lambda: (A, B), nothing, activate=fail)
    assert contents(host) == [b"old", b"old"]


@pytest.mark.parametrize("created", [False, True])
def test_file_changed_during_the_restore_is_kept(
    host: Host, monkeypatch: pytest.MonkeyPatch, created: bool
) -> None:
    if created:
        host.remove(B.path)
    journal = Journal.of(host)
    second = FileEdit(B.path, None if created else b"old", b"new")
    change = Transaction(journal, "test", (A, second), {})
    change.run(lambda: None)
    write = Host.write_atomic

    def race(self: Host, path: str, data: bytes, **how: Any) -> None:
        write(self, path, data, **how)
        if path == A.path:
            write(self, B.path, b"theirs")

    monkeypatch.setattr(Host, "write_atomic", race)
    report = roll_back_entry(journal, change.open(), nothing)
    assert contents(host) == [b"old", b"theirs"]
    assert list(report.foreign) == [B.path]


def not_up(_entry: Entry) -> None:
    raise DaemonError("docker could not be restarted: bad key", hint="see why: journalctl -u docker")


def left_by_a_killed_run(host: Host) -> Journal:
    journal = Journal.of(host)
    journal.mark(journal.begin("test", [A], {"engine": "docker", "verb": "restart"}), "applied")
    host.write_atomic(A.path, b"new")
    return journal


def test_failed_restart_in_the_recovery_is_retried_by_the_next_run(host: Host) -> None:
    journal = left_by_a_killed_run(host)
    with begin(host, not_up) as (_, notes):
        (entry,) = journal.entries()
    assert (contents(host)[0], states(host)) == (b"old", ["applied"])
    assert "journalctl -u docker" in notes[1] and notes[2].endswith(
        f": gpunode --root {host.root} rollback {entry.id}"
    )
    restarted: list[str] = []
    recover(host, journal, lambda one: restarted.append(one.id))
    assert (restarted, states(host)) == ([entry.id], ["rolled-back"])


def test_new_change_of_the_file_ends_the_recovery_and_is_kept(host: Host) -> None:
    left_by_a_killed_run(host)
    changed = change_files(host, "test", lambda: (A,), not_up)
    assert changed.journal and states(host) == ["rolled-back", "committed"]
    with begin(host, not_up) as (_, notes):
        assert notes == ()
    assert contents(host)[0] == b"new"


def test_without_a_restart_a_new_change_is_not_undone_and_the_next_run_says_so_once(host: Host) -> None:
    """The user has not confirmed a restart with the new files; a restart may stop containers."""
    journal = left_by_a_killed_run(host)
    change_files(host, "test", lambda: (A,), not_up, context={"verb": "none"})
    assert states(host) == ["applied", "committed"]
    (name, _) = (entry.id for entry in journal.entries())
    rest = "later runs changed its files, which stay; docker may not have read them yet: see gpunode doctor"
    with begin(host, not_up, dry_run=True) as (_, notes):
        assert notes == (f"{name} runs now or was killed half-way; if so, {rest}",)
    with begin(host, not_up) as (_, notes):
        assert notes == (f"an earlier run was killed half-way ({name}); {rest}",)
    assert (contents(host)[0], states(host)) == (b"new", ["rolled-back", "committed"])
    with begin(host, not_up) as (_, notes):
        assert notes == ()


UNIT = "gpunode-device-plugin.service"


class Systemd(Host):
    """Responds as a systemd that knows one unit."""

    enabled = active = False
    refuses = ""

    def run(self, argv: Sequence[str], **_: object) -> Completed:
        verb, now = argv[1], "--now" in argv
        if verb == self.refuses:
            return Completed(tuple(argv), 1, "", f"Failed to {verb} unit.")
        if verb in ("enable", "disable"):
            self.enabled = verb == "enable"
        if verb in ("start", "stop") or now:
            self.active = verb in ("start", "enable")
        answers = {"is-enabled": "enabled" if self.enabled else "disabled"}
        answers["is-active"] = "active" if self.active else "inactive"
        return Completed(tuple(argv), 0, answers.get(verb, ""), "")


@pytest.mark.parametrize("after", [b"new", None], ids=["updated", "removed"])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("active", [False, True])
def test_failed_change_restores_the_enabled_and_active_state_of_a_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bytes | None, enabled: bool, active: bool
) -> None:
    monkeypatch.setattr(transaction, "_acts", lambda _host: True)
    host = Systemd(tmp_path, environ={})
    host.enabled, host.active = enabled, active
    edit = FileEdit(f"/etc/systemd/system/{UNIT}", b"old", after)
    host.make_dirs("/etc/systemd/system")
    host.write_atomic(edit.path, b"old")

    def activate() -> None:
        assert (host.enabled, host.active) == ((True, True) if after else (False, False))
        fail()

    with pytest.raises(RolledBackError):
        change_files(host, "test", lambda: (edit,), nothing, named_units=(UNIT,), activate=activate)
    assert (host.enabled, host.active) == (enabled, active)
    assert host.read_bytes(edit.path) == b"old"


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("ends", [fail, die], ids=["failed", "killed"])
def test_unit_without_a_file_that_a_change_stopped_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[[], None], enabled: bool, active: bool
) -> None:
    """A unit of gpunode's package: its file stays when a reset stops it."""
    monkeypatch.setattr(transaction, "_acts", lambda _host: True)
    host = Systemd(tmp_path, environ={})
    host.enabled, host.active = enabled, active

    def activate() -> None:
        host.run(("systemctl", "disable", "--now", UNIT))
        ends()

    def change() -> None:
        change_files(host, "test", lambda: (), nothing, stopped_units=(UNIT,), activate=activate)

    if ends is fail:
        with pytest.raises(RolledBackError):
            change()
    else:
        killed(change)
        host.enabled = host.active = False  # what the other process has done
        recover(host, Journal.of(host), nothing)
    assert (host.enabled, host.active, states(host)) == (enabled, active, ["rolled-back"])


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("active", [False, True])
def test_plugin_without_gpus_restores_the_enabled_and_active_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool, active: bool
) -> None:
    monkeypatch.setattr(transaction, "_acts", lambda _host: True)
    host = Systemd(tmp_path, environ={})
    host.enabled, host.active = enabled, active
    with pytest.raises(RolledBackError, match="took no GPUs"):
        setup_steps._enable(host, 0.0, SilentProgress())
    assert (host.enabled, host.active) == (enabled, active)


@contextmanager
def late_shield() -> Iterator[None]:
    """A signal arrives between the failure and the shield's own handlers."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    with uninterrupted():
        yield


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("do", "error"), [(interrupt, KeyboardInterrupt), (fail, DaemonError)])
def test_signal_right_after_the_failure_does_not_prevent_the_undo(
    do: Callable[[], None], error: type[BaseException]
) -> None:
    undone: list[str] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    try:
        with pytest.raises(error):
            attempt(
                lambda: attempt(do, lambda _: undone.append("inner"), late_shield),
                lambda _: undone.append("outer"),
                late_shield,
            )
        after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (undone, after) == (["inner", "outer"], handlers)


def test_signal_handler_that_does_not_raise_runs_for_each_signal() -> None:
    seen: list[int] = []

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, lambda number, _: seen.append(number))
    try:
        attempt(twice, lambda _: None)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIGHUP, signal.SIGHUP]


def test_an_interruption_that_was_caught_does_not_hide_the_next_one() -> None:
    undone: list[BaseException] = []

    def twice() -> None:
        with suppress(KeyboardInterrupt):
            interrupt()
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        attempt(twice, undone.append)
    assert len(undone) == 1


def test_a_signal_while_an_interruption_ends_the_work_is_ignored() -> None:
    undone: list[BaseException] = []
    finished: list[bool] = []

    @contextmanager
    def cleaning() -> Iterator[None]:
        try:
            yield
        finally:
            interrupt()
            finished.append(True)

    def work() -> None:
        with cleaning():
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        attempt(work, undone.append)
    assert finished == [True] and len(undone) == 1


def test_unit_that_does_not_stop_is_named_and_no_rollback_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "_acts", lambda _host: True)
    host = Systemd(tmp_path, environ={})
    host.refuses = "stop"
    edit = FileEdit(f"/etc/systemd/system/{UNIT}", b"old", b"new")
    host.make_dirs("/etc/systemd/system")
    host.write_atomic(edit.path, b"old")
    with pytest.raises(NotRestoredError, match=f"no start; rolled back, but systemctl stop {UNIT}") as caught:
        change_files(host, "test", lambda: (edit,), nothing, named_units=(UNIT,), activate=fail)
    assert caught.value.hint == f"see why: systemctl status {UNIT}"
    host.active = False
    with pytest.raises(NotRestoredError, match=f"rolled back, but systemctl stop {UNIT} failed"):
        setup_steps._enable(host, 0.0, SilentProgress())
