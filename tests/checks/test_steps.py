"""A fix is carried out through the journal, and a failed one leaves the node unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpunode.checks.finding import Step
from gpunode.commands import journal as rollback
from gpunode.commands.doctor_fix import carry_out
from gpunode.errors import DaemonError, PreconditionError, RolledBackError
from gpunode.host import Host
from gpunode.host.journal import Entry
from tests.silent import SilentProgress

QUIET = SilentProgress()


def no_engine(_entry: Entry) -> None:
    raise AssertionError("no run was killed")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("GPUNODE_STATE_DIR", str(tmp_path / "state"))
    return Host()


def journal(tmp_path: Path) -> list[dict[str, Any]]:
    found = sorted(tmp_path.glob("state/journal/*/manifest.json"))
    return [json.loads(path.read_text()) for path in found]


def test_file_is_written_before_programs_run_and_rollback_removes_it(host: Host, tmp_path: Path) -> None:
    path, copy = tmp_path / "new" / "blacklist.conf", tmp_path / "copy"
    steps = (Step(argv=("cp", str(path), str(copy))), Step(path=str(path), content="blacklist nouveau\n"))
    did = carry_out(host, "nouveau-loaded", steps, no_engine, QUIET)
    assert path.read_text() == copy.read_text() == "blacklist nouveau\n"
    assert [change.action for change in did.changes] == ["created"]
    (entry,) = journal(tmp_path)
    assert (entry["id"], entry["check"], entry["commands"]) == (
        did.journal,
        "nouveau-loaded",
        [f"cp {path} {copy}"],
    )
    rollback.roll_back(host, QUIET, did.journal)
    assert not path.parent.exists()


def test_file_of_a_fix_without_commands_is_written(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "new.conf"
    did = carry_out(host, "nouveau-loaded", (Step(path=str(path), content="new\n"),), no_engine, QUIET)
    assert path.read_text() == "new\n"
    assert [(entry["id"], entry["state"]) for entry in journal(tmp_path)] == [(did.journal, "committed")]


def test_failed_program_restores_files_and_links(host: Host, tmp_path: Path) -> None:
    path, link = tmp_path / "there.conf", tmp_path / "link"
    path.write_text("as it was\n")
    steps = (
        Step(path=str(path), content="other\n"),
        Step(path=str(link), link="/dev/null"),
        Step(argv=("sh", "-c", "echo no space left >&2; exit 1")),
    )
    with pytest.raises(RolledBackError, match="no space left; the files are as before"):
        carry_out(host, "one", steps, no_engine, QUIET)
    assert path.read_text() == "as it was\n"
    assert not link.is_symlink()
    assert [entry["state"] for entry in journal(tmp_path)] == ["rolled-back"]


def test_entry_with_only_commands_is_in_the_journal_and_cannot_roll_back(host: Host, tmp_path: Path) -> None:
    did = carry_out(host, "uvm-not-loaded", (Step(argv=("true",)),), no_engine, QUIET)
    assert (did.commands, did.journal) == (("true",), "")
    assert [entry["commands"] for entry in journal(tmp_path)] == [["true"]]
    with pytest.raises(Exception, match="nothing to roll back"):
        rollback.roll_back(host, QUIET)


def test_programs_run_under_the_lock(host: Host, tmp_path: Path) -> None:
    """Also if the files are right already, or there are none, so that no other run changes the node then."""
    path, lock = tmp_path / "there.conf", tmp_path / "state" / "lock"
    path.write_text("right\n")
    locked = Step(argv=("sh", "-c", f"flock -n -E 9 {lock} true; [ $? = 9 ]"))
    for steps in ((Step(path=str(path), content="right\n"), locked), (locked,)):
        did = carry_out(host, "one", steps, no_engine, QUIET)
        assert did.journal == ""
    assert [(entry["state"], entry["commands"]) for entry in journal(tmp_path)] == [
        ("committed", [" ".join(locked.argv)])
    ] * 2


def test_own_command_takes_the_lock_itself(host: Host, tmp_path: Path) -> None:
    """The rollback undoes what was done and recorded before it."""
    path = tmp_path / "new.conf"
    steps = (Step(path=str(path), content="new\n"), Step(argv=("true",)), Step(argv=("gpunode", "rollback")))
    did = carry_out(host, "one", steps, no_engine, QUIET)
    assert not path.exists()
    assert did.commands == ("true", "gpunode rollback")
    entries = sorted(journal(tmp_path), key=lambda entry: int(entry["sequence"]))
    assert [(entry["operation"], entry["state"], entry.get("commands")) for entry in entries] == [
        ("doctor-fix", "rolled-back", ["true"]),
        ("rollback", "committed", None),
        ("doctor-fix", "committed", ["gpunode rollback"]),
    ]


def test_failed_program_is_reported_as_it_is_if_no_file_changed(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "there.conf"
    path.write_text("right\n")
    with pytest.raises(DaemonError, match=r"^false: exit code 1$") as caught:
        carry_out(
            host, "one", (Step(path=str(path), content="right\n"), Step(argv=("false",))), no_engine, QUIET
        )
    assert not isinstance(caught.value, RolledBackError)
    assert journal(tmp_path) == []


def test_failed_program_leaves_no_entry(host: Host, tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match=r"^false: exit code 1$"):
        carry_out(host, "one", (Step(argv=("false",)),), no_engine, QUIET)
    with pytest.raises(DaemonError, match="not-a-program"):
        carry_out(host, "one", (Step(argv=("not-a-program", "x")),), no_engine, QUIET)
    assert journal(tmp_path) == []


def test_link_is_created_once_and_replaces_no_other_file(host: Host, tmp_path: Path) -> None:
    link = tmp_path / "char" / "195:0"
    step = Step(path=str(link), link="../nvidia0")
    for _ in range(2):
        carry_out(host, "dev-char-symlinks", (step,), no_engine, QUIET)
    assert str(link.readlink()) == "../nvidia0"
    link.unlink()
    link.write_text("something else")
    with pytest.raises(PreconditionError, match="is something else"):
        carry_out(host, "dev-char-symlinks", (step,), no_engine, QUIET)
    assert link.read_text() == "something else"
