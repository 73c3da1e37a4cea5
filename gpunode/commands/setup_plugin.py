"""The step of `setup --kubernetes` that brings the device plugin: a service of the node, or a DaemonSet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunode.commands import cluster_objects, plugin_unit
from gpunode.commands.setup_steps import State, Step
from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError, GpunodeError, PreconditionError
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.plugin.unit import UNIT, find_unit
from gpunode.result import Progress, Result

if TYPE_CHECKING:
    from gpunode.commands.manifests_plugin import Options as Manifest
    from gpunode.kubernetes.api import Cluster, Json

_REGULAR_ROOT = "/var/lib/kubelet"
# DevicePluginCDIDevices is on by default from then on (Kubernetes, Feature Gates); before it, by annotations
_KUBELET_WITH_CDI = (1, 29)
_PULL_SECONDS = 0.5
_PATIENCE = 15.0  # NVIDIA's plugin registers within seconds of a kubelet's start


@dataclass(frozen=True)
class Serving:
    """Who hands GPUs to the kubelet: `ours` if it is this node's service; `counts` by resource."""

    names: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]
    ours: bool

    @property
    def serves(self) -> bool:
        return any(count for _, count in self.counts)

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.counts)
        return f"{told} by {' and '.join(self.names) or 'a device plugin'}"


def serving(host: Host) -> Serving:
    """As the kubelet tells it now; where nobody may be asked, as the node's files do."""
    node = Node(host)
    allocatable = node.allocatable
    known = allocatable is not None and (
        allocatable.told or not host.live
    )  # a checkpoint outlives its plugin
    counts = {name: len(ids) for name, ids in allocatable.nvidia.items()} if allocatable and known else {}
    plugins = node.plugin_processes
    names = tuple(f"{one.name} (process {one.process.pid})" for one in plugins)
    others = [one for one in plugins if one.name != "gpunode" or one.container]
    unit = plugin_unit.state(host)
    ours = bool(unit and unit.runs) and not others
    return Serving(names, tuple(sorted(counts.items())), ours)


def arguments(host: Host, cdi: bool) -> tuple[str, ...]:
    """The options of `plugin serve` that this node takes: GPUs by CDI, and a kubelet in another place."""
    from gpunode.facts.kubelet import pod_resources_socket, root_directory

    node = Node(host)
    given: tuple[str, ...] = ()
    if cdi:
        version = node.kubelet_version
        old = bool(version) and version[:2] < _KUBELET_WITH_CDI
        given += (f"--device-list-strategy={'cdi-annotations' if old else 'cdi-cri'}",)
    if root_directory(node.kubelet) != _REGULAR_ROOT:
        given += (f"--pod-resources-socket={pod_resources_socket(node.kubelet)}",)
    return given


def _foreign(host: Host, found: Serving, patience: float, progress: Progress) -> State | None:
    """Another plugin serves, or should: a second one would only take the kubelet's registration from it.

    It gets `patience` seconds to do so: an earlier step may have restarted engine or kubelet (k3s is both).
    """
    if found.ours:
        return None
    if found.names and not found.serves and patience and host.live:
        with progress.step(
            f"waiting for {found.names[0]} to offer its GPUs to the kubelet, {patience:g} s at most"
        ):
            host.wait_until(lambda: serving(host).serves, patience, _PULL_SECONDS)
        found = serving(host)
    if found.serves:
        return State(f"{found}; it is left as it is (docs/device-plugin.md says how to switch)", right=True)
    if not found.names:
        return None
    raise PreconditionError(
        f"{found.names[0]} runs here and has offered no GPU to the kubelet",
        hint="see why: gpunode doctor; or take it away, then run this again",
        code="plugin-serves-nothing",
    )


# --- a service of the node ------------------------------------------------------------------------------


def service_step(host: Host, cdi: bool, wait: float, progress: Progress, *, dry_run: bool) -> Step:
    """The packaged unit, enabled and started. Nothing is waited for where nothing has been done."""
    patience = 0.0 if dry_run else min(wait, _PATIENCE)

    def options(dry_run: bool) -> plugin_unit.Options:
        return plugin_unit.Options(arguments(host, cdi), dry_run, wait)

    def look() -> State:
        other = _foreign(host, serving(host), patience, progress)
        if other is not None:
            return other
        unit = plugin_unit.state(host)
        found, edit = find_unit(host), plugin_unit.wanted_edit(host, options(True))
        if found.content is None:
            return State(f"{UNIT} is not there")
        if edit.action != "unchanged":
            return State(f"{UNIT} is another release's, or for other options")
        if unit is None or not unit.runs:
            return State(f"{UNIT} doesn't run")
        if not unit.at_boot:
            return State(f"{UNIT} isn't started at boot")
        told = plugin_unit.own_status(host)
        if host.live and not plugin_unit.serves(told):
            return State(f"the kubelet hasn't taken its GPUs{f': {told.status}' if told else ''}")
        return State(told.status if told and told.status else f"{UNIT} runs", right=True)

    return Step(
        "plugin",
        f"systemctl enable --now {UNIT}",
        look,
        lambda: plugin_unit.run(host, options(True), progress),
        lambda: plugin_unit.run(host, options(False), progress),
    )


# --- a DaemonSet ----------------------------------------------------------------------------------------


def daemon_set_step(
    host: Host, cluster: Cluster | None, manifest: Manifest, wait: float, progress: Progress, *, dry_run: bool
) -> Step:
    """The plugin's account and its DaemonSet, in every node's interest: it comes to all that have GPUs."""
    patience = 0.0 if dry_run else min(wait, _PATIENCE)
    command = f"gpunode manifests daemon-set --namespace {manifest.namespace}" + (
        f" --image {manifest.image}" if manifest.image else ""
    )

    def look() -> State:
        found = serving(host)
        if found.serves and found.ours:
            return State(f"{found}, {UNIT}; two plugins would be one too many", right=True)
        other = _foreign(host, found, patience, progress)
        if other is not None:
            return other
        if cluster is None:
            raise PreconditionError(
                "a DaemonSet is made through the API server, and there is no way to one from here",
                hint=f"where kubectl works: {command} | kubectl apply -f -; then run this again",
                code="no-cluster",
            )
        held = cluster_objects.look(host, cluster, wanted(), progress)
        cluster_objects.refuse_others(held, command)
        if all(one.found is not None for one in held):
            return State("its DaemonSet is in the cluster, and serves no GPU here yet")
        return State("no device plugin serves here")

    def wanted() -> tuple[Json, ...]:
        return daemon_set_objects(host, manifest)

    def make(dry_run: bool) -> Result:
        assert cluster is not None  # `look` has refused
        return cluster_objects.make(
            host,
            cluster,
            wanted(),
            progress,
            dry_run=dry_run,
            settle=lambda: _wait_for_pod(host, cluster, manifest.namespace, wait, progress),
        )

    return Step("plugin", f"{command} | kubectl apply -f -", look, lambda: make(True), lambda: make(False))


def daemon_set_objects(host: Host, manifest: Manifest) -> tuple[Json, ...]:
    """What `gpunode manifests` prints: the account without rights, and the DaemonSet."""
    from gpunode.commands import manifests_plugin
    from gpunode.kubernetes.manifests.rbac import rbac

    return (*rbac(manifest.namespace, ("plugin",)), *manifests_plugin.run(host, manifest).data.objects)


def _wait_for_pod(host: Host, cluster: Cluster, namespace: str, wait: float, progress: Progress) -> None:
    with progress.step("waiting for the plugin's pod on this node, and for the kubelet to take the GPUs"):
        if host.wait_until(lambda: serving(host).serves, wait, _PULL_SECONDS):
            return
    why = _why(host, cluster, namespace)
    hint = f"see its image and node: kubectl describe nodes; with more patience: --wait {2 * wait:g}"
    if "ErrImageNeverPull" in why:
        hint = (
            "no registry has gpunode's image: put it on the node, or name yours: --image (docs/kubernetes.md)"
        )
    raise DaemonError(f"the kubelet took no GPUs within {wait:g} s: {why}", hint=hint)


def _why(host: Host, cluster: Cluster, namespace: str) -> str:
    """What the plugin's pods wait for, in Kubernetes' own words."""
    from gpunode.kubernetes.manifests.common import labels

    try:
        pods = cluster.list_pods(namespace, labels("device-plugin"))
    except GpunodeError as error:
        return error.message
    reasons = {
        f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip()
        for pod in pods
        for status in (pod.get("status") or {}).get("containerStatuses") or ()
        for waiting in [(status.get("state") or {}).get("waiting") or {}]
        if waiting
    }
    if reasons:
        return "; ".join(sorted(reasons))[:300]
    return "no pod of the DaemonSet was made" if not pods else "its pods haven't told why"
