"""Restoring the files as they were before a runtime was configured, from the journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.host.journal import Entry, FileEdit, Journal, digest, state_of
from gpunode.runtime.engine import Active, Engine, Plan
from gpunode.runtime.find import name_of
from gpunode.runtime.workflow import OPERATION, REMOVAL


@dataclass(frozen=True)
class Original:
    """Edits that restore files byte for byte, the systemd units among them, and the entries undone."""

    edits: tuple[FileEdit, ...] = ()
    units: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()

    def plan(self, engine: Engine, names: tuple[str, ...], active: Active | None) -> Plan:
        """The engine's plan around the edits of its own files, plus the other files."""
        own = tuple(edit for edit in self.edits if not edit.beside)
        others = tuple(edit for edit in self.edits if edit.beside)
        return engine.restoring(own, names, active).with_beside(others, self.units)


def original_files(engine: Engine, journal: Journal, names: tuple[str, ...]) -> Original:
    """The files as they were without `names`; no edits if gpunode didn't write their present content.

    Several runs may have written, so it undoes entry by entry until the files have none of the runtimes.
    """
    now: dict[str, bytes | None] = {}
    then: dict[str, bytes | None] = {}
    kinds: dict[str, tuple[bool, bool]] = {}
    units: list[str] = []
    walked: list[Entry] = []
    for entry in reversed(_entries(engine, journal, names)):
        walked.append(entry)
        files = [file for file in entry.files if not _outlived(engine, file)]
        for file in files:
            path = file["path"]
            now.setdefault(path, engine.host.read_bytes(path))
            if not file.get("generated") and digest(then.get(path, now[path])) != file["after"]:
                return Original()
        then |= {file["path"]: journal.original(entry, file) for file in files}
        kinds |= {file["path"]: kinds_of(file) for file in files}
        units += entry.units
        if not entry.manifest.get("hadRuntime"):
            edits = tuple(
                FileEdit(path, now[path], old, generated=kinds[path][0], beside=kinds[path][1])
                for path, old in then.items()
            )
            return Original(edits, tuple(dict.fromkeys(units)), tuple(walked))
    return Original()


def kinds_of(file: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether an entry's file is generated, and whether it is not read by the engine; see `FileEdit`."""
    return bool(file.get("generated")), bool(file.get("beside"))


def _outlived(engine: Engine, file: Mapping[str, Any]) -> bool:
    """Whether a generated file was rewritten since: its earlier content would describe another node."""
    if not file.get("generated") or not file["existed"]:
        return False
    return bool(digest(engine.host.read_bytes(file["path"])) != file["after"])


def previous_default(engine: Engine, journal: Journal, names: tuple[str, ...]) -> str:
    """The default runtime replaced by the last run that made one of `names` the default, or ""."""
    found = [_text(entry.manifest.get("previousDefault")) for entry in _entries(engine, journal, names)]
    return next((value for value in reversed(found) if value), "")


def switched_cdi(engine: Engine, journal: Journal, names: tuple[str, ...]) -> bool:
    """Whether gpunode turned this engine's CDI on."""
    return any(entry.manifest.get("switchedCdi") is True for entry in _entries(engine, journal, names))


def cdi_users(journal: Journal) -> tuple[str, ...]:
    """The engines that were configured for CDI and not unconfigured since, according to the journal.

    Removing the specification ends that for all of them.
    """
    users: list[str] = []
    for entry in journal.active():
        name = name_of(entry.manifest)
        if entry.manifest.get("operation") == REMOVAL:
            gone = any(file.get("generated") and not file["after"] for file in entry.files)
            users = [] if gone else [user for user in users if user != name]
        users += entry.manifest.get("cdi", ())
    return tuple(dict.fromkeys(users))


def _entries(engine: Engine, journal: Journal, names: tuple[str, ...]) -> tuple[Entry, ...]:
    """Active configurations of this engine's file that registered nothing but `names`."""
    desired = {"operation": OPERATION, "config": engine.daemon.config_path}
    entries = journal.active()
    undone = [
        entry.sequence
        for entry in entries
        if entry.manifest.get("operation") == REMOVAL
        and entry.manifest.get("config") == engine.daemon.config_path
    ]
    return tuple(
        entry
        for entry in entries
        if entry.sequence > max(undone, default=0)
        and all(entry.manifest.get(key) == value for key, value in desired.items())
        and set(runtimes_of(entry.manifest)) <= set(names)
    )


def runtimes_of(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The runtimes of an operation; journals of the first release name a single one."""
    if "runtimes" in manifest:
        return tuple(manifest["runtimes"])
    return tuple(filter(None, [_text(manifest.get("runtime"))]))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


# Restoring a journal entry: later entries that wrote the same files are rolled back with it.


@dataclass(frozen=True)
class Past:
    """The rollback to the node before `entries[-1]`. `entries` are rolled back, the newest first."""

    entries: tuple[Entry, ...]
    edits: tuple[FileEdit, ...]

    @property
    def entry(self) -> Entry:
        """The requested entry."""
        return self.entries[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """The runtimes of all these entries."""
        listed = (name for entry in self.entries for name in runtimes_of(entry.manifest))
        return tuple(dict.fromkeys(listed))

    @property
    def units(self) -> tuple[str, ...]:
        """The systemd units that any of the entries added or removed."""
        return tuple(dict.fromkeys(unit for entry in self.entries for unit in entry.units))

    def finish(self, journal: Journal) -> None:
        """Restore the owners and modes of the files; the entries count as rolled back."""
        for entry in self.entries:
            journal.own(entry)
            journal.tidy(entry)
            journal.mark(entry, "rolled-back")


def past(host: Host, journal: Journal, entry: Entry) -> Past:
    """The rollback to before `entry`. `ConfigError` if another program changed one of its files since."""
    entries = _with_later(journal, entry)
    _refuse_other_engines(entry, entries)
    edits, foreign = restoring(host, journal, entries)
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign)} changed after {entry.id}; nothing was restored",
            hint=f"see what gpunode had written: gpunode journal show {entry.id}",
        )
    return Past(entries, edits)


def restoring(
    host: Host, journal: Journal, entries: Sequence[Entry]
) -> tuple[tuple[FileEdit, ...], tuple[str, ...]]:
    """The edits that restore the files of `entries`, which are newest first, as they were before all of them;
    and the paths of files that another program changed since."""
    now: dict[str, bytes | None] = {}
    then: dict[str, bytes | None] = {}
    kinds: dict[str, tuple[bool, bool]] = {}
    foreign: dict[str, bool] = {}
    for one in entries:
        for file in one.files:
            path = file["path"]
            present = then.get(path, now.setdefault(path, host.read_bytes(path)))
            state = state_of(file, present)
            # a file that holds what an older entry found is restored already
            foreign[path] = state == "foreign" or (foreign.get(path, False) and state == "ours")
            then[path] = journal.original(one, file) if state == "ours" else present
            kinds[path] = kinds_of(file)
    edits = tuple(
        FileEdit(path, now[path], then[path], generated=kinds[path][0], beside=kinds[path][1])
        for path in then
    )
    return edits, tuple(path for path, changed in foreign.items() if changed)


def configured(journal: Journal) -> Mapping[tuple[str, str], tuple[Entry, ...]]:
    """The active configurations of each engine, oldest first, by its name and its configuration file.

    A removal ends those of which it removed all runtimes.
    """
    groups: dict[tuple[str, str], tuple[Entry, ...]] = {}
    for entry in journal.active():
        key = name_of(entry.manifest), _text(entry.manifest.get("config"))
        operation = entry.manifest.get("operation")
        if operation not in (OPERATION, REMOVAL):
            continue
        before, names = groups.get(key, ()), set(runtimes_of(entry.manifest))
        if operation == OPERATION:
            groups[key] = (*before, entry)
        else:
            groups[key] = tuple(one for one in before if not names.issuperset(runtimes_of(one.manifest)))
    return {key: entries for key, entries in groups.items() if entries}


def _with_later(journal: Journal, entry: Entry) -> tuple[Entry, ...]:
    """`entry` and every later active one that shares a file with what is rolled back, newest first."""
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
    """Only one engine is queried and restarted; an entry of another one must be rolled back first."""
    keys = ("engine", "manager", "config")
    desired = tuple(entry.manifest.get(key) or "" for key in keys)
    for one in entries:
        if tuple(one.manifest.get(key) or "" for key in keys) != desired:
            raise ConfigError(
                f"{one.id} wrote the same files later, for something else; nothing was restored",
                hint=f"roll that back first: gpunode rollback {one.id}",
            )
