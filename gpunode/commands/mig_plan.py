"""`gpunode mig plan`: today's layout beside the wanted one, what goes, and who is in the way."""

from __future__ import annotations

from gpunode.commands import mig_half_way, mig_show, mig_wanted
from gpunode.dataclass import dataclass
from gpunode.host import Host
from gpunode.result import Progress, Result, Style, Text


@dataclass(frozen=True)
class Options:
    """`config_file` is in mig-parted's form, ``-`` for standard input; `label` may be empty if it has one."""

    config_file: str = ""
    label: str = ""
    mode_only: bool = False


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Show the plan; kind MigPlan. Nothing is changed.

    `InvalidMigConfig` for the file, `CannotBe` if this node can't have it, `MigError` if NVML doesn't tell.
    """
    chosen = mig_wanted.choose(options.config_file, options.label)
    found, busy = mig_wanted.look_and_plan(host, chosen, progress, mode_only=options.mode_only)
    notes = (*mig_half_way.told(host, found.layouts), *found.notes)
    notes += mig_wanted.remarks(host, found.plans) if found.changes else ()
    if found.changes and host.live and not host.is_root:
        notes = (*notes, "only root sees everybody's open files: there may be more in the way")
    data = mig_show.data_of(chosen.path, chosen.label, found, busy)
    shown = list(mig_show.blocks(data, busy))
    if found.changes:
        stop = "".join(f" --drain {word}" for word in dict.fromkeys(one.drain for one in busy if one.drain))
        shown.append(
            Text(f"gpunode mig apply -f {options.config_file} -c {chosen.label}{stop}", Style.COMMAND)
        )
    return Result("MigPlan", data, messages=notes, blocks=tuple(shown))
