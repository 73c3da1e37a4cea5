"""Sinks of labels: a feature file, a NodeFeature object, the Node itself. None writes unchanged labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import unified_diff
from functools import cache, partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from gpunode.errors import ConfigError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.kubernetes.access import Access, connect, node_name
from gpunode.kubernetes.api import ClusterError, NotFound
from gpunode.kubernetes.changes import change as carry_out
from gpunode.kubernetes.changes import map_patch, own_entries, patiently, strings
from gpunode.output.result import Change, Progress
from gpunode.plugin.config.options import OUTPUT_FILE
from gpunode.plugin.config.settings import LabelSettings, Settings
from gpunode.plugin.labels.model import TIMESTAMP, key_problem, with_kept_timestamp

if TYPE_CHECKING:
    from gpunode.kubernetes.client import Cluster


class Sink(Protocol):
    """One destination. `GpunodeError` says why it isn't available."""

    def put(self, labels: Mapping[str, str], dry_run: bool) -> Change:
        """Write these labels there, or return what that would change."""


def sink_names(settings: LabelSettings) -> tuple[str, ...]:
    """Names of the sinks: those that were requested, else what other options imply, else stdout."""
    if settings.to:
        return settings.to
    sinks = (("node-feature", settings.use_node_feature_api), ("file", bool(settings.output_file)))
    return tuple(name for name, desired in sinks if desired) or ("stdout",)


def make_sinks(host: Host, settings: Settings, progress: Progress) -> tuple[Sink, ...]:
    """The sinks beside stdout; nothing is read or queried yet."""
    desired, names = settings.labels, sink_names(settings.labels)
    sinks: list[Sink] = []
    if "file" in names:
        sinks.append(FeatureFile(host, desired.output_file or OUTPUT_FILE))
    # once, at its first use; a token file is read again for each request, because tokens expire
    access = Access(desired.kubeconfig, desired.kube_context, desired.server)
    connected = cache(partial(connect, host, access))
    if "node-feature" in names:
        sinks.append(NodeFeature(host, connected, progress, desired, settings.vendor))
    if "node" in names:
        sinks.append(NodeLabelSink(host, connected, progress, desired, settings.vendor))
    return tuple(sinks)


def lines(labels: Mapping[str, str]) -> str:
    """``key=value`` lines, sorted: for NFD and for people."""
    return "".join(f"{key}={value}\n" for key, value in sorted(labels.items()))


def change(where: str, before: Mapping[str, str] | None, after: Mapping[str, str]) -> Change:
    """The change of the labels there; None: nothing exists yet, and without labels nothing is created."""
    if dict(before or {}) == dict(after):
        return Change(where, "unchanged")
    old = lines(before or {}).splitlines(keepends=True)
    diff = "".join(unified_diff(old, lines(after).splitlines(keepends=True), where, where))
    return Change(where, "created" if before is None else "updated", diff)


# A feature file for Node Feature Discovery's local source: ``key=value`` lines.

_ATTEMPTS = 5


class FeatureFile:
    """See `Sink`. The file outlives us: labels that disappear during a restart would move pods."""

    def __init__(self, host: Host, path: str) -> None:
        self._host = host
        self._path = path

    def put(self, labels: Mapping[str, str], dry_run: bool) -> Change:
        """`ConfigError` if the file isn't one of labels, or is a symlink; `GpunodeError` if it can't be
        written.

        Concurrent writes by others are respected: labels that are already right are left unchanged.
        """
        if self._host.is_symlink(self._path):  # its target could be any file
            raise ConfigError(
                f"{self._path} is a symlink to {self._host.readlink(self._path)}; it was left alone",
                hint="name the file that it leads to, or remove the link",
            )
        for _ in range(_ATTEMPTS - 1):
            data = self._host.read_bytes(self._path)
            try:
                return self._put(data, labels, dry_run)
            except ConfigError:
                if self._host.read_bytes(self._path) == data:  # unchanged: the write failed
                    raise
        return self._put(self._host.read_bytes(self._path), labels, dry_run)

    def _put(self, data: bytes | None, labels: Mapping[str, str], dry_run: bool) -> Change:
        before = None if data is None else _labels(self._path, data)
        after = labels if before is None else with_kept_timestamp(labels, before)
        changed = change(self._path, before, after)
        if changed.action != "unchanged" and not dry_run:
            self._host.make_dirs(str(PurePosixPath(self._path).parent))
            self._host.write_atomic(self._path, lines(after).encode(), expect=data, keep=False)
        return changed


def _labels(path: str, data: bytes) -> dict[str, str]:
    """The labels that an earlier run, or GPU feature discovery, wrote there."""
    labels = {}
    for line in data.decode("utf-8", "replace").splitlines():
        key, equals, value = line.strip().partition("=")
        if not key or key.startswith("#"):
            continue
        if not equals or "/" not in key or key_problem(key):
            raise ConfigError(
                f"{path} is not a feature file: it holds {line.strip()[:60]!r}; it was left alone",
                hint="name another file, or remove this one",
            )
        labels[key] = value
    return labels


# Labels set directly on the Node. Only keys that we set are ever changed or removed.
#
# An annotation of the Node lists them, ``gpunode/nvidia-labels``, as NFD keeps its own.

_NFD = "nfd.node.kubernetes.io/feature-labels"
_LABELS, _ANNOTATIONS = ("metadata", "labels"), ("metadata", "annotations")
_LISTS = {vendor: f"gpunode/{vendor}-labels" for vendor in ("nvidia", "amd")}


class _InCluster:
    """A sink that writes an object of the cluster."""

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

    def _reach(self) -> tuple[Cluster, str]:
        """The API server and the node's name."""
        node_name(self._host, self._settings.node_name)  # an invalid name is refused before connecting
        cluster = self._connect()
        return cluster, node_name(self._host, self._settings.node_name, cluster.node)[0]


class NodeLabelSink(_InCluster):
    """See `Sink`."""

    def put(self, labels: Mapping[str, str], dry_run: bool) -> Change:
        """One patch: all labels or none. `PreconditionError` if NFD manages the same labels;
        `ClusterError`."""
        cluster, name = self._reach()
        where, annotation = f"node {name}", _LISTS[self._vendor]
        if dry_run:
            node = patiently(self._host, self._progress, lambda: cluster.get("Node", name))
            return _Plan(node, labels, annotation).change(where)
        changes: list[Change] = []

        def plan(node: dict[str, Any]) -> list[dict[str, Any]]:
            plan_of_node = _Plan(node, labels, annotation)
            changes.append(plan_of_node.change(where))
            return plan_of_node.patch()

        carry_out(
            self._host,
            self._progress,
            lambda: cluster.get("Node", name),
            plan,
            lambda patch: cluster.patch("Node", name, patch),
        )
        return changes[0]


class _Plan:
    """The change of one Node. `PreconditionError` if NFD manages the same labels there."""

    def __init__(self, node: dict[str, Any], labels: Mapping[str, str], annotation: str) -> None:
        there, notes = strings(node, _LABELS), strings(node, _ANNOTATIONS)
        self._node = node
        self._annotation = annotation
        self._noted = notes.get(annotation, "")
        self._keys = _listed(self._noted)
        self._own = {key: there[key] for key in self._keys if key in there}
        self._there = {key: there[key] for key in self._keys | labels.keys() if key in there}
        self._desired = with_kept_timestamp(labels, self._own)
        nfd = set(notes.get(_NFD, "").split(","))
        foreign = sorted((nfd & self._desired.keys()) - self._keys - {TIMESTAMP})
        if foreign:
            more = f" and {len(foreign) - 1} more of these labels" if len(foreign) > 1 else ""
            raise PreconditionError(
                f"Node Feature Discovery keeps {foreign[0]}{more} on this node",
                hint="give them to it: --to node-feature or --to file; or end GPU feature discovery first",
            )

    def change(self, where: str) -> Change:
        """Includes values that others set under these keys: they are replaced, and the plan must show
        that."""
        result = change(where, self._there, self._desired)
        if result.action != "unchanged":
            return result
        # labels that have the right value already become ours
        return change(where, {self._annotation: self._noted}, {self._annotation: self._note()})

    def patch(self) -> list[dict[str, Any]]:
        dropped: dict[str, str | None] = dict.fromkeys(self._keys - self._desired.keys())
        return [
            *map_patch(self._node, _LABELS, {**self._desired, **dropped}),
            *map_patch(self._node, _ANNOTATIONS, {self._annotation: self._note() or None}),
        ]

    def _note(self) -> str:
        return ",".join(sorted(self._desired))


def _listed(text: str) -> set[str]:
    """Keys in an annotation. The node's own account can write it: no label of Kubernetes counts as ours."""
    domains = ((key, f".{key.partition('/')[0]}") for key in text.split(",") if key)
    return {key for key, domain in domains if not domain.endswith((".kubernetes.io", ".k8s.io"))}


def own_labels(node: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The labels that gpunode set on this Node, and the annotations that list those of `NodeLabelSink`."""
    there, notes = strings(node, _LABELS), strings(node, _ANNOTATIONS)
    lists = {name: notes[name] for name in _LISTS.values() if name in notes}
    keys = {key for text in lists.values() for key in _listed(text)} | own_entries(node, _LABELS).keys()
    return {key: value for key, value in there.items() if key in keys}, lists


def removal_patch(node: dict[str, Any]) -> list[dict[str, Any]]:
    """The operations that remove `own_labels` and their lists."""
    labels, lists = own_labels(node)
    removed: dict[str, str | None] = dict.fromkeys(labels)
    unlisted: dict[str, str | None] = dict.fromkeys(lists)
    return [*map_patch(node, _LABELS, removed), *map_patch(node, _ANNOTATIONS, unlisted)]


# A NodeFeature object (nfd.k8s-sigs.io/v1alpha1), from which NFD's master sets the labels.
#
# Name, label and owners are those of GPU feature discovery, so that one replaces the other.

_NODE = "nfd.node.kubernetes.io/node-name"


class NodeFeature(_InCluster):
    """See `Sink`."""

    _owned: list[dict[str, Any]] | None = None

    def put(self, labels: Mapping[str, str], dry_run: bool) -> Change:
        """`ClusterError`, also where the cluster lacks this kind because NFD isn't installed."""
        cluster, node = self._reach()
        space = self._settings.namespace or cluster.namespace
        if not space:
            raise UsageError("no namespace is given", hint="--namespace node-feature-discovery")
        name = f"{self._vendor}-features-for-{node}"

        def put() -> Change:
            return self._put(cluster, space, name, node, labels, dry_run)

        # after an unclear result the next read shows whether it succeeded; right labels are left unchanged
        return patiently(self._host, self._progress, put, conflicts=True)

    def _put(
        self,
        cluster: Cluster,
        space: str,
        name: str,
        node: str,
        labels: Mapping[str, str],
        dry_run: bool,
    ) -> Change:
        where = f"nodefeature {space}/{name}"
        there = self._read(cluster, space, name)
        before = None if there is None else strings(there, ("spec", "labels"))
        after = labels if before is None else with_kept_timestamp(labels, before)
        changed = change(where, before, after)
        owners = self._owners(cluster, space)
        if changed.action == "unchanged" and there is not None:
            has = (there.get("metadata") or {}).get("ownerReferences") or []
            described = _about(strings(there, ("metadata", "labels")).get(_NODE), has)
            changed = change(where, described, _about(node, has if owners is None else owners))
        if dry_run or changed.action == "unchanged":
            return changed
        if there is None:
            self._create(cluster, space, _object(space, name, node, after, owners or ()))
        else:
            cluster.replace(_updated(there, node, after, owners))
        return changed

    def _read(self, cluster: Cluster, space: str, name: str) -> dict[str, Any] | None:
        try:
            return cluster.get("NodeFeature", name, space)
        except NotFound:
            return None

    def _create(self, cluster: Cluster, space: str, feature: dict[str, Any]) -> None:
        try:
            cluster.create(feature)
        except NotFound as error:
            raise NotFound(
                f"no NodeFeature can be made in the namespace {space}: {error.message}",
                hint="install Node Feature Discovery, or label the node without it: --to node",
                status=error.status,
            ) from error

    def _owners(self, cluster: Cluster, space: str) -> list[dict[str, Any]] | None:
        """The DaemonSet of our pod and the pod: with the first, uninstalling it deletes the object.

        None if that is unknown now; without a pod it has no owner, and is not garbage-collected.
        """
        pod_name = self._settings.pod_name
        if not pod_name:
            return []
        if self._owned is not None:
            return self._owned
        try:
            pod = cluster.get("Pod", pod_name, space)
        except ClusterError as error:
            self._progress.note(f"the NodeFeature object gets no owner: {error.message}")
            return None
        metadata = pod.get("metadata", {})
        sets = [
            reference
            for reference in metadata.get("ownerReferences") or ()
            if reference.get("kind") == "DaemonSet"
        ]
        self._owned = []
        if sets:
            owner = {key: sets[0].get(key) for key in ("apiVersion", "kind", "name", "uid")}
            pod_reference = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata.get("name"),
                "uid": metadata.get("uid"),
            }
            self._owned = [{**owner, "controller": True}, pod_reference]
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
    """Its owners: once they are gone it would be garbage-collected, and every label with it."""
    references = (" ".join(str(owner.get(key)) for key in ("kind", "name", "uid")) for owner in owners)
    return {_NODE: node or "", "ownerReferences": ", ".join(sorted(references))}


def _updated(
    there: Mapping[str, Any], node: str, labels: Mapping[str, str], owners: Sequence[dict[str, Any]] | None
) -> dict[str, Any]:
    """The object with these labels and owners; everything else, including its version, stays."""
    metadata = dict(there.get("metadata") or {})
    metadata["labels"] = {**(metadata.get("labels") or {}), _NODE: node}
    if owners is not None:
        metadata.pop("ownerReferences", None)
        metadata |= {"ownerReferences": list(owners)} if owners else {}
    return {**there, "metadata": metadata, "spec": {**(there.get("spec") or {}), "labels": dict(labels)}}
