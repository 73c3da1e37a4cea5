"""`gpunode cdi refresh`: make the standard specification true, or take it away with the driver."""

from __future__ import annotations

from gpunode.cdi.document import encode, made_by_gpunode
from gpunode.cdi.model import NEWEST
from gpunode.cdi.places import STANDARD, nvidia_keeps, refuse_conflict, remarks, rivals
from gpunode.commands.cdi_generate import told, write
from gpunode.commands.cdi_options import Content, check, make
from gpunode.dataclass import dataclass, field
from gpunode.errors import GpunodeError
from gpunode.facts.driver import loaded_module
from gpunode.host import Host
from gpunode.result import Block, Change, Diff, Progress, Result, Style, Text
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
    if module is None:
        if not made_by_gpunode(before):
            return _result(options, FileEdit(STANDARD, before, before), (_GONE,))
        if not options.dry_run:
            host.remove(STANDARD)
        return _result(options, FileEdit(STANDARD, before, None), (_GONE,))
    built = make(host, options.content, progress)
    found = rivals(host, STANDARD, built.spec)
    refuse_conflict(found)
    notes = (*built.notes, *remarks(found))
    if nvidia_keeps(host, built, NEWEST):
        kept = f"nvidia-cdi-refresh.service keeps {STANDARD}, which has all devices"
        return _result(options, FileEdit(STANDARD, before, before), (*notes, kept))
    edit = FileEdit(STANDARD, before, encode(built.spec, "yaml"))
    if not options.dry_run:
        write(host, STANDARD, edit.after or b"")
    return _result(options, edit, notes, told(built))


def _result(options: Options, edit: FileEdit, notes: tuple[str, ...], *more: Block) -> Result:
    absent = edit.before is None and edit.after is None
    data = CdiRefresh(() if absent else (edit.change(),), dry_run=options.dry_run)
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
