"""A DoctorReport as one self-contained HTML page: no other file, no request, complete without JavaScript.

The text is rendered here, escaped; the script (doctor.js) only filters and copies. A page may arrive by mail,
so its own policy allows exactly this style and this script, by their hashes, and no connection.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

from gpunode.output.render import printable
from gpunode.output.result import many, undecided

# Sections of the doctor's page as HTML, every value escaped; the most urgent ones first.

_ORDER = ("fail", "error", "warn", "note", "waits", "skip", "pass")
_WORDS = {
    "fail": "Error",
    "error": "Broken check",
    "warn": "Warning",
    "note": "Note",
    "waits": "Waits",
    "skip": "Not checked",
    "pass": "Passed",
}


def escaped(value: object) -> str:
    """Text for an element or a quoted attribute; control characters and lone surrogates are shown."""
    return escape(printable(str(value)))


def state(finding: Mapping[str, Any]) -> str:
    """One word for the filters: the status, but notes and checks that wait for a cause have words of their
    own."""
    if finding["note"]:
        return "note"
    return "waits" if finding["blockedBy"] else str(finding["status"])


_Data = Mapping[str, Any]
_MOODS = {"fail": "bad", "warn": "warn", "ok": "good"}  # classes in doctor.css


def _having(data: _Data, *states: str) -> tuple[_Data, ...]:
    """Findings in one of these states, the worst state first."""
    return tuple(finding for desired in states for finding in data["findings"] if state(finding) == desired)


def _name(data: _Data) -> str:
    return data["node"]["name"] or "This node"


def body(data: _Data) -> Iterator[str]:
    """Header, what to do first, reboot, filters, problems, every check, footer."""
    yield from _header(data)
    yield '<main id="main">'
    yield '<div class="cards">'
    yield from _first(data)
    yield from _reboot(data)
    yield "</div>"
    yield from _filters(data)
    yield from _problems(data)
    yield from _notes(data)
    yield from _layers(data)
    yield "</main>"
    yield from _footer(data)


def _header(data: _Data) -> Iterator[str]:
    node = data["node"]
    when = datetime.fromtimestamp(data["at"], timezone.utc)
    yield '<a class="jump" href="#main">Skip to the findings</a>'
    yield f'<header class="top {_MOODS[data["headline"]["status"]]}">'
    yield f'<p class="where">gpunode doctor · <time datetime="{when:%Y-%m-%dT%H:%M:%SZ}">'
    yield f"{when:%Y-%m-%d %H:%M} UTC</time></p>"
    yield f"<h1>{escaped(_name(data))}</h1>"
    yield f'<p class="verdict">{escaped(data["headline"]["text"])}</p>'
    yield '<dl class="facts">'
    for term, value in _facts(node):
        if value:
            yield f"<div><dt>{term}</dt><dd>{escaped(value)}</dd></div>"
    yield "</dl></header>"


def _facts(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    models = Counter(gpu["name"] or f"NVIDIA GPU {gpu['deviceId']}" for gpu in node["gpus"])
    yield "GPUs", ", ".join(f"{number} × {name}" for name, number in models.items()) or "none on the bus"
    yield "Driver", node["driver"] or "not loaded"
    yield "Container toolkit", node["toolkit"]
    yield "Engines", ", ".join(f"{engine['name']} {engine['version']}".strip() for engine in node["engines"])
    yield "System", (node["distro"] or {}).get("name", "")
    yield "Kernel", node["kernel"]
    yield "Node type", node["class"]


def _first(data: _Data) -> Iterator[str]:
    """The finding to fix first, with its steps, which the findings below don't repeat."""
    cause = next((finding for finding in data["findings"] if finding["id"] == data["first"]), None)
    if cause is None:
        return
    waiting = len(data["chains"].get(cause["id"], {}))
    yield f'<section class="card first {state(cause)}" aria-labelledby="first">'
    root = ", as root" if cause["fix"][0]["needsRoot"] else ""
    yield f'<h2 id="first">{_label(cause["fix"][0])} first{root}</h2>'
    yield f'<p><a href="#{escaped(cause["id"])}">{escaped(cause["id"])}</a>: {escaped(cause["summary"])}</p>'
    for worst in data["order"][1:2]:  # a fix that goes before it is the first
        if cause["id"] in data["reboot"]["before"].get(worst, ()):
            yield f"<p>Before the reboot that {_link(worst)} needs:</p>"
    yield from _steps(data, cause) if data["steps"] else _fixes(data, cause, {})
    if waiting:
        verb = "waits" if waiting == 1 else "wait"
        yield f'<p class="quiet">{many(waiting, "check")} {verb} for this.</p>'
    yield "</section>"


def _steps(data: _Data, cause: Mapping[str, Any]) -> Iterator[str]:
    if cause["fix"][0]["before"]:
        yield f"<p>{escaped(cause['fix'][0]['before'])}</p>"
    yield '<ol class="steps">'
    for number, step in enumerate(data["steps"], 1):
        yield "<li>"
        yield from _change(step)
        if step["command"]:
            yield from _command(step["command"], f"step {number} of {cause['id']}", escaped(step["effect"]))
        else:
            yield f"<p>fix {_link(step['finding'])}</p>"
        yield from _with_commands(step["note"])
        yield "</li>"
    yield "</ol>"


def _reboot(data: _Data) -> Iterator[str]:
    verdict = data["reboot"]
    fixed_by_reboot = verdict.get("mends", ())
    left = (*verdict.get("unjudged", ()), *verdict.get("waiting", ()))
    if verdict["safe"] is None and not (fixed_by_reboot or left):
        return
    mood = "good" if verdict["safe"] and not left else "warn"
    yield f'<section class="card reboot {mood}" aria-labelledby="reboot">'
    yield '<h2 id="reboot">Safe to reboot?</h2>'
    if verdict["safe"] and not left:
        yield "<p>Yes: no check found a problem that a reboot would cause.</p>"
    elif not verdict["findings"]:
        without = [finding for finding in data["findings"] if finding["id"] in left]
        reasons = {finding["skipped"] for finding in without}
        causes = {finding["blockedBy"] for finding in without if finding["blockedBy"]}
        yield f"<p>{escaped(undecided(len(left), reasons, causes, fixed_by_reboot))}.</p>"
    else:
        yield "<p>No, fix this before a reboot:</p><ul>"
        for finding in data["findings"]:
            if finding["id"] in verdict["findings"]:
                yield f'<li><a href="#{escaped(finding["id"])}">{escaped(finding["id"])}</a>: '
                yield f"{escaped(finding['summary'])}</li>"
        yield "</ul>"
    if fixed_by_reboot:
        yield f'<p class="quiet">A reboot is the fix for {escaped(", ".join(fixed_by_reboot))}.</p>'
    if ends := data["node"].get("rebootEnds"):
        yield f'<p class="quiet">A reboot ends {escaped(ends)}.</p>'
    yield "</section>"


def _filters(data: _Data) -> Iterator[str]:
    """Hidden until the script has initialised them."""
    layers = dict.fromkeys(finding["layer"] for finding in data["findings"])
    yield '<form class="filters" id="filters" hidden><h2 class="unseen">Filter the checks</h2>'
    yield '<label class="text">Search <input type="search" id="text" autocomplete="off"></label>'
    yield '<label>Layer <select id="layer"><option value="">all</option>'
    yield from (f'<option value="{escaped(layer)}">{escaped(layer)}</option>' for layer in layers)
    yield '</select></label><fieldset><legend class="unseen">Status</legend>'
    for level in _ORDER:
        number = len(_having(data, level))
        if number:
            yield f'<label class="tick {level}"><input type="checkbox" name="state" value="{level}" checked>'
            yield f' {_WORDS[level]} <span class="count">{number}</span></label>'
    yield '</fieldset><button type="button" id="reset" hidden>Show all</button>'
    yield '<output id="shown" aria-live="polite"></output></form>'


def _problems(data: _Data) -> Iterator[str]:
    places = {name: place for place, name in enumerate(data["order"])}
    problems = sorted(
        _having(data, "fail", "error", "warn"), key=lambda finding: places.get(finding["id"], len(places))
    )
    if not problems:
        return
    yield '<section class="problems" aria-labelledby="found"><h2 id="found">Findings</h2>'
    commands: dict[str, str] = {}  # a command, and the finding that shows it
    for problem in problems:
        yield from _problem(data, problem, commands)
    yield "</section>"


def _problem(data: _Data, finding: Mapping[str, Any], commands: dict[str, str]) -> Iterator[str]:
    name = escaped(finding["id"])
    yield f'<article class="finding {state(finding)}" id="{name}" {_marks(finding)}>'
    yield f'<header><span class="badge">{_WORDS[state(finding)]}</span>'
    yield f"<h3>{escaped(finding['summary'])}</h3></header>"
    yield f'<p class="id"><code>{name}</code> · {escaped(finding["layer"])} · {escaped(finding["title"])}</p>'
    if finding["ignored"] is not None:
        yield f'<p class="quiet">An error, but ignored: {escaped(finding["ignored"])}</p>'
    yield from _evidence(finding)
    if finding["why"]:
        yield f"<p>{escaped(finding['why'])}</p>"
    if finding["id"] == data["first"] and finding["fix"]:
        commands[finding["fix"][0]["command"]] = finding["id"]
        label = _label(finding["fix"][0])
        yield f'<p>{label}: see <a href="#first">{label} first</a>.</p>'
    else:
        yield from _fixes(data, finding, commands)
    yield from _chain(data, finding["id"])
    yield from _refs(finding)
    yield "</article>"


def _evidence(finding: Mapping[str, Any]) -> Iterator[str]:
    if not finding["evidence"]:
        return
    yield '<dl class="evidence">'
    for entry in finding["evidence"]:
        line = "" if entry["line"] is None else f":{entry['line']}"
        yield f"<div><dt>{escaped(entry['source'])}{line}</dt><dd>{escaped(entry['value'])}</dd></div>"
    yield "</dl>"


def _fixes(data: _Data, finding: Mapping[str, Any], commands: dict[str, str]) -> Iterator[str]:
    """The command, once on a page, and what it disrupts. A reboot after it is a step of its own."""
    drain = ["drain this Kubernetes node"] if data["node"].get("kubernetes") else []
    names = data["reboot"]["before"].get(finding["id"], ())
    order = data["order"]
    above = order[: order.index(finding["id"])]
    before = [f"fix {_link(name)}" for name in names if name not in above]
    reboots_last = len(finding["fix"]) > 1
    drained = False
    for fix in finding["fix"][:1]:
        above = commands.setdefault(fix["command"], finding["id"])
        if above != finding["id"]:
            yield f"<p>{_label(fix)}: the same as for {_link(above)}</p>"
            return
        drained = bool(drain) and fix["disruptive"] in ("drain", "reboot")
        yield from _with_commands(fix.get("before", ""))
        yield from _change(fix)
        yield f"<p>{_label(fix)}:</p>"
        needed = [*(() if reboots_last else before), *(drain if drained else ())]
        notes = ["as root"] if fix["needsRoot"] else []
        notes += [escaped(fix["effect"])] if fix["effect"] else []
        notes += [f"{' and '.join(needed)} first"] if needed else []
        yield from _command(fix["command"], finding["id"], ", ".join(notes))
        yield from _with_commands(fix["note"])
    if reboots_last:
        steps = [*before, *(["reboot"] if drained or not drain else [f"{drain[0]} and reboot it"])]
        when = "If the command succeeds," if finding["fix"][0]["note"] else "Then"
        yield f"<p>{when} {', '.join(steps)}.</p>"


def _change(fix: Mapping[str, Any]) -> Iterator[str]:
    if fix.get("change"):
        change, _, lines = fix["change"].partition("\n")
        yield f"<p>{escaped(change)}</p>"
        if lines:
            yield f"<pre><code>{escaped(lines)}</code></pre>"


def _command(command: str, of: str, remark: str) -> Iterator[str]:
    """A command that can be copied; `remark` is HTML."""
    yield f'<div class="fix"><pre tabindex="0"><code>{escaped(command)}</code></pre>'
    label = f"Copy the command of {of}"
    yield f'<button type="button" class="copy" aria-label="{escaped(label)}" hidden>Copy</button>'
    yield f'<p class="quiet">{remark}</p></div>' if remark else "</div>"


def _with_commands(note: str) -> Iterator[str]:
    """A text, and on lines of their own the commands that it names."""
    if note:
        text, *commands = note.split("\n")
        yield f"<p>{escaped(text)}</p>"
        yield from (f"<pre><code>{escaped(command)}</code></pre>" for command in commands)


def _link(identifier: str) -> str:
    return f'<a href="#{escaped(identifier)}">{escaped(identifier)}</a>'


def _label(fix: Mapping[str, Any]) -> str:
    return "Look" if fix["look"] else "Fix"


def _chain(data: _Data, cause: str) -> Iterator[str]:
    """Checks that wait for this one, each below its nearest blocker."""
    parents: Mapping[str, str] = data["chains"].get(cause, {})
    if not parents:
        return
    number = len(parents)
    yield f'<details class="chain"><summary>{many(number, "check")} '
    yield f"{'waits' if number == 1 else 'wait'} for this</summary>"
    yield from _below(data, cause, parents)
    yield "</details>"


def _below(data: _Data, parent: str, parents: Mapping[str, str]) -> Iterator[str]:
    here = [child for child, above in parents.items() if above == parent]
    if here:
        titles = {finding["id"]: finding["title"] for finding in data["findings"]}
        yield "<ul>"
        for identifier in here:
            yield f"<li><code>{escaped(identifier)}</code> {escaped(titles.get(identifier, ''))}"
            yield from _below(data, identifier, parents)
            yield "</li>"
        yield "</ul>"


def _refs(finding: Mapping[str, Any]) -> Iterator[str]:
    """Only addresses that a browser opens as pages."""
    addresses = [address for address in finding["refs"] if str(address).startswith(("https://", "http://"))]
    if addresses:
        links = (
            f'<a href="{escaped(address)}" rel="noreferrer noopener">{escaped(address)}</a>'
            for address in addresses
        )
        yield f'<p class="refs">See also: {" · ".join(links)}</p>'


def _notes(data: _Data) -> Iterator[str]:
    notes = _having(data, "note")
    if not notes:
        return
    yield '<section aria-labelledby="notes"><h2 id="notes">Notes</h2><ul class="rows">'
    for note in notes:
        marks = f'id="{escaped(note["id"])}" {_marks(note)}'
        yield f'<li class="row note" {marks}><span class="badge">Note</span>'
        yield f"<span><code>{escaped(note['id'])}</code> {escaped(note['summary'])}</span></li>"
    yield "</ul></section>"


def _layers(data: _Data) -> Iterator[str]:
    """All other findings, by layer; layers with a waiting check are open."""
    rest = "All other checks" if _having(data, "fail", "error", "warn", "note") else "All checks"
    yield f'<section class="all" aria-labelledby="all"><h2 id="all">{rest}</h2>'
    for layer in dict.fromkeys(finding["layer"] for finding in data["findings"]):
        here = [finding for finding in _having(data, "waits", "pass", "skip") if finding["layer"] == layer]
        if not here:
            continue
        passed = sum(state(finding) == "pass" for finding in here)
        waits = sum(state(finding) == "waits" for finding in here)
        counts = [f"{passed} passed"] if passed else []
        counts += [f"{waits} waiting"] if waits else []
        unjudged = len(here) - passed - waits
        counts += [f"{unjudged} not checked"] if unjudged else []
        yield f'<details class="layer"><summary><h3>{escaped(layer)}</h3> '
        yield f'<span class="quiet">{", ".join(counts)}</span></summary><ul class="rows">'
        for finding in here:
            yield from _row(finding)
        yield "</ul></details>"
    yield "</section>"


def _row(finding: Mapping[str, Any]) -> Iterator[str]:
    word = state(finding)
    yield f'<li class="row {word}" id="{escaped(finding["id"])}" {_marks(finding)}>'
    yield f'<span class="badge">{_WORDS[word]}</span><span><code>{escaped(finding["id"])}</code> '
    yield f"{escaped(finding['summary'])}</span></li>"


def _marks(finding: Mapping[str, Any]) -> str:
    return f'data-state="{state(finding)}" data-layer="{escaped(finding["layer"])}"'


def _footer(data: _Data) -> Iterator[str]:
    yield "<footer>"
    tables = data["tables"]
    if tables:
        oldest = max(table["ageDays"] for table in tables)
        yield f"<p>Based on {many(len(tables), 'reference table')}, the oldest of them "
        yield f"{many(oldest, 'day')} old: later releases and bulletins are unknown.</p>"
    yield f"<p>gpunode {escaped(data['version'])} · {many(len(data['findings']), 'check')} in "
    yield f"{data['seconds']:.1f} s · this page loads and sends no data</p>"
    yield '<p><button type="button" class="copy" id="json" hidden>Copy the report as JSON</button></p>'
    yield "</footer>"


_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; style-src '{style}'; script-src '{script}'; base-uri 'none'; form-action 'none'"
)


def page(envelope: Mapping[str, Any]) -> str:
    """The whole document of a DoctorReport."""
    data = envelope["data"]
    title = f"{_name(data)}: {data['headline']['text']}"
    return document(title, body(data), envelope, _asset("doctor.js"))


def document(title: str, content: Iterable[str], envelope: Mapping[str, Any], script: str = "") -> str:
    """A whole document: the lines of its body, and the envelope as data for `script`."""
    style = _asset("doctor.css")
    parts = {
        "policy": _POLICY.format(style=_hash(style), script=_hash(script)),
        "title": escaped(title),
        "style": style,
        "body": "\n".join(content),
        "data": embedded(envelope),
        "script": script,
    }
    return "".join(_filled(_asset("doctor.html"), parts))


def embedded(envelope: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element: nothing in it ends the element or a line of JavaScript."""
    text = json.dumps(envelope, ensure_ascii=False, separators=(",", ":"))
    text = text.encode("utf-8", "backslashreplace").decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Hash of a source in a Content-Security-Policy (CSP3, "hash-source")."""
    import base64
    import hashlib

    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _filled(template: str, parts: Mapping[str, str]) -> Iterator[str]:
    """The template with each ``{{name}}`` replaced once: inserted text isn't searched again."""
    pieces: Sequence[str] = template.split("{{")
    yield pieces[0]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        yield parts[name] + rest
