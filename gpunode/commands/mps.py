"""`gpunode mps`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpunode.commands.outcome import Session
from gpunode.commands.plugin import refused, until_signal
from gpunode.commands.plugin_options import SettingsCommand, sources
from gpunode.commands.session import verb
from gpunode.errors import PreconditionError
from gpunode.host import Host
from gpunode.output.result import Progress, Result, Text
from gpunode.plugin.config.watch import Hangup

if TYPE_CHECKING:
    from gpunode.gpu.model import Inventory
    from gpunode.plugin.config.resolve import Sources
    from gpunode.plugin.config.settings import Settings
    from gpunode.plugin.logfmt import Log
    from gpunode.plugin.model import Plan


mps_app = typer.Typer(help="Share GPUs between processes.", no_args_is_help=True, rich_markup_mode=None)


@verb(mps_app, "serve", "MpsRun", cls=SettingsCommand, service=lambda given: True)
def mps_serve(
    session: Session,
    resource: Annotated[
        list[str] | None,
        typer.Option(
            "--resource",
            metavar="NAME",
            envvar="GPUNODE_MPS_RESOURCE",
            help="Only daemons of this resource; any number. All that sharing.mps names by default.",
        ),
    ] = None,
    container_limits: Annotated[
        bool,
        typer.Option(
            "--container-limits",
            envvar="GPUNODE_MPS_CONTAINER_LIMITS",
            help="Leave limits to the containers, where the plugin is gpunode's and gives several shares.",
        ),
    ] = False,
    **given: Any,
) -> Result:
    """Run the MPS control daemons alone. For a node whose plugin is NVIDIA's, or another service.

    Takes the config file and the options of `plugin serve`. Stays in the foreground until SIGTERM or Ctrl-C.

    gpunode mps serve --config-file /etc/gpunode/plugin.yaml
    """
    options = Options(given=given, resources=tuple(resource or ()), container_limits=container_limits)
    return run(session.host, options, session.progress)


# `gpunode mps serve`: MPS control daemons in the foreground, without a device plugin.

_POLL_SECONDS = 0.25
_SOON_SECONDS = 2.0  # while there is no driver yet


@dataclass(frozen=True)
class Options:
    """`given` are the options of `plugin serve`, by field of `gpunode.plugin.config.options`."""

    given: Mapping[str, Any] = field(default_factory=dict)
    resources: tuple[str, ...] = ()
    container_limits: bool = False


def run(host: Host, options: Options, progress: Progress, stop: Event | None = None) -> Result:
    """Keep the daemons until told to stop. Logs go to stderr; `progress` has nothing to add.

    Exit 2 or 1 with every problem of the command line or the config file. `PreconditionError` under another
    root. A missing driver or MPS program is waited for.
    """
    from gpunode.plugin.logfmt import open_log
    from gpunode.plugin.mps.supervisor import Supervisor
    from gpunode.plugin.service import Systemd

    if not host.live:
        raise PreconditionError(
            f"no daemon runs under --root {host.root}", hint="run it on that node, without --root"
        )
    hangup = Hangup()
    with until_signal(hangup) as asked:
        given = sources(host, {**options.given, "mps": "true"})
        resolved = given.resolve()
        if resolved.problems:
            return refused("MpsRun", resolved.problems)
        log = open_log(sys.stderr, host.environ)
        for warning in resolved.warnings:
            log.warning(warning.text, **warning.fields)
        node = _Node(host, log, given, resolved.settings, options.resources)
        supervisor = Supervisor(
            host, log, node.source, lambda: None, own=True, limits=not options.container_limits
        )
        systemd = Systemd(host, log)
        systemd.tell("READY=1")
        waiter = host.waiter()
        waiter.hear_signals()
        try:
            while not asked and not (stop is not None and stop.is_set()):
                if hangup.take():
                    node.reload()
                node.look()
                supervisor.tick(host.monotonic())
                systemd.report(supervisor.status)
                waiter.wait(_POLL_SECONDS)
            told = supervisor.told()
        finally:
            systemd.tell("STOPPING=1")
            supervisor.close()
            waiter.close()
    for name in asked:
        log.info("stopped", signal=name)
    count = f"{len(told)} MPS control {'daemon' if len(told) == 1 else 'daemons'}"
    return Result(
        "MpsRun",
        {"daemons": told},
        blocks=(Text(f"ended {count}" if told else "no MPS daemon ran"),),
    )


class _Node:
    """Settings and plan as they are now."""

    def __init__(
        self, host: Host, log: Log, given: Sources, settings: Settings, only: tuple[str, ...]
    ) -> None:
        from gpunode.plugin.compose import make_backend
        from gpunode.plugin.errand import Errand
        from gpunode.plugin.logfmt import OnChange

        self._host = host
        self._log = log
        self._say = OnChange(log)
        self._given = given
        self._only = only
        self._backend = make_backend(host, settings, log)
        self._settings = _others(settings)
        self._inventory: Inventory | None = None
        self._plan: Plan | None = None
        self._next = 0.0
        self._again = False
        self._errand = Errand("probe")

    def source(self) -> tuple[Settings, Plan] | None:
        return None if self._plan is None else (self._settings, self._plan)

    def reload(self) -> None:
        """Read the config file again; one that can't be used changes nothing."""
        resolved = self._given.resolve()
        if resolved.problems:
            first = resolved.problems[0].info()
            self._log.error("config file not taken over", reason=first.message, hint=first.hint)
            return
        self._settings = _others(resolved.settings)
        self._log.info("config file read again")
        self._again = True

    def look(self) -> None:
        """Ask NVML again when it is time to, beside the thread that must hear signals: it may hang."""
        if self._errand.busy or not (self._again or self._host.monotonic() >= self._next):
            return
        self._again = False
        self._errand.start(self._look)

    def _look(self) -> None:
        from gpunode.errors import GpunodeError
        from gpunode.gpu.probe import probe
        from gpunode.plugin.model import remembered
        from gpunode.plugin.nvidia.platform import nvml_library

        library = nvml_library(self._host, self._settings)
        seen = probe(self._host, self._settings.probe_seconds, library=library)
        self._next = self._host.monotonic() + (
            self._settings.rediscover_seconds if seen.inventory else _SOON_SECONDS
        )
        if seen.inventory is None:
            self._say.warning(f"waiting for the NVIDIA driver: {seen.message}", hint="gpunode doctor")
            return
        self._inventory = remembered(seen.inventory, self._inventory)
        try:
            plan = self._backend.plan(self._settings, self._inventory)
        except GpunodeError as error:
            self._say.warning(error.message, hint=error.hint)
            return
        self._say.reset()
        kept = tuple(one for one in plan.resources if not self._only or one.name in self._only)
        plan = replace(plan, resources=kept)
        if plan != self._plan:
            self._plan = plan


def _others(settings: Settings) -> Settings:
    """As the plugin sees it whose daemons somebody else keeps: one daemon for each resource."""
    return replace(settings, mps=False)
