"""`gpunode status runtime`: which engines are here, what they are configured with, and what is in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpunode.commands.status_blocks import blocks
from gpunode.commands.status_files import StatusFile, journal_entries, status_file
from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.cdi import nvidia_specs
from gpunode.facts.configured import Configured, configured
from gpunode.facts.crio import load_crio
from gpunode.facts.daemons import Daemon, reader
from gpunode.facts.docker_rootless import find_others
from gpunode.facts.kubelet import Kubelet, find_kubelet
from gpunode.facts.processes import running
from gpunode.facts.writers import is_nvidia_program
from gpunode.host import Host
from gpunode.journal import Entry
from gpunode.result import Progress, Result
from gpunode.runtime import find
from gpunode.runtime.crio import CrioEngine
from gpunode.runtime.drift import Drift, Remedies, drift, own_default
from gpunode.runtime.engine import Active, Engine
from gpunode.runtime.questions import Answer, ask_all
from gpunode.runtime.recovery import restarter_of


@dataclass(frozen=True)
class Options:
    """`runtimes` are engines by name, every one there is if empty; the others say which daemon is meant."""

    runtimes: tuple[str, ...] = ()
    config: str = ""
    socket: str = ""
    restart_command: str = ""


@dataclass(frozen=True)
class StatusHandler:
    """A runtime handler. `path` is as the file has it, else as the daemon tells it; empty if neither does.

    `file` is empty for one that only the daemon has. `active` and `program_exists` are None if nobody knows.
    """

    name: str
    path: str
    file: str
    active: bool | None
    program_exists: bool | None


@dataclass(frozen=True)
class EngineStatus:
    """One engine. `running` is None for one without a daemon (podman).

    `configured_default` is what the files (or the engine itself) make the default, `active_default` what
    runs; each is empty if unknown. `cdi` is None where this release has none. `problem` says why the files
    can't be understood, `silence` why the daemon told nothing.
    """

    name: str
    manager: str
    user: str
    version: str
    running: bool | None
    pid: int | None
    socket: str
    unit: str
    config: str
    config_source: str
    kubelet: bool
    files: tuple[StatusFile, ...]
    handlers: tuple[StatusHandler, ...]
    configured_default: str
    active_default: str
    cdi: bool | None
    cdi_directories: tuple[str, ...]
    drift: tuple[Drift, ...]
    readable: bool
    problem: str
    silence: str


@dataclass(frozen=True)
class KubeletStatus:
    """Which engine the kubelet talks to, and where that stands."""

    engine: str
    endpoint: str
    source: str


@dataclass(frozen=True)
class CdiDevices:
    """One CDI specification of NVIDIA's; `problem` says why engines can't use it."""

    path: str
    kind: str
    devices: tuple[str, ...]
    problem: str


@dataclass(frozen=True)
class RuntimeStatus:
    """`data` of the envelope."""

    engines: tuple[EngineStatus, ...]
    kubelet: KubeletStatus | None
    cdi: tuple[CdiDevices, ...]


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Look at files and ask the daemons, each for at most three seconds; kind RuntimeStatus, changes nothing.

    Status warn if anything drifts. `PreconditionError` if there is no engine at all.
    """
    find.check_names(options.runtimes)
    engines, notes = _engines(host, options)
    if not engines and not notes:
        raise PreconditionError(
            "there is no container engine on this node", hint=f"install one: {', '.join(find.FINDERS)}"
        )
    answers = ask_all(engines)
    entries = journal_entries(host)
    kubelet = _kubelet(host)
    found = (
        _status(engine, answer, entries, kubelet, options)
        for engine, answer in zip(engines, answers, strict=True)
    )
    # what the node lives on comes first, what only lies there last
    statuses = tuple(sorted(found, key=lambda one: (not one.kubelet, one.running is False)))
    shown = KubeletStatus(kubelet.engine, kubelet.endpoint, kubelet.endpoint_source) if kubelet else None
    data = RuntimeStatus(statuses, shown, _cdi(host))
    warns = any(one.drift or one.problem for one in statuses)
    status = "warn" if warns or notes else "ok"
    return Result("RuntimeStatus", data, status, messages=notes, blocks=blocks(data))


def _engines(host: Host, options: Options) -> tuple[tuple[Engine, ...], tuple[str, ...]]:
    """The engines named, else every one that is here, once each; and what couldn't be looked for."""
    if options.runtimes:
        named = (find.engine(host, name, options.config, "", options.socket) for name in options.runtimes)
        return tuple(named), ()
    daemons: dict[tuple[str, str], Daemon] = {}
    notes = []
    for name, finder in find.FINDERS.items():
        try:
            daemon = finder(host, None)
        except GpunodeError as error:
            notes.append(f"{name}: {error.message}")
            continue
        unsafe = host.unsafe_program(find.PROGRAMS.get(name, name)) if daemon is None else None
        if unsafe is not None:
            notes.append(f"{name} is at {unsafe[0]}, but {unsafe[1]}")
        key = (daemon.name, daemon.config_path) if daemon else ("", "")
        # a distribution's own name tells more of its containerd than containerd's does
        if daemon is not None and (key not in daemons or daemon.manager):
            daemons[key] = daemon
    for daemon in find_others(host, tuple(one for one in running(host) if one.name == "dockerd")):
        daemons.setdefault((daemon.name, daemon.config_path), daemon)
    engines = (find.of_daemon(reader(host, daemon), daemon) for daemon in daemons.values())
    return tuple(engines), tuple(notes)


def _kubelet(host: Host) -> Kubelet | None:
    try:
        return find_kubelet(host, running(host))
    except GpunodeError:
        return None  # only root may read its file, and the engines can be told without it


def _status(
    engine: Engine,
    answer: Answer,
    entries: Sequence[Entry] | None,
    kubelet: Kubelet | None,
    options: Options,
) -> EngineStatus:
    daemon, host = engine.daemon, engine.host
    files = configured(host, daemon)
    restarter = restarter_of(host, options.restart_command, engine)
    restart = restarter.shown("restart") if daemon.name != "podman" else ""
    reload = restarter.shown("reload") if daemon.name == "docker" else restart
    active = answer.active
    return EngineStatus(
        name=daemon.name,
        manager=daemon.manager,
        user=daemon.user,
        version=".".join(map(str, daemon.version)),
        running=None if daemon.name == "podman" else daemon.process is not None or active is not None,
        pid=daemon.process.pid if daemon.process else None,
        socket=daemon.socket,
        unit=daemon.unit or "",
        config=daemon.config_path,
        config_source=daemon.config_source,
        kubelet=kubelet is not None and _same_socket(kubelet, engine),
        files=tuple(status_file(host, daemon, file, entries) for file in files.files),
        handlers=_handlers(host, files, active),
        configured_default=files.default or own_default(daemon),
        active_default=active.default if active else "",
        cdi=files.cdi if active is None or active.cdi is None else active.cdi,
        cdi_directories=files.cdi_directories if files.cdi is not None else (),
        drift=(*drift(daemon, files, active, Remedies(reload, restart)), *_unread(engine, files, restart)),
        readable=files.readable,
        problem=files.problem,
        silence=answer.silence,
    )


def _unread(engine: Engine, files: Configured, restart: str) -> tuple[Drift, ...]:
    """CRI-O shows what it reloaded and goes on with what it read at its start, so its files' times tell."""
    if not isinstance(engine, CrioEngine) or files.problem:
        return ()
    config = load_crio(engine.host, engine.daemon.config_path, engine.directory)
    if not engine.newer_than_daemon(config):
        return ()
    detail = "its files changed after it was started: it may show them, and starts pods without"
    return (Drift("read-before", "crio", detail, restart),)


def _handlers(host: Host, files: Configured, active: Active | None) -> tuple[StatusHandler, ...]:
    """Those of the files first, then what only the running daemon has."""
    told: Mapping[str, str] = dict(active.paths) if active else {}
    found = [
        StatusHandler(
            one.name,
            one.path or told.get(one.name, ""),
            one.file,
            one.name in active.handlers if active else None,
            _exists(host, one.path or told.get(one.name, "")),
        )
        for one in files.handlers
    ]
    for name in active.handlers if active else ():
        if name and name not in files.paths:
            path = told.get(name, "")
            found.append(StatusHandler(name, path, "", True, _exists(host, path)))
    return tuple(found)


def _exists(host: Host, program: str) -> bool | None:
    """An engine looks for its own runc in places of its own; what can be judged is a path, and NVIDIA's."""
    if not program.startswith("/") and not is_nvidia_program(program):
        return None
    return host.which(program) is not None


def _same_socket(kubelet: Kubelet, engine: Engine) -> bool:
    if engine.daemon.name == "docker":
        return kubelet.engine == "docker"  # through dockershim or cri-dockerd, whose socket is another
    ours, theirs = (
        path.replace("/var/run/", "/run/", 1) for path in (engine.daemon.socket, kubelet.endpoint)
    )
    return bool(ours) and ours == theirs


def _cdi(host: Host) -> tuple[CdiDevices, ...]:
    try:
        found = nvidia_specs(host)
    except GpunodeError:
        return ()
    return tuple(
        CdiDevices(one.path, one.kind, tuple(device.name for device in one.devices), one.problem)
        for one in found
    )
