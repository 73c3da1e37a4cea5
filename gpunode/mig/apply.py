"""Change from one MIG layout to another as a transaction: each step, then verification, or a rollback."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from gpunode.errors import GpunodeError, RolledBackError
from gpunode.host import Host
from gpunode.host.transaction import attempt
from gpunode.mig.model import GpuLayout, Layouts
from gpunode.mig.placement import CannotPlace, InstanceTarget, solve
from gpunode.mig.plan import GpuPlan, MigStep, as_it_was, reached, same_layout, towards
from gpunode.mig.session import MigSession
from gpunode.mig.unfinished import UnfinishedGpus, end, save

_TRIES = 3  # for the rollback: a call that failed once may have failed only temporarily


class Tools(NamedTuple):
    """`open` reopens NVML; no NVML is open while `reset` resets GPUs.

    `uninterrupted` defers signals, `announce` prints a step.
    """

    open: Callable[[], MigSession]
    reset: Callable[[Sequence[GpuLayout]], None]
    uninterrupted: Callable[[], AbstractContextManager[None]]
    announce: Callable[[str], AbstractContextManager[None]]


class MigNotRestoredError(GpunodeError):
    """A change and its rollback failed: at least one GPU has neither its old layout nor the desired one."""

    default_code = "mig-half-done"


def carry_out(
    host: Host,
    tools: Tools,
    plans: Sequence[GpuPlan],
    left: UnfinishedGpus,
    *,
    skip_reset: bool = False,
    mode_only: bool = False,
) -> Layouts:
    """Carry out the plans and return the layouts afterwards.

    On failure each GPU gets back its present layout, or the one from before the earlier run that `left` it
    unfinished.

    `RolledBackError` if the change failed and every GPU was restored; `MigNotRestoredError` if the rollback
    failed too. An interruption is raised again after the rollback.
    """
    half = {gpu.uuid: gpu for gpu in left.half}
    before = tuple(half.get(plan.gpu.uuid, plan.gpu) for plan in plans)

    def forward() -> Layouts:
        after = _forward(tools, plans, skip_reset, mode_only)
        with tools.uninterrupted():
            end(host, left.unasked)
        return after

    def back(error: BaseException) -> None:
        problem = restore(tools, before)
        if problem:
            raise MigNotRestoredError(
                f"{_words(error)}; and restoring the previous layout failed: {problem}",
                hint="see the current layout: gpunode mig list; then apply again",
            ) from error
        end(host, left.unasked)
        if isinstance(error, GpunodeError):
            raise RolledBackError(
                f"{error.message}; the previous layout was restored", hint=error.hint
            ) from error

    # without an undo: if it fails, the snapshot of an earlier run that was killed stays the one to restore
    with tools.uninterrupted():
        save(host, before, plans, left)
    return attempt(forward, back, tools.uninterrupted)


def _words(error: BaseException) -> str:
    if isinstance(error, GpunodeError):
        return error.message
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


def _forward(tools: Tools, plans: Sequence[GpuPlan], skip_reset: bool, mode_only: bool) -> Layouts:
    waiting: list[GpuLayout] = []
    with tools.open() as session:
        created: dict[tuple[str, int], int] = {}
        for plan in plans:
            for step in plan.steps:
                if step.action in ("enable", "disable"):
                    with tools.announce(f"GPU {plan.gpu.index}: {step.text}"):
                        active = session.set_mode(plan.gpu.uuid, plan.wish.enabled)
                    waiting += [] if active else [plan.gpu]
                elif step.action in ("destroy-compute", "destroy-instance"):
                    _do(tools, session, step, created)
        if not waiting:
            return _fill(tools, session, plans, mode_only)
    if skip_reset and not mode_only:
        names = ", ".join(f"GPU {gpu.index}" for gpu in waiting)
        raise GpunodeError(
            f"the new MIG mode of {names} waits for a reset",
            hint="leave --skip-reset out; or let it wait for a reboot: --mode-only --skip-reset",
            code="mig-reset",
        )
    if not skip_reset:
        tools.reset(waiting)
    with tools.open() as session:
        return session.layouts() if skip_reset else _fill(tools, session, plans, mode_only)


def _fill(tools: Tools, session: MigSession, plans: Sequence[GpuPlan], mode_only: bool) -> Layouts:
    """Create the instances once the modes are active, and verify that they exist."""
    now = session.layouts()
    created: dict[tuple[str, int], int] = {}
    targets: dict[str, tuple[InstanceTarget, ...]] = {}
    for plan in plans:
        gpu = _gpu(now, plan.gpu)
        if gpu.current != plan.wish.enabled:
            raise _no_mode(gpu, plan.wish.enabled)
        target = plan.target if plan.target is not None else _late(plan, gpu)
        targets[plan.gpu.uuid] = target
        present = () if plan.changes_mode else plan.gpu.instances
        for step in towards(gpu, present, target)[1]:
            _do(tools, session, step, created)
    after = session.layouts()
    for plan in plans:
        wrong = reached(plan, _gpu(after, plan.gpu), targets[plan.gpu.uuid], mode_only=mode_only)
        if wrong:
            raise GpunodeError(
                f"GPU {plan.gpu.index} does not have the requested layout: {wrong}",
                hint="see the current layout: gpunode mig list",
                code="mig-differs",
            )
    return after


def _no_mode(gpu: GpuLayout, desired: bool) -> GpunodeError:
    word = "on" if desired else "off"
    virtual = gpu.virtualization == 1  # NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH
    hint = "look at the kernel's log: gpunode doctor"
    if virtual:
        hint = "in a virtual machine it takes a reboot: apply with --mode-only --skip-reset, reboot, apply"
    return GpunodeError(f"GPU {gpu.index} has not switched MIG {word}", hint=hint, code="mig-reset")


def _late(plan: GpuPlan, gpu: GpuLayout) -> tuple[InstanceTarget, ...]:
    """The target for a GPU of which the driver reports the profiles only once MIG is on."""
    try:
        return solve(gpu, plan.wish.profiles)
    except CannotPlace as error:
        fits = f"; {error.fits}" if error.fits else ""
        raise GpunodeError(
            f"GPU {gpu.index} ({gpu.name}): {error.reason}{fits}", code="mig-impossible"
        ) from error


def _gpu(layouts: Layouts, gpu: GpuLayout) -> GpuLayout:
    layout = layouts.gpu(gpu.uuid)
    if layout is None or layout.error or layout.untold:
        reason = f": {layout.error or layout.untold}" if layout is not None else ""
        raise GpunodeError(
            f"GPU {gpu.index} can no longer be queried{reason}", hint="gpunode doctor", code="mig"
        )
    return layout


def _do(tools: Tools, session: MigSession, step: MigStep, created: dict[tuple[str, int], int]) -> None:
    """Carry out one step on instances; `created` has the ids of new GPU instances by UUID and start."""
    with tools.announce(f"GPU {step.gpu}: {step.text}"):
        if step.action == "destroy-compute":
            assert step.gi is not None and step.ci is not None
            session.destroy_compute_instance(step.uuid, step.gi, step.ci)
        elif step.action == "destroy-instance":
            assert step.gi is not None
            session.destroy_gpu_instance(step.uuid, step.gi)
        elif step.action == "create-instance":
            gi, at = session.create_gpu_instance(step.uuid, step.profile_id, step.at, step.profile)
            created[step.uuid, at.start] = gi
            if step.at is not None and at != step.at:
                raise GpunodeError(f"GPU {step.gpu}: the driver put the {step.profile} at {at}", code="mig")
        elif step.action == "create-compute":
            assert step.at is not None
            gi = step.gi if step.gi is not None else created[step.uuid, step.at.start]
            session.create_compute_instance(step.uuid, gi, step.slices, step.inner)


# --- rollback ----------------------------------------------------------------------------------------


def restore(tools: Tools, before: Sequence[GpuLayout]) -> str:
    """Restore GPUs to an earlier layout; return an empty text, or which GPU wasn't restored and why.

    What already matches isn't changed. A failure on one GPU doesn't stop the restoring of the others: after a
    first attempt on all, each GPU is tried with a newly opened NVML.
    """
    left = tuple(before)
    wrong: dict[str, str] = {}
    for turn in range(_TRIES):
        wrong = {}
        for group in [(gpu,) for gpu in left] if turn else [left]:
            wrong |= _put_back(tools, group)
        left = tuple(gpu for gpu in left if gpu.uuid in wrong)
        if not left:
            return ""
    others = "; the others are unchanged" if len(left) < len(before) else ""
    return "; ".join(f"GPU {gpu.index}: {wrong[gpu.uuid]}" for gpu in left) + others


def _put_back(tools: Tools, gpus: Sequence[GpuLayout]) -> dict[str, str]:
    """The errors of these GPUs afterwards, by UUID."""
    wrong: dict[str, str] = {}
    try:
        _restore_modes(tools, gpus, wrong)
        with tools.open() as session:
            now = session.layouts()
            for gpu in gpus:
                with _noted(gpu, wrong):
                    seen = _gpu(now, gpu)
                    desired = as_it_was(gpu.instances if gpu.current else (), seen.instances)
                    created: dict[tuple[str, int], int] = {}
                    for step in itertools.chain(*towards(gpu, seen.instances, desired)):
                        _do(tools, session, step, created)
            now = session.layouts()
    except GpunodeError as error:
        return {gpu.uuid: wrong.get(gpu.uuid, error.message) for gpu in gpus}
    for gpu in gpus:
        after = now.gpu(gpu.uuid)
        if after is not None and same_layout(gpu, after):
            wrong.pop(gpu.uuid, None)
        else:
            wrong.setdefault(gpu.uuid, "it differs from what it was")
    return wrong


@contextmanager
def _noted(gpu: GpuLayout, wrong: dict[str, str]) -> Iterator[None]:
    """Record a failure for this GPU only."""
    try:
        yield
    except GpunodeError as error:
        wrong.setdefault(gpu.uuid, error.message)


def _restore_modes(tools: Tools, before: Sequence[GpuLayout], wrong: dict[str, str]) -> None:
    waiting: list[GpuLayout] = []
    with tools.open() as session:
        now = session.layouts()
        for gpu in before:
            with _noted(gpu, wrong):
                waiting += [gpu] if _restore_mode(tools, session, gpu, _gpu(now, gpu)) else []
    if waiting:
        tools.reset(waiting)
    late = [gpu for gpu in before if gpu.mode_pending]
    if late:
        with tools.open() as session:
            now = session.layouts()
            for gpu in late:
                with _noted(gpu, wrong):
                    if _gpu(now, gpu).pending != gpu.pending:
                        session.set_mode(gpu.uuid, gpu.pending)


def _restore_mode(tools: Tools, session: MigSession, gpu: GpuLayout, seen: GpuLayout) -> bool:
    """Restore the mode; return whether the GPU must be reset for it."""
    if seen.current == gpu.current:
        if seen.pending != gpu.pending:
            session.set_mode(gpu.uuid, gpu.pending)
        return False
    for step in towards(seen, seen.instances, ())[0]:
        _do(tools, session, step, {})
    with tools.announce(f"GPU {gpu.index}: switch MIG {'on' if gpu.current else 'off'} again"):
        return not session.set_mode(gpu.uuid, gpu.current)
