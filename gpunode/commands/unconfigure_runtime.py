"""`gpunode unconfigure-runtime`: take the nvidia runtime out and put the previous default back."""

from __future__ import annotations

from dataclasses import dataclass

from gpunode.commands.configure_runtime import check_name
from gpunode.host import Host
from gpunode.journal import Journal
from gpunode.result import Progress, Result
from gpunode.runtime.engine import Active, Engine, Plan
from gpunode.runtime.undo import original_files, previous_default
from gpunode.runtime.workflow import Intent, Request, change


@dataclass(frozen=True)
class Options:
    """The command line's options under their own names."""

    runtime: str = "auto"
    config: str = ""
    drop_in_config: str = ""
    nvidia_runtime_name: str = "nvidia"
    dry_run: bool = False
    no_restart: bool = False
    restart_command: str = ""
    no_verify: bool = False
    socket: str = ""
    yes: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Unconfigure one engine; kind RuntimeConfiguration.

    Files that hold exactly what gpunode wrote become what they were, byte for byte; in others only the
    runtime is taken out.
    """
    name = options.nvidia_runtime_name
    check_name(name)

    def prepare(engine: Engine, journal: Journal) -> Intent:
        def plan(active: Active | None) -> Plan:
            edits = original_files(engine, journal, name)
            if edits:
                return engine.restoring(edits, name, active)
            return engine.plan_removal(name, previous_default(engine, journal, name), active)

        return Intent("unconfigure-runtime", name, plan, lambda active: name not in active.handlers)

    request = Request(
        runtime=options.runtime,
        config=options.config,
        drop_in_config=options.drop_in_config,
        socket=options.socket,
        restart_command=options.restart_command,
        dry_run=options.dry_run,
        no_restart=options.no_restart,
        no_verify=options.no_verify,
        yes=options.yes,
    )
    return change(host, request, prepare, progress)
