"""Topics of `Node`: the engines beside Docker and containerd's CRI, and other Dockers than the one meant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpunode.errors import DaemonError
from gpunode.facts import about
from gpunode.facts.about import or_raise
from gpunode.facts.about_kubernetes import AboutKubernetes
from gpunode.facts.daemons import Daemon, daemon_version
from gpunode.facts.topic import topic
from gpunode.facts.units import read_unit

if TYPE_CHECKING:
    from gpunode.facts.crio import CrioConfig
    from gpunode.facts.docker_desktop import Desktop
    from gpunode.facts.podman import PodmanConfig

_CRIO_UNITS = ("crio.service", "cri-o.service")


class AboutRuntimes(AboutKubernetes):
    """See `Node`."""

    @topic
    def docker_snap(self) -> Daemon | None:
        """The docker snap, also where it lies beside a Docker of the system's."""
        from gpunode.facts.docker_snap import UNIT, find_snap

        daemons = tuple(one for one in self.processes if one.name == "dockerd" and one.uid == 0)
        if not daemons and read_unit(self.host, UNIT) is None:
            return None
        return find_snap(self.host, daemons)

    @topic
    def docker_rootless(self) -> tuple[Daemon, ...]:
        """Dockers that ordinary users run, the own one first."""
        from gpunode.facts.docker_rootless import find_others, find_rootless

        daemons = tuple(one for one in self.processes if one.name == "dockerd" and one.uid != 0)
        own = find_rootless(self.host, daemons) if daemons else None
        return tuple(filter(None, (own,))) + find_others(self.host, daemons)

    @topic
    def docker_desktop(self) -> tuple[Desktop, ...]:
        from gpunode.facts.docker_desktop import running_desktops

        return running_desktops(self.host, self.processes)

    @topic
    def crio(self) -> Daemon | None:
        from gpunode.facts.crio import find_crio

        here = any(one.name == "crio" for one in self.processes) or self.host.which("crio") is not None
        if not here and all(read_unit(self.host, unit) is None for unit in _CRIO_UNITS):
            return None
        return find_crio(self.host)

    @topic
    def crio_files(self) -> CrioConfig | None:
        """What CRI-O's files add up to; `ConfigError` for one that it can't read either."""
        from gpunode.facts.crio import drop_in_directory, load_crio

        if self.crio is None:
            return None
        return load_crio(self.host, self.crio.config_path, drop_in_directory(self.crio))

    @topic
    def crio_config(self) -> dict[str, Any]:
        """What the running CRI-O holds (``/config``); `DaemonError` if it doesn't say."""
        return or_raise(self._crio_answer)

    @topic
    def _crio_answer(self) -> dict[str, Any] | DaemonError:
        from gpunode.daemons.crio_api import DEFAULT_SOCKET, CrioApi

        socket = self.crio.socket if self.crio else DEFAULT_SOCKET
        try:
            return CrioApi(self.host, socket, about.DAEMON_SECONDS).config()
        except DaemonError as error:
            return error

    @topic
    def podman(self) -> Daemon | None:
        from gpunode.facts.podman import find_podman

        return find_podman(self.host)

    @topic
    def podman_files(self) -> PodmanConfig:
        from gpunode.facts.podman import load_podman

        return load_podman(self.host)

    @topic
    def kubelet_version(self) -> tuple[int, ...]:
        """Of the kubelet that runs, () if none does or it doesn't say. It takes a start of its program."""
        process = self.kubelet.process if self.kubelet else None
        if process is None or process.name != "kubelet":
            return ()
        return daemon_version(self.host, "kubelet", process.argv[0])
