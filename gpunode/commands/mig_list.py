"""`gpunode mig list`: how every GPU is cut, slot by slot, and with --profiles what it could be cut into."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunode.commands import mig_plan
from gpunode.gpu.mig import read_layouts
from gpunode.gpu.mig_model import GpuInstance, GpuLayout, Layouts, Profile
from gpunode.host import Host
from gpunode.output.result import (
    Block,
    Cell,
    ErrorInfo,
    ExitCode,
    Progress,
    Result,
    Style,
    Table,
    Text,
    plain,
)

_INSTANCES = ("  GI", "CI", "PROFILE", "SLOTS", "MEMORY", "UUID")
_PROFILES = ("  PROFILE", "ID", "MEMORY", "SMS", "MAX", "FREE", "STARTS:SIZE", "PARTS")
_ROW = 76  # columns; a longer row would be folded on a usual terminal
_LINE = 80


@dataclass(frozen=True)
class Options:
    """`profiles`: show what each GPU offers instead of what it holds."""

    profiles: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """List the layouts; kind MigLayout. `MigError` if NVML doesn't answer; exit 1 if a GPU can't be read, 3
    if rights are missing to read its instances."""
    layouts = look(host, progress)
    shown = _profiles(layouts) if options.profiles else _layouts(layouts)
    heading = Text(f"driver {layouts.driver_version}", Style.HEADING)
    blocks = (heading, *shown) if layouts.gpus else (heading, Text("NVML lists no GPU.", Style.WARN))
    errors = tuple(unreadable(layouts, placements=options.profiles))
    left = mig_plan.told(host, layouts)
    if not errors:
        return Result("MigLayout", _data(layouts), messages=left, blocks=blocks)
    return Result("MigLayout", _data(layouts), "fail", exit_code(errors), left, errors, blocks)


def look(host: Host, progress: Progress) -> Layouts:
    """The layouts as they are now."""
    with progress.step("reading the layouts"):
        return read_layouts(host)


def unreadable(layouts: Layouts, *, placements: bool) -> Iterator[ErrorInfo]:
    """What can't be told of the GPUs; with `placements` also where their profiles could lie."""
    broken = [gpu for gpu in layouts.gpus if gpu.error]
    if broken:
        told = "; ".join(f"GPU {gpu.index}: {gpu.error}" for gpu in broken)
        count = f"{len(broken)} of {len(layouts.gpus)} GPUs"
        yield ErrorInfo("gpu-unreadable", f"{count} can't be read: {told}", "gpunode doctor")
    kept = [gpu for gpu in layouts.gpus if gpu.untold and (gpu.current or placements)]
    if kept:
        numbers = ", ".join(str(gpu.index) for gpu in kept)
        what = "the places of the profiles" if placements else "the MIG instances"
        plural = "s" if len(kept) > 1 else ""
        message = f"{what} of GPU{plural} {numbers} can't be read: {kept[0].untold}"
        yield ErrorInfo("mig-permission", message, "run it as root, or with the capability mig/monitor")


def exit_code(errors: Sequence[ErrorInfo]) -> ExitCode:
    """A precondition where nothing but rights is missing."""
    rights = all(one.code == "mig-permission" for one in errors)
    return ExitCode.PRECONDITION if rights else ExitCode.FAILED


def _data(layouts: Layouts) -> dict[str, Any]:
    """The layouts as JSON, each compute instance with the profile that it makes."""
    data: dict[str, Any] = plain(layouts)
    for gpu, told in zip(layouts.gpus, data["gpus"], strict=True):
        for gi, instance in zip(gpu.instances, told["instances"], strict=True):
            for ci, part in zip(gi.compute, instance["compute"], strict=True):
                part["profile"] = gi.device_name(ci)
    return data


# --- what is ------------------------------------------------------------------------------------------------


def _layouts(layouts: Layouts) -> Iterator[Block]:
    for gpu in layouts.gpus:
        yield from _title(gpu)
        if gpu.current and not gpu.untold and not gpu.error:
            yield from _instances(gpu)


def _title(gpu: GpuLayout) -> Iterator[Text]:
    words, style = _mode(gpu)
    name = f"  {gpu.name}" if gpu.name else ""
    line = f"GPU {gpu.index}{name}  {words}"
    if gpu.uuid and len(line) + len(gpu.uuid) + 2 <= _LINE:
        yield Text(f"{line}  {gpu.uuid}", style)
        return
    yield Text(line, style)
    if gpu.uuid:
        yield Text(f"  {gpu.uuid}", style)


def _mode(gpu: GpuLayout) -> tuple[str, Style]:
    if gpu.error:
        return f"can't be read: {gpu.error}", Style.BAD
    if not gpu.capable:
        return "no MIG", Style.DIM
    now, then = ("on" if one else "off" for one in (gpu.current, gpu.pending))
    if gpu.mode_pending:
        return f"MIG {now}, {then} after a reset", Style.WARN
    if gpu.current and gpu.untold:
        return "MIG on, instances unreadable", Style.WARN
    empty = gpu.current and not gpu.instances
    return f"MIG {now}{', empty' if empty else ''}", Style.GOOD if gpu.current else Style.PLAIN


def _instances(gpu: GpuLayout) -> Iterator[Block]:
    placed = sorted(gpu.instances, key=lambda gi: gi.placement.start)
    if gpu.slots:
        yield from (Text(f"  {line}") for line in drawing(gpu.slots, placed))
    if placed:
        yield Table(_INSTANCES, tuple(_rows(gpu, placed)))


def drawing(slots: int, instances: Sequence[GpuInstance]) -> tuple[str, str]:
    """The memory slots' numbers, and under them who has them: ``[3g.40gb      ][1g.10gb]   .``"""
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
    """Of one slot, so that each name fits its slots."""
    return max([4, *(-(-(len(names[gi.id]) + 2) // gi.placement.size) for gi in instances)])


def _rows(gpu: GpuLayout, placed: Sequence[GpuInstance]) -> Iterator[tuple[Cell | str, ...]]:
    sizes = {one.index: one.memory_mib for one in gpu.profiles}
    for gi in placed:
        last = gi.placement.end - 1
        slots = str(last) if last == gi.placement.start else f"{gi.placement.start}-{last}"
        memory = _gib(sizes.get(gi.profile, 0))
        if not gi.compute:
            empty = Cell("no compute instance: nobody can use it", Style.WARN)
            yield f"  {gi.id}", "-", gi.name, slots, memory, empty
        for ci in gi.compute:
            yield f"  {gi.id}", str(ci.id), gi.device_name(ci), slots, memory, ci.uuid or "-"


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB" if mib else "-"


# --- what could be ------------------------------------------------------------------------------------------


def _profiles(layouts: Layouts) -> Iterator[Block]:
    """GPUs that offer the same, with as much room left, are told of together."""
    groups: dict[tuple[object, ...], list[GpuLayout]] = {}
    for gpu in layouts.gpus:
        groups.setdefault((gpu.name, gpu.capable, gpu.current, gpu.error, gpu.profiles), []).append(gpu)
    for members in groups.values():
        first = members[0]
        numbers = ", ".join(str(one.index) for one in members)
        words, style = _mode(first)
        yield Text(f"GPU{'s' if len(members) > 1 else ''} {numbers}  {first.name}  {words}", style)
        if first.profiles:
            yield Table(_PROFILES, tuple(_profile(one) for one in first.profiles))
            for one in first.profiles:
                if one.aliases:
                    yield Text(f"  {one.name} is also called {', '.join(one.aliases)}", Style.DIM)
        elif first.capable and not first.error:
            yield Text("  its driver tells the profiles only once MIG is on", Style.DIM)


def _profile(profile: Profile) -> tuple[Cell | str, ...]:
    size = profile.placements[0].size if profile.placements else 0
    starts = _runs([place.start for place in profile.placements])
    parts = [f"{one.max_count}x{one.slices}c" for one in profile.compute if one.slices != profile.slices]
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
