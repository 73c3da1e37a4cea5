"""Reads what of the machine goes into NVIDIA's labels."""

from __future__ import annotations

from collections.abc import Iterable

from gpunode.errors import GpunodeError
from gpunode.facts.pci import DEVICES
from gpunode.facts.vgpu import VirtualGpu, read_vgpus
from gpunode.gpu.model import Gpu
from gpunode.host import Host
from gpunode.plugin.labels.model import Machine
from gpunode.plugin.settings import LabelSettings


def read_machine(
    host: Host, settings: LabelSettings, gpus: Iterable[Gpu], vgpus: tuple[VirtualGpu, ...] | None
) -> Machine:
    """What can't be read is left open; nothing here is an error. `vgpus` is what `find_vgpus` gave."""
    last = vgpus[-1] if vgpus else None
    return Machine(
        product=_text(host, settings.machine_type_file),
        classes={gpu.pci: _class(host, gpu.pci) for gpu in gpus if gpu.pci},
        vgpu=None if vgpus is None else bool(vgpus),
        host_driver=(last.host_driver_version, last.host_driver_branch) if last else ("", ""),
    )


def find_vgpus(host: Host) -> tuple[VirtualGpu, ...] | None:
    """The virtual GPUs of this machine, None if that can't be told. Reads every device of the PCI bus."""
    try:
        return read_vgpus(host)
    except GpunodeError:
        return None


def _text(host: Host, path: str) -> str:
    try:
        return (host.read_text(path) or "").strip() if path else ""
    except GpunodeError:
        return ""


def _class(host: Host, address: str) -> int:
    """The PCI class, 0 if it can't be told."""
    try:
        return int(_text(host, f"{DEVICES}/{address}/class") or "0", 16)
    except ValueError:
        return 0
