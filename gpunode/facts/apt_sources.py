"""Package sources of apt: which addresses, and which key each one is to be signed by (sources.list(5))."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.dataclass import dataclass
from gpunode.host import Host

MAIN = "/etc/apt/sources.list"
DIRECTORY = "/etc/apt/sources.list.d"


@dataclass(frozen=True)
class AptSource:
    """One address of one file; `line` is where its entry begins, `signed_by` empty if it names no key."""

    path: str
    line: int
    uri: str
    suite: str
    signed_by: str


def read_sources(host: Host, main: str = MAIN, directory: str = DIRECTORY) -> tuple[AptSource, ...]:
    """All that are switched on, in either format; where apt's configuration has them."""
    found: list[AptSource] = []
    for path in (main, *host.glob(directory, "*.list")):
        found += _one_line(host.read_text(path) or "", path)
    for path in host.glob(directory, "*.sources"):
        found += _deb822(host.read_text(path) or "", path)
    return tuple(found)


def _one_line(text: str, path: str) -> Iterator[AptSource]:
    """``deb [signed-by=KEY arch=amd64] URI SUITE COMPONENT...``"""
    for number, line in enumerate(text.splitlines(), 1):
        kind, _, rest = line.partition("#")[0].strip().partition(" ")
        if kind not in ("deb", "deb-src"):
            continue
        options, key = "", ""
        rest = rest.strip()
        if rest.startswith("["):
            options, _, rest = rest[1:].partition("]")
        for option in options.split():
            name, _, value = option.partition("=")
            key = value if name.lower() == "signed-by" else key
        words = rest.split()
        if len(words) > 1:
            yield AptSource(path, number, words[0].rstrip("/"), words[1], key)


def _deb822(text: str, path: str) -> Iterator[AptSource]:
    number = 1
    for block in text.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                fields[name] = f"{fields.get(name, '')} {line.strip()}".strip()
                continue
            name = line.partition(":")[0].strip().lower()
            fields[name] = line.partition(":")[2].strip()
        if fields.get("enabled", "yes").lower() not in ("no", "false", "0", "off"):
            key = fields.get("signed-by", "")
            for uri in fields.get("uris", "").split():
                for suite in fields.get("suites", "").split():
                    yield AptSource(path, number, uri.rstrip("/"), suite, key)
        number += block.count("\n") + 2
