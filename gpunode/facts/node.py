"""`Node`: everything the checks may know of one machine, each topic read once, when first asked for.

A topic raises `Unreadable` if this user may not look, and `ConfigError` for a file that can't be parsed; a
check that needs it is skipped or says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts import devices, driver, kubelet, libraries, pci, processes, system, toolkit
from gpunode.facts.containerd import DEFAULT_SOCKET, ContainerdConfig, find_containerd, load_config
from gpunode.facts.daemons import Daemon
from gpunode.facts.distributions import distribution_at
from gpunode.facts.docker import find_docker
from gpunode.facts.docker_file import parse_daemon_json
from gpunode.host import DeviceNode, Host

if TYPE_CHECKING:
    from gpunode.daemons.cri import CriStatus
    from gpunode.facts.cdi import CdiSpec
    from gpunode.gpu.isolated import NvmlProbe

DAEMON_SECONDS = 3.0  # a healthy daemon answers within milliseconds, a busy one within a second
NVML_SECONDS = 15.0  # without persistence, eight GPUs take more than ten seconds to wake up

_Answer = TypeVar("_Answer")


def _or_raise(answer: _Answer | DaemonError) -> _Answer:
    if isinstance(answer, DaemonError):
        raise answer
    return answer


@dataclass(frozen=True)
class Node:
    """A lazily read snapshot of `host`."""

    host: Host

    # --- the machine -----------------------------------------------------------------------------------

    @cached_property
    def distribution(self) -> system.Distribution:
        return system.read_distribution(self.host)

    @cached_property
    def kind(self) -> str:
        """bare-metal, vm, wsl2, tegra or container."""
        return system.node_class(self.host)

    @cached_property
    def kernel(self) -> str:
        return system.kernel_release(self.host)

    @cached_property
    def secure_boot(self) -> bool | None:
        return system.secure_boot(self.host)

    @cached_property
    def gpus(self) -> tuple[pci.PciGpu, ...]:
        return pci.read_gpus(self.host)

    @cached_property
    def processes(self) -> tuple[processes.Process, ...]:
        return processes.running(self.host)

    # --- the driver ------------------------------------------------------------------------------------

    @cached_property
    def module(self) -> driver.LoadedModule | None:
        return driver.loaded_module(self.host)

    @cached_property
    def module_file(self) -> driver.ModuleFile | None:
        return driver.module_file(self.host)

    @cached_property
    def kernels(self) -> tuple[driver.Kernel, ...]:
        return driver.installed_kernels(self.host)

    @cached_property
    def module_built(self) -> bool:
        """Whether the running kernel has an NVIDIA module on disk."""
        return driver.module_for(self.host, self.kernel)

    @cached_property
    def dkms(self) -> tuple[str, ...]:
        return driver.dkms_versions(self.host)

    @cached_property
    def nvml_library(self) -> libraries.Library | None:
        return libraries.find_library(self.host, libraries.NVML)

    @cached_property
    def cuda_library(self) -> libraries.Library | None:
        return libraries.find_library(self.host, libraries.CUDA)

    @cached_property
    def driver_gpus(self) -> tuple[devices.DriverGpu, ...]:
        return devices.driver_gpus(self.host)

    @cached_property
    def device_nodes(self) -> tuple[DeviceNode, ...]:
        return devices.nvidia_nodes(self.host)

    @cached_property
    def majors(self) -> dict[str, int]:
        return devices.character_majors(self.host.read_text("/proc/devices") or "")

    @cached_property
    def nvml(self) -> NvmlProbe:
        """What NVML says, asked in a child process. Ask only when module and library are there."""
        from gpunode.gpu.isolated import probe

        return probe(self.host, NVML_SECONDS)

    # --- containers ------------------------------------------------------------------------------------

    @cached_property
    def toolkit(self) -> toolkit.Toolkit:
        return toolkit.find_toolkit(self.host)

    @cached_property
    def cdi_specs(self) -> tuple[CdiSpec, ...]:
        from gpunode.facts.cdi import nvidia_specs

        return nvidia_specs(self.host)

    @cached_property
    def docker(self) -> Daemon | None:
        return find_docker(self.host)

    @cached_property
    def docker_config(self) -> dict[str, Any]:
        """daemon.json; {} without Docker or without the file."""
        if self.docker is None:
            return {}
        path = self.docker.config_path
        return parse_daemon_json(self.host.read_text(path) or "", path)

    @cached_property
    def docker_info(self) -> dict[str, Any]:
        """The running daemon's own account; `DaemonError` if there is none."""
        return _or_raise(self._docker_answer)

    @cached_property
    def _docker_answer(self) -> dict[str, Any] | DaemonError:
        """A failure is kept as well: a daemon that hangs is waited for once, not by every check."""
        from gpunode.daemons.docker_api import DockerApi

        try:
            return DockerApi(self.host, self.docker.socket if self.docker else "", DAEMON_SECONDS).info()
        except DaemonError as error:
            return error

    @cached_property
    def containerd(self) -> Daemon | None:
        """The kubelet's if that is a distribution's, which may run beside the system's; else the system's."""
        found = find_containerd(self.host)
        try:
            endpoint = self.kubelet.endpoint if self.kubelet else ""
        except GpunodeError:
            return found
        elsewhere = found is not None and endpoint not in ("", DEFAULT_SOCKET, found.socket)
        return (distribution_at(self.host, endpoint) if elsewhere else None) or found

    @cached_property
    def containerd_config(self) -> ContainerdConfig | None:
        if self.containerd is None:
            return None
        return load_config(self.host, self.containerd.config_path, self.containerd.version)

    @cached_property
    def cri(self) -> CriStatus:
        """The running containerd's own account of its CRI; `DaemonError` if it gives none."""
        return _or_raise(self._cri_answer)

    @cached_property
    def _cri_answer(self) -> CriStatus | DaemonError:
        from gpunode.daemons.cri import Cri

        try:
            with Cri(self.host, self.containerd.socket if self.containerd else "", DAEMON_SECONDS) as client:
                return client.status()
        except DaemonError as error:
            return error

    @cached_property
    def kubelet(self) -> kubelet.Kubelet | None:
        return kubelet.find_kubelet(self.host, self.processes)
