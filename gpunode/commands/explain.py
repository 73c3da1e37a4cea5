"""`gpunode explain ID`: one check, from the same data that the doctor runs on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import typer

from gpunode.checks.catalogue import ALL_CHECKS, find_check
from gpunode.checks.finding import Fix
from gpunode.checks.fixes import FAMILIES
from gpunode.checks.model import Check
from gpunode.commands.options import check_ids
from gpunode.commands.session import Session, verb
from gpunode.output.result import Block, Cell, Result, Style, Table, Text

explain_app = typer.Typer(rich_markup_mode=None)
_FAMILY_NAMES = {
    "debian": "Debian, Ubuntu",
    "rhel": "RHEL, Fedora, Amazon",
    "suse": "SUSE",
    "other": "others",
}


class ListedCheck(NamedTuple):
    """A check in the list of all."""

    id: str
    title: str
    layer: str
    severity: str


class CheckList(NamedTuple):
    """`data` of the envelope: all checks."""

    checks: tuple[ListedCheck, ...]


class CheckExplanation(NamedTuple):
    """`data` of the envelope: one check.

    It waits for the checks in `blocked_by`, and those in `blocks` wait for it. `node_classes` are the classes
    of nodes that it applies to; `fixes` are by distribution family: debian, rhel, suse, other.
    """

    id: str
    title: str
    layer: str
    severity: str
    looks_at: str
    why: str
    blocked_by: tuple[str, ...]
    blocks: tuple[str, ...]
    node_classes: tuple[str, ...]
    fixes: dict[str, Fix]
    refs: tuple[str, ...]


@verb(explain_app, "explain", "CheckExplanation")
def explain(
    session: Session,
    check: Annotated[
        str,
        typer.Argument(
            metavar="[ID]",
            help="Check to explain; without it, all checks are listed.",
            autocompletion=check_ids,
        ),
    ] = "",
) -> Result:
    """Explain one check, or list all checks. An explanation says what it examines, why,
    and how to fix a finding on each distribution.

    gpunode explain driver-lib-mismatch
    """
    if not check:
        rows = tuple(
            (Cell(listed.id, Style.COMMAND), listed.layer, listed.severity, listed.title)
            for listed in ALL_CHECKS
        )
        checks = tuple(
            ListedCheck(listed.id, listed.title, listed.layer, listed.severity) for listed in ALL_CHECKS
        )
        table = Table(("CHECK", "LAYER", "SEVERITY", "WHAT MUST HOLD"), rows)
        return Result("CheckList", CheckList(checks), blocks=(table,))
    explained = find_check(check)
    return Result("CheckExplanation", explanation(explained), blocks=tuple(_blocks(explained)))


def explanation(check: Check) -> CheckExplanation:
    """All data of a check."""
    return CheckExplanation(
        check.id,
        check.title,
        check.layer,
        check.severity,
        check.looks_at,
        check.why,
        check.blocked_by,
        blocked_checks(check),
        check.classes,
        {family: check.fix_for(family) for family in FAMILIES},
        check.refs,
    )


def blocked_checks(check: Check) -> tuple[str, ...]:
    """Ids of the checks that directly wait for this one."""
    return tuple(blocked.id for blocked in ALL_CHECKS if check.id in blocked.blocked_by)


def _blocks(check: Check) -> Iterator[Block]:
    yield Text(f"{check.id}: {check.title}", Style.HEADING)
    yield Text(f"  {check.layer}, {check.severity}", Style.DIM)
    yield from _section("Looks at", check.looks_at)
    yield from _section("Why", check.why)
    if check.blocked_by:
        yield from _section("Runs only if these checks don't fail", ", ".join(check.blocked_by))
    if blocked_checks(check):
        yield from _section("While it fails, these don't run", ", ".join(blocked_checks(check)))
    yield Text("")
    usual = check.fix_for("other")
    label = "Look" if usual.look else "Fix"
    kinds = "commands" if usual.look else "fixes"
    yield Text(
        f"Typical {kinds}; if gpunode doctor prints a {label} for this node, use that one", Style.HEADING
    )
    for command, names in commands(check).items():
        yield Text(f"  {', '.join(names)}", Style.DIM)
        yield Text(f"    {command}", Style.COMMAND)
    if any(check.fix_for(family).before_reboot for family in FAMILIES):
        yield Text("  Then reboot; drain a Kubernetes node first", Style.DIM)
        yield Text("    reboot", Style.COMMAND)
    elif usual.disruptive in ("drain", "reboot"):
        yield Text("  Drain a Kubernetes node first", Style.DIM)
    yield from (Text(f"  {line}", Style.DIM) for line in usual.note.splitlines())
    if check.refs:
        yield from _section("Read on", *check.refs)


def commands(check: Check) -> dict[str, list[str]]:
    """Each fix command, without the reboot that ends it, with its distributions."""
    names_by_command: dict[str, list[str]] = {}
    for family in FAMILIES:
        fix = check.fix_for(family)
        names_by_command.setdefault(fix.before_reboot or fix.command, []).append(_FAMILY_NAMES[family])
    return {
        command: names if len(names) < len(FAMILIES) else ["every distribution"]
        for command, names in names_by_command.items()
    }


def _section(heading: str, *lines: str) -> Iterator[Block]:
    yield Text("")
    yield Text(heading, Style.HEADING)
    for line in lines:
        yield Text(f"  {line}")
