"""GPUDirect: RDMA adapters, and the modules that let other devices access GPU memory: nvidia_peermem or
DMA-BUF, nvidia_fs, gdrdrv."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from gpunode.errors import GpunodeError
from gpunode.facts.driver import version_numbers
from gpunode.facts.kernels import has_module_file, modules_dep
from gpunode.facts.pci import driver_of
from gpunode.host import Host

INFINIBAND = "/sys/class/infiniband"  # adapters for RDMA, InfiniBand and RoCE alike
_MODULES_LOAD = (
    "/etc/modules-load.d",
    "/run/modules-load.d",
    "/usr/lib/modules-load.d",
    "/lib/modules-load.d",
)
_DMABUF_KERNEL = (5, 12)  # CUDA's GPUDirect RDMA guide
_EXTRAS = (("GPUDirect Storage", "nvidia_fs", "nvidia-fs"), ("GDRCopy", "gdrdrv"))


def infiniband_cards(host: Host) -> tuple[str, ...]:
    """RDMA devices of mlx5_core's, such as ``mlx5_0``."""
    cards = []
    for name in host.listdir(INFINIBAND):
        with suppress(GpunodeError):
            if driver_of(host, f"{INFINIBAND}/{name}/device") == "mlx5_core":
                cards.append(name)
    return tuple(cards)


def infiniband_ports(host: Host, cards: tuple[str, ...]) -> tuple[str, ...]:
    """Active InfiniBand ports; an Ethernet port is often just the node's network."""
    ports = (port for card in cards for port in host.glob(f"{INFINIBAND}/{card}/ports", "*"))
    return tuple(
        port
        for port in ports
        if (host.read_text(f"{port}/link_layer") or "").strip() == "InfiniBand"
        and "ACTIVE" in (host.read_text(f"{port}/state") or "")
    )


def loaded_at_boot(host: Host, module: str) -> tuple[str, int] | None:
    """The file and line that makes systemd load it at boot (modules-load.d(5))."""
    spelled = (module, module.replace("-", "_"))
    for directory in _MODULES_LOAD:
        for path in host.glob(directory, "*.conf"):
            for number, line in enumerate((host.read_text(path) or "").splitlines(), 1):
                if line.strip() in spelled:
                    return path, number
    return None


def by_dmabuf(open_module: bool | None, kernel: str) -> bool:
    """Whether open modules and this kernel share GPU memory without nvidia_peermem. Unknown counts as yes."""
    numbers = tuple(version_numbers(kernel.partition("-")[0]))[:2]
    return open_module is not False and (not numbers or numbers >= _DMABUF_KERNEL)


class Extra(NamedTuple):
    """A module beside the driver that is installed for a kernel; `source` is the file that shows it."""

    name: str
    module: str
    source: str


def installed_extras(host: Host, kernel: str) -> Iterator[Extra]:
    """GPUDirect Storage and GDRCopy, as far as this kernel has their modules."""
    for name, *files in _EXTRAS:
        if has_module_file(host, kernel, *files):
            yield Extra(name, files[0], modules_dep(kernel))
