"""`gpunode unconfigure-runtime`: take the nvidia runtime out and put the previous default back."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpunode.commands.configure_runtime import check_name
from gpunode.errors import ValidationError
from gpunode.host import Host
from gpunode.journal import Journal
from gpunode.result import Progress, Result
from gpunode.runtime.engine import Active, Engine, Plan, Unwanted
from gpunode.runtime.request import Request
from gpunode.runtime.undo import original_files, previous_default, switched_cdi
from gpunode.runtime.workflow import Intent, change

__all__ = ["Options", "Request", "run"]

VARIANTS = ("nvidia-cdi", "nvidia-legacy")


@dataclass(frozen=True)
class Options:
    """The command line's options. `cdi` takes the CDI switch out as well, whoever set it."""

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
        return tuple(_intent(engine, journal, names, options.cdi) for engine in engines)

    return change(host, options.request, prepare, progress)


def _intent(engine: Engine, journal: Journal, names: tuple[str, ...], cdi: bool) -> Intent:
    def plan(active: Active | None) -> Plan:
        original = original_files(engine, journal, names)
        if original.edits:
            restored = original.plan(engine, names, active)
            if _loads(engine, restored):
                return restored
        previous = previous_default(engine, journal, names)
        switched = cdi or switched_cdi(engine, journal, names)
        return engine.plan_removal(Unwanted(names, previous, switched), active)

    def gone(active: Active) -> bool:
        return not any(name in active.handlers for name in names)

    return Intent("unconfigure-runtime", names, plan, gone)


def _loads(engine: Engine, plan: Plan) -> bool:
    """Whether the engine takes the files of before: a run may have mended what it refused."""
    try:
        engine.validate(plan.own, None)
    except ValidationError:
        return False
    return True
