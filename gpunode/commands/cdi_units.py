"""`gpunode cdi refresh --install|--remove`: the units and the udev rule that keep the specification true."""

from __future__ import annotations

from dataclasses import dataclass

from gpunode.cdi import refresh
from gpunode.cdi.engines import kept_elsewhere
from gpunode.cdi.locations import NVIDIA_UNITS, nvidia_refreshes
from gpunode.commands.cdi_refresh import CdiRefresh, blocks
from gpunode.errors import ConfigError, PreconditionError, UsageError
from gpunode.facts.daemons import systemd_runs
from gpunode.host import Host
from gpunode.output.result import Progress, Result, Style, Text
from gpunode.runtime import apply
from gpunode.runtime.apply import change_files
from gpunode.runtime.engine import FileEdit

OPERATION = "cdi-refresh"


@dataclass(frozen=True)
class Options:
    """Exactly one of `install` and `remove`, which takes the files away again."""

    install: bool = True
    remove: bool = False
    dry_run: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Install or remove; kind CdiRefresh. `PreconditionError` where systemd doesn't run or NVIDIA's own units
    do the work already; `ConfigError` for a file of that name which isn't ours.
    """
    if options.install == options.remove:
        raise UsageError("--install and --remove exclude each other", hint="give one of them")
    if options.install:
        _refuse(host)

    directories = [path.rpartition("/")[0] for path in kept_elsewhere(host)]

    def plan() -> tuple[FileEdit, ...]:
        return tuple(
            _edit(host, path, None if options.remove else data)
            for path, data in refresh.files(host, directories)
        )

    there = tuple(unit for unit in refresh.UNITS if host.is_file(f"/etc/systemd/system/{unit}"))
    done = change_files(host, OPERATION, plan, progress, named_units=refresh.UNITS, dry_run=options.dry_run)
    if not options.dry_run:
        _settle(host, not options.remove and not done.journal)
    changes = tuple(edit.change() for edit in done.edits)
    named = there if options.remove else refresh.UNITS
    data = CdiRefresh(changes, named, done.journal, options.dry_run)
    shown = blocks(changes, options.dry_run)
    if done.journal:
        shown += (Text(f"undo it with: gpunode rollback {done.journal}", Style.DIM),)
    return Result("CdiRefresh", data, messages=done.notes, blocks=shown)


def _refuse(host: Host) -> None:
    if not systemd_runs(host):
        raise PreconditionError(
            "systemd doesn't run on this node, so it can't refresh the specification",
            hint="run `gpunode cdi refresh` from whatever starts services here, after the driver is loaded",
            code="no-systemd",
        )
    if nvidia_refreshes(host):
        raise PreconditionError(
            f"{NVIDIA_UNITS[1]} is enabled and writes the same file: the two would take turns",
            hint=f"keep that one, or: systemctl disable --now {' '.join(NVIDIA_UNITS)}",
            code="nvidia-cdi-refresh",
        )


def _edit(host: Host, path: str, after: bytes | None) -> FileEdit:
    before = host.read_bytes(path)
    if before is not None and not before.startswith(refresh.MARKER.encode()):
        raise ConfigError(
            f"{path} is there and gpunode didn't make it",
            hint=f"look at it, and move it away if nobody needs it: cat {path}",
        )
    return FileEdit(path, before, after)


def _settle(host: Host, again: bool) -> None:
    """Let udev read what is there now; with `again` enable units whose files were there already."""
    if again:
        apply.Moves(coming=refresh.UNITS).settle(host)
    if host.live and host.which("udevadm"):
        host.run(("udevadm", "control", "--reload"), timeout=30.0)
