"""Write-ahead journal: what files held before gpunode changed them, and the state of each change.

Each operation has a directory (0700) `<UTC time>-<operation>` with copies of the files and `manifest.json`
(0600), which is complete on disk before the first file is touched. `state` changes from begun to applied to
committed, or to rolled-back; a later rollback of a committed entry passes through applied too. If an entry is
begun or applied and no process holds the lock, the process that made it was killed. Backups are never in the
files' own directories: containerd and CRI-O would load them.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from gpunode.errors import ConfigError, GpunodeError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.output.result import Change
from gpunode.output.typed import PlainError, as_text, from_plain, plain

STATE_DIRECTORY = "/var/lib/gpunode"
LOCK = "/run/gpunode/lock"  # in our own directory: every user can create files in /run/lock
KEEP = 50  # a rollback needs the entries with the content before the first change
LIST_HINT = "see what there is: gpunode journal list"
_NO_ENTRIES_HINT = "no change was recorded here; look for other traces of gpunode: gpunode reset --dry-run"
OPEN_STATES = ("begun", "applied")


@dataclass(frozen=True)
class FileEdit:
    """One file before and after, None where it doesn't exist.

    `interim` is what the daemon must read when it reloads, where reading `after` would not undo what it
    remembers (dockerd keeps a runtime after its key is removed from the file); `undo` is the same for the
    rollback. `generated` marks a file that is rewritten whenever the node changes, such as a CDI
    specification: a rollback treats a newer one as gpunode's own. `beside` marks a file that no engine reads
    as configuration: the specification, and the systemd units that keep it up to date.
    """

    path: str
    before: bytes | None
    after: bytes | None
    interim: bytes | None = None
    undo: bytes | None = None
    generated: bool = False
    beside: bool = False

    @property
    def action(self) -> str:
        """created, updated, removed or unchanged."""
        if self.before == self.after:
            return "unchanged"
        if self.before is None:
            return "created"
        return "removed" if self.after is None else "updated"

    def change(self) -> Change:
        """The edit as it is shown, with a unified diff."""
        return Change(self.path, self.action, self.diff())

    def diff(self) -> str:
        """Unified diff; empty if nothing changes."""
        before, after = (_text(data).splitlines(keepends=True) for data in (self.before, self.after))
        old, new = (self.path if data is not None else "/dev/null" for data in (self.before, self.after))
        lines = difflib.unified_diff(before, after, old, new)
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )


def _text(data: bytes | None) -> str:
    """File content for display; never fails."""
    return (data or b"").decode("utf-8", "replace")


class JournalledFile(NamedTuple):
    """One file of an operation, in the manifest. `before`, `after` and `interim` are sha256 of its content,
    `backup` is the name of the copy beside the manifest, `directories` are those that were created for it.
    Earlier releases don't write what has a default.
    """

    path: str
    existed: bool
    mode: int
    uid: int
    gid: int
    before: str
    after: str
    interim: tuple[str, ...]
    backup: str
    directories: tuple[str, ...] = ()
    generated: bool = False
    beside: bool = False


class ActiveBefore(NamedTuple):
    """What the engine reported before the change."""

    handlers: tuple[object, ...] = ()
    default: object = None


class UndoPlan(NamedTuple):
    """The edits that undo some entries, and the `foreign` files, which another program changed since."""

    edits: tuple[FileEdit, ...]
    foreign: tuple[str, ...]


class Entry(NamedTuple):
    """One operation. `manifest` is what is on disk, the fields after it are what gpunode reads of it again.

    Earlier releases and other operations leave some out.
    """

    id: str
    directory: str
    manifest: Mapping[str, Any]
    sequence: int = 0  # the order of entries, independent of the clock
    state: str = ""
    operation: str = ""
    engine: str = ""
    manager: str = ""
    config: str = ""
    socket: str = ""
    verb: str = ""
    restart_command: str = ""
    runtimes: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()
    undoes: tuple[str, ...] = ()  # the ids of the entries that a reset has undone with this one
    units: tuple[str, ...] = ()  # the systemd units among its files
    # what ``systemctl is-enabled`` and ``is-active`` reported before the change, by unit
    units_before: Mapping[str, tuple[str, str]] = MappingProxyType({})
    files: tuple[JournalledFile, ...] = ()
    active_before: ActiveBefore | None = None
    # not checked: an entry in which one of these has another type can be undone all the same
    runtime: object = ""  # the first release wrote this instead of `runtimes`
    had_runtime: object = None
    previous_default: object = ""
    switched_cdi: object = False
    packages: object = None
    held: object = False
    files_left: object = ()
    # a killed run's files stay: the packages that came with them need their repository, and the next run
    # plans what is still missing
    stays: object = False

    @classmethod
    def of(cls, name: str, directory: str, manifest: object) -> Entry:
        """`PlainError` for a manifest that gpunode didn't write."""
        if not isinstance(manifest, Mapping):
            raise PlainError("must be an object")
        number = manifest.get("sequence")
        own = {"id": name, "directory": directory, "manifest": manifest}
        return from_plain(cls, {**manifest, **own, "sequence": number if type(number) is int else 0})

    @property
    def undoable(self) -> bool:
        """Whether a rollback can undo it.

        A rollback isn't rolled back itself: the next one goes further back. Neither is an entry that wrote no
        file, or one that changed packages: restoring only the files would leave the packages without their
        repository.
        """
        return self.operation != "rollback" and bool(self.files) and not self.of_packages

    @property
    def of_packages(self) -> bool:
        """Whether it installed or removed packages; the command that made the change undoes it."""
        return bool(self.packages)

    @property
    def runtime_names(self) -> tuple[str, ...]:
        """The runtimes that it added or removed."""
        return self.runtimes or tuple(filter(None, [as_text(self.runtime)]))


@dataclass(frozen=True)
class Journal:
    """The journal of one node, under `directory`."""

    host: Host
    directory: str

    @classmethod
    def of(cls, host: Host) -> Journal:
        """The node's journal, or an ordinary user's own for that user's files; see `state_directory`."""
        return cls(host, f"{state_directory(host)}/journal")

    def begin(self, operation: str, edits: Sequence[FileEdit], context: Mapping[str, Any]) -> Entry:
        """Copy every file, then write the manifest; no file is changed before this returns. An entry that
        can't be begun is removed."""
        self.host.make_dirs(self.directory, mode=0o700)
        name = self._new_name(operation)
        directory = f"{self.directory}/{name}"
        try:
            self.host.make_dirs(directory, mode=0o700)
            files = [plain(self._back_up(directory, number, edit)) for number, edit in enumerate(edits)]
            number = max((entry.sequence for entry in self.entries()), default=0) + 1
            manifest = {"id": name, "sequence": number, "operation": operation, "state": "begun"}
            manifest |= {**context, "files": files}
            entry = Entry.of(name, directory, manifest)
            self._write(entry)
        except BaseException:  # also an interruption
            self.host.remove_tree(directory)
            raise
        return entry

    def _new_name(self, operation: str) -> str:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self.host.now()))
        base = f"{stamp}-{operation}"
        existing = set(self.host.listdir(self.directory))
        return next(
            name
            for name in (base, *(f"{base}-{n}" for n in range(2, len(existing) + 3)))
            if name not in existing
        )

    def _back_up(self, directory: str, number: int, edit: FileEdit) -> JournalledFile:
        status = self.host.stat(edit.path)
        backup = ""
        if edit.before is not None:
            backup = f"{number:02}-{edit.path.rpartition('/')[2]}"
            self.host.write_atomic(f"{directory}/{backup}", edit.before, mode=0o600)
        return JournalledFile(
            edit.path,
            edit.before is not None,
            stat.S_IMODE(status.st_mode) if status else 0o644,
            status.st_uid if status else 0,
            status.st_gid if status else 0,
            digest(edit.before),
            digest(edit.after),
            tuple(digest(text) for text in (edit.interim, edit.undo) if text is not None),
            backup,
            self._missing_directories(edit.path),
            edit.generated,
            edit.beside,
        )

    def _missing_directories(self, path: str) -> tuple[str, ...]:
        """The missing parent directories of a file, the deepest first."""
        missing = []
        directory = path.rpartition("/")[0]
        while directory and not self.host.exists(directory):
            missing.append(directory)
            directory = directory.rpartition("/")[0]
        return tuple(missing)

    def remove_created_directories(self, entry: Entry) -> None:
        """Remove the directories that an operation created, if they are empty."""
        directories = {path for file in entry.files for path in file.directories}
        for path in sorted(directories, key=len, reverse=True):
            self.host.remove_empty_directory(path)

    def mark(self, entry: Entry, state: str) -> Entry:
        """Record the state that the operation has reached."""
        marked = entry._replace(state=state, manifest={**entry.manifest, "state": state})
        self._write(marked)
        return marked

    def _write(self, entry: Entry) -> None:
        data = json.dumps(dict(entry.manifest), indent=2).encode() + b"\n"
        self.host.write_atomic(f"{entry.directory}/manifest.json", data, mode=0o600)

    def entries(self) -> tuple[Entry, ...]:
        """All complete entries, oldest first; a directory without a manifest never began."""
        loaded = (self._load(name) for name in self.host.listdir(self.directory))
        return tuple(
            sorted((entry for entry in loaded if entry is not None), key=lambda entry: entry.sequence)
        )

    def _load(self, name: str) -> Entry | None:
        text = self.host.read_text(f"{self.directory}/{name}/manifest.json")
        try:
            entry = Entry.of(name, f"{self.directory}/{name}", json.loads(text or "null"))
        except (ValueError, RecursionError):
            return None  # the manifest is replaced in one step, so gpunode didn't write this one
        fits = all(file.path.startswith("/") and "/" not in file.backup for file in entry.files)
        return entry if fits else None

    def unfinished(self) -> tuple[Entry, ...]:
        """Entries of a process that was killed; only meaningful while holding the lock."""
        return tuple(entry for entry in self.entries() if entry.state in OPEN_STATES)

    def active(self) -> tuple[Entry, ...]:
        """Committed entries, oldest first, without those that another one of them undoes. When a reset is
        rolled back, what it had undone is active again."""
        committed = [entry for entry in self.entries() if entry.state == "committed"]
        undone = {name for entry in committed for name in entry.undoes}
        return tuple(entry for entry in committed if entry.id not in undone)

    def committed(self, name: str = "") -> Entry:
        """The committed entry `name`, by default the last. `UsageError` lists the existing ones."""
        entries = {entry.id: entry for entry in self.entries()}
        known = {
            entry.id: entry for entry in entries.values() if entry.state == "committed" and entry.undoable
        }
        if name in known or (known and not name):
            return known[name or next(reversed(known))]
        listed = ", ".join(known)
        none = "every change has been rolled back" if entries else f"{self.directory} has no entries"
        problem = f"no such journal entry: {name}" if name else f"nothing to roll back: {none}"
        see = LIST_HINT if entries or name else _NO_ENTRIES_HINT
        if name in entries:
            entry = entries[name]
            of_packages = entry.of_packages and entry.state != "rolled-back"
            why = "it changed packages" if of_packages else f"it is {entry.state}"
            problem = f"{name} can't be rolled back: {why}"
        raise UsageError(
            problem,
            hint=f"entries that can be rolled back: {listed}" if listed else self.elsewhere() or see,
        )

    def elsewhere(self) -> str:
        """The path of another journal, for a user who misses an entry; empty for the node's own."""
        if self.host.environ.get("GPUNODE_STATE_DIR"):
            return "GPUNODE_STATE_DIR chose this journal; without it the node's own is used"
        if _is_users(self.host):
            return "this is your own journal; for the node's run it with sudo"
        return ""

    def content_before(self, entry: Entry, file: JournalledFile) -> bytes | None:
        """A file's bytes before the operation, None if it didn't exist. `ConfigError` for a damaged copy."""
        if not file.existed:
            return None
        data = self.host.read_bytes(f"{entry.directory}/{file.backup}")
        if digest(data) != file.before:
            raise ConfigError(
                f"the copy of {file.path} in {entry.directory} is damaged; nothing was restored",
                hint=f"put {file.path} right by hand, then forget the entry: rm -r {entry.directory}",
            )
        return data

    def plan_undo(self, entries: Sequence[Entry], *, recovery: bool = False) -> UndoPlan:
        """How the files of `entries`, newest first, get the content that they had before all of them.

        A file that still holds what an entry wrote gets what it held before that entry. `ConfigError` if the
        copy of that is damaged, and for a path that is now a directory, a pipe or a loop of links, which
        gpunode never creates; in a `recovery`, which must go on, such a path is foreign.
        """
        edits: dict[str, FileEdit] = {}
        foreign: dict[str, bool] = {}
        for entry in entries:
            for file in entry.files:
                path = file.path
                try:
                    edit = edits.get(path) or self._unchanged(path)
                except ConfigError:
                    if not recovery:
                        raise
                    foreign[path] = True
                    continue
                state = state_of(file, edit.after)
                # a file with the original content of an older entry is restored already
                foreign[path] = state == "foreign" or (foreign.get(path, False) and state == "ours")
                after = self.content_before(entry, file) if state == "ours" else edit.after
                edits[path] = replace(edit, after=after, generated=file.generated, beside=file.beside)
        return UndoPlan(
            tuple(edit for path, edit in edits.items() if not foreign[path]),
            tuple(path for path, is_foreign in foreign.items() if is_foreign),
        )

    def _unchanged(self, path: str) -> FileEdit:
        content = self.host.read_bytes(path)
        return FileEdit(path, content, content)

    def restore_files(self, entry: Entry) -> tuple[str, ...]:
        """Restore every file that still holds what gpunode wrote, with its owner and mode.

        Returns the paths of those that another program changed, which stay as they are. No file is written if
        the copy of any is damaged.
        """
        edits = {edit.path: edit for edit in self.plan_undo((entry,), recovery=True).edits}
        for file in entry.files:
            if file.path in edits and edits[file.path].action != "unchanged":
                self._restore_file(entry, file, edits[file.path])
        self.remove_created_directories(entry)
        return self.plan_undo((entry,), recovery=True).foreign

    def _restore_file(self, entry: Entry, file: JournalledFile, edit: FileEdit) -> None:
        """Carry out the edit of one file, unless another program changes the file meanwhile."""
        try:
            if edit.after is not None:
                self._write_original(file, edit.after, expect=edit.before or b"")
            elif self.host.read_bytes(file.path) == edit.before:
                self.host.remove(file.path)
        except PreconditionError as error:
            if error.code != "planted-link" or edit.after is None:
                raise
            self._write_original(file, edit.after)  # replaces another user's symlink, so there is no content
        except GpunodeError:
            if file.path not in self.plan_undo((entry,), recovery=True).foreign:
                raise

    def restore_owners(self, entry: Entry) -> None:
        """Restore the owner and mode of files whose content was restored."""
        for file in entry.files:
            status = self.host.stat(file.path)
            then = (file.uid, file.gid, file.mode)
            if not file.existed or status is None:
                continue
            if (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == then:
                continue
            data = self.host.read_bytes(file.path)
            if data is not None and digest(data) == file.before:
                self._write_original(file, data, expect=data)
            else:
                self.host.set_owner(file.path, *then)

    def _write_original(self, file: JournalledFile, data: bytes, expect: bytes | None = None) -> None:
        """Write the original content with the owner and mode that it had."""
        owner = (file.uid, file.gid)
        self.host.write_atomic(file.path, data, mode=file.mode, expect=expect, above=True, owner=owner)

    def prune(self, keep: int = KEEP) -> None:
        """Delete finished entries beyond `keep`, and incomplete directories. Needs the lock.

        The newer half is kept, and what a later undo needs (`_needed`). Of the others, entries with an
        engine's previous files are removed last: a removal of the configuration uses them.
        """
        for name in self.host.listdir(self.directory):
            manifest = f"{self.directory}/{name}/manifest.json"
            if re.match(r"\d{8}T\d{6}Z-", name) and not self.host.exists(manifest):
                self.host.remove_tree(f"{self.directory}/{name}")
        finished = [entry for entry in self.entries() if entry.state not in OPEN_STATES]
        surplus = max(0, len(finished) - keep)
        needed = _needed(finished)
        older = [entry for entry in finished[: max(0, len(finished) - keep // 2)] if entry.id not in needed]

        def of_engine(entry: Entry) -> bool:
            return entry.state == "committed" and entry.undoable and bool(entry.engine)

        for entry in sorted(older, key=of_engine)[:surplus]:
            self.host.remove_tree(entry.directory)


def _needed(entries: Iterable[Entry]) -> frozenset[str]:
    """IDs of committed entries without which a change can't be undone: of each file the oldest, which has its
    original content, all that installed packages, and the resets by which any of these is not active."""
    committed = [entry for entry in entries if entry.state == "committed"]
    oldest: dict[str, str] = {}
    for entry in committed:
        for file in entry.files:
            oldest.setdefault(file.path, entry.id)
    needed = {*oldest.values(), *(entry.id for entry in committed if entry.of_packages)}
    return frozenset(needed | {entry.id for entry in committed if needed.intersection(entry.undoes)})


def state_of(file: JournalledFile, content: bytes | None) -> str:
    """Whether `content` is what gpunode wrote to `file` (ours), what the file held before, or foreign."""
    seen = digest(content)
    if seen == file.before:
        return "before"
    if seen == file.after or seen in file.interim:
        return "ours"
    if file.generated:
        return "before" if file.existed else "ours"  # it describes the current node better than any copy
    return "foreign"


def state_directory(host: Host) -> str:
    """The directory of the journal; ``GPUNODE_STATE_DIR`` moves it (and the lock).

    An ordinary user's, about their rootless Docker, is below ``$XDG_STATE_HOME``, else ~/.local/state.
    """
    own = host.environ.get("GPUNODE_STATE_DIR")
    if own or not _is_users(host):
        return own or STATE_DIRECTORY
    base = host.environ.get("XDG_STATE_HOME") or f"{host.environ.get('HOME', '')}/.local/state"
    return f"{base}/gpunode"


def rollback_command(host: Host, name: str) -> str:
    """The command that rolls back an entry, with --root where the journal is below it and GPUNODE_ROOT
    doesn't say so."""
    root = str(host.root)
    option = "" if root in ("/", host.environ.get("GPUNODE_ROOT")) else f" --root {shlex.quote(root)}"
    return f"gpunode{option} rollback {name}"


def lock_path(host: Host) -> str:
    """The lock held by a run that changes the node, or a user's own engine."""
    if host.environ.get("GPUNODE_STATE_DIR"):
        return f"{state_directory(host)}/lock"
    if _is_users(host):
        base = host.environ.get("XDG_RUNTIME_DIR")
        return f"{base}/gpunode/lock" if base else f"{state_directory(host)}/lock"
    return LOCK


def _is_users(host: Host) -> bool:
    return host.live and not host.is_root


def digest(data: bytes | None) -> str:
    """sha256 of a file's bytes; empty if the file doesn't exist."""
    import hashlib

    return "" if data is None else hashlib.sha256(data).hexdigest()
