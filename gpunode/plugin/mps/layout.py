"""The control daemons and the paths of their files. Pure.

::

    <mps-root>/<resource>/pipe    what clients reach the daemon by (CUDA_MPS_PIPE_DIRECTORY)
    <mps-root>/<resource>/log     control.log
    <mps-root>/<resource>/.started, <mps-root>/.ready, <mps-root>/shm

is the layout of NVIDIA's plugin and its own daemon, so each can be exchanged alone. Where a container can't
have more than one share each GPU gets a daemon of its own instead, in ``<mps-root>/<resource>/<gpu>/``: a
client then sees exactly its GPU (CUDA_VISIBLE_DEVICES of the daemon decides what clients see), a daemon that
has to be restarted costs one GPU, and containers of different users, which one daemon serves only after each
other (nvidia-cuda-mps-control(1)), meet on the same GPU only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.plugin.config.settings import MPS_ROOT, SOCKET_BYTES, Settings
from gpunode.plugin.logfmt import Log
from gpunode.plugin.model import AllocationError, ContainerMount, KubeletDevice, Problem, Resource, Unit

MPS = "mps"
_LONGEST_SOCKET = "control_privileged"  # of the four that the daemon makes
_MIB = 1 << 20
NOT_YET = Problem("mps", "the MPS control daemon is not running yet", starting=True)
_SHORT = 12  # "GPU-" and the first block of the UUID


@dataclass(frozen=True)
class DaemonSpec:
    """One control daemon. `gpus` are UUIDs in the order in which it and its clients count them.

    `percentage` of the threads and `memory` in MiB for each of `gpus` are a client's limits; 100 and 0 mean
    no limit.
    """

    resource: str
    gpus: tuple[str, ...]
    directory: str
    percentage: int = 100
    memory: tuple[int, ...] = ()

    @property
    def pipe(self) -> str:
        return f"{self.directory}/pipe"

    @property
    def log(self) -> str:
        return f"{self.directory}/log"

    @property
    def started(self) -> str:
        return f"{self.directory}/.started"

    @property
    def path_problem(self) -> str:
        """Why the daemon couldn't listen there: it would end without a message. Empty if it can."""
        length = len(f"{self.pipe}/{_LONGEST_SOCKET}".encode())
        if length <= SOCKET_BYTES:
            return ""
        return f"{self.pipe} is {length - SOCKET_BYTES} bytes too long for the daemon's sockets"


def root_of(settings: Settings) -> str:
    return settings.mps_root.rstrip("/") or MPS_ROOT


def shared_units(resource: Resource) -> tuple[Unit, ...]:
    """The units with shares: those that a daemon serves. MIG devices never are."""
    counts = resource.share_counts
    return tuple(unit for unit in resource.units if unit.id in counts and not unit.partition)


def per_gpu(settings: Settings, resource: Resource) -> bool:
    """Whether each GPU of a resource has a daemon of its own.

    Only where the daemons are ours, and no container can span two of them.
    """
    return settings.mps and resource.single_share and len(resource.share_counts) > 1


def directory_of(settings: Settings, resource: Resource, unit: Unit) -> str:
    """Directory of the daemon that serves this unit."""
    base = f"{root_of(settings)}/{resource.name}"
    if not per_gpu(settings, resource):
        return base
    alike = sum(other_id[:_SHORT] == unit.id[:_SHORT] for other_id in resource.share_counts)
    name = unit.id if alike > 1 else unit.id[:_SHORT]
    return f"{base}/{name.replace('/', '_')}"


def memory_share(unit: Unit, shares: int, held: int = 1) -> int:
    """MiB of memory for `held` shares of a unit; 0 if its size isn't known."""
    return unit.memory_bytes * held // shares // _MIB


def thread_share(shares: int, held: int = 1) -> int:
    """Percent of the threads, at least 1: the daemon accepts whole numbers above 0."""
    return max(1, 100 * held // shares)


def daemon_specs(settings: Settings, resources: Iterable[Resource]) -> tuple[DaemonSpec, ...]:
    """The daemons that these resources require; MIG devices have none.

    A client's own limit can only lower the daemon's (NVIDIA's MPS documentation, CUDA_MPS_PINNED_DEVICE_MEM_
    LIMIT). So a daemon limits every client to one share where no container can have more, and sets no limit
    where shares add up: there the containers have their own limits.
    """
    specs = []
    for resource in resources:
        units = shared_units(resource) if resource.sharing == MPS else ()
        if not units:
            continue
        groups = [[unit] for unit in units] if per_gpu(settings, resource) else [list(units)]
        specs += [_spec(settings, resource, group, resource.single_share) for group in groups]
    return tuple(specs)


def _spec(settings: Settings, resource: Resource, units: list[Unit], limited: bool) -> DaemonSpec:
    count = resource.share_counts
    return DaemonSpec(
        resource.name,
        tuple(unit.id for unit in units),
        directory_of(settings, resource, units[0]),
        # one number for all GPUs of a daemon: the largest that any of them needs
        max(thread_share(count[unit.id]) for unit in units) if limited else 100,
        tuple(memory_share(unit, count[unit.id]) if limited else 0 for unit in units),
    )


# The directories that a daemon and its clients share.

_SHM = "/dev/shm"  # noqa: S108 - a mount of the node, nothing of ours is in there
_LABEL = "system_u:object_r:container_file_t:s0"


def prepare(host: Host, spec: DaemonSpec, root: str, log: Log) -> None:
    """Create missing directories. `DaemonError` or `Unreadable` says why a daemon couldn't serve there."""
    if spec.path_problem:
        raise DaemonError(spec.path_problem, hint="choose a shorter --mps-root, such as /run/mps")
    for directory in (spec.pipe, spec.log):
        host.make_dirs(directory)
    _share_memory(host, root, log)
    _label(host, spec.pipe, log)


def _share_memory(host: Host, root: str, log: Log) -> None:
    """`root`/shm must be the daemon's own /dev/shm: clients and servers meet there, too.

    If missing it becomes a link to /dev/shm. An existing one, a separate file system as with NVIDIA's plugin,
    must be mounted on this process's /dev/shm, which a daemon inherits.
    """
    shm = f"{root}/shm"
    if not host.exists(shm) and not host.is_symlink(shm):
        if host.environ.get("KUBERNETES_SERVICE_HOST"):
            raise DaemonError(
                f"{shm} is missing, and this is a container: its {_SHM} is not the node's",
                hint=f"mount a tmpfs of the node at {shm}, and that at {_SHM} of this container",
            )
        host.make_dirs(root)
        try:
            host.make_link(shm, _SHM)
        except FileExistsError:
            pass  # another daemon's thread was faster
        except OSError as error:
            raise DaemonError(f"{shm} can't be made: {error.strerror}") from error
    mounted, own = host.stat(shm), host.stat(_SHM)
    if mounted is None or own is None or (mounted.st_dev, mounted.st_ino) != (own.st_dev, own.st_ino):
        raise DaemonError(
            f"{shm}, which containers get as {_SHM}, is not this process's own {_SHM}: "
            "clients would not find the server",
            hint=f"remove {shm}, or give this service BindPaths={shm}:{_SHM} (systemd.exec(5))",
        )
    if own.st_mode & 0o1777 != 0o1777 and host.environ.get("KUBERNETES_SERVICE_HOST"):
        # the kubelet makes it for root alone; processes of every user share it with their MPS server
        host.set_mode(shm, 0o1777)
        log.info("opened the shared memory of MPS to all users", directory=shm)


def _label(host: Host, pipe: str, log: Log) -> None:
    """Let confined containers use the sockets."""
    if not host.exists("/sys/fs/selinux/enforce"):
        return
    done = host.run(["chcon", "-R", _LABEL, pipe], timeout=10.0)
    if not done.ok:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.code}"])[-1]
        log.warning(
            "SELinux label not set: confined containers may not reach the MPS daemon",
            directory=pipe,
            reason=reason,
            hint=f"chcon -R {_LABEL} {pipe}",
        )


# What a container of an MPS-shared resource gets in addition to its GPUs. Pure.

PIPE = "CUDA_MPS_PIPE_DIRECTORY"
THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_OLD_CLIENTS, _CLIENTS, _NEW_CLIENTS = 16, 48, 60


def limit(compute_capability: str, cuda_version: str = "") -> int:
    """How many clients one GPU can have.

    nvidia-cuda-mps-control(1): 16 up to compute capability 6.x, 48 from 7.0 on; NVIDIA's MPS documentation of
    release 590: 60, since CUDA 13.1. `cuda_version` is the driver's. An unknown capability counts as a
    current one.
    """
    capability = _numbers(compute_capability)
    if capability and capability < (7, 0):
        return _OLD_CLIENTS
    return _NEW_CLIENTS if _numbers(cuda_version) >= (13, 1) else _CLIENTS


def container_parts(
    settings: Settings, resource: Resource, devices: Iterable[KubeletDevice]
) -> tuple[dict[str, str], list[ContainerMount]]:
    """Environment and mounts for these devices of a resource that is shared with MPS.

    The limits grow with the shares: k of N shares of a GPU may use k/N of its memory, and of its threads. A
    variable holds one percentage for all GPUs of a container, so the smallest counts. Shares of several
    daemons never meet here: `model.requested_devices` refuses more than one share where each GPU has its own.
    """
    counts = _share_counts(devices)
    if not counts:
        return {}, []  # whole GPUs that the configuration doesn't share
    shares = resource.share_counts
    units = [unit for unit in resource.units if unit.id in counts]
    mib = {unit.id: memory_share(unit, shares[unit.id], counts[unit.id]) for unit in units}
    pipe = f"/mps/{resource.name}/pipe"
    env = {
        PIPE: pipe,
        THREADS: str(min(thread_share(shares[unit.id], counts[unit.id]) for unit in units)),
        **_memory(settings, resource, mib),
        **_visible(settings, resource, units),
    }
    return env, [
        ContainerMount(f"{directory_of(settings, resource, units[0])}/pipe", pipe),
        ContainerMount(f"{root_of(settings)}/shm", "/dev/shm"),  # noqa: S108 - where CUDA looks for it
    ]


def _share_counts(devices: Iterable[KubeletDevice]) -> Counter[str]:
    """The number of shares of each shared unit among these devices; empty if there are only whole units."""
    by_id = {device.id: device for device in devices}
    whole = [device.id for device in by_id.values() if device.id == device.unit.id]
    counts = Counter(device.unit.id for device in by_id.values() if device.id != device.unit.id)
    if whole and counts:
        raise AllocationError(
            f"{whole[-1]} is a whole GPU: an MPS client could not see it; request either shares or whole GPUs"
        )
    return counts


def _memory(settings: Settings, resource: Resource, mib: Mapping[str, int]) -> dict[str, str]:
    """One limit for each GPU of known size.

    Indexes are those of the daemon; with more than one GPU there, or with a daemon of another owner, only the
    UUID is unambiguous, and the variable accepts it.
    """
    alone = settings.mps and (len(resource.share_counts) == 1 or per_gpu(settings, resource))
    limits = [f"{0 if alone else unit}={size}M" for unit, size in mib.items() if size]
    return {MEMORY: ",".join(limits)} if limits else {}


def _visible(settings: Settings, resource: Resource, units: Sequence[Unit]) -> dict[str, str]:
    """A client sees all GPUs of the daemon, including those that its container wasn't given.

    So where a daemon has several, the container names its own by UUID: the daemon renumbers them.
    """
    if per_gpu(settings, resource) or (settings.mps and len(resource.share_counts) == 1):
        return {}
    return {VISIBLE: ",".join(unit.id for unit in units)}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
