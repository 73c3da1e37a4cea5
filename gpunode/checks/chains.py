"""Which check waits for which, from the blocking graph: the way from a root cause to what it explains."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.checks.catalogue import BY_ID
from gpunode.result import Block, Finding, Style, Text


def chains(findings: tuple[Finding, ...]) -> Iterator[Block]:
    """A tree below each cause: a check stands below the last of its blockers that waits for that cause."""
    waiting = {finding.id: finding.blocked_by for finding in findings if finding.blocked_by}
    for cause in dict.fromkeys(waiting.values()):
        behind = [identifier for identifier, of in waiting.items() if of == cause]
        parents = {one: _nearest(one, behind, str(cause)) for one in behind}
        yield Text("")
        yield Text(f"{cause} explains {len(behind)} more:", Style.HEADING)
        yield from _below(str(cause), parents, "  ")


def _nearest(identifier: str, behind: list[str], cause: str) -> str:
    here = [one for one in BY_ID[identifier].blocked_by if one in behind or one == cause]
    return here[-1] if here else cause


def _below(parent: str, parents: dict[str, str], indent: str) -> Iterator[Block]:
    for identifier, above in parents.items():
        if above == parent:
            yield Text(f"{indent}{identifier}", Style.DIM)
            yield from _below(identifier, parents, indent + "  ")
