"""`gpunode driver install`: carry out the driver's plan, or say why not. It never reboots."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.commands import driver_plan
from gpunode.commands.driver_plan import PlanData, data_of, made
from gpunode.commands.packages_apply import (
    CarriedOut,
    Job,
    Run,
    carry_out,
    edits_of,
    file_blocks,
    require_live,
)
from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts import driver
from gpunode.host import Host
from gpunode.packages.driver_model import DriverPlan, Situation, Wish
from gpunode.packages.manager import Command, Manager, PackagesError
from gpunode.packages.run import WAIT_SECONDS, run_command
from gpunode.result import Block, Change, ErrorInfo, ExitCode, Progress, Result, Style, Text

KIND = "DriverInstallation"
OPERATION = "driver-install"
_KEYRING = "cuda-keyring"


@dataclass(frozen=True)
class Options:
    """`dry_run` only shows the plan; without `yes` nothing is done either, and that is an error."""

    wish: Wish = Wish()
    dry_run: bool = False
    yes: bool = False
    lock_seconds: float = WAIT_SECONDS


@dataclass(frozen=True)
class DriverInstallation:
    """`data` of the envelope: the plan, and what was done of it. `pending` are finishing commands that
    failed: the driver is installed, and they are left to do."""

    plan: PlanData
    changes: tuple[Change, ...]
    commands: tuple[str, ...]
    pending: tuple[str, ...]
    journal: str
    reboot: str
    dry_run: bool


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Install as planned; kind DriverInstallation. `PreconditionError` for what the plan refuses."""
    with progress.step("looking at the GPUs, the kernel and the packages"):
        situation, plan = made(host, options.wish)
    if plan.up_to_date:
        return _result(plan, CarriedOut((), (), "", ()), (), options)
    if options.dry_run:
        changes = tuple(edit.change() for edit in edits_of(host, plan.files))
        return _result(plan, CarriedOut(changes, (), "", ()), (), options)
    if plan.refusals or not options.yes:
        return _refused(plan, options)
    require_live(host)
    return _install(host, situation, plan, options, progress)


def _refused(plan: DriverPlan, options: Options) -> Result:
    """The plan is shown all the same: who reads it knows what to change."""
    errors = [ErrorInfo(one.code, one.message, one.hint) for one in plan.refusals]
    if not errors:
        hint = "read the plan, then: gpunode driver install --yes with the same options"
        errors = [ErrorInfo("not-confirmed", "nothing was changed: the plan wasn't confirmed", hint)]
    data = DriverInstallation(data_of(plan), (), (), (), "", plan.reboot, options.dry_run)
    shown = tuple(driver_plan.blocks(plan, refusals=False))
    return Result(KIND, data, "error", ExitCode.PRECONDITION, plan.notes, tuple(errors), shown)


def _install(
    host: Host, situation: Situation, plan: DriverPlan, options: Options, progress: Progress
) -> Result:
    from gpunode.packages.driver import manager_of

    if not plan.preparing:
        _require(plan)
    manager = manager_of(host, situation.distribution.family)
    watched = (*plan.watched, *((_KEYRING,) if plan.preparing and manager.name == "apt" else ()))
    before = {name: state.installed for name, state in manager.installed(watched).items()}
    context = {"branch": plan.branch, "flavour": plan.flavour, "driver": plan.version}
    job = Job(host, manager, OPERATION, progress, watched, before, context, options.lock_seconds)
    latest = [plan]

    def act(run: Run) -> None:
        latest[0] = _act(job, situation, plan, options.wish, run)

    done = carry_out(job, lambda: plan.files, act)
    final = latest[0]
    ran, pending, why = _finish(job, final.commands[len(final.commands) - final.finishing :])
    shown = CarriedOut(done.changes, (*done.commands, *ran), done.journal, (*done.notes, *why))
    return _result(final, shown, pending, options)


def _act(job: Job, situation: Situation, plan: DriverPlan, wish: Wish, run: Run) -> DriverPlan:
    """Make the repository known and plan again with what it has, then install and look at the outcome."""
    first = plan
    try:
        for command in plan.commands[: plan.preparing]:
            run(command)
        if plan.preparing:
            plan = made(job.host, wish, situation)[1]
            _require(plan)
            job.progress.note(f"the repository has driver {plan.version}")
        for command in plan.commands[plan.preparing : len(plan.commands) - plan.finishing]:
            run(command)
        _prove(job.host, job.manager, plan)
    except BaseException:
        for command in first.stream_back:
            run(command)
        raise
    return plan


def _require(plan: DriverPlan) -> None:
    """What only shows once the repository has been read."""
    if plan.refusals:
        first = plan.refusals[0]
        raise PreconditionError(first.message, hint=first.hint, code=first.code)
    if not plan.resolved:
        raise PackagesError(
            "the package manager doesn't tell which versions there are",
            hint="see what it says: gpunode driver plan",
        )


def _prove(host: Host, manager: Manager, plan: DriverPlan) -> None:
    """That the packages are at their versions, and that a kernel of this node has a module."""
    states = manager.look([one.name for one in plan.packages])
    wrong = [
        f"{one.name} {states[one.name].installed or 'not installed'}"
        for one in plan.packages
        if one.version and states[one.name].installed != one.version
    ]
    if wrong:
        raise PackagesError(
            f"{manager.name} said that it was done, and isn't: {', '.join(wrong)}",
            hint="see what holds them back: gpunode driver plan",
        )
    if not any(kernel.has_module for kernel in driver.installed_kernels(host)):
        raise PackagesError(
            "the packages are installed, and no kernel of this node has got a module",
            hint="see /var/lib/dkms/nvidia/VERSION/build/make.log",
        )


def _finish(
    job: Job, commands: Sequence[Command]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Those that ran, those that are left to do, and why: what is installed stays installed."""
    ran: list[str] = []
    for number, command in enumerate(commands):
        try:
            run_command(job.host, job.manager, command, job.progress, wait_seconds=job.lock_seconds)
        except GpunodeError as error:
            left = tuple(one.text for one in commands[number:])
            return tuple(ran), left, (f"{command.text} failed: {error.message}",)
        ran.append(command.text)
    return tuple(ran), (), ()


def _result(plan: DriverPlan, done: CarriedOut, pending: tuple[str, ...], options: Options) -> Result:
    data = DriverInstallation(
        data_of(plan), done.changes, done.commands, pending, done.journal, plan.reboot, options.dry_run
    )
    notes = (*plan.notes, *done.notes)
    if options.dry_run or plan.up_to_date:
        status = "warn" if plan.refusals and not plan.up_to_date else "ok"
        return Result(KIND, data, status, messages=notes, blocks=tuple(driver_plan.blocks(plan)))
    shown: list[Block] = file_blocks(plan.files, done.changes, dry_run=False)
    shown += [Text(f"ran: {command}", Style.COMMAND) for command in done.commands]
    shown.append(Text(f"driver {plan.version}, {plan.flavour} kernel module, is installed", Style.GOOD))
    shown += [Text(f"left to do: {command}", Style.WARN) for command in pending]
    if plan.reboot:
        shown.append(Text(f"reboot needed: {plan.reboot}", Style.WARN))
    shown.append(Text("next: gpunode doctor", Style.COMMAND))
    code = ExitCode.FAILED if pending else ExitCode.OK
    errors = (
        (
            ErrorInfo(
                "not-loaded", "the driver is installed and doesn't come up yet", "gpunode doctor says why"
            ),
        )
        if pending
        else ()
    )
    return Result(KIND, data, "fail" if pending else "ok", code, notes, errors, tuple(shown))
