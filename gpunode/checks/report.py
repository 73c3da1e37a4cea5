"""Text form of the doctor's report: the verdict, one line per layer, the findings, and the first fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from gpunode.checks.catalogue import BY_ID, LAYERS
from gpunode.checks.finding import DISRUPTS_NOTHING, Evidence, Finding, FindingStatus, Fix
from gpunode.checks.fixes import ON_HOST, REBOOT
from gpunode.checks.runner import BY_OPTION, Selection
from gpunode.errors import GpunodeError
from gpunode.facts.daemons import Daemon
from gpunode.facts.node import Node
from gpunode.facts.registry import ENGINES
from gpunode.facts.system import CONTAINER, TEGRA, VM, WSL2, Distribution
from gpunode.facts.tables import OLD_DAYS
from gpunode.gpu.model import Inventory
from gpunode.output.result import Block, Cell, Style, Table, Text, many, undecided

# Evidence of a finding in a few lines.

_ALIKE = 3  # as many lines that differ in one part of their path are merged


class TableAge(NamedTuple):
    """A reference table that checks judge by."""

    name: str
    date: str
    source: tuple[str, ...]
    age_days: int


def evidence_lines(evidence: Sequence[Evidence]) -> Iterator[str]:
    """``place: what was seen`` for each; similar ones merged into one line with shell braces."""
    for (value, _, _), group in groupby(
        evidence, lambda entry: (entry.value, entry.line, entry.source.count("/"))
    ):
        alike = list(group)
        place = _braced([item.source for item in alike]) if len(alike) >= _ALIKE else ""
        for item in alike[:1] if place else alike:
            line = f":{item.line}" if item.line is not None else ""
            yield f"{place or item.source}{line}: {value}"


def _braced(paths: Sequence[str]) -> str:
    """``/dev/{nvidia0,nvidia1}`` for paths that differ in one part; empty if they don't."""
    parts = list(zip(*(path.split("/") for path in paths), strict=True))
    differing = [number for number, names in enumerate(parts) if len(set(names)) > 1]
    if len(differing) != 1 or not all(path.startswith("/") and " " not in path for path in paths):
        return ""
    return "/".join(
        "{" + ",".join(names) + "}" if number in differing else names[0] for number, names in enumerate(parts)
    )


# Dependencies between checks, from the blocking graph: the path from a root cause to its consequences.


def chains(findings: tuple[Finding, ...]) -> Iterator[Block]:
    """A tree below each cause: a check is below the last of its blockers that waits for that cause."""
    for cause, parents in behind(findings).items():
        yield Text("")
        yield Text(f"{cause} causes {len(parents)} more:", Style.HEADING)
        yield from _below(cause, parents, "  ")


def behind(findings: tuple[Finding, ...]) -> dict[str, dict[str, str]]:
    """For each cause the checks that wait for it, each with the check that it is listed below."""
    waiting = {finding.id: finding.blocked_by for finding in findings if finding.blocked_by}
    result: dict[str, dict[str, str]] = {}
    for cause in dict.fromkeys(waiting.values()):
        here = [identifier for identifier, of in waiting.items() if of == cause]
        result[cause] = {blocked: _nearest(blocked, here, cause) for blocked in here}
    return result


def _nearest(identifier: str, waiting_ids: list[str], cause: str) -> str:
    here = [blocker for blocker in BY_ID[identifier].blocked_by if blocker in waiting_ids or blocker == cause]
    return here[-1] if here else cause


def _below(parent: str, parents: dict[str, str], indent: str) -> Iterator[Block]:
    for identifier, above in parents.items():
        if above == parent:
            yield Text(f"{indent}{identifier}", Style.DIM)
            yield from _below(identifier, parents, indent + "  ")


_BAD = (FindingStatus.FAIL, FindingStatus.WARN, FindingStatus.ERROR)
_STYLES = {
    FindingStatus.FAIL: Style.BAD,
    FindingStatus.ERROR: Style.BAD,
    FindingStatus.WARN: Style.WARN,
    FindingStatus.PASS: Style.GOOD,
    FindingStatus.SKIP: Style.DIM,
}
_ENGINES = ("docker", "containerd")
# a drain waits for the kubelet and its engine to end the pods
_DRAINS_BY = ("containerd-not-restarted", "crio-not-running", "kubelet-not-running")
# the node class, unless it is a plain machine: it determines which checks apply, and what a fix means
_KINDS = {CONTAINER: "in a container", VM: "in a virtual machine", WSL2: "WSL2", TEGRA: "Tegra"}


def blocks(
    node: NodeSummary,
    findings: tuple[Finding, ...],
    explain: bool = False,
    tables: Sequence[TableAge] = (),
    selection: Selection | None = None,
) -> tuple[Block, ...]:
    """All blocks of the table form; with `explain` also which check waits for which. `tables` are the
    report's reference tables. With a `selection` the headline doesn't claim the whole."""
    return (
        *_verdict(node, findings, selection or Selection()),
        *_layers(findings),
        *_problems(node, findings),
        *_notes(findings),
        *(chains(findings) if explain else ()),
        *_unreadable(findings),
        *_reboot(node, findings),
        *_tables(tables),
        *_first(node, findings),
    )


def first(findings: tuple[Finding, ...]) -> str | None:
    """The id of the finding to fix first: a root cause, or the first warning. A reboot comes after the
    findings that it would make worse. None if nothing can be fixed."""
    fixable = [finding for finding in _causes_first(findings) if finding.fixes]
    if not fixable:
        return None
    worst = fixable[0]
    before = reboot(findings).before.get(worst.id, ())
    return next((finding.id for finding in fixable if finding.id in before), worst.id)


def _before_reboot(
    findings: tuple[Finding, ...], finding: Finding, breaks: tuple[str, ...]
) -> tuple[str, ...]:
    """Ids of the findings to fix before the reboot that is, or ends, the fix of this one. `breaks` are the
    findings that a reboot makes worse."""
    bad = {other.id for other in findings if other.status in _BAD}
    drains_by = (check_id for check_id in _DRAINS_BY if check_id in bad and check_id != finding.id)
    breaks = tuple(dict.fromkeys((*drains_by, *breaks)))
    if _fixed_by_reboot(finding):
        return breaks
    if not _reboots_last(finding):
        return ()
    ends = {entry.id for entry in findings if _reboots_last(entry)}
    return tuple(check_id for check_id in breaks if check_id not in ends)


@dataclass(frozen=True)
class RebootVerdict:
    """Ids of findings: `findings` to fix before a reboot, `mends` that a reboot fixes, and `unjudged` checks
    without a result because this user has no permission or the check itself failed. `waiting` are checks
    that run only once another problem is fixed, if any other of the section has a result. `safe` is null if
    nothing was found but checks are `unjudged`. `before` has the findings with a reboot in their fix, each
    with those to fix before that reboot."""

    safe: bool | None
    findings: tuple[str, ...]
    mends: tuple[str, ...]
    unjudged: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)


def reboot(findings: tuple[Finding, ...]) -> RebootVerdict:
    """Whether the node would come back from a reboot with its GPUs."""
    here = [finding for finding in findings if finding.reboot]
    bad = [finding for finding in here if finding.status in (FindingStatus.FAIL, FindingStatus.WARN)]
    fixed_by_reboot = tuple(
        finding.id for finding in findings if finding.status in _BAD and _fixed_by_reboot(finding)
    )
    breaks = tuple(finding.id for finding in bad if finding.id not in fixed_by_reboot)
    unjudged = tuple(
        finding.id for finding in here if _unread(finding) or finding.status is FindingStatus.ERROR
    )
    # a valid configuration of an engine doesn't prove that a GPU works
    is_judged = any(
        finding.id in fixed_by_reboot
        or (finding.status is FindingStatus.PASS and finding.layer not in _ENGINES)
        for finding in here
    )
    waiting = tuple(finding.id for finding in here if finding.blocked_by and is_judged)
    safe = False if breaks else (True if is_judged and not unjudged else None)
    before = {
        finding.id: _before_reboot(findings, finding, breaks)
        for finding in findings
        if finding.status in _BAD
    }
    return RebootVerdict(
        safe, breaks, fixed_by_reboot, unjudged, waiting, {name: ids for name, ids in before.items() if ids}
    )


def _fixed_by_reboot(finding: Finding) -> bool:
    return bool(finding.fixes) and finding.fixes[0].command == REBOOT.command


def _ordered(findings: tuple[Finding, ...]) -> list[Finding]:
    """The worst first; among equals the one that most others wait for, else the one that is nearer to the
    hardware."""
    waiting = Counter(finding.blocked_by for finding in findings)
    bad = [finding for finding in findings if finding.status in _BAD]
    return sorted(bad, key=lambda finding: (_BAD.index(finding.status), -waiting[finding.id]))


def order(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """The ids of errors and warnings in the order of their fixes: after `first` the worst, but none before
    its cause."""
    return tuple(finding.id for finding in in_order(findings))


def in_order(findings: tuple[Finding, ...]) -> list[Finding]:
    """Errors and warnings in the order of their fixes: the page and `doctor --fix` have the same."""
    identifier = first(findings)
    return sorted(_causes_first(findings), key=lambda finding: finding.id != identifier)


def _first_finding(findings: tuple[Finding, ...]) -> Finding | None:
    identifier = first(findings)
    return next((finding for finding in findings if finding.id == identifier), None)


def _causes_first(findings: tuple[Finding, ...]) -> list[Finding]:
    """As `_ordered`, but a finding comes after those that its check is blocked by: a warning doesn't block
    a check, but its fix may still change what the check sees."""
    left, sorted_ = _ordered(findings), []
    while left:
        following = next(
            finding for finding in left if not any(other.id in _blockers(finding.id) for other in left)
        )
        left.remove(following)
        sorted_.append(following)
    return sorted_


@cache
def _blockers(identifier: str) -> frozenset[str]:
    """All checks that this one is blocked by, directly or through others; the graph has no cycles."""
    direct = BY_ID[identifier].blocked_by
    return frozenset(direct).union(*(_blockers(blocker) for blocker in direct))


class Headline(NamedTuple):
    """The verdict in a few words; `status` is fail, warn or ok."""

    text: str
    status: str


def headline(node: NodeSummary, findings: tuple[Finding, ...], selection: Selection) -> Headline:
    """Count errors and warnings. Without any, the headline says ready only if every applicable check has a
    result and NVML answered for the GPUs."""
    counts = Counter(finding.status for finding in findings)
    errors = counts[FindingStatus.FAIL] + counts[FindingStatus.ERROR]
    warnings = counts[FindingStatus.WARN]
    parts = [many(errors, "error")] if errors else []
    parts += [many(warnings, "warning")] if warnings else []
    if parts:
        return Headline(", ".join(parts), "fail" if errors else "warn")
    return _no_fault(findings, counts[FindingStatus.PASS], selection, node.class_)


_HEADLINE_STYLES = {"fail": Style.BAD, "warn": Style.WARN, "ok": Style.GOOD}


def _verdict(node: NodeSummary, findings: tuple[Finding, ...], selection: Selection) -> Iterator[Block]:
    verdict = headline(node, findings, selection)
    causes = _causes_first(findings)
    what = f": {causes[0].summary}" if causes else ""
    start = first(findings)
    if causes and start not in (None, causes[0].id):
        what += f" (first fix {start})"
    yield Text(f"{verdict.text}{what}", _HEADLINE_STYLES[verdict.status])
    yield Text(_machine(node), Style.DIM)
    yield Text("")


def gpus_not_examined(findings: tuple[Finding, ...], kind: str) -> str:
    """Why NVML wasn't queried for the GPUs of this node class; "" if it was. NVML doesn't list the integrated
    GPU of a Jetson, which has its own check. Also "" if that check wasn't selected."""
    identifier = "jetson" if kind == TEGRA else "nvml-hang"
    finding = next((finding for finding in findings if finding.id == identifier), None)
    if finding is None:
        return ""
    if finding.status is FindingStatus.PASS and not finding.note:
        return ""
    return finding.summary.removeprefix("not applicable: ")


def _no_fault(findings: tuple[Finding, ...], passed: int, selection: Selection, kind: str) -> Headline:
    unexamined = gpus_not_examined(findings, kind)
    if passed and unexamined and not selection.only and not selection.preflight:
        return Headline(f"No fault found; GPUs not examined: {unexamined}", "warn")
    unread = sum(_unread(finding) for finding in findings)
    if unread:
        return Headline(f"No fault found, but {many(unread, 'check')} could not run without root", "warn")
    if not passed:
        reason = f": {findings[0].summary}" if findings else ""
        return Headline(f"No check ran{reason}", "warn")
    if selection.only:
        return Headline(f"No fault found by {many(passed, 'check')}; the other checks did not run", "ok")
    left = f", {many(len(selection.skip), 'check')} skipped" if selection.skip else ""
    if selection.preflight:
        return Headline(f"No fault blocks {selection.preflight}{left}", "ok")
    if left:
        return Headline(f"No fault found{left}", "ok")
    return Headline("This node is ready: no check found a fault", "ok")


def _unread(finding: Finding) -> bool:
    return finding.skipped == "unreadable"


def _machine(node: NodeSummary) -> str:
    distro = node.distro.name if node.distro else ""
    kernel = f"kernel {node.kernel}" if node.kernel else ""
    driver = f"driver {node.driver}" if node.driver else "no driver loaded"
    engines = ", ".join(f"{engine.name} {engine.version}".strip() for engine in node.engines)
    kind = _KINDS.get(node.class_, "")
    return " · ".join(part for part in (_gpus(node.gpus), driver, distro, kernel, kind, engines) if part)


def _gpus(gpus: tuple[GpuSummary, ...]) -> str:
    names = Counter(gpu.name or "NVIDIA GPU" for gpu in gpus)
    return ", ".join(f"{number} × {name}" for name, number in names.items()) or "no GPU"


def _layers(findings: tuple[Finding, ...]) -> Iterator[Block]:
    """Checks that passed, then layers with faults, one line each, then checks without a result by reason."""
    passed = dict.fromkeys(LAYERS, 0)
    for finding in findings:
        passed[finding.layer] += finding.status is FindingStatus.PASS
    rows: list[tuple[Cell, str, str]] = []
    for layer in LAYERS:
        if bad := _ordered(tuple(finding for finding in findings if finding.layer == layer)):
            count = passed.pop(layer)
            names = ", ".join(finding.id for finding in bad)
            rows.append((_cell(bad[0].status), layer, f"{names} (OK {count})" if count else names))
    if number := sum(passed.values()):
        layers = ", ".join(f"{layer} {count}" for layer, count in passed.items() if count)
        rows.insert(0, (_cell(FindingStatus.PASS), many(number, "check"), layers))
    counts = Counter(result for result in map(_without_result, findings) if result)
    for (word, reason), number in counts.items():
        rows.append((Cell(word, Style.DIM), many(number, "check"), reason))
    if rows:
        cells = tuple((word, Cell(name, Style.HEADING), Cell(state)) for word, name, state in rows)
        yield Table(("", "", ""), cells)


def _without_result(finding: Finding) -> tuple[str, str] | None:
    """A word and a reason for a check that applies and has no result."""
    if _unread(finding):
        return "SKIP", "need root, listed below"
    return ("WAIT", f"not run until {finding.blocked_by} is fixed") if finding.blocked_by else None


def _cell(status: FindingStatus) -> Cell:
    return Cell(_word(status), _STYLES[status])


def _word(status: FindingStatus) -> str:
    return {FindingStatus.PASS: "OK"}.get(status, status.value.upper())


def _problems(node: NodeSummary, findings: tuple[Finding, ...]) -> Iterator[Block]:
    before = reboot(findings).before
    at_the_end = first(findings)
    commands: dict[str, str] = {}  # a command, and the finding that shows it
    above: set[str] = set()  # findings that are fixed when the reader comes to this one
    for finding in in_order(findings):
        yield Text("")
        yield Text(f"{_word(finding.status)} {finding.id}: {finding.summary}", _STYLES[finding.status])
        if finding.ignored is not None:
            ignored = f" {BY_OPTION}" if finding.ignored == BY_OPTION else f": {finding.ignored}"
            yield Text(f"  an error, but ignored{ignored}", Style.DIM)
        yield from (Text(f"  {line}") for line in evidence_lines(finding.evidence))
        if finding.why:
            yield Text(f"  {finding.why}", Style.DIM)
        if not finding.fixes:
            continue
        of = commands.setdefault(finding.fixes[0].command, finding.id)
        if finding.id == at_the_end:
            yield Text(f"  {_label(finding.fixes[0])}: see the steps at the end", Style.COMMAND)
        elif of != finding.id:
            yield Text(f"  {_label(finding.fixes[0])}: the same as for {of}", Style.COMMAND)
        else:
            left = [other for other in before.get(finding.id, ()) if other not in above]
            yield from _fix(node, finding, left)
        above.add(finding.id)


def _label(fix: Fix) -> str:
    return "Look" if fix.look else "Fix"


def _fix(node: NodeSummary, finding: Finding, before: Sequence[str]) -> Iterator[Block]:
    """The command and what it disrupts. A reboot is a step of its own; `before` are the findings to fix
    before it."""
    fix = finding.fixes[0]
    yield from _indented(_with_commands(fix.before, Style.PLAIN), "  ")
    yield from _indented(_change(fix), "  ")
    yield Text(f"  {_label(fix)}: {fix.command}", Style.COMMAND)
    if fix.effect:
        steps = [f"fix {identifier}" for identifier in before] if _fixed_by_reboot(finding) else []
        steps += ["drain this Kubernetes node"] if node.kubernetes and _needs_drain(fix) else []
        first_do = f"; {' and '.join(steps)} first" if steps else ""
        yield Text(f"  ({fix.effect}{first_do})", Style.DIM)
    yield from _indented(_with_commands(fix.note, Style.DIM), "  ")
    if _reboots_last(finding):
        drained = _needs_drain(fix) or not node.kubernetes
        steps = [f"fix {identifier}" for identifier in before]
        steps += ["reboot"] if drained else ["drain this Kubernetes node and reboot it"]
        when = "If the command succeeds," if fix.note else "Then"  # a note may say what to do if it fails
        yield Text(f"  {when} {', '.join(steps)}", Style.DIM)


def _change(fix: Fix | NextStep) -> Iterator[Text]:
    """What to change in the file that the command opens."""
    if fix.change:
        change, *lines = fix.change.split("\n")
        yield Text(change)
        yield from (Text(f"  {line}", Style.DOCUMENT) for line in lines)


def _with_commands(lines: str, style: Style) -> Iterator[Text]:
    """The first line in this style, then the commands."""
    text, *commands = lines.split("\n")
    if text:
        yield Text(text, style)
    yield from (Text(command, Style.COMMAND) for command in commands)


def _indented(lines: Iterable[Text], indent: str) -> Iterator[Text]:
    return (line._replace(text=f"{indent}{line.text}") for line in lines)


def _needs_drain(fix: Fix) -> bool:
    return fix.disruptive in ("drain", "reboot")


def _reboots_last(finding: Finding) -> bool:
    return len(finding.fixes) > 1 and finding.fixes[-1].command == REBOOT.command


def _unreadable(findings: tuple[Finding, ...]) -> Iterator[Block]:
    """Checks that this user has no permission for, by what root would have to read."""
    unread: dict[str, list[str]] = {}
    for finding in filter(_unread, findings):
        unread.setdefault(finding.summary, []).append(finding.id)
    if unread:
        yield Text("")
    for reason, names in unread.items():
        yield Text(f"not checked, {reason}", Style.DIM)
        yield Text(f"  {', '.join(names)}", Style.DIM)


def _notes(findings: tuple[Finding, ...]) -> Iterator[Block]:
    notes = [finding for finding in findings if finding.note]
    if notes:
        yield Text("")
    for finding in notes:
        yield Text(f"NOTE {finding.id}: {finding.summary}", Style.DIM)


def _reboot(node: NodeSummary, findings: tuple[Finding, ...]) -> Iterator[Block]:
    """The section about the next boot."""
    verdict = reboot(findings)
    breaks, fixed_by_reboot, left = verdict.findings, verdict.mends, (*verdict.unjudged, *verdict.waiting)
    if verdict.safe is None and not (fixed_by_reboot or left):
        return
    yield Text("")
    if breaks:
        yield Text("Safe to reboot? No, fix this before a reboot:", Style.WARN)
        yield from (Text(f"  {identifier}", Style.WARN) for identifier in breaks)
    elif left:
        without = [finding for finding in findings if finding.id in left]
        reasons = {finding.skipped for finding in without}
        causes = {finding.blocked_by for finding in without if finding.blocked_by}
        doubt = undecided(len(left), reasons, causes, fixed_by_reboot)
        yield Text(f"Safe to reboot? {doubt}", Style.WARN)
    else:
        yield Text("Safe to reboot? Yes: no check found a problem that a reboot would cause", Style.GOOD)
    if fixed_by_reboot:
        yield Text(f"  A reboot is the fix for {', '.join(fixed_by_reboot)}", Style.DIM)
    if node.reboot_ends:
        yield Text(f"  A reboot ends {node.reboot_ends}", Style.DIM)


class NextStep(NamedTuple):
    """One step of the first fix: a `command`, or the id of another `finding` to fix at this point.

    `effect` is what the command disrupts or where it runs; `change` and `note` are those of its fix.
    """

    command: str = ""
    finding: str = ""
    effect: str = ""
    change: str = ""
    note: str = ""


def next_steps(node: NodeSummary, findings: tuple[Finding, ...]) -> tuple[NextStep, ...]:
    """All steps of the first fix in their order, up to the next run of the doctor and the uncordon."""
    finding = _first_finding(findings)
    if finding is None or finding.fixes[0].command == ON_HOST:
        return ()
    fix, name = finding.fixes[0], node.name or "NODE"
    others = [NextStep(finding=other) for other in reboot(findings).before.get(finding.id, ())]
    drains = node.kubernetes and any(map(_needs_drain, finding.fixes))
    drain = NextStep(
        f"kubectl drain {name} --ignore-daemonsets --delete-emptydir-data",
        effect="where kubectl is set up"
        + ("" if node.name else "; NODE: this node's name in kubectl get nodes")
        + "; evicts this node's pods and deletes their emptyDir volumes; if it fails, "
        f"kubectl uncordon {name} and fix what it names",
    )
    restarts = _restarts(node)
    reboots = _fixed_by_reboot(finding)
    effect = (
        restarts
        if reboots
        else fix.effect or (DISRUPTS_NOTHING if fix.safe or fix.disturbs == DISRUPTS_NOTHING else "")
    )
    steps = others if reboots else []
    text, *commands = fix.before.split("\n")
    steps += [NextStep(command, note=text) for command in commands]
    if drains and _needs_drain(fix):
        steps.append(drain)
    steps.append(NextStep(fix.command, effect=effect, change=fix.change, note="" if fix.then else fix.note))
    if fix.then:
        steps.append(NextStep(fix.then.command, effect=fix.then.effect))
    if _reboots_last(finding):
        steps += others
        if drains and drain not in steps:
            steps.append(drain)
        steps.append(NextStep(REBOOT.command, effect=restarts))
    if not fix.command.startswith("gpunode doctor "):  # with other options, it has the answer
        steps.append(NextStep("gpunode doctor"))
    if drains:
        steps.append(NextStep(f"kubectl uncordon {name}", effect="once the doctor finds no error"))
    return tuple(steps)


def _restarts(node: NodeSummary) -> str:
    """What a reboot does to containers, after the drain of a Kubernetes node."""
    if node.kubernetes:  # a drain leaves Docker's own containers running
        by_docker = any(engine.name == "docker" and engine.running for engine in node.engines)
        return "stops Docker's own containers too" if by_docker else ""
    if {engine.name for engine in node.engines} == {"podman"}:  # no daemon starts them
        return "containers stop; only those of a systemd unit, such as podman-restart, start again"
    return "containers stop; those with a restart policy start again"


def _lines(step: NextStep) -> Iterator[Text]:
    yield from _change(step)
    yield Text(step.command or f"fix {step.finding}", Style.COMMAND)
    if step.effect:
        yield Text(f"({step.effect})", Style.DIM)
    yield from _with_commands(step.note, Style.DIM)


def _first(node: NodeSummary, findings: tuple[Finding, ...]) -> Iterator[Block]:
    """The steps of the first fix: the end of a long page is enough."""
    finding = _first_finding(findings)
    if finding is None:
        return
    yield Text("")
    fix = finding.fixes[0]
    if fix.command == ON_HOST:
        yield Text("This is a container. Run gpunode doctor on its host.", Style.COMMAND)
        return
    yield Text(f"{_label(fix)} first{', as root' if fix.needs_root else ''}: {finding.id}", Style.HEADING)
    worst = _causes_first(findings)[0].id
    if finding.id in reboot(findings).before.get(worst, ()):
        yield Text(f"  Before the reboot that {worst} needs")
    if fix.before and "\n" not in fix.before:  # otherwise it is a step
        yield Text(f"  {fix.before}")
    for number, step in enumerate(next_steps(node, findings), 1):
        start, *more = _lines(step)
        yield start._replace(text=f"  {number}. {start.text}")
        yield from _indented(more, "     ")
    yield Text(f"More: gpunode explain {finding.id}", Style.DIM)


def _tables(ages: Sequence[TableAge]) -> Iterator[Block]:
    """Age of the oldest reference table: it doesn't contain what was published since."""
    if ages:
        oldest = min(ages, key=lambda table: table.date)
        late = ": newer ones are unknown" if oldest.age_days > OLD_DAYS else ""
        what = f"Based on NVIDIA's releases and bulletins up to {oldest.date}"
        yield Text(f"{what} ({many(oldest.age_days, 'day')} ago){late}", Style.DIM)


# Facts about the node in a report, beside the findings.

_MODEL = "/proc/device-tree/model"  # the module's name in the device tree

Call = Callable[[Callable[[], Any]], Any]


def _at_once(read: Callable[[], Any]) -> Any:
    return read()


class EngineSummary(NamedTuple):
    """An engine that was found. `running` is null for podman, which has no daemon."""

    name: str
    version: str
    running: bool | None
    config: str
    socket: str


class GpuSummary(NamedTuple):
    """A GPU on the bus; `name` and `uuid` are empty unless NVML was queried."""

    pci: str
    device_id: str
    driver: str | None
    numa: int | None
    name: str
    uuid: str


class NodeSummary(NamedTuple):
    """The node; what can't be read is empty or null. `kubernetes`: whether a kubelet was found.
    `reboot_ends` is the running work that a reboot ends, as far as checks have read it."""

    name: str
    class_: str
    distro: Distribution | None
    kernel: str
    driver: str | None
    toolkit: str | None
    engines: tuple[EngineSummary, ...]
    gpus: tuple[GpuSummary, ...]
    kubernetes: bool
    reboot_ends: str


def describe(node: Node, call: Call = _at_once) -> NodeSummary:
    """The node as its facts are now.

    Every reading goes through `call`; if that raises, the value counts as unreadable.
    """

    def known(read: Callable[[], Any], otherwise: Any = None) -> Any:
        """Reading a topic of a damaged recording or an unreadable machine must not fail the report."""
        try:
            return call(read)
        except (GpunodeError, OSError, ValueError, TypeError, AttributeError, LookupError):
            return otherwise

    # CRI-O, podman and the toolkit only if a check read them: a report must not add queries to a hanging
    # machine
    facts = node.__dict__
    daemons = (
        known(lambda: node.docker),
        known(lambda: node.containerd),
        facts.get("crio"),
        facts.get("podman"),
    )
    kubernetes = known(lambda: node.kubelet is not None, False)
    return NodeSummary(
        name=known(lambda: _line(node.host.read_text("/proc/sys/kernel/hostname") or ""), ""),
        class_=known(lambda: node.kind, "unknown"),
        distro=known(lambda: node.distribution),
        kernel=known(lambda: _line(node.kernel), ""),
        driver=known(lambda: _driver(node)),
        toolkit=known(lambda: ".".join(map(str, facts["toolkit"].version))),
        engines=tuple(_engine(daemon) for daemon in daemons if daemon is not None),
        gpus=known(lambda: _gpus_of(node), ()),
        kubernetes=kubernetes,
        reboot_ends=known(lambda: _reboot_ends(facts, kubernetes), ""),
    )


def _reboot_ends(facts: Mapping[str, Any], kubernetes: bool) -> str:
    """Pods, containers and programs, as Docker and NVML counted them for a check."""
    parts = ["this node's pods"] if kubernetes else []
    containers = facts.get("docker_info", {}).get("ContainersRunning")
    if isinstance(containers, int) and containers > 0:
        parts.append(f"{many(containers, 'container')} of Docker")
    # a program may use several GPUs; one of another PID namespace has no number here
    conditions = facts.get("conditions", ())
    pids = [process.pid for condition in conditions for process in condition.processes or ()]
    programs = len({*pids} - {0}) + pids.count(0)
    if programs:
        parts.append(many(programs, "GPU program"))
    return ", ".join(parts)


def _gpu(name: str, uuid: str = "") -> GpuSummary:
    return GpuSummary("", "", None, None, name, uuid)


def _line(text: str) -> str:
    """A recorded machine may contain any name: a line break would forge a line of the report."""
    return " ".join(text.split())


def _engine(daemon: Daemon) -> EngineSummary:
    return EngineSummary(
        daemon.name,
        daemon.release,
        daemon.process is not None if ENGINES[daemon.name].has_daemon else None,
        daemon.config_path,
        daemon.socket,
    )


def _inventory(node: Node) -> Inventory | None:
    """What NVML listed, if a check queried it."""
    probe = node.__dict__.get("nvml")
    return probe.inventory if probe else None


def _driver(node: Node) -> str | None:
    """Version of the loaded module; in WSL that of the Windows driver, from NVML."""
    if node.module is not None:
        return node.module.version
    inventory = _inventory(node)
    return inventory.driver_version or None if inventory and node.kind == WSL2 else None


def _gpus_of(node: Node) -> tuple[GpuSummary, ...]:
    """GPUs from the bus; names and UUIDs if NVML was queried anyway. In WSL no GPU is on the bus and NVML
    lists it; on a Jetson it is named after its module."""
    inventory = _inventory(node)
    listed = {gpu.pci: gpu for gpu in inventory.gpus} if inventory else {}
    if node.kind == TEGRA:
        model = (node.host.read_text(_MODEL) or "").strip("\0\n ")
        return (_gpu(_line(model) or "NVIDIA Tegra"),)
    if node.kind == WSL2:
        return tuple(_gpu(_line(gpu.name), gpu.uuid) for gpu in listed.values())
    return tuple(
        GpuSummary(
            gpu.address,
            gpu.device_id,
            gpu.driver,
            gpu.numa,
            _line(str(listed[gpu.address].name)) if gpu.address in listed else "",
            str(listed[gpu.address].uuid) if gpu.address in listed else "",
        )
        for gpu in node.gpus
    )
