"""Regular expressions that are compiled when they are first asked.

A start loads many and asks few; compiling one takes about 0.1 ms, as much as loading a small module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["pattern"]

if TYPE_CHECKING:
    from re import compile as pattern
else:

    class pattern:
        """As `re.compile`, except that a mistake in it is told by whoever asks it first."""

        def __init__(self, text: str, flags: int = 0) -> None:
            self._given = text, flags

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # what copies and pickles ask of an empty one
                raise AttributeError(name)
            import re

            found = self.__dict__[name] = getattr(re.compile(*self._given), name)
            return found
