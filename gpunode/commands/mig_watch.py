"""`gpunode mig apply --watch`: the layout follows the Node's label for as long as this runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from gpunode.commands import mig_apply
from gpunode.commands.mig_follower import Follower
from gpunode.commands.mig_labels import refuse_another
from gpunode.commands.plugin_serve import until_signal
from gpunode.dataclass import dataclass
from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.mig import node_labels
from gpunode.plugin.config.watch import Hangup
from gpunode.plugin.logfmt import LogfmtLog
from gpunode.plugin.systemd import Systemd
from gpunode.result import Result, Text

FILE_SECONDS = 2.0  # where the kernel doesn't tell of changes; a look is a read of a small file


@dataclass(frozen=True)
class MigWatch:
    """`data` with --watch: how often a layout was applied or refused, and what held at the end."""

    passes: int
    label: str
    state: str


def watch(host: Host, options: mig_apply.Options) -> Result:
    """Until SIGTERM or Ctrl-C, which end a change that is under way as they end `mig apply`: by its way back.

    `UsageError` for options that make no sense with it; `PreconditionError` where MIG can't be changed, or
    another follows the label; what `access.connect` raises. A server that doesn't answer is waited for.
    """
    _refuse(options)
    mig_apply.require(host)
    refuse_another(host, "LABEL")
    labels = node_labels.connected(host, options.access, options.node, follows=True)
    hangup = Hangup()
    with until_signal(hangup) as asked:
        log = LogfmtLog(sys.stderr, host.environ)
        waiter = host.waiter()
        waiter.hear_signals()
        asked.wake = asked.look = waiter.wake

        def interrupt() -> None:
            raise KeyboardInterrupt

        @contextmanager
        def interruptible(on: bool) -> Iterator[None]:
            before, asked.wake = asked.wake, interrupt if on else waiter.wake
            try:
                if on and asked:
                    interrupt()
                yield
            finally:
                asked.wake = before

        follower = Follower(host, options, labels, log, interruptible)
        systemd = Systemd(host, log)
        systemd.tell("READY=1")
        log.info("following the label", node=labels.node, label=node_labels.CONFIG)
        try:
            while not asked:
                told = waiter.watch((Path(PurePath(follower.file).parent),))
                pause = follower.turn(hangup.take())
                systemd.report(follower.status)
                if not asked:
                    waiter.wait(pause if told else min(pause, FILE_SECONDS))
        except KeyboardInterrupt:
            if not asked:
                raise
        finally:
            systemd.tell("STOPPING=1")
            waiter.close()
    for name in asked:
        log.info("stopped", signal=name)
    times = f"{follower.passes} times" if follower.passes != 1 else "once"
    data = MigWatch(follower.passes, follower.label, follower.said)
    return Result("MigApplication", data, blocks=(Text(f"a layout was looked after {times}"),))


def _refuse(options: mig_apply.Options) -> None:
    if not options.config_file:
        raise UsageError("no configuration file was given", hint="name it: --config-file FILE")
    if options.config_file == "-":
        raise UsageError("--watch reads the file again and again", hint="name one: --config-file FILE")
    if options.label:
        raise UsageError(
            f"with --watch the Node's label {node_labels.CONFIG} says which configuration",
            hint="leave --selected-config and its variables out, and set the label:"
            f" gpunode node label {node_labels.CONFIG}={options.label}",
        )
    if options.persist:
        raise UsageError("--watch applies the layout when it starts", hint="leave --persist out")
