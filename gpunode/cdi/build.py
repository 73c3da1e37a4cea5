"""From what the node has to a specification: pure, and the same for the same node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpunode.cdi.common import common_edits, device_edits, natural
from gpunode.cdi.driver_files import DriverFiles
from gpunode.cdi.hooks import HookProgram, link_hook
from gpunode.cdi.model import NEWEST, Device, Edits, Spec, Version
from gpunode.cdi.nodes import NodeFacts, gpu_node, mig_nodes
from gpunode.cdi.versions import GROUPS, needed, text
from gpunode.dataclass import dataclass, replace
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.cdi import known_gpus
from gpunode.gpu.model import Gpu, Inventory, MigDevice

INDEX, UUID, TYPE_INDEX = "index", "uuid", "type-index"
STRATEGIES = (INDEX, UUID, TYPE_INDEX)
_NAME = re.compile(r"[A-Za-z0-9]([\w.:-]*[A-Za-z0-9])?", re.ASCII)  # `ValidateDeviceName` in CDI's parser.go


@dataclass(frozen=True)
class Form:
    """How devices are named. `limit` is the newest version that whoever reads the result knows.

    With `every` there is a device ``all``. With `whole` a GPU in MIG mode is one device, with all its MIG
    devices' files, in place of those. `groups` is whether containers may join a device file's group.
    """

    vendor: str = "nvidia.com"
    device_class: str = "gpu"
    names: tuple[str, ...] = (INDEX, UUID)
    limit: Version = NEWEST
    every: bool = True
    whole: bool = False
    groups: bool = True


@dataclass(frozen=True)
class Built:
    """The specification, what isn't in it and why, and the UUIDs of `known_gpus`."""

    spec: Spec
    notes: tuple[str, ...] = ()
    gpus: frozenset[str] | None = None


@dataclass(frozen=True)
class _Found:
    """One GPU or MIG device: its place (``3`` or ``3:1``), its UUID, its device files, its GPU's address."""

    place: str
    uuid: str
    nodes: tuple[str, ...]
    pci: str
    mig: bool = False


def build(
    inventory: Inventory, nodes: NodeFacts, files: DriverFiles, hooks: HookProgram | None, form: Form
) -> Built:
    """The specification of this node. `GpunodeError` if no device could be described, or if the readers know
    no version that has what is needed.
    """
    notes: list[str] = []
    found = tuple(_found(inventory, nodes, notes, form.whole))
    if not found:
        raise GpunodeError(
            "there is no GPU to describe: " + ("; ".join(notes) or "NVML lists none"),
            hint="find out why: gpunode doctor",
            code="no-devices",
        )
    names, note = _strategies(form)
    groups = form.groups and form.limit >= GROUPS
    devices = tuple(_devices(found, names, nodes, hooks, form.every, groups))
    notes += [note] if note else []
    notes += _missing_control(nodes)
    common = common_edits(nodes, files, hooks, groups=groups)
    paths = {node.path for edits in (common, *(one.edits for one in devices)) for node in edits.nodes}
    present = (nodes.present[path] for path in sorted(paths, key=natural))
    numbers = tuple((node.path, node.major, node.minor) for node in present)
    spec = Spec(f"{form.vendor}/{form.device_class}", devices, common, numbers=numbers)
    version = needed(spec)
    if version > form.limit:
        raise PreconditionError(
            f"the specification needs CDI {text(version)}; an engine here reads {text(form.limit)} at most",
            hint="upgrade that engine, or leave out what needs it (dots in --class, --dev-root)",
            code="cdi-version",
        )
    return Built(replace(spec, version=version), tuple(notes), known_gpus(inventory))


def _strategies(form: Form) -> tuple[tuple[str, ...], str]:
    """Names beginning with a digit came with CDI 0.5.0; older engines get the other kinds of name."""
    if form.limit >= (0, 5, 0):
        return form.names, ""
    letters = tuple(name for name in form.names if name != INDEX) or (UUID,)
    return letters, f"an engine here reads CDI {text(form.limit)}: devices can't be named by index"


# --- devices --------------------------------------------------------------------------------------------


def _found(inventory: Inventory, facts: NodeFacts, notes: list[str], whole: bool) -> Iterator[_Found]:
    """GPUs in NVML's order, MIG devices in place of a GPU that is cut up; `notes` say what is left out."""
    for gpu in inventory.gpus:
        node = gpu_node(gpu, facts)
        if gpu.error:
            notes.append(f"GPU {gpu.index} is left out: {gpu.error}")
        elif node is None:
            notes.append(f"GPU {gpu.index} is left out: nobody tells the number of its device file")
        elif node not in facts.present:
            minor = node.removeprefix("/dev/nvidia")
            notes.append(f"GPU {gpu.index} is left out: {node} isn't there (nvidia-modprobe -c {minor})")
        elif gpu.mig_enabled and whole:
            caps = (path for mig in gpu.mig for path in mig_nodes(gpu, mig, facts) or ())
            paths = (node, *(path for path in caps if path in facts.present), *facts.drm.get(gpu.pci, ()))
            yield _Found(str(gpu.index), gpu.uuid, paths, gpu.pci)
        elif gpu.mig_enabled and not gpu.mig:
            notes.append(f"GPU {gpu.index} is left out: MIG is on and holds no device")
        elif gpu.mig_enabled:
            yield from _mig_devices(gpu, node, facts, notes)
        else:
            yield _Found(str(gpu.index), gpu.uuid, (node, *facts.drm.get(gpu.pci, ())), gpu.pci)


def _mig_devices(gpu: Gpu, node: str, facts: NodeFacts, notes: list[str]) -> Iterator[_Found]:
    for mig in sorted(gpu.mig, key=lambda device: device.index):
        place = f"{gpu.index}:{mig.index}"
        caps = mig_nodes(gpu, mig, facts)
        missing = [path for path in caps or () if path not in facts.present]
        if caps is None:
            notes.append(
                f"MIG device {place} is left out: /proc/driver/nvidia-caps/mig-minors doesn't have it"
            )
        elif missing:
            notes.append(f"MIG device {place} is left out: {', '.join(missing)} isn't there (run nvidia-smi)")
        else:
            yield _Found(place, mig.uuid, (node, *caps, *_mig_drm(gpu, mig, facts)), gpu.pci, mig=True)


def _mig_drm(gpu: Gpu, mig: MigDevice, facts: NodeFacts) -> tuple[str, ...]:
    """Only profiles with graphics may render."""
    return facts.drm.get(gpu.pci, ()) if "+gfx" in mig.profile else ()


def _devices(
    found: tuple[_Found, ...],
    names: tuple[str, ...],
    facts: NodeFacts,
    hooks: HookProgram | None,
    every: bool,
    groups: bool,
) -> Iterator[Device]:
    """Every device once for each kind of name, then ``all``. A name that is taken isn't given again.

    Nor is one that CDI doesn't allow: engines would drop the whole file. Drivers before 470 call MIG devices
    ``MIG-GPU-.../7/0``, and what is broken may say anything.
    """
    taken = {"all"}
    for kind in dict.fromkeys(names):
        for device in found:
            name = _name(device, kind)
            if name not in taken and _NAME.fullmatch(name):
                taken.add(name)
                yield Device(name, _edits((device,), facts, hooks, groups))
    if every:
        yield Device("all", _edits(found, facts, hooks, groups))


def _edits(devices: tuple[_Found, ...], facts: NodeFacts, hooks: HookProgram | None, groups: bool) -> Edits:
    nodes = (facts.present[path] for device in devices for path in device.nodes)
    links = sorted({link for device in devices for link in _by_path(device)}, key=natural)
    edits = device_edits(nodes, facts.dev_root, groups=groups)
    return replace(edits, hooks=link_hook(hooks, links) if hooks else ())


def _by_path(device: _Found) -> Iterator[str]:
    """udev's names for DRM nodes (60-drm.rules), which a container has no udev for."""
    for path in device.nodes:
        if path.startswith("/dev/dri/"):
            name = path.rpartition("/")[2]
            kind = "card" if name.startswith("card") else "render"
            yield f"../{name}::/dev/dri/by-path/pci-{device.pci}-{kind}"


def _name(device: _Found, kind: str) -> str:
    if kind == UUID:
        return device.uuid
    prefix = ("mig" if device.mig else "gpu") if kind == TYPE_INDEX else ""
    return f"{prefix}{device.place}"


def _missing_control(nodes: NodeFacts) -> list[str]:
    needed_by_cuda = ("/dev/nvidiactl", "/dev/nvidia-uvm")
    gone = [path for path in needed_by_cuda if path not in nodes.present]
    if not gone:
        return []
    return [f"{' and '.join(gone)} isn't there and CUDA needs it: nvidia-modprobe -c0 -u, then refresh"]
