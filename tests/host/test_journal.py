"""The write-ahead journal: complete before the first write, and correct about files that others changed."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from gpunode.errors import ConfigError, UsageError
from gpunode.host import Host
from gpunode.host.journal import Entry, FileEdit, Journal, digest, lock_path


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "etc").mkdir()
    return Host(tmp_path, environ={})


def applied_edits(host: Host, *edits: FileEdit, operation: str = "configure-runtime") -> tuple[Journal, str]:
    """An entry for edits that are then carried out."""
    journal = Journal.of(host)
    for edit in edits:
        if edit.before is not None:
            host.write_atomic(edit.path, edit.before)
    entry = journal.begin(operation, edits, {"engine": "docker"})
    for edit in edits:
        if edit.after is None:
            host.remove(edit.path)
        else:
            host.write_atomic(edit.path, edit.after)
    return journal, entry.id


def test_entry_is_complete_and_private_before_any_write(host: Host, tmp_path: Path) -> None:
    (tmp_path / "etc/a").write_bytes(b"old")
    (tmp_path / "etc/a").chmod(0o640)
    entry = Journal.of(host).begin(
        "configure-runtime", [FileEdit("/etc/a", b"old", b"new")], {"engine": "docker"}
    )
    directory = tmp_path / entry.directory.lstrip("/")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "manifest.json").stat().st_mode) == 0o600
    manifest = json.loads((directory / "manifest.json").read_text())
    assert (manifest["state"], manifest["engine"]) == ("begun", "docker")
    assert manifest["files"][0]["mode"] == 0o640
    assert (directory / manifest["files"][0]["backup"]).read_bytes() == b"old"
    assert (tmp_path / "etc/a").read_bytes() == b"old"


def test_restore_writes_old_bytes_and_mode_and_removes_created_files(host: Host, tmp_path: Path) -> None:
    (tmp_path / "etc/a").write_bytes(b"old")
    (tmp_path / "etc/a").chmod(0o600)
    journal, name = applied_edits(host, FileEdit("/etc/a", b"old", b"new"), FileEdit("/etc/b", None, b"new"))
    (tmp_path / "etc/a").chmod(0o666)
    journal.restore_files(journal.unfinished()[0])
    assert (tmp_path / "etc/a").read_bytes() == b"old"
    assert stat.S_IMODE((tmp_path / "etc/a").stat().st_mode) == 0o600
    assert not (tmp_path / "etc/b").exists()
    assert journal.unfinished()[0].id == name


def test_removed_file_is_restored(host: Host, tmp_path: Path) -> None:
    journal, _ = applied_edits(host, FileEdit("/etc/a", b"old", None))
    assert not (tmp_path / "etc/a").exists()
    journal.restore_files(journal.unfinished()[0])
    assert (tmp_path / "etc/a").read_bytes() == b"old"


def test_later_edit_of_another_user_is_never_overwritten(host: Host, tmp_path: Path) -> None:
    journal, _ = applied_edits(host, FileEdit("/etc/a", b"old", b"new"))
    (tmp_path / "etc/a").write_bytes(b"theirs")
    entry = journal.unfinished()[0]
    assert journal.plan_undo([entry], recovery=True) == ((), ("/etc/a",))
    assert journal.restore_files(entry) == ("/etc/a",)
    assert (tmp_path / "etc/a").read_bytes() == b"theirs"


def test_interim_text_counts_as_ours(host: Host, tmp_path: Path) -> None:
    journal, _ = applied_edits(host, FileEdit("/etc/a", b"old", b"new", interim=b"between", undo=b"back"))
    for text in (b"between", b"back"):
        (tmp_path / "etc/a").write_bytes(text)
        journal.restore_files(journal.unfinished()[0])
        assert (tmp_path / "etc/a").read_bytes() == b"old"


def test_damaged_backup_is_refused(host: Host, tmp_path: Path) -> None:
    journal, _ = applied_edits(host, FileEdit("/etc/a", b"old", b"new"))
    entry = journal.unfinished()[0]
    (tmp_path / entry.directory.lstrip("/") / entry.files[0].backup).write_bytes(b"rot")
    with pytest.raises(ConfigError, match="damaged"):
        journal.restore_files(entry)
    assert (tmp_path / "etc/a").read_bytes() == b"new"


def test_last_committed_entry_is_the_default_without_rollbacks(host: Host) -> None:
    journal, first = applied_edits(host, FileEdit("/etc/a", b"1", b"2"))
    journal.mark(journal.unfinished()[0], "committed")
    _, second = applied_edits(host, FileEdit("/etc/a", b"2", b"3"))
    journal.mark(journal.unfinished()[0], "committed")
    applied_edits(host, FileEdit("/etc/a", b"3", b"2"), operation="rollback")
    journal.mark(journal.unfinished()[0], "committed")
    assert journal.committed().id == second
    assert journal.committed(first).id == first
    with pytest.raises(UsageError) as caught:
        journal.committed("no-such")
    assert first in caught.value.hint and second in caught.value.hint


def test_entries_of_one_second_keep_their_order(host: Host) -> None:
    names = []
    for operation in ("unconfigure-runtime", "configure-runtime", "configure-runtime"):
        journal, name = applied_edits(host, FileEdit("/etc/a", b"1", b"2"), operation=operation)
        journal.mark(journal.unfinished()[0], "committed")
        names.append(name)
    assert [entry.id for entry in Journal.of(host).entries()] == names
    assert len(set(names)) == 3


def test_only_finished_entries_are_pruned(host: Host) -> None:
    journal, oldest = applied_edits(host, FileEdit("/etc/a", b"1", b"2"))
    for _ in range(4):
        _, name = applied_edits(host, FileEdit("/etc/a", b"1", b"2"))
        journal.mark(next(entry for entry in journal.entries() if entry.id == name), "committed")
    journal.prune(keep=2)
    left = journal.entries()
    assert [entry.state for entry in left] == ["begun", "committed", "committed"]
    assert left[0].id == oldest


def test_entry_with_the_original_of_a_file_is_never_pruned(host: Host) -> None:
    journal, first = applied_edits(host, FileEdit("/etc/a", b"1", b"2"))
    journal.mark(journal.unfinished()[0], "committed")
    for number in range(5):
        applied_edits(host, FileEdit(f"/etc/b{number % 2}", b"1", b"2"))
        journal.mark(journal.unfinished()[0], "committed")
    journal.prune(keep=2)
    assert first in {entry.id for entry in journal.entries()}


def test_reset_by_which_a_kept_entry_is_not_active_is_kept_too(host: Host) -> None:
    journal = Journal.of(host)

    def commit(operation: str, context: dict[str, list[str]]) -> Entry:
        edit = FileEdit("/etc/a", b"1", b"2")
        return journal.mark(journal.begin(operation, (edit,), context), "committed")

    first = commit("toolkit-config", {})
    reset = commit("reset", {"undoes": [first.id]})
    later = [commit("toolkit-config", {}) for _ in range(4)]
    journal.prune(keep=2)
    assert [entry.id for entry in journal.entries()] == [first.id, reset.id, later[-1].id]
    assert [entry.id for entry in journal.active()] == [reset.id, later[-1].id]
    journal.mark(reset, "rolled-back")
    assert [entry.id for entry in journal.active()] == [first.id, later[-1].id]


def test_directory_without_a_manifest_is_not_an_entry(host: Host, tmp_path: Path) -> None:
    (tmp_path / "var/lib/gpunode/journal/20260101T000000Z-configure-runtime").mkdir(parents=True)
    assert Journal.of(host).entries() == ()
    with pytest.raises(UsageError, match="has no entries"):
        Journal.of(host).committed()


def test_state_directory_can_be_moved(tmp_path: Path) -> None:
    host = Host(tmp_path, environ={"GPUNODE_STATE_DIR": "/elsewhere"})
    assert Journal.of(host).directory == "/elsewhere/journal"
    assert lock_path(host) == "/elsewhere/lock"
    assert lock_path(Host(tmp_path, environ={})) == "/run/gpunode/lock"


def test_absent_and_empty_files_differ() -> None:
    assert digest(None) != digest(b"")


_FILE = {"path": "/etc/a", "existed": False, "mode": 420, "uid": 0, "gid": 0, "backup": ""}
_FILE |= {"before": "", "after": "1", "interim": []}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"files": 3}',
        '{"files": [' + "[" * 100_000,
        '{"state": "applied", "files": [3]}',
        '{"files": [{"path": "/etc/a"}]}',
        *(
            json.dumps({"state": "applied", "files": [{**_FILE, key: value}]})
            for key, value in (("directories", 3), ("directories", [3]), ("generated", 1), ("beside", "no"))
        ),
        *(
            json.dumps({"state": "applied", "files": [], key: value})
            for key, value in (("units", 3), ("units", [3]), ("runtimes", {}), ("manager", []), ("cdi", "x"))
        ),
        '{"state": "committed", "activeBefore": {"handlers": 3}}',
    ],
)
def test_malformed_manifests_are_ignored(host: Host, tmp_path: Path, text: str) -> None:
    strange = tmp_path / "var/lib/gpunode/journal/strange"
    strange.mkdir(parents=True)
    (strange / "manifest.json").write_text(text)
    assert Journal.of(host).entries() == () and Journal.of(host).unfinished() == ()
    journal, name = applied_edits(host, FileEdit("/etc/a", b"1", b"2"))
    assert [entry.id for entry in journal.entries()] == [name]


def test_entry_directory_left_by_a_full_disk_is_pruned(host: Host, tmp_path: Path) -> None:
    place = tmp_path / "var/lib/gpunode/journal"
    (place / "20260101T000000Z-configure-runtime").mkdir(parents=True)
    (place / "somebody's notes").mkdir()
    Journal.of(host).prune()
    assert [path.name for path in place.iterdir()] == ["somebody's notes"]


def test_entry_already_rolled_back_is_reported_as_such(host: Host) -> None:
    journal, name = applied_edits(host, FileEdit("/etc/a", b"1", b"2"))
    journal.mark(journal.entries()[0], "rolled-back")
    with pytest.raises(UsageError, match="it is rolled-back"):
        journal.committed(name)


def test_nothing_is_restored_if_one_backup_is_damaged(host: Host, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir(exist_ok=True)
    edits = [FileEdit(f"/etc/{name}", b"1", b"2") for name in "ab"]
    journal = Journal.of(host)
    entry = journal.begin("op", edits, {})
    for edit in edits:
        host.write_atomic(edit.path, b"2")
    (tmp_path / entry.directory.lstrip("/") / "01-b").write_text("?")
    with pytest.raises(ConfigError, match="damaged") as caught:
        journal.restore_files(entry)
    assert f"rm -r {entry.directory}" in caught.value.hint
    assert host.read_bytes("/etc/a") == b"2"


def test_directory_in_place_of_the_file_is_foreign(host: Host, tmp_path: Path) -> None:
    journal, _ = applied_edits(host, FileEdit("/etc/a", None, b"2"))
    (tmp_path / "etc/a").unlink(missing_ok=True)
    (tmp_path / "etc/a").mkdir(parents=True)
    entry = journal.entries()[0]
    assert journal.plan_undo([entry], recovery=True) == ((), ("/etc/a",))
    assert journal.restore_files(entry) == ("/etc/a",)
    assert (tmp_path / "etc/a").is_dir()
    with pytest.raises(ConfigError, match=r"can.t read /etc/a"):  # the user asks for this rollback
        journal.plan_undo([entry])


def test_several_entries_are_undone_to_the_content_before_all_of_them(host: Host, tmp_path: Path) -> None:
    for before, after in ((b"1", b"2"), (b"2", b"3")):
        edits = FileEdit("/etc/a", before, after), FileEdit("/etc/b", before, after)
        journal, _ = applied_edits(host, *edits)
    (tmp_path / "etc/b").write_bytes(b"theirs")
    assert journal.plan_undo(journal.entries()[::-1]) == ((FileEdit("/etc/a", b"3", b"1"),), ("/etc/b",))
