"""`gpunode status runtime`: which engines are installed, how they are configured, and what is active."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, NamedTuple

import typer

from gpunode.commands.help_page import command_group
from gpunode.commands.options import ConfigOption, SocketOption, Strings, runtime_option
from gpunode.commands.session import Session, verb
from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.cdi import nvidia_specs
from gpunode.facts.crio import load_crio
from gpunode.facts.daemons import Daemon, as_daemon_user
from gpunode.facts.docker import find_others
from gpunode.facts.effective import ConfigFile, EngineSettings, engine_settings, own_default
from gpunode.facts.kubelet import Kubelet, find_kubelet
from gpunode.facts.processes import running
from gpunode.facts.registry import ENGINES
from gpunode.facts.writers import is_nvidia_program, nvidia_writer
from gpunode.host import Host
from gpunode.host.journal import OPEN_STATES, STATE_DIRECTORY, Entry, Journal, digest
from gpunode.output.result import Block, Cell, Result, Style, Table, Text, many
from gpunode.runtime import find
from gpunode.runtime.crio import CrioEngine
from gpunode.runtime.drift import DaemonAnswer, Drift, Remedies, drift, query_all
from gpunode.runtime.engine import Active, Engine
from gpunode.runtime.restart import restarter_of

# `gpunode status runtime` as text.

_WRITERS = {"unknown": "(only root may read gpunode's journal)"}
_YES: dict[bool | None, Cell] = {
    True: Cell("yes", Style.GOOD),
    False: Cell("no", Style.WARN),
    None: Cell("?", Style.DIM),
}


def blocks(data: RuntimeStatus) -> tuple[Block, ...]:
    """An overview, then each engine with its files, its handlers and the fixes."""
    columns = ("ENGINE", "VERSION", "STATE", "DEFAULT", "CDI", "FILES ACTIVE", "USED BY")
    page: list[Block] = [Table(columns, tuple(_line(engine) for engine in data.engines))]
    if data.kubelet is not None and not any(engine.kubelet for engine in data.engines):
        where = f"{data.kubelet.engine} at {data.kubelet.endpoint} ({data.kubelet.source})"
        page.append(Text(f"the kubelet uses {where}", Style.DIM))
    for engine in data.engines:
        page += _engine(engine)
    page += _cdi_blocks(data)
    return tuple(page)


def _line(engine: EngineStatus) -> tuple[Cell | str, ...]:
    states: dict[bool | None, Cell | str] = {
        True: Cell("running", Style.GOOD),
        False: Cell("stopped", Style.WARN),
        None: "no daemon",
    }
    cdi = {True: "on", False: "off", None: "-"}[engine.cdi]
    default = engine.active_default or ("?" if engine.silence else engine.configured_default)
    return (
        title(engine),
        engine.version or "?",
        states[engine.running],
        default or "-",
        cdi,
        _agrees(engine),
        "kubelet" if engine.kubelet else "",
    )


def _agrees(engine: EngineStatus) -> Cell:
    if engine.problem:
        return Cell("file is broken" if engine.readable else "needs root", Style.WARN)
    if engine.drift:
        return Cell(f"no, {many(len(engine.drift), 'difference')}", Style.WARN)
    return Cell("not queried", Style.DIM) if engine.silence else Cell("yes", Style.GOOD)


def title(engine: EngineStatus) -> str:
    """Display names: docker, containerd of k3s, docker of user ann."""
    owner = f" of {engine.manager}" if engine.manager else f" of user {engine.user}" if engine.user else ""
    return f"{engine.name}{owner}"


def _engine(engine: EngineStatus) -> Iterator[Block]:
    yield Text("")
    yield Text(f"{title(engine)}: {engine.config} ({engine.config_source})", Style.HEADING)
    if engine.problem:
        yield Text(f"  {engine.problem}", Style.WARN)
    else:
        yield Table(("  FILE", "LAST WRITTEN BY"), tuple(_files(engine)))
    if engine.silence:
        reporter = "the daemon" if engine.running is not None else engine.name
        yield Text(f"  {reporter} reports nothing: {engine.silence}", Style.DIM)
    if engine.handlers:
        columns = ("  HANDLER", "PROGRAM", "IN FILE", "ACTIVE")
        yield Table(columns, tuple(_handler(handler) for handler in engine.handlers))
    for difference in engine.drift:
        yield Text(f"  differs: {difference.subject}: {difference.detail}", Style.WARN)
    for fix in dict.fromkeys(difference.fix for difference in engine.drift):
        manual_fix = "restart it manually: systemd doesn't run it on this node"
        yield Text(f"  Fix: {fix or manual_fix}", Style.COMMAND if fix else Style.PLAIN)


def _files(engine: EngineStatus) -> Iterator[tuple[Cell | str, ...]]:
    for file in engine.files:
        if not file.exists:
            yield f"  {file.path}", Cell("(missing)", Style.DIM)
            continue
        edited = ", edited since" if file.edited else ""
        copy = ", a copy of the whole section" if file.generated_copy else ""
        yield f"  {file.path}", f"{_WRITERS.get(file.writer, file.writer)}{edited}{copy}"


def _handler(handler: StatusHandler) -> tuple[Cell | str, ...]:
    program: Cell | str = handler.path or "-"
    if handler.program_exists is False:
        program = Cell(f"{handler.path} (missing)", Style.BAD)
    return f"  {handler.name}", program, handler.file or "-", _YES[handler.active]


def _cdi_blocks(data: RuntimeStatus) -> Iterator[Block]:
    if not data.cdi:
        return
    yield Text("")
    yield Text("CDI specifications:", Style.HEADING)
    for spec in data.cdi:
        description = spec.problem or f"{spec.kind}: {', '.join(spec.devices)}"
        yield Text(f"  {spec.path}  {description}", Style.WARN if spec.problem else Style.PLAIN)


# Which program wrote a configuration file last: gpunode by its journal, others by marks in the text.

GPUNODE, PACKAGE, PERSON, UNKNOWN = "gpunode", "package", "administrator", "unknown"
_DPKG = "/var/lib/dpkg/status"
# first lines that distributions write to a file that they regenerate
_MAKE_THEIRS = ("k3s", "rke2", "microk8s")
_MARKS = {"k3s": "generated by k3s", "rke2": "generated by rke2", "k0s": "k0s_managed=true"}


class StatusFile(NamedTuple):
    """`role` is main or drop-in; `generated_copy` whether it holds a copy of the engine's whole section.

    `writer`: gpunode, nvidia-ctk, gpu-operator, k3s, rke2, k0s, microk8s, package, administrator, unknown
    (only root may read gpunode's journal); empty for a file that isn't there. `edited` is whether what
    gpunode wrote was changed.
    """

    path: str
    role: str
    exists: bool
    writer: str
    edited: bool
    generated_copy: bool


def journal_entries(host: Host) -> tuple[Entry, ...] | None:
    """What gpunode wrote, newest first; None where this user may not read the node's journal."""
    own = Journal.of(host)
    moved = bool(host.environ.get("GPUNODE_STATE_DIR"))
    journals = {own.directory: own}
    if not moved:
        journals.setdefault(f"{STATE_DIRECTORY}/journal", Journal(host, f"{STATE_DIRECTORY}/journal"))
    try:
        entries = [entry for journal in journals.values() for entry in journal.entries()[::-1]]
    except GpunodeError:
        return None
    # also of a killed run, because the file has its text
    return tuple(entry for entry in entries if entry.state in (*OPEN_STATES, "committed"))


def status_file(host: Host, daemon: Daemon, file: ConfigFile, entries: Sequence[Entry] | None) -> StatusFile:
    """One file with its writer; `entries` as from `journal_entries`."""
    if file.text is None:
        return StatusFile(file.path, file.role, False, "", False, False)
    writer, edited = _writer(host, daemon, file, entries)
    return StatusFile(file.path, file.role, True, writer, edited, file.copy is not None)


def _writer(
    host: Host, daemon: Daemon, file: ConfigFile, entries: Sequence[Entry] | None
) -> tuple[str, bool]:
    text = file.text or ""
    data = text.encode("utf-8", "surrogateescape")
    now = digest(data)
    written = [record for entry in entries or () for record in entry.files if record.path == file.path]
    if any(record.after == now for record in written):
        return GPUNODE, False
    tool = nvidia_writer(text, file.tree) or _distribution(daemon, file)
    if tool:
        return tool, False
    if file.path.startswith("/usr/") or _is_conffile(host, file.path, data):
        return PACKAGE, False
    if written and written[0].after and not any(record.before == now for record in written):
        return GPUNODE, True
    return (UNKNOWN if entries is None else PERSON), False


def _distribution(daemon: Daemon, file: ConfigFile) -> str:
    """The distribution that regenerates the file at each start; drop-ins are the administrator's."""
    head = (file.text or "")[:400].lower()
    marked = next((name for name, mark in _MARKS.items() if mark in head), "")
    own = daemon.manager if file.role == "main" and daemon.manager in _MAKE_THEIRS else ""
    return marked or own


def _is_conffile(host: Host, path: str, data: bytes) -> bool:
    """Whether dpkg installed the file and it is unchanged since (deb-conffiles(5), MD5 sums)."""
    status = host.text_or_empty(_DPKG)
    return f"\n {path} {hashlib.md5(data, usedforsecurity=False).hexdigest()}" in status


class StatusHandler(NamedTuple):
    """A runtime handler. `path` is as the file has it, else as the daemon reports it; empty if neither does.

    `file` is empty for one that only the daemon has. `active` and `program_exists` are None if unknown.
    """

    name: str
    path: str
    file: str
    active: bool | None
    program_exists: bool | None


class EngineStatus(NamedTuple):
    """One engine. `running` is None for one without a daemon (podman).

    `configured_default` is what the files (or the engine itself) make the default, `active_default` what
    runs; each is empty if unknown. `cdi` is None where this release has none. `problem` says why the files
    can't be understood, `silence` why the daemon reported nothing.
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


class KubeletStatus(NamedTuple):
    """Which engine the kubelet uses, and which file configures that."""

    engine: str
    endpoint: str
    source: str


class SpecificationSummary(NamedTuple):
    """One CDI specification of NVIDIA's; `problem` says why engines can't use it."""

    path: str
    kind: str
    devices: tuple[str, ...]
    problem: str


class RuntimeStatus(NamedTuple):
    """`data` of the envelope."""

    engines: tuple[EngineStatus, ...]
    kubelet: KubeletStatus | None
    cdi: tuple[SpecificationSummary, ...]


def run(
    host: Host, runtimes: Sequence[str] = (), config: str = "", socket: str = "", restart_command: str = ""
) -> Result:
    """Read the files and query the daemons, each for at most three seconds; kind RuntimeStatus, changes
    nothing.

    `runtimes` are engines by name, every installed one if empty. Status warn if any file and daemon differ.
    `PreconditionError` if there is no engine.
    """
    find.check_names(tuple(runtimes))
    engines, notes = _engines(host, runtimes, config, socket)
    if not engines and not notes:
        raise PreconditionError(
            "no container engine is installed on this node", hint=f"install one: {', '.join(find.FINDERS)}"
        )
    answers = query_all(engines)
    entries = journal_entries(host)
    kubelet = None
    with suppress(GpunodeError):  # only root may read its file, and the engines can be reported without it
        kubelet = find_kubelet(host, running(host))
    engine_statuses = (
        _status(engine, answer, entries, kubelet, restart_command)
        for engine, answer in zip(engines, answers, strict=True)
    )
    # the engine that the node uses comes first, those that are only installed come last
    statuses = tuple(
        sorted(
            engine_statuses,
            key=lambda engine_status: (not engine_status.kubelet, engine_status.running is False),
        )
    )
    kubelet_status = (
        KubeletStatus(kubelet.engine, kubelet.endpoint, kubelet.endpoint_source) if kubelet else None
    )
    data = RuntimeStatus(statuses, kubelet_status, _cdi(host))
    warns = any(engine_status.drift or engine_status.problem for engine_status in statuses)
    status = "warn" if warns or notes else "ok"
    return Result("RuntimeStatus", data, status, messages=notes, blocks=blocks(data))


def _engines(
    host: Host, runtimes: Sequence[str], config: str, socket: str
) -> tuple[tuple[Engine, ...], tuple[str, ...]]:
    """The named engines, else every installed one, once each; and what couldn't be searched."""
    if runtimes:
        requested = (find.engine(host, name, config, "", socket) for name in runtimes)
        return tuple(requested), ()
    daemons: dict[tuple[str, str], Daemon] = {}
    notes = []
    for name, finder in find.FINDERS.items():
        try:
            daemon = finder(host, None)
        except GpunodeError as error:
            notes.append(f"{name}: {error.message}")
            continue
        unsafe = host.unsafe_program(find.program_of(name)) if daemon is None else None
        if unsafe is not None:
            notes.append(f"{name} is at {unsafe[0]}, but {unsafe[1]}")
        key = (daemon.name, daemon.config_path) if daemon else ("", "")
        # a distribution's own release says more about its containerd than containerd's does
        if daemon is not None and (key not in daemons or daemon.manager):
            daemons[key] = daemon
    for daemon in find_others(host, tuple(process for process in running(host) if process.name == "dockerd")):
        daemons.setdefault((daemon.name, daemon.config_path), daemon)
    engines = (find.of_daemon(as_daemon_user(host, daemon), daemon) for daemon in daemons.values())
    return tuple(engines), tuple(notes)


def _status(
    engine: Engine,
    answer: DaemonAnswer,
    entries: Sequence[Entry] | None,
    kubelet: Kubelet | None,
    restart_command: str,
) -> EngineStatus:
    daemon, host = engine.daemon, engine.host
    files = engine_settings(host, daemon)
    restarter = restarter_of(engine, restart_command)
    restart = restarter.shown("restart") if ENGINES[daemon.name].has_daemon else ""
    reload = restarter.shown("reload") if ENGINES[daemon.name].reloads else restart
    active = answer.active
    return EngineStatus(
        name=daemon.name,
        manager=daemon.manager,
        user=daemon.user,
        version=daemon.release,
        running=daemon.process is not None or active is not None if ENGINES[daemon.name].has_daemon else None,
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


def _unread(engine: Engine, files: EngineSettings, restart: str) -> tuple[Drift, ...]:
    """CRI-O shows the reloaded configuration but uses the one from its start, so its files' times decide."""
    if not isinstance(engine, CrioEngine) or files.problem:
        return ()
    config = load_crio(engine.host, engine.daemon.config_path, engine.directory)
    if not engine.newer_than_daemon(config):
        return ()
    detail = "its files changed after it was started: it may list them, but still starts pods without them"
    return (Drift("read-before", "crio", detail, restart),)


def _handlers(host: Host, files: EngineSettings, active: Active | None) -> tuple[StatusHandler, ...]:
    """The handlers of the files first, then those that only the running daemon has."""
    active_paths = active.paths if active else {}
    handlers = [
        StatusHandler(
            handler.name,
            handler.path or active_paths.get(handler.name, ""),
            handler.file,
            handler.name in active.handlers if active else None,
            _exists(host, handler.path or active_paths.get(handler.name, "")),
        )
        for handler in files.handlers
    ]
    for name in active.handlers if active else ():
        if name and name not in files.paths:
            path = active_paths.get(name, "")
            handlers.append(StatusHandler(name, path, "", True, _exists(host, path)))
    return tuple(handlers)


def _exists(host: Host, program: str) -> bool | None:
    """An engine looks for its own runc in its own directories; only paths, and NVIDIA's programs, can be
    checked."""
    if not program.startswith("/") and not is_nvidia_program(program):
        return None
    return host.which(program) is not None


def _same_socket(kubelet: Kubelet, engine: Engine) -> bool:
    if engine.daemon.name == "docker":
        return kubelet.engine == "docker"  # through dockershim or cri-dockerd, which has another socket
    own_socket, other_socket = (
        path.replace("/var/run/", "/run/", 1) for path in (engine.daemon.socket, kubelet.endpoint)
    )
    return bool(own_socket) and own_socket == other_socket


def _cdi(host: Host) -> tuple[SpecificationSummary, ...]:
    try:
        specs = nvidia_specs(host)
    except GpunodeError:
        return ()
    return tuple(
        SpecificationSummary(
            spec.path, spec.kind, tuple(device.name for device in spec.devices), spec.problem
        )
        for spec in specs
    )


# `gpunode status`.

status_app = command_group("Show the effective runtime configuration of each engine.", default="runtime")


@verb(status_app, "runtime", "RuntimeStatus")
def status_runtime(
    session: Session,
    runtime: Annotated[Strings, runtime_option(default="all that are installed")] = None,
    config: ConfigOption = "",
    socket: SocketOption = "",
    restart_command: Annotated[
        str,
        typer.Option(
            "--restart-command",
            metavar="CMD",
            help="Command to print, not run, for a daemon that systemd doesn't manage and that must restart.",
        ),
    ] = "",
) -> Result:
    """Show the container engines. Their files, runtimes and changes that need a restart are listed.

    gpunode status runtime
    """
    return run(session.host, runtime or (), config, socket, restart_command)
