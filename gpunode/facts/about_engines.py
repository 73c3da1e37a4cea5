"""Topics of `Node`: the toolkit, CDI specifications and the container engines, as their daemons tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts import about, toolkit
from gpunode.facts.about import or_raise
from gpunode.facts.about_runtimes import AboutRuntimes
from gpunode.facts.containerd import DEFAULT_SOCKET, ContainerdConfig, find_containerd, load_config
from gpunode.facts.daemons import Daemon
from gpunode.facts.distributions import distribution_at
from gpunode.facts.docker import find_docker
from gpunode.facts.docker_file import parse_daemon_json
from gpunode.facts.topic import topic

if TYPE_CHECKING:
    from gpunode.daemons.cri import CriStatus
    from gpunode.facts.cdi import CdiSpec
    from gpunode.facts.toolkit_settings import Settings


class AboutEngines(AboutRuntimes):
    """See `Node`."""

    @topic
    def toolkit(self) -> toolkit.Toolkit:
        return toolkit.find_toolkit(self.host)

    @topic
    def toolkit_settings(self) -> Settings:
        """config.toml with its defaults; `ConfigError` if it can't be parsed."""
        from gpunode.facts.toolkit_settings import read_settings

        return read_settings(self.host, self.toolkit)

    @topic
    def cdi_specs(self) -> tuple[CdiSpec, ...]:
        from gpunode.facts.cdi import nvidia_specs

        return nvidia_specs(self.host)

    @topic
    def docker(self) -> Daemon | None:
        return find_docker(self.host)

    @topic
    def docker_config(self) -> dict[str, Any]:
        """daemon.json; {} without Docker or without the file."""
        if self.docker is None:
            return {}
        path = self.docker.config_path
        return parse_daemon_json(self.host.read_text(path) or "", path, twice=True)

    @topic
    def docker_info(self) -> dict[str, Any]:
        """The running daemon's own account; `DaemonError` if there is none."""
        return or_raise(self._docker_answer)

    @topic
    def _docker_answer(self) -> dict[str, Any] | DaemonError:
        """A failure is kept as well: a daemon that hangs is waited for once, not by every check."""
        from gpunode.daemons.docker_api import DockerApi

        try:
            return DockerApi(
                self.host, self.docker.socket if self.docker else "", about.DAEMON_SECONDS
            ).info()
        except DaemonError as error:
            return error

    @topic
    def containerd(self) -> Daemon | None:
        """The kubelet's if that is a distribution's, which may run beside the system's; else the system's."""
        found = find_containerd(self.host)
        try:
            endpoint = self.kubelet.endpoint if self.kubelet else ""
        except GpunodeError:
            return found
        elsewhere = found is not None and endpoint not in ("", DEFAULT_SOCKET, found.socket)
        return (distribution_at(self.host, endpoint) if elsewhere else None) or found

    @topic
    def containerd_config(self) -> ContainerdConfig | None:
        if self.containerd is None:
            return None
        return load_config(self.host, self.containerd.config_path, self.containerd.version)

    @topic
    def cri(self) -> CriStatus:
        """The running containerd's own account of its CRI; `DaemonError` if it gives none."""
        return or_raise(self._cri_answer)

    @topic
    def _cri_answer(self) -> CriStatus | DaemonError:
        from gpunode.daemons.cri import Cri

        try:
            with Cri(
                self.host, self.containerd.socket if self.containerd else "", about.DAEMON_SECONDS
            ) as client:
                return client.status()
        except DaemonError as error:
            return error
