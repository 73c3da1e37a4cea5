"""Plan from a GPU's present layout to the desired one: the steps in a valid order, and the devices lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpunode.mig.config import DesiredLayout, ImpossibleMigConfig
from gpunode.mig.model import ComputeTarget, GpuInstance, GpuLayout, Placement
from gpunode.mig.placement import CannotPlace, InstanceTarget, solve

AMPERE = 7  # NVML_DEVICE_ARCH_AMPERE: its MIG mode needs a reset; from Hopper on it doesn't


class MigStep(NamedTuple):
    """One change.

    `action` is enable, disable, reset, destroy-compute, destroy-instance, create-instance or create-compute.
    `at` is the GPU instance's place, `gi` its id if it already exists.
    """

    action: str
    gpu: int
    uuid: str
    profile: str = ""
    profile_id: int = 0
    at: Placement | None = None
    gi: int | None = None
    ci: int | None = None
    slices: int = 0
    inner: Placement | None = None

    @property
    def text(self) -> str:
        """The step as text for the user."""
        place = f" at {self.at}" if self.at else ""
        compute = f"compute instance {self.ci} of GPU instance {self.gi}"
        return {
            "enable": "switch MIG on",
            "disable": "switch MIG off",
            "reset": "reset the GPU",
            "destroy-compute": f"destroy {compute} ({self.profile})",
            "destroy-instance": f"destroy GPU instance {self.gi} ({self.profile}{place})",
            "create-instance": f"create GPU instance {self.profile}{place}",
            "create-compute": f"create compute instance {self.slices}c on the {self.profile}{place}",
        }[self.action]


class PresentDevice(NamedTuple):
    """A MIG device: its profile, its GPU instance's place, its instances' ids and its UUID."""

    profile: str
    at: Placement
    gi: int
    ci: int
    uuid: str


class GpuPlan(NamedTuple):
    """The steps for one GPU.

    `target` is None while its driver reports no profiles, which it does once MIG is on. `reset`: none, needed
    (Ampere, unless the driver does it itself) or unknown. `lost` are the MIG devices that are destroyed,
    `kept` those that stay, with their UUIDs.
    """

    wish: DesiredLayout
    target: tuple[InstanceTarget, ...] | None
    steps: tuple[MigStep, ...]
    lost: tuple[PresentDevice, ...] = ()
    kept: tuple[PresentDevice, ...] = ()
    reset: str = "none"

    @property
    def gpu(self) -> GpuLayout:
        """The present layout."""
        return self.wish.gpu

    @property
    def changes_mode(self) -> bool:
        """Whether the plan switches MIG on or off."""
        return self.gpu.capable and self.gpu.current != self.wish.enabled


def plan(path: str, desired: Sequence[DesiredLayout], *, mode_only: bool = False) -> tuple[GpuPlan, ...]:
    """The plans of all GPUs; with `mode_only` instances stay unless the change of the mode removes them.

    `ImpossibleMigConfig` names each profile that doesn't fit on a GPU, and what would fit.
    """
    plans, faults = [], []
    for wish in desired:
        try:
            plans.append(plan_gpu(wish, mode_only=mode_only))
        except CannotPlace as error:
            fits = f"; {error.fits}" if error.fits else ""
            faults.append(f"{path}:{wish.line}: GPU {wish.gpu.index} ({wish.gpu.name}): {error.reason}{fits}")
    if faults:
        raise ImpossibleMigConfig(faults)
    return tuple(plans)


def plan_gpu(wish: DesiredLayout, *, mode_only: bool = False) -> GpuPlan:
    """One GPU's plan. `CannotPlace` if the desired layout doesn't fit."""
    gpu = wish.gpu
    if not gpu.capable:
        return GpuPlan(wish, (), ())  # MIG is on and must be off
    return _plan(wish, _target(wish, gpu.current != wish.enabled, mode_only))


def put_back(gpu: GpuLayout, before: GpuLayout) -> GpuPlan:
    """The plan that restores a GPU's earlier layout."""
    wish = DesiredLayout(gpu, before.current, before.devices(), 0)
    return _plan(wish, as_it_was(before.instances, gpu.instances if gpu.current == before.current else ()))


def _plan(wish: DesiredLayout, target: tuple[InstanceTarget, ...] | None) -> GpuPlan:
    gpu = wish.gpu
    switches = gpu.current != wish.enabled
    mode_is_set = gpu.current == wish.enabled and gpu.pending == wish.enabled
    mode = () if mode_is_set else (MigStep("enable" if wish.enabled else "disable", gpu.index, gpu.uuid),)
    reset = "none"
    if switches and not gpu.architecture:
        reset = "unknown"
    elif switches and gpu.architecture <= AMPERE:
        reset = "needed"
    destroy = towards(gpu, gpu.instances, () if switches else target or ())[0]
    create = towards(gpu, () if switches else gpu.instances, target or ())[1]
    kept_ids = {
        (instance.kept.id, compute.kept.id)
        for instance in (() if switches else target or ())
        if instance.kept is not None
        for compute in instance.compute
        if compute.kept is not None
    }
    devices = list(devices_of(gpu.instances))
    return GpuPlan(
        wish,
        target,
        (*destroy, *mode, *((MigStep("reset", gpu.index, gpu.uuid),) if reset == "needed" else ()), *create),
        tuple(device for device in devices if (device.gi, device.ci) not in kept_ids),
        tuple(device for device in devices if (device.gi, device.ci) in kept_ids),
        reset,
    )


def _target(wish: DesiredLayout, switches: bool, mode_only: bool) -> tuple[InstanceTarget, ...] | None:
    gpu = replace(wish.gpu, instances=()) if switches else wish.gpu
    if not wish.enabled:
        return ()
    if mode_only:
        return as_it_was(gpu.instances, gpu.instances)
    if not gpu.profiles and wish.profiles:
        return None
    return solve(gpu, wish.profiles)


def towards(
    gpu: GpuLayout, present: Sequence[GpuInstance], target: Sequence[InstanceTarget]
) -> tuple[tuple[MigStep, ...], tuple[MigStep, ...]]:
    """The steps that destroy, then the steps that create, so that `present` becomes `target`."""
    by_id = {entry.kept.id: entry for entry in target if entry.kept is not None}
    destroy: list[MigStep] = []
    for instance in present:
        stays = by_id.get(instance.id)
        inner = {c.kept.id for c in stays.compute if c.kept is not None} if stays else set()
        whole = MigStep(
            "destroy-instance",
            gpu.index,
            gpu.uuid,
            instance.name,
            instance.profile_id,
            instance.placement,
            instance.id,
        )
        destroy += [
            whole._replace(action="destroy-compute", ci=compute.id, slices=compute.slices)
            for compute in instance.compute
            if compute.id not in inner
        ]
        destroy += [whole] if stays is None else []
    create: list[MigStep] = []
    for instance_target in sorted(target, key=lambda each: -each.placement.size):
        base = MigStep(
            "create-instance",
            gpu.index,
            gpu.uuid,
            instance_target.name,
            instance_target.profile_id,
            instance_target.placement,
        )
        gi = instance_target.kept.id if instance_target.kept is not None else None
        create += [base] if instance_target.kept is None else []
        create += [
            base._replace(action="create-compute", gi=gi, slices=c.slices, inner=c.placement)
            for c in instance_target.compute
            if c.kept is None
        ]
    return tuple(destroy), tuple(create)


def devices_of(instances: Iterable[GpuInstance]) -> tuple[PresentDevice, ...]:
    """The MIG devices of some GPU instances."""
    return tuple(
        PresentDevice(ci.profile, gi.placement, gi.id, ci.id, ci.uuid)
        for gi in instances
        for ci in gi.compute
    )


def as_it_was(then: Sequence[GpuInstance], now: Sequence[GpuInstance]) -> tuple[InstanceTarget, ...]:
    """An earlier layout as a target: existing instances are kept, the others get their old placements."""
    result = []
    for old in then:
        shape = (old.profile_id, old.placement)
        same = next((gi for gi in now if (gi.profile_id, gi.placement) == shape), None)
        left = list(same.compute) if same else []
        compute = []
        for ci in old.compute:
            here = next((c for c in left if c.slices == ci.slices and c.placement == ci.placement), None)
            if here is not None:
                left.remove(here)
            compute.append(ComputeTarget(ci.slices, ci.placement, here))
        result.append(
            InstanceTarget(old.profile_id, old.name, old.slices, old.placement, tuple(compute), same)
        )
    return tuple(result)


def same_layout(layout: GpuLayout, other: GpuLayout) -> bool:
    """Whether two states of a GPU are equal except for ids and UUIDs."""
    return _shape(layout) == _shape(other)


def _shape(layout: GpuLayout) -> tuple[object, ...]:
    instances = (
        (
            *(gi.profile_id, gi.placement.start, gi.placement.size),
            sorted((ci.slices, ci.placement.start if ci.placement else -1) for ci in gi.compute),
        )
        for gi in layout.instances
    )
    return layout.current, layout.pending, sorted(instances)


def reached(
    goal: GpuPlan, now: GpuLayout, target: Sequence[InstanceTarget], *, mode_only: bool = False
) -> str:
    """Empty if the GPU has the desired layout, else what differs."""
    if not now.capable:
        return ""
    if now.current != goal.wish.enabled or now.pending != goal.wish.enabled:
        return f"MIG is {'on' if now.current else 'off'}" + (" until a reset" if now.mode_pending else "")
    if mode_only:
        return ""
    have = sorted(
        (gi.profile_id, gi.placement.start, sorted(c.slices for c in gi.compute)) for gi in now.instances
    )
    want = sorted((t.profile_id, t.placement.start, sorted(c.slices for c in t.compute)) for t in target)
    if have == want:
        return ""
    instances = ", ".join(f"{gi.name} at {gi.placement}" for gi in now.instances) or "no instance"
    return f"it has {instances}"
