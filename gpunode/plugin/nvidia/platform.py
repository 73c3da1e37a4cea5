"""Which kind of machine the GPUs are in: NVIDIA's Linux driver, WSL2 or Tegra.

WSL2 and Tegra have no /dev/nvidiaN, no health events and no way to allocate one GPU of several, so there the
node has one device. gpunode writes no CDI specification for it.
"""

from __future__ import annotations

from typing import NamedTuple

from gpunode.cdi.nodes import MIG_MINORS, NodeFacts, mig_minors
from gpunode.errors import ConfigError
from gpunode.facts.devices import driver_gpus
from gpunode.gpu.library_paths import NVML as library_paths_NVML
from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.model import Common, KubeletDevice, ResourcePlan, Unit
from gpunode.plugin.sharing import share

NVML, WSL, TEGRA = "nvml", "wsl", "tegra"
_DXG = "/dev/dxg"
_UNITS = {WSL: Unit("all", "all", "all", paths=(_DXG,)), TEGRA: Unit("tegra", "tegra", "0")}
ONE_DEVICE = frozenset(unit.id for unit in _UNITS.values())
"""Ids of the one device that represents every GPU of such a machine."""
_CTK_MODES = {WSL: "wsl", TEGRA: "csv"}
_INTEGRATED = ("(nvgpu)", "NVIDIA Thor")


def platform_of(host: Host, settings: Settings, inventory: Inventory) -> str:
    """nvml, wsl or tegra. Without a response of NVML's pass an empty inventory."""
    if host.device(_DXG) is not None:
        return WSL
    if settings.device_discovery_strategy != "auto":
        return settings.device_discovery_strategy
    if any(word in gpu.name for gpu in inventory.gpus for word in _INTEGRATED):
        return TEGRA
    return TEGRA if not inventory.gpus and tegra_files(host) else NVML


def tegra_files(host: Host) -> bool:
    """Whether this is a Tegra by its files, regardless of NVML."""
    family = host.read_text("/sys/devices/soc0/family") or ""
    return host.is_file("/etc/nv_tegra_release") or family.strip().lower().startswith("tegra")


def one_device_plan(platform: str, settings: Settings) -> ResourcePlan:
    """The whole node as one device. `ConfigError` if the settings require an unsupported feature."""
    if any(strategy.startswith("cdi-") for strategy in settings.device_list_strategy):
        raise ConfigError(
            f"gpunode writes no CDI specification for {platform}, so device-list-strategy can't be cdi-*",
            hint=f"use envvar; nvidia-ctk cdi generate --mode={_CTK_MODES[platform]} serves other containers",
        )
    devices = {settings.resource_name: (KubeletDevice(_UNITS[platform].id, _UNITS[platform]),)}
    refusal = "MPS needs GPUs that NVML can name" if settings.shares_by_mps else ""
    return share(devices, settings.sharing, lambda unit, entry: refusal)


# What a plan needs of the machine in addition to NVML's report: the driver's directory, and its device files.

CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
NEEDED = CONTROL[:2]  # without these no container can use CUDA


class Roots(NamedTuple):
    """The driver's root and that of its device files: their path on the node, and where this process sees
    them.

    Without a slash at the end, so ``/`` is "".
    """

    driver: str
    driver_here: str
    dev: str
    dev_here: str

    @property
    def mounted(self) -> bool:
        """Whether the plugin sees the node's files through a mount: it runs in a container."""
        return self.driver != self.driver_here


class Site(NamedTuple):
    """`facts` hold MIG's capabilities and the numbers of device files; `common` is what containers share."""

    roots: Roots
    facts: NodeFacts
    common: Common
    imex_missing: bool = False


def find_roots(host: Host, settings: Settings) -> Roots:
    """The driver root is mounted at `container_driver_root` in the plugin's container; on the node itself
    that directory doesn't exist."""
    driver = settings.driver_root.rstrip("/")
    inside = settings.container_driver_root.rstrip("/")
    mounted = inside != driver and inside != "" and host.is_dir(inside)
    driver_here = inside if mounted else driver
    dev = (settings.dev_root or settings.driver_root).rstrip("/")
    desired = driver_here if mounted else dev
    dev_here = desired if host.is_dir(f"{desired}/dev") else ""
    return Roots(driver, driver_here, dev, dev_here)


def read_site(host: Host, settings: Settings, inventory: Inventory) -> Site:
    """Only what these GPUs and settings require is checked."""
    mig = any(gpu.mig_enabled for gpu in inventory.gpus)
    unnumbered = any(gpu.uuid and gpu.minor is None for gpu in inventory.gpus)
    table = host.read_text(MIG_MINORS) if mig else ""
    minors = {gpu.address: gpu.minor for gpu in driver_gpus(host)} if unnumbered else {}
    facts = NodeFacts(
        {},
        caps=mig_minors(table or ""),
        minors={address: minor for address, minor in minors.items() if minor is not None},
    )
    roots, common = _shared(host, settings)
    return Site(roots, facts, common, common.channels != settings.imex_channel_ids)


def still_so(host: Host, settings: Settings, site: Site) -> bool:
    """Whether what containers share is unchanged; a few stat calls. MIG's table is part of the driver."""
    return _shared(host, settings) == (site.roots, site.common)


def _shared(host: Host, settings: Settings) -> tuple[Roots, Common]:
    roots = find_roots(host, settings)
    channels = tuple(
        channel for channel in settings.imex_channel_ids if _exists(host, roots, imex_node(channel))
    )
    passed = (*CONTROL, *map(imex_node, channels)) if settings.pass_device_specs else ()
    nodes = tuple(path for path in passed if _exists(host, roots, path))
    return roots, Common(nodes, channels, _cdi_classes(host, settings, roots))


def imex_node(channel: int) -> str:
    """The device file of an IMEX channel."""
    return f"/dev/nvidia-caps-imex-channels/channel{channel}"


def uses_cdi(settings: Settings) -> bool:
    return any(strategy.startswith("cdi-") for strategy in settings.device_list_strategy)


def _exists(host: Host, roots: Roots, path: str) -> bool:
    """As in NVIDIA's plugin: below the device root, or in the plugin's own /dev."""
    return host.device(f"{roots.dev_here}{path}") is not None or host.device(path) is not None


def _cdi_classes(host: Host, settings: Settings, roots: Roots) -> tuple[str, ...]:
    """The enabled classes that have devices."""
    desired = {
        "gdrcopy": settings.gdrcopy_enabled,
        "gds": settings.gds_enabled,
        "mofed": settings.mofed_enabled,
    }
    if not uses_cdi(settings) or not any(desired.values()):
        return ()
    from gpunode.cdi.build import feature_nodes  # imports all of the specification builder

    nodes = feature_nodes(host, roots.dev_here)
    return tuple(name for name, on in desired.items() if on and nodes[name])


# Path of NVML below the driver root, as this process sees it.


def nvml_library(host: Host, settings: Settings) -> str:
    """The library's path under the driver root; "" to find NVML in the usual way."""
    root = find_roots(host, settings).driver_here
    if not root:
        return ""
    from gpunode.facts.libraries import library_in  # only a driver in another root needs it

    return library_in(host, root, library_paths_NVML)
