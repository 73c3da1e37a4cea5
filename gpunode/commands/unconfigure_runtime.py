"""`gpunode unconfigure-runtime`: remove the nvidia runtime and restore the previous default."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from gpunode.cdi import refresh
from gpunode.cdi.engines import kept_elsewhere
from gpunode.cdi.locations import STANDARD
from gpunode.cdi.spec import made_by_gpunode
from gpunode.commands.configure_runtime import check_name
from gpunode.commands.options import (
    ConfigOption,
    DryRunOption,
    NameOption,
    NoRestartOption,
    RestartCommandOption,
    RuntimesOption,
    SocketOption,
    YesOption,
    refuse_both,
)
from gpunode.commands.session import Session, verb
from gpunode.errors import ValidationError
from gpunode.host import Host
from gpunode.host.journal import FileEdit, Journal
from gpunode.output.result import Progress, Result
from gpunode.runtime.engine import Active, Engine, Plan, Request, UnwantedConfig
from gpunode.runtime.find import name_of_daemon
from gpunode.runtime.removal import (
    RollbackPlan,
    cdi_users,
    plan_rollback_of_runtimes,
    previous_default,
    switched_cdi,
)
from gpunode.runtime.workflow import REMOVAL, Intent, change

REMOVAL_VARIANTS = ("nvidia-cdi", "nvidia-legacy")
_UNIT_FILES = (refresh.SERVICE_FILE, refresh.PATH_FILE, refresh.RULES_FILE)


def unconfigure(
    host: Host, request: Request, progress: Progress, *, name: str = "nvidia", cdi: bool = False
) -> Result:
    """Unconfigure the engines; kind RuntimeConfiguration, RuntimeConfigurations for several.

    Files that hold exactly what gpunode wrote are restored byte for byte; from others only the runtimes are
    removed, whichever tool wrote them: ``nvidia`` includes the variants that NVIDIA's own tools add. With
    `cdi` the CDI switch is removed as well, whichever tool set it, and the specification and units that
    gpunode made.
    """
    check_name(name)
    names = (name, *REMOVAL_VARIANTS) if name == "nvidia" else (name,)

    def prepare(engines: tuple[Engine, ...], journal: Journal) -> tuple[Intent, ...]:
        # once a run: finding them starts the program of each installed engine
        cdi_paths = functools.cache(functools.partial(_cdi_paths, host))
        rollbacks = {
            engine.daemon.config_path: functools.cache(
                functools.partial(plan_rollback_of_runtimes, engine, journal, names)
            )
            for engine in engines
        }
        # one journal entry has the files that all share
        shared = functools.cache(
            lambda: _shared(journal, engines, [plan() for plan in rollbacks.values()], cdi, cdi_paths())
        )
        return tuple(
            _removal(
                engine,
                journal,
                names,
                cdi,
                cdi_paths,
                rollbacks[engine.daemon.config_path],
                shared if engine is engines[0] else lambda: NOTHING_SHARED,
            )
            for engine in engines
        )

    return change(host, request, prepare, progress)


@dataclass(frozen=True)
class SharedChange:
    """The change of the specification and its units, which all engines share."""

    edits: tuple[FileEdit, ...] = ()
    notes: tuple[str, ...] = ()


NOTHING_SHARED = SharedChange()


def _shared(
    journal: Journal,
    engines: tuple[Engine, ...],
    rollbacks: Sequence[RollbackPlan],
    cdi: bool,
    cdi_paths: tuple[str, ...],
) -> SharedChange:
    """Removed on request, else restored to the state before these engines, unless another one needs them."""
    restored = {
        edit.path: edit for rollback in rollbacks for edit in rollback.edits if edit.path in cdi_paths
    }
    own_files = {edit.path: edit for edit in _own_files(engines[0].host, cdi_paths)}
    if cdi:
        return SharedChange(tuple({**own_files, **restored}.values()))
    leaving = {name_of_daemon(engine.daemon) for engine in engines}
    users = [name for name in cdi_users(journal) if name not in leaving]
    if restored and not users:
        return SharedChange(tuple(restored.values()))
    if not own_files:
        return NOTHING_SHARED
    users_text = f" for {', '.join(users)}" if users else ""
    command = f"gpunode unconfigure-runtime --cdi --runtime {name_of_daemon(engines[0].daemon)}"
    return SharedChange(
        notes=(f"{next(iter(own_files))} stays{users_text}; to take it and its units away: {command}",)
    )


def _removal(
    engine: Engine,
    journal: Journal,
    names: tuple[str, ...],
    cdi: bool,
    cdi_paths: Callable[[], tuple[str, ...]],
    rollback_of_engine: Callable[[], RollbackPlan],
    shared: Callable[[], SharedChange],
) -> Intent:
    def plan(active: Active | None) -> Plan:
        own, beside = _own(engine, journal, names, cdi, cdi_paths, rollback_of_engine(), active), shared()
        full = own.with_beside(beside.edits, refresh.UNITS if beside.edits else ())
        return full._replace(notes=(*full.notes, *beside.notes))

    def done() -> None:
        for entry in rollback_of_engine().entries:
            journal.remove_created_directories(entry)

    return Intent(REMOVAL, names, plan, lambda active: active.lacks(names), done=done)


def _own(
    engine: Engine,
    journal: Journal,
    names: tuple[str, ...],
    cdi: bool,
    cdi_paths: Callable[[], tuple[str, ...]],
    rollback: RollbackPlan,
    active: Active | None,
) -> Plan:
    """The plan for the engine's files: as they were before, or without the runtimes."""
    own_cdi, refusal = switched_cdi(engine, journal, names), ""
    edits = tuple(edit for edit in rollback.edits if edit.path not in cdi_paths())
    if edits and (own_cdi or not cdi):  # the earlier file may have another tool's switch
        restored = rollback._replace(edits=edits).engine_plan(engine, names, active)
        try:
            engine.validate(restored.own, None)
        except ValidationError as error:  # a run may have fixed what the engine refused
            refusal = f"cannot restore the previous files, so only the runtimes are removed: {error.message}"
        else:
            return restored
    previous = previous_default(engine, journal, names)
    removal = engine.plan_removal(UnwantedConfig(names, previous, cdi or own_cdi), active)
    return removal._replace(notes=(*removal.notes, *filter(None, (refusal,))))


def _cdi_paths(host: Host) -> tuple[str, ...]:
    """Every file that gpunode writes for CDI."""
    return (STANDARD, *kept_elsewhere(host), *_UNIT_FILES)


def cdi_files(host: Host) -> tuple[FileEdit, ...]:
    """Files that gpunode itself made for CDI and that still exist, to be removed."""
    return _own_files(host, _cdi_paths(host))


def _own_files(host: Host, paths: tuple[str, ...]) -> tuple[FileEdit, ...]:
    edits: list[FileEdit] = []
    for path in paths:
        content = host.read_bytes(path)
        specification = path not in _UNIT_FILES
        if made_by_gpunode(content) if specification else refresh.MARKER.encode() in (content or b""):
            edits.append(FileEdit(path, content, None, generated=specification, beside=True))
    return tuple(edits)


unconfigure_app = typer.Typer(rich_markup_mode=None)


@verb(unconfigure_app, "unconfigure-runtime", "RuntimeConfiguration")
def unconfigure_runtime(
    session: Session,
    runtime: RuntimesOption = None,
    config: ConfigOption = "",
    drop_in_config: Annotated[
        str,
        typer.Option(
            "--drop-in-config",
            metavar="PATH",
            help="Drop-in file that has the runtime (containerd 2, CRI-O).",
            show_default="detected",
        ),
    ] = "",
    nvidia_runtime_name: NameOption = "nvidia",
    cdi: Annotated[
        bool,
        typer.Option(
            "--cdi",
            help="Also disable CDI in the engine and remove gpunode's CDI files.",
        ),
    ] = False,
    dry_run: DryRunOption = False,
    no_restart: NoRestartOption = False,
    restart_command: RestartCommandOption = "",
    socket: SocketOption = "",
    yes: YesOption = False,
) -> Result:
    """Remove the nvidia runtime from a container engine. The previous default runtime is restored.

    Needs root, except with --dry-run and for the user's own rootless engine. Running containers are stopped
    only after you confirm it, or with --yes.

    sudo gpunode unconfigure-runtime --runtime docker
    """
    refuse_both(no_restart=no_restart, restart_command=restart_command)
    request = Request(
        runtimes=tuple(runtime or ("auto",)),
        config=config,
        drop_in_config=drop_in_config,
        socket=socket,
        restart_command=restart_command,
        dry_run=dry_run,
        no_restart=no_restart,
        yes=yes,
        confirm=session.confirm,
    )
    return unconfigure(session.host, request, session.progress, name=nvidia_runtime_name, cdi=cdi)
