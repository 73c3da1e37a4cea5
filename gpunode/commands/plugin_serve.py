"""`gpunode plugin serve`: the device plugin in the foreground, until SIGTERM, Ctrl-C or `stop`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from threading import Event, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpunode import __version__
from gpunode.commands.plugin_options import sources, value_text
from gpunode.host import Host
from gpunode.output.result import ExitCode, Progress, Result, Text
from gpunode.plugin.config.options import OPTIONS
from gpunode.plugin.config.watch import ConfigWatch, Hangup

if TYPE_CHECKING:
    from gpunode.plugin.config.resolve import Resolved
    from gpunode.plugin.config.settings import Settings
    from gpunode.plugin.config.values import Problem
    from gpunode.plugin.model import Device
    from gpunode.plugin.serve import PluginService

_POLL_SECONDS = 0.25
_LOOK_SECONDS = 30.0  # signals and the end of the service wake us


@dataclass(frozen=True)
class Options:
    """What the command line says, by field of `gpunode.plugin.config.options`; the rest is resolved."""

    given: Mapping[str, Any] = field(default_factory=dict)


def run(host: Host, options: Options, progress: Progress, stop: Event | None = None) -> Result:
    """Serve until told to stop. Logs go to stderr, one logfmt line each; `progress` has nothing to add.

    Exit 2 or 1 with every problem of the command line or the config file. `PreconditionError` if it can't
    serve at all: not root, or another plugin is on the same socket. A missing driver, GPU or kubelet is
    waited for.
    """
    host.restrict_umask()
    hangup = Hangup()
    with until_signal(hangup) as asked:
        given = sources(host, options.given)
        resolved = given.resolve()
        if resolved.problems:
            return refused("PluginRun", resolved.problems)
        from gpunode.plugin.compose import make_service
        from gpunode.plugin.logfmt import LogfmtLog

        log = LogfmtLog(sys.stderr, host.environ)
        log.info("starting", version=__version__, **dict(_chosen(resolved)))
        for warning in resolved.warnings:
            log.warning(warning.text, **warning.fields)

        def watch(service: PluginService) -> ConfigWatch:
            return ConfigWatch(service, given, hangup, resolved.content)

        service = make_service(host, resolved.settings, log, [watch])
        _serve(service, asked, stop)
    if asked:  # who sends a signal to a whole process group may send it twice
        log.info("stopped", signal=asked[0])
    return _result(resolved.settings, service)


def _chosen(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """What isn't the default; `check-config` tells all, and where it comes from."""
    settings = resolved.settings
    for option in OPTIONS:
        if option.field in resolved.origins and (settings.labels.to or not option.part):
            yield option.flags[0].removeprefix("--"), value_text(option, settings)
    if settings.rules:
        yield "rules", ", ".join(f"{rule.pattern} {rule.name}" for rule in settings.rules)
    if settings.sharing is not None:
        shares = (f"{entry.name} by {entry.replicas}" for entry in settings.sharing.resources)
        yield settings.sharing.strategy, ", ".join(shares)


def refused(kind: str, problems: tuple[Problem, ...], data: Mapping[str, Any] | None = None) -> Result:
    """Every problem at once; usage (2) if all of them stand on the command line or in the environment."""
    usage = all(problem.usage for problem in problems)
    code = ExitCode.USAGE if usage else ExitCode.FAILED
    errors = tuple(problem.info() for problem in problems)
    return Result(kind, data or {}, status="error", exit_code=code, errors=errors)


def _serve(service: PluginService, asked: _Asked, stop: Event | None) -> None:
    with closing(service.host.waiter()) as waiter:
        waiter.hear_signals()
        asked.wake = service.at_end = waiter.wake
        asked.let_go = service.backend.let_go
        asked.look = service.wake
        service.start()
        while service.running and not asked and not (stop is not None and stop.is_set()):
            waiter.wait(_LOOK_SECONDS if stop is None else _POLL_SECONDS)
        service.stop()
        service.join()


def _result(settings: Settings, service: PluginService) -> Result:
    snapshots = service.snapshots
    return Result(
        "PluginRun",
        {
            "resource": settings.resource_name,
            "devices": [_told(device) for one in snapshots.values() for device in one.devices],
            "resources": [
                {"name": name, "devices": [_told(device) for device in one.devices]}
                for name, one in snapshots.items()
            ],
            "registrations": service.registrations,
        },
        blocks=tuple(Text(_served(service, name, len(one.devices))) for name, one in snapshots.items()),
    )


def _served(service: PluginService, name: str, count: int) -> str:
    link = service.links.get(name)
    if link is not None and (link.registrations or not service.settings.kubelet_socket):
        return f"served {count} {name}"
    return f"served none of {count} {name}: {link.status if link else 'no socket was created'}"


def _told(device: Device) -> dict[str, object]:
    return {
        "id": device.id,
        "index": device.unit.index,
        "healthy": device.healthy,
        "problem": device.problem.reason if device.problem else "",
    }


class _Asked(list[str]):
    """The signals that came. What handlers call takes no lock: they interrupt whoever may hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.wake: Callable[[], None] = lambda: None
        self.let_go: Callable[[], None] = lambda: None
        self.look: Callable[[], None] = lambda: None


@contextmanager
def until_signal(hangup: Hangup) -> Iterator[_Asked]:
    """Collect the signals that end us, and SIGHUP, instead of dying of them; only the main thread can."""
    asked = _Asked()
    if current_thread() is not main_thread():
        yield asked
        return

    def end(number: int, frame: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)
        asked.wake()

    def let_go(number: int, frame: FrameType | None) -> None:
        asked.let_go()

    def look_again(number: int, frame: FrameType | None) -> None:
        hangup.asked = True
        asked.look()

    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.signal(number, end) for number in ends}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, look_again)
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, let_go)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # those that came before are delivered now
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
