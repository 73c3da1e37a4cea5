"""From a node to its labels: what is queried, and which labels the answers become."""

from __future__ import annotations

from dataclasses import replace

from gpunode.errors import GpunodeError
from gpunode.facts.devices import driver_gpus
from gpunode.facts.pci import DEVICES, read_gpus
from gpunode.gpu.model import Inventory
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.labels.model import Labels, Machine
from gpunode.plugin.labels.nvidia import (
    find_vgpus,
    is_tegra,
    nvidia_labels,
    read_machine,
    tegra_inventory,
    vfio_inventory,
)
from gpunode.plugin.model import KubeletDevice, Resource, ResourcePlan, Unit
from gpunode.plugin.nvidia.platform import TEGRA, nvml_library, tegra_files
from gpunode.plugin.nvidia.resources import plan as plan_resources

VFIO = "vfio"
_PATIENCE_SECONDS = 30.0  # NVML wakes GPUs one by one if nothing keeps them awake


def label(host: Host, settings: Settings) -> Labels:
    """The labels of this node now. `GpunodeError` if its GPUs can't be queried, unless `fail_on_init_error`
    is off."""
    if settings.vendor == "amd":
        return label_amd(host, settings)
    inventory, why = _look(host, settings)
    if inventory is None and settings.fail_on_init_error:
        tegra = settings.device_discovery_strategy == TEGRA  # its GPU is on no bus
        if tegra or not none_there(host):
            raise cant_label(why, kept_for_vms(host))
    gpus = inventory.gpus if inventory else ()
    machine = read_machine(host, settings.labels, gpus, find_vgpus(host))
    return label_gpus(host, settings, inventory, machine)


def label_gpus(host: Host, settings: Settings, inventory: Inventory | None, machine: Machine) -> Labels:
    """The labels of known GPUs; no inventory: there is no GPU. `ConfigError` where the settings aren't valid
    for them."""
    plan = planned(host, settings, inventory) if inventory is not None else ResourcePlan()
    return nvidia_labels(settings, inventory, plan, machine, host.now())


def label_amd(host: Host, settings: Settings) -> Labels:
    """AMD's labels. None without a GPU, and the reason among the warnings."""
    from gpunode.plugin.labels.amd import amd_labels, read_cards

    cards, driver, reason = read_cards(host, settings.labels.firmware)
    labels = amd_labels(cards, driver, settings.labels.firmware)
    return replace(labels, warnings=(*labels.warnings, *((reason,) if reason else ())))


def cant_label(why: str, for_vms: bool = False) -> GpunodeError:
    """`for_vms`: every GPU is reserved for virtual machines, where the driver doesn't see it."""
    hint = "find out why: gpunode doctor"
    if for_vms:
        hint = "its GPUs are kept for virtual machines: --device-discovery-strategy vfio labels them"
    return GpunodeError(f"the GPUs can't be labelled: {why}", hint=hint, code="nvml")


def planned(host: Host, settings: Settings, inventory: Inventory) -> ResourcePlan:
    """The resources that these GPUs are advertised as."""
    if settings.device_discovery_strategy == VFIO:  # hypervisors pass through whole GPUs only
        units = (Unit(gpu.uuid, gpu.uuid, str(gpu.index)) for gpu in inventory.gpus)
        devices = tuple(KubeletDevice(unit.id, unit) for unit in units)
        return ResourcePlan((Resource(settings.resource_name, devices),))
    # a container's content is irrelevant here, and would be read from files
    bare = replace(settings, device_list_strategy=("envvar",), pass_device_specs=False, imex_channel_ids=())
    return plan_resources(host, bare, inventory)


def _look(host: Host, settings: Settings) -> tuple[Inventory | None, str]:
    if settings.device_discovery_strategy == VFIO:
        return vfio_inventory(host), ""
    if settings.simulate:
        from gpunode.plugin.simulate.node import load

        return load(settings.simulate, host)[0], ""
    if settings.device_discovery_strategy == TEGRA:
        return query_tegra(host, settings, None)
    library = nvml_library(host, settings)
    seen = probe(host, _patience(settings), library=library)
    if is_tegra(host, settings, seen.inventory):
        return query_tegra(host, settings, seen.inventory)
    return seen.inventory, seen.message


def query_tegra(host: Host, settings: Settings, inventory: Inventory | None) -> tuple[Inventory | None, str]:
    """CUDA's report; NVML's (`inventory`) where CUDA gives none, else None and why."""
    tegra, why = tegra_inventory(host, _patience(settings))
    if tegra is None and inventory is not None and inventory.gpus:
        return inventory, ""
    return tegra, why


def _patience(settings: Settings) -> float:
    return max(settings.probe_seconds, _PATIENCE_SECONDS)


def kept_for_vms(host: Host) -> bool:
    """Whether vfio-pci or a similar driver holds every NVIDIA GPU."""
    gpus = read_gpus(host) if host.is_dir(DEVICES) else ()
    return bool(gpus) and all(gpu.for_vms for gpu in gpus)


def none_there(host: Host) -> bool:
    """Whether there is no NVIDIA GPU at all, rather than one that doesn't respond."""
    if tegra_files(host) or not host.is_dir(DEVICES) or host.device("/dev/dxg") is not None:
        return False
    return not read_gpus(host) and not driver_gpus(host)
