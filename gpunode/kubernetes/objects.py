"""Objects that are to be in the cluster: which are, which aren't, and making those all or not at all.

An object that is there and differs is never written over: somebody may have changed it on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.kubernetes.api import Cluster, ClusterError, Conflict, Json, NotFound, Unreachable, named
from gpunode.kubernetes.changes import patiently
from gpunode.output.result import Progress


@dataclass(frozen=True)
class Held:
    """An object as it is wanted and as the server has it, None if it hasn't."""

    wanted: Json
    found: Json | None

    @property
    def differs(self) -> tuple[str, ...]:
        """Where what is there isn't what is wanted, as JSON pointers; () for one that isn't there."""
        return () if self.found is None else tuple(differences(self.wanted, self.found))


def look(host: Host, cluster: Cluster, objects: Sequence[Json], progress: Progress) -> tuple[Held, ...]:
    """Each object as the server has it. `ClusterError`."""

    return tuple(Held(one, patiently(host, progress, partial(_find, cluster, one))) for one in objects)


def _find(cluster: Cluster, wanted: Json) -> Json | None:
    try:
        return cluster.get_object(wanted)
    except NotFound:
        return None


def differences(wanted: Any, found: Any, at: str = "") -> list[str]:
    """Where `found` lacks what `wanted` says, as JSON pointers; what it has beside that is the server's."""
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return [] if not wanted and found is None else [at or "/"]
        return [
            one for key, value in wanted.items() for one in differences(value, found.get(key), f"{at}/{key}")
        ]
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return [] if not wanted and found is None else [at or "/"]
        return [
            one
            for number, pair in enumerate(zip(wanted, found, strict=True))
            for one in differences(*pair, f"{at}/{number}")
        ]
    empty = found is None and (
        wanted is None or wanted == "" or wanted is False
    )  # the server leaves them out
    return [] if wanted == found or empty else [at or "/"]


def create(cluster: Cluster, objects: Sequence[Json]) -> tuple[Json, ...]:
    """Make them in their order. Whatever fails, Ctrl-C included, takes back those that were made.

    One that has come meanwhile counts as made by somebody else. `ClusterError` names what could not be taken
    back.
    """
    made: list[Json] = []
    try:
        for wanted in objects:
            one = _create(cluster, wanted)
            if one is not None:
                made.append(one)
    except BaseException as error:
        left = delete(cluster, made)
        if left and isinstance(error, ClusterError):
            error.hint = f"{error.hint}; these were made and could not be deleted: {', '.join(left)}"
        raise
    return tuple(made)


def _create(cluster: Cluster, wanted: Json) -> Json | None:
    """The object as it was made; None if somebody else has made it just now."""
    try:
        return cluster.create_object(wanted)
    except Conflict as error:
        if error.code != "kubernetes-exists":
            raise
        return None
    except Unreachable as error:
        if not error.sent:
            raise
        # it may have been made, and only the answer was lost
        with suppress(GpunodeError):
            found = cluster.get_object(wanted)
            return None if differences(wanted, found) else found
        raise


def delete(cluster: Cluster, made: Sequence[Json]) -> list[str]:
    """Take away what `create` made, the last first; the names of those that could not be."""
    left = []
    for one in reversed(made):
        try:
            cluster.delete_object(one)
        except NotFound:
            continue
        except GpunodeError:
            left.append(named(one))
    return left
