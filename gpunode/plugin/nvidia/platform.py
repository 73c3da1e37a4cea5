"""Which kind of machine the GPUs are in: NVIDIA's Linux driver, WSL2 or Tegra.

WSL2 and Tegra have no /dev/nvidiaN, no health events and no way to give out one GPU of several, so there the
node has one device. gpunode writes no CDI specification for it.
"""

from __future__ import annotations

from gpunode.errors import ConfigError
from gpunode.gpu.model import Inventory
from gpunode.host import Host
from gpunode.plugin.model import Device, Plan, Unit
from gpunode.plugin.settings import Settings
from gpunode.plugin.sharing import share

NVML, WSL, TEGRA = "nvml", "wsl", "tegra"
_DXG = "/dev/dxg"
_UNITS = {WSL: Unit("all", "all", "all", paths=(_DXG,)), TEGRA: Unit("tegra", "tegra", "0")}
ONE_DEVICE = frozenset(unit.id for unit in _UNITS.values())
"""Ids of the one device that stands for every GPU of such a machine."""
_CTK_MODES = {WSL: "wsl", TEGRA: "csv"}
_INTEGRATED = ("(nvgpu)", "NVIDIA Thor")


def platform_of(host: Host, settings: Settings, inventory: Inventory) -> str:
    """nvml, wsl or tegra. Without NVML's answer an empty inventory will do."""
    if host.device(_DXG) is not None:
        return WSL
    if settings.device_discovery_strategy != "auto":
        return settings.device_discovery_strategy
    if any(word in gpu.name for gpu in inventory.gpus for word in _INTEGRATED):
        return TEGRA
    return TEGRA if not inventory.gpus and tegra_files(host) else NVML


def tegra_files(host: Host) -> bool:
    """Whether this is a Tegra by its files, whatever NVML says."""
    family = host.read_text("/sys/devices/soc0/family") or ""
    return host.is_file("/etc/nv_tegra_release") or family.strip().lower().startswith("tegra")


def one_device_plan(platform: str, settings: Settings) -> Plan:
    """The whole node as one device. `ConfigError` where something is asked for that can't be had there."""
    if any(strategy.startswith("cdi-") for strategy in settings.device_list_strategy):
        raise ConfigError(
            f"gpunode writes no CDI specification for {platform}, so device-list-strategy can't be cdi-*",
            hint=f"use envvar; nvidia-ctk cdi generate --mode={_CTK_MODES[platform]} serves other containers",
        )
    named = {settings.resource_name: (Device(_UNITS[platform].id, _UNITS[platform]),)}
    shared = share(named, settings.sharing, lambda unit, entry: _refusal(settings))
    return Plan(shared.resources, shared.left_out, shared.warnings)


def _refusal(settings: Settings) -> str:
    mps = settings.sharing is not None and settings.sharing.strategy == "mps"
    return "MPS needs GPUs that NVML can name" if mps else ""
