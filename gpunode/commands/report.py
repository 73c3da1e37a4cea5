"""`gpunode report`: one file for a support request: facts and findings of the doctor, and logs of the
daemons."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from gpunode import __version__
from gpunode.commands import doctor
from gpunode.commands.options import Strings, refuse_unknown
from gpunode.commands.session import Session, verb
from gpunode.errors import PreconditionError, UsageError
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.host.bundle import daemon_logs, described, files_of, links_of, packed
from gpunode.host.recorder import RecordingHost
from gpunode.host.redact import KINDS, Redaction, own_names
from gpunode.mig.session import MigError, read_layouts
from gpunode.output.html import page
from gpunode.output.result import Block, Progress, Result, Style, Text, many

report_app = typer.Typer(rich_markup_mode=None)
FORMAT = 1
_OTHER_FORMATS = (".zip", ".tar", ".tar.xz", ".tar.zst", ".json", ".yaml", ".html", ".txt")
_NAMES = ("/proc/sys/kernel/hostname", "/etc/hostname")


class DoctorSummary(NamedTuple):
    """The doctor's result: `first` is the id to fix first, `counts` the findings by status."""

    status: str
    first: str | None
    counts: dict[str, int]


class SupportBundle(NamedTuple):
    """`data` of the envelope: the archive at `path` with so many `files` of the node and the `logs` of units.

    `redacted` is what was removed; `left_out` has the reason by path.
    """

    path: str
    bytes: int
    files: int
    logs: tuple[str, ...]
    redacted: tuple[str, ...]
    left_out: dict[str, str]
    doctor: DoctorSummary


@verb(report_app, "report", "SupportBundle")
def report(
    session: Session,
    output_file: Annotated[
        str,
        typer.Option(
            "--output-file",
            metavar="PATH",
            help="Write to this file.",
            show_default="gpunode-report-NODE-TIME.tar.gz",
        ),
    ] = "",
    redact: Annotated[
        Strings,
        typer.Option(
            "--redact",
            metavar="hostnames|uuids|all,...",
            help="Also redact these values; secrets are always redacted.",
        ),
    ] = None,
) -> Result:
    """Create a support bundle. It has the doctor's report, its evidence and logs, without secrets.

    Without root the bundle lacks what only root may read.

    sudo gpunode report --redact all

    gpunode doctor --root gpunode-report-node7-20260812-031500.tar.gz
    """
    host, progress, words = session.host, session.progress, redact or ()
    doctor.check_recording(host)
    refuse_unknown("--redact", words, (*KINDS, "all"))
    _refuse_unwritable(host, output_file)
    hidden = KINDS if "all" in words else tuple(kind for kind in KINDS if kind in words)
    recorder, diagnosis, logs, silent = _record(host, progress)
    redaction = _redaction(recorder, hidden)
    envelope = redaction.value(diagnosis.envelope())
    name, now = _name(envelope, host), host.now()
    path = str(Path(output_file or f"{name}.tar.gz").absolute())
    inside = files_of(recorder.kept, redaction)
    left_out = {redaction.path(where): reason for where, reason in recorder.kept.left_out.items()}
    about = {"format": FORMAT, "gpunode": __version__, "at": round(now, 3), "redacted": ["secrets", *hidden]}
    about["leftOut"], about["noLog"] = left_out, silent
    beside = described(links_of(recorder.kept, redaction), about, envelope)
    texts = {"report.html": page(envelope)}
    texts |= {f"logs/{unit}.log": redaction.text(text) for unit, text in logs.items()}
    beside |= {file: text.encode("utf-8", "backslashreplace") for file, text in texts.items()}
    archive = packed(name, inside, recorder.kept, beside, now)
    # nothing of an existing file is kept: neither a symlink in its place nor a mode that lets others read it
    Host(Path("/")).write_atomic(path, archive, mode=0o600, keep=False)
    bundle = SupportBundle(
        path,
        len(archive),
        len(inside),
        tuple(sorted(logs)),
        ("secrets", *hidden),
        left_out,
        DoctorSummary(diagnosis.status, diagnosis.data.first, diagnosis.data.counts),
    )
    return Result("SupportBundle", bundle, blocks=tuple(_blocks(bundle)))


def _record(
    host: Host, progress: Progress
) -> tuple[RecordingHost, Result, Mapping[str, str], Mapping[str, str]]:
    """What the doctor reads, its report, the logs by unit, and the reasons for units without one."""
    recorder = RecordingHost(host.root, host.environ, host.trace)
    with progress.step("running the doctor"):
        diagnosis = doctor.run(recorder, progress)
    if host.live:
        _keep_layouts(recorder, progress)
    else:
        recorder.kept.recording.update(host.recording)
    with progress.step("reading the daemons' logs"):
        return recorder, diagnosis, *daemon_logs(host)


def _keep_layouts(recorder: RecordingHost, progress: Progress) -> None:
    """The MIG layouts, where there can be any: the doctor doesn't query the placements of instances."""
    recorded = recorder.kept.recording.get("nvml", {})
    if not recorded:  # the doctor had no reason to query the GPUs at all
        inventory = probe(recorder).inventory
        capable = inventory is not None and any(gpu.mig_capable for gpu in inventory.gpus)
    else:
        capable = any(gpu["migCapable"] for gpu in recorded.get("inventory", {}).get("gpus", ()))
    if not capable:
        return
    try:
        with progress.step("reading the MIG layouts"):
            read_layouts(recorder)
    except MigError as error:
        recorder.kept.left_out["MIG layouts"] = error.message


def _redaction(recorder: RecordingHost, hidden: tuple[str, ...]) -> Redaction:
    names = [recorder.read_text(path) or "" for path in _NAMES] if "hostnames" in hidden else []
    return Redaction(own_names(names), "uuids" in hidden)


def _name(envelope: dict[str, Any], host: Host) -> str:
    """Letters, digits, dots and hyphens only, because the host's name comes from a file."""
    node = re.sub(r"[^A-Za-z0-9.-]", "-", str(envelope["data"]["node"]["name"] or "node"))[:63].strip(".-")
    when = datetime.fromtimestamp(host.now(), timezone.utc)
    return f"gpunode-report-{node or 'node'}-{when:%Y%m%d-%H%M%S}"


def _refuse_unwritable(host: Host, path: str) -> None:
    """`UsageError` if the bundle can't be written there; an empty `path` is the current directory."""
    if path:
        if path.endswith(_OTHER_FORMATS):
            raise UsageError(f"--output-file {path}: a bundle is a .tar.gz file", hint="name it so")
        host.refuse_output(path)
    elif not os.access(Path.cwd(), os.W_OK):
        raise PreconditionError(
            f"can't write into {Path.cwd()}",
            hint="name another place: gpunode report --output-file PATH.tar.gz",
        )


def _blocks(data: SupportBundle) -> list[Block]:
    counts = data.doctor.counts
    errors = counts["fail"] + counts["error"]
    bad = f"{many(errors, 'error')}, {many(counts['warn'], 'warning')}"
    size = f"{data.bytes / 1024:.0f} KiB"
    lines: list[Block] = [
        Text(f"wrote {data.path} ({size}, {data.files} files of this node)", Style.GOOD),
        Text(f"the doctor found {bad}; logs of {', '.join(data.logs) or 'no daemon'}"),
        Text(f"redacted: {', '.join(data.redacted)}", Style.DIM),
    ]
    lines += [Text(f"left out: {path}: {reason}", Style.DIM) for path, reason in data.left_out.items()]
    if "hostnames" not in data.redacted:
        lines.append(Text("without host names and UUIDs: gpunode report --redact all", Style.DIM))
    return [
        *lines,
        Text(f"to read the doctor's report on any machine: gpunode doctor --root {data.path}", Style.DIM),
    ]
