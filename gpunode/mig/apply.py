"""From one layout to another as a transaction: every step, then a look; or back to where it began."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Protocol

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError, RolledBackError
from gpunode.mig.layout import ComputeInstance, GpuLayout, Layouts, Placement
from gpunode.mig.placement import CannotPlace, Target, solve
from gpunode.mig.plan import GpuPlan, Step, as_it_was, reached, same_layout, towards

_TRIES = 3  # to go back: what failed once may have been a moment's


class ModeChange(Protocol):
    """What became of setting a mode."""

    @property
    def current(self) -> bool: ...
    @property
    def pending(self) -> bool: ...


class Session(Protocol):
    """An open NVML that changes MIG; `gpunode.gpu.mig.MigSession` is the one there is."""

    def __enter__(self) -> Session: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def layouts(self) -> Layouts: ...
    def set_mode(self, uuid: str, on: bool) -> ModeChange: ...
    def create_gpu_instance(
        self, uuid: str, profile_id: int, at: Placement | None = None, name: str = ""
    ) -> tuple[int, Placement]: ...
    def create_compute_instance(
        self, uuid: str, gi: int, slices: int, at: Placement | None = None
    ) -> ComputeInstance: ...
    def destroy_gpu_instance(self, uuid: str, gi: int) -> None: ...
    def destroy_compute_instance(self, uuid: str, gi: int, ci: int) -> None: ...


@dataclass(frozen=True)
class Tools:
    """`open` opens NVML anew; none is open when `reset` resets GPUs. `uninterrupted` lets signals wait,
    `tell` announces a step."""

    open: Callable[[], Session]
    reset: Callable[[Sequence[GpuLayout]], None]
    uninterrupted: Callable[[], AbstractContextManager[None]]
    tell: Callable[[str], AbstractContextManager[None]]


class HalfDone(GpunodeError):
    """A change failed, and so did the way back: some GPU is neither as before nor as wanted."""

    default_code = "mig-half-done"


def carry_out(
    tools: Tools,
    plans: Sequence[GpuPlan],
    before: Sequence[GpuLayout],
    *,
    skip_reset: bool = False,
    mode_only: bool = False,
) -> Layouts:
    """Carry the plans out and give the layouts as they are then. `before` is what their GPUs become again if
    that fails: what they are, or were before an earlier run that was killed.

    `RolledBackError` if it failed and every GPU is as it was; `HalfDone` if that failed as well. An
    interruption is passed on after the way back.
    """
    try:
        return _forward(tools, plans, skip_reset, mode_only)
    except BaseException as error:
        with tools.uninterrupted():
            problem = restore(tools, before)
        if problem:
            raise HalfDone(
                f"{_words(error)}; and the way back failed: {problem}",
                hint="see what is there now: gpunode mig list; then apply again",
            ) from error
        if not isinstance(error, GpunodeError):
            raise
        raise RolledBackError(
            f"{error.message}; the previous layout is in place again", hint=error.hint
        ) from error


def _words(error: BaseException) -> str:
    if isinstance(error, GpunodeError):
        return error.message
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


def _forward(tools: Tools, plans: Sequence[GpuPlan], skip_reset: bool, mode_only: bool) -> Layouts:
    waiting: list[GpuLayout] = []
    with tools.open() as session:
        made: dict[tuple[str, int], int] = {}
        for plan in plans:
            for step in plan.steps:
                if step.action in ("enable", "disable"):
                    with tools.tell(f"GPU {plan.gpu.index}: {step.text}"):
                        change = session.set_mode(plan.gpu.uuid, plan.wish.enabled)
                    waiting += [plan.gpu] if change.current != plan.wish.enabled else []
                elif step.action.startswith("destroy"):
                    _do(tools, session, step, made)
        if not waiting:
            return _fill(tools, session, plans, mode_only)
    if skip_reset:
        return _left_waiting(tools, waiting, mode_only)
    tools.reset(waiting)
    with tools.open() as session:
        return _fill(tools, session, plans, mode_only)


def _left_waiting(tools: Tools, waiting: Sequence[GpuLayout], mode_only: bool) -> Layouts:
    if mode_only:
        with tools.open() as session:
            return session.layouts()
    names = ", ".join(f"GPU {gpu.index}" for gpu in waiting)
    raise GpunodeError(
        f"the new MIG mode of {names} waits for a reset",
        hint="leave --skip-reset out; or let it wait for a reboot: --mode-only --skip-reset",
        code="mig-reset",
    )


def _fill(tools: Tools, session: Session, plans: Sequence[GpuPlan], mode_only: bool) -> Layouts:
    """Once the modes hold: create what is wanted, and see that it is there."""
    now = session.layouts()
    made: dict[tuple[str, int], int] = {}
    targets: dict[str, tuple[Target, ...]] = {}
    for plan in plans:
        gpu = _gpu(now, plan.gpu)
        if gpu.current != plan.wish.enabled:
            raise _no_mode(gpu, plan.wish.enabled)
        target = plan.target if plan.target is not None else _late(plan, gpu)
        targets[plan.gpu.uuid] = target
        present = () if plan.changes_mode else plan.gpu.instances
        for step in towards(gpu, present, target)[1]:
            _do(tools, session, step, made)
    after = session.layouts()
    for plan in plans:
        wrong = reached(plan, _gpu(after, plan.gpu), targets[plan.gpu.uuid], mode_only=mode_only)
        if wrong:
            raise GpunodeError(
                f"GPU {plan.gpu.index} isn't what was wanted: {wrong}",
                hint="see what is there: gpunode mig list",
                code="mig-differs",
            )
    return after


def _no_mode(gpu: GpuLayout, wanted: bool) -> GpunodeError:
    word = "on" if wanted else "off"
    virtual = gpu.virtualization == 1  # NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH
    hint = "look at the kernel's log: gpunode doctor"
    if virtual:
        hint = "in a virtual machine it takes a reboot: apply with --mode-only --skip-reset, reboot, apply"
    return GpunodeError(f"GPU {gpu.index} has not switched MIG {word}", hint=hint, code="mig-reset")


def _late(plan: GpuPlan, gpu: GpuLayout) -> tuple[Target, ...]:
    """The places on a GPU whose driver tells its profiles only now that MIG is on."""
    try:
        return solve(gpu, plan.wish.profiles)
    except CannotPlace as error:
        fits = f"; {error.fits}" if error.fits else ""
        raise GpunodeError(
            f"GPU {gpu.index} ({gpu.name}): {error.reason}{fits}", code="mig-impossible"
        ) from error


def _gpu(layouts: Layouts, gpu: GpuLayout) -> GpuLayout:
    found = layouts.gpu(gpu.uuid)
    if found is None or found.error or found.untold:
        reason = f": {found.error or found.untold}" if found is not None else ""
        raise GpunodeError(
            f"GPU {gpu.index} can no longer be asked{reason}", hint="gpunode doctor", code="mig"
        )
    return found


def _do(tools: Tools, session: Session, step: Step, made: dict[tuple[str, int], int]) -> None:
    """One step on instances; `made` has the ids of new GPU instances by UUID and start."""
    with tools.tell(f"GPU {step.gpu}: {step.text}"):
        if step.action == "destroy-compute":
            assert step.gi is not None and step.ci is not None
            session.destroy_compute_instance(step.uuid, step.gi, step.ci)
        elif step.action == "destroy-instance":
            assert step.gi is not None
            session.destroy_gpu_instance(step.uuid, step.gi)
        elif step.action == "create-instance":
            gi, at = session.create_gpu_instance(step.uuid, step.profile_id, step.at, step.profile)
            made[step.uuid, at.start] = gi
            if step.at is not None and at != step.at:
                raise GpunodeError(f"GPU {step.gpu}: the driver put the {step.profile} at {at}", code="mig")
        elif step.action == "create-compute":
            assert step.at is not None
            gi = step.gi if step.gi is not None else made[step.uuid, step.at.start]
            session.create_compute_instance(step.uuid, gi, step.slices, step.inner)


# --- and back --------------------------------------------------------------------------------------------


def restore(tools: Tools, before: Sequence[GpuLayout]) -> str:
    """Put GPUs back to what they were; empty if they are, else which one isn't and why. What is right stays
    untouched.

    What can't be done for one GPU keeps none of the others from it: after a first try for all, each has an
    NVML of its own.
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
    others = "; the others are as they were" if len(left) < len(before) else ""
    return "; ".join(f"GPU {gpu.index}: {wrong[gpu.uuid]}" for gpu in left) + others


def _put_back(tools: Tools, gpus: Sequence[GpuLayout]) -> dict[str, str]:
    """What is wrong with these GPUs afterwards, by UUID."""
    wrong: dict[str, str] = {}
    try:
        _restore_modes(tools, gpus, wrong)
        with tools.open() as session:
            now = session.layouts()
            for gpu in gpus:
                with _noted(gpu, wrong):
                    _restore_instances(tools, session, gpu, _gpu(now, gpu))
            now = session.layouts()
    except GpunodeError as error:
        return {gpu.uuid: wrong.get(gpu.uuid, error.message) for gpu in gpus}
    for gpu in gpus:
        seen = now.gpu(gpu.uuid)
        if seen is not None and same_layout(gpu, seen):
            wrong.pop(gpu.uuid, None)
        else:
            wrong.setdefault(gpu.uuid, "it differs from what it was")
    return wrong


@contextmanager
def _noted(gpu: GpuLayout, wrong: dict[str, str]) -> Iterator[None]:
    """What fails here fails for this GPU alone."""
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


def _restore_mode(tools: Tools, session: Session, gpu: GpuLayout, seen: GpuLayout) -> bool:
    """Whether the GPU must be reset for it."""
    if seen.current == gpu.current:
        if seen.pending != gpu.pending:
            session.set_mode(gpu.uuid, gpu.pending)
        return False
    for step in towards(seen, seen.instances, ())[0]:
        _do(tools, session, step, {})
    with tools.tell(f"GPU {gpu.index}: switch MIG {'on' if gpu.current else 'off'} again"):
        return session.set_mode(gpu.uuid, gpu.current).current != gpu.current


def _restore_instances(tools: Tools, session: Session, gpu: GpuLayout, seen: GpuLayout) -> None:
    wanted = as_it_was(gpu.instances if gpu.current else (), seen.instances)
    destroy, create = towards(gpu, seen.instances, wanted)
    made: dict[tuple[str, int], int] = {}
    for step in (*destroy, *create):
        _do(tools, session, step, made)
