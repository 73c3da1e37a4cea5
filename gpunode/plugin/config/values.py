"""Parser for one value from its text in a flag, a variable or the config file. Pure.

Each kind is one function that raises ValueError with what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from gpunode.errors import ConfigError
from gpunode.output.result import ErrorInfo, ExitCode
from gpunode.plugin.config.options import LISTS, Option
from gpunode.plugin.config.settings import ALL_XIDS, SOCKET_BYTES, resource_name_problem
from gpunode.plugin.model import pci_numbers

TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})  # strconv.ParseBool
FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})
_NANOSECONDS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9}
_NANOSECONDS["h"] = 3600 * 10**9
_ONE_TERM = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_TERM = re.compile(_ONE_TERM, re.ASCII)
_DURATION = re.compile(rf"(?:{_ONE_TERM})+", re.ASCII)
_NUMBER = re.compile(r"\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,18}")
_UUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_INDEX = re.compile(r"[0-9]{1,6}(:[0-9]{1,6})?")
_GPU_UUID = re.compile(rf"(GPU|MIG)-{_UUID}|MIG-GPU-{_UUID}/[0-9]+/[0-9]+", re.IGNORECASE)
_PARTITION = re.compile(r"amdgpu_xcp_[0-9]+|([0-9]+c\.)?[0-9]+g\.[0-9]+gb\S*")  # AMD's; a MIG profile
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.%a-z]+\]|[^\s:\[\]]*):(?P<port>[0-9]{1,5})", re.ASCII)
MAX_LIST = 4096


def parse(option: Option, texts: Sequence[str]) -> Any:
    """The value of an option given once, or several times: for a list all count, else the last.

    Lists are split at commas and trimmed; empty items don't count.
    """
    if option.kind not in LISTS:
        return _value(option, texts[-1] if option.kind == "text" else texts[-1].strip())
    words = split(texts)
    if len(words) > MAX_LIST:
        raise ValueError(f"{len(words)} items are more than the {MAX_LIST} that make sense")
    values = tuple(dict.fromkeys(_value(option, word) for word in words))
    if option.kind == "choices" and not values and option.field != "labels_to":
        raise ValueError(f"at least one of {', '.join(option.allowed)} is needed")
    if option.field == "imex_channel_ids" and values not in ((), (0,)):
        raise ValueError("only channel 0, or none, can be handed out")
    return values


def split(texts: Sequence[str]) -> list[str]:
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


def valid_words(option: Option, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The valid items of a list, and a warning for each other one."""
    words, warnings = [], []
    for word in split(texts):
        try:
            parse(option, [word])
            words.append(word)
        except ValueError as error:
            warnings.append(f"{error}; ignored")
    return words, warnings


def _value(option: Option, text: str) -> Any:
    """A value, or one item of a list."""
    if option.allowed and text not in option.allowed:
        raise ValueError(f"{text!r} is not one of {', '.join(option.allowed)}")
    return text if option.allowed else _KINDS[option.kind](text)


def boolean(text: str) -> bool:
    """Go's spellings."""
    if text in TRUE:
        return True
    if text in FALSE:
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _text(text: str) -> str:
    if "\0" in text or "\n" in text:
        raise ValueError("a line break or NUL can't be meant")
    return text


def _path(text: str) -> str:
    if text and not text.startswith("/"):
        raise ValueError(f"{text!r} is not an absolute path")
    return _text(text)


def _socket(text: str) -> str:
    if len(_path(text).encode("utf-8", "surrogateescape")) > SOCKET_BYTES:
        raise ValueError(f"a socket's path has at most {SOCKET_BYTES} bytes")
    return text


def _resource(text: str) -> str:
    if problem := resource_name_problem(text):
        raise ValueError(f"{text!r}: {problem}")
    return text


def _seconds(text: str) -> float:
    return duration(text, 0.01)


def _hold(text: str) -> float:
    return float("inf") if text == "infinite" else duration(text, 0.0)


def _interval(text: str) -> float:
    if text == "infinite":
        raise ValueError("a GPU that is never polled can't be monitored; at most 24h is allowed")
    return duration(text, 0.1)


def duration(text: str, least: float) -> float:
    """Seconds from a Go duration such as 1h30m, 60s or 500ms, or from a number of seconds.

    ValueError if it is invalid, shorter than `least` seconds or longer than a day.
    """
    seconds = float(text) if is_number(text) else _go_duration(text)
    if not least <= seconds <= 86400:
        raise ValueError(f"{text} is not between {least:g}s and 24h")
    return seconds


def is_number(text: str) -> bool:
    """Whether the text is a number without a unit."""
    return _NUMBER.fullmatch(text) is not None


def _go_duration(text: str) -> float:
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration such as 60s, 1m30s or 500ms")
    seconds = sum(float(number) * _NANOSECONDS[unit] for number, unit in _TERM.findall(text)) / 1e9
    if 0 < seconds < 0.001:
        raise ValueError(f"{text} can't be meant (a number without a unit is nanoseconds); write 60s or 5m")
    return seconds


def _address(text: str) -> str:
    match = _ADDRESS.fullmatch(text)
    if text and (match is None or not 0 <= int(match["port"]) < 65536):
        raise ValueError(f"{text!r} is not a HOST:PORT such as 127.0.0.1:9400, [::1]:9400 or :9400")
    return text


def _integer(word: str) -> int:
    if not _DECIMAL.fullmatch(word):
        raise ValueError(f"{word!r} is not a whole number")
    return int(word)


def xid(word: str) -> int:
    """An XID, or `ALL_XIDS` for ``all`` and ``xids``."""
    if word.lower() in ("all", "xids"):
        return ALL_XIDS
    if not re.fullmatch(r"[0-9]{1,5}", word) or int(word) == 0:
        raise ValueError(f"{word!r} is not an XID; allowed are numbers from 1, all and xids")
    return int(word)


def selector(word: str) -> str:
    """An index (``0``, or ``0:1`` for a MIG device), a UUID, a PCI address, or a glob of the model.

    A single word without ``*`` counts as a mistake: models have names of several words, or need a ``*``.
    """
    if _INDEX.fullmatch(word):
        return ":".join(str(int(part)) for part in word.split(":"))
    if "*" in word and len(word) <= 256:
        return word
    if word.upper().startswith(("GPU-", "MIG-")):
        if _GPU_UUID.fullmatch(word):
            return word
        raise ValueError(f"{word!r} is not a UUID; they look like GPU-8a3b2c1d-0000-1111-2222-333344445555")
    model = " " in word and len(word) <= 256 and not word[0].isdigit()
    if model or _PARTITION.fullmatch(word) or pci_numbers(word) is not None:
        return word
    raise ValueError(
        f"{word!r} is not an index (0, 0:1), a UUID (GPU-..., MIG-...), a PCI address (0000:3b:00.0)"
        " or a model (its full name, or with *, as in *H100*)"
    )


_KINDS: dict[str, Callable[[str], Any]] = {
    **{"text": _text, "boolean": boolean, "path": _path, "socket": _socket, "resource": _resource},
    **{"seconds": _seconds, "hold": _hold, "interval": _interval, "address": _address},
    **{"words": _text, "integers": _integer, "selectors": selector, "xids": xid},
}


# All problems of a configuration at once, each with its location.


class ConfigProblem(NamedTuple):
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
        """Its representation in the JSON envelope."""
        return ErrorInfo("usage" if self.usage else "config", self.text, self.hint)


class InvalidConfig(ConfigError):
    """A configuration with one problem or more."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
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
    """The most similar word, empty if none is similar."""
    from difflib import get_close_matches

    by_lower = {name.lower(): name for name in known}
    matches = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else ""
