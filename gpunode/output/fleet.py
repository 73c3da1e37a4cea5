"""A DoctorComparison as one self-contained HTML page: nodes without a report, faults, versions, all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from gpunode.output.html import document, escaped
from gpunode.output.result import many

_BADGES = {
    "fail": "Error",
    "error": "Broken check",
    "warn": "Warning",
    "ok": "No fault",
    "missing": "No report",
}
_UNREACHABLE = "unreachable"
_MINUTE = timedelta(minutes=1)
_MOST_NAMES = 12  # more names of nodes than these are folded


def page(envelope: Mapping[str, Any]) -> str:
    """The whole document."""
    data = envelope["data"]
    title = f"{_count(data)}: {_headline(data)[0]}"
    return document(title, _body(data), envelope)


def _count(data: Mapping[str, Any]) -> str:
    return many(len(data["nodes"]) + len(data["missing"]), "node")


def _headline(data: Mapping[str, Any]) -> tuple[str, str]:
    """How many nodes are in which state, and the colour."""
    states = [node["status"] for node in data["nodes"]]
    failed = sum(state in ("fail", "error") for state in states)
    unreachable = sum(node["code"] == _UNREACHABLE for node in data["missing"])
    counts = (
        (unreachable, "unreachable"),
        (len(data["missing"]) - unreachable, "without a report"),
        (failed, "with errors"),
        (states.count("warn"), "with warnings"),
        (states.count("ok"), "without a fault"),
    )
    bad = bool(failed or data["missing"])
    mood = "bad" if bad else "warn" if "warn" in states else "good"
    return ", ".join(f"{number} {what}" for number, what in counts if number), mood


def _body(data: Mapping[str, Any]) -> Iterator[str]:
    yield from _header(data)
    yield '<main id="main">'
    yield from _missing(data["missing"])
    yield from _faults(data)
    yield from _differences(data)
    yield from _nodes(data)
    yield "</main>"
    yield f"<footer><p>gpunode {escaped(data['version'])} · this page loads and sends no data</p></footer>"


def _header(data: Mapping[str, Any]) -> Iterator[str]:
    text, mood = _headline(data)
    yield '<a class="jump" href="#main">Skip to the findings</a>'
    yield f'<header class="top {mood}">'
    times = [node["at"] for node in data["nodes"] if node["at"]]
    if times:
        first, last = (datetime.fromtimestamp(at, timezone.utc) for at in (min(times), max(times)))
        yield f'<p class="where">gpunode doctor --compare · reports of {first:%Y-%m-%d %H:%M}'
        yield f"{f' to {last:%Y-%m-%d %H:%M}' if last - first >= _MINUTE else ''} UTC</p>"
    yield f"<h1>{_count(data)}</h1>"
    yield f'<p class="verdict">{escaped(text)}</p>'
    if data["same"] and len(data["nodes"]) > 1:
        yield '<dl class="facts">'
        for what, value in data["same"].items():
            yield f"<div><dt>{escaped(what)}, everywhere</dt><dd>{escaped(value)}</dd></div>"
        yield "</dl>"
    yield "</header>"


def _missing(missing: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Nodes without a report: those that could not be reached apart from those where the doctor failed."""
    unreachable = [entry for entry in missing if entry["code"] == _UNREACHABLE]
    failed = [entry for entry in missing if entry["code"] != _UNREACHABLE]
    for name, heading, nodes in (
        (_UNREACHABLE, "Unreachable nodes", unreachable),
        ("no-report", "Nodes where the doctor did not run", failed),
    ):
        if nodes:
            yield f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2><ul class="rows">'
            for node in nodes:
                yield _row("missing", node["name"], node["message"])
            yield "</ul></section>"


def _faults(data: Mapping[str, Any]) -> Iterator[str]:
    """Equal findings of several nodes, once."""
    if not data["faults"]:
        return
    total = len(data["nodes"])
    yield '<section class="problems" aria-labelledby="found"><h2 id="found">Findings</h2>'
    for fault in data["faults"]:
        yield f'<article class="finding {escaped(fault["status"])}">'
        yield f'<header><span class="badge">{_BADGES[fault["status"]]}</span>'
        yield f"<h3>{escaped(fault['summary'] or fault['title'])}</h3></header>"
        yield f'<p class="id"><code>{escaped(fault["id"])}</code> · {escaped(fault["title"])}</p>'
        yield _listed(f"{len(fault['nodes'])} of {many(total, 'node')}", fault["nodes"])
        if fault["why"]:
            yield f"<p>{escaped(fault['why'])}</p>"
        for fix in fault["fixes"]:
            nodes = fix["nodes"]
            where = ", ".join(nodes) if len(nodes) <= _MOST_NAMES else many(len(nodes), "node")
            yield f"<p>Fix{'' if len(fault['fixes']) == 1 else f' on {escaped(where)}'}:</p>"
            yield f'<div class="fix"><pre tabindex="0"><code>{escaped(fix["command"])}</code></pre></div>'
        yield "</article>"
    yield "</section>"


def _differences(data: Mapping[str, Any]) -> Iterator[str]:
    """Versions and models. The nodes with another than the most common one are named."""
    if not data["differences"]:
        return
    yield '<section aria-labelledby="differences"><h2 id="differences">Versions that differ</h2>'
    for difference in data["differences"]:
        yield f'<h3>{escaped(difference["what"])}</h3><dl class="evidence">'
        most = max(len(group["nodes"]) for group in difference["groups"])
        alone = sum(len(group["nodes"]) == most for group in difference["groups"]) == 1
        for group in difference["groups"]:
            count = many(len(group["nodes"]), "node")
            listed = count if alone and len(group["nodes"]) == most else _listed(count, group["nodes"])
            yield f"<div><dt>{escaped(group['value'])}</dt><dd>{listed}</dd></div>"
        yield "</dl>"
    yield "</section>"


def _nodes(data: Mapping[str, Any]) -> Iterator[str]:
    """Every node with a report, the most urgent first."""
    order = tuple(_BADGES)
    summaries = {
        (name, fault["id"]): fault["summary"] or fault["title"]
        for fault in data["faults"]
        for name in fault["nodes"]
    }
    yield '<section aria-labelledby="nodes"><h2 id="nodes">All nodes</h2><ul class="rows">'
    for node in sorted(data["nodes"], key=lambda node: (order.index(_state(node)), node["name"])):
        yield _row(_state(node), node["name"], summaries.get((node["name"], node["first"]), ""))
    yield "</ul></section>"


def _state(node: Mapping[str, Any]) -> str:
    status = str(node["status"])
    return status if status in ("fail", "warn", "ok") else "error"


def _row(state: str, name: str, text: str) -> str:
    tone = {"missing": "bad", "ok": "good"}.get(state, state)
    badge = f'<span class="badge">{_BADGES[state]}</span>'
    return f'<li class="row {tone}">{badge}<span><code>{escaped(name)}</code> {escaped(text)}</span></li>'


def _listed(count: str, names: Sequence[str]) -> str:
    """How many nodes, and their names, folded where they are many."""
    text = escaped(", ".join(names))
    if len(names) > _MOST_NAMES:
        return f"<details><summary>{count}</summary>{text}</details>"
    return f"<p>{count}: {text}</p>"
