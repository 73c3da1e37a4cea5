"""`gpunode toolkit install|status|remove`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from gpunode.commands import status
from gpunode.commands.options import LOCK_SECONDS, DryRunOption, HoldOption, KeyOption, LockOption
from gpunode.commands.session import Session, verb
from gpunode.commands.toolkit_config import toolkit_app
from gpunode.errors import PreconditionError, Unreadable, UsageError
from gpunode.facts.packages import locked
from gpunode.facts.writers import is_nvidia_program
from gpunode.host import Host
from gpunode.host.journal import OPEN_STATES, Entry, Journal, state_of
from gpunode.host.transaction import unfinished_notes
from gpunode.output.result import (
    Block,
    Cell,
    Change,
    ExitCode,
    Progress,
    Result,
    Style,
    Table,
    Text,
    command_blocks,
)
from gpunode.output.typed import as_dict
from gpunode.packages import toolkit
from gpunode.packages.apply import CarriedOut, PackageJob, Run, carry_out, edits_of, file_blocks, require_live
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
    SUFFIX,
    DesiredRepository,
    EntryState,
    Judged,
    RepositoryPlan,
    desired_repository,
    judge,
    plan_repository,
    public_key,
    shelf_of,
)
from gpunode.packages.toolkit import PACKAGES, Goal, Steps, common_version
from gpunode.runtime.find import FINDERS
from gpunode.runtime.restart import engine_restart


@dataclass(frozen=True)
class InstallOptions:
    """What to install, and from where; `from_directory` is one with the packages."""

    version: Annotated[
        str,
        typer.Option(
            "--version",
            metavar="X.Y.Z",
            help="Version to install, upgrade or downgrade to, such as 1.20.0.",
            show_default="the installed, else the newest",
        ),
    ] = ""
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Upgrade an installed toolkit, to --version or the newest.")
    ] = False
    hold: HoldOption = False
    repository: Annotated[
        str,
        typer.Option(
            "--repository",
            metavar="URL",
            help="URL of a mirror, without its stable/deb or stable/rpm.",
            show_default="NVIDIA's repository",
        ),
    ] = ""
    key: KeyOption = ""
    from_directory: Annotated[
        str,
        typer.Option(
            "--from", metavar="DIR", help="Install the packages in this directory, without network."
        ),
    ] = ""
    lock_timeout: LockOption = LOCK_SECONDS


@verb(toolkit_app, "install", "ToolkitInstallation")
def toolkit_install(session: Session, options: InstallOptions, dry_run: DryRunOption = False) -> Result:
    """Install the toolkit. It adds NVIDIA's repository and key, and disables retired and duplicate entries of
    that repository, without a question.

    Needs root (except with --dry-run).

    sudo gpunode toolkit install

    sudo gpunode toolkit install --version 1.20.0 --hold

    sudo gpunode toolkit install --from /media/packages
    """
    return install(session.host, session.progress, options, dry_run=dry_run)


@verb(toolkit_app, "status", "ToolkitStatus")
def toolkit_status(session: Session) -> Result:
    """Show the toolkit's packages and their repositories. The exit code is 1 if something should be fixed.

    gpunode toolkit status -o json
    """
    host, progress = session.host, session.progress
    manager = find_manager(host)
    shelf = shelf_of(host, manager)
    desired = desired_repository()
    repositories = judge(shelf.entries(desired), desired, shelf.address(desired), shelf.file)
    with progress.step(f"querying {manager.name} for installed and available packages"):
        states, trouble = _installed_states(host, manager)
    packages = tuple(_package(host, manager, states[name]) for name in PACKAGES)
    killed = tuple(f"an install runs now or was killed half-way: {name}" for name in killed_runs(host))
    problems = (*trouble, *killed, *_problems(states, repositories))
    version = common_version(states)
    good = version and not problems and any(state.installed for state in states.values())
    next_command = NEXT if good else "gpunode toolkit install"
    data = ToolkitStatus(manager.name, version, packages, repositories, problems, next_command)
    return Result(
        "ToolkitStatus",
        data,
        status="warn" if problems else "ok",
        exit_code=ExitCode.FAILED if problems else ExitCode.OK,
        messages=_remarks(packages),
        blocks=tuple(_status_blocks(data)),
    )


@verb(toolkit_app, "remove", "ToolkitRemoval")
def toolkit_remove(
    session: Session, lock_timeout: LockOption = LOCK_SECONDS, dry_run: DryRunOption = False
) -> Result:
    """Remove what toolkit install installed. It is refused while an engine uses the runtime.

    Needs root (except with --dry-run).

    sudo gpunode toolkit remove
    """
    return remove(session.host, session.progress, dry_run=dry_run, lock_seconds=lock_timeout)


# `gpunode toolkit install`: the NVIDIA Container Toolkit through the node's own package manager.

OPERATION = "toolkit-install"
NEXT = "gpunode configure-runtime"
_VERSION = re.compile(r"(\d+:)?\d+\.\d+\.\d+([-~][A-Za-z0-9.+~-]+)?", re.A)  # or a package's: 1.20.0~rc.1-1
_FAMILY = ("nvidia-container-", "nvidia-docker", "libnvidia-container")
_UNCHECKED = "signatures of packages in a directory are not checked: make sure that you trust their source"
_UNREAD = "the newest versions are installed; their numbers are known once the repository has been read"


class PackageLine(NamedTuple):
    """One package before and after; empty where it isn't installed, `after` also while it is unknown."""

    name: str
    before: str
    after: str


class ToolkitInstallation(NamedTuple):
    """`data` of the envelope. `version` is that of all four, empty if it isn't known yet; `commands` are
    those that ran, or would run. `repositories` are the existing entries, each with its state."""

    manager: str
    version: str
    packages: tuple[PackageLine, ...]
    repositories: tuple[Judged, ...]
    changes: tuple[Change, ...]
    commands: tuple[str, ...]
    journal: str
    dry_run: bool
    next: str = NEXT


class InstallPlan(NamedTuple):
    """The present state and the steps to take; `steps` are planned again once the indexes are read.

    `killed` says that an earlier run was killed and left an open journal entry.
    """

    manager: Manager
    states: Mapping[str, PackageState]
    goal: Goal
    files: tuple[toolkit.PackageFile, ...]
    repository: RepositoryPlan | None
    refresh: tuple[Command, ...]
    steps: Steps
    killed: bool = False

    @property
    def file_changes(self) -> tuple[FileChange, ...]:
        return self.repository.files if self.repository else ()


def install(
    host: Host, progress: Progress, options: InstallOptions = InstallOptions(), *, dry_run: bool = False
) -> Result:
    """Install, or report what would be done; kind ToolkitInstallation."""
    goal, directory = Goal(options.version, options.upgrade, options.hold), options.from_directory
    desired = _check(host, options)
    manager = find_manager(host)
    if not dry_run:
        require_live(host)
    if goal.hold:
        manager.require_holding()
    with progress.step(f"querying {manager.name} for installed and available packages"):
        intent = _intend(host, manager, goal, directory, desired)
    if dry_run:
        commands = tuple(command.text for command in (*intent.refresh, *intent.steps.commands))
        changes = tuple(edit.change() for edit in edits_of(host, intent.file_changes))
        notes = unfinished_notes(Journal.of(host))
        if intent.steps.install and not all(intent.steps.versions.values()):
            notes = (*notes, _UNREAD)
        return _report(intent, CarriedOut(changes, commands, "", notes), intent.steps.versions, dry_run=True)
    before = {name: intent.states[name].installed for name in PACKAGES}
    context = {"version": goal.version, "from": directory, "held": goal.hold}
    held_packages = tuple(name for name in PACKAGES if intent.states[name].held)
    job = PackageJob(
        host, manager, OPERATION, progress, PACKAGES, before, context, options.lock_timeout, held_packages
    )
    if not intent.file_changes and not intent.steps.commands and not intent.killed:
        return _report(intent, CarriedOut(), before, dry_run=False)
    done = carry_out(
        job, engine_restart(host, progress), lambda: intent.file_changes, lambda run: _act(intent, run)
    )
    after = manager.installed(PACKAGES)
    return _report(intent, done, {name: after[name].installed for name in PACKAGES}, dry_run=False)


def _check(host: Host, options: InstallOptions) -> DesiredRepository:
    version, key = options.version, options.key
    if options.from_directory and (options.repository or key):
        raise UsageError(
            "--from takes the packages out of a directory, and no repository is added then",
            hint="leave out --repository and --key, or --from",
        )
    if version and not _VERSION.fullmatch(version):
        raise UsageError(f"{version!r} is not a version", hint="as in --version 1.20.0")
    if not key:
        return desired_repository(options.repository)
    content = host.read_bytes(str(Path(key).absolute()))
    if content is None:
        raise UsageError(f"there is no file {key}", hint="--key takes the repository's public key")
    return desired_repository(options.repository, public_key(host, content))


def _intend(
    host: Host, manager: Manager, goal: Goal, directory: str, desired: DesiredRepository
) -> InstallPlan:
    shelf = shelf_of(host, manager)
    repository = plan_repository(host, shelf, desired)
    states = _states(host, manager, repository)
    killed = bool(killed_runs(host))
    if directory:
        return _from_directory(host, manager, directory, goal, states, killed=killed)
    steps = toolkit.plan(manager, states, goal, killed=killed)
    if steps.install is None and not desired.asked and not repository.judged:  # installed in another way
        return InstallPlan(manager, states, goal, (), None, (), steps, killed)
    only = repository.file if manager.name == "apt" else repository.id
    refresh = (manager.refresh(only),) if steps.install or repository.files else ()
    return InstallPlan(manager, states, goal, (), repository, refresh, steps, killed)


def killed_runs(host: Host) -> tuple[str, ...]:
    """The journal's entries of installs that run now or were killed; none if this user may not look."""
    try:
        entries = Journal.of(host).unfinished()
    except Unreadable:
        return ()
    return tuple(entry.id for entry in entries if entry.operation == OPERATION)


def _states(host: Host, manager: Manager, repository: RepositoryPlan) -> Mapping[str, PackageState]:
    try:
        return manager.look(PACKAGES)
    except PackagesError as error:
        if not host.live:
            return recorded_states(host, PACKAGES)
        if error.code != Trouble.CONFLICTING_SOURCES or not repository.files:
            raise
        return manager.installed(PACKAGES)  # apt reports nothing until its files are valid


def _from_directory(
    host: Host,
    manager: Manager,
    directory: str,
    goal: Goal,
    states: Mapping[str, PackageState],
    *,
    killed: bool,
) -> InstallPlan:
    offered = toolkit.read_directory(host, manager, str(Path(directory).absolute()))
    files = toolkit.chosen(host, manager, offered, goal.version)
    goal = Goal(files[0].version, hold=goal.hold)
    if toolkit.settled(states, goal):
        steps = toolkit.plan(manager, states, goal, killed=killed)
    else:
        downgrade = toolkit.is_downgrade(manager, states, files)
        install = manager.install_files([file.path for file in files], downgrade=downgrade)
        versions = {file.name: file.version for file in files}
        steps = toolkit.around(manager, states, goal, install, versions, killed=killed)
    return InstallPlan(manager, states, goal, files, None, (), steps, killed)


def _act(intent: InstallPlan, run: Run) -> None:
    """Read the indexes, plan with them, install, and check that the four have one version."""
    manager, steps = intent.manager, intent.steps
    for command in intent.refresh:
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
        versions = ", ".join(f"{name} {version}" for name, version in wrong.items())
        raise PackagesError(
            f"{manager.name} said that it was done, and the packages aren't at one version: {versions}",
            hint="see where each comes from: gpunode toolkit status",
        )


def _require_nothing_lost(manager: Manager, install: Command) -> None:
    """Packages that the toolkit itself replaces may be removed (nvidia-container-runtime before 3.6), no
    others."""
    lost = [
        package.name
        for package in manager.preview(install)
        if not package.after and not package.name.startswith(_FAMILY)
    ]
    if lost:
        raise PackagesError(
            f"the install would take these packages out: {', '.join(lost)}",
            hint="see why: apt-get --simulate install nvidia-container-toolkit",
            code=str(Trouble.DEPENDENCIES),
        )


def _report(intent: InstallPlan, done: CarriedOut, after: Mapping[str, str], *, dry_run: bool) -> Result:
    lines = tuple(PackageLine(name, intent.states[name].installed, after.get(name, "")) for name in PACKAGES)
    versions = set(after.values())
    version = versions.pop() if len(versions) == 1 else ""
    repositories = intent.repository.judged if intent.repository else ()
    data = ToolkitInstallation(
        intent.manager.name, version, lines, repositories, done.changes, done.commands, done.journal, dry_run
    )
    newer = _newer(intent)
    notes = (*done.notes, *((_UNCHECKED,) if intent.files and intent.steps.install else ()), *newer)
    blocks = tuple(_blocks(intent, data, dry_run=dry_run))
    return Result("ToolkitInstallation", data, messages=notes, blocks=blocks)


def _newer(intent: InstallPlan) -> tuple[str, ...]:
    version = toolkit.common_version(intent.states)
    newest = {intent.states[name].candidate for name in PACKAGES}
    if intent.steps.install or not version or newest <= {version, ""}:
        return ()
    versions = ", ".join(sorted(newest - {version, ""}))
    return (f"{versions} is offered; to take it: gpunode toolkit install --upgrade",)


def _blocks(intent: InstallPlan, data: ToolkitInstallation, *, dry_run: bool) -> list[Block]:
    files: Sequence[FileChange] = intent.file_changes
    blocks = file_blocks(files, data.changes, dry_run=dry_run)
    blocks += command_blocks(data.commands, dry_run=dry_run)
    pending = bool(data.commands or data.changes)
    if not pending:
        blocks.append(Text(f"the toolkit is installed: {data.version}, nothing to do", Style.GOOD))
    else:
        rows = tuple(
            (package.name, package.before or "-", package.after or ("newest" if dry_run else "-"))
            for package in data.packages
        )
        blocks.append(Table(("PACKAGE", "BEFORE", "AFTER"), rows))
    blocks.append(
        Text(f"{'after the installation' if dry_run and pending else 'next'}: {NEXT}", Style.COMMAND)
    )
    if data.journal:
        blocks.append(Text("undo it with: gpunode toolkit remove", Style.DIM))
    return blocks


# `gpunode toolkit remove`: remove what `toolkit install` installed, once no engine needs it.

REMOVAL = "toolkit-remove"
LEFTOVERS = (
    "/etc/nvidia-container-runtime/config.toml",
    "/etc/nvidia-container-toolkit",
    "/var/run/cdi/nvidia.yaml",
    "/etc/cdi/nvidia.yaml",
)


class ToolkitRemoval(NamedTuple):
    """`data` of the envelope. `packages` are removed, or would be; `kept` are those that gpunode didn't
    install, `left` files that stay and why, `by_hand` the command that removes what is kept."""

    manager: str
    packages: tuple[str, ...]
    kept: tuple[str, ...]
    changes: tuple[Change, ...]
    commands: tuple[str, ...]
    left: tuple[str, ...]
    by_hand: str
    dry_run: bool


class OwnInstallation(NamedTuple):
    """What gpunode installed, according to the journal: packages that were not installed before, whether it
    held them, and files that did not exist before and still have the content that it wrote; `changed` are
    those edited since, `aside` the new names of files that were disabled."""

    packages: tuple[str, ...]
    held: bool
    files: tuple[str, ...]
    changed: tuple[str, ...]
    aside: tuple[str, ...]


def remove(
    host: Host,
    progress: Progress,
    *,
    dry_run: bool = False,
    lock_seconds: float = WAIT_SECONDS,
    in_use: bool = False,
) -> Result:
    """Remove, or report what would be removed; kind ToolkitRemoval. `PreconditionError` while an engine uses
    it, unless `in_use` allows that for a dry run."""
    manager = find_manager(host)
    if not dry_run:
        require_live(host)
    installed = own_installation(host, Journal.of(host).entries())
    states = manager.installed(PACKAGES)
    going = tuple(name for name in installed.packages if states[name].installed)
    others = tuple(name for name in PACKAGES if states[name].installed and name not in going)
    if going and not in_use:
        _require_unused(host)
    commands = _commands(manager, states, going, installed)
    if commands:
        with progress.step(f"querying {manager.name} for dependent packages"):
            _require_alone(manager, commands, going)
    files = tuple(FileChange(path, None, "") for path in installed.files)
    changes = tuple(edit.change() for edit in edits_of(host, files))
    if not dry_run:
        _carry_out(host, manager, states, commands, files, progress, lock_seconds)
    data = ToolkitRemoval(
        manager.name,
        going,
        others,
        changes,
        tuple(command.text for command in commands),
        tuple(_leftovers(host, installed)),
        manager.remove(others).text if others else "",
        dry_run,
    )
    return Result("ToolkitRemoval", data, blocks=tuple(_removal_blocks(data, files)))


def _carry_out(
    host: Host,
    manager: Manager,
    states: Mapping[str, PackageState],
    commands: Sequence[Command],
    files: Sequence[FileChange],
    progress: Progress,
    lock_seconds: float,
) -> None:
    """Packages first: while the repository is configured, they can be reinstalled."""
    before = {name: states[name].installed for name in PACKAGES}
    # after a kill between the two, the next run must still know of the files
    context = {"filesLeft": [file.path for file in files]}
    job = PackageJob(host, manager, REMOVAL, progress, PACKAGES, before, context, lock_seconds, stays=False)

    def act(run: Run) -> None:
        for command in commands:
            run(command)

    restart = engine_restart(host, progress)
    carry_out(job, restart, lambda: (), act)
    now = {name: state.installed for name, state in manager.installed(PACKAGES).items()}
    rest = PackageJob(host, manager, REMOVAL, progress, PACKAGES, now, stays=False)
    carry_out(rest, restart, lambda: files, lambda _run: None)


def own_installation(host: Host, entries: Sequence[Entry]) -> OwnInstallation:
    """Entries since the last removal: packages removed then are no longer gpunode's."""
    installs: list[Entry] = []
    for entry in entries:
        if entry.state == "committed" and entry.operation == REMOVAL and not entry.files_left:
            installs = []
        elif entry.state in (*OPEN_STATES, "committed") and entry.operation == OPERATION:
            installs.append(entry)  # a killed run has installed packages as well
    first: dict[str, str] = {}
    for entry in installs:
        for name, version in as_dict(entry.packages).items():
            first.setdefault(name, version)
    files: dict[str, str] = {}
    for entry in installs:
        for file in entry.files:
            if not file.existed and SUFFIX not in file.path:
                files[file.path] = ""
            if file.path in files and file.after:
                files[file.path] = state_of(file, host.read_bytes(file.path))
    return OwnInstallation(
        tuple(name for name in PACKAGES if first.get(name) == ""),
        any(entry.held for entry in installs),
        tuple(path for path, state in files.items() if state == "ours"),
        tuple(path for path, state in files.items() if state == "foreign"),
        tuple(file.path for entry in installs for file in entry.files if SUFFIX in file.path),
    )


def _commands(
    manager: Manager, states: Mapping[str, PackageState], going: Sequence[str], installed: OwnInstallation
) -> tuple[Command, ...]:
    held_packages = [name for name in going if states[name].held]
    if held_packages and not installed.held:
        raise PreconditionError(
            f"held at their version, and not by gpunode: {', '.join(held_packages)}",
            hint=manager.release(held_packages).text,
        )
    release = (manager.release(held_packages),) if held_packages else ()
    return (*release, manager.remove(going)) if going else ()


def _require_alone(manager: Manager, commands: Sequence[Command], going: Sequence[str]) -> None:
    if not commands or len(commands) > 1:
        return  # apt doesn't report held packages before they are released
    others = [
        package.name
        for package in manager.preview(commands[-1])
        if not package.after and package.name not in going
    ]
    if others:
        raise PreconditionError(
            f"with the toolkit these would go, which gpunode didn't bring: {', '.join(others)}",
            hint=manager.remove(others).text,
            code="needed",
        )


def _require_unused(host: Host) -> None:
    """An engine whose default runtime is missing can't start any container."""
    try:
        data = status.run(host).data
    except PreconditionError:
        return  # no engine
    users: dict[str, str] = {}
    for engine in data.engines:
        for handler in engine.handlers:
            if is_nvidia_program(handler.path):
                name = engine.manager if engine.manager in FINDERS else engine.name
                where = handler.file or "the running daemon"
                users.setdefault(name, f"{name} has the runtime {handler.name} ({where})")
    if users:
        flags = " ".join(f"--runtime {name}" for name in users)
        raise PreconditionError(
            f"still in use: {'; '.join(users.values())}",
            hint=f"take it out first: gpunode unconfigure-runtime {flags}",
            code="in-use",
        )


def _leftovers(host: Host, installed: OwnInstallation) -> Iterator[str]:
    for path in installed.changed:
        yield f"{path}: changed since gpunode wrote it"
    for path in installed.aside:
        if host.exists(path):
            yield f"{path}: put aside by gpunode; rename it to have it back"
    for path in LEFTOVERS:
        if host.exists(path):
            yield f"{path}: configuration; the packages don't remove it"


def _removal_blocks(data: ToolkitRemoval, files: Sequence[FileChange]) -> Iterator[Block]:
    yield from file_blocks(files, data.changes, dry_run=data.dry_run)
    yield from command_blocks(data.commands, dry_run=data.dry_run)
    if not data.commands and not data.changes:
        yield Text("nothing to remove: gpunode toolkit install installed nothing here", Style.GOOD)
    for leftover in data.left:
        yield Text(f"left alone: {leftover}", Style.DIM)
    if data.kept:
        yield Text(f"left alone, installed by others: {', '.join(data.kept)}", Style.DIM)
        yield Text(f"to remove them: {data.by_hand}", Style.COMMAND)


# `gpunode toolkit status`: the four packages, their sources, and inconsistencies.

_STATUS_FAMILY = {"apt": "debian", "dnf": "rhel", "zypper": "suse"}
_STATE_PHRASES = {
    EntryState.RETIRED: "is retired: NVIDIA no longer serves it",
    EntryState.DUPLICATE: "names the repository a second time",
    EntryState.OTHER_KEY: "is to be signed by a key that is missing or isn't NVIDIA's",
}


class ToolkitPackage(NamedTuple):
    """One of the four; empty where it isn't installed or offered. `origins` are those of the installed
    version, `pinned` is by a hold, a preference or a lock."""

    name: str
    installed: str
    candidate: str
    origins: tuple[str, ...]
    candidate_origins: tuple[str, ...]
    pinned: bool


class ToolkitStatus(NamedTuple):
    """`data` of the envelope. `version` is that of all four, empty if they differ; `next` a command."""

    manager: str
    version: str
    packages: tuple[ToolkitPackage, ...]
    repositories: tuple[Judged, ...]
    problems: tuple[str, ...]
    next: str


def _installed_states(host: Host, manager: Manager) -> tuple[Mapping[str, PackageState], tuple[str, ...]]:
    """All known facts, and why others are unknown."""
    try:
        return manager.look(PACKAGES), ()
    except PackagesError as error:
        if host.live:
            return manager.installed(PACKAGES), (error.message,)
    return recorded_states(host, PACKAGES), ()


def _package(host: Host, manager: Manager, state: PackageState) -> ToolkitPackage:
    return ToolkitPackage(
        state.name,
        state.installed,
        state.candidate,
        state.origins(state.installed) if state.installed else (),
        state.origins(state.candidate) if state.candidate else (),
        state.held or locked(host, _STATUS_FAMILY[manager.name], state.name),
    )


def _problems(states: Mapping[str, PackageState], repositories: tuple[Judged, ...]) -> Iterator[str]:
    installed = {name: state.installed for name, state in states.items() if state.installed}
    if len(set(installed.values())) > 1:
        versions = ", ".join(f"{name} {version}" for name, version in installed.items())
        yield f"the packages are at different versions: {versions}"
    if installed and len(installed) < len(PACKAGES):
        yield f"not installed: {', '.join(name for name in PACKAGES if name not in installed)}"
    if half := [name for name, state in states.items() if state.unfinished]:
        yield f"unpacked and not configured: {', '.join(half)}"
    held_packages = [name for name, state in states.items() if state.held]
    if held_packages and len(held_packages) < len(PACKAGES):
        yield f"held without the others, so that an upgrade takes them apart: {', '.join(held_packages)}"
    for repository in repositories:
        if repository.state in _STATE_PHRASES:
            entry = repository.entry
            yield f"{entry.path}, line {entry.line}: {entry.address} {_STATE_PHRASES[repository.state]}"


def _remarks(packages: tuple[ToolkitPackage, ...]) -> tuple[str, ...]:
    origins = dict.fromkeys(origin for package in packages for origin in package.candidate_origins)
    if len(origins) < 2:
        return ()
    return (f"more than one repository has the toolkit, and the newest wins: {', '.join(origins)}",)


def _status_blocks(data: ToolkitStatus) -> Iterator[Block]:
    rows = tuple(
        (
            package.name,
            Cell(package.installed or "-", Style.PLAIN if package.installed else Style.DIM),
            package.candidate or "-",
            ", ".join(package.origins or package.candidate_origins) or "-",
            "yes" if package.pinned else "no",
        )
        for package in data.packages
    )
    yield Table(("PACKAGE", "INSTALLED", "NEWEST", "FROM", "PINNED"), rows)
    good = (EntryState.USED, EntryState.CHANNEL, EntryState.REPLACED)
    for repository in data.repositories:
        style = Style.GOOD if repository.state in good else Style.WARN
        entry = repository.entry
        yield Text(f"{entry.path}:{entry.line}  {entry.address}  {repository.state}", style)
    for problem in data.problems:
        yield Text(problem, Style.WARN)
    yield Text(f"next: {data.next}", Style.COMMAND)
