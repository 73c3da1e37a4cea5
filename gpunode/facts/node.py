"""`Node`: all facts about one machine that checks may use, each topic read once, at its first use.

The topics are grouped by subject. A topic raises `Unreadable` if this user has no permission to read it, and
`ConfigError` for a file that can't be parsed; a check that needs it is skipped or reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from gpunode.daemons import pod_resources
from gpunode.daemons.cri import Cri, running_containers
from gpunode.daemons.docker import DockerApi
from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts import (
    devices,
    driver,
    kernel_modules,
    kubelet,
    libraries,
    packages,
    pci,
    processes,
    system,
    toolkit,
)
from gpunode.facts.boot import chosen_release
from gpunode.facts.cdi import SpecFile, nvidia_specs
from gpunode.facts.containerd import DEFAULT_SOCKET, ContainerdConfig, find_containerd, load_config
from gpunode.facts.crio import (
    DEFAULT_SOCKET as CRIO_SOCKET,
)
from gpunode.facts.crio import (
    CrioConfig,
    drop_in_directory,
    find_crio,
    load_crio,
    running_crio,
)
from gpunode.facts.daemons import Daemon, daemon_version
from gpunode.facts.device_plugins import (
    Operator,
    PluginLog,
    PluginProcess,
    find_operator,
    plugin_logs,
    plugin_processes,
)
from gpunode.facts.distributions import distribution_at
from gpunode.facts.docker import (
    Desktop,
    find_docker,
    find_others,
    find_rootless,
    find_snap,
    parse_daemon_json,
    running_desktops,
)
from gpunode.facts.driver_targets import RUN_INSTALLER, UnsupportedGpu, unsupported_gpus
from gpunode.facts.fabric import LogFinding, NvSwitch, read_log, read_switches
from gpunode.facts.images import Search, find_image
from gpunode.facts.kernel_log import KernelLine, failed_gpus, read_kernel_log
from gpunode.facts.kernels import Kernel, has_module_file, installed_kernels, newer_kernels, version_key
from gpunode.facts.kubelet import NAME, read_checkpoint
from gpunode.facts.libraries import CachedLibrary
from gpunode.facts.module_builds import dkms_trees, enforces_signatures
from gpunode.facts.packages import Automatic, automatic_upgrades
from gpunode.facts.podman import PodmanConfig, find_podman, load_podman
from gpunode.facts.registry import ENGINES
from gpunode.facts.services import UnitState, read_unit_states
from gpunode.facts.system import BARE_METAL, VM
from gpunode.facts.systemd import read_unit
from gpunode.facts.toolkit import ToolkitSettings, read_settings
from gpunode.facts.topic import topic
from gpunode.facts.workloads import Container, DeviceRule, containers, device_rules
from gpunode.facts.xids import XidLine, xid_lines
from gpunode.gpu.library_paths import DRIVER_ROOT
from gpunode.gpu.nvml_health import Condition
from gpunode.gpu.probe import NvmlProbe, probe
from gpunode.host import Host
from gpunode.host.reading import DeviceNode

if TYPE_CHECKING:
    from gpunode.daemons.cri import CriContainer, CriStatus


# Time limits of `Node`'s queries, the user's options, and values of topics.

DAEMON_SECONDS = 3.0  # a healthy daemon answers within milliseconds, a busy one within a second
NVML_SECONDS = 15.0
# without persistence mode GPUs initialise one after another, eight in more than ten seconds
NVML_SECONDS_MANY = 20.0
FEW_GPUS = 4


class Questions(NamedTuple):
    """Options of the user that checks use.

    `expect_gpus` is how many GPUs there should be, None if unknown. `cuda` is the CUDA release that programs
    here need ("12.8"), `image` a container image to compare with this node; both are empty if not requested.
    `deep` allows checks that run something: a container, a plugin's RPC.
    """

    expect_gpus: int | None = None
    cuda: str = ""
    image: str = ""
    deep: bool = False


class Trial(NamedTuple):
    """Result of a test; `passed` is None if it didn't run, and `text` says why."""

    passed: bool | None
    text: str


class Allocatable(NamedTuple):
    """Healthy devices by resource, allocated or not; from the running kubelet (`live`) or from its
    checkpoint."""

    resources: Mapping[str, tuple[str, ...]]
    source: str
    live: bool = False

    @property
    def nvidia(self) -> dict[str, tuple[str, ...]]:
        return {name: ids for name, ids in self.resources.items() if name.startswith("nvidia.com/")}


__all__ = ["Node", "Questions"]


@dataclass(frozen=True)
class Node:
    """A lazily read snapshot of `host`."""

    host: Host
    questions: Questions = field(default_factory=Questions)
    trials: Mapping[str, Callable[[Host, str], Trial]] = field(default_factory=dict)

    # The machine, its kernel and what is on the PCI bus.

    @topic
    def distribution(self) -> system.Distribution:
        return system.read_distribution(self.host)

    @topic
    def kind(self) -> str:
        """bare-metal, vm, wsl2, tegra or container."""
        return system.node_class(self.host)

    @topic
    def kernel(self) -> str:
        return system.kernel_release(self.host)

    @topic
    def secure_boot(self) -> bool | None:
        return enforces_signatures(self.host)

    @topic
    def kernel_log(self) -> tuple[KernelLine, ...]:
        """`Unreadable` for an ordinary user where the kernel restricts it (kernel.dmesg_restrict)."""
        return read_kernel_log(self.host)

    @property
    def readable_log(self) -> tuple[KernelLine, ...]:
        """`kernel_log`; () if it can't be read, for facts that it only adds to."""
        try:
            return self.kernel_log
        except GpunodeError:
            return ()

    @topic
    def xids(self) -> tuple[XidLine, ...]:
        """XIDs of this boot, oldest first; `Unreadable` like `kernel_log`."""
        return xid_lines(self.kernel_log)

    @topic
    def packages(self) -> packages.Packages:
        """Installed packages. An rpm query takes half a second: read files first."""
        return packages.read_packages(self.host)

    @topic
    def run_installed(self) -> bool:
        """Whether the driver was installed only by NVIDIA's .run installer."""
        return self.host.executable(RUN_INSTALLER) and not driver.driver_packages(self.packages)

    @topic
    def module_options(self) -> kernel_modules.ModuleOptions:
        """Settings of modules in modprobe.d and on the command line. `Unreadable` if this user can't read a
        file of it."""
        return kernel_modules.read_module_options(self.host)

    @topic
    def gpus(self) -> tuple[pci.PciGpu, ...]:
        return pci.read_gpus(self.host)

    @topic
    def processes(self) -> tuple[processes.Process, ...]:
        return processes.running(self.host)

    # The kernel module, its libraries, device files and NVML's report.

    @topic
    def module(self) -> driver.LoadedModule | None:
        return driver.loaded_module(self.host)

    @topic
    def module_file(self) -> driver.ModuleFile | None:
        return driver.module_file(self.host)

    @topic
    def module_open(self) -> bool | None:
        """Whether the module, loaded or on disk, is the open one; None if unknown."""
        if self.module is not None:
            return self.module.open
        license_ = driver.modinfo(self.host, "license")  # Dual MIT/GPL for the open one, NVIDIA
        return None if not license_ else "GPL" in license_

    @topic
    def driver_version(self) -> str:
        """Of the loaded module, else of the one on disk; empty if neither has a version."""
        if self.module is not None:
            return self.module.version
        return self.module_file.version if self.module_file else ""

    @topic
    def unsuited_gpus(self) -> tuple[UnsupportedGpu, ...]:
        """GPUs that have no driver, or one that can't use them, because it doesn't support them."""
        return tuple(unsupported_gpus(self.gpus, self.driver_version, self.module_open, self.refused_gpus))

    @topic
    def refused_gpus(self) -> tuple[str, ...]:
        """Addresses of GPUs that the driver failed to initialise, according to the kernel's log."""
        addresses = failed_gpus(self.readable_log)
        return tuple(gpu.address for gpu in self.gpus if gpu.driver == "nvidia" and gpu.address in addresses)

    @topic
    def next_kernel(self) -> str:
        """The kernel that boots next: GRUB's configured one, else the newest of its kind."""
        newer = newer_kernels(self.kernels, self.kernel)
        if not newer:
            return self.kernel
        release = chosen_release(self.host, self.kernels)
        return release or max(newer, key=lambda kernel: version_key(kernel.release)).release

    @topic
    def next_version(self) -> str:
        """Of the module that the next boot loads; empty if there is none, or without a version."""
        if self.next_kernel == self.kernel:
            return self.module_file.version if self.module_file else ""
        return driver.modinfo(self.host, "version", "-k", self.next_kernel)

    @topic
    def automatic_upgrades(self) -> Automatic | None:
        """What upgrades packages automatically, None if nothing does."""
        return automatic_upgrades(self.host, self.distribution.family)

    @topic
    def linked_libraries(self) -> tuple[CachedLibrary, ...]:
        """What the dynamic linker's cache holds for 64-bit programs."""
        return libraries.linked_libraries(self.host)

    @topic
    def kernels(self) -> tuple[Kernel, ...]:
        return installed_kernels(self.host)

    @topic
    def module_built(self) -> bool:
        """Whether the running kernel has an NVIDIA module on disk."""
        return has_module_file(self.host, self.kernel)

    @topic
    def dkms(self) -> tuple[str, ...]:
        """Driver versions with source in DKMS, whether built or not."""
        return tuple(version for _, version in dkms_trees(self.host))

    @topic
    def nvml_library(self) -> libraries.DriverLibrary | None:
        return libraries.find_library(self.host, libraries.NVML, self.linked_libraries)

    @topic
    def cuda_library(self) -> libraries.DriverLibrary | None:
        return libraries.find_library(self.host, libraries.CUDA, self.linked_libraries)

    @topic
    def driver_gpus(self) -> tuple[devices.DriverGpu, ...]:
        return devices.driver_gpus(self.host)

    @topic
    def device_nodes(self) -> tuple[DeviceNode, ...]:
        return devices.nvidia_nodes(self.host)

    @topic
    def majors(self) -> dict[str, int]:
        return devices.character_majors(self.host.read_text("/proc/devices") or "")

    @topic
    def nvml(self) -> NvmlProbe:
        """NVML's report, from a child process; not `asked` if the query would change the node: NVML loads the
        module and creates missing device files, which would hide the fault."""
        library = self.nvml_library
        if library is None and not self.host.is_dir(f"{DRIVER_ROOT}/usr"):
            return NvmlProbe(None, message="no libnvidia-ml.so.1 is installed to query NVML", asked=False)
        change = self._nvml_would
        if change:
            return NvmlProbe(None, message=f"NVML is not queried, because that would {change}", asked=False)
        seconds = NVML_SECONDS_MANY if len(self.driver_gpus) > FEW_GPUS else NVML_SECONDS
        return probe(self.host, seconds, condition=True, root=self._driver_root)

    @property
    def _driver_root(self) -> str:
        """Root directory of the driver container in which NVML is queried, "" for the node's own. Only root
        may enter it."""
        library = self.nvml_library
        return library.root if library and (self.host.is_root or not self.host.live) else ""

    @property
    def _nvml_would(self) -> str:
        """What NVML would change to get what it needs; empty if nothing is missing."""
        if self.kind not in (BARE_METAL, VM):
            return ""  # a container has only some files, and WSL has neither module nor these files
        if self.module is None:
            return "load the module"
        there = {device.path for device in self.device_nodes}
        if self._driver_root:  # a toolkit container may create them in the node's own /dev instead
            inside = self.host.devices(f"{DRIVER_ROOT}/dev")
            there |= {device.path.removeprefix(DRIVER_ROOT) for device in inside}
        minors = sorted(gpu.minor for gpu in self.driver_gpus if gpu.minor is not None and not gpu.excluded)
        desired = (devices.CONTROL, *(f"/dev/nvidia{minor}" for minor in minors))
        return next((f"create {path}" for path in desired if path not in there), "")

    @topic
    def conditions(self) -> tuple[Condition, ...]:
        """The condition of each GPU, from NVML; () where NVML isn't installed or doesn't answer."""
        return () if self.module is None else self.nvml.conditions

    # The kubelet and what it has registered.

    @topic
    def kubelet(self) -> kubelet.Kubelet | None:
        return kubelet.find_kubelet(self.host, self.processes)

    @topic
    def operator(self) -> Operator:
        """Traces of NVIDIA's GPU operator on this node, if any."""
        return find_operator(self.host)

    @topic
    def docker_snap(self) -> Daemon | None:
        """The docker snap, also if it is installed beside the system's Docker."""
        daemons = [process for process in self.processes if process.name == "dockerd" and process.uid == 0]
        return find_snap(self.host, daemons)

    @topic
    def docker_rootless(self) -> tuple[Daemon, ...]:
        """Dockers that ordinary users run, this user's own first."""
        daemons = tuple(
            process for process in self.processes if process.name == "dockerd" and process.uid != 0
        )
        own = find_rootless(self.host, daemons) if daemons else None
        return tuple(filter(None, (own,))) + find_others(self.host, daemons)

    @topic
    def docker_desktop(self) -> tuple[Desktop, ...]:
        return running_desktops(self.host, self.processes)

    @topic
    def crio(self) -> Daemon | None:
        # looked for first, because `find_crio` walks /proc again, which takes 20 ms for 1000 processes
        here = (
            any(process.name == "crio" for process in self.processes) or self.host.which("crio") is not None
        )
        if not here and all(read_unit(self.host, unit) is None for unit in ENGINES["crio"].units):
            return None
        return find_crio(self.host)

    @topic
    def crio_files(self) -> CrioConfig:
        """Merged configuration in the files of a node with CRI-O; `ConfigError` for a file that CRI-O can't
        read either."""
        assert self.crio is not None
        return load_crio(self.host, self.crio.config_path, drop_in_directory(self.crio))

    @topic
    def crio_config(self) -> CrioConfig:
        """Configuration of the running CRI-O (``/config``); `DaemonError` if it doesn't report it."""
        return running_crio(self.host, self.crio.socket if self.crio else CRIO_SOCKET, DAEMON_SECONDS)

    @topic
    def podman(self) -> Daemon | None:
        return find_podman(self.host)

    @topic
    def podman_files(self) -> PodmanConfig:
        return load_podman(self.host)

    @topic
    def kubelet_version(self) -> tuple[int, ...]:
        """Version of the running kubelet, () if none runs or it is unknown. Runs the kubelet's program."""
        process = self.kubelet.process if self.kubelet else None
        if process is None or process.name != "kubelet":
            return ()
        return daemon_version(self.host, "kubelet", process.argv[0])

    # The toolkit, CDI specifications and the container engines, as their daemons report them.

    @topic
    def toolkit(self) -> toolkit.Toolkit:
        return toolkit.find_toolkit(self.host)

    @topic
    def toolkit_settings(self) -> ToolkitSettings:
        """config.toml with its defaults; `ConfigError` if it can't be parsed."""
        return read_settings(self.host, self.toolkit)

    @topic
    def cdi_specs(self) -> tuple[SpecFile, ...]:
        return nvidia_specs(self.host)

    @property
    def gpu_specs(self) -> tuple[SpecFile, ...]:
        """Those of the CDI specifications that add GPUs."""
        return tuple(spec for spec in self.cdi_specs if spec.serves_gpus)

    @topic
    def docker(self) -> Daemon | None:
        return find_docker(self.host)

    @topic
    def docker_config(self) -> dict[str, Any]:
        """daemon.json of a node with Docker; {} without the file."""
        assert self.docker is not None
        path = self.docker.config_path
        return parse_daemon_json(self.host.read_text(path) or "", path, twice=True)

    @topic
    def docker_info(self) -> dict[str, Any]:
        """The running daemon's own report; `DaemonError` if there is none."""
        return DockerApi(self.host, self.docker.socket if self.docker else "", DAEMON_SECONDS).info()

    @topic
    def containerd(self) -> Daemon | None:
        """The kubelet's if that is a distribution's, which may run beside the system's; else the system's."""
        daemon = find_containerd(self.host)
        try:
            endpoint = self.kubelet.endpoint if self.kubelet else ""
        except GpunodeError:
            return daemon
        elsewhere = daemon is not None and endpoint not in ("", DEFAULT_SOCKET, daemon.socket)
        return (distribution_at(self.host, endpoint) if elsewhere else None) or daemon

    @topic
    def containerd_config(self) -> ContainerdConfig | None:
        if self.containerd is None:
            return None
        return load_config(self.host, self.containerd.config_path, self.containerd.version)

    @topic
    def cri(self) -> CriStatus:
        """The running containerd's report of its CRI; `DaemonError` if there is none."""
        with Cri(self.host, self.containerd.socket if self.containerd else "", DAEMON_SECONDS) as client:
            return client.status()

    # The container image that the user requests.

    @topic
    def image(self) -> Search:
        """The image of `Questions.image` in an engine's store; no store has the empty name."""
        if not self.questions.image:
            return Search(None)
        daemons = {"containerd": self.containerd, "CRI-O": self.crio}
        return find_image(
            self.host,
            self.questions.image,
            docker=self.docker.socket if self.docker else "",
            cri={name: daemon.socket for name, daemon in daemons.items() if daemon is not None},
            podman=self.podman is not None,
        )

    # The services beside the driver, as systemd reports them.

    @topic
    def units(self) -> Mapping[str, UnitState]:
        """By name, those of `facts.services.UNITS`; one that isn't in it is unknown."""
        return read_unit_states(self.host)

    @topic
    def switches(self) -> tuple[NvSwitch, ...]:
        """`Unreadable` for an ordinary user on a Blackwell baseboard."""
        return read_switches(self.host, self.gpus)

    @topic
    def fabric_log(self) -> tuple[LogFinding, ...]:
        """The log since the fabric manager's last start, regardless of boots."""
        return read_log(self.host)

    @topic
    def allocatable(self) -> Allocatable | None:
        """From the running kubelet (PodResources), else from its checkpoint; None if neither is available."""
        with suppress(DaemonError):
            socket = kubelet.pod_resources_socket(self.kubelet)
            return Allocatable(self._live_allocatable, f"GetAllocatableResources at {socket}", True)
        checkpoint = read_checkpoint(self.host, kubelet.DEVICE_PLUGINS)
        path = f"{kubelet.DEVICE_PLUGINS}/{NAME}"
        status = self.host.stat(path) if self.host.live else None  # times of a recorded machine mean nothing
        process = self.kubelet.process if self.kubelet else None
        if checkpoint is None or (status and process and status.st_mtime < process.started):
            return None  # an earlier kubelet wrote the file
        return Allocatable(checkpoint.healthy, path)

    @topic
    def _live_allocatable(self) -> Mapping[str, tuple[str, ...]]:
        socket = kubelet.pod_resources_socket(self.kubelet)
        return pod_resources.allocatable(self.host, socket, DAEMON_SECONDS)

    @topic
    def kubelet_silence(self) -> str:
        """The query that a running kubelet doesn't answer; empty if it answers or can't be queried."""
        try:
            self._live_allocatable  # noqa: B018 - its error is the answer
        except DaemonError as error:
            return error.message if error.code == "timeout" else ""
        return ""

    @topic
    def gpu_holdings(self) -> tuple[pod_resources.Holding, ...]:
        """Which containers have which NVIDIA devices; `DaemonError` if the kubelet doesn't report it."""
        socket = kubelet.pod_resources_socket(self.kubelet)
        holdings = pod_resources.list_pods(self.host, socket, DAEMON_SECONDS)
        return tuple(holding for holding in holdings if holding.resource.startswith("nvidia.com/"))

    @topic
    def cri_containers(self) -> tuple[CriContainer, ...]:
        """Running containers of the kubelet's engine; () if there is none or it doesn't answer."""
        socket = self.kubelet.endpoint if self.kubelet else self.containerd.socket if self.containerd else ""
        try:
            return running_containers(self.host, socket, DAEMON_SECONDS) if socket else ()
        except DaemonError:
            return ()

    @topic
    def docker_containers(self) -> tuple[tuple[str, str, str], ...]:
        """Id, name and image of running Docker containers; () without Docker, or if it doesn't answer."""
        try:
            if self.docker is None:
                return ()
            return DockerApi(self.host, self.docker.socket, DAEMON_SECONDS).running_containers()
        except DaemonError:
            return ()

    @topic
    def containers(self) -> tuple[Container, ...]:
        """Running containers of this node, whatever their engine."""
        return containers(self.host, self.processes)

    @topic
    def gpu_containers(self) -> tuple[Container, ...]:
        """Containers with NVIDIA's device files in their /dev."""
        return tuple(container for container in self.containers if container.nodes)

    @topic
    def device_rules(self) -> Mapping[str, DeviceRule]:
        """systemd's device rules of those containers' scopes."""
        return device_rules(self.host, filter(None, (container.scope for container in self.gpu_containers)))

    @topic
    def plugin_processes(self) -> tuple[PluginProcess, ...]:
        return plugin_processes(self.host, self.processes)

    @topic
    def plugin_logs(self) -> tuple[PluginLog, ...]:
        return plugin_logs(self.host)
