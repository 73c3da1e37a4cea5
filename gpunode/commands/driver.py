"""`gpunode driver`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from gpunode.commands.help_page import command_group
from gpunode.commands.options import (
    LOCK_SECONDS,
    DryRunOption,
    HoldOption,
    KeyOption,
    LockOption,
    YesOption,
    one_of,
    refuse_unknown,
)
from gpunode.commands.session import Session, verb
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.facts.kernels import installed_kernels
from gpunode.facts.module_builds import failed_build
from gpunode.facts.node import Node
from gpunode.facts.packages import read_packages
from gpunode.host import Host
from gpunode.output.result import (
    Block,
    Change,
    ErrorInfo,
    ExitCode,
    Progress,
    Result,
    Style,
    Table,
    Text,
    command_blocks,
)
from gpunode.packages.apply import (
    CarriedOut,
    PackageJob,
    Run,
    back,
    carry_out,
    edits_of,
    file_blocks,
    require_live,
)
from gpunode.packages.driver_model import (
    DISTRIBUTION,
    FLAVOURS,
    NVIDIA,
    DriverPlan,
    Situation,
    Wish,
    read_situation,
)
from gpunode.packages.driver_plan import hint_of, plan_driver
from gpunode.packages.find import find_manager
from gpunode.packages.manager import (
    Command,
    Manager,
    PackagesError,
    holder,
    run_command,
    wait_for_others,
)
from gpunode.packages.repository import public_key
from gpunode.runtime.restart import engine_restart

driver_app = command_group("Plan and install the NVIDIA driver.")


@dataclass(frozen=True)
class DriverOptions:
    """The options that choose a driver."""

    branch: Annotated[
        int,
        typer.Option(
            "--branch",
            metavar="N",
            min=0,
            max=9999,
            help="Major version, such as 580.",
            show_default="the installed one, else the one maintained longest",
        ),
    ] = 0
    version: Annotated[
        str,
        typer.Option(
            "--version", metavar="X.Y.Z", help="Driver version.", show_default="the newest of --branch"
        ),
    ] = ""
    flavour: Annotated[
        str,
        typer.Option(
            "--flavour",
            metavar="open|proprietary",
            help="Kernel module to install.",
            show_default="what the GPUs and the branch need",
            autocompletion=one_of(*FLAVOURS),
        ),
    ] = ""
    repository: Annotated[
        str,
        typer.Option(
            "--repository",
            metavar="WHERE",
            help="Package repository: distribution, nvidia, or the URL of a mirror.",
            show_default="the distribution's where it is preferred, else NVIDIA's",
            autocompletion=one_of(DISTRIBUTION, NVIDIA),
        ),
    ] = ""
    key: KeyOption = ""
    hold: HoldOption = False


@verb(driver_app, "plan", "DriverPlan")
def driver_plan(
    session: Session,
    choice: DriverOptions,
) -> Result:
    """Show which driver these GPUs and this kernel need, and why.

    gpunode driver plan

    gpunode driver plan --branch 580 --flavour open
    """
    wish = build_wish(session.host, choice)
    check(wish)  # before the output says that the node is examined
    with session.progress.step("looking at the GPUs, the kernel and the packages"):
        plan = made(session.host, wish)[1]
    blocked = bool(plan.refusals) and not plan.up_to_date  # obstacles are part of the plan, not errors
    status = "warn" if blocked else "ok"
    return Result("DriverPlan", data_of(plan), status=status, messages=plan.notes, blocks=tuple(blocks(plan)))


# `gpunode driver plan`: which driver these GPUs and this kernel need, why, and how to install it.

_NUMERALS = frozenset("0123456789.")


class FileLine(NamedTuple):
    """A file that the plan writes."""

    path: str
    reason: str
    content: str


class PlanData(NamedTuple):
    """`data` of the envelope: the plan for programs, with commands as an administrator would type them."""

    id: str
    branch: int
    flavour: str
    version: str
    route: str
    installed: str
    up_to_date: bool
    resolved: bool
    decisions: tuple[object, ...]
    packages: tuple[object, ...]
    files: tuple[FileLine, ...]
    commands: tuple[str, ...]
    changes: tuple[object, ...]
    refusals: tuple[object, ...]
    reboot: str


def build_wish(host: Host, options: DriverOptions) -> Wish:
    """The request that the command line makes. `ConfigError` for a file that isn't a key."""
    data = b""
    if options.key:
        content = host.read_bytes(str(Path(options.key).absolute()))
        if content is None:
            raise UsageError(f"there is no file {options.key}", hint="--key takes the mirror's public key")
        data = public_key(host, content).content
    repository = options.repository.rstrip("/")
    return Wish(options.branch, options.version, options.flavour, repository, options.hold, data)


def made(host: Host, wish: Wish, before: Situation | None = None) -> tuple[Situation, DriverPlan]:
    """The node as it is now and its plan. `UsageError` for a request that contradicts itself.

    With `before`, changes of our own files since then count as still to be done.
    """
    check(wish)
    situation = read_situation(Node(host))
    if before is not None:
        situation = situation._replace(nouveau_kept_out=before.nouveau_kept_out)
    return situation, plan_driver(host, situation, wish)


def check(wish: Wish) -> None:
    """Check branch, version, flavour and repository, each on its own and together."""
    refuse_unknown("--flavour", [wish.flavour] if wish.flavour else [], FLAVOURS)
    numbers = wish.version.split(".")
    if wish.version and not (set(wish.version) <= _NUMERALS and len(numbers) in (2, 3) and all(numbers)):
        if wish.version.isdecimal():
            raise UsageError(
                f"{wish.version!r} is a branch, not a driver version",
                hint=f"--branch {wish.version}, or a whole version such as --version 580.159.03",
            )
        raise UsageError(f"{wish.version!r} is not a driver version", hint="as in --version 580.159.03")
    if wish.version and wish.branch and numbers[0] != str(wish.branch):
        raise UsageError(
            f"version {wish.version} isn't of branch {wish.branch}", hint="leave out --branch or --version"
        )
    known = ("", DISTRIBUTION, NVIDIA)
    if wish.key and wish.repository in known:
        raise UsageError("a key is for a mirror of NVIDIA's repository", hint="name it: --repository URL")
    if "@" in wish.repository.partition("//")[2].partition("/")[0]:
        raise UsageError(
            "a password in the repository's address would be readable by every user on this node",
            hint="put it where apt (auth.conf) or dnf (the .repo file's username) keep it",
        )
    if wish.repository not in known and not wish.repository.startswith(("https://", "file:/")):
        raise UsageError(
            f"{wish.repository!r} is not a repository",
            hint="distribution, nvidia, or the https address of a mirror of NVIDIA's",
        )
    if any(not character.isprintable() or character in ' "[]' for character in wish.repository):
        raise UsageError(
            "a repository's address has no blanks or quotes", hint="give it as a browser takes it"
        )


def data_of(plan: DriverPlan) -> PlanData:
    """The plan for programs."""
    return PlanData(
        plan.id,
        plan.branch,
        plan.flavour,
        plan.version,
        plan.route,
        plan.installed,
        plan.up_to_date,
        plan.resolved,
        plan.decisions,
        plan.packages,
        tuple(FileLine(file.path, file.reason, (file.content or b"").decode()) for file in plan.files),
        tuple(command.text for command in plan.commands),
        plan.changes,
        plan.refusals,
        plan.reboot,
    )


def blocks(plan: DriverPlan, *, refusals: bool = True) -> Iterator[Block]:
    """The plan for people; without `refusals` where errors report them."""
    if plan.decisions:
        release = plan.version or f"branch {plan.branch}"
        yield Text(f"driver {release}, {plan.flavour} kernel module", Style.HEADING)
        width = max(len(decision.subject) for decision in plan.decisions) + 2
        for decision in plan.decisions:
            yield Text(f"  {decision.subject:<{width}}{decision.choice}")
            yield Text(f"  {'':<{width}}{decision.because} ({decision.source})", Style.DIM)
    if plan.up_to_date:
        yield Text(f"driver {plan.version} is installed: nothing to do", Style.GOOD)
    if plan.packages and not plan.up_to_date:
        yield Text("")
        lines = tuple(
            (
                package.name,
                package.installed or "-",
                package.version or (package.exact and plan.version) or "newest of the branch",
                package.origin or "-",
            )
            for package in plan.packages
        )
        yield Table(("PACKAGE", "NOW", "THEN", "FROM"), lines)
    yield from _work(plan)
    if refusals and plan.refusals and not plan.up_to_date:
        if plan.decisions or plan.commands:
            yield Text("")
        yield Text("This plan can't be carried out:", Style.BAD)
        for refusal in plan.refusals:
            yield Text(f"  {refusal.message}", Style.BAD)
            yield Text(f"    {refusal.hint}", Style.DIM)


def _work(plan: DriverPlan) -> Iterator[Block]:
    if not plan.commands:
        return
    yield Text("")
    for file in plan.files:
        yield Text(f"write {file.path}: {file.reason}")
    for command in plan.commands:
        yield Text(f"$ {command.text}", Style.COMMAND)
    removed = [change.name for change in plan.changes if not change.after]
    if removed:
        yield Text(f"goes away: {', '.join(removed)}", Style.WARN)
    reboot = f"reboot needed: {plan.reboot}" if plan.reboot else "no reboot is needed"
    yield Text(reboot, Style.WARN if plan.reboot else Style.GOOD)
    yield Text(f"plan {plan.id}", Style.DIM)


# `gpunode driver install`: carry out the driver's plan, or say why not. It never reboots.

INSTALLATION = "DriverInstallation"
OPERATION = "driver-install"
_KEYRING = "cuda-keyring"
_OURS = ("nvidia", "libcuda", "libnv", "nvlsm", "dkms")  # packages that a driver may install along with it
_DIGITS = frozenset("0123456789abcdef")


class DriverInstallation(NamedTuple):
    """`data` of the envelope: the plan, and the steps that were carried out. `pending` are finishing commands
    that failed: the driver is installed, and the user must run them. `undo` are the commands that restore the
    previous packages, as far as the repositories still have them."""

    plan: PlanData
    changes: tuple[Change, ...]
    commands: tuple[str, ...]
    pending: tuple[str, ...]
    undo: tuple[str, ...]
    journal: str
    reboot: str
    dry_run: bool


@verb(driver_app, "install", "DriverInstallation")
def driver_install(
    session: Session,
    choice: DriverOptions,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    plan: Annotated[
        str,
        typer.Option(
            "--plan",
            metavar="ID",
            help="Install only if this is still the plan's ID, which driver plan prints.",
        ),
    ] = "",
    lock_timeout: LockOption = LOCK_SECONDS,
) -> Result:
    """Install the driver as planned. Running GPU programs continue. If a reboot is needed, the output says
    so; until then, new CUDA programs may fail.

    Needs root and --yes, except with --dry-run.

    gpunode driver install --dry-run

    sudo gpunode driver install --yes

    sudo gpunode driver install --yes --plan 3f9c01d2ab47
    """
    host, progress, wish = session.host, session.progress, build_wish(session.host, choice)
    if not set(plan) <= _DIGITS:
        raise UsageError(f"{plan!r} is not a plan's id", hint="gpunode driver plan shows it at its end")
    with progress.step("looking at the GPUs, the kernel and the packages"):
        situation, current = made(host, wish)
    if yes and not dry_run and current.commands and not current.refusals:
        require_live(host)
        if _waited_for_others(host, progress, lock_timeout):
            situation, current = made(host, wish)
    if current.up_to_date:
        return _result(current, CarriedOut(), dry_run=dry_run)
    if plan not in ("", current.id):
        return _refused(current, plan, dry_run=dry_run)
    if dry_run:
        changes = tuple(edit.change() for edit in edits_of(host, current.files))
        return _result(current, CarriedOut(changes), dry_run=True)
    if current.refusals or not yes:
        return _refused(current, plan, dry_run=False)
    require_live(host)
    return _install(host, situation, current, wish, lock_timeout, progress)


def _waited_for_others(host: Host, progress: Progress, lock_seconds: float) -> bool:
    """Wait until no other package manager runs; True if one did, because the node must then be read again."""
    manager = find_manager(host)
    if holder(host, manager.lock_files) is None:
        return False
    wait_for_others(host, manager, progress, lock_seconds)
    return True


def _refused(plan: DriverPlan, identifier: str, *, dry_run: bool) -> Result:
    """Show the plan with the refusal, so that the reader knows what to change."""
    errors = [ErrorInfo(refusal.code, refusal.message, refusal.hint) for refusal in plan.refusals]
    if not errors:
        hint = f"read the plan, then run this with --yes --plan {plan.id}"
        code, reason = "not-confirmed", "the plan was not confirmed"
        if identifier not in ("", plan.id):
            code, reason = "plan-changed", f"{identifier} isn't this node's plan, {plan.id} is"
        errors = [ErrorInfo(code, f"nothing was changed: {reason}", hint)]
    data = DriverInstallation(data_of(plan), (), (), (), (), "", plan.reboot, dry_run)
    page = tuple(blocks(plan, refusals=False))
    return Result(INSTALLATION, data, "error", ExitCode.PRECONDITION, plan.notes, tuple(errors), page)


def _install(
    host: Host,
    situation: Situation,
    plan: DriverPlan,
    wish: Wish,
    lock_seconds: float,
    progress: Progress,
) -> Result:
    if not plan.preparing:
        _require(plan)
    manager = find_manager(host)
    watched = (*plan.watched, *((_KEYRING,) if plan.preparing and manager.name == "apt" else ()))
    before = {name: state.installed for name, state in manager.installed(watched).items()}
    context = {"branch": plan.branch, "flavour": plan.flavour, "driver": plan.version}
    job = PackageJob(host, manager, OPERATION, progress, watched, before, context, lock_seconds)
    latest, present = [plan], frozenset(read_packages(host).installed)

    def plan_again() -> DriverPlan:
        latest[0] = made(host, wish, situation)[1]
        return latest[0]

    try:
        carried_out = carry_out(
            job,
            engine_restart(host, progress),
            lambda: plan.files,
            lambda run: _install_packages(job, plan, plan_again, run),
            lambda run: _remove_additions(job, latest[0], plan, present, run),
        )
    except GpunodeError as error:
        error.hint = hint_of(error.code, manager.name, error.hint)
        raise
    final = latest[0]
    undo = _undo_commands(job, final, plan, present)
    ran, pending, why = _finish(job, final.commands[len(final.commands) - final.finishing :])
    combined = CarriedOut(
        carried_out.changes, (*carried_out.commands, *ran), carried_out.journal, (*carried_out.notes, *why)
    )
    return _result(final, combined, pending, undo, dry_run=False)


def _added_packages(host: Host, present: frozenset[str], plan: DriverPlan) -> tuple[str, ...]:
    """The packages that this plan adds to `present`; if the manager reports no more, those of a driver."""
    listed = {change.name for change in plan.changes}
    added = sorted(frozenset(read_packages(host).installed) - present)
    return tuple(
        name for name in added if name in listed or (not listed and any(word in name for word in _OURS))
    )


def _undo_commands(
    job: PackageJob, final: DriverPlan, initial: DriverPlan, present: frozenset[str]
) -> tuple[str, ...]:
    """Undo commands; files stay as they are, and so does the journal, which has their earlier content."""
    names = tuple(dict.fromkeys((*job.watched, *_added_packages(job.host, present, final))))
    commands = back(job.manager, job.manager.installed(names), job.before)
    return tuple(command.text for command in (*commands, *initial.stream_back))


def _install_packages(
    job: PackageJob, plan: DriverPlan, plan_again: Callable[[], DriverPlan], run: Run
) -> None:
    """Add the repository and plan again with its packages, then install and check the result."""
    for command in plan.commands[: plan.preparing]:
        run(command)
    if plan.preparing:
        plan = plan_again()
        _require(plan)
        job.progress.info(f"the repository has driver {plan.version}")
    for command in plan.commands[plan.preparing : len(plan.commands) - plan.finishing]:
        run(command)
    _check_installed(job.host, job.manager, plan)


def _remove_additions(
    job: PackageJob, plan: DriverPlan, initial: DriverPlan, present: frozenset[str], run: Run
) -> None:
    """Remove what `carry_out` doesn't know of: additional packages, and the module stream."""
    node = Node(job.host)
    for release in dict.fromkeys((node.kernel, node.next_kernel)):
        build = failed_build(job.host, release)
        if build is not None:  # its log is removed with the packages
            job.progress.note(f"kernel {release}: {build.text}")
    try:
        added = _added_packages(job.host, present, plan)
        if added:
            run(job.manager.remove(added))
    except GpunodeError as error:
        job.progress.note(f"what came along isn't gone: {error.message}")
    for command in initial.stream_back:
        try:
            run(command)
        except GpunodeError as error:
            error.hint = f"run it again: {command.text}"
            raise


def _require(plan: DriverPlan) -> None:
    """Refusals that are only known once the repository has been read."""
    if plan.refusals:
        refusal = plan.refusals[0]
        raise PreconditionError(refusal.message, hint=refusal.hint, code=refusal.code)
    if not plan.resolved:
        raise PackagesError(
            "the package manager doesn't report the available versions",
            hint="see its error: gpunode driver plan",
        )


def _check_installed(host: Host, manager: Manager, plan: DriverPlan) -> None:
    """Check that the packages are at their versions and that a kernel of this node has a module."""
    states = manager.look([package.name for package in plan.packages])
    not_installed = [
        f"{package.name} {states[package.name].installed or 'not installed'}"
        for package in plan.packages
        if package.version
        and (states[package.name].installed != package.version or states[package.name].unfinished)
    ]
    if not_installed:
        raise PackagesError(
            f"{manager.name} reported success, but these are not installed: {', '.join(not_installed)}",
            hint="see what holds them back: gpunode driver plan",
        )
    node = Node(host)
    boots = (node.kernel, node.next_kernel)
    if not any(kernel.has_module for kernel in installed_kernels(host) if kernel.release in boots):
        raise PackagesError(
            f"the packages are installed, and kernel {node.next_kernel} has got no module",
            hint="see whether its headers are whole and DKMS has a compiler: gpunode doctor --only driver",
        )


def _finish(
    job: PackageJob, commands: Sequence[Command]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The commands that ran, those that are pending, and why: installed packages stay installed."""
    ran: list[str] = []
    for number, command in enumerate(commands):
        try:
            run_command(job.host, job.manager, command, job.progress, wait_seconds=job.lock_seconds)
        except GpunodeError as error:
            remaining = tuple(later.text for later in commands[number:])
            return tuple(ran), remaining, (f"{command.text} failed: {error.message}",)
        except KeyboardInterrupt:
            remaining = tuple(later.text for later in commands[number:])
            job.progress.note(f"the driver is installed; left to do: {'; '.join(remaining)}")
            raise
        ran.append(command.text)
    return tuple(ran), (), ()


def _result(
    plan: DriverPlan,
    carried_out: CarriedOut,
    pending: tuple[str, ...] = (),
    undo: tuple[str, ...] = (),
    *,
    dry_run: bool,
) -> Result:
    data = DriverInstallation(
        data_of(plan),
        carried_out.changes,
        carried_out.commands,
        pending,
        undo,
        carried_out.journal,
        plan.reboot,
        dry_run,
    )
    notes = (*plan.notes, *carried_out.notes)
    if dry_run or plan.up_to_date:
        refusals = () if plan.up_to_date else plan.refusals
        foreseen = tuple(
            ErrorInfo(refusal.code, f"a real run would be refused: {refusal.message}", refusal.hint)
            for refusal in refusals
        )
        status, exit_code = ("fail", ExitCode.PRECONDITION) if foreseen else ("ok", ExitCode.OK)
        page = tuple(blocks(plan, refusals=False))
        return Result(INSTALLATION, data, status, exit_code, notes, foreseen, page)
    lines: list[Block] = file_blocks(plan.files, carried_out.changes, dry_run=False)
    lines += command_blocks(carried_out.commands, dry_run=False)
    lines.append(Text(f"driver {plan.version}, {plan.flavour} kernel module, is installed", Style.GOOD))
    lines += [Text(f"left to do: {command}", Style.WARN) for command in pending]
    if plan.reboot:
        lines.append(Text(f"reboot needed: {plan.reboot}", Style.WARN))
    lines.append(Text("next: gpunode doctor", Style.COMMAND))
    lines += [Text(f"undo it with: {command}", Style.DIM) for command in undo]
    code = ExitCode.FAILED if pending else ExitCode.OK
    message = "the driver is installed and doesn't come up yet"
    errors = (ErrorInfo("not-loaded", message, "gpunode doctor says why"),) if pending else ()
    return Result(INSTALLATION, data, "fail" if pending else "ok", code, notes, errors, tuple(lines))
