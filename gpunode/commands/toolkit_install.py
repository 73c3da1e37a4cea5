"""`gpunode toolkit install`: the NVIDIA Container Toolkit through the node's own package manager."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpunode.errors import Unreadable, UsageError
from gpunode.host import Host
from gpunode.host.journal import Journal
from gpunode.output.result import Block, Change, Progress, Result, Style, Table, Text
from gpunode.packages import toolkit
from gpunode.packages.apply import CarriedOut, Job, Run, carry_out, edits_of, file_blocks, require_live
from gpunode.packages.find import find_manager, recorded_states
from gpunode.packages.manager import (
    WAIT_SECONDS,
    Command,
    FileChange,
    Manager,
    PackagesError,
    PackageState,
    Trouble,
)
from gpunode.packages.repository import (
    Judged,
    RepositoryPlan,
    Wanted,
    plan_repository,
    shelf_of,
    wanted_repository,
)
from gpunode.packages.toolkit import PACKAGES, Goal, Steps
from gpunode.runtime.apply import half_done

KIND = "ToolkitInstallation"
OPERATION = "toolkit-install"
NEXT = "gpunode configure-runtime"
_FAMILY = ("nvidia-container-", "nvidia-docker", "libnvidia-container")
_UNCHECKED = "no signature is checked for packages out of a directory: it is as good as the way they came"
_UNREAD = "the versions are the repository's newest; which that is shows when it has been read"


@dataclass(frozen=True)
class Options:
    """The command line's options. `key` is a file; `directory` is --from, `lock_seconds` --lock-timeout."""

    version: str = ""
    repository: str = ""
    key: str = ""
    directory: str = ""
    upgrade: bool = False
    hold: bool = False
    dry_run: bool = False
    lock_seconds: float = WAIT_SECONDS


@dataclass(frozen=True)
class PackageLine:
    """One package before and after, empty where it isn't installed; `after` also where nobody knows yet."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class ToolkitInstallation:
    """`data` of the envelope. `version` is what all four are at, empty if that isn't known yet; `commands`
    those that ran, or would. `repositories` are the entries that were found, each with its state."""

    manager: str
    version: str
    packages: tuple[PackageLine, ...]
    repositories: tuple[Judged, ...]
    changes: tuple[Change, ...]
    commands: tuple[str, ...]
    journal: str
    dry_run: bool
    next: str = NEXT


@dataclass(frozen=True)
class Intent:
    """What was found and what is to be done about it; `steps` are planned again once the indexes are read.

    `killed` says that an earlier run was, and has left its journal open.
    """

    manager: Manager
    states: Mapping[str, PackageState]
    goal: Goal
    files: tuple[toolkit.PackageFile, ...]
    repository: RepositoryPlan | None
    refresh: Command | None
    steps: Steps
    killed: bool = False

    @property
    def file_changes(self) -> tuple[FileChange, ...]:
        return self.repository.files if self.repository else ()


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Install, or say what would be done; kind ToolkitInstallation."""
    wanted = _check(host, options)
    manager = find_manager(host)
    if not options.dry_run:
        require_live(host)
    if options.hold:
        manager.require_holding()
    with progress.step(f"asking {manager.name} what is here and what is offered"):
        intent = _intend(host, manager, options, wanted)
    if options.dry_run:
        commands = tuple(one.text for one in (*_refreshing(intent), *intent.steps.commands))
        changes = tuple(edit.change() for edit in edits_of(host, intent.file_changes))
        notes = half_done(host, Journal.of(host))
        if intent.steps.install and not all(intent.steps.versions.values()):
            notes = (*notes, _UNREAD)
        return _report(intent, CarriedOut(changes, commands, "", notes), intent.steps.versions, dry_run=True)
    before = {name: intent.states[name].installed for name in PACKAGES}
    context = {"version": options.version, "from": options.directory, "held": options.hold}
    held = tuple(name for name in PACKAGES if intent.states[name].held)
    job = Job(host, manager, OPERATION, progress, PACKAGES, before, context, options.lock_seconds, held)
    if not intent.file_changes and not intent.steps.commands and not intent.killed:
        return _report(intent, CarriedOut((), (), "", ()), before, dry_run=False)
    done = carry_out(job, lambda: intent.file_changes, lambda run: _act(intent, run))
    after = manager.installed(PACKAGES)
    return _report(intent, done, {name: after[name].installed for name in PACKAGES}, dry_run=False)


def _check(host: Host, options: Options) -> Wanted:
    if options.directory and (options.repository or options.key):
        raise UsageError(
            "--from takes the packages out of a directory, and no repository is added then",
            hint="leave out --repository and --key, or --from",
        )
    plain = all(char.isascii() and (char.isalnum() or char in ".-~+:") for char in options.version)
    if options.version and not (plain and options.version[0].isdigit()):
        raise UsageError(f"{options.version!r} is no version", hint="as in --version 1.20.0")
    key = None
    if options.key:
        key = host.read_bytes(str(Path(options.key).absolute()))
        if key is None:
            raise UsageError(
                f"there is no file {options.key}", hint="--key takes the repository's public key"
            )
    return wanted_repository(options.repository, key)


def _intend(host: Host, manager: Manager, options: Options, wanted: Wanted) -> Intent:
    goal = Goal(options.version, options.upgrade, options.hold)
    shelf = shelf_of(host, manager)
    repository = plan_repository(host, shelf, wanted)
    states = _states(host, manager, repository)
    killed = bool(killed_runs(host))
    if options.directory:
        return _from_directory(host, manager, options, goal, states, killed=killed)
    steps = toolkit.plan(manager, states, goal, killed=killed)
    if steps.install is None and not wanted.asked and not repository.judged:  # it came by another way
        return Intent(manager, states, goal, (), None, None, steps, killed)
    only = repository.file if manager.name == "apt" else repository.id
    refresh = manager.refresh(only) if steps.install or repository.files else None
    return Intent(manager, states, goal, (), repository, refresh, steps, killed)


def killed_runs(host: Host) -> tuple[str, ...]:
    """The journal's entries of installs that run now or were killed; none if this user may not look."""
    try:
        found = Journal.of(host).unfinished()
    except Unreadable:
        return ()
    return tuple(entry.id for entry in found if entry.manifest.get("operation") == OPERATION)


def _states(host: Host, manager: Manager, repository: RepositoryPlan) -> Mapping[str, PackageState]:
    try:
        return manager.look(PACKAGES)
    except PackagesError as error:
        if not host.live:
            return recorded_states(host, PACKAGES)
        if error.code != Trouble.CONFLICTING_SOURCES or not repository.files:
            raise
        return manager.installed(PACKAGES)  # apt answers nothing until the files are right


def _from_directory(
    host: Host,
    manager: Manager,
    options: Options,
    goal: Goal,
    states: Mapping[str, PackageState],
    *,
    killed: bool,
) -> Intent:
    directory = str(Path(options.directory).absolute())
    files = toolkit.chosen(host, manager, toolkit.read_directory(host, manager, directory), options.version)
    goal = Goal(files[0].version, hold=goal.hold)
    if toolkit.settled(states, goal):
        steps = toolkit.plan(manager, states, goal, killed=killed)
        return Intent(manager, states, goal, files, None, None, steps, killed)
    downgrade = toolkit.is_downgrade(manager, states, files)
    install = manager.install_files([one.path for one in files], downgrade=downgrade)
    versions = {one.name: one.version for one in files}
    steps = toolkit.around(manager, states, goal, install, versions, killed=killed)
    return Intent(manager, states, goal, files, None, None, steps, killed)


def _refreshing(intent: Intent) -> tuple[Command, ...]:
    return (intent.refresh,) if intent.refresh else ()


def _act(intent: Intent, run: Run) -> None:
    """Read the indexes, plan with what they say, install, and see that the four are at one version."""
    manager, steps = intent.manager, intent.steps
    for command in _refreshing(intent):
        run(command)
    if intent.refresh and steps.install:
        states = manager.look(PACKAGES)
        steps = toolkit.plan(manager, states, intent.goal, killed=intent.killed)
        toolkit.require_offered(states, steps.versions)
    for command in steps.commands:
        if command is steps.install:
            _require_nothing_lost(manager, command)
        run(command)
    if steps.install is None:
        return
    after = manager.installed(PACKAGES)
    wrong = {
        name: "not configured" if state.unfinished else state.installed or "not installed"
        for name, state in after.items()
        if state.installed != steps.versions[name] or state.unfinished
    }
    if wrong:
        told = ", ".join(f"{name} {version}" for name, version in wrong.items())
        raise PackagesError(
            f"{manager.name} said that it was done, and the packages aren't at one version: {told}",
            hint="see where each comes from: gpunode toolkit status",
        )


def _require_nothing_lost(manager: Manager, install: Command) -> None:
    """What the toolkit itself replaces may go (nvidia-container-runtime before 3.6); nothing else."""
    gone = [
        one.name for one in manager.preview(install) if not one.after and not one.name.startswith(_FAMILY)
    ]
    if gone:
        raise PackagesError(
            f"the install would take these packages out: {', '.join(gone)}",
            hint="see why: apt-get --simulate install nvidia-container-toolkit",
            code=str(Trouble.DEPENDENCIES),
        )


def _report(intent: Intent, done: CarriedOut, after: Mapping[str, str], *, dry_run: bool) -> Result:
    lines = tuple(PackageLine(name, intent.states[name].installed, after.get(name, "")) for name in PACKAGES)
    versions = set(after.values())
    version = versions.pop() if len(versions) == 1 else ""
    judged = intent.repository.judged if intent.repository else ()
    data = ToolkitInstallation(
        intent.manager.name, version, lines, judged, done.changes, done.commands, done.journal, dry_run
    )
    newer = _newer(intent)
    notes = (*done.notes, *((_UNCHECKED,) if intent.files and intent.steps.install else ()), *newer)
    return Result(KIND, data, messages=notes, blocks=tuple(_blocks(intent, data, dry_run=dry_run)))


def _newer(intent: Intent) -> tuple[str, ...]:
    version = toolkit.common_version(intent.states)
    newest = {intent.states[name].candidate for name in PACKAGES}
    if intent.steps.install or not version or newest <= {version, ""}:
        return ()
    shown = ", ".join(sorted(newest - {version, ""}))
    return (f"{shown} is offered; to take it: gpunode toolkit install --upgrade",)


def _blocks(intent: Intent, data: ToolkitInstallation, *, dry_run: bool) -> list[Block]:
    files: Sequence[FileChange] = intent.file_changes
    blocks = file_blocks(files, data.changes, dry_run=dry_run)
    for command in data.commands:
        blocks.append(Text(f"{'would run' if dry_run else 'ran'}: {command}", Style.COMMAND))
    if not data.commands and not data.changes:
        blocks.append(Text(f"the toolkit is installed: {data.version}, nothing to do", Style.GOOD))
    else:
        rows = tuple(
            (one.name, one.before or "-", one.after or ("newest" if dry_run else "-"))
            for one in data.packages
        )
        blocks.append(Table(("PACKAGE", "BEFORE", "AFTER"), rows))
    blocks.append(Text(f"next: {NEXT}", Style.COMMAND))
    if data.journal:
        blocks.append(Text("undo it with: gpunode toolkit remove", Style.DIM))
    return blocks
