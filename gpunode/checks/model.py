"""A check is data and one pure function from `Node` to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpunode.checks.fixes import Remedy
from gpunode.facts.node import Node
from gpunode.facts.system import BARE_METAL, CONTAINER, VM, WSL2
from gpunode.result import Evidence, FindingStatus, Fix

LAYERS = ("hardware", "driver", "devices", "toolkit", "docker", "containerd", "cdi", "kubelet")

# where a check can be judged at all; node classes are facts/system.py's
HOST = (BARE_METAL, VM)
HOST_OR_CONTAINER = (BARE_METAL, VM, CONTAINER)
EVERYWHERE_BUT_TEGRA = (BARE_METAL, VM, CONTAINER, WSL2)


@dataclass(frozen=True)
class Verdict:
    """What one check came to. `fix` replaces the check's own remedy where the facts allow a closer one."""

    status: FindingStatus
    summary: str
    evidence: tuple[Evidence, ...] = ()
    fix: Fix | None = None


@dataclass(frozen=True)
class Check:
    """One rule of the doctor.

    `severity` is what a failure counts as (error or warning); `blocked_by` are the checks whose failure
    explains this one; `classes` are the kinds of node that it can be judged on. `looks_at` and `why` are for
    people; `refs` are public addresses to read on.
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


def ok(summary: str, *evidence: Evidence) -> Verdict:
    return Verdict(FindingStatus.PASS, summary, evidence)


def warn(summary: str, *evidence: Evidence, fix: Fix | None = None) -> Verdict:
    """Works now, but is fragile or about to break."""
    return Verdict(FindingStatus.WARN, summary, evidence, fix)


def fail(summary: str, *evidence: Evidence, fix: Fix | None = None) -> Verdict:
    """GPU containers can't work because of this."""
    return Verdict(FindingStatus.FAIL, summary, evidence, fix)


def skip(reason: str) -> Verdict:
    """Can't be judged here, or there is nothing to judge."""
    return Verdict(FindingStatus.SKIP, reason)


def seen(source: str, value: object, line: int | None = None) -> Evidence:
    """One observation; `source` is a path or a command."""
    return Evidence(source, str(value), line)
