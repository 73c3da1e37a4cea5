"""Restoring the files as they were before a runtime was configured, from the journal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import NamedTuple

from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.host.journal import Entry, FileEdit, Journal, rollback_command
from gpunode.output.typed import as_text
from gpunode.runtime import find
from gpunode.runtime.engine import Active, Engine, Plan
from gpunode.runtime.find import name_of
from gpunode.runtime.workflow import OPERATION, REMOVAL

CHANGED_SINCE = "changed-since"  # the code of a rollback that would undo another program's edit


class RollbackPlan(NamedTuple):
    """Edits that restore files byte for byte, and the entries that they roll back, the newest first."""

    entries: tuple[Entry, ...] = ()
    edits: tuple[FileEdit, ...] = ()

    @property
    def oldest(self) -> Entry:
        """The files are restored to the time before this entry."""
        return self.entries[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """The runtimes of all these entries."""
        listed = (name for entry in self.entries for name in entry.runtime_names)
        return tuple(dict.fromkeys(listed))

    @property
    def units(self) -> tuple[str, ...]:
        """The systemd units that any of the entries added or removed."""
        return tuple(dict.fromkeys(unit for entry in self.entries for unit in entry.units))

    def engine_plan(
        self, engine: Engine, names: tuple[str, ...], active: Active | None, units: tuple[str, ...] = ()
    ) -> Plan:
        """The engine's plan around the edits of its own files, plus the other files."""
        own = tuple(edit for edit in self.edits if not edit.beside)
        others = tuple(edit for edit in self.edits if edit.beside)
        return engine.plan_edits(own, names, active).with_beside(others, units)

    def finish(self, journal: Journal) -> None:
        """Restore the owners and modes of the files; the entries count as rolled back."""
        for entry in self.entries:
            journal.restore_owners(entry)
            journal.remove_created_directories(entry)
            journal.mark(entry, "rolled-back")


def plan_rollback_of_runtimes(engine: Engine, journal: Journal, names: tuple[str, ...]) -> RollbackPlan:
    """The rollback to before `names` were added; empty if gpunode didn't write the files' present content.

    Several runs may have written, so it undoes entry by entry until the files have none of the runtimes.
    """
    entries = _entries(engine, journal, names)[::-1]
    first = next((n for n, entry in enumerate(entries, 1) if not entry.had_runtime), 0)
    edits, foreign = journal.plan_undo(entries[:first])
    if foreign:
        return RollbackPlan()
    return RollbackPlan(entries[:first], tuple(edit for edit in edits if edit.action != "unchanged"))


def previous_default(engine: Engine, journal: Journal, names: tuple[str, ...]) -> str:
    """The default runtime replaced by the last run that made one of `names` the default, or ""."""
    defaults = [as_text(entry.previous_default) for entry in _entries(engine, journal, names)]
    return next((default for default in reversed(defaults) if default), "")


def switched_cdi(engine: Engine, journal: Journal, names: tuple[str, ...]) -> bool:
    """Whether gpunode turned this engine's CDI on."""
    return any(entry.switched_cdi is True for entry in _entries(engine, journal, names))


def cdi_users(journal: Journal) -> tuple[str, ...]:
    """The engines that were configured for CDI and not unconfigured since, according to the journal.

    Removing the specification ends that for all of them.
    """
    users: list[str] = []
    for entry in journal.active():
        name = name_of(entry)
        if entry.operation == REMOVAL:
            is_removed = any(file.generated and not file.after for file in entry.files)
            users = [] if is_removed else [user for user in users if user != name]
        users += entry.cdi
    return tuple(dict.fromkeys(users))


def _entries(engine: Engine, journal: Journal, names: tuple[str, ...]) -> tuple[Entry, ...]:
    """Active configurations of this engine's file that registered nothing but `names`."""
    return tuple(
        entry
        for (_, config), entries in configured(journal).items()
        for entry in entries
        if config == engine.daemon.config_path and set(entry.runtime_names) <= set(names)
    )


# Restoring a journal entry: later entries that wrote the same files are rolled back with it.


def plan_rollback(journal: Journal, entry: Entry) -> RollbackPlan:
    """The rollback to before `entry`. `ConfigError` if another program changed one of its files since."""
    entries = _with_later(journal, entry)
    _refuse_other_engines(journal.host, entry, entries)
    edits, foreign = journal.plan_undo(entries)
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign)} changed after {entry.id}; nothing was restored",
            hint=f"see what gpunode had written: gpunode journal show {entry.id}",
            code=CHANGED_SINCE,
        )
    return RollbackPlan(entries, edits)


def removal_command(host: Host, engine: str, config: str, name: str) -> str:
    """The command that removes the runtime `name` from this engine's file."""
    default = find.FINDERS[engine](host, None) if engine in find.FINDERS else None
    name_option = "" if name == "nvidia" else f" --nvidia-runtime-name {shlex.quote(name)}"
    file = "" if default is None or default.config_path == config else f" --config {shlex.quote(config)}"
    return f"gpunode unconfigure-runtime --runtime {engine}{name_option}{file}"


def configured(journal: Journal) -> Mapping[tuple[str, str], tuple[Entry, ...]]:
    """The active configurations of each engine, oldest first, by its name and its configuration file.

    A removal ends those of which it removed all runtimes.
    """
    groups: dict[tuple[str, str], tuple[Entry, ...]] = {}
    for entry in journal.active():
        key = name_of(entry), entry.config
        if entry.operation not in (OPERATION, REMOVAL):
            continue
        before, names = groups.get(key, ()), set(entry.runtime_names)
        if entry.operation == OPERATION:
            groups[key] = (*before, entry)
        else:
            groups[key] = tuple(earlier for earlier in before if not names.issuperset(earlier.runtime_names))
    return {key: entries for key, entries in groups.items() if entries}


def _with_later(journal: Journal, entry: Entry) -> tuple[Entry, ...]:
    """`entry` and every later active one that shares a file with what is rolled back, newest first."""
    selected = [entry]
    paths = {file.path for file in entry.files}
    for later in journal.entries():
        own = {file.path for file in later.files if not file.generated}
        committed = later.state == "committed" and later.undoable
        if committed and later.sequence > entry.sequence and own & paths:
            selected.insert(0, later)
            paths |= own
    return tuple(selected)


def _refuse_other_engines(host: Host, entry: Entry, entries: tuple[Entry, ...]) -> None:
    """Only one engine is queried and restarted; an entry of another one must be rolled back first."""
    for later in entries:
        if (later.engine, later.manager, later.config) != (entry.engine, entry.manager, entry.config):
            raise ConfigError(
                f"{later.id} wrote the same files later, for something else; nothing was restored",
                hint=f"roll that back first: {rollback_command(host, later.id)}",
            )
