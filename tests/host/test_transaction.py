"""The one transaction of changes to the node: what is left when its last steps fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.host import Host
from gpunode.host.journal import Entry, FileEdit, Journal
from gpunode.host.transaction import Transaction, begin

DEBIAN = {"engine": "", "units": [], "packageManager": "apt", "packages": {"a": ""}, "stays": True}


@pytest.mark.parametrize("edits", [(), (FileEdit("/etc/a", None, b"new"),)], ids=["no files", "a file"])
def test_installed_packages_stay_known_if_the_commit_fails(
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
