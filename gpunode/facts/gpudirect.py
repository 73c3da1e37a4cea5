"""What lets other devices reach GPU memory: nvidia_peermem or DMA-BUF, nvidia_fs, gdrdrv."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.errors import GpunodeError
from gpunode.facts.driver import version_numbers
from gpunode.host import Host

INFINIBAND = "/sys/class/infiniband"
_MODULES_LOAD = (
    "/etc/modules-load.d",
    "/run/modules-load.d",
    "/usr/lib/modules-load.d",
    "/lib/modules-load.d",
)
_DMABUF_KERNEL = (5, 12)  # CUDA's GPUDirect RDMA guide
_EXTRAS = (("GPUDirect Storage", "nvidia_fs", "nvidia-fs"), ("GDRCopy", "gdrdrv", "gdrdrv"))


def infiniband_cards(host: Host) -> tuple[str, ...]:
    """RDMA devices of mlx5_core's, such as ``mlx5_0``."""
    return tuple(name for name in host.listdir(INFINIBAND) if _driver(host, name) == "mlx5_core")


def _driver(host: Host, name: str) -> str:
    try:
        link = host.readlink(f"{INFINIBAND}/{name}/device/driver")
    except GpunodeError:
        return ""
    return link.rstrip("/").rpartition("/")[2] if link else ""


def infiniband_ports(host: Host, cards: tuple[str, ...]) -> tuple[str, ...]:
    """Ports that are up and speak InfiniBand; one that speaks Ethernet is often just the node's network."""
    ports = (f"{INFINIBAND}/{card}/ports/{port}" for card in cards for port in _ports(host, card))
    return tuple(port for port in ports if _speaks_infiniband(host, port))


def _ports(host: Host, card: str) -> tuple[str, ...]:
    return tuple(host.listdir(f"{INFINIBAND}/{card}/ports"))


def _speaks_infiniband(host: Host, port: str) -> bool:
    layer = (host.read_text(f"{port}/link_layer") or "").strip()
    return layer == "InfiniBand" and "ACTIVE" in (host.read_text(f"{port}/state") or "")


def loaded(host: Host, module: str) -> bool:
    """As /proc/modules has it; built into the kernel it has a directory all the same."""
    return host.is_dir(f"/sys/module/{module}")


def wanted_at_boot(host: Host, module: str) -> tuple[str, int] | None:
    """The file and line that has systemd load it at boot (modules-load.d(5))."""
    spelled = (module, module.replace("-", "_"))
    for directory in _MODULES_LOAD:
        for path in host.glob(directory, "*.conf"):
            for number, line in enumerate((host.read_text(path) or "").splitlines(), 1):
                if line.strip() in spelled:
                    return path, number
    return None


def by_dmabuf(open_module: bool | None, kernel: str) -> bool:
    """Whether open modules and this kernel share GPU memory without nvidia_peermem. What can't be told is
    taken for yes."""
    numbers = tuple(version_numbers(kernel.partition("-")[0]))[:2]
    return open_module is not False and (not numbers or numbers >= _DMABUF_KERNEL)


def installed_extras(host: Host, kernel: str) -> Iterator[tuple[str, str, str]]:
    """What somebody has installed for the running kernel: its name, its module, and the file that tells."""
    index = f"/lib/modules/{kernel}/modules.dep"
    text = host.read_text(index) or ""
    for name, module, source in _EXTRAS:
        files = (f"/{module}.ko", f"/{source}.ko")
        if any(f"{file}{end}" in text for file in files for end in (":", ".xz:", ".zst:", ".gz:")):
            yield name, module, index
