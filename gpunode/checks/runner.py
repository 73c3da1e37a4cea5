"""Runner of the checks: blockers first; a failure skips the checks that it explains; nothing raises."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from gpunode.checks.catalogue import ALL_CHECKS, BY_ID
from gpunode.checks.finding import REPLACES_DRIVER, Finding, FindingStatus, Fix, effect_of
from gpunode.checks.model import NO_GPU, Check, Verdict, one_line, skip
from gpunode.checks.patience import DEEP_SECONDS, Patience
from gpunode.checks.preconditions import fitting, separate_reboot
from gpunode.errors import GpunodeError, Unreadable
from gpunode.facts.node import Node
from gpunode.facts.topic import Stuck
from gpunode.facts.traits import TRAITS
from gpunode.host.redact import without_secrets

EVERY = "all"
BY_OPTION = "by --ignore"  # if no reason was given
_Answer = TypeVar("_Answer")
_BUS = "hardware"  # this layer also applies to GPUs that aren't for containers


@dataclass(frozen=True)
class Selection:
    """Which checks to run, and how their failures count; ids are known ones.

    `only` runs those, and the failures that explain a skipped one. `skip` and `ignore` hold the given
    reasons, if any: a skipped check doesn't run, an ignored one's error becomes a warning; `ignore` may
    contain `EVERY`. `preflight` is the installation to check for obstacles, empty for everything.
    """

    only: Collection[str] = ()
    skip: Mapping[str, str] = field(default_factory=dict)
    ignore: Mapping[str, str] = field(default_factory=dict)
    preflight: str = ""


def run_checks(node: Node, selection: Selection | None = None) -> tuple[Finding, ...]:
    """Findings in the catalogue's order."""
    selection = selection or Selection()
    selected = [check for check in ALL_CHECKS if not selection.only or check.id in selection.only]
    if selection.preflight:
        selected = [check for check in selected if selection.preflight in check.preflight]
    with Patience(node.host) as patience:
        walk = _Walk(node, selection, patience)
        findings = {check.id: walk.finding(check) for check in selected}
        for finding in tuple(findings.values()):
            if finding.blocked_by is not None:
                findings.setdefault(finding.blocked_by, walk.finding(BY_ID[finding.blocked_by]))
    return tuple(_with_effects(node, findings[check.id]) for check in ALL_CHECKS if check.id in findings)


def _with_effects(node: Node, finding: Finding) -> Finding:
    """What the fixes disturb on this node. After all checks, which read what this depends on."""
    if not finding.fixes:
        return finding
    return replace(finding, fixes=tuple(_with_effect(node, fix) for fix in finding.fixes))


def _with_effect(node: Node, fix: Fix) -> Fix:
    then = _with_effect(node, fix.then) if fix.then else None
    return replace(fix, effect=effect_of(fix, node), then=then)


@dataclass(frozen=True)
class _Walk:
    """One run; `done` remembers findings, so that every check runs once. `failed` are those that explain
    skipped ones, including ignored ones. A check that ended in an error explains only checks that end in the
    same one: `errors` has the first check of each message, so that an unreadable file is reported once.
    `traits` remembers those of the node that are known: most checks need the same few."""

    node: Node
    selection: Selection
    patience: Patience
    done: dict[str, Finding] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    errors: dict[str, str] = field(default_factory=dict)
    traits: dict[str, bool] = field(default_factory=dict)

    def finding(self, check: Check) -> Finding:
        if check.id not in self.done:
            finding = self._judge(check)
            if finding.status is FindingStatus.FAIL:
                self.failed.add(check.id)
            self.done[check.id] = self._ignored(check, finding)
        return self.done[check.id]

    def _ignored(self, check: Check, finding: Finding) -> Finding:
        """An ignored error stays visible as a warning. It still explains checks that wait for it."""
        ignore = self.selection.ignore
        if finding.status not in (FindingStatus.FAIL, FindingStatus.ERROR):
            return finding
        if check.id not in ignore and EVERY not in ignore:
            return finding
        reason = ignore.get(check.id, "") or ignore.get(EVERY, "")
        return replace(finding, status=FindingStatus.WARN, severity="warning", ignored=reason or BY_OPTION)

    def _judge(self, check: Check) -> Finding:
        if check.id in self.selection.skip:
            reason = self.selection.skip[check.id]
            return _finding(check, skip(f"skipped{f': {reason}' if reason else ' by --skip'}", "left-out"))
        started = self.node.host.monotonic()
        verdict = self._guarded(lambda: self._not_applicable(check))
        if verdict is None:
            cause = self._root_cause(check)
            if cause is not None:
                return _finding(check, skip(f"waits for {cause}", "blocked"), blocked_by=cause)
            least = DEEP_SECONDS if check.deep else 0.0
            verdict = self._guarded(lambda: self.patience.call(lambda: check.run(self.node), least))
        if verdict.status is FindingStatus.ERROR:
            first = self.errors.setdefault(verdict.summary, check.id)
            if first != check.id:
                return _finding(check, skip(verdict.summary, "blocked"), blocked_by=first)
        finding = _finding(check, verdict, self._family())
        fixes = self._fitting(finding.fixes)
        milliseconds = round((self.node.host.monotonic() - started) * 1000, 1)
        return replace(finding, fixes=fixes, milliseconds=milliseconds)

    def _not_applicable(self, check: Check) -> Verdict | None:
        """Why this check doesn't apply to this node; None if it does."""
        questions = self.node.questions
        if self._kind not in check.classes:
            return skip(f"not applicable on this kind of node ({self._kind})", "not-applicable")
        if questions.expect_gpus == 0 and check.id != NO_GPU and not self._gpus:
            return skip("not applicable: this node has no GPU, as expected", "not-applicable")
        if check.layer != _BUS and self._has("vm-host"):
            return skip(f"not applicable: {TRAITS['vm-host'].present}", "not-applicable")
        if check.deep and not questions.deep:
            return skip("runs only with --deep", "left-out")
        for name in check.needs:
            if not self._has(name):
                return skip(f"not applicable: {TRAITS[name].absent}", "not-applicable")
        for name in check.unless:
            if self._has(name):
                return skip(f"not applicable: {TRAITS[name].present}", "not-applicable")
        return None

    @cached_property
    def _kind(self) -> str:
        return self.patience.call(lambda: self.node.kind)

    @cached_property
    def _gpus(self) -> bool:
        return self.patience.call(lambda: bool(self.node.gpus))

    def _has(self, trait: str) -> bool:
        if trait not in self.traits:
            self.traits[trait] = self.patience.call(lambda: TRAITS[trait].holds(self.node))
        return self.traits[trait]

    def _root_cause(self, check: Check) -> str | None:
        """The failed check that explains this one, through any number of skipped ones between, including
        those that don't apply to this node or were skipped by option."""
        for blocker in check.blocked_by:
            before = self.finding(BY_ID[blocker])
            if before.id in self.failed:
                return before.id
            if before.blocked_by in self.failed:
                return before.blocked_by
            if before.skipped in ("not-applicable", "left-out"):
                cause = self._root_cause(BY_ID[blocker])
                if cause is not None:
                    return cause
        return None

    def _guarded(self, question: Callable[[], _Answer]) -> _Answer | Verdict:
        try:
            return question()
        except Stuck as error:
            return (
                Verdict(FindingStatus.ERROR, error.message) if error.first else skip(error.message, "hangs")
            )
        except Unreadable as error:
            return skip(f"needs root: {error.message}", "unreadable")
        except PermissionError as error:
            return skip(f"needs root to read {error.filename}", "unreadable")
        except GpunodeError as error:
            return Verdict(FindingStatus.ERROR, error.message)
        except Exception as error:  # noqa: BLE001 - a broken check is a finding and never ends the doctor
            return Verdict(
                FindingStatus.ERROR, f"internal error in the check: {type(error).__name__}: {error}"
            )

    def _fitting(self, offered: tuple[Fix, ...]) -> tuple[Fix, ...]:
        """Fixes with commands that this node can run, a reboot separate from the steps before it."""
        try:
            return tuple(part for fix in offered for part in _steps(self.node, fitting(self.node, fix)))
        except (GpunodeError, OSError):
            return offered  # a fact that can't be read doesn't exclude a command

    def _family(self) -> str:
        try:
            return self.node.distribution.family
        except GpunodeError:
            return "other"


def _steps(node: Node, fix: Fix) -> tuple[Fix, ...]:
    """A reboot separate from the steps before it. A loaded driver is replaced after a drain: until the
    reboot its new libraries don't match the loaded module."""
    first, *rest = separate_reboot(fix)
    if rest and node.module is not None and first.disturbs == REPLACES_DRIVER:
        first = replace(first, disruptive="drain")
    return (first, *rest)


def _finding(
    check: Check,
    verdict: Verdict,
    family: str = "other",
    blocked_by: str | None = None,
) -> Finding:
    bad = verdict.status in (FindingStatus.FAIL, FindingStatus.WARN)
    fixes = (verdict.fix or check.fix_for(family),) if bad else ()
    severity = "warning" if verdict.status is FindingStatus.WARN else check.severity
    return Finding(
        id=check.id,
        title=check.title,
        status=verdict.status,
        severity="info" if verdict.note else severity,
        summary=without_secrets(one_line(verdict.summary)),
        evidence=tuple(
            evidence._replace(value=without_secrets(evidence.value)) for evidence in verdict.evidence
        ),
        why=verdict.why or check.why if bad or verdict.note else "",
        fixes=(verdict.fix,) if verdict.note and verdict.fix else fixes,
        blocked_by=blocked_by,
        refs=check.refs,
        layer=check.layer,
        note=verdict.note,
        skipped=verdict.skipped,
        reboot=check.reboot if verdict.reboot is None else verdict.reboot,
    )
