"""The options of `plugin serve`, as the command line and the commands that take them see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpunode.plugin.config.options import OPTIONS, Option, metavar

if TYPE_CHECKING:
    from gpunode.host import Host
    from gpunode.plugin.config.resolve import Sources
    from gpunode.plugin.config.settings import Settings

__all__ = [
    "OPTIONS",
    "SERVING",
    "Option",
    "default_text",
    "metavar",
    "sources",
    "value_text",
    "with_go_words",
]
SERVING = tuple(option for option in OPTIONS if not option.part)
"""Those that have a flag where devices are served."""


def default_text(option: Option) -> str:
    """The default as a person would write it, empty for none."""
    from gpunode.plugin.config.settings import Settings

    return value_text(option, Settings())


def value_text(option: Option, settings: Settings) -> str:
    """An effective value as a person would write it."""
    from gpunode.plugin.config.resolve import told

    value = told(settings, option)
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}s" if option.kind in ("hold", "interval") else f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def sources(host: Host, given: Mapping[str, Any], part: str = "") -> Sources:
    """What the command line said, by field; what it didn't say is left out."""
    from gpunode.plugin.config.resolve import Sources

    flags = {
        field: [value] if isinstance(value, str) else list(value)
        for field, value in given.items()
        if value is not None and value != ()
    }
    return Sources(host, flags, part)


def with_go_words(arguments: Sequence[str], options: Sequence[Option] = SERVING) -> list[str]:
    """The same command line in our spelling: a boolean always with its value, two dashes before a name.

    Go's flag package takes ``-name`` for ``--name`` and a boolean without a value; existing deployments do.
    A word behind a boolean is its value only if it is one.
    """
    from gpunode.plugin.config.values import FALSE, TRUE

    booleans = {flag for option in options if option.kind == "boolean" for flag in option.flags}
    known = {flag for option in options for flag in option.flags}
    made: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name = word.partition("=")[0]
        if f"-{name}" in known:
            word, name = f"-{word}", f"-{name}"
        if word in booleans:
            word += f"={words.pop(0) if words and words[0] in TRUE | FALSE else 'true'}"
        elif word in known and words:
            word += f"={words.pop(0)}"  # a value may look like an option
        made.append(word)
    return made
