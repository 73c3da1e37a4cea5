"""CDI specifications for NVIDIA devices: the files that they refer to, and which of them an engine uses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.host.documents import load
from gpunode.output.typed import as_dict, as_strings

if TYPE_CHECKING:
    from gpunode.gpu.model import Inventory

# the CDI specification's default directories, and every engine's; the later one wins for a device that both
# have
DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
EXTENSIONS = ("json", "yaml")  # engines read no other (`scanSpecDirs` in CDI's spec-dirs.go), .yml included
VENDOR = "nvidia.com"
_STILL = "NVIDIA_VISIBLE_DEVICES=void"  # in specifications of gpunode's, and of nvidia-ctk's since 1.15
_LIBRARY_VERSION = re.compile(r"/lib(?:nvidia-ml|cuda)\.so\.(\d+\.\d+(?:\.\d+)*)$")


class CdiNode(NamedTuple):
    """A device file that a spec adds to containers; its numbers are None if the engine looks them up."""

    path: str
    major: int | None
    minor: int | None


class CdiEdits(NamedTuple):
    """What a container gets: device files and mounted paths of this machine, programs run, variables."""

    nodes: tuple[CdiNode, ...] = ()
    mounts: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    env: tuple[str, ...] = ()


class CdiDevice(NamedTuple):
    """One device of a spec, by its bare name."""

    name: str
    edits: CdiEdits = CdiEdits()


class SpecFile(NamedTuple):
    """One file.

    `problem` says why it can't be used, and then the rest is empty. `edits` apply to every device of the
    file; `version` is its cdiVersion as written.
    """

    path: str
    kind: str
    version: str = ""
    devices: tuple[CdiDevice, ...] = ()
    edits: CdiEdits = CdiEdits()
    problem: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Bare names of the devices."""
        return tuple(device.name for device in self.devices)

    @property
    def serves_gpus(self) -> bool:
        """Whether containers can get GPUs through it."""
        return self.kind == f"{VENDOR}/gpu" and bool(self.devices) and not self.problem

    @property
    def stills_toolkit(self) -> bool:
        """Whether it makes the toolkit's hook and runtime skip its containers."""
        return _STILL in self.edits.env or all(_STILL in device.edits.env for device in self.devices)

    @property
    def nodes(self) -> tuple[CdiNode, ...]:
        """Device files of the whole file, without duplicates."""
        return tuple(dict.fromkeys(node for edits in self._all() for node in edits.nodes))

    @property
    def mounts(self) -> tuple[str, ...]:
        """Mounted paths of this machine, without duplicates."""
        return tuple(dict.fromkeys(path for edits in self._all() for path in edits.mounts))

    @property
    def hooks(self) -> tuple[str, ...]:
        """Programs that are run, without duplicates."""
        return tuple(dict.fromkeys(path for edits in self._all() for path in edits.hooks))

    def _all(self) -> Iterator[CdiEdits]:
        yield self.edits
        yield from (device.edits for device in self.devices)


def unlisted(directories: Iterable[str]) -> tuple[str, ...]:
    """Those of `DIRECTORIES` that an engine with this list doesn't read; /var/run is a link to /run."""
    listed = {f"/var{directory}" if directory.startswith("/run/") else directory for directory in directories}
    return tuple(directory for directory in DIRECTORIES if directory not in listed)


def reads_none(engine: str, where: str, directories: Iterable[str]) -> str:
    """The note about an engine that reads none of `DIRECTORIES`; "" if it reads one."""
    names = tuple(directories)
    if unlisted(names) != DIRECTORIES:
        return ""
    return (
        f"cdi_spec_dirs {where} is {', '.join(names) or 'empty'}: {engine} does not read specifications in"
        f" {' or '.join(DIRECTORIES)} until the list includes one of them"
    )


def nvidia_specs(host: Host, directories: Sequence[str] = DIRECTORIES) -> tuple[SpecFile, ...]:
    """Every spec of kind ``nvidia.com/...``, and every file that should be one but can't be parsed."""
    specs = vendor_specs(host, directories)
    return tuple(spec for spec in specs if not spec.kind or spec.kind.startswith(f"{VENDOR}/"))


def vendor_specs(host: Host, directories: Sequence[str] = DIRECTORIES) -> tuple[SpecFile, ...]:
    """The same with NVIDIA's other vendors, such as ``k8s.device-plugin.nvidia.com``."""
    specs = []
    for directory in directories:
        for path in sorted(path for kind in EXTENSIONS for path in host.glob(directory, f"*.{kind}")):
            try:
                spec = parse_spec(host.read_text(path) or "", path)
            except ConfigError as error:  # engines ignore a directory; a pipe or a loop of links is broken
                broken = "nvidia" in path.rpartition("/")[2] and not host.is_dir(path)
                spec = SpecFile(path, "", problem=error.message) if broken else None
            specs += [spec] if spec is not None else []
    return tuple(specs)


def parse_spec(text: str, path: str) -> SpecFile | None:
    """One spec; None for another vendor's. A broken file is NVIDIA's only if its name or text says so."""
    try:
        tree = json.loads(text) if path.endswith(".json") else load(text)
    except (ValueError, RecursionError) as error:
        is_nvidia = "nvidia" in path.rpartition("/")[2] or f"{VENDOR}/" in text
        problem = " ".join(str(error).split())
        return SpecFile(path, "", problem=f"can't be parsed: {problem}") if is_nvidia else None
    kind = tree.get("kind") if isinstance(tree, dict) else None
    vendor = kind.partition("/")[0] if isinstance(kind, str) else ""
    if not isinstance(kind, str) or not f".{vendor}".endswith(f".{VENDOR}"):
        return None
    version = tree.get("cdiVersion")
    devices = [device for device in _list(tree, "devices") if isinstance(device, dict)]
    return SpecFile(
        path,
        kind,
        version if isinstance(version, str) else "",
        tuple(CdiDevice(_name(device.get("name")), _edits(device)) for device in devices),
        _edits(tree),
    )


def _name(value: Any) -> str:
    """A device's name as engines read it, a number included; "" if it is not a name."""
    return str(value) if isinstance(value, str | int | float) else ""


def _list(tree: Any, key: str) -> list[Any]:
    value = tree.get(key) if isinstance(tree, dict) else None
    return value if isinstance(value, list) else []


def _edits(holder: dict[str, Any]) -> CdiEdits:
    edits = as_dict(holder.get("containerEdits"))
    return CdiEdits(
        tuple(dict.fromkeys(_nodes(edits))),
        tuple(_strings(edits, "mounts", "hostPath")),
        tuple(_strings(edits, "hooks", "path")),
        as_strings(edits.get("env")),
    )


def _nodes(edits: dict[str, Any]) -> Iterator[CdiNode]:
    """hostPath is the node's path on this machine; path is the container's and the default for hostPath."""
    for node in _list(edits, "deviceNodes"):
        path = (node.get("hostPath") or node.get("path")) if isinstance(node, dict) else None
        if isinstance(path, str):
            major, minor = _number(node.get("major")), _number(node.get("minor"))
            # Go omits a field that is 0; engines look up a device only if its major is 0
            # (specs-go/config.go and fillMissingInfo in the CDI library)
            yield CdiNode(path, major, minor) if major else CdiNode(path, None, None)


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _strings(edits: dict[str, Any], key: str, field: str) -> Iterator[str]:
    values = (item.get(field) for item in _list(edits, key) if isinstance(item, dict))
    yield from dict.fromkeys(value for value in values if isinstance(value, str))


def stale_parts(host: Host, spec: SpecFile, driver: str, gpus: frozenset[str] | None) -> Iterator[str]:
    """Everything in a spec that no longer matches this machine; no other function decides this.

    `driver` is the loaded module's version, "" if unknown; `gpus` are the UUIDs of `known_gpus`.
    """
    yield from stale_edits(host, spec, driver)
    if spec.kind == f"{VENDOR}/gpu" and gpus is not None:
        # MIG devices get new names with each layout; their device files show whether they exist
        unknown = (name for name in spec.names if name.startswith("GPU-") and name not in gpus)
        yield from (f"{name}: no such GPU exists" for name in unknown)


def known_gpus(inventory: Inventory | None) -> frozenset[str] | None:
    """UUIDs of this machine's GPUs; None if NVML doesn't list them all."""
    if inventory is None or not inventory.gpus or any(gpu.error for gpu in inventory.gpus):
        return None
    return frozenset(str(gpu.uuid) for gpu in inventory.gpus)


def stale_edits(host: Host, edits: CdiEdits | SpecFile, driver: str) -> Iterator[str]:
    """Outdated parts of these edits, or of all of a file: one sentence for each path."""
    libraries = ((path, _LIBRARY_VERSION.search(path)) for path in edits.mounts)
    others = {path for path, match in libraries if match and driver and match[1] != driver}
    yield from (f"{path}: the loaded driver is {driver}" for path in sorted(others))
    for path in edits.mounts:
        if path not in others and not host.exists(path):
            yield f"{path}: doesn't exist"
    for node in edits.nodes:
        device = host.device(node.path)
        if device is None:
            yield f"{node.path}: doesn't exist"
        elif node.major is not None and (node.major, node.minor) != (device.major, device.minor):
            now, before = f"{device.major}:{device.minor}", f"{node.major}:{node.minor}"
            yield f"{node.path} is {now}, not {before}"
    for path in edits.hooks:
        if not host.executable(path):
            yield f"{path}: no such program"
