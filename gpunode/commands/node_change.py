"""Change of a Node by one patch, with the undo: for `node advertise` and `setup --kubernetes`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.kubernetes import access, changes
from gpunode.kubernetes.access import Access, connect, node_name
from gpunode.kubernetes.api import Cluster, Json, NotFound, Patch
from gpunode.kubernetes.changes import Changed
from gpunode.output.result import Block, Progress, Style, Text

__all__ = ["KIND", "Access", "KeyChange", "NodeChange", "Place", "Target", "blocks", "carry_out"]
__all__ += ["checked_key", "place", "place_in", "told"]

KIND = "NodeChange"
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_MAX = 63  # of a label's name and value; of its prefix 253


@dataclass(frozen=True)
class Target:
    """Which node of which cluster; an empty `node` is found, see `access.node_name`."""

    access: Access = Access()
    node: str = ""
    dry_run: bool = False


@dataclass(frozen=True)
class KeyChange:
    """One label or resource; None where there is none."""

    key: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class NodeChange:
    """`data` of the envelope. `request` and `patch` are what was sent, or would be; an empty patch means that
    nothing was to do. `undo` is a command line, empty if there is nothing to undo."""

    node: str
    server: str
    source: str
    request: str
    changes: tuple[KeyChange, ...]
    patch: tuple[Mapping[str, Any], ...]
    undo: str
    dry_run: bool
    capacity: str | None = None
    allocatable: str | None = None


@dataclass(frozen=True)
class Place:
    """A node that was found by `place`, by `source`; `own` if it is this machine."""

    cluster: Cluster
    node: str
    source: str
    own: bool
    dry_run: bool

    def command(self, verb: str, *words: str) -> str:
        """A command line for the same node of the same cluster."""
        return shlex.join(("gpunode", "node", verb, "--node", self.node, *self.cluster.words, *words))


def place(host: Host, target: Target) -> Place:
    """Errors as `access.connect` and `access.node_name` have them."""
    node_name(host, target.node)  # what can't be a name needs nobody's answer
    return place_in(connect(host, target.access), host, target.node, target.dry_run)


def place_in(cluster: Cluster, host: Host, node: str, dry_run: bool) -> Place:
    """The same in a cluster that is known; an empty `node` is found."""
    name, source = node_name(host, node, cluster.node)
    own, _ = node_name(host, "", cluster.node)
    return Place(cluster, name, source, name == own, dry_run)


def carry_out(
    host: Host, progress: Progress, at: Place, plan: Callable[[Json], Patch], *, status: bool = False
) -> Changed:
    """Patch the node, or its status; with a dry run only plan. `ClusterError`, and what `plan` raises."""
    cluster = at.cluster

    def read() -> Json:
        try:
            return cluster.get_node(at.node)
        except NotFound as error:
            error.hint = access.hint(host, cluster, at.source)
            raise

    with progress.step(f"asking {cluster.server}"):
        if at.dry_run:
            seen = changes.patiently(host, progress, read)
            return Changed(seen, seen, plan(seen))
        patch = cluster.patch_node_status if status else cluster.patch_node
        return changes.change(host, progress, read, plan, lambda made: patch(at.node, made))


def told(
    at: Place, done: Changed, changes: Sequence[KeyChange], undo: str, *, status: bool = False
) -> NodeChange:
    """`changes` and `undo` count only if there was something to patch."""
    path = f"/api/v1/nodes/{at.node}{'/status' if status else ''}"
    return NodeChange(
        node=at.node,
        server=at.cluster.server,
        source=at.cluster.source,
        request=f"PATCH {path}",
        changes=tuple(changes) if done.patch else (),
        patch=tuple(done.patch),
        undo=undo if done.patch else "",
        dry_run=at.dry_run,
    )


def blocks(data: NodeChange) -> tuple[Block, ...]:
    """For people: what became of each key; the patch itself for a dry run."""
    if not data.patch:
        return (Text(f"node {data.node} unchanged"),)
    made: list[Block] = [Text(f"node {data.node} {'(dry run)' if data.dry_run else 'changed'}", Style.GOOD)]
    made += [Text(f"  {_line(one)}") for one in data.changes]
    if data.dry_run:
        made.append(Text(f"{data.request} on {data.server}, application/json-patch+json", Style.DIM))
        lines = [json.dumps(one) for one in data.patch]
        ends = [*([","] * (len(lines) - 1)), "]"]
        made += [
            Text(f"{'[' if n == 0 else ' '}{line}{end}", Style.COMMAND)
            for n, (line, end) in enumerate(zip(lines, ends, strict=True))
        ]
    elif data.undo:
        made.append(Text(f"undo it with: {data.undo}", Style.DIM))
    return tuple(made)


def _line(one: KeyChange) -> str:
    if one.after is None:
        return f"- {one.key}={one.before or ''}"
    if one.before is None:
        return f"+ {one.key}={one.after}"
    return f"~ {one.key}={one.after} (was {one.before or 'empty'})"


def checked_key(key: str, what: str) -> str:
    """A qualified name, ``prefix/name`` (Kubernetes, Labels and Selectors). `UsageError` if it is none."""
    prefix, slash, name = key.rpartition("/")
    sound = _NAME.fullmatch(name) is not None and len(name) <= _MAX
    if slash:
        sound = sound and _PREFIX.fullmatch(prefix) is not None and len(prefix) <= 253
    if not sound:
        raise UsageError(
            f"{key!r} can't be a {what}",
            hint=f"such as example.com/name: at most {_MAX} letters, digits, '-', '_' or '.' after a slash",
        )
    return key
