"""`gpunode cdi refresh`: make the standard specification true, or take it away with the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpunode.cdi.engines import kept_elsewhere
from gpunode.cdi.locations import STANDARD, nvidia_keeps, refuse_conflict, remarks, rivals
from gpunode.cdi.spec import NEWEST, encode, made_by_gpunode
from gpunode.commands.cdi_generate import told, write
from gpunode.commands.cdi_options import Content, check, make
from gpunode.errors import GpunodeError
from gpunode.facts.driver import loaded_module
from gpunode.host import Host
from gpunode.output.result import Block, Change, Diff, Progress, Result, Style, Text
from gpunode.runtime.engine import FileEdit

_GONE = "the driver isn't loaded: there is nothing to describe"


@dataclass(frozen=True)
class Options:
    """`dry_run` shows what would be written and writes nothing."""

    content: Content = field(default_factory=Content)
    dry_run: bool = False


@dataclass(frozen=True)
class CdiRefresh:
    """`data` of the envelope: what happened to each file, and the units that were enabled or disabled."""

    changes: tuple[Change, ...]
    units: tuple[str, ...] = ()
    journal: str = ""
    dry_run: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Write `STANDARD` if it isn't what the node is now; kind CdiRefresh.

    Without a driver our own file is removed, and that is success: a unit that runs at every change must not
    fail before the driver's turn. `GpunodeError` if a loaded driver can't be described.
    """
    check(options.content)
    before = host.read_bytes(STANDARD)
    module = loaded_module(host)
    if module is not None and not module.live:
        raise GpunodeError(
            "the driver is just being loaded or unloaded",
            hint="run this again in a moment",
            code="driver-busy",
        )
    elsewhere = {path: host.read_bytes(path) for path in kept_elsewhere(host)}
    if module is None:
        ours = {**({STANDARD: before} if made_by_gpunode(before) else {}), **elsewhere}
        if not options.dry_run:
            for path in ours:
                host.remove(path)
        edits = [FileEdit(path, content, None) for path, content in ours.items()]
        return _result(options, edits or [FileEdit(STANDARD, before, before)], (_GONE,))
    built = make(host, options.content, progress)
    conflicts = rivals(host, STANDARD, built.spec)
    refuse_conflict(conflicts)
    notes = (*built.notes, *remarks(conflicts))
    data = encode(built.spec, "yaml")
    edits = [FileEdit(path, content, data) for path, content in ({STANDARD: before} | elsewhere).items()]
    if nvidia_keeps(host, built, NEWEST):
        notes = (*notes, f"nvidia-cdi-refresh.service keeps {STANDARD}, which has all devices")
        edits[0] = FileEdit(STANDARD, before, before)
    for edit in edits if not options.dry_run else ():
        if edit.after != edit.before:
            write(host, edit.path, data)
    changed = any(edit.after is data for edit in edits)
    return _result(options, edits, notes, *((told(built),) if changed else ()))


def _result(options: Options, edits: Sequence[FileEdit], notes: tuple[str, ...], *more: Block) -> Result:
    changes = tuple(edit.change() for edit in edits if (edit.before, edit.after) != (None, None))
    data = CdiRefresh(changes, dry_run=options.dry_run)
    return Result("CdiRefresh", data, messages=notes, blocks=(*blocks(data.changes, options.dry_run), *more))


def blocks(changes: tuple[Change, ...], dry_run: bool) -> tuple[Block, ...]:
    """One line for each file, with the diff if nothing was written."""
    found: list[Block] = []
    for change in changes:
        same = change.action == "unchanged"
        mark = " (dry run)" if dry_run and not same else ""
        found.append(Text(f"{change.path} {change.action}{mark}", Style.PLAIN if same else Style.GOOD))
        if dry_run and change.diff:
            found.append(Diff(change.diff))
    return tuple(found)
