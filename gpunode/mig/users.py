"""What blocks a plan: processes on instances to destroy, users of a GPU that must be reset, pods.

An instance can be destroyed only while no process uses it; the others of its GPU may stay in use. A mode
change that needs a reset requires that the GPU has no client at all: no monitoring, no persistence daemon,
and no nvidia_drm (https://github.com/NVIDIA/mig-parted/issues/181).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from gpunode.cdi.nodes import MIG_MINORS, mig_minors
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.facts.daemons import process_unit
from gpunode.facts.device_plugins import keeps_nvml_open, status_path
from gpunode.facts.devices import open_devices
from gpunode.facts.node import Node
from gpunode.facts.processes import Process, identifies, running, start_ticks, status_fields
from gpunode.facts.workloads import container_of
from gpunode.host import PLUGIN_STATE, Host
from gpunode.host.process import Completed
from gpunode.mig.model import GpuLayout
from gpunode.mig.plan import GpuPlan, PresentDevice
from gpunode.mig.session import MigProcess
from gpunode.output.result import Progress

DRM = "nvidia_drm"
_UNIT = re.compile(r"([^/:]+\.service)(?=/|$)")
_ENGINE = re.compile(r"(docker|libpod)[-/][0-9a-f]{64}", re.ASCII)
_INSTANCE = re.compile(r"gpu(\d+)/gi(\d+)(?:/ci(\d+))?/access", re.ASCII)

Held = tuple[int, int | None, int | None]
"""A GPU's minor number, and the ids of a GPU instance and a compute instance; None for any."""


class Obstacle(NamedTuple):
    """One obstacle to a GPU's plan. `kind` is process, pod or module.

    `what` is the device or instance that it uses. `container` is its engine's id, `engine` docker or podman
    if that one runs it as root; `pod` is NAMESPACE/NAME; `unit` is its systemd unit. `drain` is the value of
    ``--drain`` that stops it, empty for a pod, which the user must delete.
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
        """The obstacle as text for the user."""
        user = f"{self.name} (process {self.pid})" if self.pid else f"{self.kind} {self.name}"
        inside = f" of pod {self.pod}" if self.pod else ""
        inside = inside or (f" in container {self.container[:12]}" if self.container else "")
        inside = inside or (f" of {self.unit}" if self.unit else "")
        return f"{user}{inside} {'holds' if self.kind == 'pod' else 'uses'} {self.what}"


class GpusInUseError(PreconditionError):
    """The plan is refused because of `obstacles`."""

    default_code = "mig-busy"

    def __init__(self, obstacles: Sequence[Obstacle]) -> None:
        words = dict.fromkeys(shlex.quote(obstacle.drain) for obstacle in obstacles if obstacle.drain)
        stop = "".join(f" --drain {word}" for word in words)
        others = dict.fromkeys(_end_clients(obstacle) for obstacle in obstacles if not obstacle.drain)
        hints = [f"stop them with:{stop}"] if stop else []
        hints += [f"end first: {', '.join(others)}"] if others else []
        super().__init__("; ".join(obstacle.text for obstacle in obstacles), hint="; ".join(hints))
        self.obstacles = tuple(obstacles)


def _end_clients(obstacle: Obstacle) -> str:
    """How to end what --drain can't stop."""
    namespace, _, pod = (obstacle.pod or (obstacle.name if obstacle.kind == "pod" else "")).partition("/")
    if not pod:
        return f"{obstacle.name} (process {obstacle.pid})"
    return shlex.join(("kubectl", "delete", "pod", "-n", namespace, pod))


def obstacles(
    node: Node,
    plans: Sequence[GpuPlan],
    processes: Mapping[str, Sequence[MigProcess]],
    own_pids: frozenset[int],
) -> tuple[Obstacle, ...]:
    """The obstacles to these plans. `processes` are NVML's by GPU UUID, `own_pids` our own process ids.

    Files that this user may not read are skipped; only root can read those of every process.
    """
    caps = {number: name for name, number in mig_minors(node.host.text_or_empty(MIG_MINORS)).items()}
    open_files: dict[int, tuple[Held, ...]] = {}
    if any(_changes(plan) for plan in plans):
        for process in node.processes:
            if process.pid not in own_pids:
                open_files[process.pid] = tuple(_open_devices(node, process.pid, caps))
    result = [
        obstacle
        for plan in plans
        for obstacle in _obstacles_of(node, plan, open_files, processes.get(plan.gpu.uuid, ()), own_pids)
    ]
    pods = {(obstacle.gpu, obstacle.pod) for obstacle in result if obstacle.pod}
    return tuple(
        obstacle
        for obstacle in result
        if obstacle.kind != "pod" or (obstacle.gpu, obstacle.name) not in pods - {(obstacle.gpu, "")}
    )


def _changes(plan: GpuPlan) -> bool:
    return bool(plan.lost) or plan.changes_mode


def _obstacles_of(
    node: Node,
    plan: GpuPlan,
    open_files: Mapping[int, Sequence[Held]],
    processes: Sequence[MigProcess],
    own_pids: frozenset[int],
) -> Iterator[Obstacle]:
    gpu = plan.gpu
    users: dict[int, str] = {}
    for process in processes:
        what = _used(plan, process.gi, process.ci)
        if what and process.pid not in own_pids:
            users.setdefault(process.pid, what)
    resets = plan.changes_mode and plan.reset != "none"
    for pid, files in open_files.items():
        for minor, gi, ci in files:
            if minor != gpu.minor or (gi is None and not resets):
                continue
            what = _used(plan, gi, ci)
            if what:
                users.setdefault(pid, what)
    yield from (_obstacle(node, pid, gpu.index, what) for pid, what in sorted(users.items()))
    if resets and _draws(node.host):
        yield Obstacle("module", gpu.index, f"GPU {gpu.index}, which must be reset", DRM)
    if _changes(plan):
        yield from _pods(node, plan)


def _used(plan: GpuPlan, gi: int | None, ci: int | None) -> str:
    """The device to destroy that a process with these instances open uses; empty for none."""
    gpu = plan.gpu
    if plan.changes_mode:
        return f"GPU {gpu.index}" + (", which must be reset" if plan.reset != "none" else "")
    stays = {device.gi for device in plan.kept}
    for device in plan.lost:
        if gi == device.gi and (ci == device.ci or (ci is None and device.gi not in stays)):
            return _device(gpu, device)
    return ""


def _device(gpu: GpuLayout, device: PresentDevice) -> str:
    return f"the {device.profile} at {device.at} of GPU {gpu.index}"


def _pods(node: Node, plan: GpuPlan) -> Iterator[Obstacle]:
    """Pods to which the kubelet has allocated what the plan destroys, in use or not.

    A pod with the whole GPU sees its instances.
    """
    if node.kubelet is None or not node.host.live:
        return
    try:
        holdings = node.gpu_holdings
    except GpunodeError:
        return  # see `untold`
    lost = {device.uuid: _device(plan.gpu, device) for device in plan.lost if device.uuid}
    lost[plan.gpu.uuid] = f"GPU {plan.gpu.index}"
    for holding in holdings:
        for identifier in holding.ids:
            what = lost.get(identifier.partition("::")[0])
            if what:
                yield Obstacle("pod", plan.gpu.index, what, f"{holding.namespace}/{holding.pod}")


def untold(node: Node, plans: Sequence[GpuPlan]) -> str:
    """Why the pods that use instances to destroy are unknown, as text.

    Empty if they are known, or if nothing is destroyed.
    """
    if node.kubelet is None or not node.host.live or not any(_changes(plan) for plan in plans):
        return ""
    try:
        node.gpu_holdings  # noqa: B018 - its error is the answer
    except GpunodeError as error:
        return f"can't list the pods that hold the devices to be destroyed: {error.message}"
    return ""


def _draws(host: Host) -> bool:
    """Whether nvidia_drm holds the GPUs: with modeset off it is loaded and has none open."""
    if not host.is_dir(f"/sys/module/{DRM}"):
        return False
    return host.text_or_empty(f"/sys/module/{DRM}/parameters/modeset").strip() != "N"


def _open_devices(node: Node, pid: int, caps: Mapping[int, str]) -> Iterator[Held]:
    """The GPUs and instances that a process has open; `caps` is the driver's table by minor number."""
    files = open_devices(node.host, pid, node.majors)
    if files is None:
        return  # not readable for this user
    yield from ((minor, None, None) for minor in sorted(files.gpus))
    for number in sorted(files.caps):
        if names := _INSTANCE.fullmatch(caps.get(number, "")):
            yield int(names[1]), int(names[2]), int(names[3]) if names[3] else None


def _obstacle(node: Node, pid: int, gpu: int, what: str) -> Obstacle:
    """A process as an obstacle, with its program, systemd unit, container and pod."""
    host = node.host
    container, group, v1 = container_of(host, pid)
    engine = _ENGINE.search(f"{group} {v1}") if "user@" not in group else None
    units = _UNIT.findall(host.text_or_empty(f"/proc/{pid}/cgroup").replace("\n", "/"))
    unit = units[-1] if units and not container and not units[-1].startswith("user@") else ""
    names = (process.name for process in node.processes if process.pid == pid)
    command = next(names, "") or host.text_or_empty(f"/proc/{pid}/comm")
    name = " ".join(command.split()) or "a process"  # a name may contain line breaks
    pods = (entry for entry in (node.cri_containers if container else ()) if entry.id == container)
    pod = next((f"{entry.namespace}/{entry.pod}" for entry in pods), "")
    runs = {"docker": "docker", "libpod": "podman"}[engine[1]] if engine and not pod else ""
    return Obstacle("process", gpu, what, name, pid, container, pod, unit, runs)


# Stop what the user names so that the GPUs become free, and restart what can be restarted.

_STOP_SECONDS = 120.0
_TERM_SECONDS = 30.0
_CONTAINER = re.compile(r"(docker|podman):([0-9a-f]{12})", re.ASCII)
_DRAIN_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]{1,255}", re.ASCII)


class StoppedUsers(NamedTuple):
    """What was stopped.

    Units, containers (ENGINE:ID) and nvidia_drm, if it was unloaded, are restarted; processes are not.
    """

    units: tuple[str, ...] = ()
    module: bool = False
    pids: tuple[int, ...] = ()
    containers: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return (
            *self.units,
            *((DRM,) if self.module else ()),
            *map(str, self.pids),
            *self.containers,
        )

    @property
    def restart_commands(self) -> tuple[tuple[str, ...], ...]:
        """The commands that restart it."""
        return tuple(argv for argv, _ in self.parts())

    def parts(self) -> Iterator[tuple[tuple[str, ...], StoppedUsers]]:
        """Each of these commands, with what it restarts."""
        if self.module:
            yield ("modprobe", DRM), StoppedUsers(module=True)
        for unit in self.units:
            yield ("systemctl", "start", unit), StoppedUsers(units=(unit,))
        for container in self.containers:
            engine, _, identifier = container.partition(":")
            yield (engine, "start", identifier), StoppedUsers(containers=(container,))

    def plus(self, other: StoppedUsers) -> StoppedUsers:
        """The two combined."""
        return StoppedUsers(
            (*self.units, *other.units),
            self.module or other.module,
            (*self.pids, *other.pids),
            (*self.containers, *other.containers),
        )


_NOTHING = StoppedUsers()


def drain(
    host: Host,
    words: Sequence[str],
    blocking: Sequence[Obstacle],
    progress: Progress,
    done: StoppedUsers = _NOTHING,
    keep: Callable[[StoppedUsers], None] = lambda _: None,
) -> StoppedUsers:
    """Stop what `words` name: units, process ids, containers, or nvidia_drm.

    All are checked before the first is stopped. `done` is already stopped; `keep` is called with what will
    be, each time before it is stopped.

    `UsageError` for a process or container that isn't an obstacle: its number may be another process's by
    now. `PreconditionError` for what doesn't stop; then restart what the last call of `keep` received.
    """
    desired = [word for word in dict.fromkeys(words) if not _rests(word, done, blocking)]
    for word in desired:
        _check(word, blocking)
    for word in desired:
        done = _stop(host, word, done, progress, keep)
    return done


def _rests(word: str, done: StoppedUsers, blocking: Sequence[Obstacle]) -> bool:
    """Whether a killed run has stopped it: it was an obstacle, and no longer is."""
    stopped = word in done.containers or word in map(str, done.pids)
    return stopped and word not in {str(obstacle.pid) for obstacle in blocking if obstacle.pid} | {
        obstacle.drain for obstacle in blocking
    }


def _check(word: str, blocking: Sequence[Obstacle]) -> None:
    if word.isascii() and word.isdigit():
        pids = {obstacle.pid for obstacle in blocking if obstacle.pid}
        if int(word) not in pids:
            known = ", ".join(map(str, sorted(pids))) or "none"
            raise UsageError(
                f"process {word} does not block the change", hint=f"processes that block it: {known}"
            )
    elif word.startswith(("docker:", "podman:")):
        containers = sorted({obstacle.drain for obstacle in blocking if obstacle.engine})
        if word not in containers:
            known = ", ".join(containers) or "none"
            raise UsageError(
                f"container {word} does not block the change", hint=f"containers that block it: {known}"
            )
    elif not _DRAIN_UNIT.fullmatch(word) or word.startswith("-"):
        raise UsageError(
            f"{word!r} can't be drained",
            hint="name a systemd unit, a process id, a container (docker:ID), or nvidia_drm",
        )


def _stop(
    host: Host, word: str, done: StoppedUsers, progress: Progress, keep: Callable[[StoppedUsers], None]
) -> StoppedUsers:
    if word.isdigit():
        now = done._replace(pids=_appended(done.pids, int(word)))
        keep(now)
        _end(host, int(word), progress)
        return now
    if container := _CONTAINER.fullmatch(word):
        now = done._replace(containers=_appended(done.containers, word))
        argv: tuple[str, ...] = (container[1], "stop", "-t", f"{_TERM_SECONDS:g}", container[2])
    elif word == DRM:
        now, argv = done._replace(module=True), ("modprobe", "-r", DRM)
    else:
        unit = word if "." in word else f"{word}.service"
        if not host.run(("systemctl", "is-active", "--quiet", unit), timeout=10.0).ok:
            if unit not in done.units:
                progress.info(f"{unit} isn't running")
            return done
        now, argv = done._replace(units=_appended(done.units, unit)), ("systemctl", "stop", unit)
    keep(now)
    _call(host, argv, progress, refused=lambda: keep(done))
    return now


_Item = TypeVar("_Item")


def _appended(known: tuple[_Item, ...], item: _Item) -> tuple[_Item, ...]:
    return known if item in known else (*known, item)


def _end(host: Host, pid: int, progress: Progress) -> None:
    with progress.step(f"end process {pid}"):
        try:
            host.signal(pid, "TERM")
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise PreconditionError(
                f"process {pid} can't be ended: {error}", hint="run it as root"
            ) from error
        if not host.wait_until(lambda: not _lives(host, pid), _TERM_SECONDS):
            raise PreconditionError(
                f"process {pid} hasn't ended within {_TERM_SECONDS:g} s of SIGTERM",
                hint="end it yourself, then run this again",
                code="mig-busy",
            )


def _lives(host: Host, pid: int) -> bool:
    try:
        return start_ticks(host, pid) is not None  # a zombie has closed its files
    except GpunodeError:
        return True


def _call(host: Host, argv: tuple[str, ...], progress: Progress, refused: Callable[[], None]) -> None:
    """`refused` if the call certainly failed; after a timeout the service may still stop."""
    with progress.step(" ".join(argv)):
        answer = host.run(argv, timeout=_STOP_SECONDS)
    if not answer.ok:
        if not answer.timed_out:
            refused()
        raise PreconditionError(
            f"{' '.join(argv)}: {_failure(answer)}",
            hint="run the command manually to see its output",
            code="mig-busy",
        )


def _failure(answer: Completed) -> str:
    output = (answer.stderr or answer.stdout).strip().splitlines()
    return "took too long" if answer.timed_out else output[-1] if output else f"exit code {answer.code}"


def bring_back(host: Host, done: StoppedUsers, progress: Progress) -> tuple[tuple[str, ...], StoppedUsers]:
    """Restart what was stopped; return what didn't start, as text and as `StoppedUsers`.

    What no longer exists is reported once, and then dropped.
    """
    troubles, still = [], StoppedUsers()
    for argv, part in done.parts():
        with progress.step(" ".join(argv)):
            answer = host.run(argv, timeout=_STOP_SECONDS)
        if not answer.ok:
            troubles.append(f"{' '.join(argv)} failed: {_failure(answer)}")
            if not _no_longer_exists(argv, answer):
                still = still.plus(part)
    return tuple(troubles), still


def _no_longer_exists(argv: Sequence[str], answer: Completed) -> bool:
    """A unit that isn't installed (LSB's exit code 5), a container that was removed when it stopped."""
    return answer.code == 5 if argv[0] == "systemctl" else "no such container" in answer.stderr.lower()


# gpunode's own services, which keep NVML open: they close it while GPUs are reset, and then read again.
#
# Both are requested by a signal (docs/health.md), in a pod as on the node: this node sees the processes of
# all its containers. Any process can imitate gpunode's command line, so gpunode signals a process, or expects
# it to close NVML, only if its unit identifies it, or its pid and start time are in its own status file.

_CLOSE_SECONDS = 20.0  # usually two; more if the driver responds slowly
_CHILD = "gpunode.gpu.nvml_watcher"
_SIGNALS = {"USR1": 10, "HUP": 1}  # signal(7)


class Clients(NamedTuple):
    """Process ids of those services, and of their children that query NVML."""

    services: tuple[int, ...] = ()
    children: tuple[int, ...] = ()

    @property
    def all(self) -> frozenset[int]:
        """All processes that are not obstacles, because they close NVML."""
        return frozenset((*self.services, *self.children))


def clients(host: Host, processes: Sequence[Process]) -> Clients:
    """The services that are known to be gpunode's and handle both signals, which end any other process."""
    services = tuple(
        process.pid
        for process in processes
        if keeps_nvml_open(process.argv)
        and _heeds(status_fields(host, process.pid))
        and _is_known(host, process)
    )
    parents = set(map(str, services))
    children = tuple(
        process.pid
        for process in processes
        if services and _CHILD in process.argv and status_fields(host, process.pid).get("PPid") in parents
    )
    return Clients(services, children)


def _is_known(host: Host, process: Process) -> bool:
    """Whether gpunode identifies this process as its own.

    It belongs to root (or to the current user) and is the main process of a unit that starts gpunode, or the
    one in a status file of that user.
    """
    trusted = {0, host.uid}
    if host.owner(process.pid) not in trusted:
        return False
    if process_unit(host, process, "gpunode") is not None:
        return True
    state_dir = process.option("--state-dir") or PLUGIN_STATE
    path = status_path(state_dir)
    try:
        seen = host.stat(path)
        text = host.read_text(path) if seen is not None and seen.st_uid in trusted else None
        return identifies(host, json.loads(text), process.pid) if text else False
    except (GpunodeError, ValueError, RecursionError):
        return False


def _heeds(status: Mapping[str, str]) -> bool:
    """Whether both signals are caught, or blocked until they are."""
    caught = int(status.get("SigCgt", "0"), 16) | int(status.get("SigBlk", "0"), 16)
    return all(caught >> (number - 1) & 1 for number in _SIGNALS.values())


class NvmlPause:
    """Keeps NVML closed in gpunode's own services for as long as needed."""

    def __init__(self, host: Host, progress: Progress) -> None:
        self._host, self._progress = host, progress

    @contextmanager
    def if_needed(self, needed: bool) -> Iterator[None]:
        """If `needed`, NVML is closed in them meanwhile. They read again at the end, also after an error."""
        try:
            if needed:
                self.close()
            yield
        finally:
            self._signal(self._clients().services, "HUP")

    def close(self) -> None:
        """Have NVML closed for two minutes from now. `PreconditionError` if a service doesn't close it."""
        services = self._clients().services
        if not services:
            return
        with self._progress.step(f"have gpunode's own services close NVML (process {_numbers(services)})"):
            self._signal(services, "USR1")
            closed = self._host.wait_until(self._is_closed, _CLOSE_SECONDS, 0.2)
        if not closed:
            services = self._clients().services
            raise PreconditionError(
                f"process {_numbers(services)} has not closed NVML within {_CLOSE_SECONDS:g} s",
                hint="read its log, or stop it: --drain gpunode-device-plugin",
                code="mig-busy",
            )

    def _is_closed(self) -> bool:
        """Whether no service has NVML open. One that does gets the signal again: another program's SIGHUP may
        have made it open NVML again, or it may have restarted."""
        open_clients = self._clients()
        if open_clients.children:
            self._signal(open_clients.services, "USR1")
        return not open_clients.children

    def _clients(self) -> Clients:
        return clients(self._host, running(self._host))

    def _is_service(self, pid: int) -> bool:
        return pid in self._clients().services

    def _signal(self, services: Sequence[int], name: str) -> None:
        for pid in services:
            try:
                self._host.signal(pid, name, partial(self._is_service, pid))
            except OSError:
                continue  # it has ended; if it runs and can't be signalled it still holds the GPU's device


def _numbers(pids: Sequence[int]) -> str:
    return ", ".join(map(str, pids))
