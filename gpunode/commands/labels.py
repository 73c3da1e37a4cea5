"""`gpunode labels`: print the node's labels, or publish them to the cluster, once or continuously."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gpunode.commands.options import DryRunOption, refuse_both
from gpunode.commands.plugin_options import SettingsCommand, refused, sources
from gpunode.commands.session import Session, until_signal, verb
from gpunode.errors import GpunodeError, UsageError
from gpunode.gpu.model import Inventory, Reading, Topology
from gpunode.host import Host
from gpunode.output.result import Block, Change, Diff, Progress, Result, Style, Text
from gpunode.plugin.config.options import OPTIONS as EVERY
from gpunode.plugin.config.options import Option
from gpunode.plugin.config.resolve import OptionSources, ResolvedSettings
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.config.values import TRUE
from gpunode.plugin.labels.make import VFIO, label, none_there
from gpunode.plugin.labels.model import Labels
from gpunode.plugin.labels.nvidia import vfio_inventory
from gpunode.plugin.labels.sinks import lines, make_sinks, sink_names
from gpunode.plugin.model import Backend, complete_inventory
from gpunode.plugin.nvidia import platform

if TYPE_CHECKING:
    from gpunode.gpu.nvml import GpuEvent
    from gpunode.plugin.logfmt import Log

_KIND = "NodeLabels"
_SHARED = (
    *("config_file", "mig_strategy", "vendor", "device_discovery_strategy", "fail_on_init_error"),
    *("driver_root", "dev_root", "container_driver_root", "resource_name", "include", "exclude"),
    *("mps_root", "simulate", "lenient", "log_format"),
)


def _rows() -> Iterator[Option]:
    """The options of this command: its own, and those plugin options that describe the GPUs."""
    by_field = {option.field: option for option in EVERY}
    sink = by_field["labels_to"]
    text = "Publish the labels to these places."
    yield sink._replace(
        names=("--to",), variables=(sink.variable,), part="labels", help=text, default="stdout"
    )
    for option in EVERY:
        if option.part and option.field == "output_file":
            yield option._replace(names=(*option.flags, "--output"))
        elif option.part:
            yield option
    text = "false: if the driver fails, label the node as without GPUs."
    differences: dict[str, dict[str, Any]] = {
        "fail_on_init_error": {"help": text, "ignored": False},
        "mps_root": {"help": "Accepted and ignored: no label depends on it.", "default": "", "ignored": True},
    }
    for name in _SHARED:
        yield by_field[name]._replace(**differences.get(name, {}))


@cache
def options() -> tuple[Option, ...]:
    """Options of the command line."""
    return tuple(_rows())


def run(
    host: Host,
    flags: Mapping[str, Any],
    progress: Progress,
    *,
    dry_run: bool = False,
) -> Result:
    """Label the node as the command line says: `flags`, by field of `gpunode.plugin.config.options`.

    Exit 1 or 2 with every problem of the configuration. `GpunodeError` if the GPUs can't be queried, or a
    sink isn't available; labels already written to other sinks stay, and the next run continues from there.
    """
    origins = sources(host, flags, "labels")
    resolved = origins.resolve()
    if resolved.problems:
        warnings = [f"warning: {problem.text}" for problem in resolved.warnings]
        return replace(refused(_KIND, resolved.problems), messages=tuple(warnings))
    settings = resolved.settings
    _refuse_unused(resolved)
    if not settings.labels.oneshot and not dry_run:
        if "stdout" in sink_names(settings.labels):
            raise UsageError("--watch needs a place for the labels", hint="--to file, node-feature or node")
        return watch(host, origins, resolved)
    warnings = [problem.text for problem in resolved.warnings]
    try:
        with progress.step("reading the GPUs"):
            labels = label(host, settings)
        warnings += labels.warnings
        changes = [sink.put(labels.values, dry_run) for sink in make_sinks(host, settings, progress)]
    except GpunodeError:
        for warning in warnings:
            progress.note(f"warning: {warning}")
        raise
    return Result(
        _KIND,
        NodeLabels(settings.vendor, labels.values, tuple(changes), dry_run),
        status="warn" if warnings else "ok",
        messages=tuple(f"warning: {warning}" for warning in warnings),
        blocks=tuple(_blocks(settings, labels, changes, dry_run)),
    )


class NodeLabels(NamedTuple):
    """`data` of the envelope: the labels by key, and what happened where they were written."""

    vendor: str
    labels: Mapping[str, str]
    changes: tuple[Change, ...]
    dry_run: bool


class LabelWatch(NamedTuple):
    """`data` of the envelope when `--watch` ends: how often labels were made."""

    passes: int


_CLUSTER = ("node-feature", "node")
_USED_BY = {
    **{"output_file": ("file",), "use_node_feature_api": ("node-feature",)},
    **dict.fromkeys(("namespace", "pod_name", "node_name", "kubeconfig", "kube_context", "server"), _CLUSTER),
}


def _refuse_unused(resolved: ResolvedSettings) -> None:
    """`UsageError` for a flag of a destination that isn't chosen. A variable or a file may serve several
    commands."""
    to = sink_names(resolved.settings.labels)
    for field, sinks in _USED_BY.items():
        flag = resolved.origins.get(field, "")
        if flag.startswith("--") and not set(sinks).intersection(to):
            destinations = " or ".join(sinks)
            raise UsageError(
                f"{flag} is for --to {destinations}", hint=f"add --to {sinks[0]}, or leave {flag} out"
            )


def _blocks(settings: Settings, labels: Labels, changes: list[Change], dry_run: bool) -> Iterator[Block]:
    if "stdout" in sink_names(settings.labels):
        if not labels.values:
            yield Text("no labels", Style.DIM)
        for line in lines(labels.values).splitlines():
            yield Text(line)
    for change in changes:
        if dry_run and change.diff:
            yield Diff(change.diff)
        word = f"would be {change.action}" if dry_run and change.action != "unchanged" else change.action
        style = Style.DIM if change.action == "unchanged" else Style.GOOD
        yield Text(f"{change.path}: {word} ({len(labels.values)} labels)", style)


# `gpunode labels --watch`: labels are updated while this runs; NVML stays open in its own child process.

_TURN_SECONDS = 1.0
_END_SECONDS = 1.5


def watch(host: Host, origins: OptionSources, resolved: ResolvedSettings) -> Result:
    """Run until SIGTERM or Ctrl-C. Changes of the config file take effect; a missing driver is waited for."""
    # not for a run without --watch, which should load as little as possible
    from gpunode.plugin.config.watch import ConfigWatch
    from gpunode.plugin.labels.watch import Labeller
    from gpunode.plugin.logfmt import open_log
    from gpunode.plugin.service import Systemd

    with until_signal() as signals:
        log = open_log(sys.stderr, host.environ, resolved.settings.log_format)
        for warning in resolved.warnings:
            log.warning(warning.text, **warning.fields)
        node = _Node(host, log, resolved.settings)
        signals.let_go = node.let_go
        node.on_change = signals.wake
        config = ConfigWatch(node, log, node.hurry, origins, signals.take_hangup, resolved.content)
        labeller = Labeller(host, log, node.source)
        systemd = Systemd(host, log)
        node.start()
        systemd.tell("READY=1")
        try:
            while not signals:
                config.tick(host.monotonic())
                labeller.tick(host.monotonic())
                signals.wait(_TURN_SECONDS)
        finally:
            systemd.tell("STOPPING=1")
            node.stop()
            labeller.close()
    for name in signals:
        log.info("stopped", signal=name)
    passes = f"{labeller.passes} times" if labeller.passes != 1 else "once"
    return Result("NodeLabels", LabelWatch(labeller.passes), blocks=(Text(f"labels were made {passes}"),))


class _Node:
    """The present GPUs, as the backend of `plugin serve` reports them, and the settings.

    A `ReportReceiver` for the backend, and the owner of the settings for the config file's watcher.
    """

    def __init__(self, host: Host, log: Log, settings: Settings) -> None:
        self._host = host
        self._stop = Event()
        self._inventory: Inventory | None = None
        self._next = 0.0
        self._gone = False  # there is no backend to wait for
        self._backend: Backend | None = None
        self._thread: Thread | None = None
        self.settings = settings
        self.config_trouble = ""
        self.on_change: Callable[[], None] = lambda: None
        if settings.device_discovery_strategy == VFIO:
            return
        from gpunode.plugin.compose import make_backend

        # without a directory: the plugin's is not ours, and a simulated one listens there for faults
        self._backend = make_backend(host, replace(settings, state_dir=""), log)
        task = self._backend.run
        self._thread = Thread(target=task, args=(self, self._stop), name="backend", daemon=True)

    def start(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._backend is not None and self._thread is not None:
            self._backend.hurry()
            self._thread.join(_END_SECONDS)

    def hurry(self) -> None:
        if self._backend is not None:
            self._backend.hurry()

    def configure(self, settings: Settings) -> None:
        self.settings = settings
        self.on_change()

    def let_go(self) -> None:
        if self._backend is not None:
            self._backend.let_go()

    def source(self) -> tuple[Settings, Inventory | None] | None:
        """See `gpunode.plugin.labels.watch.Source`."""
        if self._backend is None:
            return self.settings, self._on_the_bus()
        if self._inventory is None and not self._gone:
            return None
        return self.settings, self._inventory

    def _on_the_bus(self) -> Inventory:
        """GPUs without a driver that gpunode supports, read again from time to time."""
        now = self._host.monotonic()
        if self._inventory is None or now >= self._next:
            self._inventory, self._next = vfio_inventory(self._host), now + self.settings.rediscover_seconds
        return self._inventory

    # --- what the backend reports ----------------------------------------------------------------------

    def seen(self, inventory: Inventory, topology: Topology) -> None:
        self._inventory, self._gone = complete_inventory(inventory, self._inventory), False
        self.on_change()

    def broken(self, reason: str, sure: bool) -> None:
        """Keep existing labels, unless there is no GPU, or the settings require otherwise."""
        if self.settings.vendor != "nvidia":
            return
        if sure and platform.tegra_files(self._host):
            self._inventory, self._gone = Inventory(""), False  # the labeller queries CUDA
            self.on_change()
        elif sure and (not self.settings.fail_on_init_error or none_there(self._host)):
            self._inventory, self._gone = None, True
            self.on_change()

    def readings(self, readings: Sequence[Reading]) -> None:
        """Ignored."""

    def event(self, event: GpuEvent) -> None:
        """Ignored."""


# `gpunode labels`.

labels_app = typer.Typer(rich_markup_mode=None)


class LabelsCommand(SettingsCommand):
    """Takes GPU feature discovery's words, too: ``-o PATH`` is its output file, and not one of our forms."""

    def rows(self) -> Any:
        return options()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = list(args)
        for at, word in enumerate(arguments[:-1]):
            if word == "-o" and "/" in arguments[at + 1]:
                arguments[at] = "--output-file"
        return super().parse_args(ctx, arguments)


@verb(
    labels_app,
    "labels",
    "NodeLabels",
    cls=LabelsCommand,
    own_output=True,
    service=lambda flags: flags["watch"] and not flags["dry_run"],
)
def labels(
    session: Session,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Keep running and update the labels.",
        ),
    ] = False,
    dry_run: DryRunOption = False,
    **flags: Any,
) -> Result:
    """Print or publish node labels that describe the GPUs. They are the labels of GPU Feature Discovery.

    They can be published as a feature file or NodeFeature object for Node Feature Discovery,
    or on the Node itself. GPU Feature Discovery's flags, variables and config file are accepted.
    Root is needed for --to file. Options with [true|false] are false unless a default is shown.

    gpunode labels

    gpunode labels --to node --dry-run

    gpunode labels --watch --to node-feature --namespace node-feature-discovery
    """
    refuse_both(watch=watch, oneshot=flags.get("oneshot") in TRUE)
    if watch and not dry_run:
        flags["oneshot"] = "false"
    return run(session.host, flags, session.progress, dry_run=dry_run)
