"""The Go template from which k3s and rke2 render containerd's file, as text. Pure functions.

It is no TOML, so it isn't parsed: our tables stand at its end between two comment lines. Those of a handler
that the distribution may come to find by itself are rendered only as long as it doesn't: the same table twice
would keep its containerd from starting, however long after us the toolkit is installed. The conditions stand
in comments, so that our part is TOML before and after rendering.
"""

from __future__ import annotations

import re

BEGIN = "# gpunode: what follows is written by gpunode configure-runtime"
END = "# gpunode: end"
_MADE = """\
# made by gpunode configure-runtime
{{ template "base" . }}"""
_BASE = re.compile(r'\{\{-?\s*template\s+"base"\s+\.\s*-?\}\}')
_GUARD = '# {{{{ if not (index .ExtraRuntimes "{name}").BinaryName }}}}'
_UNGUARD = "# {{ end }}"
_GUARDED = re.compile(
    r'# \{\{ if not \(index \.ExtraRuntimes "([^"]+)"\)\.BinaryName \}\}\n(.*?)# \{\{ end \}\}', re.DOTALL
)
_BLOCK = re.compile(rf"\n*^{re.escape(BEGIN)}$.*?^{re.escape(END)}$\n?", re.MULTILINE | re.DOTALL)


def registers_found(text: str) -> bool:
    """Whether what the distribution finds by itself gets into the rendered file."""
    foreign = _BLOCK.sub("", text)
    return bool(_BASE.search(foreign)) or ".ExtraRuntimes" in foreign


def line_of_handler(text: str, name: str) -> int | None:
    """The line, from 1, at which something else than gpunode's own tables defines the handler."""
    header = rf"""^[ \t]*\[[^\]\n]*\bruntimes["']?\.["']?{re.escape(name)}["']?(?:\]|\.)"""
    own = _BLOCK.search(text)
    for found in re.finditer(header, text, re.MULTILINE):
        if own is None or not own.start() <= found.start() < own.end():
            return text.count("\n", 0, found.start()) + 1
    return None


def with_tables(text: str | None, tables: str) -> str:
    """The template with these tables as gpunode's own; a missing one is made around the base template."""
    kept = _BLOCK.sub("\n", text).rstrip() if text is not None else _MADE
    return f"{kept}\n\n{BEGIN}\n{tables.strip()}\n{END}\n"


def tables_of(text: str) -> str:
    """gpunode's own tables; empty if there are none."""
    found = _BLOCK.search(text)
    return found[0].strip().removeprefix(BEGIN).removesuffix(END).strip() if found else ""


def without_tables(text: str) -> str | None:
    """The template without gpunode's own tables; None for one that gpunode made, which has nothing else."""
    if not _BLOCK.search(text):
        return text
    left = _BLOCK.sub("\n", text)
    return None if left.strip() == _MADE else left


def guarded(tables: str, name: str) -> str:
    """The tables of a handler, left out wherever the distribution registers one of this name itself."""
    return f"{_GUARD.format(name=name)}\n{tables.strip()}\n{_UNGUARD}\n"


def rendered(text: str | None, base: str) -> str | None:
    """What the distribution makes of a template; None if it has more in it than gpunode can follow."""
    if text is None:
        return base
    plain = _GUARDED.sub(lambda found: "" if line_of_handler(base, found[1]) else found[2], text)
    return None if "{{" in _BASE.sub("", plain) else _BASE.sub(lambda _: base, plain)


def base_of(text: str | None, now: str) -> str | None:
    """What the base template gave when `now` was rendered from this template; None if it can't be told."""
    if text is None:
        return now
    end = now.find(BEGIN)
    parts = _BASE.split(_BLOCK.sub("\n", text) if end >= 0 else text)
    now = now[:end].rstrip() + "\n" if end >= 0 else now
    if len(parts) != 2 or any("{{" in part for part in parts):
        return None
    before, after = parts
    after = f"{after.rstrip()}\n" if end >= 0 else after
    fits = now.startswith(before) and now.endswith(after)
    return now[len(before) : len(now) - len(after)].rstrip() + "\n" if fits else None
