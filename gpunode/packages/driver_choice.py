"""Choice of driver branch and kernel module, by the GPUs, the present driver, and the user's options."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpunode.facts import driver
from gpunode.facts.bulletins import end_of_life, maintained_branches
from gpunode.facts.driver_targets import (
    GPU_BRANCHES,
    LONG_TERM,
    GpuSupport,
    computing,
    last_branch,
    module_for_gpus,
    refusal,
    supports,
)
from gpunode.facts.tables import table
from gpunode.packages.driver_model import OPEN, PROPRIETARY, Decision, Refusal, Situation, Wish

BRANCHES = "driver_branches"
_OPEN_BY_DEFAULT = 560  # the first branch where NVIDIA's installer uses the open module


class Choice(NamedTuple):
    """The branch and the flavor, the reasons for them, and the objections."""

    branch: int
    flavour: str
    decisions: tuple[Decision, ...]
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()


class _Need(NamedTuple):
    """The requirements of the GPUs.

    Branches from `first` to `last` (0: no limit), each with the kind of GPU that requires it, and the only
    possible `module`, empty for both.
    """

    first: int
    first_for: str
    last: int
    last_for: str
    module: str
    module_for: str


def choose(situation: Situation, wish: Wish) -> Choice:
    """Choose both. Refusals are only for a request that the GPUs don't support."""
    need = _need(situation)
    branch, why = _branch(situation, wish, need)
    flavour, also = _flavour(situation, wish, need, branch)
    refusals = (*_against_branch(need, branch), *_against_flavour(need, branch, flavour))
    notes = () if refusals else tuple(_left_out(situation, branch, flavour))
    return Choice(branch, flavour, (why, also), refusals, notes)


def known_as_of(name: str) -> str:
    """A table as the source of a decision."""
    return f"{name} table of {table(name).date}"


def kinds(situation: Situation) -> str:
    """The GPUs by generation, as text: ``8 x Hopper, 1 x Volta``."""
    names = [row.name if (row := supports(gpu.device_id)) else gpu.device_id for gpu in _all(situation)]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _all(situation: Situation) -> tuple[Any, ...]:
    return tuple(gpu for gpu in situation.gpus if not gpu.for_vms)


def _need(situation: Situation) -> _Need:
    rows = [row for gpu in computing(situation.gpus) if (row := supports(gpu.device_id))]
    last = last_branch(situation.gpus)
    module = module_for_gpus(situation.gpus)
    driven = [row for row in rows if not row.module or not module or row.module == module]
    newest = max(driven, key=lambda row: row.min, default=None)
    return _Need(
        newest.min if newest else 0,
        newest.name if newest else "",
        last,
        _name(rows, lambda row: row.max == last) if last else "",
        module,
        _name(rows, lambda row: row.module == module) if module else "",
    )


def _name(rows: list[GpuSupport], fits: Any) -> str:
    return next((row.name for row in rows if fits(row)), "")


def _branch(situation: Situation, wish: Wish, need: _Need) -> tuple[int, Decision]:
    requested = driver.branch(wish.version) or wish.branch
    if requested:
        option = f"--version {wish.version}" if wish.version else f"--branch {wish.branch}"
        return requested, Decision("branch", str(requested), "requested on the command line", option)
    here = driver.branch(situation.version)
    fits = here and need.first <= here and not (need.last and here > need.last)
    if fits and (end_of_life(here) is None or here == need.last):
        reason = f"the driver here, {situation.version}, drives these GPUs and its branch gets fixes"
        if end_of_life(here) is not None:
            reason = f"the driver here is of the last branch for {need.last_for}"
        return here, Decision("branch", str(here), reason, known_as_of("driver_cves"))
    if need.last and need.last <= LONG_TERM:
        reason = f"{need.last} is the last branch that drives {need.last_for}"
        return need.last, Decision("branch", str(need.last), reason, known_as_of(GPU_BRANCHES))
    if need.first > LONG_TERM:
        branch = max(need.first, *maintained_branches())
        reason = f"{need.first_for} needs {need.first} or newer"
        return branch, Decision("branch", str(branch), reason, known_as_of(GPU_BRANCHES))
    until = next((row["end"] for row in table(BRANCHES).rows if row["branch"] == LONG_TERM), "")
    reason = f"it drives {kinds(situation) or 'these GPUs'} and is kept longest, until {until}"
    if here:
        reason = f"branch {here}, which is here, doesn't fit or gets no more fixes; {reason}"
    return LONG_TERM, Decision("branch", str(LONG_TERM), reason, known_as_of(BRANCHES))


def _flavour(situation: Situation, wish: Wish, need: _Need, branch: int) -> tuple[str, Decision]:
    subject = "kernel module"
    if wish.flavour:
        return wish.flavour, Decision(
            subject, wish.flavour, "requested on the command line", f"--flavour {wish.flavour}"
        )
    if need.module:
        reason = f"{need.module_for} is driven by the {need.module} module alone"
        return need.module, Decision(subject, need.module, reason, known_as_of(GPU_BRANCHES))
    here = situation.flavour
    if here and branch == driver.branch(situation.version):
        reason = "it is the one here, and drives these GPUs"
        return here, Decision(subject, here, reason, "/proc/driver/nvidia/version or modinfo")
    if branch < _OPEN_BY_DEFAULT:
        reason = f"the open one is the default from branch {_OPEN_BY_DEFAULT} on"
        return PROPRIETARY, Decision(subject, PROPRIETARY, reason, known_as_of(BRANCHES))
    reason = "either drives these GPUs, and the open one is NVIDIA's default"
    return OPEN, Decision(subject, OPEN, reason, known_as_of(GPU_BRANCHES))


def _against_branch(need: _Need, branch: int) -> tuple[Refusal, ...]:
    if need.last and branch > need.last:
        return (
            Refusal(
                "gpu-dropped",
                f"branch {branch} doesn't drive {need.last_for}: {need.last} is the last that does",
                f"gpunode driver plan --branch {need.last}",
            ),
        )
    if branch < need.first:
        return (
            Refusal(
                "branch-too-old",
                f"branch {branch} doesn't support {need.first_for} GPUs, which need {need.first} or newer",
                f"gpunode driver plan --branch {max(need.first, LONG_TERM)}",
            ),
        )
    return ()


def _against_flavour(need: _Need, branch: int, flavour: str) -> tuple[Refusal, ...]:
    if need.module and flavour != need.module:
        return (
            Refusal(
                "wrong-flavour",
                f"the {flavour} kernel module doesn't drive {need.module_for}",
                f"--flavour {need.module}",
            ),
        )
    open_only = [row["branch"] for row in table(BRANCHES).rows if not row["proprietary"]]
    if flavour == PROPRIETARY and branch >= min(open_only, default=branch + 1):
        return (
            Refusal(
                "no-proprietary-module",
                f"there is no proprietary kernel module from branch {min(open_only)} on",
                "--flavour open, or an older --branch",
            ),
        )
    return ()


def is_known(branch: int) -> bool:
    """Whether the tables have this branch."""
    return branch in {row["branch"] for row in table(BRANCHES).rows} or bool(end_of_life(branch))


def against_unknown(situation: Situation, branch: int) -> Refusal:
    """The refusal of a branch that isn't known, with those that drive the GPUs and get fixes."""
    need = _need(situation)
    known = sorted(row["branch"] for row in table(BRANCHES).rows)
    fit = [
        known_branch
        for known_branch in known
        if end_of_life(known_branch) is None and not _against_branch(need, known_branch)
    ]
    return Refusal(
        "branch-unknown",
        f"branch {branch} is unknown: no table of gpunode and no repository here has it",
        f"known for these GPUs: {', '.join(map(str, fit))}; for a newer one, add its repository",
    )


def _left_out(situation: Situation, branch: int, flavour: str) -> list[str]:
    """GPUs that this driver doesn't support although it supports others, and unknown ones."""
    notes = []
    for gpu in _all(situation):
        row = supports(gpu.device_id)
        if row is None:
            notes.append(
                f"{gpu.address}: the tables don't know the GPU {gpu.device_id}; newer branches may be needed"
            )
        elif refusal(row, branch, flavour == OPEN):
            notes.append(f"{gpu.address} ({row.name}) gets no driver: no one driver takes all GPUs here")
    return notes
