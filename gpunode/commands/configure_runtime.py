"""`gpunode configure-runtime`: register the nvidia runtime and check that the running daemon has loaded
it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.options import (
    ENGINE,
    OUTPUT,
    CdiOption,
    ConfigOption,
    DefaultOption,
    DryRunOption,
    NameOption,
    NoRestartOption,
    RestartCommandOption,
    RuntimesOption,
    SocketOption,
    Strings,
    YesOption,
    changed,
    one_of,
    refuse_both,
    refuse_unknown,
)
from gpunode.commands.session import Session, verb
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.facts.registry import ENGINES
from gpunode.host import Host
from gpunode.host.journal import FileEdit, Journal
from gpunode.output.result import Progress, Result
from gpunode.runtime.engine import Active, DesiredConfig, Engine, Handler, Plan, Request
from gpunode.runtime.find import name_of_daemon
from gpunode.runtime.workflow import OPERATION, Intent, change

if TYPE_CHECKING:
    from gpunode.cdi.engines import EngineFiles

RESERVED = ("runc", "crun")
VARIANTS = ("cdi", "legacy")  # NVIDIA's programs beside nvidia-container-runtime that force one mode


@dataclass(frozen=True)
class RuntimeChoice:
    """The runtime to register, in every engine of a request.

    An empty `nvidia_runtime_path` is the engine's own default. `also` names variants of `VARIANTS` to
    register beside it.
    """

    nvidia_runtime_name: NameOption = "nvidia"
    nvidia_runtime_path: Annotated[
        str,
        typer.Option(
            "--nvidia-runtime-path",
            "--runtime-path",
            metavar="PATH",
            help="Path of the runtime program.",
            show_default="nvidia-container-runtime, for docker the one in PATH",
            rich_help_panel=ENGINE,
        ),
    ] = ""
    set_as_default: DefaultOption = False
    cdi: CdiOption = False
    also: Annotated[
        Strings,
        typer.Option(
            "--also",
            metavar="cdi|legacy,...",
            help="Also register nvidia-cdi (GPUs by CDI) or nvidia-legacy (GPUs by NVIDIA's hook).",
            autocompletion=one_of("cdi", "legacy", comma=True),
            rich_help_panel=ENGINE,
        ),
    ] = None
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Replace a drop-in file that nvidia-ctk or the GPU operator wrote.",
            rich_help_panel=ENGINE,
        ),
    ] = False


def run(
    host: Host,
    request: Request,
    progress: Progress,
    choice: RuntimeChoice = RuntimeChoice(),
) -> Result:
    """Configure the engines; kind RuntimeConfiguration, data `gpunode.runtime.workflow.RuntimeConfiguration`.

    With several engines the kind is RuntimeConfigurations and data lists them.
    """
    check_name(choice.nvidia_runtime_name)
    if request.exit_code and not request.dry_run:
        raise UsageError("--exit-code only means something with --dry-run", hint="add --dry-run")
    refuse_unknown("--also", choice.also or (), VARIANTS)
    name = choice.nvidia_runtime_name
    if name in map(_variant_name, choice.also or ()):
        raise UsageError(
            f"the name {name} is a variant's own", hint="choose another: --nvidia-runtime-name nvidia"
        )

    def prepare(engines: tuple[Engine, ...], _journal: Journal) -> tuple[Intent, ...]:
        intents = [_intent(engine, *_desired(engine, choice)) for engine in engines]
        if choice.cdi:
            users = tuple(name_of_daemon(engine.daemon) for engine in engines)
            intents = [intent._replace(cdi=(user,)) for intent, user in zip(intents, users, strict=True)]
            # the journal entry that creates the shared files names all engines: one that needs no change has
            # no entry of its own
            first = intents[0]._replace(cdi=users)
            intents[0] = _with_shared_files(first, host, engines, units=not request.no_restart)
        return tuple(intents)

    return change(host, request, prepare, progress)


def _intent(engine: Engine, desired: DesiredConfig, notes: tuple[str, ...]) -> Intent:
    return Intent(
        OPERATION,
        desired.names,
        lambda active: engine.plan(desired, active),
        lambda active: active.has(desired),
        desired,
        require=lambda: _require_programs(engine, desired),
        notes=notes,
    )


def _with_shared_files(intent: Intent, host: Host, engines: tuple[Engine, ...], *, units: bool) -> Intent:
    """The intent with the files of all engines: a CDI specification and the units that keep it up to date."""

    @functools.cache  # the GPUs are read once, also if the plan is made again with the daemon's answer
    def shared() -> EngineFiles:
        return _shared_files(host, engines, units=units)

    def plan(active: Active | None) -> Plan:
        own, files = intent.plan(active), shared()  # the engine's own refusal comes first
        edits = tuple(
            FileEdit(path, host.read_bytes(path), content, generated=path in files.generated, beside=True)
            for path, content in files.files
        )
        return own.with_beside(edits, files.units)._replace(notes=(*own.notes, *files.notes))

    return intent._replace(plan=plan)


def _shared_files(host: Host, engines: tuple[Engine, ...], *, units: bool) -> EngineFiles:
    from gpunode.cdi import engines as cdi_engines

    if all(engine.daemon.user for engine in engines):
        note = "the CDI specification is the node's, and root writes it: sudo gpunode cdi refresh --install"
        return cdi_engines.EngineFiles(notes=(note,))
    return cdi_engines.engine_files(host, tuple(engine.daemon for engine in engines), units=units)


def check_name(name: str) -> None:
    """`UsageError` for an invalid runtime name, or the name of the runtime of every other container."""
    if name in RESERVED or name.startswith("io.containerd."):
        raise UsageError(
            f"the runtime name {name} belongs to the engine's own low-level runtime",
            hint="choose another: --nvidia-runtime-name nvidia",
        )
    if not name or not name.isascii() or not all(c.isalnum() or c in "-_." for c in name):
        raise UsageError(f"{name!r} can't be a runtime's name", hint="use letters, digits, '-', '_' and '.'")


def _desired(engine: Engine, choice: RuntimeChoice) -> tuple[DesiredConfig, tuple[str, ...]]:
    """The desired configuration of the engine. With CDI and without the toolkit there is no runtime to
    register."""
    name, also = choice.nvidia_runtime_name, choice.also or ()
    requested = choice.nvidia_runtime_path or choice.set_as_default or also
    path = choice.nvidia_runtime_path or engine.program
    if not path.startswith("/") and not ENGINES[engine.daemon.name].on_path:
        raise UsageError(
            f"{engine.daemon.name} wants an absolute path, not {path!r}", hint="--nvidia-runtime-path /PATH"
        )
    if choice.cdi and not requested and engine.host.which(path) is None:
        unsafe = engine.host.unsafe_program(path.rpartition("/")[2])
        problem = f"{unsafe[0]}: {unsafe[1]}" if unsafe else f"{path} is not there"
        note = (
            f"{problem}, so no runtime is registered: containers get GPUs through CDI only,"
            " as in --device nvidia.com/gpu=all"
        )
        return DesiredConfig(cdi=True), (note,)
    handlers = [Handler(name, path)]
    for variant in dict.fromkeys(also):
        handlers.append(Handler(_variant_name(variant), f"{path}.{variant}"))
    return DesiredConfig(tuple(handlers), choice.set_as_default, choice.cdi, choice.replace), ()


def _variant_name(variant: str) -> str:
    """The name of the runtime of one of `VARIANTS`."""
    return f"nvidia-{variant}"


def _require_programs(engine: Engine, desired: DesiredConfig) -> None:
    """An engine with a missing runtime fails every container that requests it."""
    for handler in desired.handlers:
        if engine.host.which(handler.path) is None:
            if "/" not in handler.path or handler.path == engine.program:
                engine.host.refuse_unsafe(handler.path.rpartition("/")[2])
            install = "install the NVIDIA Container Toolkit: gpunode toolkit install"
            main = handler is desired.handlers[0]
            without = ", or do without it: --cdi" if _accepts_cdi(engine) else ""
            alternative = f"name the program: --nvidia-runtime-path PATH{without}"
            raise PreconditionError(
                f"{handler.path} is not there: {engine.daemon.name} could start no container with it",
                hint=f"{install}, {'' if without else 'or '}{alternative}"
                if main
                else f"{install}, or leave out --also",
                code="toolkit-missing",
            )


def _accepts_cdi(engine: Engine) -> bool:
    """Whether `--cdi` would be accepted: an old engine has no CDI."""
    try:
        engine.plan(DesiredConfig(cdi=True), None)
    except GpunodeError:
        return False
    return True


runtime_app = typer.Typer(rich_markup_mode=None)

# options of nvidia-ctk that gpunode recognizes and refuses, each with its reason
_HOOK = (
    "OCI hooks are deprecated: gpunode registers the runtime",
    "leave it out; for GPUs without the runtime: --cdi",
)
_UNSUPPORTED = {
    "--config-source": (
        "gpunode always reads the engine's files and queries the running daemon",
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


@dataclass(frozen=True)
class RefusedOptions:
    """Options of ``nvidia-ctk runtime configure`` that have no counterpart."""

    config_source: Annotated[str, typer.Option("--config-source", hidden=True)] = ""
    executable_path: Annotated[str, typer.Option("--executable-path", hidden=True)] = ""
    oci_hook_path: Annotated[str, typer.Option("--oci-hook-path", hidden=True)] = ""
    nvidia_runtime_hook_path: Annotated[str, typer.Option("--nvidia-runtime-hook-path", hidden=True)] = ""
    config_mode: Annotated[str, typer.Option("--config-mode", hidden=True)] = ""


def _refuse_unsupported(options: RefusedOptions) -> None:
    for option, value in changed(options).items():
        if option in _UNSUPPORTED:
            reason, hint = _UNSUPPORTED[option]
            raise UsageError(f"{option} has no counterpart: {reason}", hint=hint)
        if value not in _CONFIG_MODES:
            raise UsageError(f"{option} {value} has no counterpart: {_HOOK[0]}", hint=_HOOK[1])


@verb(runtime_app, "configure-runtime", "RuntimeConfiguration")
def configure_runtime(
    session: Session,
    runtime: RuntimesOption = None,
    config: ConfigOption = "",
    drop_in_config: Annotated[
        str,
        typer.Option(
            "--drop-in-config",
            metavar="PATH",
            help="Drop-in file to write (containerd 2, CRI-O).",
            show_default="a file that the daemon reads",
            rich_help_panel=ENGINE,
        ),
    ] = "",
    choice: RuntimeChoice = RuntimeChoice(),
    dry_run: DryRunOption = False,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="With --dry-run, exit 1 if changes are pending.", rich_help_panel=OUTPUT
        ),
    ] = False,
    no_restart: NoRestartOption = False,
    restart_command: RestartCommandOption = "",
    no_verify: Annotated[
        bool,
        typer.Option(
            "--no-verify", help="Don't query the running daemon afterwards.", rich_help_panel=ENGINE
        ),
    ] = False,
    socket: SocketOption = "",
    yes: YesOption = False,
    refused: RefusedOptions = RefusedOptions(),
) -> Result:
    """Register the nvidia runtime with a container engine. The engine is restarted or reloaded;
    a failure is rolled back.
    Needs root, except with --dry-run and for the user's own rootless engine. Running
    containers are stopped only after you confirm it, or with --yes.

    gpunode configure-runtime --runtime containerd --dry-run

    sudo gpunode configure-runtime --runtime docker
    """
    _refuse_unsupported(refused)
    refuse_both(no_restart=no_restart, restart_command=restart_command)
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
        confirm=session.confirm,
        configures=True,
    )
    return run(session.host, request, session.progress, choice)
