"""`gpunode labels`: the node's labels, shown, or put where the cluster has them from; once, or kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from gpunode.commands.plugin_options import OPTIONS as EVERY
from gpunode.commands.plugin_options import sources
from gpunode.dataclass import dataclass, field, replace
from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.plugin.labels.sinks import chosen, lines, make_sinks
from gpunode.result import Block, Change, Diff, ErrorInfo, ExitCode, Progress, Result, Style, Text

if TYPE_CHECKING:
    from threading import Event

    from gpunode.plugin.config.options import Option
    from gpunode.plugin.config.problems import Problem
    from gpunode.plugin.labels.model import Labels
    from gpunode.plugin.settings import Settings

_KIND = "NodeLabels"
_SHARED = (
    *("config_file", "mig_strategy", "vendor", "device_discovery_strategy", "fail_on_init_error"),
    *("driver_root", "dev_root", "container_driver_root", "resource_name", "include", "exclude"),
    *("mps_root", "simulate", "lenient"),
)


def _rows() -> Iterator[Option]:
    """The options of this command: its own, and what tells of the GPUs among the plugin's."""
    by_field = {option.field: option for option in EVERY}
    sink = by_field["labels_to"]
    yield replace(sink, flags=("--to",), help="Where they go; any number. Without: they are shown.")
    for option in EVERY:
        if option.part and option.field == "output_file":
            yield replace(option, flags=(*option.flags, "--output"))
        elif option.part:
            yield option
    without = by_field["fail_on_init_error"]
    for name in _SHARED:
        yield (
            replace(without, help="false: where the driver doesn't answer, label as if there were no GPU.")
            if name == without.field
            else by_field[name]
        )


@cache
def options() -> tuple[Option, ...]:
    """What the command line may say; a line without options needs none of it."""
    return tuple(_rows())


@dataclass(frozen=True)
class Options:
    """`given` is what the command line says, by field of `gpunode.plugin.config.options`."""

    given: Mapping[str, Any] = field(default_factory=dict)
    dry_run: bool = False


def run(host: Host, options: Options, progress: Progress, stop: Event | None = None) -> Result:
    """Exit 1 or 2 with every problem of the configuration. `GpunodeError` if the GPUs can't be asked, or a
    place can't be had; what was put elsewhere before stays, and the next run goes on from there."""
    given = sources(host, options.given, "labels")
    resolved = given.resolve()
    if resolved.problems:
        return _refused(resolved.problems)
    settings = resolved.settings
    if not settings.labels.oneshot and not options.dry_run:
        if "stdout" in chosen(settings.labels):
            raise UsageError("--watch needs a place for the labels", hint="--to file, node-feature or node")
        from gpunode.commands.labels_watch import watch

        return watch(host, given, resolved, stop)
    from gpunode.plugin.labels.make import label

    with progress.step("asking for the GPUs"):
        labels = label(host, settings)
    done = _put(host, settings, labels, options.dry_run, progress)
    return _result(settings, labels, done, options.dry_run, resolved.warnings)


def _refused(problems: tuple[Problem, ...]) -> Result:
    usage = all(problem.usage for problem in problems)
    code = ExitCode.USAGE if usage else ExitCode.FAILED
    errors: tuple[ErrorInfo, ...] = tuple(problem.info() for problem in problems)
    return Result(_KIND, status="error", exit_code=code, errors=errors)


def _put(host: Host, settings: Settings, labels: Labels, dry_run: bool, progress: Progress) -> list[Change]:
    return [sink.put(labels.values, dry_run) for sink in make_sinks(host, settings, progress)]


def _result(
    settings: Settings, labels: Labels, done: list[Change], dry_run: bool, problems: tuple[Problem, ...]
) -> Result:
    warnings = (*(one.text for one in problems), *labels.warnings)
    return Result(
        _KIND,
        {"vendor": settings.vendor, "labels": labels.values, "changes": done, "dryRun": dry_run},
        status="warn" if warnings else "ok",
        messages=tuple(f"warning: {one}" for one in warnings),
        blocks=tuple(_blocks(settings, labels, done, dry_run)),
    )


def _blocks(settings: Settings, labels: Labels, done: list[Change], dry_run: bool) -> Iterator[Block]:
    if "stdout" in chosen(settings.labels):
        if not labels.values:
            yield Text("no labels", Style.DIM)
        for line in lines(labels.values).splitlines():
            yield Text(line)
    for change in done:
        if dry_run and change.diff:
            yield Diff(change.diff)
        word = f"would be {change.action}" if dry_run and change.action != "unchanged" else change.action
        style = Style.DIM if change.action == "unchanged" else Style.GOOD
        yield Text(f"{change.path}: {word} ({len(labels.values)} labels)", style)
