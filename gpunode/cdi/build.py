"""From a node's facts to a specification: pure, and the same for the same node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from gpunode.cdi.driver_files import DriverFiles, read_driver_files
from gpunode.cdi.hooks import HookProgram, find_hooks, hooks_for, link_hook, query_hooks
from gpunode.cdi.nodes import (
    CONTROL,
    NodeFacts,
    devices_below,
    gpu_node,
    mig_nodes,
    open_to_group_only,
    read_nodes,
)
from gpunode.cdi.spec import SOCKET, Edits, Mount, NodeEdit, Spec, SpecDevice, needed
from gpunode.cdi.versions import GROUPS, NEWEST, Version, text
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.facts.cdi import known_gpus
from gpunode.facts.driver import loaded_module
from gpunode.facts.libraries import library_in
from gpunode.facts.system import node_class
from gpunode.gpu.library_paths import NVML
from gpunode.gpu.model import Gpu, Inventory
from gpunode.gpu.probe import NvmlProbe, probe
from gpunode.host import Host
from gpunode.host.reading import DeviceNode

# What a container gets for every device: control nodes, libraries, programs, hooks.


def common_edits(
    nodes: NodeFacts, files: DriverFiles, hooks: HookProgram | None, *, groups: bool = False
) -> Edits:
    """With `hooks` NVIDIA's hooks create the container's links and cache; without, mounts replace them."""
    present = [nodes.present[path] for path in CONTROL if path in nodes.present]
    control = device_edits(present, nodes.dev_root, groups=groups)
    # prevents NVIDIA's own runtime, where it is the default, from injecting the GPUs a second time
    void = "NVIDIA_VISIBLE_DEVICES=void"
    if hooks is None:
        return control._replace(env=(void,), mounts=_mounts(files, _by_soname(files)))
    folders = tuple(dict.fromkeys(library.directory for library in files.libraries))
    env = (void, f"NVIDIA_CTK_LIBCUDA_DIR={':'.join(folders)}")
    mounts = _mounts(
        files, (Mount(library.path, f"{files.root}{library.path}") for library in files.libraries)
    )
    return control._replace(env=env, mounts=mounts, hooks=hooks_for(hooks, files, folders))


def _by_soname(files: DriverFiles) -> Iterator[Mount]:
    """Each library under each of its names, in both directories that a loader searches by itself.

    Without a hook nothing runs ldconfig in the container. That leaves the directories that ld.so searches
    without a cache (ld.so(8)): Debian's is built for /usr/lib/<machine>-linux-gnu, the others' for
    /usr/lib64, glibc's own default; where an image has a symlink there, as Arch to /usr/lib, the engine
    follows it inside the image. The image isn't known when this is written, so both directories get all
    names, and one of them contains files that no program opens. A name that the image has itself, as a file
    or as a link to one, is covered by the mount: the host's driver matches the host's kernel.

    Not done: LD_LIBRARY_PATH would replace the image's own and is ignored for privileged programs; an
    /etc/ld.so.cache or /etc/ld.so.conf.d of ours would hide the image's libraries. 32-bit libraries are left
    out: their directory is /usr/lib on RHEL, which is the 64-bit one on Arch, and would break that.
    """
    for library in files.libraries:
        for name in (library.name, *library.links):
            for directory in (f"/usr/lib/{files.architecture}-linux-gnu", "/usr/lib64"):
                yield Mount(f"{directory}/{name}", f"{files.root}{library.path}")


def _mounts(files: DriverFiles, libraries: Iterable[Mount]) -> tuple[Mount, ...]:
    """Sorted by depth, so that no mount hides an earlier one."""
    fixed = (Mount(inside, f"{files.root}{real}") for inside, real in files.files)
    sockets = (Mount(path, place, SOCKET) for path, place in files.sockets)
    unique = {mount.container_path: mount for mount in (*sockets, *fixed, *libraries)}
    return tuple(unique[path] for path in sorted(unique, key=natural))


def device_edits(devices: Iterable[DeviceNode], dev_root: str, *, groups: bool = False) -> Edits:
    """Device files in order, with their path on the node where that is below another root.

    With `groups` files keep their group, and the container's processes join a group that other users don't
    share, as in nvidia-ctk's output; without, an engine here doesn't support additionalGids. Every process of
    the container can open such a file in both cases: Docker 28.5 ignores the groups of a container with
    ``--user``, and engines up to CDI library 1.0 open every device file.
    """
    by_path = {device.path: device for device in devices}
    nodes, gids = [], set()
    for path in sorted(by_path, key=natural):
        device = by_path[path]
        host_path = f"{dev_root}{path}" if dev_root else ""
        grouped = open_to_group_only(device)
        mode = device.mode | 0o666 if grouped else device.mode
        nodes.append(NodeEdit(path, host_path, mode, device.gid if groups else 0))
        gids |= {device.gid} if grouped and groups else set()
    return Edits(nodes=tuple(nodes), gids=tuple(sorted(gids)))


def natural(path: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key by directory, then text, then numbers as numbers: nvidia2 comes before nvidia10."""
    parts = re.findall(r"\d+|[^\d/]+|/", path)
    keys = ((1, int(part), "") if part.isdigit() else (2, 0, part) for part in parts)
    return ((0, path.count("/"), ""), *keys)


INDEX, UUID, TYPE_INDEX = "index", "uuid", "type-index"
STRATEGIES = (INDEX, UUID, TYPE_INDEX)
_NAME = re.compile(r"[A-Za-z0-9]([\w.:-]*[A-Za-z0-9])?", re.ASCII)  # `ValidateDeviceName` in CDI's parser.go


class Form(NamedTuple):
    """Naming of devices. `limit` is the newest version that the reader of the result supports.

    With `every` there is a device ``all``. With `whole` a GPU in MIG mode is one device with the files of all
    its MIG devices, instead of those devices. `groups` is whether containers may join a device file's group.
    """

    vendor: str = "nvidia.com"
    device_class: str = "gpu"
    names: tuple[str, ...] = (INDEX, UUID)
    limit: Version = NEWEST
    every: bool = True
    whole: bool = False
    groups: bool = True


class Built(NamedTuple):
    """The specification, what was left out and why, and the UUIDs of `known_gpus`."""

    spec: Spec
    notes: tuple[str, ...] = ()
    gpus: frozenset[str] | None = None


class _Device(NamedTuple):
    """One GPU or MIG device: its index (``3`` or ``3:1``), its UUID, its device files, its GPU's address."""

    place: str
    uuid: str
    nodes: tuple[str, ...]
    pci: str
    mig: bool = False


def build(
    inventory: Inventory, nodes: NodeFacts, files: DriverFiles, hooks: HookProgram | None, form: Form
) -> Built:
    """The specification of this node. `GpunodeError` if no device could be described, or if the readers
    support no version that has the required features.
    """
    notes: list[str] = []
    readable = tuple(_readable_devices(inventory, nodes, notes, form.whole))
    if not readable:
        raise GpunodeError(
            "there is no GPU to describe: " + ("; ".join(notes) or "NVML lists none"),
            hint="find out why: gpunode doctor",
            code="no-devices",
        )
    names, note = _strategies(form)
    groups = form.groups and form.limit >= GROUPS
    devices = tuple(_devices(readable, names, nodes, hooks, form.every, groups))
    notes += [note] if note else []
    notes += _missing_control(nodes)
    common = common_edits(nodes, files, hooks, groups=groups)
    paths = {node.path for edits in (common, *(device.edits for device in devices)) for node in edits.nodes}
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
    return Built(spec._replace(version=version), tuple(notes), known_gpus(inventory))


def _strategies(form: Form) -> tuple[tuple[str, ...], str]:
    """Names beginning with a digit came with CDI 0.5.0; older engines get the other kinds of name."""
    if form.limit >= (0, 5, 0):
        return form.names, ""
    letters = tuple(name for name in form.names if name != INDEX) or (UUID,)
    return letters, f"an engine here reads CDI {text(form.limit)}: devices can't be named by index"


# --- devices --------------------------------------------------------------------------------------------


def _readable_devices(
    inventory: Inventory, facts: NodeFacts, notes: list[str], whole: bool
) -> Iterator[_Device]:
    """GPUs in NVML's order, MIG devices in place of a partitioned GPU; `notes` list what is left out."""
    for gpu in inventory.gpus:
        node = gpu_node(gpu, facts)
        if gpu.error:
            notes.append(f"GPU {gpu.index} is left out: {gpu.error}")
        elif node is None:
            notes.append(f"GPU {gpu.index} is left out: the number of its device file is unknown")
        elif node not in facts.present:
            minor = node.removeprefix("/dev/nvidia")
            notes.append(f"GPU {gpu.index} is left out: {node} does not exist (nvidia-modprobe -c {minor})")
        elif gpu.mig_enabled and whole:
            caps = (path for mig in gpu.mig for path in mig_nodes(gpu, mig, facts) or ())
            paths = (node, *(path for path in caps if path in facts.present), *facts.drm.get(gpu.pci, ()))
            yield _Device(str(gpu.index), gpu.uuid, paths, gpu.pci)
        elif gpu.mig_enabled and not gpu.mig:
            notes.append(f"GPU {gpu.index} is left out: MIG is on and holds no device")
        elif gpu.mig_enabled:
            yield from _mig_devices(gpu, node, facts, notes)
        else:
            yield _Device(str(gpu.index), gpu.uuid, (node, *facts.drm.get(gpu.pci, ())), gpu.pci)


def _mig_devices(gpu: Gpu, node: str, facts: NodeFacts, notes: list[str]) -> Iterator[_Device]:
    for mig in sorted(gpu.mig, key=lambda device: device.index):
        place = f"{gpu.index}:{mig.index}"
        caps = mig_nodes(gpu, mig, facts)
        missing = [path for path in caps or () if path not in facts.present]
        if caps is None:
            notes.append(
                f"MIG device {place} is left out: /proc/driver/nvidia-caps/mig-minors doesn't have it"
            )
        elif missing:
            notes.append(
                f"MIG device {place} is left out: {', '.join(missing)} does not exist (run nvidia-smi)"
            )
        else:
            # only profiles with graphics support rendering
            drm = facts.drm.get(gpu.pci, ()) if "+gfx" in mig.profile else ()
            yield _Device(place, mig.uuid, (node, *caps, *drm), gpu.pci, mig=True)


def _devices(
    readable: tuple[_Device, ...],
    names: tuple[str, ...],
    facts: NodeFacts,
    hooks: HookProgram | None,
    every: bool,
    groups: bool,
) -> Iterator[SpecDevice]:
    """Every device once for each kind of name, then ``all``. A name that is in use isn't given again.

    Neither is a name that CDI doesn't allow, because engines would ignore the whole file. Drivers before 470
    call MIG devices ``MIG-GPU-.../7/0``, and a faulty GPU may report any text.
    """
    used = {"all"}
    for kind in dict.fromkeys(names):
        for device in readable:
            name = _name(device, kind)
            if name not in used and _NAME.fullmatch(name):
                used.add(name)
                yield SpecDevice(name, _edits((device,), facts, hooks, groups))
    if every:
        yield SpecDevice("all", _edits(readable, facts, hooks, groups))


def _edits(devices: tuple[_Device, ...], facts: NodeFacts, hooks: HookProgram | None, groups: bool) -> Edits:
    nodes = (facts.present[path] for device in devices for path in device.nodes)
    links = sorted({link for device in devices for link in _by_path(device)}, key=natural)
    edits = device_edits(nodes, facts.dev_root, groups=groups)
    return edits._replace(hooks=link_hook(hooks, links) if hooks else ())


def _by_path(device: _Device) -> Iterator[str]:
    """udev's names for DRM nodes (60-drm.rules), because a container has no udev to create them."""
    for path in device.nodes:
        if path.startswith("/dev/dri/"):
            name = path.rpartition("/")[2]
            kind = "card" if name.startswith("card") else "render"
            yield f"../{name}::/dev/dri/by-path/pci-{device.pci}-{kind}"


def _name(device: _Device, kind: str) -> str:
    if kind == UUID:
        return device.uuid
    prefix = ("mig" if device.mig else "gpu") if kind == TYPE_INDEX else ""
    return f"{prefix}{device.place}"


def _missing_control(nodes: NodeFacts) -> list[str]:
    needed_by_cuda = ("/dev/nvidiactl", "/dev/nvidia-uvm")
    missing = [path for path in needed_by_cuda if path not in nodes.present]
    if not missing:
        return []
    return [f"{' and '.join(missing)} does not exist and CUDA needs it: nvidia-modprobe -c0 -u, then refresh"]


# Collects the input of a specification, and builds it.

_VERSION_MISMATCH = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH
NVML_SECONDS = 60.0  # without persistence, sixteen GPUs take half a minute to wake up


class Sources(NamedTuple):
    """The driver's location. `hooks` is auto (NVIDIA's hooks where their program is installed) or none.

    `hook_path` and `ldconfig` name these programs, "" to search for them. `sockets` is whether the sockets of
    NVIDIA's daemons are mounted. `device_ids` limits the devices, () for all.
    """

    driver_root: str = "/"
    dev_root: str = ""
    library_path: tuple[str, ...] = ()
    hooks: str = "auto"
    timeout: float = NVML_SECONDS
    hook_path: str = ""
    ldconfig: str = ""
    disabled_hooks: frozenset[str] = frozenset()
    sockets: bool = True
    device_ids: tuple[str, ...] = ()


def generate(host: Host, sources: Sources, form: Form) -> Built:
    """The specification of this node's present state. `GpunodeError` has the reason if there can be none."""
    refuse_other_platforms(host)
    driver = "" if sources.driver_root in ("", "/") else sources.driver_root.rstrip("/")
    dev = (sources.dev_root or driver).rstrip("/")
    inventory = _inventory(host, driver, sources)
    nodes = read_nodes(host, inventory.gpus, dev)
    files = read_driver_files(host, inventory.driver_version, driver, sources.library_path)
    files = files if sources.sockets else files._replace(sockets=())
    selected = chosen_devices(inventory, sources.device_ids)
    return build(selected, nodes, files, _hooks(host, sources), form)


def _hooks(host: Host, sources: Sources) -> HookProgram | None:
    if sources.hooks != "auto":
        return None
    path = sources.hook_path
    program = query_hooks(host, path) if path else find_hooks(host)
    if path and program is None:
        raise PreconditionError(
            f"{path} is not a hook program of NVIDIA's: it doesn't list the hook update-ldcache",
            hint="name nvidia-cdi-hook or nvidia-ctk, or do without hooks: --hooks none",
            code="no-hooks",
        )
    if program is None:
        return None
    known, ldconfig = program.known - sources.disabled_hooks, sources.ldconfig or program.ldconfig
    return program._replace(known=known, ldconfig=ldconfig)


def chosen_devices(inventory: Inventory, ids: tuple[str, ...]) -> Inventory:
    """The GPUs and MIG devices of these ids: an index, a UUID, or ``GPU:MIG`` by index."""
    if not ids or "all" in ids:
        return inventory
    gpus, known = [], set()
    for gpu in inventory.gpus:
        names = {str(gpu.index), gpu.uuid}
        parts = {mig.uuid: {mig.uuid, f"{gpu.index}:{mig.index}"} for mig in gpu.mig}
        known |= names.union(*parts.values())
        if names & set(ids):
            gpus.append(gpu)
        elif mig := tuple(mig for mig in gpu.mig if parts[mig.uuid] & set(ids)):
            gpus.append(replace(gpu, mig=mig))
    unknown = [name for name in ids if name not in known]
    if unknown:
        raise UsageError(f"--device-id {unknown[0]}: there is no such device", hint="list them: gpunode gpus")
    return inventory._replace(gpus=tuple(gpus))


def refuse_other_platforms(host: Host) -> None:
    """WSL2 and Tegra have neither /dev/nvidiaN nor NVML's minors: other files represent a GPU there."""
    mode = {"wsl2": "wsl", "tegra": "csv"}.get(node_class(host))
    if mode is not None:
        raise PreconditionError(
            f"gpunode describes GPUs of NVIDIA's Linux driver, not those of {node_class(host)}",
            hint=f"nvidia-ctk cdi generate --mode={mode} --output=/var/run/cdi/nvidia.yaml",
            code="platform",
        )


def _inventory(host: Host, driver: str, sources: Sources) -> Inventory:
    """NVML's report, from the library of another root if one is given."""
    elsewhere = driver or sources.library_path
    library = library_in(host, driver, NVML, sources.library_path) if elsewhere else ""
    answer = probe(host, sources.timeout, library=library)
    if answer.inventory is None:
        raise no_inventory(host, answer)
    if not answer.inventory.driver_version:
        raise GpunodeError("NVML doesn't report the driver's version", hint="gpunode doctor", code="nvml")
    return answer.inventory


def no_inventory(host: Host, answer: NvmlProbe) -> GpunodeError:
    """Why NVML reported nothing, and what fixes it."""
    if loaded_module(host) is None:
        return PreconditionError(
            "the NVIDIA driver isn't loaded, so gpunode can't write a specification",
            hint="modprobe nvidia nvidia-uvm, or find out why it isn't: gpunode doctor",
            code="no-driver",
        )
    code = f" (NVML {answer.code})" if answer.code is not None else ""
    if answer.code == _VERSION_MISMATCH:
        return PreconditionError(
            "the driver's libraries are of another version than the loaded module (NVML 18)",
            hint="reboot, or find out more: gpunode doctor --only driver-lib-mismatch",
            code="driver-lib-mismatch",
        )
    stable = "nvml-hang" if answer.timed_out else "nvml"
    return GpunodeError(
        f"the GPUs can't be listed: {answer.message}{code}", hint="find out why: gpunode doctor", code=stable
    )


# Classes other than the GPUs: GDRCopy, GPUDirect Storage, InfiniBand, IMEX channels.

_PLACES = {
    "gdrcopy": ("/dev", r"gdrdrv"),
    "gds": ("/dev", r"nvidia-fs\d*"),
    "mofed": ("/dev/infiniband", r"uverbs\d+|rdma_cm"),
    "imex-channel": ("/dev/nvidia-caps-imex-channels", r"channel\d+"),
}
_GDS_FILES = ("/run/udev", "/etc/cufile.json")


def feature_nodes(host: Host, dev_root: str = "") -> Mapping[str, tuple[DeviceNode, ...]]:
    """Device files by class, as paths below `dev_root`; empty where there are none."""
    classes = {}
    for name, (place, pattern) in _PLACES.items():
        devices = devices_below(host, dev_root, place)
        classes[name] = tuple(
            device for device in devices if re.fullmatch(pattern, device.path.rpartition("/")[2])
        )
    return classes


def gds_mounts(host: Host, root: str = "", root_here: str = "") -> tuple[Mount, ...]:
    """udev's data and cuFile's settings, where they exist.

    `root` is the driver's root on the node, `root_here` where this process sees it.
    """
    there = (path for path in _GDS_FILES if host.exists(f"{root_here}{path}"))
    return tuple(Mount(path, f"{root}{path}") for path in there)


def feature_spec(
    kind: str,
    devices: Mapping[str, Iterable[DeviceNode]],
    mounts: tuple[Mount, ...] = (),
    dev_root: str = "",
) -> Spec:
    """A specification of these device files by name: ``all``, or a channel's number."""
    described = tuple(
        SpecDevice(name, device_edits(nodes, dev_root)._replace(mounts=mounts))
        for name, nodes in devices.items()
    )
    spec = Spec(kind, described, Edits())
    return Spec(kind, described, Edits(), needed(spec))
