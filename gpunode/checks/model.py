"""Checks: the `check` decorator, which declares one, and the verdicts that it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpunode.checks.fixes import Remedy
from gpunode.facts.node import Node
from gpunode.facts.system import BARE_METAL, CONTAINER, TEGRA, VM, WSL2
from gpunode.output.result import Evidence, FindingStatus, Fix

LAYERS = (
    *("hardware", "driver", "devices", "health", "fabric", "toolkit", "cdi", "docker", "containerd"),
    *("crio", "podman", "kubelet", "cuda", "platform", "security"),
)

# where a check can be judged at all; node classes are facts/system.py's
HOST = (BARE_METAL, VM)
HOST_OR_CONTAINER = (BARE_METAL, VM, CONTAINER)
EVERYWHERE_BUT_TEGRA = (BARE_METAL, VM, CONTAINER, WSL2)
# a container engine is the same thing on all of them; a container that runs one program has none of its own
ENGINE_NODES = (BARE_METAL, VM, CONTAINER, WSL2, TEGRA)
# where a kubelet can run; its checks on WSL 2 and in containers would be about an experiment
CLUSTER_NODES = (BARE_METAL, VM, TEGRA)
NO_ENGINE = ("application-container",)

# what an installation is of, for `Check.preflight`
PREFLIGHTS = ("docker", "containerd", "crio", "podman", "kubernetes")
ANY_ENGINE = PREFLIGHTS

_LONGEST = 2000


@dataclass(frozen=True)
class Verdict:
    """What one check came to. `fix` replaces the check's own remedy where the facts allow a closer one.

    A `note` has passed and is worth a line all the same. `skipped` says why there is no judgement, as
    `Finding.skipped` has it.
    """

    status: FindingStatus
    summary: str
    evidence: tuple[Evidence, ...] = ()
    fix: Fix | None = None
    note: bool = False
    skipped: str = ""


@dataclass(frozen=True)
class Check:
    """One rule of the doctor, as `check` makes it.

    `severity` is what a failure counts as (error, warning, or info for one that only ever notes);
    `blocked_by` are the checks whose failure explains this one. `classes` are the kinds of node that it can
    be judged on, `needs` the traits (facts/traits.py) that such a node must have and `unless` those that it
    must not have: elsewhere it is not applicable. `preflight` are the installations that a failure of it
    blocks (`PREFLIGHTS`). With `reboot` it belongs to the section "Safe to reboot?", with `deep` it is only
    judged on --deep. `table` is the reference table (tables/) that it judges by, if any. `looks_at` and `why`
    are for people; `refs` are public addresses to read on.
    """

    id: str
    title: str
    layer: str
    severity: str
    looks_at: str
    why: str
    remedy: Remedy
    run: Callable[[Node], Verdict]
    blocked_by: tuple[str, ...] = ()
    classes: tuple[str, ...] = HOST
    refs: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    preflight: tuple[str, ...] = ()
    reboot: bool = False
    deep: bool = False
    table: str = ""


def check(
    id: str,
    layer: str,
    *,
    title: str,
    looks_at: str,
    remedy: Remedy,
    severity: str = "error",
    blocked_by: tuple[str, ...] = (),
    classes: tuple[str, ...] = HOST,
    refs: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    unless: tuple[str, ...] = (),
    preflight: tuple[str, ...] = (),
    reboot: bool = False,
    deep: bool = False,
    table: str = "",
) -> Callable[[Callable[[Node], Verdict]], Check]:
    """Decorator that makes a `Check` of a pure function, of which the docstring is the check's `why`.

    It registers nothing: a module lists its checks, and checks/catalogue.py puts the lists in order.
    """

    def declare(run: Callable[[Node], Verdict]) -> Check:
        return Check(
            id=id,
            title=title,
            layer=layer,
            severity=severity,
            looks_at=looks_at,
            why=" ".join((run.__doc__ or "").split()),
            remedy=remedy,
            run=run,
            blocked_by=blocked_by,
            classes=classes,
            refs=refs,
            needs=needs,
            unless=unless,
            preflight=preflight,
            reboot=reboot,
            deep=deep,
            table=table,
        )

    return declare


def ok(summary: str, *evidence: Evidence) -> Verdict:
    return Verdict(FindingStatus.PASS, summary, evidence)


def note(summary: str, *evidence: Evidence, fix: Fix | None = None) -> Verdict:
    """No fault, but worth knowing: one quiet line."""
    return Verdict(FindingStatus.PASS, summary, evidence, fix, note=True)


def warn(summary: str, *evidence: Evidence, fix: Fix | None = None) -> Verdict:
    """Works now, but is fragile or about to break."""
    return Verdict(FindingStatus.WARN, summary, evidence, fix)


def fail(summary: str, *evidence: Evidence, fix: Fix | None = None) -> Verdict:
    """GPU containers can't work because of this."""
    return Verdict(FindingStatus.FAIL, summary, evidence, fix)


def skip(reason: str, skipped: str = "nothing-to-judge") -> Verdict:
    """Can't be judged here, or there is nothing to judge."""
    return Verdict(FindingStatus.SKIP, reason, skipped=skipped)


def seen(source: str, value: object, line: int | None = None) -> Evidence:
    """One observation; `source` is a path or a command."""
    return Evidence(one_line(source), one_line(str(value)), line)


def one_line(text: str) -> str:
    """What a node says of itself may hold line breaks, which would forge lines of a report, or be endless."""
    line = text if text.isprintable() else " ".join(text.splitlines())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
