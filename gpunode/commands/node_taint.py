"""`gpunode node taint`: keep pods off a node that don't tolerate it, and let them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpunode.commands.node_change import (
    KIND,
    KeyChange,
    Place,
    Target,
    blocks,
    carry_out,
    checked_key,
    checked_value,
    place,
    told,
)
from gpunode.errors import PreconditionError, UsageError
from gpunode.host import Host
from gpunode.kubernetes.api import Json, Patch
from gpunode.kubernetes.changes import Taint, taint_patch, taints_of, with_taints
from gpunode.output.result import Progress, Result

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True)
class Options:
    """`words`: ``KEY[=VALUE]:EFFECT`` sets a taint; ``KEY-``, ``KEY:EFFECT-`` or ``KEY=VALUE:EFFECT-`` takes
    it away. `yes`: pods may be evicted."""

    words: tuple[str, ...]
    yes: bool = False
    target: Target = Target()


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Change taints; kind NodeChange.

    `UsageError` for what can't be a taint, `PreconditionError` where pods would be evicted, `ClusterError`.
    """
    add, remove = parsed(options.words)
    at = place(host, options.target)

    def plan(node: Json) -> Patch:
        there = taints_of(node)
        if not options.target.dry_run and not options.yes:
            _refuse_eviction(at, there, add)
        return taint_patch(node, with_taints(there, add, remove))

    done = carry_out(host, progress, at, plan)
    before = taints_of(done.before)
    after = with_taints(before, add, remove)
    data = told(at, done, _changes(before, after), _undo(at, before, after))
    evicts = options.target.dry_run and not options.yes and _evicting(before, add)
    notes = (f"{evicts[0]} ends pods that run: without --dry-run it wants --yes",) if evicts else ()
    return Result(KIND, data, messages=notes, blocks=blocks(data))


def parsed(words: tuple[str, ...]) -> tuple[tuple[Taint, ...], tuple[Taint, ...]]:
    """What to set and what to take away."""
    add: list[Taint] = []
    remove: list[Taint] = []
    for word in words:
        gone = word.endswith("-")
        rest, _, effect = word.removesuffix("-").partition(":")
        key, _, value = rest.partition("=")
        if effect not in EFFECTS and (effect or not gone):
            known = ", ".join(EFFECTS)
            raise UsageError(f"{word!r} has no effect that is known", hint=f"KEY=VALUE:EFFECT of {known}")
        taint = Taint(checked_key(key, "taint's key"), checked_value(value, key), effect)
        (remove if gone else add).append(taint)
    named = [(one.key, one.effect) for one in add]
    if len(set(named)) < len(named):
        raise UsageError("the same taint is given twice", hint="keep the one that is meant")
    for one in add:
        if any(gone.key == one.key and gone.effect in ("", one.effect) for gone in remove):
            raise UsageError(f"{one} is both set and taken away", hint="keep the one that is meant")
    return tuple(add), tuple(remove)


def _refuse_eviction(at: Place, there: Sequence[Taint], add: Sequence[Taint]) -> None:
    new = _evicting(there, add)
    if new:
        raise PreconditionError(
            f"{new[0]} would end every pod on {at.node} that doesn't tolerate it",
            hint="keep new pods off with NoSchedule, or go on: add --yes",
            code="pods-would-be-evicted",
        )


def _evicting(there: Sequence[Taint], add: Sequence[Taint]) -> list[Taint]:
    return [one for one in add if one.effect == "NoExecute" and one not in there]


def _changes(before: Sequence[Taint], after: Sequence[Taint]) -> list[KeyChange]:
    old = {f"{one.key}:{one.effect}": one.value for one in before}
    new = {f"{one.key}:{one.effect}": one.value for one in after}
    keys = sorted({*old, *new})
    return [KeyChange(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def _undo(at: Place, before: Sequence[Taint], after: Sequence[Taint]) -> str:
    kept = {(one.key, one.effect) for one in before}
    back = [one for one in before if one not in after]
    words = [str(one) for one in back]
    words += [f"{one}-" for one in after if (one.key, one.effect) not in kept]
    evicts = any(one.effect == "NoExecute" for one in back)
    return at.command("taint", *(("--yes",) if evicts else ()), *words)
