"""What the package manager says that it would do, before anything is done."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.dataclass import replace
from gpunode.packages.driver_model import DriverPlan, Refusal
from gpunode.packages.driver_refusals import hint_of
from gpunode.packages.manager import Command, Manager, PackageChange, PackagesError

_DRIVERS = ("nvidia", "libnv", "cuda", "nvlsm", "xorg")  # what another driver of NVIDIA's may push out


def previewed(
    plan: DriverPlan, manager: Manager, install: Command
) -> tuple[DriverPlan, tuple[PackageChange, ...]]:
    """What the package manager would do, and a refusal where it can't, or takes what isn't the driver's."""
    if not plan.resolved or plan.refusals:
        return plan, ()
    try:
        changes = manager.preview(install)
    except PackagesError as error:
        hint = hint_of(error.code, manager.name, error.hint)
        refusal = Refusal("package-manager", error.message, hint)
        return replace(plan, refusals=(refusal,)), ()
    gone = [one.name for one in changes if not one.after and not any(word in one.name for word in _DRIVERS)]
    if gone:
        refusal = Refusal(
            "takes-others-out",
            f"{manager.name} would take these packages out as well: {', '.join(gone)}",
            "see why, and take them out yourself if nobody needs them; then run this again",
        )
        plan = replace(plan, refusals=(refusal,))
    return plan, changes


def unable_to_hold(manager: Manager) -> tuple[Refusal, ...]:
    """Told beforehand: the hold comes last, when the driver is installed."""
    try:
        manager.require_holding()
    except PackagesError as error:
        return (Refusal(error.code, error.message, error.hint),)
    return ()


def to_hold(plan: DriverPlan, changes: Sequence[PackageChange]) -> list[str]:
    """The driver's packages, and the libraries that come along: those must not move either."""
    along = [one.name for one in changes if one.after and ("nvidia" in one.name or "libcuda" in one.name)]
    return list(dict.fromkeys((*(one.name for one in plan.packages), *along)))
