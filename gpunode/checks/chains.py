"""Which check waits for which, from the blocking graph: the way from a root cause to what it explains."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.checks.catalogue import BY_ID
from gpunode.result import Block, Finding, Style, Text


def chains(findings: tuple[Finding, ...]) -> Iterator[Block]:
    """A tree below each cause: a check stands below the last of its blockers that waits for that cause."""
    for cause, parents in behind(findings).items():
        yield Text("")
        yield Text(f"{cause} explains {len(parents)} more:", Style.HEADING)
        yield from _below(cause, parents, "  ")


def behind(findings: tuple[Finding, ...]) -> dict[str, dict[str, str]]:
    """For each cause the checks that wait for it, and the one that each stands below."""
    waiting = {finding.id: finding.blocked_by for finding in findings if finding.blocked_by}
    found: dict[str, dict[str, str]] = {}
    for cause in dict.fromkeys(waiting.values()):
        here = [identifier for identifier, of in waiting.items() if of == cause]
        found[cause] = {one: _nearest(one, here, cause) for one in here}
    return found


def _nearest(identifier: str, behind: list[str], cause: str) -> str:
    here = [one for one in BY_ID[identifier].blocked_by if one in behind or one == cause]
    return here[-1] if here else cause


def _below(parent: str, parents: dict[str, str], indent: str) -> Iterator[Block]:
    for identifier, above in parents.items():
        if above == parent:
            yield Text(f"{indent}{identifier}", Style.DIM)
            yield from _below(identifier, parents, indent + "  ")
