"""Dataclasses and named tuples as JSON values (`plain`), and read back from them (`from_plain`). The tree of
a TOML document (`toml`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from os import PathLike
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_NAMES = {int: "an integer", str: "a string", bool: "true or false", float: "a number", NoneType: "null"}
_EMPTY: dict[Any, Any] = {str: "", int: 0, float: 0.0, bool: False, tuple: (), dict: {}, Mapping: {}}


def plain(value: Any) -> Any:
    """Records, enums, paths and tuples as JSON values; field names become camelCase."""
    kind: Any = type(value)
    if kind in _JSON:
        return value
    if is_record(kind):
        return {key: plain(getattr(value, name)) for key, name in _shown(kind).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value


INTERNAL = {"internal": True}  # metadata of a field that `plain` leaves out
_JSON = frozenset((str, int, float, bool, type(None)))  # most of a report, which has thousands of values


@cache
def is_record(kind: Any) -> bool:
    """Whether this is a dataclass, or a class that typing.NamedTuple made."""
    return is_dataclass(kind) or hasattr(kind, "_field_defaults")


class _Member(NamedTuple):
    name: str
    optional: bool
    internal: bool = False


@cache
def _members(kind: Any) -> dict[str, _Member]:
    """A record's fields by their names in JSON: the field's own, unless its metadata has one that was
    released."""
    if not is_dataclass(kind):
        return {camel(name): _Member(name, name in kind._field_defaults) for name in kind._fields}
    return {
        field.metadata.get("json") or camel(field.name): _Member(
            field.name,
            field.default is not MISSING or field.default_factory is not MISSING,
            field.metadata == INTERNAL,
        )
        for field in fields(kind)
    }


@cache
def _shown(kind: Any) -> dict[str, str]:
    return {key: member.name for key, member in _members(kind).items() if not member.internal}


def json_fields(kind: type) -> dict[str, Any]:
    """The types of what `plain` shows of a record, by their names in JSON."""
    hints = get_type_hints(kind)
    return {key: hints[name] for key, name in _shown(kind).items()}


def camel(name: str) -> str:
    """``memory_used`` as JSON has it: ``memoryUsed``."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class StrEnum(str, Enum):
    """As enum.StrEnum, which Python 3.10 lacks: a member is printed as its value."""

    __str__ = str.__str__


def as_dict(value: Any) -> dict[str, Any]:
    """A mapping in data of unknown shape; {} for anything else."""
    return value if isinstance(value, dict) else {}


def as_strings(value: Any) -> tuple[str, ...]:
    """The texts of a list in data of unknown shape; () for anything else."""
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def as_text(value: Any) -> str:
    """A text in data of unknown shape; empty for anything else."""
    return value if isinstance(value, str) else ""


class PlainError(ValueError):
    """Data of another shape; the message starts with the keys that lead to it, such as ``gpus[0].uuid``."""


def from_plain(
    cls: type[_T], data: Any, *, lenient: bool = False, unknown: bool = True, where: str = ""
) -> _T:
    """A record from a mapping whose keys are its field names in camelCase.

    Each value must have exactly the field's type, as JSON has it. A missing key leaves the field's default.
    With `lenient` a value of another type counts as missing, and what has no default is empty; without
    `unknown` a key that is no field is an error. `where` are the keys that lead to `data`. `PlainError`,
    which is a ValueError.
    """
    value: _T = _Reader(lenient, unknown).instance(cls, data, where)
    return value


class _Reader:
    def __init__(self, lenient: bool, unknown: bool) -> None:
        self._lenient, self._unknown = lenient, unknown

    def instance(self, cls: Any, data: Any, where: str) -> Any:
        if not isinstance(data, Mapping):
            raise _error(where, "must be an object")
        known, kinds = _members(cls), _kinds(cls)
        if not self._unknown and (strange := [key for key in data if key not in known]):
            raise _error(_below(where, str(strange[0])[:100]), "is not a known key")
        values: dict[str, Any] = {}
        for key, member in known.items():
            at = _below(where, key)
            if key in data:
                try:
                    values[member.name] = self.value(kinds[member.name], data[key], at)
                    continue
                except PlainError:
                    if not self._lenient:
                        raise
            if not member.optional:
                if not self._lenient:
                    raise _error(at, "is missing")
                values[member.name] = _empty(kinds[member.name])
        return cls(**values)

    def value(self, kind: Any, data: Any, where: str) -> Any:
        """`data` as a value of this type."""
        origin, inner = get_origin(kind), get_args(kind)
        if kind in (Any, object):
            return data
        if origin in (Union, UnionType):
            return self._either(inner, data, where)
        if origin is tuple:
            return self._tuple(inner, data, where)
        if origin in (Mapping, dict):
            if not isinstance(data, Mapping):
                raise _error(where, "must be an object")
            return {
                self.value(inner[0], key, where): self.value(inner[1], item, _below(where, str(key)[:100]))
                for key, item in data.items()
            }
        if is_record(kind):
            return self.instance(kind, data, where)
        if kind is float and type(data) is int:
            return self._float(data, where)
        if type(data) is not kind:
            raise _error(where, f"must be {_NAMES.get(kind, kind.__name__)}")
        return data

    def _float(self, data: int, where: str) -> float:
        try:
            return float(data)
        except OverflowError as error:
            raise _error(where, "is too large") from error

    def _either(self, kinds: tuple[Any, ...], data: Any, where: str) -> Any:
        if data is None and NoneType in kinds:
            return None
        *others, last = [kind for kind in kinds if kind is not NoneType]
        for kind in others:
            try:
                return self.value(kind, data, where)
            except PlainError:
                continue
        return self.value(last, data, where)

    def _tuple(self, kinds: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(data, list | tuple):
            raise _error(where, "must be a list")
        if kinds[1:] == (...,):
            kinds = kinds[:1] * len(data)
        if len(data) != len(kinds):
            raise _error(where, f"must have {len(kinds)} items")
        return tuple(
            self.value(kind, item, f"{where}[{number}]")
            for number, (kind, item) in enumerate(zip(kinds, data, strict=True))
        )


def _empty(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind):
        return None
    return _EMPTY[get_origin(kind) or kind]


@cache
def _kinds(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _error(where: str, problem: str) -> PlainError:
    return PlainError(f"{where} {problem}" if where else problem)


def toml(text: str) -> dict[str, Any]:
    """The tree of a TOML document; ValueError, whose message ends with line and column, for anything else."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # the same parser as a package
    tree: dict[str, Any] = tomllib.loads(text)
    return tree
