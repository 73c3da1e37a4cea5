"""The page docs/checks.md, from the checks themselves."""

from collections.abc import Iterator

from gpunode.checks.catalogue import BY_ID, LAYERS
from gpunode.checks.fixes import FAMILIES
from gpunode.checks.model import Check


def markdown() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# What `gpunode doctor` checks"
    yield ""
    yield "Generated from the checks by `make docs`; don't edit this page. When a check"
    yield "fails, checks that depend on it are skipped and name it as the cause."
    yield "See [adding a check](adding-a-check.md)."
    for layer, names in LAYERS.items():
        yield f"\n## {layer}"
        for name in names.split():
            yield from _check(BY_ID[name])


def _check(check: Check) -> Iterator[str]:
    yield f"\n### {check.id}"
    yield f"\n{check.title}. Severity: {check.severity}. Node classes: {', '.join(check.classes)}."
    yield f"\nLooks at {check.looks_at}"
    yield f"\n{check.why}"
    if check.blocked_by:
        yield (
            "\nSkipped if one of these fails: "
            + ", ".join(f"[{name}](#{name})" for name in check.blocked_by)
            + "."
        )
    if check.fix_for("other").look:
        yield "\nTo find the cause:"
    yield "\n```sh"
    fixes = {family: check.fix_for(family).command for family in FAMILIES}
    for family, command in fixes.items():
        if len(set(fixes.values())) > 1:
            yield f"# {family}"
            yield command
        elif family == FAMILIES[0]:
            yield command
    yield "```"
    if check.fix_for("other").note:
        text, *commands = check.fix_for("other").note.split("\n")
        yield f"\n{' '.join((text, *(f'`{command}`' for command in commands)))}."
    if check.refs:
        yield "\nSee " + ", ".join(f"<{address}>" for address in check.refs) + "."
