"""Take out of a text what a stranger must not read: secrets always, host names and UUIDs on request.

A secret becomes one fixed word. A name or a UUID becomes another one, the same each time, so that what
belongs together still does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from gpunode.dataclass import dataclass, field

HIDDEN = "REDACTED"
KINDS = ("hostnames", "uuids")
_WORDS = r"passw(?:or)?d|passphrase|secret|token|credential|authorization|identitytoken"
_NAMED_KEY = r"(?:api|access|private|client|signing|encryption)[_-]?key|key-data"
_KEYS = rf"[\w.\-]{{0,60}}(?:{_WORDS}|{_NAMED_KEY})[\w.\-]{{0,60}}"
_KEY = rf"(?:{_KEYS}|[\w.\-]{{0,60}}[_.\-](?:auth|pwd|pass)|auth)"
# a line without any of these holds no secret; most lines are passed over for it
_HINT = r"pass|secret|token|credential|auth|key|pwd|://|bearer|basic|sig"
# a key that only says where a secret lies, or how it is used, is none
_HARMLESS_KEY = (
    r"(?:file|path|dir|directory|url|mode|ttl|timeout|plugin|webhook|enabled|name|id|days|type)s?$"
)
_HARMLESS = {"true", "false", "null", "none", "", '""', "''", "yes", "no", "on", "off", HIDDEN.lower()}
_KNOWN = (
    r"nvapi-[\w-]{20,}",  # NVIDIA NGC
    r"gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    r"\bhf_[A-Za-z0-9]{20,}",
    r"\bxox[abprs]-[\w-]{10,}",
    r"\bdckr_pat_[\w-]{16,}",
    r"\bsk-[\w-]{20,}",
    r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?",  # JSON web tokens: licence tokens, service accounts
    r"\bK10[0-9a-f]{32,}::[\w:.-]+",  # k3s and rke2
    r"\b[a-z0-9]{6}\.[a-z0-9]{16}\b",  # kubeadm's bootstrap tokens
    r"\bSWMTKN-1-[\w-]{8,}",
)
_UUID = r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}(?![0-9A-Fa-f-])"
_BARE = r"(?<![0-9A-Za-z])[0-9a-f]{32}(?![0-9A-Za-z])"
_SHORTEST_NAME = 4
# names that are also words of what the doctor reads: such a host is renamed only where the name stands alone
_ORDINARY = frozenset(
    {
        *("localhost", "node", "nodes", "host", "server", "worker", "master", "control", "linux", "ubuntu"),
        *("debian", "rocky", "nvidia", "docker", "containerd", "kubelet", "compute", "default", "driver"),
        *("cuda", "tesla", "hopper", "test", "root", "true", "false", "none", "local", "system", "kernel"),
    }
)


@cache
def _in_texts() -> tuple[tuple[re.Pattern[str], Any], ...]:
    """What to look for in a whole text, and what takes its place."""
    key = rf"(?P<open>(?<![\w.\-])(?P<key>{_KEY})[\"']?[ \t]*"
    block = rf"{key}:[ \t]*)[|>][-+]?\n(?:[ \t]+.*\n?)+"
    items = rf"{key}:[ \t]*\n)(?P<items>(?:[ \t]*-[ \t][^\n]*\n?)+)"
    listed = rf"{key}[=:][ \t]*\[)(?P<listed>[^\[\]]{{1,4096}})(?=\])"
    return (
        (re.compile("|".join(f"(?:{one})" for one in _KNOWN)), HIDDEN),
        (re.compile(block, re.IGNORECASE), _block),
        (re.compile(items, re.IGNORECASE), _items),
        (re.compile(listed, re.IGNORECASE), _listed),
        (
            re.compile(
                r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----(?! REDACTED).*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL
            ),
            rf"-----BEGIN \1PRIVATE KEY----- {HIDDEN}",
        ),
    )


@cache
def _in_lines() -> tuple[tuple[re.Pattern[str], Any], ...]:
    """The same for the lines in which `_HINT` is found."""
    key = rf"(?<![\w.\-])(?P<key>{_KEY})"
    value = r"""(?P<value>\\"[^"\\\n]*\\"|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s,;"'\[\]{}\0\\]+)"""
    flags = re.IGNORECASE
    scheme = r"(?P<scheme>(?<![\w+.-])[a-z][\w+.-]{0,30}://)[^\s/@\"'\0]+@"
    flag = rf"(?P<open>(?<![\w-])--?(?P<key>{_KEY})[ \t\0]+)(?P<value>[^\s\0-][^\s\0]*)"
    return (
        (re.compile(scheme, flags), rf"\g<scheme>{HIDDEN}@"),
        (re.compile(r"\b(bearer|basic)[ ]+[\w.~+/=-]{8,}", flags), rf"\1 {HIDDEN}"),
        (re.compile(rf"(?P<open>{key}\\?[\"']?[ \t]*[=:][ \t]*){value}", flags), _pair),
        (re.compile(flag, flags), _pair),
        # cifs' and nfs' mount options; in an address, what clouds sign it with
        (re.compile(r"((?<![\w.\-])(?:pass|pwd)=)[^\s,;&\"'\0]+", flags), rf"\1{HIDDEN}"),
        (re.compile(r"([?&](?:sig|[\w-]{0,30}signature)=)[^\s&\"'\0]+", flags), rf"\1{HIDDEN}"),
    )


def _block(found: re.Match[str]) -> str:
    """A YAML text of several lines."""
    return f"{found['open']}{HIDDEN}\n"


def _items(found: re.Match[str]) -> str:
    """A YAML list, such as the values of an HTTP header."""
    if not secret_key(found["key"]):
        return found[0]
    return found["open"] + re.sub(r"(?m)^([ \t]*-[ \t])[^\n]*", rf"\1{HIDDEN}", found["items"])


def _listed(found: re.Match[str]) -> str:
    """A list in TOML or JSON, on one line or more; what isn't in quotes is no text."""
    if not secret_key(found["key"]):
        return found[0]
    return found["open"] + re.sub(r"""(["'])[^"'\n]*\1""", rf"\1{HIDDEN}\1", found["listed"])


def _pair(found: re.Match[str]) -> str:
    if not secret_key(found["key"]) or found["value"].lower() in _HARMLESS:
        return found[0]
    value = found["value"]
    quote = next((one for one in ('\\"', '"', "'") if value.startswith(one)), "")
    return f"{found['open']}{quote}{HIDDEN}{quote}"


def secret_key(name: str) -> bool:
    """Whether what stands behind this name is a secret."""
    return (
        re.fullmatch(_KEY, name, re.IGNORECASE) is not None
        and re.search(_HARMLESS_KEY, name, re.IGNORECASE) is None
    )


def without_secrets(text: str) -> str:
    """The text with every secret replaced. Quotes stay, so that JSON and TOML stay what they are."""
    hint = re.compile(_HINT, re.IGNORECASE)
    if not hint.search(text):
        return _replaced(text, _in_texts()[:1])
    text = _replaced(text, _in_texts())
    lines = (_replaced(line, _in_lines()) if hint.search(line) else line for line in text.split("\n"))
    return "\n".join(lines)


def _replaced(text: str, patterns: Iterable[tuple[re.Pattern[str], Any]]) -> str:
    for pattern, instead in patterns:
        text = pattern.sub(instead, text)
    return text


@dataclass(frozen=True)
class Redaction:
    """One bundle's. `names` are this node's own, `uuids` says whether UUIDs are replaced; `known` maps each
    that was met to what takes its place."""

    names: tuple[str, ...] = ()
    uuids: bool = False
    known: dict[str, str] = field(default_factory=dict)

    def text(self, text: str) -> str:
        """A whole text, or a part of one."""
        return self.path(without_secrets(text))

    def path(self, path: str) -> str:
        """Names and UUIDs only: a path holds no secret."""
        for position, name in enumerate(self.names):
            path = _name_pattern(name).sub(f"host-{position + 1}", path)
        if self.uuids:
            path = re.sub(_UUID, self._uuid, path)
            path = re.sub(_BARE, self._bare, path)
        return path

    def value(self, value: Any, key: str = "") -> Any:
        """A tree of JSON values; a text, or a list of texts, behind the name of a secret is one."""
        if isinstance(value, str):
            secret = key and secret_key(key) and value.lower() not in _HARMLESS
            return HIDDEN if secret else self.text(value)
        if isinstance(value, dict):
            return {self.path(str(name)): self.value(item, str(name)) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item, key) for item in value]
        return value

    def _uuid(self, found: re.Match[str]) -> str:
        digits = self._digits(found[0].replace("-", "").lower())
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def _bare(self, found: re.Match[str]) -> str:
        return self._digits(found[0])

    def _digits(self, digits: str) -> str:
        """32 digits for 32 digits; zeros, which stand for none, stay."""
        if not digits.strip("0"):
            return digits
        return self.known.setdefault(digits, f"{len(self.known) + 1:032x}")


@cache
def _name_pattern(name: str) -> re.Pattern[str]:
    if len(name) < _SHORTEST_NAME or name.lower() in _ORDINARY:
        return re.compile(rf"\A{re.escape(name)}(?=\s*\Z)", re.IGNORECASE)
    return re.compile(rf"(?<![A-Za-z0-9-]){re.escape(name)}(?![A-Za-z0-9-])", re.IGNORECASE)


def own_names(texts: Iterable[str]) -> tuple[str, ...]:
    """A node's names from what it calls itself: the first label and the domain of each, longest first."""
    found = set()
    for text in texts:
        label, _, domain = text.strip().partition(".")
        found |= {part for part in (label, domain) if part and part != "localhost" and part != "(none)"}
    return tuple(sorted(found, key=lambda name: (-len(name), name)))
