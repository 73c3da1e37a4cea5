"""`gpunode mig`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from gpunode.commands import mig_apply as apply_command
from gpunode.commands import mig_plan as plan_command
from gpunode.commands.help_page import command_group
from gpunode.commands.mig_apply import MigLabels
from gpunode.commands.mig_plan import ConfigurationOptions, LayoutRequest, parted_option
from gpunode.commands.options import (
    ContextOption,
    DryRunOption,
    KubeconfigOption,
    NodeOption,
    ServerOption,
    one_of,
    refuse_both,
    refuse_unknown,
)
from gpunode.commands.session import Session, verb
from gpunode.errors import GpunodeError, UsageError
from gpunode.gpu.model import short_uuid
from gpunode.host import Host
from gpunode.kubernetes.access import Access
from gpunode.mig.config import as_json, as_yaml, difference, empty_instances, export
from gpunode.mig.model import GpuInstance, GpuLayout, Layouts, Profile
from gpunode.mig.session import read_layouts
from gpunode.output.result import Block, Cell, ErrorInfo, ExitCode, Progress, Result, Style, Table, Text

mig_app = command_group("Partition GPUs into MIG devices.")


@verb(mig_app, "list", "MigLayout")
def mig_list(
    session: Session,
    profiles: Annotated[
        bool, typer.Option("--profiles", help="Print the MIG profiles and placements that each GPU supports.")
    ] = False,
) -> Result:
    """List the MIG layout of the GPUs. It has modes, instances, placements, and UUIDs of the MIG devices.

    Needs root or the driver's capability mig/monitor; without, it shows only whether MIG is on.

    sudo gpunode mig list

    sudo gpunode mig list --profiles
    """
    layouts = look(session.host, session.progress)
    details = _profiles(layouts) if profiles else (row for gpu in layouts.gpus for row in _layout(gpu))
    heading = Text(f"driver {layouts.driver_version}", Style.HEADING)
    blocks = (heading, *details) if layouts.gpus else (heading, Text("NVML lists no GPU.", Style.WARN))
    errors = tuple(unreadable(layouts, placements=profiles))
    notes = plan_command.unfinished_notes(session.host, layouts)
    failed = ("fail", exit_code(errors)) if errors else ("ok", ExitCode.OK)
    return Result("MigLayout", layouts, *failed, notes, errors, blocks)


@verb(mig_app, "export", "MigExport")
def mig_export(
    session: Session,
    label: Annotated[
        str, typer.Option("-l", "--config-label", metavar="LABEL", help="Name of the configuration.")
    ] = "current",
    format_name: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORMAT", help="yaml or json.", autocompletion=one_of("yaml", "json")
        ),
    ] = "yaml",
) -> Result:
    """Print the current layout as a configuration. gpunode mig apply and NVIDIA's mig-parted read it.

    Needs root to read MIG instances.

    sudo gpunode mig export --config-label today > mig.yaml
    """
    refuse_unknown("format", [format_name], FORMATS)
    if _LABEL.fullmatch(label) is None:
        raise UsageError(
            f"{label!r} can't be a configuration's label",
            hint="use at most 63 letters, digits, '-', '_' and '.', no sign first or last",
        )
    layouts = look(session.host, session.progress)
    for error in unreadable(layouts, placements=False):  # an incomplete configuration is worse than none
        raise GpunodeError(error.message, hint=error.hint, code=error.code, exit_code=exit_code((error,)))
    document = export(layouts, label)
    text = as_json(document) if format_name == "json" else as_yaml(document)
    lines = tuple(Text(line, Style.DOCUMENT) for line in text.splitlines())
    return Result("MigExport", Exported(label, document), messages=tuple(_notes(layouts)), blocks=lines)


# `gpunode mig plan|apply|assert`.


@verb(mig_app, "plan", "MigPlan")
def mig_plan(session: Session, options: ConfigurationOptions) -> Result:
    """Show what apply would do, and the processes that block it.

    Needs root to read MIG instances and the processes of all users.

    sudo gpunode mig plan -f mig.yaml -c all-balanced
    """
    host = session.host
    selection = plan_command.choose(options)
    node_plan, busy = plan_command.look_and_plan(host, selection, session.progress)
    notes = plan_command.all_notes(host, node_plan)
    if node_plan.changes and host.live and not host.is_root:
        notes = (*notes, "only root can list all users' open files: more processes may block the change")
    data = plan_command.data_of(selection.path, selection.label, node_plan, busy)
    page = list(plan_command.blocks(data, busy))
    if node_plan.changes:
        drains = dict.fromkeys(obstacle.drain for obstacle in busy if obstacle.drain)
        stop = "".join(f" --drain {word}" for word in drains)
        command = f"gpunode mig apply -f {options.config_file} -c {selection.label}{stop}"
        page.append(Text(command, Style.COMMAND))
    return Result("MigPlan", data, messages=notes, blocks=tuple(page))


@verb(
    mig_app,
    "apply",
    "MigApplication",
    service=lambda options: options["watch"] and not options["dry_run"],
)
def mig_apply(
    session: Session,
    request: LayoutRequest,
    node_labels: Annotated[
        bool,
        typer.Option(
            "--node-labels", help="Update the Node's nvidia.com/mig.config labels; always on in a pod."
        ),
    ] = False,
    kubeconfig: KubeconfigOption = "",
    kube_context: ContextOption = "",
    server: ServerOption = "",
    node: NodeOption = "",
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Keep running and apply the Node's nvidia.com/mig.config label when it changes."
        ),
    ] = False,
    dry_run: DryRunOption = False,
) -> Result:
    """Apply a MIG configuration. Other MIG devices are deleted without a question. It is refused while GPUs
    are in use; on failure all is rolled back.

    Needs root; with --dry-run only to read MIG instances.

    sudo gpunode mig apply -f mig.yaml -c all-balanced --dry-run

    sudo gpunode mig apply -f mig.yaml -c all-balanced --drain nvidia-dcgm

    sudo gpunode mig apply -f mig.yaml --watch --kubeconfig kubelet
    """
    access = Access(kubeconfig, kube_context, server)
    if watch and not dry_run:
        from gpunode.commands import mig_follow

        return mig_follow.watch(session.host, request, access, node)
    report_labels = node_labels or bool(kubeconfig or kube_context or server or node)
    labels = MigLabels(session.host, access, node, session.progress, report_labels)
    if request.persist and request.mode_only:
        raise UsageError("--persist applies a whole layout at boot", hint="leave --mode-only out")
    if dry_run:
        return apply_command.dry_run(session.host, request, labels, session.progress)
    return apply_command.once(session.host, request, labels, session.progress)


class MigAssertion(NamedTuple):
    """`data`: whether it `holds`, and what differs, a GPU each. `looked_at` is file, mode or layout."""

    config: str
    label: str
    looked_at: str
    holds: bool
    differences: tuple[str, ...] = ()


@verb(mig_app, "assert", "MigAssertion")
def mig_assert(
    session: Session,
    options: ConfigurationOptions,
    valid_config: Annotated[
        bool,
        parted_option(
            "-a", "--valid-config", env="VALID_CONFIG", text="Validate the file without querying GPUs."
        ),
    ] = False,
) -> Result:
    """Check whether the GPUs match a MIG configuration. The exit code is 5 if they don't.

    Needs root to read MIG instances.

    sudo gpunode mig assert -f mig.yaml -c all-balanced
    """
    file, mode_only = options.config_file, options.mode_only
    refuse_both(mode_only=mode_only, valid_config=valid_config)
    if valid_config and not options.selected_config:  # a file with several configurations is valid
        _, config = plan_command.read(file)
        text = Text(f"{config.path} is valid: {', '.join(config.labels)}", Style.GOOD)
        return Result("MigAssertion", MigAssertion(config.path, "", "file", holds=True), blocks=(text,))
    selection = plan_command.choose(options)
    if valid_config:
        return _asserted(file, MigAssertion(selection.path, selection.label, "file", holds=True), ())
    layouts = look(session.host, session.progress)
    desired = selection.desired(layouts, mode_only=mode_only)
    differences = [difference(wish, mode_only=mode_only) for wish in desired.all]
    wrong = tuple(text for text in differences if text)
    notes = list(desired.notes)
    notes += [
        f"GPU {gpu.index} is in no entry of {selection.label!r} and isn't looked at"
        for gpu in desired.unnamed
    ]
    if not mode_only:
        notes += [
            f"GPU {wish.gpu.index}: GPU instance {gi} has no compute instance and takes up room"
            for wish in desired.all
            for gi in empty_instances(wish.gpu)
        ]
    looked = "mode" if mode_only else "layout"
    return _asserted(
        file, MigAssertion(selection.path, selection.label, looked, not wrong, wrong), tuple(notes)
    )


def _asserted(config_file: str, data: MigAssertion, notes: tuple[str, ...]) -> Result:
    if data.holds:
        phrases = {
            "file": "is valid",
            "mode": "has the modes that are set",
            "layout": "is what the GPUs have",
        }
        text = Text(f"{data.config}: {data.label} {phrases[data.looked_at]}", Style.GOOD)
        return Result("MigAssertion", data, messages=notes, blocks=(text,))
    error = ErrorInfo(
        "mig-differs",
        f"the {data.looked_at} is not that of {data.label}",
        f"see what would change: gpunode mig plan -f {config_file} -c {data.label}",
    )
    blocks = tuple(Text(line, Style.BAD) for line in data.differences)
    return Result("MigAssertion", data, "fail", ExitCode.DIFFERS, notes, (error,), blocks)


# `gpunode mig list`: the MIG layout of every GPU, slot by slot, and with --profiles what it supports.

_INSTANCES = ("  GI", "CI", "PROFILE", "SLOTS", "MEMORY", "UUID")
_PROFILES = ("  PROFILE", "ID", "MEMORY", "SMS", "MAX", "FREE", "STARTS:SIZE", "PARTS")
_ROW = 76  # columns; a longer row would be folded on a usual terminal
_LINE = 80


def look(host: Host, progress: Progress) -> Layouts:
    """The current layouts."""
    with progress.step("reading the layouts"):
        return read_layouts(host)


def unreadable(layouts: Layouts, *, placements: bool) -> Iterator[ErrorInfo]:
    """Reasons why GPUs or instances are unknown; with `placements` also the possible placements."""
    broken = [gpu for gpu in layouts.gpus if gpu.error]
    if broken:
        reasons = "; ".join(f"GPU {gpu.index}: {gpu.error}" for gpu in broken)
        count = f"{len(broken)} of {len(layouts.gpus)} GPUs"
        yield ErrorInfo("gpu-unreadable", f"{count} can't be read: {reasons}", "gpunode doctor")
    gpus = [gpu for gpu in layouts.gpus if gpu.untold and (gpu.current or placements)]
    if gpus:
        numbers = ", ".join(str(gpu.index) for gpu in gpus)
        subject = "the places of the profiles" if placements else "the MIG instances"
        plural = "s" if len(gpus) > 1 else ""
        message = f"{subject} of GPU{plural} {numbers} can't be read: {gpus[0].untold}"
        yield ErrorInfo("mig-permission", message, "run it as root, or with the capability mig/monitor")


def exit_code(errors: Sequence[ErrorInfo]) -> ExitCode:
    """A `PreconditionError` where only rights are missing."""
    rights = all(error.code == "mig-permission" for error in errors)
    return ExitCode.PRECONDITION if rights else ExitCode.FAILED


# --- current layout -------------------------------------------------------------------------------------


def _layout(gpu: GpuLayout) -> Iterator[Block]:
    words, style = _mode(gpu)
    name = f"  {gpu.name}" if gpu.name else ""
    line = f"GPU {gpu.index}{name}  {words}"
    if gpu.uuid and len(line) + len(gpu.uuid) + 2 <= _LINE:
        yield Text(f"{line}  {gpu.uuid}", style)
    else:
        yield Text(line, style)
        if gpu.uuid:
            yield Text(f"  {gpu.uuid}", style)
    if not gpu.current or gpu.untold or gpu.error:
        return
    placed = sorted(gpu.instances, key=lambda gi: gi.placement.start)
    if gpu.slots:
        yield from (Text(f"  {drawn}") for drawn in drawing(gpu.slots, placed))
    if placed:
        yield Table(_INSTANCES, tuple(_rows(gpu, placed)))


def _mode(gpu: GpuLayout) -> tuple[str, Style]:
    if gpu.error:
        return f"can't be read: {gpu.error}", Style.BAD
    if not gpu.capable:
        return "no MIG", Style.DIM
    now, pending = ("on" if enabled else "off" for enabled in (gpu.current, gpu.pending))
    if gpu.mode_pending:
        return f"MIG {now}, {pending} after a reset", Style.WARN
    if gpu.current and gpu.untold:
        return "MIG on, instances unreadable", Style.WARN
    empty = gpu.current and not gpu.instances
    return f"MIG {now}{', empty' if empty else ''}", Style.GOOD if gpu.current else Style.PLAIN


def drawing(slots: int, instances: Sequence[GpuInstance]) -> tuple[str, str]:
    """The numbers of the memory slots, and below them the instances: ``[3g.40gb      ][1g.10gb]   .``"""
    names = {gi.id: gi.name for gi in instances}
    width = _width(names, instances)
    if width * slots > _ROW:
        names = {gi.id: re.sub(r"\.\d+gb", "", gi.name) for gi in instances}
        width = _width(names, instances)
    row = {slot: ".".center(width) for slot in range(slots)}
    for gi in instances:
        place = gi.placement
        row = {slot: text for slot, text in row.items() if not place.start <= slot < place.end}
        row[place.start] = f"[{names[gi.id].ljust(width * place.size - 2)}]"
    numbers = "".join(str(slot).center(width) for slot in range(slots))
    return numbers.rstrip(), "".join(row[slot] for slot in sorted(row)).rstrip()


def _width(names: Mapping[int, str], instances: Sequence[GpuInstance]) -> int:
    """Width of one slot, so that each name fits its slots."""
    return max([4, *(-(-(len(names[gi.id]) + 2) // gi.placement.size) for gi in instances)])


def _rows(gpu: GpuLayout, placed: Sequence[GpuInstance]) -> Iterator[tuple[Cell | str, ...]]:
    sizes = {profile.index: profile.memory_mib for profile in gpu.profiles}
    for gi in placed:
        last = gi.placement.end - 1
        slots = str(last) if last == gi.placement.start else f"{gi.placement.start}-{last}"
        memory = _gib(sizes.get(gi.profile, 0))
        if not gi.compute:
            empty = Cell("no compute instance: unusable", Style.WARN)
            yield f"  {gi.id}", "-", gi.name, slots, memory, empty
        for ci in gi.compute:
            uuid = Cell(ci.uuid or "-", short=short_uuid(ci.uuid))
            yield f"  {gi.id}", str(ci.id), ci.profile, slots, memory, uuid


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB" if mib else "-"


# --- supported profiles ---------------------------------------------------------------------------------


def _profiles(layouts: Layouts) -> Iterator[Block]:
    """GPUs with the same profiles and the same free capacity are shown together."""
    groups: dict[tuple[object, ...], list[GpuLayout]] = {}
    for gpu in layouts.gpus:
        groups.setdefault((gpu.name, gpu.capable, gpu.current, gpu.error, gpu.profiles), []).append(gpu)
    for members in groups.values():
        first = members[0]
        numbers = ", ".join(str(member.index) for member in members)
        words, style = _mode(first)
        yield Text(f"GPU{'s' if len(members) > 1 else ''} {numbers}  {first.name}  {words}", style)
        if first.profiles:
            yield Table(_PROFILES, tuple(_profile(profile) for profile in first.profiles))
            for profile in first.profiles:
                if profile.aliases:
                    yield Text(f"  {profile.name} is also called {', '.join(profile.aliases)}", Style.DIM)
        elif first.capable and not first.error:
            yield Text("  the driver reports the profiles only while MIG is on", Style.DIM)


def _profile(profile: Profile) -> tuple[Cell | str, ...]:
    size = profile.placements[0].size if profile.placements else 0
    starts = _runs([place.start for place in profile.placements])
    parts = [
        f"{compute.max_count}x{compute.slices}c"
        for compute in profile.compute
        if compute.slices != profile.slices
    ]
    free = "-" if profile.free is None else str(profile.free)
    return (
        f"  {profile.name}",
        str(profile.id),
        _gib(profile.memory_mib),
        str(profile.sms) if profile.sms else "-",
        str(profile.max_count),
        Cell(free, Style.DIM if profile.free == 0 else Style.PLAIN),
        f"{starts}:{size}" if size else "-",
        " ".join(parts) or "-",
    )


def _runs(numbers: Sequence[int]) -> str:
    """``0-6``, or ``0,2,4`` where some between are missing."""
    ordered = sorted(numbers)
    first, last = ordered[:1], ordered[-1:]
    whole = len(ordered) > 2 and ordered == list(range(first[0], last[0] + 1))
    return f"{first[0]}-{last[0]}" if whole else ",".join(map(str, ordered))


# `gpunode mig export`: the present layouts as a configuration that `mig apply`, and mig-parted, take.

FORMATS = ("yaml", "json")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # it may become a node label's value


class Exported(NamedTuple):
    """`data` of kind MigExport: the label and the document as it is printed."""

    label: str
    config: dict[str, Any]


def _notes(layouts: Layouts) -> Iterator[str]:
    for gpu in layouts.gpus:
        empty = [str(gi.id) for gi in gpu.instances if not gi.compute]
        if empty:
            yield (
                f"GPU {gpu.index}: GPU instance {', '.join(empty)} holds no compute instance and is left out:"
                " a configuration can't say it"
            )
        if gpu.mode_pending:
            yield f"GPU {gpu.index}: its mode changes with the next reset; the current one is written"
