"""From findings to what can be done about them: a plan that can be shown, and carried out in part."""

from __future__ import annotations

import shlex
from collections.abc import Collection

from gpunode.dataclass import dataclass
from gpunode.result import Finding, FindingStatus, Fix, Step

_BAD = (FindingStatus.FAIL, FindingStatus.WARN)
# programs whose plain calls gpunode may carry out itself; packages and keys are somebody's decision
_PLAIN = ("systemctl", "modprobe", "nvidia-modprobe", "ldconfig", "gpunode", "snap")
_REBOOT = "reboot"
_SHELL = set("|&;<>$`*?'\"{}()[]\\~#")
_WORSE = ("none", "restart", "drain", "reboot")


@dataclass(frozen=True)
class Mend:
    """What mends one finding. `disruptive` is the worst of its steps, as `Fix` has it.

    `way` is safe (--apply does what disturbs nobody), allow (needs --allow `disruptive`), or hand: a person
    must do it.
    """

    id: str
    summary: str
    command: str
    way: str
    disruptive: str
    steps: tuple[Step, ...]


def mends(findings: Collection[Finding]) -> tuple[Mend, ...]:
    """One for each bad finding that has a fix, errors before warnings."""
    bad = sorted(
        (finding for finding in findings if finding.status in _BAD and finding.fix),
        key=lambda one: _BAD.index(one.status),
    )
    return tuple(_mend(finding) for finding in bad)


def due(mend: Mend, allow: Collection[str]) -> tuple[Step, ...]:
    """The steps that may be carried out: what disturbs nobody if the fix is safe, and what was allowed."""
    if mend.way == "hand" or (mend.way == "allow" and mend.disruptive not in allow):
        return ()
    count = next(
        (number for number, step in enumerate(mend.steps) if step.disruptive not in ("none", *allow)),
        len(mend.steps),
    )
    return mend.steps[:count]


def _mend(finding: Finding) -> Mend:
    fix = finding.fix[0]
    command = " && ".join(one.command for one in finding.fix)
    parts = [steps_of(one) for one in finding.fix]
    steps = tuple(step for part in parts for step in part) if all(parts) else ()
    disruptive = max(
        (*(one.disruptive for one in finding.fix), *(step.disruptive for step in steps)), key=_WORSE.index
    )
    way = "hand"
    if steps and fix.safe and steps[0].disruptive == "none":
        way = "safe"
    elif steps and disruptive != "none":
        way = "allow"
    return Mend(finding.id, finding.summary, command, way, disruptive, steps)


def steps_of(fix: Fix) -> tuple[Step, ...]:
    """How a fix is carried out without a shell; () where only a person can do it.

    A command of plain calls (``a b && c d``) of programs that only start, load or tell is its own steps.
    """
    if fix.steps:
        return fix.steps
    found = []
    disruptive = "none" if fix.disruptive == _REBOOT else fix.disruptive
    for part in fix.command.split(" && "):
        words = shlex.split(part) if not _SHELL & set(part) else []
        if words == [_REBOOT]:
            found.append(Step(("systemctl", _REBOOT), disruptive=_REBOOT))
        elif words and words[0] in _PLAIN:
            found.append(Step(tuple(words), disruptive=disruptive))
        else:
            return ()
    return tuple(found)
