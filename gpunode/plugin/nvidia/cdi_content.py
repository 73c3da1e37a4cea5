"""What the CDI specifications for allocated containers hold: the advertised units, and what goes beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpunode.cdi.build import INDEX, UUID, Form, build
from gpunode.cdi.driver_files import DriverFiles, daemon_sockets, read_driver_files
from gpunode.cdi.features import feature_nodes, feature_spec, gds_mounts
from gpunode.cdi.hooks import HookProgram
from gpunode.cdi.model import Spec
from gpunode.cdi.nodes import read_nodes
from gpunode.cdi.versions import UNKNOWN_ENGINE
from gpunode.dataclass import dataclass, field, replace
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.gpu.model import Gpu, Inventory
from gpunode.host import Host
from gpunode.plugin.model import Common, Plan, Unit
from gpunode.plugin.nvidia.response import CDI_VENDOR
from gpunode.plugin.nvidia.site import Roots, imex_node
from gpunode.plugin.settings import Settings

DIRECTORY = "/var/run/cdi"
_NO_LIBCUDA = (
    "find out why it is missing: gpunode doctor --only driver-lib-mismatch --only libcuda-missing; "
    "say with --driver-root where a driver lies that isn't installed on the node itself"
)


@dataclass(frozen=True)
class Content:
    """Specifications by path. `missing` has, by its id, why a unit is in none of them."""

    specs: Mapping[str, Spec]
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def path_of(device_class: str) -> str:
    """Where the specification of a class lies, as with NVIDIA's plugin."""
    return f"{DIRECTORY}/{CDI_VENDOR}-{device_class}.json"


def make_content(
    host: Host,
    settings: Settings,
    inventory: Inventory,
    plan: Plan,
    roots: Roots,
    hooks: HookProgram | None,
) -> Content:
    """Everything that `response.answer` may name. `GpunodeError` if no GPU can be described at all."""
    if not inventory.driver_version:
        raise GpunodeError("NVML doesn't tell the driver's version", hint="gpunode doctor")
    units = {unit.id: unit for resource in plan.resources for unit in resource.units}
    advertised = _advertised(inventory, units)
    nodes = replace(read_nodes(host, advertised.gpus, roots.dev_here), dev_root=roots.dev)
    by_index = settings.device_id_strategy == INDEX
    whole = settings.mig_strategy == "none"
    names = (INDEX,) if by_index else (UUID,)
    # the engine is outside the plugin's container and may be old
    form = Form(CDI_VENDOR, "gpu", names, UNKNOWN_ENGINE, every=False, whole=whole)
    built = build(advertised, nodes, _driver_files(host, settings, inventory, roots), hooks, form)
    described = {device.name for device in built.spec.devices}
    missing = {
        unit.id: _reason(unit, built.notes)
        for unit in units.values()
        if (unit.index if by_index else unit.id) not in described
    }
    others = dict(_others(host, _common(plan), roots))
    return Content({path_of("gpu"): built.spec, **others}, missing, built.notes)


def _advertised(inventory: Inventory, units: Mapping[str, Unit]) -> Inventory:
    """Only what may be handed out: a pod may ask for any name in the file by an annotation of its own.

    A GPU that can't be read just now stays described as far as it is known, for containers that have it.
    """
    return replace(inventory, gpus=tuple(_parts(inventory.gpus, units)))


def _parts(gpus: tuple[Gpu, ...], units: Mapping[str, Unit]) -> Iterator[Gpu]:
    for gpu in gpus:
        mig = tuple(one for one in gpu.mig if one.uuid in units)
        if gpu.uuid in units:
            yield replace(gpu, error="")
        elif mig:
            yield replace(gpu, mig=mig, error="")


def _common(plan: Plan) -> Common:
    return plan.resources[0].common if plan.resources else Common()


def _driver_files(host: Host, settings: Settings, inventory: Inventory, roots: Roots) -> DriverFiles:
    """Looked for where this process sees them, named as the node does."""
    try:
        files = read_driver_files(host, inventory.driver_version, roots.driver_here)
    except PreconditionError as error:
        raise PreconditionError(error.message, hint=_NO_LIBCUDA, code=error.code) from error
    sockets = files.sockets
    if roots.mounted:  # /run of the plugin's own container isn't the node's
        sockets = tuple(daemon_sockets(Host(host.path(roots.driver_here), {}), roots.driver))
    if "disable-ipc-discoverer" in settings.cdi_feature_flags:
        sockets = ()
    return replace(files, root=roots.driver, sockets=sockets)


def _others(host: Host, common: Common, roots: Roots) -> Iterator[tuple[str, Spec]]:
    """The classes beside the GPUs that the plan found something for."""
    found = feature_nodes(host, roots.dev_here) if common.cdi or common.channels else {}
    if common.channels:
        nodes = {node.path: node for node in found["imex-channel"]}
        paths = {channel: imex_node(channel) for channel in common.channels}
        channels = {str(channel): (nodes[path],) for channel, path in paths.items() if path in nodes}
        yield (
            path_of("imex-channel"),
            feature_spec(f"{CDI_VENDOR}/imex-channel", channels, dev_root=roots.dev),
        )
    for name in common.cdi:
        mounts = gds_mounts(host, roots.driver, roots.driver_here) if name == "gds" else ()
        yield path_of(name), feature_spec(f"{CDI_VENDOR}/{name}", {"all": found[name]}, mounts, roots.dev)


def _reason(unit: Unit, notes: tuple[str, ...]) -> str:
    """What the builder says of this unit."""
    places = (f"MIG device {unit.index} ", f"GPU {unit.index.partition(':')[0]} ")
    said = next((note for note in notes if note.startswith(places)), "")
    reason = said.partition(" is left out: ")[2]
    return reason or "its name can't stand in a CDI specification; set device-id-strategy to index"
