"""Who stands in the way of a plan: processes on what goes, holders of a GPU that must be reset, pods.

An instance goes only while nobody uses it; the others of its GPU may work on. A mode that takes a reset wants
no client of the GPU at all: no monitoring, no persistence daemon, and no nvidia_drm
(https://github.com/NVIDIA/mig-parted/issues/181).
"""

from __future__ import annotations

import re
import shlex  # names are the processes' and the runtimes' own, and hints are copied into a shell
from collections.abc import Iterator, Mapping, Sequence

from gpunode.cdi.nodes import MIG_MINORS, mig_minors
from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.gpu_files import opened
from gpunode.facts.node import Node
from gpunode.facts.workloads import container_of
from gpunode.gpu.mig import MigProcess
from gpunode.host import Host
from gpunode.mig.layout import GpuLayout
from gpunode.mig.plan import Device, GpuPlan

DRM = "nvidia_drm"
_UNIT = re.compile(r"([^/:]+\.service)(?=/|$)")
_ENGINE = re.compile(r"(docker|libpod)[-/][0-9a-f]{64}", re.ASCII)
_INSTANCE = re.compile(r"gpu(\d+)/gi(\d+)(?:/ci(\d+))?/access", re.ASCII)

Held = tuple[int, int | None, int | None]
"""A GPU's minor number, and the ids of a GPU instance and a compute instance; None for any."""


@dataclass(frozen=True)
class Obstacle:
    """One thing in the way of a GPU's plan. `kind` is process, pod or module.

    `what` is what it uses. `container` is its engine's id, `engine` docker or podman if that one runs it as
    root; `pod` is NAMESPACE/NAME; `unit` is systemd's for it. `drain` is what to give to ``--drain`` to have
    it stopped, empty for a pod, which others must end.
    """

    kind: str
    gpu: int
    what: str
    name: str
    pid: int = 0
    container: str = ""
    pod: str = ""
    unit: str = ""
    engine: str = ""

    @property
    def drain(self) -> str:
        if self.engine:
            return f"{self.engine}:{self.container[:12]}"
        if self.kind == "pod" or self.container:
            return ""
        return self.unit or (str(self.pid) if self.pid else self.name)

    @property
    def text(self) -> str:
        """For people."""
        who = f"{self.name} (process {self.pid})" if self.pid else f"{self.kind} {self.name}"
        inside = f" of pod {self.pod}" if self.pod else ""
        inside = inside or (f" in container {self.container[:12]}" if self.container else "")
        inside = inside or (f" of {self.unit}" if self.unit else "")
        return f"{who}{inside} {'holds' if self.kind == 'pod' else 'uses'} {self.what}"


class InUse(PreconditionError):
    """Refused: `obstacles` are in the way."""

    default_code = "mig-busy"

    def __init__(self, obstacles: Sequence[Obstacle]) -> None:
        words = dict.fromkeys(shlex.quote(one.drain) for one in obstacles if one.drain)
        stop = "".join(f" --drain {word}" for word in words)
        others = dict.fromkeys(_end(one) for one in obstacles if not one.drain)
        hints = [f"have them stopped:{stop}"] if stop else []
        hints += [f"end first: {', '.join(others)}"] if others else []
        super().__init__("; ".join(one.text for one in obstacles), hint="; ".join(hints))
        self.obstacles = tuple(obstacles)


def _end(one: Obstacle) -> str:
    """How to end what --drain doesn't stop."""
    namespace, _, pod = (one.pod or (one.name if one.kind == "pod" else "")).partition("/")
    if not pod:
        return f"{one.name} (process {one.pid})"
    return shlex.join(("kubectl", "delete", "pod", "-n", namespace, pod))


def obstacles(
    node: Node, plans: Sequence[GpuPlan], processes: Mapping[str, Sequence[MigProcess]], ours: frozenset[int]
) -> tuple[Obstacle, ...]:
    """What stands in the way of these plans. `processes` are NVML's by GPU UUID, `ours` our own process ids.

    Files that this user may not read say nothing; only root sees everybody's.
    """
    caps = {number: name for name, number in mig_minors(_text(node.host, MIG_MINORS)).items()}
    held: dict[int, tuple[Held, ...]] = {}
    if any(_changes(plan) for plan in plans):
        for process in node.processes:
            if process.pid not in ours:
                held[process.pid] = tuple(_held(node, process.pid, caps))
    who = _Who(node)
    found = [
        one for plan in plans for one in _of(node, who, plan, held, processes.get(plan.gpu.uuid, ()), ours)
    ]
    named = {(one.gpu, one.pod) for one in found if one.pod}
    return tuple(
        one for one in found if one.kind != "pod" or (one.gpu, one.name) not in named - {(one.gpu, "")}
    )


def _changes(plan: GpuPlan) -> bool:
    return bool(plan.lost) or plan.changes_mode


def _of(
    node: Node,
    who: _Who,
    plan: GpuPlan,
    held: Mapping[int, Sequence[Held]],
    processes: Sequence[MigProcess],
    ours: frozenset[int],
) -> Iterator[Obstacle]:
    gpu = plan.gpu
    users: dict[int, str] = {}
    for process in processes:
        what = _used(plan, process.gi, process.ci)
        if what and process.pid not in ours:
            users.setdefault(process.pid, what)
    resets = plan.changes_mode and plan.reset != "none"
    for pid, files in held.items():
        for minor, gi, ci in files:
            if minor != gpu.minor or (gi is None and not resets):
                continue
            what = _used(plan, gi, ci)
            if what:
                users.setdefault(pid, what)
    yield from (who.is_(pid, gpu.index, what) for pid, what in sorted(users.items()))
    if resets and _draws(node.host):
        yield Obstacle("module", gpu.index, f"GPU {gpu.index}, which must be reset", DRM)
    if _changes(plan):
        yield from _pods(node, plan)


def _used(plan: GpuPlan, gi: int | None, ci: int | None) -> str:
    """What of that which goes is used by whoever has these instances open; empty for none of it."""
    gpu = plan.gpu
    if plan.changes_mode:
        return f"GPU {gpu.index}" + (", which must be reset" if plan.reset != "none" else "")
    stays = {one.gi for one in plan.kept}
    for one in plan.lost:
        if gi == one.gi and (ci == one.ci or (ci is None and one.gi not in stays)):
            return _device(gpu, one)
    return ""


def _device(gpu: GpuLayout, device: Device) -> str:
    return f"the {device.profile} at {device.at} of GPU {gpu.index}"


def _pods(node: Node, plan: GpuPlan) -> Iterator[Obstacle]:
    """Pods to which the kubelet has given what goes, whether they use it now or not. One that was given the
    whole GPU sees its instances."""
    if node.kubelet is None or not node.host.live:
        return
    try:
        holdings = node.gpu_holdings
    except GpunodeError:
        return  # see `untold`
    gone = {one.uuid: _device(plan.gpu, one) for one in plan.lost if one.uuid}
    gone[plan.gpu.uuid] = f"GPU {plan.gpu.index}"
    for holding in holdings:
        for identifier in holding.ids:
            what = gone.get(identifier.partition("::")[0])
            if what:
                yield Obstacle("pod", plan.gpu.index, what, f"{holding.namespace}/{holding.pod}")


def untold(node: Node, plans: Sequence[GpuPlan]) -> str:
    """Why it can't be told which pods hold what goes, in words; empty if it can, or nothing goes."""
    if node.kubelet is None or not node.host.live or not any(_changes(plan) for plan in plans):
        return ""
    try:
        list(node.gpu_holdings)
    except GpunodeError as error:
        return f"which pods hold what goes isn't known: {error.message}"
    return ""


def _draws(host: Host) -> bool:
    """Whether nvidia_drm holds the GPUs: with modeset off it is loaded and has none open."""
    if not host.is_dir(f"/sys/module/{DRM}"):
        return False
    return _text(host, f"/sys/module/{DRM}/parameters/modeset").strip() != "N"


def _held(node: Node, pid: int, caps: Mapping[int, str]) -> Iterator[Held]:
    """What a process has open of GPUs and their instances; `caps` is the driver's table by minor number."""
    files = opened(node.host, pid, node.majors)
    if files is None:
        return  # not ours to see
    yield from ((minor, None, None) for minor in sorted(files.gpus))
    for number in sorted(files.caps):
        if names := _INSTANCE.fullmatch(caps.get(number, "")):
            yield int(names[1]), int(names[2]), int(names[3]) if names[3] else None


def _text(host: Host, path: str) -> str:
    try:
        return host.read_text(path) or ""
    except GpunodeError:
        return ""


class _Who:
    """Names processes: program, systemd unit, container, pod."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._names = {process.pid: process.name for process in node.processes}
        self._pods: Mapping[str, str] | None = None

    def is_(self, pid: int, gpu: int, what: str) -> Obstacle:
        """The process as an obstacle."""
        host = self._node.host
        container, group, v1 = container_of(host, pid)
        engine = _ENGINE.search(f"{group} {v1}") if "user@" not in group else None
        units = _UNIT.findall(_text(host, f"/proc/{pid}/cgroup").replace("\n", "/"))
        unit = units[-1] if units and not container and not units[-1].startswith("user@") else ""
        said = self._names.get(pid) or _text(host, f"/proc/{pid}/comm")
        name = " ".join(said.split()) or "a process"  # a name may hold line breaks
        pod = self._pod(container)
        runs = {"docker": "docker", "libpod": "podman"}[engine[1]] if engine and not pod else ""
        return Obstacle("process", gpu, what, name, pid, container, pod, unit, runs)

    def _pod(self, container: str) -> str:
        if not container:
            return ""
        if self._pods is None:
            found = {one.id: f"{one.namespace}/{one.pod}" for one in self._node.cri_containers}
            self._pods = found
        return self._pods.get(container, "")
