"""Topics of `Node`: what runs on its GPUs, and what the kubelet may hand out of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError
from gpunode.facts import about, kubelet
from gpunode.facts.about import or_raise
from gpunode.facts.about_engines import AboutEngines
from gpunode.facts.topic import topic

if TYPE_CHECKING:
    from gpunode.daemons.cri_lists import CriContainer
    from gpunode.daemons.pod_resources import Holding
    from gpunode.facts.device_plugins import PluginLog, PluginProcess
    from gpunode.facts.workloads import Container, DeviceRule


@dataclass(frozen=True)
class Allocatable:
    """Healthy devices by resource, held or not, and who said so: the kubelet (`told`), or its checkpoint."""

    resources: Mapping[str, tuple[str, ...]]
    source: str
    told: bool = False

    @property
    def nvidia(self) -> dict[str, tuple[str, ...]]:
        return {name: ids for name, ids in self.resources.items() if name.startswith("nvidia.com/")}


class AboutWorkloads(AboutEngines):
    """See `Node`."""

    @topic
    def allocatable(self) -> Allocatable | None:
        """The running kubelet's word (PodResources), else its checkpoint's; None if neither can be had."""
        from gpunode.facts.device_checkpoint import NAME, read_checkpoint

        answer = self._allocatable_answer
        if not isinstance(answer, DaemonError):
            socket = kubelet.pod_resources_socket(self.kubelet)
            return Allocatable(answer, f"GetAllocatableResources at {socket}", True)
        checkpoint = read_checkpoint(self.host, kubelet.DEVICE_PLUGINS)
        path = f"{kubelet.DEVICE_PLUGINS}/{NAME}"
        if checkpoint is None or self._older_than_kubelet(path):
            return None
        return Allocatable(checkpoint.healthy, path)

    def _older_than_kubelet(self, path: str) -> bool:
        """Whether what lies there is an earlier kubelet's word; times of a recorded machine say nothing."""
        found = self.host.stat(path) if self.host.live else None
        process = self.kubelet.process if self.kubelet else None
        return found is not None and process is not None and found.st_mtime < process.started

    @topic
    def _allocatable_answer(self) -> Mapping[str, tuple[str, ...]] | DaemonError:
        from gpunode.daemons import pod_resources

        socket = kubelet.pod_resources_socket(self.kubelet)
        try:
            return pod_resources.allocatable(self.host, socket, about.DAEMON_SECONDS)
        except DaemonError as error:
            return error

    @topic
    def kubelet_silence(self) -> str:
        """What a kubelet that runs leaves unanswered, in words; empty if it answers or can't be asked."""
        answer = self._allocatable_answer
        return answer.message if isinstance(answer, DaemonError) and answer.code == "timeout" else ""

    @topic
    def gpu_holdings(self) -> tuple[Holding, ...]:
        """Which containers hold which NVIDIA devices; `DaemonError` if the kubelet doesn't say."""
        return or_raise(self._holdings_answer)

    @topic
    def _holdings_answer(self) -> tuple[Holding, ...] | DaemonError:
        from gpunode.daemons import pod_resources

        socket = kubelet.pod_resources_socket(self.kubelet)
        try:
            held = pod_resources.list_pods(self.host, socket, about.DAEMON_SECONDS)
        except DaemonError as error:
            return error
        return tuple(one for one in held if one.resource.startswith("nvidia.com/"))

    @topic
    def cri_containers(self) -> tuple[CriContainer, ...]:
        """What runs under the engine that the kubelet talks to; () if there is none or it doesn't tell."""
        from gpunode.daemons.cri_lists import running_containers

        socket = self.kubelet.endpoint if self.kubelet else self.containerd.socket if self.containerd else ""
        try:
            return running_containers(self.host, socket, about.DAEMON_SECONDS) if socket else ()
        except DaemonError:
            return ()

    @topic
    def docker_containers(self) -> tuple[tuple[str, str, str], ...]:
        """Id, name and image of what runs under Docker; () without Docker, or if it doesn't tell."""
        from gpunode.daemons.docker_api import DockerApi

        try:
            if self.docker is None:
                return ()
            return DockerApi(self.host, self.docker.socket, about.DAEMON_SECONDS).running_containers()
        except DaemonError:
            return ()

    @topic
    def containers(self) -> tuple[Container, ...]:
        """What runs in a container on this node, whatever its engine."""
        from gpunode.facts.workloads import containers

        return containers(self.host, self.processes)

    @topic
    def gpu_containers(self) -> tuple[Container, ...]:
        """Those with NVIDIA's device files in their /dev."""
        return tuple(one for one in self.containers if one.nodes)

    @topic
    def device_rules(self) -> Mapping[str, DeviceRule]:
        """systemd's device rules of those containers' scopes."""
        from gpunode.facts.workloads import device_rules

        return device_rules(self.host, filter(None, (one.scope for one in self.gpu_containers)))

    @topic
    def plugin_processes(self) -> tuple[PluginProcess, ...]:
        from gpunode.facts.device_plugins import plugin_processes

        return plugin_processes(self.host, self.processes)

    @topic
    def plugin_logs(self) -> tuple[PluginLog, ...]:
        from gpunode.facts.device_plugins import plugin_logs

        return plugin_logs(self.host)
