"""Change from one MIG layout to another as a transaction: each step, then verification, or a rollback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gpunode.errors import GpunodeError, RolledBackError
from gpunode.gpu.driver_traces import boot_id
from gpunode.host import Host
from gpunode.host.journal import state_directory
from gpunode.host.transaction import attempt
from gpunode.mig.model import GpuInstance, GpuLayout, Layouts
from gpunode.mig.placement import CannotPlace, Target, solve
from gpunode.mig.plan import GpuPlan, Step, as_it_was, reached, same_layout, towards
from gpunode.mig.session import MigSession
from gpunode.mig.users import Drained
from gpunode.output.typed import from_plain, plain

_TRIES = 3  # for the rollback: a call that failed once may have failed only temporarily


@dataclass(frozen=True)
class LayoutRequest:
    """A configuration to apply, with its file and label, and what the run may do for it.

    `drain` names the units, containers, processes and nvidia_drm that the run stops. With `skip_reset` a mode
    change that needs a reset stays pending; `persist` applies the layout at each boot too.
    """

    config_file: str = ""
    label: str = ""
    mode_only: bool = False
    skip_reset: bool = False
    drain: tuple[str, ...] = ()
    persist: bool = False


@dataclass(frozen=True)
class Tools:
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
    before = tuple(half.get(one.gpu.uuid, one.gpu) for one in plans)

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
        made: dict[tuple[str, int], int] = {}
        for plan in plans:
            for step in plan.steps:
                if step.action in ("enable", "disable"):
                    with tools.announce(f"GPU {plan.gpu.index}: {step.text}"):
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


def _fill(tools: Tools, session: MigSession, plans: Sequence[GpuPlan], mode_only: bool) -> Layouts:
    """Create the instances once the modes are active, and verify that they exist."""
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


def _late(plan: GpuPlan, gpu: GpuLayout) -> tuple[Target, ...]:
    """The target for a GPU of which the driver reports the profiles only once MIG is on."""
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
            f"GPU {gpu.index} can no longer be queried{reason}", hint="gpunode doctor", code="mig"
        )
    return found


def _do(tools: Tools, session: MigSession, step: Step, made: dict[tuple[str, int], int]) -> None:
    """Carry out one step on instances; `made` has the ids of new GPU instances by UUID and start."""
    with tools.announce(f"GPU {step.gpu}: {step.text}"):
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
        return session.set_mode(gpu.uuid, gpu.current).current != gpu.current


def _restore_instances(tools: Tools, session: MigSession, gpu: GpuLayout, seen: GpuLayout) -> None:
    desired = as_it_was(gpu.instances if gpu.current else (), seen.instances)
    destroy, create = towards(gpu, seen.instances, desired)
    made: dict[tuple[str, int], int] = {}
    for step in (*destroy, *create):
        _do(tools, session, step, made)


# The snapshot of the layout before a change, on disk while the run lasts: if it exists, a run was killed.
#
# The target layout is stored with it. A GPU in any state between the two was left so by that run; a GPU that
# was given another layout since is not treated as unfinished.

Spot = tuple[int, int, int]
"""A GPU instance by its profile's id, the first of its memory slots, and how many."""
Cut = tuple[Spot, tuple[int, ...]]
"""A GPU instance and the slices of its compute instances, the smallest first."""


@dataclass(frozen=True)
class Goal:
    """The target of a run for one GPU; `cuts` is None where it wasn't known when the run started."""

    enabled: bool
    cuts: tuple[Cut, ...] | None


@dataclass(frozen=True)
class LayoutSnapshot:
    """Runs that didn't finish: `before` is each GPU's earlier layout, `goals` are by UUID."""

    before: tuple[GpuLayout, ...] = ()
    goals: Mapping[str, tuple[Goal, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class UnfinishedGpus:
    """The GPUs that such runs left unfinished, each with its earlier layout.

    `half` are between that layout and a goal, or have reached the goal while another GPU has not; `changed`
    were given another layout since; `unasked` can't be read now.
    """

    half: tuple[GpuLayout, ...] = ()
    changed: tuple[GpuLayout, ...] = ()
    unasked: tuple[GpuLayout, ...] = ()


def snapshot_path(host: Host) -> str:
    """The snapshot's path."""
    return f"{state_directory(host)}/mig-before.json"


def save(host: Host, before: Sequence[GpuLayout], plans: Sequence[GpuPlan], left: UnfinishedGpus) -> None:
    """Write the present layouts of these GPUs and the targets of these plans.

    A GPU that an earlier run `left` unfinished keeps that run's goals too, and one that can't be read keeps
    its whole record.
    """
    old = load_snapshot(host)
    earlier = {gpu.uuid: old.goals.get(gpu.uuid, ()) for gpu in (*left.half, *left.unasked)}
    goals = {one.gpu.uuid: (*earlier.get(one.gpu.uuid, ()), _goal(one)) for one in plans}
    _write(host, LayoutSnapshot((*before, *left.unasked), {**earlier, **goals}))


def _goal(plan: GpuPlan) -> Goal:
    if plan.target is None:
        return Goal(plan.wish.enabled, None)
    cuts = tuple(
        ((t.profile_id, t.placement.start, t.placement.size), tuple(sorted(c.slices for c in t.compute)))
        for t in plan.target
    )
    return Goal(plan.wish.enabled, cuts)


def _write(host: Host, begun: LayoutSnapshot) -> None:
    host.make_dirs(state_directory(host), mode=0o700)
    goals = {uuid: plain(all_) for uuid, all_ in begun.goals.items()}
    data = {"boot": boot_id(host), "layouts": plain(Layouts("", begun.before)), "goals": goals}
    host.write_atomic(snapshot_path(host), json.dumps(data).encode(), mode=0o600, keep=False)


def load_snapshot(host: Host) -> LayoutSnapshot:
    """The runs that started and didn't finish; none from before the last boot, which removes instances."""
    text = host.read_text(snapshot_path(host))
    try:
        data = json.loads(text or "null")
        if not isinstance(data, dict) or data.get("boot") != boot_id(host):
            return LayoutSnapshot()
        goals = {uuid: tuple(from_plain(Goal, goal) for goal in all_) for uuid, all_ in data["goals"].items()}
        return LayoutSnapshot(from_plain(Layouts, data["layouts"]).gpus, goals)
    except (ValueError, KeyError, TypeError, AttributeError):
        return LayoutSnapshot()


def left(begun: LayoutSnapshot, now: Layouts) -> UnfinishedGpus:
    """The GPUs that are still unfinished. A run counts as a whole: it is finished once all its GPUs are."""
    half, changed, unasked, made = [], [], [], []
    for gpu in begun.before:
        seen = now.gpu(gpu.uuid)
        goals = begun.goals.get(gpu.uuid, ())
        if seen is None or seen.error or seen.untold:
            unasked.append(gpu)
        elif any(_reached(goal, seen) for goal in goals):
            made.append(gpu)
        elif same_layout(gpu, seen) or any(_between(gpu, goal, seen) for goal in (*goals, _all(goals))):
            half.append(gpu)
        else:
            changed.append(gpu)
    if not half and not unasked:
        made = []
    standing = sorted((one for one in (*half, *made) if not _as_before(one, now)), key=lambda one: one.index)
    return UnfinishedGpus(tuple(standing), tuple(changed), tuple(unasked))


def _as_before(gpu: GpuLayout, now: Layouts) -> bool:
    seen = now.gpu(gpu.uuid)
    return seen is not None and same_layout(gpu, seen)


def _all(goals: Sequence[Goal]) -> Goal:
    """The goals of several unfinished runs as one."""
    cuts = [one.cuts for one in goals]
    known = [cut for one in cuts if one is not None for cut in one]
    return Goal(any(one.enabled for one in goals), None if None in cuts else tuple(known))


def _reached(goal: Goal, now: GpuLayout) -> bool:
    cuts = [(_spot(one), tuple(sorted(c.slices for c in one.compute))) for one in now.instances]
    mode = (now.current, now.pending) == (goal.enabled, goal.enabled)
    return mode and goal.cuts is not None and sorted(cuts) == sorted(goal.cuts)


def _between(before: GpuLayout, goal: Goal, now: GpuLayout) -> bool:
    if now.current not in (before.current, goal.enabled):
        return False
    if goal.cuts is None:
        return True
    return set(map(_spot, now.instances)) <= {*map(_spot, before.instances), *(spot for spot, _ in goal.cuts)}


def _spot(instance: GpuInstance) -> Spot:
    return instance.profile_id, instance.placement.start, instance.placement.size


def end(host: Host, unasked: Sequence[GpuLayout] = ()) -> None:
    """Remove the snapshot after success or failure, except for GPUs that can't be read."""
    if unasked:
        begun = load_snapshot(host)
        if tuple(unasked) != begun.before:
            goals = {gpu.uuid: begun.goals.get(gpu.uuid, ()) for gpu in unasked}
            _write(host, LayoutSnapshot(tuple(unasked), goals))
    elif host.read_text(snapshot_path(host)) is not None:
        host.remove(snapshot_path(host))


# The record of a running `mig apply`: its start, its command, and what it has stopped.
#
# It is on disk before the first service is stopped, so after a kill -9 the next run knows what is still
# stopped and how to continue. `save` writes the layouts themselves.


@dataclass(frozen=True)
class Run:
    """`since` is seconds since the epoch, `command` the arguments of gpunode that continue the run.

    `process` is its process id and start (clock ticks since boot, proc_pid_stat(5)); (0, "") once it has
    ended.
    """

    since: float
    command: tuple[str, ...]
    drained: Drained = field(default_factory=Drained)
    process: tuple[int, str] = (0, "")


def unfinished_path(host: Host) -> str:
    """The record's path."""
    return f"{state_directory(host)}/mig-run.json"


def load_unfinished(host: Host) -> Run | None:
    """The unfinished run; none from before the last boot, because booting starts the services again."""
    try:
        data = json.loads(host.read_text(unfinished_path(host)) or "null")
        if not isinstance(data, dict) or data.get("boot") != boot_id(host):
            return None
        run = data["run"]
        command = tuple(map(str, run["command"]))
        pid, started = run["process"]
        return Run(float(run["since"]), command, _drained(run["drained"]), (int(pid), str(started)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _drained(data: dict[str, Any]) -> Drained:
    return Drained(
        tuple(map(str, data["units"])),
        bool(data["module"]),
        tuple(map(int, data["pids"])),
        tuple(map(str, data["containers"])),
    )


def lives(host: Host, run: Run) -> bool:
    """Whether its process is still running: then it isn't unfinished."""
    pid, started = run.process
    return pid > 0 and _start(host, pid) == started


def _start(host: Host, pid: int) -> str:
    try:
        fields = (host.read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    except GpunodeError:
        return ""
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


class Keeper:
    """Keeps the record of one run, and continues an earlier run's. Requires the node's lock."""

    def __init__(self, host: Host, command: tuple[str, ...]) -> None:
        self._host = host
        self.earlier = load_unfinished(host)
        drained = self.earlier.drained if self.earlier is not None else Drained()
        pid = os.getpid()
        self._run = Run(host.now(), command, drained, (pid, _start(host, pid)))
        self._begun = False

    @property
    def drained(self) -> Drained:
        """What is stopped, by this run or the one before."""
        return self._run.drained

    def begin(self) -> None:
        """Write the record, before the first change."""
        self._begun = True
        self._write(self._run)

    def stop(self, drained: Drained) -> None:
        """Record one more thing that is about to be stopped."""
        self._run = replace(self._run, drained=drained)
        self.begin()

    def end(self, still: Drained, *, half: bool, failed: bool) -> None:
        """End the record.

        `still` couldn't be restarted. `half`: some GPU is still between two layouts, because of this run if
        it has `failed`.
        """
        self._run = replace(self._run, drained=still)
        base = self._run if self._begun and failed else self.earlier or self._run
        if still.again or (half and (self._begun or self.earlier is not None)):
            self._write(replace(base, drained=still, process=(0, "")))
        elif self._host.read_text(unfinished_path(self._host)) is not None:
            self._host.remove(unfinished_path(self._host))

    def _write(self, run: Run) -> None:
        self._host.make_dirs(state_directory(self._host), mode=0o700)
        data = {"boot": boot_id(self._host), "run": plain(run)}
        self._host.write_atomic(
            unfinished_path(self._host), json.dumps(data).encode(), mode=0o600, keep=False
        )


# The systemd unit that applies a layout at each boot, before any service that allocates GPUs starts.
#
# A reboot removes the instances, and from Hopper on the mode as well (NVIDIA's MIG user guide).

UNIT = "gpunode-mig.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
CONFIG_FILE = "/etc/gpunode/mig.yaml"
MARKER = "# Made by gpunode (gpunode mig apply --persist); gpunode rollback takes it away."

_UNIT = """\
{marker}
[Unit]
Description=Apply the MIG layout {label} to the GPUs (gpunode)
# the persistence daemon holds the GPUs open from then on, the fabric manager links them
After=nvidia-persistenced.service nvidia-fabricmanager.service systemd-modules-load.service
Before=gpunode-cdi-refresh.service nvidia-cdi-refresh.service
Before=gpunode-device-plugin.service gpunode-mps.service gpunode-doctor.service
Before=nvidia-dcgm.service dcgm.service nvidia-dcgm-exporter.service nvsm.service slurmd.service
Before=docker.service containerd.service crio.service kubelet.service k3s.service k3s-agent.service
Before=rke2-server.service rke2-agent.service k0scontroller.service k0sworker.service
Before=snap.microk8s.daemon-containerd.service snap.microk8s.daemon-kubelite.service
Before=snap.docker.dockerd.service podman-restart.service

[Service]
Type=oneshot
RemainAfterExit=yes
# creates the device files if no process has used a GPU since boot
ExecStartPre=-/usr/bin/nvidia-modprobe -c 0 -u
ExecStart={program} mig apply --config-file {config} --selected-config {label_word}
# a faulty GPU must not block the boot; later units then start without MIG
TimeoutStartSec=480
Restart=no

[Install]
WantedBy=multi-user.target
"""


def unit(program: str, label: str) -> str:
    """The unit's text. `program` is the start of the ExecStart line, `label` the configuration's label.

    ValueError for a label with control characters, which a unit can't contain.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in label):
        raise ValueError(label)
    return _UNIT.format(
        marker=MARKER,
        label=label.replace("%", "%%"),
        program=program,
        config=CONFIG_FILE,
        label_word=_word(label),
    )


def _word(label: str) -> str:
    """One word of ExecStart (systemd.service(5), "COMMAND LINES"): ``%`` and ``$`` are doubled."""
    text = label.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"'
