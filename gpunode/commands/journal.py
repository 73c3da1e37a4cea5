"""`gpunode journal`."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from gpunode.commands.help_page import command_group
from gpunode.commands.options import (
    DryRunOption,
    NoRestartOption,
    RestartCommandOption,
    YesOption,
    journal_entries,
    refuse_both,
)
from gpunode.commands.session import Session, verb
from gpunode.errors import (
    ConfigError,
    GpunodeError,
    NotRestoredError,
    PreconditionError,
    Unreadable,
    UsageError,
    ValidationError,
)
from gpunode.host import Host
from gpunode.host.journal import (
    LIST_HINT,
    OPEN_STATES,
    Entry,
    FileEdit,
    Journal,
    JournalledFile,
    digest,
    lock_path,
    rollback_command,
)
from gpunode.host.transaction import LOCK_SECONDS, change_files, recover
from gpunode.output.result import Block, Cell, Diff, Progress, Result, Style, Table, Text
from gpunode.runtime import find
from gpunode.runtime.engine import Active, Engine, Plan, Request
from gpunode.runtime.removal import CHANGED_SINCE, RollbackPlan, cdi_users, plan_rollback, removal_command
from gpunode.runtime.restart import engine_restart
from gpunode.runtime.workflow import (
    OPERATION,
    Intent,
    RestartReport,
    RuntimeConfiguration,
    change,
    edit_blocks,
    shown,
)

journal_app = command_group("List the changes that gpunode made on this node.", default="list")


EntryArgument = Annotated[
    str,
    typer.Argument(
        metavar="[ID]",
        help="ID of the journal entry.",
        show_default="the last one",
        autocompletion=journal_entries,
    ),
]


@verb(journal_app, "list", "Journal")
def journal_list(session: Session) -> Result:
    """List the changes, oldest first. The list says whether each can be rolled back now.

    Needs root; another user sees the changes of their own rootless engine.

    sudo gpunode journal list
    """
    journal, entries = load(session.host)
    lines = tuple(line(journal, entry) for entry in entries)
    known = {entry.id for entry in entries}
    damaged = tuple(name for name in session.host.listdir(journal.directory) if name not in known)
    data = JournalList(journal.directory, lines, damaged)
    notes = tuple(
        f"{journal.directory}/{name} is not a journal entry, or its manifest is damaged" for name in damaged
    )
    if not lines and journal.elsewhere():
        notes = (*notes, journal.elsewhere())
    return Result("Journal", data, messages=notes, blocks=(_block(lines, journal.directory),))


@verb(journal_app, "show", "JournalEntry")
def journal_show(session: Session, entry: EntryArgument = "") -> Result:
    """Show one change: its time, its command, and the diff of every file.

    Needs root, except for a change of the user's own rootless engine.

    sudo gpunode journal show
    """
    journal, entries = load(session.host)
    match = _entry_of(journal, entries, entry)
    files = tuple(_file(session.host, journal, match, file, entries) for file in match.files)
    details = {key: value for key, value in match.manifest.items() if key != "files"}
    data = JournalEntry(line(journal, match), files, details)
    return Result("JournalEntry", data, blocks=_blocks(data))


rollback_app = typer.Typer(rich_markup_mode=None)


@verb(rollback_app, "rollback", "Rollback")
def rollback(
    session: Session,
    entry: EntryArgument = "",
    dry_run: DryRunOption = False,
    no_restart: NoRestartOption = False,
    restart_command: RestartCommandOption = "",
    yes: YesOption = False,
) -> Result:
    """Restore the files of a journal entry. The engine is then restarted or reloaded.

    Needs root, except for a change of the user's own rootless engine. Running containers
    are stopped only after you confirm it, or with --yes.

    sudo gpunode rollback --dry-run

    sudo gpunode rollback 20261124T021435Z-configure-runtime
    """
    refuse_both(no_restart=no_restart, restart_command=restart_command)
    request = Request(
        restart_command=restart_command,
        dry_run=dry_run,
        no_restart=no_restart,
        yes=yes,
        confirm=session.confirm,
    )
    return roll_back(session.host, session.progress, entry, request)


# `gpunode journal list`: what gpunode changed on this node, and which changes can be rolled back now.

_NAME = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z-")


@dataclass(frozen=True)
class EntryLine:
    """One entry. `when` is UTC; `engine` is empty for a change that no engine reads.

    `rollback` is whether `gpunode rollback ID` would work now, `reason` why not.
    """

    id: str
    when: str
    operation: str
    engine: str
    state: str
    files: tuple[str, ...]
    rollback: bool
    reason: str


@dataclass(frozen=True)
class JournalList:
    """`data` of the envelope: the entries, oldest first, and directories that hold no readable manifest."""

    directory: str
    entries: tuple[EntryLine, ...]
    damaged: tuple[str, ...]


def load(host: Host) -> tuple[Journal, tuple[Entry, ...]]:
    """The journal and all its entries, oldest first."""
    journal = Journal.of(host)
    try:
        return journal, journal.entries()
    except Unreadable as error:
        raise PreconditionError(
            f"only root may read the journal: {error.message}", hint="run it again with sudo"
        ) from error


def line(journal: Journal, entry: Entry) -> EntryLine:
    """What the list shows of an entry."""
    reason = obstacle(journal, entry)
    return EntryLine(
        id=entry.id,
        when=when(entry.id),
        operation=entry.operation,
        engine=entry.manager or entry.engine,
        state=entry.state,
        files=tuple(file.path for file in entry.files),
        rollback=not reason,
        reason=reason,
    )


def when(name: str) -> str:
    """The time in an entry's name as ISO 8601; empty for a name without one."""
    match = _NAME.match(name)
    return "{}-{}-{}T{}:{}:{}Z".format(*match.groups()) if match else ""


def obstacle(journal: Journal, entry: Entry) -> str:
    """Why `gpunode rollback` would refuse this entry now; empty if it wouldn't."""
    if entry.state == "rolled-back":
        return "it is already rolled back"
    if entry.of_packages:
        return "it changed packages: it is undone by the command that made it"
    if not entry.files:
        return "it changed no file"
    if not entry.undoable:
        return "a rollback is not rolled back"
    if entry.state in OPEN_STATES:
        return "it is running or was interrupted: the next run rolls it back"
    if entry.state != "committed":
        return f"it is {entry.state}"
    try:
        plan_rollback(journal, entry)
    except GpunodeError as error:
        return error.message.removesuffix("; nothing was restored")
    return ""


def _block(lines: tuple[EntryLine, ...], directory: str) -> Text | Table:
    if not lines:
        return Text(f"nothing was changed yet: {directory} has no entries")
    rows = tuple(
        (
            entry.id,  # which shows the time and the operation
            entry.engine or "-",
            ", ".join(entry.files),
            Cell("yes", Style.GOOD) if entry.rollback else Cell(f"no: {entry.reason}", Style.DIM),
        )
        for entry in lines
    )
    return Table(("ID", "ENGINE", "FILES", "ROLLBACK"), rows)


# `gpunode journal show [ID]`: one change, file by file.

# the manifest's facts that the user needs, and their labels
_FACTS = (
    ("config", "configuration"), ("runtimes", "runtimes"), ("runtime", "runtimes"), ("settings", "settings"),
    ("previousDefault", "default before"), ("verb", "engine action"), ("units", "systemd units"),
    ("restartCommand", "restart command"), ("socket", "socket"),
)  # fmt: skip


@dataclass(frozen=True)
class JournalFile:
    """One file of an entry. `now` is ours, before, changed or unreadable: the file's present content.

    `action` is created, updated or removed; `diff` is empty where either side is no longer known, and
    `problem` then says why.
    """

    path: str
    action: str
    now: str
    diff: str
    problem: str


@dataclass(frozen=True)
class JournalEntry:
    """`data` of the envelope; `details` are the manifest's own facts as the operation wrote them."""

    entry: EntryLine
    files: tuple[JournalFile, ...]
    details: Mapping[str, Any]


def _entry_of(journal: Journal, entries: Sequence[Entry], name: str) -> Entry:
    match = next((entry for entry in entries[::-1] if name in ("", entry.id)), None)
    if match is None:
        raise UsageError(
            f"no such journal entry: {name}" if name else f"the journal has no entries: {journal.directory}",
            hint="list them: gpunode journal list" if entries else journal.elsewhere() or LIST_HINT,
        )
    return match


def _file(
    host: Host, journal: Journal, entry: Entry, file: JournalledFile, entries: Sequence[Entry]
) -> JournalFile:
    path = file.path
    action = "removed" if not file.after else "updated" if file.existed else "created"
    try:
        present = host.read_bytes(path)
    except GpunodeError as error:
        return JournalFile(path, action, "unreadable", "", error.message)
    current = digest(present)
    now = "ours" if current == file.after else "before" if current == file.before else "changed"
    try:
        before = journal.content_before(entry, file)
        after = present if now == "ours" else _written(journal, entry, file, entries)
    except ConfigError as error:
        return JournalFile(path, action, now, "", error.message)
    if digest(after) != file.after:
        changed = ", and the file has changed" if now == "changed" else ""
        return JournalFile(path, action, now, "", f"what was written then is not kept{changed}")
    return JournalFile(path, action, now, FileEdit(path, before, after).diff(), "")


def _written(journal: Journal, entry: Entry, file: JournalledFile, entries: Sequence[Entry]) -> bytes | None:
    """What this entry wrote, from the backup that a later entry made of it; None if there is none."""
    for later in entries:
        for later_file in later.files if later.sequence > entry.sequence else ():
            if later_file.path == file.path and later_file.before == file.after:
                return journal.content_before(later, later_file)
    return None


def _blocks(data: JournalEntry) -> tuple[Block, ...]:
    entry = data.entry
    rows = [("operation", entry.operation), ("when", entry.when), ("state", entry.state)]
    rows += [("engine", entry.engine)] if entry.engine else []
    for key, name in _FACTS:
        value = data.details.get(key)
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        if isinstance(text, str) and text not in ("", "none", "wait"):
            rows.append((name, text))
    rows.append(("can be rolled back", "yes" if entry.rollback else f"no: {entry.reason}"))
    blocks: list[Block] = [Text(entry.id, Style.HEADING), Table(("", ""), tuple(rows))]
    for file in data.files:
        restored = "was removed again" if file.action == "created" else "was restored"
        state = {"before": restored, "changed": "has changed since"}.get(file.now, "")
        blocks.append(Text(f"{file.path} {file.action}{f'; it {state}' if state else ''}", Style.HEADING))
        blocks.append(
            Diff(file.diff) if file.diff else Text(f"  {file.problem or 'no difference'}", Style.DIM)
        )
    return tuple(blocks)


# `gpunode rollback [ID]`: restore the files of a journal entry and restart the engine.


def roll_back(
    host: Host,
    progress: Progress,
    name: str = "",
    request: Request = Request(),  # noqa: B008 - frozen
) -> Result:
    """Restore one entry's files with mode and owner; kind Rollback, data as for RuntimeConfiguration.

    Without a `name` it is the last entry. The engine and its files are the entry's, not those of `request`.
    `ConfigError` if another program has changed one of the files since, `ValidationError` if the engine
    refuses the earlier files; nothing is restored then.
    """
    if not request.dry_run and _killed(Journal.of(host), name):
        result = _finish(host, name, request.restart_command, progress)
        if result is not None:
            return result
    entry = Journal.of(host).committed(name)
    if not entry.engine:
        return _files_only(host, entry, progress, dry_run=request.dry_run)

    def prepare(engines: tuple[Engine, ...], journal: Journal) -> tuple[Intent, ...]:
        rollback_plan = plan_rollback(journal, entry)

        def plan(active: Active | None) -> Plan:
            return rollback_plan.engine_plan(engines[0], rollback_plan.names, active, rollback_plan.units)

        def is_active(active: Active) -> bool:
            return all(_is_as_before(active, entry, name) for name in rollback_plan.names)

        intent = Intent(
            "rollback",
            rollback_plan.names,
            plan,
            is_active,
            kind="Rollback",
            done=lambda: rollback_plan.finish(journal),
            notes=(*_later_changes(rollback_plan), *_users_of_removed_files(rollback_plan, journal)),
        )
        return (intent,)

    request = replace(
        request,
        runtimes=(find.name_of(entry),),
        config=entry.config,
        socket=entry.socket,
        restart_command=request.restart_command or entry.restart_command,
    )
    try:
        return change(host, request, prepare, progress)
    except (ConfigError, ValidationError) as error:
        refused = isinstance(error, ValidationError)  # the engine refuses the earlier files
        if entry.operation == OPERATION and (refused or error.code == CHANGED_SINCE):
            name = next(iter(entry.runtime_names), "nvidia")
            command = removal_command(host, find.name_of(entry), entry.config, name)
            nothing = "nothing was restored; " if refused else ""
            error.hint = f"{nothing}to remove only the runtime: {command}"
        raise


def _killed(journal: Journal, name: str) -> tuple[Entry, ...]:
    """The unfinished operations, if `name` is one of them or empty."""
    killed = journal.unfinished()
    return killed if not name or name in {entry.id for entry in killed} else ()


def _finish(host: Host, name: str, restart_command: str, progress: Progress) -> Result | None:
    """Roll back killed runs; None if there are none, because the run has ended meanwhile."""
    journal = Journal.of(host)
    with host.lock(lock_path(host), LOCK_SECONDS):
        killed = _killed(journal, name)
        if not killed:
            return None
        entry = killed[-1]
        before = {file.path: _content(host, file.path) for each in killed for file in each.files}
        request = Request(
            runtimes=(find.name_of(entry),),
            config=entry.config,
            restart_command=restart_command,
        )
        notes = recover(host, journal, engine_restart(host, progress, request))
        if _killed(journal, name):
            raise NotRestoredError(
                "; ".join(notes[:-1]),
                hint=f"correct it, then run this again: {rollback_command(host, name)}".rstrip(),
            )
    edits = [FileEdit(path, content, _content(host, path)) for path, content in before.items()]
    return _files_result(entry, edits, notes)


def _content(host: Host, path: str) -> bytes | None:
    """A file's bytes; None if it doesn't exist or is now something that gpunode doesn't restore."""
    with suppress(ConfigError):
        return host.read_bytes(path)
    return None


def _files_only(host: Host, entry: Entry, progress: Progress, *, dry_run: bool) -> Result:
    """Restore an entry that belongs to no engine: no daemon is queried or restarted."""
    journal = Journal.of(host)
    rollback_plan = functools.cache(lambda: plan_rollback(journal, entry))  # read once, under the lock
    changed = change_files(
        host,
        "rollback",
        lambda: rollback_plan().edits,
        engine_restart(host, progress),
        context={"config": entry.config},
        named_units=entry.units,
        done=lambda: rollback_plan().finish(journal),
        dry_run=dry_run,
    )
    notes = (*changed.notes, *_later_changes(rollback_plan()))
    return _files_result(entry, changed.edits, notes, changed.journal, dry_run=dry_run)


def _files_result(
    entry: Entry,
    edits: Sequence[FileEdit],
    notes: tuple[str, ...],
    journal: str = "",
    *,
    dry_run: bool = False,
) -> Result:
    data = RuntimeConfiguration(
        engine=entry.engine,
        engine_version="",
        config_version=None,
        config=entry.config,
        config_source="the journal",
        changes=tuple(shown(edit, "Rollback") for edit in edits),
        restart=RestartReport("none", performed=False, seconds=0.0, command="", reason=""),
        active=None,
        journal=journal,
        dry_run=dry_run,
    )
    blocks = edit_blocks(edits, "Rollback", dry_run=dry_run)
    return Result("Rollback", data, messages=notes, blocks=tuple(blocks))


def _is_as_before(active: Active, entry: Entry, name: str) -> bool:
    """Whether the daemon has the runtime, and has it as default, just as before the change.

    A daemon that had not loaded its files then may match them by now. True if it couldn't be queried then.
    """
    before = entry.active_before
    if before is None:
        return True
    has, had = name in active.handlers, name in before.handlers
    was_default = before.default == name
    if has == had:
        return (active.default == name) == was_default
    return has == entry.had_runtime and (has or active.default != name)


def _later_changes(rollback_plan: RollbackPlan) -> tuple[str, ...]:
    """Warning that names later changes of the same files, which are undone too."""
    later = [entry.id for entry in rollback_plan.entries if entry is not rollback_plan.oldest]
    return (f"this rolls back later changes as well: {', '.join(later)}",) if later else ()


def _users_of_removed_files(rollback_plan: RollbackPlan, journal: Journal) -> tuple[str, ...]:
    """Warning that names other engines that use the removed CDI specification."""
    engine = find.name_of(rollback_plan.oldest)
    users = [name for name in cdi_users(journal) if name != engine]
    removed = [edit.path for edit in rollback_plan.edits if edit.generated and edit.after is None]
    if not users or not removed:
        return ()
    names = ", ".join(users)
    return (f"{removed[0]} goes, needed by {names} as well; to write it again: gpunode cdi refresh",)
