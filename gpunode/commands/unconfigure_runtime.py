"""`gpunode unconfigure-runtime`: take the nvidia runtime out and put the previous default back."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

from gpunode.cdi import refresh
from gpunode.cdi.document import made_by_gpunode
from gpunode.cdi.places import STANDARD
from gpunode.commands.configure_runtime import check_name
from gpunode.errors import ValidationError
from gpunode.host import Host
from gpunode.journal import Journal
from gpunode.result import Progress, Result
from gpunode.runtime.engine import Active, Engine, FileEdit, Plan, Unwanted
from gpunode.runtime.request import Request
from gpunode.runtime.undo import REMOVAL, original_files, previous_default, switched_cdi
from gpunode.runtime.workflow import Intent, change

__all__ = ["Options", "Request", "run"]

VARIANTS = ("nvidia-cdi", "nvidia-legacy")


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
        return tuple(
            _intent(engine, journal, names, options.cdi, first=engine is engines[0]) for engine in engines
        )

    return change(host, options.request, prepare, progress)


def _intent(engine: Engine, journal: Journal, names: tuple[str, ...], cdi: bool, *, first: bool) -> Intent:
    known = functools.cache(lambda: original_files(engine, journal, names))

    def plan(active: Active | None) -> Plan:
        if known().edits:
            restored = known().plan(engine, names, active)
            if _loads(engine, restored):
                return restored
        previous = previous_default(engine, journal, names)
        switched = cdi or switched_cdi(engine, journal, names)
        removal = engine.plan_removal(Unwanted(names, previous, switched), active)
        found = _cdi_files(engine.host) if first else ()
        if not found:
            return removal
        if cdi:
            return removal.with_beside(found, refresh.UNITS)
        note = f"{found[0].path} stays; to take it and its units away: gpunode unconfigure-runtime --cdi"
        return dataclasses.replace(removal, notes=(*removal.notes, note))

    def gone(active: Active) -> bool:
        return not any(name in active.handlers for name in names)

    def done() -> None:
        for entry in known().entries:
            journal.tidy(entry)

    return Intent(REMOVAL, names, plan, gone, done=done)


def _cdi_files(host: Host) -> tuple[FileEdit, ...]:
    """What gpunode itself made for CDI and is still there, to be removed."""
    ours: list[FileEdit] = []
    spec = host.read_bytes(STANDARD)
    if made_by_gpunode(spec):
        ours.append(FileEdit(STANDARD, spec, None, generated=True, beside=True))
    for path in (refresh.SERVICE_FILE, refresh.PATH_FILE, refresh.RULES_FILE):
        content = host.read_bytes(path)
        if content is not None and refresh.MARKER.encode() in content:
            ours.append(FileEdit(path, content, None, beside=True))
    return tuple(ours)


def _loads(engine: Engine, plan: Plan) -> bool:
    """Whether the engine takes the files of before: a run may have mended what it refused."""
    try:
        engine.validate(plan.own, None)
    except ValidationError:
        return False
    return True
