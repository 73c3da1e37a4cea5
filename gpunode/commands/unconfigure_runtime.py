"""`gpunode unconfigure-runtime`: take the nvidia runtime out and put the previous default back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gpunode.cdi import refresh
from gpunode.cdi.engines import kept_elsewhere
from gpunode.cdi.locations import STANDARD
from gpunode.cdi.spec import made_by_gpunode
from gpunode.commands.configure_runtime import check_name
from gpunode.errors import ValidationError
from gpunode.host import Host
from gpunode.host.journal import Journal
from gpunode.output.result import Progress, Result
from gpunode.runtime.engine import Active, Engine, FileEdit, Plan, Request, Unwanted
from gpunode.runtime.find import name_of_daemon
from gpunode.runtime.removal import (
    REMOVAL,
    Original,
    cdi_users,
    original_files,
    previous_default,
    switched_cdi,
)
from gpunode.runtime.workflow import Intent, change

__all__ = ["Options", "Request", "run"]

VARIANTS = ("nvidia-cdi", "nvidia-legacy")
_UNIT_FILES = (refresh.SERVICE_FILE, refresh.PATH_FILE, refresh.RULES_FILE)


@dataclass(frozen=True)
class Options:
    """The command line's options.

    `cdi` takes the CDI switch out as well, whoever set it, and the specification and units that gpunode made.
    """

    request: Request = field(default_factory=Request)
    nvidia_runtime_name: str = "nvidia"
    cdi: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Unconfigure the engines; kind RuntimeConfiguration, RuntimeConfigurations for several.

    Files that hold exactly what gpunode wrote become what they were, byte for byte; in others only the
    runtimes are taken out, whoever wrote them: with ``nvidia`` go the variants that NVIDIA's own tools add.
    """
    name = options.nvidia_runtime_name
    check_name(name)
    names = (name, *VARIANTS) if name == "nvidia" else (name,)

    def prepare(engines: tuple[Engine, ...], journal: Journal) -> tuple[Intent, ...]:
        past = {
            engine.daemon.config_path: functools.cache(
                functools.partial(original_files, engine, journal, names)
            )
            for engine in engines
        }
        # one journal entry has the files that all share
        shared = functools.cache(
            lambda: _shared(host, journal, engines, [known() for known in past.values()], options.cdi)
        )
        return tuple(
            _intent(
                engine,
                journal,
                names,
                options.cdi,
                past[engine.daemon.config_path],
                shared if engine is engines[0] else lambda: NONE,
            )
            for engine in engines
        )

    return change(host, options.request, prepare, progress)


@dataclass(frozen=True)
class Shared:
    """What becomes of the specification and its units, which all engines share."""

    edits: tuple[FileEdit, ...] = ()
    notes: tuple[str, ...] = ()


NONE = Shared()


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
        return NONE
    whom = f" for {', '.join(users)}" if users else ""
    command = f"gpunode unconfigure-runtime --cdi --runtime {name_of_daemon(engines[0].daemon)}"
    return Shared(notes=(f"{next(iter(ours))} stays{whom}; to take it and its units away: {command}",))


def _intent(
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
