"""`gpunode cdi generate`: a CDI specification of this node's GPUs, on stdout or in a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpunode.cdi.build import Built
from gpunode.cdi.locations import refuse_conflict, remarks, rivals
from gpunode.cdi.spec import FORMATS, Spec, as_tree, encode, format_of, text
from gpunode.commands.cdi_options import Content, make
from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.output.result import Progress, Result, Style, Text


@dataclass(frozen=True)
class Options:
    """`output` is a file, empty or ``-`` for stdout. `format` is yaml or json, else by the file's name."""

    output: str = ""
    format: str = ""
    content: Content = field(default_factory=Content)


@dataclass(frozen=True)
class CdiSpec:
    """`data` of the envelope. `path` is empty for stdout, where `action` is empty too; `spec` is the content.

    `hooks` tells whether the specification needs NVIDIA's hook program when a container starts.
    """

    path: str
    action: str
    format: str
    cdi_version: str
    kind: str
    devices: tuple[str, ...]
    hooks: bool
    spec: dict[str, Any]


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Make it; kind CdiSpec. A file is written in one step, and left alone if it holds the same already.

    `GpunodeError` if the GPUs can't be described, or the file would make another one's devices unusable.
    """
    path, form = destination(options)
    built = make(host, options.content, progress)
    data = encode(built.spec, form)
    if not path:
        shown = Text(data.decode().removesuffix("\n"), Style.COMMAND)  # long lines stay whole
        return Result("CdiSpec", _data("", "", form, built.spec), messages=built.notes, blocks=(shown,))
    found = rivals(host, path, built.spec)
    refuse_conflict(found)
    action = write(host, path, data)
    notes = (*built.notes, *remarks(found))
    blocks = (Text(f"{path} {action}", Style.PLAIN if action == "unchanged" else Style.GOOD), told(built))
    return Result("CdiSpec", _data(path, action, form, built.spec), messages=notes, blocks=blocks)


def destination(options: Options) -> tuple[str, str]:
    """Path (empty for stdout) and format. `UsageError` for names that engines wouldn't read."""
    path = "" if options.output == "-" else options.output
    if options.format and options.format not in FORMATS:
        raise UsageError(f"--format {options.format}: unknown", hint=f"known: {', '.join(FORMATS)}")
    if not path:
        return "", options.format or "yaml"
    if path in ("table", "json", "yaml"):
        raise UsageError(
            f"--output {path}: here --output names the file to write",
            hint=f"for the result as {path}: -o {path}; for a file of that name: --output ./{path}",
        )
    named = format_of(path)
    if named is None:
        form = options.format or "yaml"
        return f"{path}.{form}", form  # nvidia-ctk does so too
    if options.format and options.format != named:
        raise UsageError(
            f"--format {options.format} contradicts the name {path}: engines go by the extension",
            hint=f"--output {path.removesuffix(named)}{options.format}",
        )
    return path, named


def write(host: Host, path: str, data: bytes) -> str:
    """created, updated or unchanged."""
    from pathlib import PurePosixPath

    if not path.startswith("/") and not host.live:
        raise UsageError(f"--output {path!r} is no absolute path", hint="--output /PATH")
    before = host.read_bytes(path)
    if before == data:
        return "unchanged"
    host.make_dirs(str(PurePosixPath(path).parent))
    host.write_atomic(path, data)
    return "created" if before is None else "updated"


def told(built: Built) -> Text:
    """The devices in a line."""
    spec = built.spec
    given = [device.name for device in spec.devices if device.name != "all"]
    short = [name for name in given if name[0].isdigit()]
    names = short or given
    every = " and all" if any(device.name == "all" for device in spec.devices) else ""
    also = ", also by UUID" if short and len(short) < len(given) else ""
    hooks = "NVIDIA's hooks" if spec.edits.hooks else "no hooks"
    return Text(f"{spec.kind}: {', '.join(names)}{every}{also}; CDI {text(spec.version)}, {hooks}", Style.DIM)


def _data(path: str, action: str, form: str, spec: Spec) -> CdiSpec:
    names = tuple(device.name for device in spec.devices)
    return CdiSpec(
        path, action, form, text(spec.version), spec.kind, names, bool(spec.edits.hooks), as_tree(spec)
    )
