"""Walk the blocking graph: blockers first, what a failure explains is skipped, nothing ever raises."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from gpunode.checks.catalogue import ALL_CHECKS, BY_ID
from gpunode.checks.model import Check, Verdict, skip
from gpunode.errors import GpunodeError, Unreadable
from gpunode.facts.node import Node
from gpunode.result import Finding, FindingStatus


def run_checks(node: Node, only: Collection[str] = (), left_out: Collection[str] = ()) -> tuple[Finding, ...]:
    """Findings in the catalogue's order. With `only`, those and the failures that explain a skipped one."""
    walk = _Walk(node, frozenset(left_out))
    wanted = [check for check in ALL_CHECKS if not only or check.id in only]
    findings = {check.id: walk.finding(check) for check in wanted}
    for finding in tuple(findings.values()):
        if finding.blocked_by is not None:
            findings.setdefault(finding.blocked_by, walk.finding(BY_ID[finding.blocked_by]))
    return tuple(findings[check.id] for check in ALL_CHECKS if check.id in findings)


@dataclass(frozen=True)
class _Walk:
    """One run; `done` remembers findings, so that every check runs once."""

    node: Node
    left_out: frozenset[str]
    done: dict[str, Finding] = field(default_factory=dict)

    def finding(self, check: Check) -> Finding:
        if check.id not in self.done:
            self.done[check.id] = self._judge(check)
        return self.done[check.id]

    def _judge(self, check: Check) -> Finding:
        if check.id in self.left_out:
            return _finding(check, skip("left out by --skip"))
        cause = self._root_cause(check)
        if cause is not None:
            return _finding(check, skip(f"waits for {cause}"), blocked_by=cause)
        started = self.node.host.monotonic()
        verdict = self._verdict(check)
        milliseconds = round((self.node.host.monotonic() - started) * 1000, 1)
        return _finding(check, verdict, self._family(), milliseconds=milliseconds)

    def _root_cause(self, check: Check) -> str | None:
        """The check that failed and explains this one, through any number of skipped ones between."""
        for blocker in check.blocked_by:
            before = self.finding(BY_ID[blocker])
            if before.status is FindingStatus.FAIL:
                return before.id
            if before.blocked_by is not None:
                return before.blocked_by
        return None

    def _verdict(self, check: Check) -> Verdict:
        try:
            if self.node.kind not in check.classes:
                return skip(f"not applicable on this kind of node ({self.node.kind})")
            return check.run(self.node)
        except Unreadable as error:
            return skip(f"needs root: {error.message}")
        except PermissionError as error:
            return skip(f"needs root to read {error.filename}")
        except GpunodeError as error:
            return Verdict(FindingStatus.ERROR, error.message)
        except Exception as error:  # noqa: BLE001 - a broken check is a finding and never ends the doctor
            return Verdict(FindingStatus.ERROR, f"the check broke: {type(error).__name__}: {error}")

    def _family(self) -> str:
        try:
            return self.node.distribution.family
        except GpunodeError:
            return "other"


def _finding(
    check: Check,
    verdict: Verdict,
    family: str = "other",
    blocked_by: str | None = None,
    milliseconds: float = 0.0,
) -> Finding:
    bad = verdict.status in (FindingStatus.FAIL, FindingStatus.WARN)
    fix = (verdict.fix or check.remedy.for_family(family),) if bad else ()
    return Finding(
        id=check.id,
        title=check.title,
        status=verdict.status,
        severity="warning" if verdict.status is FindingStatus.WARN else check.severity,
        summary=verdict.summary,
        evidence=verdict.evidence,
        why=check.why if bad else "",
        fix=fix,
        blocked_by=blocked_by,
        refs=check.refs,
        milliseconds=milliseconds,
        layer=check.layer,
    )
