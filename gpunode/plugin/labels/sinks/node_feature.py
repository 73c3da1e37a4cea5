"""A NodeFeature object (nfd.k8s-sigs.io/v1alpha1), from which NFD's master sets the labels.

Name, label and owners are those of GPU feature discovery, so that one takes the other's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.plugin.labels.model import settled
from gpunode.plugin.labels.sinks import change
from gpunode.plugin.settings import LabelSettings
from gpunode.result import Change, Progress

if TYPE_CHECKING:
    from gpunode.kubernetes.api import Cluster

_NODE = "nfd.node.kubernetes.io/node-name"
_ATTEMPTS = 5


class NodeFeature:
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
        self._vendor = vendor
        self._owned: list[dict[str, Any]] | None = None

    def put(self, labels: Mapping[str, str], dry_run: bool) -> Change:
        """`ClusterError`, also where the cluster has no such kind: NFD isn't installed."""
        from gpunode.kubernetes.access import node_name
        from gpunode.kubernetes.api import Conflict, Unavailable, Unreachable

        node_name(self._host, self._settings.node_name)  # what can't be a name needs nobody's answer
        cluster = self._connect()
        node, _ = node_name(self._host, self._settings.node_name, cluster.node)
        space = self._settings.namespace or cluster.namespace
        if not space:
            raise UsageError("no namespace is given", hint="--namespace node-feature-discovery")
        name = f"{self._vendor}-features-for-{node}"
        for attempt in range(_ATTEMPTS):
            try:
                return self._put(cluster, space, name, node, labels, dry_run)
            except (Conflict, Unavailable, Unreachable) as error:
                # whatever became of it: the next look tells, and what is right by then is left alone
                if attempt + 1 == _ATTEMPTS or (isinstance(error, Unreachable) and error.lasting):
                    raise
                self._host.sleep(0.2 * 2**attempt)
        raise AssertionError("the last attempt raises")

    def _put(
        self,
        cluster: Cluster,
        space: str,
        name: str,
        node: str,
        labels: Mapping[str, str],
        dry_run: bool,
    ) -> Change:
        from gpunode.kubernetes.patches import strings

        where = f"nodefeature {space}/{name}"
        there = self._read(cluster, space, name)
        before = None if there is None else strings(there, ("spec", "labels"))
        after = labels if before is None else settled(labels, before)
        told = change(where, before, after)
        owners = self._owners(cluster, space)
        if told.action == "unchanged" and there is not None:
            has = (there.get("metadata") or {}).get("ownerReferences") or []
            said = _about(strings(there, ("metadata", "labels")).get(_NODE), has)
            told = change(where, said, _about(node, has if owners is None else owners))
        if dry_run or told.action == "unchanged":
            return told
        if there is None:
            self._create(cluster, space, _object(space, name, node, after, owners or ()))
        else:
            cluster.update_node_feature(space, _updated(there, node, after, owners))
        return told

    def _read(self, cluster: Cluster, space: str, name: str) -> dict[str, Any] | None:
        from gpunode.kubernetes.api import NotFound

        try:
            return cluster.get_node_feature(space, name)
        except NotFound:
            return None

    def _create(self, cluster: Cluster, space: str, feature: dict[str, Any]) -> None:
        from gpunode.kubernetes.api import NotFound

        try:
            cluster.create_node_feature(space, feature)
        except NotFound as error:
            raise NotFound(
                f"no NodeFeature can be made in the namespace {space}: {error.message}",
                hint="install Node Feature Discovery, or label the node without it: --to node",
                status=error.status,
            ) from error

    def _owners(self, cluster: Cluster, space: str) -> list[dict[str, Any]] | None:
        """The DaemonSet of our pod and the pod: with the first the object goes when it is uninstalled.

        None if that can't be told now; without a pod it has none, and nobody's end takes it away.
        """
        pod_name = self._settings.pod_name
        if not pod_name:
            return []
        if self._owned is not None:
            return self._owned
        from gpunode.kubernetes.api import ClusterError

        try:
            pod = cluster.get_pod(space, pod_name)
        except ClusterError as error:
            self._progress.note(f"the NodeFeature object gets no owner: {error.message}")
            return None
        found = pod.get("metadata", {})
        sets = [one for one in found.get("ownerReferences") or () if one.get("kind") == "DaemonSet"]
        self._owned = []
        if sets:
            owner = {key: sets[0].get(key) for key in ("apiVersion", "kind", "name", "uid")}
            mine = {"apiVersion": "v1", "kind": "Pod", "name": found.get("name"), "uid": found.get("uid")}
            self._owned = [{**owner, "controller": True}, mine]
        return self._owned


def _object(
    space: str, name: str, node: str, labels: Mapping[str, str], owners: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "apiVersion": "nfd.k8s-sigs.io/v1alpha1",
        "kind": "NodeFeature",
        "metadata": {
            "name": name,
            "namespace": space,
            "labels": {_NODE: node},
            **({"ownerReferences": list(owners)} if owners else {}),
        },
        "spec": {
            "features": {"attributes": {}, "flags": {}, "instances": {}},
            "labels": dict(labels),
        },
    }


def _about(node: str | None, owners: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Whose it is: with owners that are gone it would be taken away, and every label with it."""
    told = (" ".join(str(one.get(key)) for key in ("kind", "name", "uid")) for one in owners)
    return {_NODE: node or "", "ownerReferences": ", ".join(sorted(told))}


def _updated(
    there: Mapping[str, Any], node: str, labels: Mapping[str, str], owners: Sequence[dict[str, Any]] | None
) -> dict[str, Any]:
    """The object with these labels and owners; everything else, its version above all, stays."""
    metadata = dict(there.get("metadata") or {})
    metadata["labels"] = {**(metadata.get("labels") or {}), _NODE: node}
    if owners is not None:
        metadata.pop("ownerReferences", None)
        metadata |= {"ownerReferences": list(owners)} if owners else {}
    return {**there, "metadata": metadata, "spec": {**(there.get("spec") or {}), "labels": dict(labels)}}
