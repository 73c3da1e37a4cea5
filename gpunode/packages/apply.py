"""Install or remove packages: files through the journal, commands under one lock.

A failure rolls back the packages as far as the manager can, then the files.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from gpunode.errors import GpunodeError, PreconditionError, RolledBackError
from gpunode.host import Host
from gpunode.host.journal import FileEdit, Journal
from gpunode.host.transaction import Restart, Transaction, attempt, begin, not_restored, uninterrupted
from gpunode.output.result import Block, Change, Diff, Progress, Style, Text
from gpunode.packages.manager import (
    LOCKED,
    WAIT_SECONDS,
    Command,
    FileChange,
    Manager,
    PackageRequest,
    PackagesError,
    PackageState,
    run_command,
    wait_for_others,
)
from gpunode.packages.repository import SUFFIX


class PackageJob(NamedTuple):
    """The work to do. `watched` are the packages to roll back if it fails, `before` their state.

    `held` are those of them that were on hold. `context` goes into the journal; `before` is added to it, so
    that a removal knows which packages were not installed. `stays` is whether the files stay if the process
    is killed: the next run continues from there.
    """

    host: Host
    manager: Manager
    operation: str
    progress: Progress
    watched: tuple[str, ...]
    before: Mapping[str, str]
    context: Mapping[str, Any] = MappingProxyType({})
    lock_seconds: float = WAIT_SECONDS
    held: tuple[str, ...] = ()
    stays: bool = True


class CarriedOut(NamedTuple):
    """What was done. `commands` ran, in this order; `journal` is the entry that rolls the files back, empty
    if none was written."""

    changes: tuple[Change, ...] = ()
    commands: tuple[str, ...] = ()
    journal: str = ""
    notes: tuple[str, ...] = ()


Run = Callable[[Command], None]
HALF_INSTALLED = "half-installed"
_ARMOUR = "BEGIN PGP PUBLIC KEY BLOCK"


def require_live(host: Host) -> None:
    """`PreconditionError` for another root, and for a user without the required rights."""
    if not host.live:
        raise PreconditionError(
            "packages are only installed and removed on the node itself", hint="leave --root out"
        )
    if not host.is_root:
        raise PreconditionError("changing packages needs root", hint="run it again with sudo")


def carry_out(
    job: PackageJob,
    restart: Restart,
    files: Callable[[], Sequence[FileChange]],
    act: Callable[[Run], None],
    give_up: Callable[[Run], None] = lambda _run: None,
) -> CarriedOut:
    """Write the files, then let `act` run its commands. `RolledBackError` if it fails and is rolled back.

    `restart` restarts the engine of another command's killed run; see `host.transaction.begin`. `give_up`
    first undoes what only the caller knows of. Ctrl-C lets the running command finish, and stops before the
    next. An error that leaves packages changed names them. The journal records the work before the first
    command, also without files: the next run must know which packages a killed run has left.
    """
    wait_for_others(job.host, job.manager, job.progress, job.lock_seconds)  # before anything is written
    with begin(job.host, restart) as (journal, notes):
        edits = edits_of(job.host, files())
        work = _Commands(
            job, journal, tuple(edit for edit in edits if edit.action != "unchanged"), act, give_up
        )
        work.change.run(work.all_or_none)
    entry = work.change.entry
    changes = tuple(edit.change() for edit in edits)
    return CarriedOut(changes, tuple(work.ran), entry.id if entry is not None else "", notes)


class _Commands:
    """The commands of one job: `ran` are those that succeeded, in order."""

    def __init__(
        self,
        job: PackageJob,
        journal: Journal,
        edits: tuple[FileEdit, ...],
        act: Callable[[Run], None],
        give_up: Callable[[Run], None],
    ) -> None:
        context = {
            **{"engine": "", "units": [], **job.context},
            "packageManager": job.manager.name,
            "packages": dict(job.before),
            "stays": job.stays,
        }
        self.change = Transaction(journal, job.operation, edits, context)
        self.job, self.act, self.give_up = job, act, give_up
        self.ran: list[str] = []
        self._started = self._ending = False
        self._packages: frozenset[tuple[str, str]] = frozenset()  # before the first command
        self._stopped_by = ""

    def _run(self, command: Command) -> None:
        if self._stopped_by and not self._ending:
            raise KeyboardInterrupt(self._stopped_by)
        self.change.open()
        job = self.job
        if not self._started:
            self._packages = job.manager.everything()
        self._started = True
        try:
            run_command(
                job.host,
                job.manager,
                command,
                job.progress,
                wait_seconds=job.lock_seconds,
                whole=self._whole,
            )
        except PackagesError as error:
            if not command.tolerated or error.code == LOCKED:
                raise
            job.progress.note(f"{error.message}; going on")
        else:
            self.ran.append(command.text)

    @contextmanager
    def _whole(self, command: Command) -> Iterator[None]:
        """Run a command without interruption; a signal only prints what happens after its end."""

        def report(name: str) -> None:
            then = "rolling back the changes"
            if not self._ending:
                self._stopped_by = name
                then = "the remaining steps are skipped and the changes are rolled back"
            self._say(
                name,
                f"waiting for {command.name} to end, because interrupting it could leave packages"
                f" half-installed; {then}",
            )

        with uninterrupted(report):
            yield

    def _say(self, name: str, what: str) -> None:
        with suppress(RuntimeError):  # the signal arrived while another line was being written
            self.job.progress.note(f"{'Ctrl-C' if name == 'SIGINT' else name}: {what}")

    def all_or_none(self) -> None:
        """Run all commands, or restore all packages."""

        def shield() -> AbstractContextManager[None]:
            return uninterrupted(lambda name: self._say(name, "rolling back the changes"))

        attempt(lambda: self.act(self._run), self._roll_back, shield)

    def _roll_back(self, error: BaseException) -> None:
        self._ending = True
        if not self._started:
            return
        job = self.job
        problems: list[GpunodeError] = []
        try:
            self.give_up(self._run)
        except GpunodeError as trouble:
            problems.append(trouble)
        left = _packages_back(job, self._run)
        if left is not None:
            self._note_what_is_left()
            problems.insert(0, left)
        others = _others_left(job, self._packages)
        if others is not None:
            problems.append(others)
        if problems:
            failure = not_restored(error, problems)
            failure.code = HALF_INSTALLED if left is not None else failure.code
            raise failure from error
        if isinstance(error, KeyboardInterrupt):
            job.progress.note("the packages were restored")
        if isinstance(error, GpunodeError):
            raise RolledBackError(
                f"{error.message}; packages and files were restored", hint=error.hint, code=error.code
            ) from error

    def _note_what_is_left(self) -> None:
        """Record packages that are left, for a later removal; the files and their entry are restored anyway.

        A removal that failed needs no record: the next one finds everything it needs.
        """
        change = self.change
        if not change.edits:
            change.stays = self.job.stays
            return
        try:
            rest = change.journal.begin(change.operation, (), change.context)
            change.journal.mark(rest, "committed" if self.job.stays else "rolled-back")
        except GpunodeError as trouble:
            self.job.progress.note(f"the journal doesn't know what is left: {trouble.message}")


def edits_of(host: Host, files: Sequence[FileChange]) -> tuple[FileEdit, ...]:
    """The file changes as edits for the journal."""
    return tuple(FileEdit(file.path, host.read_bytes(file.path), file.content) for file in files)


def file_blocks(files: Sequence[FileChange], changes: Sequence[Change], *, dry_run: bool) -> list[Block]:
    """Each file with its change and the reason; with `dry_run` its diff."""
    reasons = {file.path: file.reason for file in files}
    aside = {path.partition(SUFFIX)[0]: path for path in reasons if SUFFIX in path}
    mark = " (dry run)" if dry_run else ""
    blocks: list[Block] = []
    for change in changes:
        why = f": {reasons[change.path]}" if reasons.get(change.path) else ""
        if change.path in aside.values():
            continue
        if change.path in aside:
            blocks.append(Text(f"{change.path} renamed to {aside[change.path]}{mark}{why}", Style.GOOD))
            continue
        blocks.append(Text(f"{change.path} {change.action}{mark}{why}", Style.GOOD))
        if dry_run and change.diff and _ARMOUR not in change.diff:  # the armor of a key is not informative
            blocks.append(Diff(change.diff))
    return blocks


def _packages_back(job: PackageJob, run: Run) -> GpunodeError | None:
    """Restore every watched package to its version; return an error with those that are left."""
    try:
        now = job.manager.installed(job.watched)
        for command in back(job.manager, now, job.before):
            run(command)
        free = [name for name, state in job.manager.installed(job.held).items() if not state.held]
        if free:
            run(job.manager.hold(free))
        left = _different(job.manager.installed(job.watched), job.before)
    except GpunodeError as trouble:
        left = {"packages": trouble.message}
    if not left:
        return None
    packages = ", ".join(f"{name} {version}" for name, version in left.items())
    return PackagesError(
        f"these packages could not be restored: {packages}",
        hint="see the current state: gpunode toolkit status",
    )


def _others_left(job: PackageJob, before: frozenset[tuple[str, str]]) -> GpunodeError | None:
    """An error with the packages that were added or changed, and the commands that undo it.

    gpunode doesn't run those: another program may need a compiler or a library by now.
    """
    try:
        now = job.manager.everything()
    except GpunodeError as trouble:
        return trouble
    new, gone = (
        {name: version for name, version in sorted(changed) if name.partition(":")[0] not in job.watched}
        for changed in (now - before, before - now)
    )
    if not new and not gone:
        return None
    texts = [
        f"{name} {version} ({f'was {gone[name]}' if name in gone else 'new'})"
        for name, version in new.items()
    ]
    texts += [f"{name} {version} (removed)" for name, version in gone.items() if name not in new]
    known = {name for name, _ in before}
    again = [PackageRequest(name, version) for name, version in gone.items()]
    commands = (
        *((job.manager.install(again, downgrade=True),) if again else ()),
        *((job.manager.remove(names),) if (names := [name for name in new if name not in known]) else ()),
    )
    return PackagesError(
        f"other packages are not as before: {', '.join(texts)}",
        hint="; ".join(shlex.join(command.argv) for command in commands),
    )


def back(manager: Manager, now: Mapping[str, PackageState], before: Mapping[str, str]) -> tuple[Command, ...]:
    """The commands that undo an incomplete transaction: remove new packages, then install old versions."""
    wrong = _different(now, before)
    out = [name for name in wrong if not before.get(name)]
    again = [PackageRequest(name, before[name]) for name in wrong if before.get(name)]
    return (
        *((manager.install(again, downgrade=True),) if again else ()),
        *((manager.remove(out),) if out else ()),
    )


def _different(now: Mapping[str, PackageState], before: Mapping[str, str]) -> dict[str, str]:
    """The packages that differ from their earlier state, with their present one."""
    return {
        name: state.installed or "not installed"
        for name, state in now.items()
        if state.installed != before.get(name, "")
    }
