"""`gpunode doctor --compare`: faults of the nodes of several saved reports, and where the nodes differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from gpunode import __version__
from gpunode.errors import ConfigError, GpunodeError, UsageError
from gpunode.facts.registry import ENGINES
from gpunode.host import Host
from gpunode.host.bundle import report_in
from gpunode.host.documents import load
from gpunode.output.fleet import page
from gpunode.output.result import Block, Cell, ExitCode, Result, Style, Table, Text, many, some_of
from gpunode.output.typed import INTERNAL

_BAD = ("fail", "error", "warn")
_STYLES = {"fail": Style.BAD, "error": Style.BAD, "warn": Style.WARN, "pass": Style.GOOD}
_WORDS = {"fail": "error", "error": "broken check", "warn": "warning", "pass": "passed", "skip": "not judged"}
_LONGEST = 200
_LONGEST_COMMAND = 4000
LINES = ".jsonl"
"""Ending of a file with one report in each line."""
_LATEST = 1 << 40
_MOST_NAMES = 6  # on a line of the table; JSON has them all


@dataclass(frozen=True)
class ComparedNode:
    """A report that was compared; `at` is in seconds since the epoch, `first` the finding to fix first."""

    name: str  # with the file's name where two are the same
    file: str
    at: float
    status: str
    first: str
    aspects: Mapping[str, str] = field(metadata=INTERNAL)
    findings: Mapping[str, str] = field(metadata=INTERNAL)
    faults: tuple[Mapping[str, Any], ...] = field(metadata=INTERNAL)


class Missing(NamedTuple):
    """A node without findings: its doctor failed, or, with the code ``unreachable``, was never started."""

    name: str
    file: str
    code: str
    message: str


class Fix(NamedTuple):
    """A command that fixes a fault, and the nodes on which it does."""

    command: str
    nodes: tuple[str, ...]


class Fault(NamedTuple):
    """Findings of one check with one status, on one node or more. The texts are those of most of the
    nodes."""

    id: str
    title: str
    status: str
    summary: str
    why: str
    fixes: tuple[Fix, ...]
    nodes: tuple[str, ...]


class Group(NamedTuple):
    """Nodes with the same value, the most common value first."""

    value: str
    nodes: tuple[str, ...]


class Difference(NamedTuple):
    """An aspect or check that isn't the same on all nodes. `what` is the aspect or the check's id."""

    what: str
    groups: tuple[Group, ...]


class DoctorComparison(NamedTuple):
    """`data` of the envelope. `differences` are of driver, toolkit, engines, kernel, distribution and GPUs,
    `findings` the same by check id, where a value is a status. `common` are faults that every node has (id to
    status), `same` aspects with one value (aspect to value). `missing` are nodes without findings, `faults`
    the errors and warnings of all nodes, `version` is gpunode's."""

    nodes: tuple[ComparedNode, ...]
    missing: tuple[Missing, ...]
    faults: tuple[Fault, ...]
    differences: tuple[Difference, ...]
    findings: tuple[Difference, ...]
    common: dict[str, str]
    same: dict[str, str]
    version: str


def run(paths: Sequence[str], *, strict: bool = False) -> Result:
    """Compare reports as JSON, JSON lines or YAML, or support bundles; with `strict` a difference is exit 1.

    `UsageError` for fewer than two files, `ConfigError` names a file that isn't a report.
    """
    few = UsageError(
        "--compare needs the reports of two nodes or more",
        hint="gpunode doctor --output-file NODE.json on each, then gpunode doctor --compare *.json",
    )
    if len(paths) < 2 and not any(path.endswith(LINES) for path in paths):
        raise few
    reports = {name: report for path in paths for name, report in saved_reports(path)}
    if len(reports) < 2 <= len(paths):  # the same file twice
        raise few
    missing = tuple(_missing(name, report) for name, report in reports.items() if _failed(report))
    reports = {name: report for name, report in reports.items() if not _failed(report)}
    names = _models(reports.values())
    members = _with_unique_names([_member(path, report, names) for path, report in reports.items()])
    differences = tuple(_differing({member.name: member.aspects for member in members}))
    faulty_checks = sorted(
        {name for member in members for name, state in member.findings.items() if state in _BAD}
    )
    # a check that is missing in a report wasn't run there
    states = {
        member.name: {name: member.findings.get(name, "skip") for name in faulty_checks} for member in members
    }
    findings = tuple(_differing(states))
    common = _shared([member.findings for member in members])
    data = DoctorComparison(
        tuple(members),
        missing,
        tuple(_faults(members)),
        differences,
        findings,
        {name: state for name, state in common.items() if state in _BAD},
        _shared([member.aspects for member in members]),
        __version__,
    )
    differ = bool(differences or findings or missing)
    return Result(
        "DoctorComparison",
        data,
        status="warn" if differ else "ok",
        exit_code=ExitCode.FAILED if differ and strict else ExitCode.OK,
        blocks=tuple(_blocks(data)),
        documents={"html": page},
    )


def _failed(report: Mapping[str, Any]) -> bool:
    return "findings" not in report["data"]


def _missing(file: str, report: Mapping[str, Any]) -> Missing:
    """The first error of a doctor that failed; its node is named in `data`, or by the file."""
    error = next((entry for entry in report["errors"] if isinstance(entry, dict)), {})
    node = report["data"].get("node")
    name = _text(node.get("name")) if isinstance(node, dict) else ""
    message = _text(error.get("message")) or "the doctor failed"
    return Missing(name or Path(file).stem, file, _text(error.get("code")) or "failed", message)


def _faults(members: Sequence[ComparedNode]) -> Iterator[Fault]:
    """Equal findings of all nodes, errors before warnings, then what most nodes have."""
    groups: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for member in members:
        for finding in member.faults:
            groups.setdefault((_text(finding["id"]), _text(finding["status"])), []).append(
                (member.name, finding)
            )
    order = sorted(groups.items(), key=lambda item: (_BAD.index(item[0][1]), -len(item[1]), item[0]))
    for (identifier, status), occurrences in order:
        texts = {
            key: Counter(_text(finding.get(key)) for _, finding in occurrences).most_common(1)[0][0]
            for key in ("title", "summary", "why")
        }
        fixes: dict[str, list[str]] = {}
        for name, finding in occurrences:
            fixes.setdefault(_command(finding), []).append(name)
        fixes.pop("", None)
        commands = sorted(fixes.items(), key=lambda item: (-len(item[1]), item[0]))
        yield Fault(
            id=identifier,
            status=status,
            **texts,
            fixes=tuple(Fix(command, tuple(nodes)) for command, nodes in commands),
            nodes=tuple(name for name, _ in occurrences),
        )


def _command(finding: Mapping[str, Any]) -> str:
    """The first command of the fix, unchanged; empty if the fix has no command."""
    fixes = finding.get("fix")
    first_fix = fixes[0] if isinstance(fixes, list) and fixes else None
    command = first_fix.get("command") if isinstance(first_fix, dict) else None
    return command if isinstance(command, str) and len(command) <= _LONGEST_COMMAND else ""


def _models(reports: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """PCI ids to names, from every node that knows one: a node without NVML's answer has the same GPUs."""
    model_names = {}
    for report in reports:
        node = report["data"].get("node")
        gpus = node.get("gpus") if isinstance(node, dict) else None
        for gpu in gpus if isinstance(gpus, list) else ():
            if isinstance(gpu, dict) and _text(gpu.get("name")):
                model_names[_text(gpu.get("deviceId"))] = _text(gpu["name"])
    return model_names


def _member(path: str, report: Mapping[str, Any], names: Mapping[str, str]) -> ComparedNode:
    """The report is untrusted input: a key that is missing or of another type means a malformed file."""
    try:
        data = report["data"]
        node = data["node"]
        at = data.get("at", 0)
        return ComparedNode(
            _text(node.get("name")),
            path,
            float(at) if isinstance(at, int | float) and 0 <= at < _LATEST else 0.0,
            _text(report["status"]),
            _text(data.get("first")),
            dict(_aspects(node, _text(data.get("version")), names)),
            {_text(finding["id"]): _text(finding["status"]) for finding in data["findings"]},
            tuple(finding for finding in data["findings"] if finding["status"] in _BAD),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a whole DoctorReport: {type(error).__name__}: {error}",
            hint="make it again: gpunode doctor --output-file NODE.json",
        ) from error


def _text(value: Any) -> str:
    """One line, short enough for a table; empty for a value that isn't text. A line break would forge a
    row."""
    line = " ".join(value.split()) if isinstance(value, str) else ""
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _aspects(node: Mapping[str, Any], version: str, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The compared aspects, each as text; an empty one is shown as none."""
    yield "driver", _text(node.get("driver")) or "none"
    yield "toolkit", _text(node.get("toolkit")) or "none"
    engines: dict[str, list[str]] = {}
    for engine in node.get("engines") or ():
        engines.setdefault(_text(engine["name"]), []).append(_text(engine["version"]) or "unknown release")
    for name in (*ENGINES, *sorted(engines)):
        yield name, ", ".join(sorted(engines.get(name, ["none"])))
    yield "kernel", _text(node.get("kernel")) or "unknown"
    yield "distribution", _text((node.get("distro") or {}).get("name")) or "unknown"
    yield "GPUs", _gpus(node.get("gpus") or (), names)
    yield "kind of node", _text(node.get("class")) or "unknown"
    yield "gpunode", version or "unknown"


def _gpus(gpus: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    counted = Counter(_text(gpu["deviceId"]) for gpu in gpus)
    texts = (
        f"{number} × {names.get(device_id, f'GPU {device_id}')}"
        for device_id, number in sorted(counted.items())
    )
    return ", ".join(texts) or "none"


def _with_unique_names(members: Sequence[ComparedNode]) -> list[ComparedNode]:
    """Two nodes of one name, or without any, are distinguished by their files."""
    names = [member.name for member in members]
    return [
        member
        if member.name and names.count(member.name) == 1
        else replace(member, name=f"{member.name} ({member.file})" if member.name else member.file)
        for member in members
    ]


def _differing(values: Mapping[str, Mapping[str, str]]) -> Iterator[Difference]:
    """Aspects with more than one value, in the order of the first node."""
    for aspect in dict.fromkeys(name for aspects in values.values() for name in aspects):
        nodes: dict[str, list[str]] = {}
        for name, aspects in values.items():
            nodes.setdefault(aspects.get(aspect, "none"), []).append(name)
        if len(nodes) > 1:
            groups = sorted(nodes.items(), key=lambda item: (-len(item[1]), item[0]))
            yield Difference(aspect, tuple(Group(value, tuple(names)) for value, names in groups))


def _shared(values: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The keys that have one value everywhere."""
    first, *others = values or [{}]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _blocks(data: DoctorComparison) -> Iterator[Block]:
    number = len(data.differences) + len(data.findings)
    if not data.nodes:
        yield Text("no node has a report", Style.WARN)
    elif not number:
        yield Text(f"{len(data.nodes)} nodes, and they don't differ", Style.GOOD)
    else:
        domain = _domain(data.nodes)
        shared = f" (all of them in {domain.removeprefix('.')})" if domain else ""
        yield Text(f"{len(data.nodes)} nodes{shared}, {many(number, 'difference')}", Style.WARN)
        for difference in (*data.differences, *data.findings):
            yield Text("")
            yield Text(difference.what, Style.HEADING)
            yield _table(difference, _WORDS if difference in data.findings else {}, domain)
    if data.missing:
        yield Text("")
        yield Text("no report", Style.HEADING)
        lines = ((Cell(f"  {node.name}", Style.BAD), node.code, node.message) for node in data.missing)
        yield Table(("", "", ""), tuple(lines))
    if data.common:
        yield Text("")
        yield Text("on every node", Style.HEADING)
        rows = ((Cell(f"  {_WORDS[state]}", _STYLES[state]), name) for name, state in data.common.items())
        yield Table(("", ""), tuple(rows))


def _domain(members: Sequence[ComparedNode]) -> str:
    """The common suffix of all names, from a dot on; empty if they share none. Printed once, not on every
    line."""
    if any(member.file in member.name for member in members):
        return ""
    domains = {member.name[member.name.find(".") :] if "." in member.name else "" for member in members}
    return domains.pop() if len(domains) == 1 else ""


def _table(difference: Difference, labels: Mapping[str, str], domain: str) -> Table:
    rows = []
    for group in difference.groups:
        value = labels.get(group.value, group.value)
        style = _STYLES.get(group.value, Style.PLAIN) if labels else Style.PLAIN
        rows.append(
            (
                Cell(f"  {value}", style),
                str(len(group.nodes)),
                some_of([node.removesuffix(domain) for node in group.nodes], _MOST_NAMES),
            )
        )
    return Table(("", "", ""), tuple(rows))


# Reports that were saved: a DoctorReport as JSON or YAML, or the one inside a support bundle.

_MAKE_ONE = "make one: gpunode doctor --output-file NODE.json"


def saved_reports(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The reports in a file, each by its name: the file's, with the line's number in a file of lines.

    `ConfigError` names the file or line that isn't a report.
    """
    text = _saved(path)
    if not path.endswith(LINES):
        yield path, _envelope(path, text)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"{path}:{number}", _envelope(f"{path}:{number}", line)


def _saved(path: str) -> str:
    """Text of a file of this machine, even with --root."""
    absolute_path = str(Path(path).absolute())
    try:
        if path.endswith((".tar.gz", ".tgz")):
            return report_in(Path(absolute_path)).decode("utf-8", "replace")
        content = Host(Path("/")).read_text(absolute_path)
    except GpunodeError as error:
        raise ConfigError(
            error.message.replace(absolute_path, path), hint=error.hint, code=error.code
        ) from error
    if content is None:
        raise ConfigError(f"{path} doesn't exist", hint=_MAKE_ONE)
    return content


def _envelope(path: str, text: str) -> dict[str, Any]:
    loaded = _parsed(path, text)
    if not isinstance(loaded, dict) or loaded.get("kind") != "DoctorReport":
        kind = loaded.get("kind") if isinstance(loaded, dict) else None
        problem = f"it is a {str(kind)[:40]!a}" if kind else "it has no kind"
        raise ConfigError(f"{path} is not a DoctorReport: {problem}", hint=_MAKE_ONE)
    data, errors = loaded.get("data"), loaded.get("errors")
    if not isinstance(data, dict) or ("findings" not in data and not (isinstance(errors, list) and errors)):
        raise ConfigError(f"{path} is the report of a doctor that failed: it has no findings", hint=_MAKE_ONE)
    return loaded


def _parsed(path: str, text: str) -> Any:
    if not text.strip():
        raise ConfigError(f"{path} is not a report: the file is empty", hint=_MAKE_ONE)
    try:
        if path.endswith((".yaml", ".yml")):
            return load(text)
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not a report: not JSON: line {error.lineno}", hint=_MAKE_ONE) from error
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} is not a report: {problem}", hint=_MAKE_ONE) from error
