"""What is wrong with a configuration, all of it at once, each with where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError
from gpunode.result import ErrorInfo, ExitCode


@dataclass(frozen=True)
class Problem:
    """`where` is FILE:LINE, a flag or a variable; `key` the config key, empty outside of a file."""

    where: str
    key: str
    message: str
    hint: str = ""
    usage: bool = False
    line: int = 0

    @property
    def text(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)

    @property
    def fields(self) -> dict[str, str]:
        """For a log line."""
        return {"hint": self.hint} if self.hint else {}

    def info(self) -> ErrorInfo:
        """As it stands in the JSON envelope."""
        return ErrorInfo("usage" if self.usage else "config", self.text, self.hint)


class InvalidConfig(ConfigError):
    """A configuration with one problem or more."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first, *more = problems
        usage = all(problem.usage for problem in problems)
        super().__init__(
            "; ".join(problem.text for problem in problems),
            hint=first.hint if not more else "gpunode plugin check-config",
            code="usage" if usage else "config",
            exit_code=ExitCode.USAGE if usage else ExitCode.FAILED,
        )
        self.problems = tuple(problems)


def nearest(word: str, known: Iterable[str]) -> str:
    """The word that was meant, empty if none is near."""
    from difflib import get_close_matches

    by_lower = {one.lower(): one for one in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else ""
