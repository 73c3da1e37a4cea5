"""`gpunode mig export`: the present layouts as a configuration that `mig apply`, and mig-parted, take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpunode.commands.mig_list import exit_code, look, unreadable
from gpunode.errors import GpunodeError, UsageError
from gpunode.gpu.mig_model import Layouts
from gpunode.host import Host
from gpunode.mig.config import as_json, as_yaml, export
from gpunode.output.result import Progress, Result, Style, Text

FORMATS = ("yaml", "json")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # it may become a node label's value


@dataclass(frozen=True)
class Options:
    """`label` is the configuration's name; `format` is yaml or json."""

    label: str = "current"
    format: str = "yaml"


@dataclass(frozen=True)
class Exported:
    """`data` of kind MigExport: the label and the document as it is printed."""

    label: str
    config: dict[str, Any]


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Print the configuration; kind MigExport. `GpunodeError` if a GPU can't be told: half a configuration
    would be worse than none."""
    if options.format not in FORMATS:
        raise UsageError(f"unknown format {options.format!r}", hint=f"known: {', '.join(FORMATS)}")
    if _LABEL.fullmatch(options.label) is None:
        raise UsageError(
            f"{options.label!r} can't be a configuration's label",
            hint="use at most 63 letters, digits, '-', '_' and '.', no sign first or last",
        )
    layouts = look(host, progress)
    for error in unreadable(layouts, placements=False):
        raise GpunodeError(error.message, hint=error.hint, code=error.code, exit_code=exit_code((error,)))
    document = export(layouts, options.label)
    text = as_json(document) if options.format == "json" else as_yaml(document)
    # a terminal wraps other text, and a copied document must stay what it is
    lines = tuple(Text(line, Style.COMMAND) for line in text.splitlines())
    return Result(
        "MigExport", Exported(options.label, document), messages=tuple(_notes(layouts)), blocks=lines
    )


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
