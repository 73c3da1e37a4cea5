"""Gathers what a specification is made of, and makes it."""

from __future__ import annotations

from gpunode.cdi.build import Built, Form, build
from gpunode.cdi.driver_files import read_driver_files
from gpunode.cdi.hooks import HookProgram, ask_hooks, find_hooks
from gpunode.cdi.nodes import read_nodes
from gpunode.dataclass import dataclass, replace
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.facts.driver import loaded_module
from gpunode.facts.libraries import NVML, library_in
from gpunode.facts.system import node_class
from gpunode.gpu.isolated import NvmlProbe, probe
from gpunode.gpu.model import Inventory
from gpunode.host import Host

_VERSION_MISMATCH = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH
NVML_SECONDS = 60.0  # without persistence, sixteen GPUs take half a minute to wake up


@dataclass(frozen=True)
class Sources:
    """Where the driver is. `hooks` is auto (NVIDIA's hooks where their program is) or none.

    `hook_path` and `ldconfig` name these programs, "" for those that are found. `sockets` is whether the
    sockets of NVIDIA's daemons are mounted. `device_ids` limits the devices, () for all.
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
    """The specification of this node as it is now. `GpunodeError` says why there can be none."""
    refuse_other_platforms(host)
    driver = "" if sources.driver_root in ("", "/") else sources.driver_root.rstrip("/")
    dev = (sources.dev_root or driver).rstrip("/")
    inventory = _inventory(host, driver, sources)
    nodes = read_nodes(host, inventory.gpus, dev)
    files = read_driver_files(host, inventory.driver_version, driver, sources.library_path)
    files = files if sources.sockets else replace(files, sockets=())
    chosen = chosen_devices(inventory, sources.device_ids)
    return build(chosen, nodes, files, _hooks(host, sources), form)


def _hooks(host: Host, sources: Sources) -> HookProgram | None:
    if sources.hooks != "auto":
        return None
    path = sources.hook_path
    program = ask_hooks(host, path) if path else find_hooks(host)
    if path and program is None:
        raise PreconditionError(
            f"{path} is no hook program of NVIDIA's: it doesn't list the hook update-ldcache",
            hint="name nvidia-cdi-hook or nvidia-ctk, or do without hooks: --hooks none",
            code="no-hooks",
        )
    if program is None:
        return None
    known, ldconfig = program.known - sources.disabled_hooks, sources.ldconfig or program.ldconfig
    return replace(program, known=known, ldconfig=ldconfig)


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
    return replace(inventory, gpus=tuple(gpus))


def refuse_other_platforms(host: Host) -> None:
    """WSL2 and Tegra have neither /dev/nvidiaN nor NVML's minors: other files make a GPU there."""
    mode = {"wsl2": "wsl", "tegra": "csv"}.get(node_class(host))
    if mode is not None:
        raise PreconditionError(
            f"gpunode describes GPUs of NVIDIA's Linux driver, not those of {node_class(host)}",
            hint=f"nvidia-ctk cdi generate --mode={mode} --output=/var/run/cdi/nvidia.yaml",
            code="platform",
        )


def _inventory(host: Host, driver: str, sources: Sources) -> Inventory:
    """NVML's answer, from the library of another root if one is given."""
    other = driver or sources.library_path
    library = library_in(host, driver, NVML, sources.library_path) if other else ""
    answer = probe(host, sources.timeout, library=library)
    if answer.inventory is None:
        raise no_inventory(host, answer)
    if not answer.inventory.driver_version:
        raise GpunodeError("NVML doesn't tell the driver's version", hint="gpunode doctor", code="nvml")
    return answer.inventory


def no_inventory(host: Host, answer: NvmlProbe) -> GpunodeError:
    """Why NVML told nothing, and what mends it."""
    if loaded_module(host) is None:
        return PreconditionError(
            "the NVIDIA driver isn't loaded, so there is nothing to describe",
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
