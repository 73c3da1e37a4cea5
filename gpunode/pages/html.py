"""A DoctorReport as one page for a browser: no file beside it, no request, nothing lost without JavaScript.

The text is drawn here, escaped; the script (doctor.js) only filters and copies. A page that comes by mail is
not trusted, so its own policy allows exactly this style and this script, by their hashes, and no connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunode.pages.sections import Report, body, escaped

_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; style-src '{style}'; script-src '{script}'; base-uri 'none'; form-action 'none'"
)


def page(envelope: Mapping[str, Any]) -> str:
    """The whole document."""
    style, script = _asset("doctor.css"), _asset("doctor.js")
    report = Report.of(envelope)
    parts = {
        "policy": _POLICY.format(style=_hash(style), script=_hash(script)),
        "title": escaped(f"{report.name}: {report.headline}"),
        "style": style,
        "body": "\n".join(body(report)),
        "data": embedded(envelope),
        "script": script,
    }
    return "".join(_filled(_asset("doctor.html"), parts))


def embedded(envelope: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element: nothing in it ends the element or a line of JavaScript."""
    text = json.dumps(envelope, ensure_ascii=False, separators=(",", ":"))
    text = text.encode("utf-8", "backslashreplace").decode()
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a Content-Security-Policy names a source (CSP3, "hash-source")."""
    import base64
    import hashlib

    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _filled(template: str, parts: Mapping[str, str]) -> Iterator[str]:
    """The template with each ``{{name}}`` replaced, once: what is put in is never looked at again."""
    pieces: Sequence[str] = template.split("{{")
    yield pieces[0]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        yield parts[name] + rest
