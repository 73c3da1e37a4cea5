"""Objects made in the cluster as a step of `setup --kubernetes`: a RuntimeClass, the plugin's DaemonSet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError, RolledBackError
from gpunode.host import Host
from gpunode.kubernetes.api import Cluster, ClusterError, Json, named
from gpunode.kubernetes.manifests.common import documents
from gpunode.kubernetes.objects import Held, create, delete, look
from gpunode.result import Block, Progress, Result, Style, Text

__all__ = ["ClusterObjects", "ObjectChange", "look", "make", "refuse_others"]


@dataclass(frozen=True)
class ObjectChange:
    """One object, such as ``DaemonSet kube-system/gpunode-device-plugin``; `action`: created or unchanged."""

    object: str
    action: str


@dataclass(frozen=True)
class ClusterObjects:
    """`data` of the envelope. `undo` are command lines that take away what was made."""

    server: str
    source: str
    changes: tuple[ObjectChange, ...]
    undo: tuple[str, ...]
    dry_run: bool


def refuse_others(found: Sequence[Held], command: str) -> None:
    """`ClusterError` for an object that is there and isn't what is wanted: it is left alone."""
    for one in found:
        if one.differs:
            raise ClusterError(
                f"{named(one.wanted)} is in the cluster and differs at {', '.join(one.differs[:3])};"
                " it was left alone",
                hint=f"look at it, then replace it if that is meant: {command} | kubectl apply -f -",
                code="kubernetes-differs",
            )


def make(
    host: Host,
    cluster: Cluster,
    wanted: Sequence[Json],
    progress: Progress,
    *,
    dry_run: bool,
    settle: Callable[[], None] = lambda: None,
) -> Result:
    """Make those that are missing, all or none; kind ClusterObjects. What `settle` raises takes them back.

    `ClusterError`; `RolledBackError` if `settle` fails.
    """
    found = look(host, cluster, wanted, progress)
    missing = [one.wanted for one in found if one.found is None]
    if not dry_run:
        with progress.step(f"making {len(missing)} objects at {cluster.server}"):
            made = create(cluster, missing)
        _settle(cluster, made, settle)
    actions = tuple(
        ObjectChange(named(one.wanted), "created" if one.found is None else "unchanged") for one in found
    )
    undo = tuple(_undo(one) for one in reversed(missing))
    data = ClusterObjects(cluster.server, cluster.source, actions, undo, dry_run)
    return Result("ClusterObjects", data, blocks=_blocks(data, missing))


def _settle(cluster: Cluster, made: Sequence[Json], settle: Callable[[], None]) -> None:
    try:
        settle()
    except BaseException as error:
        left = delete(cluster, made)
        if not isinstance(error, GpunodeError):
            raise
        if left:
            raise ClusterError(
                f"{error}; these were made and could not be deleted: {', '.join(left)}",
                hint="delete them by hand: kubectl delete",
            ) from error
        raise RolledBackError(f"{error}; what was made is deleted again", hint=error.hint) from error


def _undo(one: Json) -> str:
    metadata = one["metadata"]
    place = f" --namespace {metadata['namespace']}" if metadata.get("namespace") else ""
    return f"kubectl delete {str(one['kind']).lower()} {metadata['name']}{place}"


def _blocks(data: ClusterObjects, missing: Sequence[Json]) -> tuple[Block, ...]:
    mark = " (dry run)" if data.dry_run else ""
    blocks: list[Block] = [
        Text(f"{one.object} {one.action}{mark if one.action == 'created' else ''}", Style.GOOD)
        for one in data.changes
    ]
    if data.dry_run:
        blocks += [Text(line, Style.COMMAND) for line in documents(missing).splitlines()]
    else:
        blocks += [Text(f"undo it with: {command}", Style.DIM) for command in data.undo]
    return tuple(blocks)
