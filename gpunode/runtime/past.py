"""Restoring a journal entry: later entries that wrote the same files are taken back with it."""

from __future__ import annotations

from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.journal import Entry, Journal, state_of
from gpunode.runtime.engine import FileEdit
from gpunode.runtime.undo import kinds_of, runtimes_of


@dataclass(frozen=True)
class Past:
    """The way back to the node before `entries[-1]`. `entries` are taken back, the newest first."""

    entries: tuple[Entry, ...]
    edits: tuple[FileEdit, ...]

    @property
    def entry(self) -> Entry:
        """The one that was asked for."""
        return self.entries[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """The runtimes that any of the entries was about."""
        listed = (name for entry in self.entries for name in runtimes_of(entry.manifest))
        return tuple(dict.fromkeys(listed))

    @property
    def units(self) -> tuple[str, ...]:
        """The systemd units that any of the entries brought or removed."""
        return tuple(dict.fromkeys(unit for entry in self.entries for unit in entry.units))

    def finish(self, journal: Journal) -> None:
        """Give the files their owners and modes of then; the entries count as rolled back."""
        for entry in self.entries:
            journal.own(entry)
            journal.tidy(entry)
            journal.mark(entry, "rolled-back")


def past(host: Host, journal: Journal, entry: Entry) -> Past:
    """The way back to before `entry`. `ConfigError` if somebody else changed one of its files since."""
    entries = _with_later(journal, entry)
    _refuse_other_engines(entry, entries)
    now: dict[str, bytes | None] = {}
    then: dict[str, bytes | None] = {}
    kinds: dict[str, tuple[bool, bool]] = {}
    foreign: list[str] = []
    for one in entries:
        for file in one.files:
            path = file["path"]
            present = then.get(path, now.setdefault(path, host.read_bytes(path)))
            state = state_of(file, present)
            foreign += [path] if state == "foreign" else []
            then[path] = journal.original(one, file) if state == "ours" else present
            kinds[path] = kinds_of(file)
    if foreign:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(foreign))} changed after {entry.id}; nothing was restored",
            hint=f"see what gpunode had written: gpunode journal show {entry.id}",
        )
    edits = tuple(
        FileEdit(path, now[path], then[path], generated=kinds[path][0], beside=kinds[path][1])
        for path in then
    )
    return Past(entries, edits)


def _with_later(journal: Journal, entry: Entry) -> tuple[Entry, ...]:
    """`entry` and every later one in force that shares a file with what is taken back, newest first."""
    later = [one for one in journal.entries() if one.sequence > entry.sequence]
    in_force = [one for one in later if one.state == "committed" and one.undoable]
    chosen = [entry]
    paths = {file["path"] for file in entry.files}
    for one in in_force:
        own = {file["path"] for file in one.files if not file.get("generated")}
        if own & paths:
            chosen.insert(0, one)
            paths |= own
    return tuple(chosen)


def _refuse_other_engines(entry: Entry, entries: tuple[Entry, ...]) -> None:
    """One engine is asked and restarted; an entry of another one must go first, by itself."""
    keys = ("engine", "manager", "config")
    wanted = tuple(entry.manifest.get(key) or "" for key in keys)
    for one in entries:
        if tuple(one.manifest.get(key) or "" for key in keys) != wanted:
            raise ConfigError(
                f"{one.id} wrote the same files later, for something else; nothing was restored",
                hint=f"roll that back first: gpunode rollback {one.id}",
            )
