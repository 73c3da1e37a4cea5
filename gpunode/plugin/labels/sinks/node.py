"""Labels straight onto the Node. Only keys that we set are ever changed or taken away again.

Which those are stands in an annotation of the Node, ``gpunode/nvidia-labels``, as NFD keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpunode.errors import PreconditionError
from gpunode.host import Host
from gpunode.plugin.labels.model import TIMESTAMP, settled
from gpunode.plugin.labels.sinks import change
from gpunode.plugin.settings import LabelSettings
from gpunode.result import Change, Progress

if TYPE_CHECKING:
    from gpunode.kubernetes.api import Cluster

_NFD = "nfd.node.kubernetes.io/feature-labels"
_LABELS, _ANNOTATIONS = ("metadata", "labels"), ("metadata", "annotations")


class NodeLabels:
    """See `Sink`."""

    def __init__(
        self,
        host: Host,
        connect: Callable[[], Cluster],
        progress: Progress,
        settings: LabelSettings,
        vendor: str,
    ) -> None:
        self._host = host
        self._connect = connect
        self._progress = progress
        self._settings = settings
        self._annotation = f"gpunode/{vendor}-labels"

    def put(self, labels: Mapping[str, str], dry_run: bool) -> Change:
        """One patch: all labels or none. `PreconditionError` if NFD keeps the same labels; `ClusterError`."""
        from gpunode.kubernetes.access import node_name
        from gpunode.kubernetes.change import change as carry_out
        from gpunode.kubernetes.change import patiently

        node_name(self._host, self._settings.node_name)  # what can't be a name needs nobody's answer
        cluster = self._connect()
        name, _ = node_name(self._host, self._settings.node_name, cluster.node)
        where = f"node {name}"
        if dry_run:
            node = patiently(self._host, self._progress, lambda: cluster.get_node(name))
            return _Plan(node, labels, self._annotation).change(where)
        told: list[Change] = []

        def plan(node: dict[str, Any]) -> list[dict[str, Any]]:
            found = _Plan(node, labels, self._annotation)
            told.append(found.change(where))
            return found.patch()

        carry_out(
            self._host,
            self._progress,
            lambda: cluster.get_node(name),
            plan,
            lambda patch: cluster.patch_node(name, patch),
        )
        return told[0]


class _Plan:
    """What becomes of one Node. `PreconditionError` if NFD keeps the same labels there."""

    def __init__(self, node: dict[str, Any], labels: Mapping[str, str], annotation: str) -> None:
        from gpunode.kubernetes.patches import strings

        there, notes = strings(node, _LABELS), strings(node, _ANNOTATIONS)
        self._node = node
        self._annotation = annotation
        self._noted = notes.get(annotation, "")
        self._keys = {key for key in self._noted.split(",") if key}
        self._mine = {key: there[key] for key in self._keys if key in there}
        self._there = {key: there[key] for key in self._keys | labels.keys() if key in there}
        self._wanted = settled(labels, self._mine)
        nfd = set(notes.get(_NFD, "").split(","))
        theirs = sorted((nfd & self._wanted.keys()) - self._keys - {TIMESTAMP})
        if theirs:
            more = f" and {len(theirs) - 1} more of these labels" if len(theirs) > 1 else ""
            raise PreconditionError(
                f"Node Feature Discovery keeps {theirs[0]}{more} on this node",
                hint="give them to it: --to node-feature or --to file; or end GPU feature discovery first",
            )

    def change(self, where: str) -> Change:
        """Also of what somebody else set under these keys: it is replaced, and the plan has to show it."""
        found = change(where, self._there, self._wanted)
        if found.action != "unchanged":
            return found
        # labels that are so already become ours
        return change(where, {self._annotation: self._noted}, {self._annotation: self._note()})

    def patch(self) -> list[dict[str, Any]]:
        from gpunode.kubernetes.patches import map_patch

        gone: dict[str, str | None] = dict.fromkeys(self._keys - self._wanted.keys())
        return [
            *map_patch(self._node, _LABELS, {**self._wanted, **gone}),
            *map_patch(self._node, _ANNOTATIONS, {self._annotation: self._note() or None}),
        ]

    def _note(self) -> str:
        return ",".join(sorted(self._wanted))
