"""`gpunode explain ID`: one check, from the same data that the doctor runs on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from gpunode.checks.catalogue import ALL_CHECKS, find_check
from gpunode.checks.fixes import FAMILIES
from gpunode.checks.model import Check
from gpunode.commands.completion import checks
from gpunode.commands.session import Session, verb
from gpunode.output.result import Block, Cell, Result, Style, Table, Text

_FAMILY_NAMES = {
    "debian": "Debian, Ubuntu",
    "rhel": "RHEL, Fedora, Amazon",
    "suse": "SUSE",
    "other": "others",
}


def run(identifier: str = "") -> Result:
    """Explain the check of this id, or list all. `UsageError` names the nearest ids for an unknown one."""
    if not identifier:
        rows = tuple((Cell(one.id, Style.COMMAND), one.layer, one.severity, one.title) for one in ALL_CHECKS)
        checks = [
            {"id": one.id, "title": one.title, "layer": one.layer, "severity": one.severity}
            for one in ALL_CHECKS
        ]
        table = Table(("CHECK", "LAYER", "SEVERITY", "WHAT MUST HOLD"), rows)
        return Result("CheckList", {"checks": checks}, blocks=(table,))
    check = find_check(identifier)
    return Result("CheckExplanation", explanation(check), blocks=tuple(_blocks(check)))


def explanation(check: Check) -> dict[str, Any]:
    """Everything known of a check, as JSON values."""
    return {
        "id": check.id,
        "title": check.title,
        "layer": check.layer,
        "severity": check.severity,
        "looksAt": check.looks_at,
        "why": check.why,
        "blockedBy": check.blocked_by,
        "blocks": blocked_checks(check),
        "nodeClasses": check.classes,
        "fixes": {family: check.remedy.for_family(family) for family in FAMILIES},
        "refs": check.refs,
    }


def blocked_checks(check: Check) -> tuple[str, ...]:
    """Ids of the checks that directly wait for this one."""
    return tuple(other.id for other in ALL_CHECKS if check.id in other.blocked_by)


def _blocks(check: Check) -> Iterator[Block]:
    yield Text(f"{check.id}: {check.title}", Style.HEADING)
    yield Text(f"  {check.layer}, {check.severity}", Style.DIM)
    yield from _section("Looks at", check.looks_at)
    yield from _section("Why", check.why)
    if check.blocked_by:
        yield from _section("Waits for", ", ".join(check.blocked_by))
    if blocked_checks(check):
        yield from _section("Explains", ", ".join(blocked_checks(check)))
    yield Text("")
    usual = check.remedy.other
    yield Text("Shown by" if usual.look else "Fixed by", Style.HEADING)
    for command, names in commands(check).items():
        yield Text(f"  {', '.join(names)}", Style.DIM)
        yield Text(f"    {command}", Style.COMMAND)
    yield from (Text(f"  {line}", Style.DIM) for line in usual.note.splitlines())
    if check.refs:
        yield from _section("Read on", *check.refs)


def commands(check: Check) -> dict[str, list[str]]:
    """Each fix command and the distributions that it is for."""
    found: dict[str, list[str]] = {}
    for family in FAMILIES:
        found.setdefault(check.remedy.for_family(family).command, []).append(_FAMILY_NAMES[family])
    return {
        command: names if len(names) < len(FAMILIES) else ["every distribution"]
        for command, names in found.items()
    }


def _section(heading: str, *lines: str) -> Iterator[Block]:
    yield Text("")
    yield Text(heading, Style.HEADING)
    for line in lines:
        yield Text(f"  {line}")


# `gpunode explain`.

explain_app = typer.Typer(rich_markup_mode=None)


@verb(explain_app, "explain", "CheckExplanation")
def explain(
    session: Session,
    check: Annotated[
        str,
        typer.Argument(
            metavar="[ID]", help="Check to explain; without it, all checks are listed.", autocompletion=checks
        ),
    ] = "",
) -> Result:
    """Explain one check, or list all checks. What it examines, why, and the fix for each distribution.

    gpunode explain driver-lib-mismatch
    """
    return run(check)
