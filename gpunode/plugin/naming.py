"""Names of resources: which rule gives a unit its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpunode.plugin.settings import NameRule


def glob_matches(pattern: str, text: str) -> bool:
    """Whether all of `text` is what `pattern` says: only ``*`` is special, case counts."""
    first, *rest = pattern.split("*")
    if not rest:
        return text == pattern
    *middle, last = rest
    at, end = len(first), len(text) - len(last)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for part in middle:
        at = text.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def ruled_name(rules: Iterable[NameRule], kind: str, text: str) -> str:
    """The name that the first matching rule of this kind (gpu, mig) gives; empty without one."""
    return next((rule.name for rule in rules if rule.kind == kind and glob_matches(rule.pattern, text)), "")


def idle_rules(rules: Iterable[NameRule], kind: str, texts: Sequence[str]) -> Iterator[str]:
    """What to say of the rules of this kind that fit none of these: the commonest mistake is half a name."""
    idle = [
        rule.pattern
        for rule in rules
        if rule.kind == kind and not any(glob_matches(rule.pattern, text) for text in texts)
    ]
    if idle and any(texts):
        section, what = ("gpus", "model") if kind == "gpu" else ("mig", "profile")
        there = ", ".join(sorted({text for text in texts if text}))
        yield f"resources.{section}: {', '.join(idle)}: no {what} here is called so; there is {there}"
