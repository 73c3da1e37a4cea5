"""`gpunode configure-runtime`: register the nvidia runtime and see that the running daemon has it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from gpunode.cdi import refresh
from gpunode.cdi.engines import kept_elsewhere
from gpunode.cdi.locations import STANDARD
from gpunode.cdi.spec import made_by_gpunode
from gpunode.commands.options import (
    AlsoOption,
    CdiOption,
    ConfigModeOption,
    ConfigOption,
    ConfigSourceOption,
    DefaultOption,
    DropInOption,
    DryRunOption,
    ExecutableOption,
    ExitCodeOption,
    HookFileOption,
    HookProgramOption,
    NameOption,
    NoRestartOption,
    NoVerifyOption,
    ProgramOption,
    ReplaceOption,
    RestartCommandOption,
    RuntimesOption,
    SocketOption,
    YesOption,
)
from gpunode.commands.session import Session, verb
from gpunode.errors import PreconditionError, UsageError, ValidationError
from gpunode.host import Host
from gpunode.host.journal import FileEdit, Journal
from gpunode.output.result import Progress, Result
from gpunode.runtime.engine import Active, Engine, Handler, Plan, Request, Unwanted, Wanted
from gpunode.runtime.find import name_of_daemon
from gpunode.runtime.removal import (
    OPERATION,
    REMOVAL,
    Original,
    cdi_users,
    original_files,
    previous_default,
    switched_cdi,
)
from gpunode.runtime.workflow import Intent, change

RESERVED = ("runc", "crun")
VARIANTS = ("cdi", "legacy")  # NVIDIA's programs beside nvidia-container-runtime that force one mode


def run(
    host: Host,
    request: Request,
    progress: Progress,
    *,
    name: str = "nvidia",
    path: str = "",
    set_as_default: bool = False,
    cdi: bool = False,
    also: Sequence[str] = (),
    replace_others: bool = False,
) -> Result:
    """Configure the engines; kind RuntimeConfiguration, data `gpunode.runtime.workflow.RuntimeConfiguration`.

    With several engines the kind is RuntimeConfigurations and data lists them. `also` names variants of
    `VARIANTS` to register beside the runtime; an empty `path` is the engine's own default.
    """
    check_name(name)
    if request.exit_code and not request.dry_run:
        raise UsageError("--exit-code only means something with --dry-run", hint="add --dry-run")
    unknown = [variant for variant in also if variant not in VARIANTS]
    if unknown:
        raise UsageError(f"no variant {unknown[0]!r} of the runtime", hint=f"known: {', '.join(VARIANTS)}")

    def prepare(engines: tuple[Engine, ...], _journal: Journal) -> tuple[Intent, ...]:
        # one journal entry has the files that all share; an engine's own refusal comes before theirs
        made = functools.cache(
            lambda: _companions(host, engines, units=not request.no_restart) if cdi else NONE
        )
        users = tuple(name_of_daemon(engine.daemon) for engine in engines) if cdi else ()
        # the entry that brings the files tells whom they are for: an engine that needs no change has none
        intents = []
        for number, engine in enumerate(engines):
            wanted, notes = _wanted(engine, name, path, also, set_as_default, cdi, replace_others)
            if number == 0:
                intents.append(_intent(engine, wanted, notes, made, users))
            else:
                intents.append(_intent(engine, wanted, notes, lambda: NONE, users[number : number + 1]))
        return tuple(intents)

    return change(host, request, prepare, progress)


@dataclass(frozen=True)
class Companions:
    """Files beside the engine's own: a CDI specification and the units that keep it fresh."""

    edits: tuple[FileEdit, ...] = ()
    units: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


NONE = Companions()


def _companions(host: Host, engines: tuple[Engine, ...], *, units: bool) -> Companions:
    if all(engine.daemon.user for engine in engines):
        note = "the CDI specification is the node's, and root writes it: sudo gpunode cdi refresh --install"
        return Companions(notes=(note,))
    from gpunode.cdi.engines import companions

    made = companions(host, tuple(engine.daemon for engine in engines), units=units)
    edits = tuple(
        FileEdit(path, host.read_bytes(path), content, generated=path in made.generated, beside=True)
        for path, content in made.files
    )
    return Companions(edits, made.units, made.notes)


def _intent(
    engine: Engine,
    wanted: Wanted,
    notes: tuple[str, ...],
    made: Callable[[], Companions],
    users: tuple[str, ...],
) -> Intent:
    def plan(active: Active | None) -> Plan:
        own, beside = engine.plan(wanted, active), made()
        full = own.with_beside(beside.edits, beside.units)
        return replace(full, notes=(*own.notes, *beside.notes))

    return Intent(
        OPERATION,
        wanted.names,
        plan,
        lambda active: active.has(wanted),
        wanted,
        require=lambda: _require_programs(engine, wanted),
        notes=notes,
        cdi=users,
    )


def check_name(name: str) -> None:
    """`UsageError` for what can't be a runtime's name, or is the name of what runs every other container."""
    if name in RESERVED or name.startswith("io.containerd."):
        raise UsageError(
            f"the runtime name {name} belongs to the engine's own low-level runtime",
            hint="choose another: --nvidia-runtime-name nvidia",
        )
    if not name or not name.isascii() or not all(c.isalnum() or c in "-_." for c in name):
        raise UsageError(f"{name!r} can't be a runtime's name", hint="use letters, digits, '-', '_' and '.'")


def _wanted(
    engine: Engine, name: str, path: str, also: Sequence[str], default: bool, cdi: bool, replace_others: bool
) -> tuple[Wanted, tuple[str, ...]]:
    """What the engine should have. With CDI and no toolkit here there is no runtime to register."""
    asked = path or default or also
    path = path or engine.program
    if engine.program.startswith("/") and not path.startswith("/") and engine.daemon.name != "docker":
        raise UsageError(
            f"{engine.daemon.name} wants an absolute path, not {path!r}", hint="--nvidia-runtime-path /PATH"
        )
    if cdi and not asked and engine.host.which(path) is None:
        unsafe = engine.host.unsafe_program(path.rpartition("/")[2])
        problem = f"{unsafe[0]}: {unsafe[1]}" if unsafe else f"{path} is not there"
        note = (
            f"{problem}, so no runtime is registered: containers get their GPUs by CDI alone,"
            " as in --device nvidia.com/gpu=all"
        )
        return Wanted(cdi=True), (note,)
    handlers = [Handler(name, path)]
    for variant in dict.fromkeys(also):
        handlers.append(Handler(f"nvidia-{variant}", f"{path}.{variant}"))
    if len({handler.name for handler in handlers}) < len(handlers):
        raise UsageError(
            f"the name {name} is a variant's own",
            hint="choose another: --nvidia-runtime-name nvidia",
        )
    return Wanted(tuple(handlers), default, cdi, replace_others), ()


def _require_programs(engine: Engine, wanted: Wanted) -> None:
    """An engine with a runtime that isn't there fails every container that asks for it."""
    for handler in wanted.handlers:
        if engine.host.which(handler.path) is None:
            if "/" not in handler.path or handler.path == engine.program:
                engine.host.refuse_unsafe(handler.path.rpartition("/")[2])
            install = "install the NVIDIA Container Toolkit (package nvidia-container-toolkit)"
            main = handler is wanted.handlers[0]
            other = "name the program: --nvidia-runtime-path PATH, or do without it: --cdi"
            raise PreconditionError(
                f"{handler.path} is not there: {engine.daemon.name} could start no container with it",
                hint=f"{install}, {other}"
                if main
                else f"{install} with all of its parts, or leave out --also",
                code="toolkit-missing",
            )


# `gpunode unconfigure-runtime`: take the nvidia runtime out and put the previous default back.

REMOVAL_VARIANTS = ("nvidia-cdi", "nvidia-legacy")
_UNIT_FILES = (refresh.SERVICE_FILE, refresh.PATH_FILE, refresh.RULES_FILE)


def unconfigure(
    host: Host, request: Request, progress: Progress, *, name: str = "nvidia", cdi: bool = False
) -> Result:
    """Unconfigure the engines; kind RuntimeConfiguration, RuntimeConfigurations for several.

    Files that hold exactly what gpunode wrote become what they were, byte for byte; in others only the
    runtimes are taken out, whoever wrote them: with ``nvidia`` go the variants that NVIDIA's own tools add.
    With `cdi` the CDI switch goes as well, whoever set it, and the specification and units that gpunode made.
    """
    check_name(name)
    names = (name, *REMOVAL_VARIANTS) if name == "nvidia" else (name,)

    def prepare(engines: tuple[Engine, ...], journal: Journal) -> tuple[Intent, ...]:
        past = {
            engine.daemon.config_path: functools.cache(
                functools.partial(original_files, engine, journal, names)
            )
            for engine in engines
        }
        # one journal entry has the files that all share
        shared = functools.cache(
            lambda: _shared(host, journal, engines, [known() for known in past.values()], cdi)
        )
        return tuple(
            _removal(
                engine,
                journal,
                names,
                cdi,
                past[engine.daemon.config_path],
                shared if engine is engines[0] else lambda: NOTHING_SHARED,
            )
            for engine in engines
        )

    return change(host, request, prepare, progress)


@dataclass(frozen=True)
class Shared:
    """What becomes of the specification and its units, which all engines share."""

    edits: tuple[FileEdit, ...] = ()
    notes: tuple[str, ...] = ()


NOTHING_SHARED = Shared()


def _shared(
    host: Host, journal: Journal, engines: tuple[Engine, ...], past: Sequence[Original], cdi: bool
) -> Shared:
    """Removed on request, else put back as they were before these engines, unless another one needs them."""
    back = {edit.path: edit for original in past for edit in original.edits if edit.path in _cdi_paths(host)}
    ours = {edit.path: edit for edit in _cdi_files(host)}
    if cdi:
        return Shared(tuple({**ours, **back}.values()))
    leaving = {name_of_daemon(engine.daemon) for engine in engines}
    users = [name for name in cdi_users(journal) if name not in leaving]
    if back and not users:
        return Shared(tuple(back.values()))
    if not ours:
        return NOTHING_SHARED
    whom = f" for {', '.join(users)}" if users else ""
    command = f"gpunode unconfigure-runtime --cdi --runtime {name_of_daemon(engines[0].daemon)}"
    return Shared(notes=(f"{next(iter(ours))} stays{whom}; to take it and its units away: {command}",))


def _removal(
    engine: Engine,
    journal: Journal,
    names: tuple[str, ...],
    cdi: bool,
    known: Callable[[], Original],
    shared: Callable[[], Shared],
) -> Intent:
    def plan(active: Active | None) -> Plan:
        own, beside = _own(engine, journal, names, cdi, known(), active), shared()
        full = own.with_beside(beside.edits, refresh.UNITS if beside.edits else ())
        return replace(full, notes=(*full.notes, *beside.notes))

    def gone(active: Active) -> bool:
        return not any(name in active.handlers for name in names)

    def done() -> None:
        for entry in known().entries:
            journal.tidy(entry)

    return Intent(REMOVAL, names, plan, gone, done=done)


def _own(
    engine: Engine,
    journal: Journal,
    names: tuple[str, ...],
    cdi: bool,
    known: Original,
    active: Active | None,
) -> Plan:
    """The plan for the engine's files: as they were before, or without the runtimes."""
    ours = switched_cdi(engine, journal, names)
    edits = tuple(edit for edit in known.edits if edit.path not in _cdi_paths(engine.host))
    if edits and (ours or not cdi):  # what was there before may have somebody else's switch
        restored = replace(known, edits=edits, units=()).plan(engine, names, active)
        if _loads(engine, restored):
            return restored
    previous = previous_default(engine, journal, names)
    return engine.plan_removal(Unwanted(names, previous, cdi or ours), active)


def _cdi_paths(host: Host) -> tuple[str, ...]:
    """Every file that gpunode writes for CDI."""
    return (STANDARD, *kept_elsewhere(host), *_UNIT_FILES)


def _cdi_files(host: Host) -> tuple[FileEdit, ...]:
    """What gpunode itself made for CDI and is still there, to be removed."""
    ours: list[FileEdit] = []
    for path in _cdi_paths(host):
        content = host.read_bytes(path)
        specification = path not in _UNIT_FILES
        if made_by_gpunode(content) if specification else refresh.MARKER.encode() in (content or b""):
            ours.append(FileEdit(path, content, None, generated=specification, beside=True))
    return tuple(ours)


def _loads(engine: Engine, plan: Plan) -> bool:
    """Whether the engine takes the files of before: a run may have mended what it refused."""
    try:
        engine.validate(plan.own, None)
    except ValidationError:
        return False
    return True


# The verbs that change a container engine's configuration, and take it back.

runtime_app = typer.Typer(rich_markup_mode=None)

# options of nvidia-ctk that gpunode knows and refuses, each with its reason
_HOOK = (
    "OCI hooks are deprecated: gpunode registers the runtime",
    "leave it out; for GPUs without the runtime: --cdi",
)
_UNSUPPORTED = {
    "--config-source": (
        "gpunode reads the engine's files and asks the running daemon, whatever the source",
        "leave it out; to name the file: --config PATH",
    ),
    "--executable-path": (
        "gpunode finds the engine's program by its process",
        "leave it out; to name the file: --config PATH",
    ),
    "--oci-hook-path": _HOOK,
    "--nvidia-runtime-hook-path": _HOOK,
}
_CONFIG_MODES = ("config-file", "config")


def _refuse_unsupported(options: Mapping[str, str], config_mode: str) -> None:
    """`UsageError` for what `configure-runtime` can't take over from ``nvidia-ctk runtime configure``."""
    for option, value in options.items():
        if value:
            reason, hint = _UNSUPPORTED[option]
            raise UsageError(f"{option} has no counterpart: {reason}", hint=hint)
    if config_mode and config_mode not in _CONFIG_MODES:
        raise UsageError(f"--config-mode {config_mode} has no counterpart: {_HOOK[0]}", hint=_HOOK[1])


@verb(runtime_app, "configure-runtime", "RuntimeConfiguration")
def configure_runtime(
    session: Session,
    runtime: RuntimesOption = None,
    config: ConfigOption = "",
    drop_in_config: DropInOption = "",
    nvidia_runtime_name: NameOption = "nvidia",
    nvidia_runtime_path: ProgramOption = "",
    set_as_default: DefaultOption = False,
    cdi: CdiOption = False,
    also: AlsoOption = "",
    replace: ReplaceOption = False,
    dry_run: DryRunOption = False,
    exit_code: ExitCodeOption = False,
    no_restart: NoRestartOption = False,
    restart_command: RestartCommandOption = "",
    no_verify: NoVerifyOption = False,
    socket: SocketOption = "",
    yes: YesOption = False,
    config_mode: ConfigModeOption = "",
    config_source: ConfigSourceOption = "",
    executable_path: ExecutableOption = "",
    oci_hook_path: HookFileOption = "",
    nvidia_runtime_hook_path: HookProgramOption = "",
) -> Result:
    """Register the nvidia runtime with the engine. Restarts or reloads it, asks it, puts all back on failure.

    gpunode configure-runtime --runtime containerd --dry-run

    gpunode configure-runtime --runtime docker
    """
    refused = {"--config-source": config_source, "--executable-path": executable_path}
    refused |= {"--oci-hook-path": oci_hook_path, "--nvidia-runtime-hook-path": nvidia_runtime_hook_path}
    _refuse_unsupported(refused, config_mode)
    request = Request(
        runtimes=tuple(runtime or ("auto",)),
        config=config,
        drop_in_config=drop_in_config,
        socket=socket,
        restart_command=restart_command,
        dry_run=dry_run,
        exit_code=exit_code,
        no_restart=no_restart,
        no_verify=no_verify,
        yes=yes,
        configures=True,
    )
    return run(
        session.host,
        request,
        session.progress,
        name=nvidia_runtime_name,
        path=nvidia_runtime_path,
        set_as_default=set_as_default,
        cdi=cdi,
        also=tuple(filter(None, also.replace(" ", "").split(","))),
        replace_others=replace,
    )


@verb(runtime_app, "unconfigure-runtime", "RuntimeConfiguration")
def unconfigure_runtime(
    session: Session,
    runtime: RuntimesOption = None,
    config: ConfigOption = "",
    drop_in_config: DropInOption = "",
    nvidia_runtime_name: NameOption = "nvidia",
    cdi: Annotated[
        bool,
        typer.Option(
            "--cdi",
            help="Take CDI out as well: the engine's switch, whoever set it, and the files of ours.",
        ),
    ] = False,
    dry_run: DryRunOption = False,
    no_restart: NoRestartOption = False,
    restart_command: RestartCommandOption = "",
    socket: SocketOption = "",
    yes: YesOption = False,
) -> Result:
    """Take the nvidia runtime out again. The previous default runtime is put back.

    gpunode unconfigure-runtime --runtime docker
    """
    request = Request(
        runtimes=tuple(runtime or ("auto",)),
        config=config,
        drop_in_config=drop_in_config,
        socket=socket,
        restart_command=restart_command,
        dry_run=dry_run,
        no_restart=no_restart,
        yes=yes,
    )
    return unconfigure(session.host, request, session.progress, name=nvidia_runtime_name, cdi=cdi)
