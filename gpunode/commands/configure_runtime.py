"""`gpunode configure-runtime`: register the nvidia runtime and see that the running daemon has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gpunode.errors import PreconditionError, UsageError
from gpunode.host import Host
from gpunode.host.journal import Journal
from gpunode.output.result import Progress, Result
from gpunode.runtime.engine import Active, Engine, FileEdit, Handler, Plan, Request, Wanted
from gpunode.runtime.find import name_of_daemon
from gpunode.runtime.removal import OPERATION
from gpunode.runtime.workflow import Intent, change

__all__ = ["Options", "Request", "run"]

RESERVED = ("runc", "crun")
VARIANTS = ("cdi", "legacy")  # NVIDIA's programs beside nvidia-container-runtime that force one mode


@dataclass(frozen=True)
class Options:
    """The command line's options: `request` is what every change takes, the rest is this command's own.

    `also` names variants of `VARIANTS` to register beside the runtime. An empty `nvidia_runtime_path` is the
    engine's own default.
    """

    request: Request = field(default_factory=lambda: Request(configures=True))
    nvidia_runtime_name: str = "nvidia"
    nvidia_runtime_path: str = ""
    set_as_default: bool = False
    cdi: bool = False
    also: tuple[str, ...] = ()
    replace: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Configure the engines; kind RuntimeConfiguration, data `gpunode.runtime.workflow.RuntimeConfiguration`.

    With several engines the kind is RuntimeConfigurations and data lists them.
    """
    check_name(options.nvidia_runtime_name)
    if options.request.exit_code and not options.request.dry_run:
        raise UsageError("--exit-code only means something with --dry-run", hint="add --dry-run")
    unknown = [variant for variant in options.also if variant not in VARIANTS]
    if unknown:
        raise UsageError(f"no variant {unknown[0]!r} of the runtime", hint=f"known: {', '.join(VARIANTS)}")

    def prepare(engines: tuple[Engine, ...], _journal: Journal) -> tuple[Intent, ...]:
        # one journal entry has the files that all share; an engine's own refusal comes before theirs
        made = functools.cache(lambda: _companions(host, engines, options))
        users = tuple(name_of_daemon(engine.daemon) for engine in engines) if options.cdi else ()
        # the entry that brings the files tells whom they are for: an engine that needs no change has none
        first, *others = engines
        return (
            _intent(first, options, made, users),
            *(_intent(one, options, lambda: NONE, users[n : n + 1]) for n, one in enumerate(others, 1)),
        )

    return change(host, options.request, prepare, progress)


@dataclass(frozen=True)
class Companions:
    """Files beside the engine's own: a CDI specification and the units that keep it fresh."""

    edits: tuple[FileEdit, ...] = ()
    units: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


NONE = Companions()


def _companions(host: Host, engines: tuple[Engine, ...], options: Options) -> Companions:
    if not options.cdi:
        return NONE
    if all(engine.daemon.user for engine in engines):
        note = "the CDI specification is the node's, and root writes it: sudo gpunode cdi refresh --install"
        return Companions(notes=(note,))
    from gpunode.cdi.engines import companions

    made = companions(host, tuple(engine.daemon for engine in engines), units=not options.request.no_restart)
    edits = tuple(
        FileEdit(path, host.read_bytes(path), content, generated=path in made.generated, beside=True)
        for path, content in made.files
    )
    return Companions(edits, made.units, made.notes)


def _intent(
    engine: Engine, options: Options, made: Callable[[], Companions], users: tuple[str, ...]
) -> Intent:
    wanted, notes = _wanted(engine, options)

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


def _wanted(engine: Engine, options: Options) -> tuple[Wanted, tuple[str, ...]]:
    """What the engine should have. With CDI and no toolkit here there is no runtime to register."""
    path = options.nvidia_runtime_path or engine.program
    if engine.program.startswith("/") and not path.startswith("/") and engine.daemon.name != "docker":
        raise UsageError(
            f"{engine.daemon.name} wants an absolute path, not {path!r}", hint="--nvidia-runtime-path /PATH"
        )
    asked = options.nvidia_runtime_path or options.set_as_default or options.also
    if options.cdi and not asked and engine.host.which(path) is None:
        unsafe = engine.host.unsafe_program(path.rpartition("/")[2])
        problem = f"{unsafe[0]}: {unsafe[1]}" if unsafe else f"{path} is not there"
        note = (
            f"{problem}, so no runtime is registered: containers get their GPUs by CDI alone,"
            " as in --device nvidia.com/gpu=all"
        )
        return Wanted(cdi=True), (note,)
    handlers = [Handler(options.nvidia_runtime_name, path)]
    for variant in dict.fromkeys(options.also):
        handlers.append(Handler(f"nvidia-{variant}", f"{path}.{variant}"))
    if len({handler.name for handler in handlers}) < len(handlers):
        raise UsageError(
            f"the name {options.nvidia_runtime_name} is a variant's own",
            hint="choose another: --nvidia-runtime-name nvidia",
        )
    return Wanted(tuple(handlers), options.set_as_default, options.cdi, options.replace), ()


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
