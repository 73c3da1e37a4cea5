"""`gpunode node label`: set and take away labels of a node, all of them or none."""

from __future__ import annotations

from dataclasses import dataclass

from gpunode.commands.node_change import (
    KIND,
    KeyChange,
    Target,
    blocks,
    carry_out,
    checked_key,
    checked_value,
    place,
    told,
)
from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.kubernetes.changes import label_patch, labels_of
from gpunode.output.result import Progress, Result


@dataclass(frozen=True)
class Options:
    """`words`: ``KEY=VALUE`` sets a label, ``KEY-`` takes it away."""

    words: tuple[str, ...]
    target: Target = Target()


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Change labels; kind NodeChange. `UsageError` for what can't be a label, `ClusterError`."""
    wanted = parsed(options.words)
    at = place(host, options.target)
    done = carry_out(host, progress, at, lambda node: label_patch(node, wanted))
    before = labels_of(done.before)
    moved = {key: value for key, value in wanted.items() if before.get(key) != value}
    changes = [KeyChange(key, before.get(key), value) for key, value in sorted(moved.items())]
    words = [f"{key}={before[key]}" if key in before else f"{key}-" for key in sorted(moved)]
    data = told(at, done, changes, at.command("label", *words))
    return Result(KIND, data, blocks=blocks(data))


def parsed(words: tuple[str, ...]) -> dict[str, str | None]:
    """By key: the value to set, or None to take it away."""
    wanted: dict[str, str | None] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and not word.endswith("-"):
            raise UsageError(f"{word!r} neither sets nor removes a label", hint="KEY=VALUE, or KEY-")
        key = checked_key(key if equals else key[:-1], "label's key")
        if key in wanted:
            raise UsageError(f"{key} is given twice", hint="keep the one that is meant")
        wanted[key] = checked_value(value, key) if equals else None
    return wanted
