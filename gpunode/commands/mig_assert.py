"""`gpunode mig assert`: whether a configuration is what this node has, as mig-parted's assert asks it."""

from __future__ import annotations

from dataclasses import dataclass

from gpunode.commands import mig_plan
from gpunode.errors import UsageError
from gpunode.gpu.mig import read_layouts
from gpunode.host import Host
from gpunode.mig.config import difference, empty_instances, wishes
from gpunode.output.result import ErrorInfo, ExitCode, Progress, Result, Style, Text


@dataclass(frozen=True)
class Options:
    """`mode_only` compares nothing but whether MIG is on; `valid_config` only reads the file."""

    config_file: str = ""
    label: str = ""
    mode_only: bool = False
    valid_config: bool = False


@dataclass(frozen=True)
class MigAssertion:
    """`data`: whether it `holds`, and what differs, a GPU each. `looked_at` is file, mode or layout."""

    config: str
    label: str
    looked_at: str
    holds: bool
    differences: tuple[str, ...] = ()


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Compare; kind MigAssertion, exit 5 where it differs. Errors as `mig plan` has them.

    GPUs that no entry names aren't looked at.
    """
    if options.mode_only and options.valid_config:
        raise UsageError("--mode-only and --valid-config exclude each other", hint="give one of them")
    if options.valid_config and not options.label:
        return _whole_file(options)
    chosen = mig_plan.choose(options.config_file, options.label)
    if options.valid_config:
        return _result(options, MigAssertion(chosen.path, chosen.label, "file", holds=True), ())
    with progress.step("reading the layouts"):
        layouts = read_layouts(host)
    wanted = wishes(chosen.path, chosen.label, chosen.entries, layouts, mode_only=options.mode_only)
    found = [difference(wish, mode_only=options.mode_only) for wish in wanted.all]
    wrong = tuple(one for one in found if one)
    looked = "mode" if options.mode_only else "layout"
    notes = list(wanted.notes)
    notes += [
        f"GPU {gpu.index} is in no entry of {chosen.label!r} and isn't looked at" for gpu in wanted.unnamed
    ]
    if not options.mode_only:
        notes += [
            f"GPU {wish.gpu.index}: GPU instance {gi} has no compute instance and takes up room"
            for wish in wanted.all
            for gi in empty_instances(wish.gpu)
        ]
    data = MigAssertion(chosen.path, chosen.label, looked, not wrong, wrong)
    return _result(options, data, tuple(notes))


def _whole_file(options: Options) -> Result:
    """Without a label the file is judged, and a file with several is as good as one that has one."""
    _, config = mig_plan.read(options.config_file)
    text = Text(f"{config.path} is valid: {', '.join(config.labels)}", Style.GOOD)
    return Result("MigAssertion", MigAssertion(config.path, "", "file", holds=True), blocks=(text,))


def _result(options: Options, data: MigAssertion, notes: tuple[str, ...]) -> Result:
    if data.holds:
        said = {"file": "is valid", "mode": "has the modes that are set", "layout": "is what the GPUs have"}
        text = Text(f"{data.config}: {data.label} {said[data.looked_at]}", Style.GOOD)
        return Result("MigAssertion", data, messages=notes, blocks=(text,))
    error = ErrorInfo(
        "mig-differs",
        f"the {data.looked_at} is not that of {data.label}",
        f"see what would change: gpunode mig plan -f {options.config_file} -c {data.label}",
    )
    blocks = tuple(Text(one, Style.BAD) for one in data.differences)
    return Result(
        "MigAssertion",
        data,
        status="fail",
        exit_code=ExitCode.DIFFERS,
        messages=notes,
        errors=(error,),
        blocks=blocks,
    )
