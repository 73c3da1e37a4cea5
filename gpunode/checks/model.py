"""Checks: the `check` decorator, which declares one, and the verdicts that it returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial, wraps
from typing import NamedTuple

from gpunode.checks.finding import Evidence, FindingStatus, Fix
from gpunode.checks.fixes import FixByFamily, syntax
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts.daemons import Daemon
from gpunode.facts.engines import ROLES
from gpunode.facts.node import Node
from gpunode.facts.registry import ENGINES
from gpunode.facts.system import BARE_METAL, CONTAINER, TEGRA, VM, WSL2
from gpunode.host import Host

# node classes on which a check can run; they are defined in facts/system.py
HOST = (BARE_METAL, VM)
HOST_OR_CONTAINER = (BARE_METAL, VM, CONTAINER)
EVERYWHERE_BUT_TEGRA = (BARE_METAL, VM, CONTAINER, WSL2)
# where a kubelet can run; WSL 2 and containers are left out, because a kubelet there is an experiment
CLUSTER_NODES = (BARE_METAL, VM, TEGRA)
# an engine works alike on all of them; a container that runs one program has no engine of its own
ENGINE_NODES = (BARE_METAL, VM, CONTAINER, WSL2, TEGRA)
NO_ENGINE = ("application-container",)

# the check of the hardware itself: its failure explains that of every other check
NO_GPU = "pci-no-gpu"

# installations that `Check.preflight` can name
PREFLIGHTS = (*ENGINES, "kubernetes")
ANY_ENGINE = PREFLIGHTS

_LONGEST = 2000
_POSITION = re.compile(r"(?P<path>/[^:]*):(?P<line>\d+):(?:(?P<column>\d+):)? (?P<reason>.*)", re.DOTALL)


class Verdict(NamedTuple):
    """Result of one check.

    `fix` replaces the check's own if the facts allow a more specific one. A `note` has passed, but is
    worth a line. `skipped` says why there is no result, as in `Finding.skipped`. `reboot` replaces the
    check's own: whether a reboot makes this fault worse. `why` replaces the check's own, which may also
    describe faults that this node doesn't have.
    """

    status: FindingStatus
    summary: str
    evidence: tuple[Evidence, ...] = ()
    fix: Fix | None = None
    note: bool = False
    skipped: str = ""
    reboot: bool | None = None
    why: str = ""


@dataclass(frozen=True)
class Check:
    """One rule of the doctor, declared by decorating its function with `check`, this class's other name.

    `severity` is how a failure counts (error, warning, or info for one that only notes); `blocked_by` are the
    checks whose failure explains this one, by default that there is no GPU. `classes` are the node classes
    that it can run on, `needs` the traits (facts/traits.py) that such a node must have and `unless` those
    that it must not have: elsewhere it is not applicable. `preflight` are the installations that its failure
    blocks (`PREFLIGHTS`). With `reboot` it belongs to the section "Safe to reboot?", with `deep` it runs only
    with --deep. `table` is the reference table (tables/) that it uses, if any. `looks_at` and `why`, the
    function's docstring, are for users; `refs` are public addresses for further reading. checks/catalogue.py
    finds the checks of each module; it has their order and their `layer`.
    """

    id: str
    _: KW_ONLY
    title: str
    looks_at: str
    fix: Fix | FixByFamily
    severity: str = "error"
    blocked_by: tuple[str, ...] = (NO_GPU,)
    classes: tuple[str, ...] = HOST
    refs: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    preflight: tuple[str, ...] = ()
    reboot: bool = False
    deep: bool = False
    table: str = ""
    why: str = ""
    layer: str = ""
    run: Callable[[Node], Verdict] = lambda _node: skip("no function is decorated with it")

    def fix_for(self, family: str) -> Fix:
        """Its usual fix on a distribution of this family."""
        return self.fix if isinstance(self.fix, Fix) else self.fix.for_family(family)

    def __call__(self, run: Callable[[Node], Verdict]) -> Check:
        """The check with this function, which is pure."""
        return replace(self, run=run, why=" ".join((run.__doc__ or "").split()))


check = Check
# with the values that such checks share; a module whose checks share more of them has its own at its head
engine_check = partial(check, classes=ENGINE_NODES, unless=NO_ENGINE)  # of an engine's own settings
cluster_check = partial(check, classes=CLUSTER_NODES)  # of the kubelet, or of what runs for it
kubelet_check = partial(cluster_check, needs=("kubelet",))  # of what a node without a kubelet doesn't have
prerequisite_check = partial(check, preflight=ANY_ENGINE)  # of what GPU containers need under any engine
next_boot_check = partial(check, severity="warning", reboot=True)  # of what works until the next reboot

_Run = Callable[[Node], Verdict]


def if_reported(engine: str) -> Callable[[_Run], _Run]:
    """Decorator of a check's function: a skip if the daemon doesn't report what the function needs."""

    def decorate(run: _Run) -> _Run:
        @wraps(run)
        def guarded(node: Node) -> Verdict:
            try:
                return run(node)
            except DaemonError as error:
                return skip(f"{ENGINES[engine].title} doesn't report its configuration: {error.message}")

        return guarded

    return decorate


def if_installed(engine: str, *, used: bool = False) -> Callable[[Callable[[Node, Daemon], Verdict]], _Run]:
    """Decorator of a check's function that also takes the engine's daemon: a skip without one, or if it
    doesn't report what the function needs."""

    def decorate(run: Callable[[Node, Daemon], Verdict]) -> _Run:
        @if_reported(engine)
        @wraps(run)
        def of_daemon(node: Node) -> Verdict:
            daemon: Daemon | None = getattr(node, engine)
            role = ROLES[engine](node)
            if daemon is None or (used and not role.used):
                return skip(role.reason)
            return run(node, daemon)

        return of_daemon

    return decorate


# a skip also if this node doesn't use the engine for GPU containers
if_used = partial(if_installed, used=True)


def ok(summary: str, *evidence: Evidence) -> Verdict:
    return Verdict(FindingStatus.PASS, summary, evidence)


def note(summary: str, *evidence: Evidence, fix: Fix | None = None) -> Verdict:
    """No fault, but useful to know: printed as one line."""
    return Verdict(FindingStatus.PASS, summary, evidence, fix, note=True)


def warn(
    summary: str, *evidence: Evidence, fix: Fix | None = None, why: str = "", reboot: bool | None = None
) -> Verdict:
    """Works now, but is fragile or about to break."""
    return Verdict(FindingStatus.WARN, summary, evidence, fix, reboot=reboot, why=why)


def fail(
    summary: str, *evidence: Evidence, fix: Fix | None = None, why: str = "", reboot: bool | None = None
) -> Verdict:
    """GPU containers can't work because of this fault."""
    return Verdict(FindingStatus.FAIL, summary, evidence, fix, reboot=reboot, why=why)


def skip(reason: str, skipped: str = "nothing-to-judge") -> Verdict:
    """Unknown, or not applicable."""
    return Verdict(FindingStatus.SKIP, reason, skipped=skipped)


def seen(source: str, value: object, line: int | None = None) -> Evidence:
    """One observation; `source` is a path or a command."""
    return Evidence(one_line(source), one_line(str(value)), line)


def place_of(error: ConfigError) -> Evidence:
    """The file that an error names, with the line and the column if it names them
    (``path:line:column: reason``)."""
    message = error.message.removeprefix("can't read ")
    match = _POSITION.fullmatch(message)
    if match is None:
        path = message.partition(" ")[0].rstrip(":")
        return seen(path, message.removeprefix(path).strip(": "))
    column = f"column {match['column']}: " if match["column"] else ""
    return seen(match["path"], f"{column}{match['reason']}", int(match["line"]))


def unparsable(host: Host, error: ConfigError) -> tuple[Evidence, str]:
    """Where a file can't be parsed, and what to change there, for `fixes.edit_file`."""
    place = place_of(error)
    return place, syntax(host.read_text(place.source) if place.line else None, place.line)


def line_in(host: Host, path: str, needle: str) -> int | None:
    """The first line, 1-based, of a file that holds `needle`."""
    lines = enumerate((host.read_text(path) or "").splitlines(), start=1)
    return next((number for number, line in lines if needle in line), None)


def seen_in(host: Host, path: str, value: object, needle: str) -> Evidence:
    """One observation in a file, at the first line that holds `needle`."""
    return seen(path, value, line_in(host, path, needle))


def cut(evidence: Sequence[Evidence], most: int, source: str) -> Sequence[Evidence]:
    """At most so many of them, and how many more there are in `source`."""
    more = len(evidence) - most
    return (*evidence[:most], seen(source, f"and {more} more")) if more > 0 else evidence


def ago(seconds: float) -> str:
    """The age of an event: ``5 min ago``, ``3 h ago``, ``4 days ago``."""
    if seconds < 3600:
        return f"{max(0, int(seconds // 60))} min ago"
    hours = int(seconds // 3600)
    return f"{hours} h ago" if hours < 48 else f"{hours // 24} days ago"


def one_line(text: str) -> str:
    """Text from the node may contain line breaks, which would forge lines of a report, or be endless."""
    line = text if text.isprintable() else " ".join(text.splitlines())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
