"""`gpunode configure-runtime`: register the nvidia runtime and see that the running daemon has it."""

from __future__ import annotations

from dataclasses import dataclass

from gpunode.errors import PreconditionError, UsageError
from gpunode.host import Host
from gpunode.journal import Journal
from gpunode.result import Progress, Result
from gpunode.runtime.engine import Engine, Wanted
from gpunode.runtime.undo import OPERATION
from gpunode.runtime.workflow import Intent, Request, change

# dockerd resolves a bare name through its own PATH; containerd wants an absolute path (as nvidia-ctk has it)
RESERVED = ("runc", "crun")
PROGRAMS = {"docker": "nvidia-container-runtime", "containerd": "/usr/bin/nvidia-container-runtime"}


@dataclass(frozen=True)
class Options:
    """The command line's options under their own names."""

    runtime: str = "auto"
    config: str = ""
    drop_in_config: str = ""
    nvidia_runtime_name: str = "nvidia"
    nvidia_runtime_path: str = ""
    set_as_default: bool = False
    cdi: bool = False
    dry_run: bool = False
    exit_code: bool = False
    no_restart: bool = False
    restart_command: str = ""
    no_verify: bool = False
    socket: str = ""
    yes: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Configure one engine; kind RuntimeConfiguration, data `gpunode.runtime.report.RuntimeConfiguration`."""
    check_name(options.nvidia_runtime_name)
    if options.exit_code and not options.dry_run:
        raise UsageError("--exit-code only means something with --dry-run", hint="add --dry-run")

    def prepare(engine: Engine, _journal: Journal) -> Intent:
        wanted = _wanted(engine, options)
        return Intent(
            OPERATION,
            wanted.runtime_name,
            lambda active: engine.plan(wanted, active),
            lambda active: active.has(wanted),
            wanted,
            require=lambda: _require_program(engine, wanted),
        )

    request = Request(
        runtime=options.runtime,
        config=options.config,
        drop_in_config=options.drop_in_config,
        socket=options.socket,
        restart_command=options.restart_command,
        dry_run=options.dry_run,
        exit_code=options.exit_code,
        no_restart=options.no_restart,
        no_verify=options.no_verify,
        yes=options.yes,
        configures=True,
    )
    return change(host, request, prepare, progress)


def check_name(name: str) -> None:
    """`UsageError` for what can't be a runtime's name, or is the name of what runs every other container."""
    if name in RESERVED or name.startswith("io.containerd."):
        raise UsageError(
            f"the runtime name {name} belongs to the engine's own low-level runtime",
            hint="choose another: --nvidia-runtime-name nvidia",
        )
    if not name or not name.isascii() or not all(c.isalnum() or c in "-_." for c in name):
        raise UsageError(f"{name!r} can't be a runtime's name", hint="use letters, digits, '-', '_' and '.'")


def _wanted(engine: Engine, options: Options) -> Wanted:
    path = options.nvidia_runtime_path or PROGRAMS[engine.daemon.name]
    if engine.daemon.name == "containerd" and not path.startswith("/"):
        raise UsageError(
            f"containerd wants an absolute path, not {path!r}", hint="--nvidia-runtime-path /PATH"
        )
    return Wanted(options.nvidia_runtime_name, path, options.set_as_default, options.cdi)


def _require_program(engine: Engine, wanted: Wanted) -> None:
    """An engine with a runtime that isn't there fails every container that asks for it."""
    if engine.host.which(wanted.runtime_path) is None:
        raise PreconditionError(
            f"{wanted.runtime_path} is not there: {engine.daemon.name} could start no container with it",
            hint="install the NVIDIA Container Toolkit (package nvidia-container-toolkit)"
            " or name the program: --nvidia-runtime-path PATH",
            code="toolkit-missing",
        )
