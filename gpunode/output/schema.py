"""JSON Schema (draft 2020-12) of dataclasses, as `typed.plain` writes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from gpunode.output.result import API_VERSION, ErrorInfo, ExitCode
from gpunode.output.typed import camel, is_record, json_fields

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
_SIMPLE: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_STATUSES = ("ok", "warn", "fail", "error")
_LATER = "Later releases of gpunode/v1 may add fields; they remove and rename none."


def document(kinds: Mapping[str, Any]) -> Schema:
    """The schema of the envelopes of these kinds; each has the type of its `data`, None where that is empty.

    A command that fails before it knows more prints an empty object as `data`.
    """
    types = _Types()
    envelopes = [_envelope(kind, data, types) for kind, data in kinds.items()]
    whole = envelopes[0] if len(envelopes) == 1 else {"oneOf": envelopes}
    return {"$schema": DIALECT, **whole, "$defs": types.definitions}


def _envelope(kind: str, data: Any, types: _Types) -> Schema:
    empty = {"type": "object", "maxProperties": 0}
    properties = {
        "apiVersion": {"const": API_VERSION},
        "kind": {"const": kind},
        "status": {"enum": list(_STATUSES)},
        "exitCode": {"enum": [int(code) for code in ExitCode]},
        "data": empty if data is None else {"anyOf": [types.schema(data), empty]},
        "messages": types.schema(tuple[str, ...]),
        "errors": types.schema(tuple[ErrorInfo, ...]),
    }
    return {"title": kind, "description": _LATER, **_object(properties)}


def _object(properties: Mapping[str, Any]) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def _described(kind: Any, properties: Mapping[str, Any]) -> str:
    """A record's docstring, with the names of fields as JSON has them."""

    def shown(word: re.Match[str]) -> str:
        return f"`{camel(word[1])}`" if camel(word[1]) in properties else word[0]

    return re.sub(r"`(\w+)`", shown, inspect.cleandoc(kind.__doc__ or "").replace("``", "`"))


class _Types:
    """Schemas of types; that of a record is a reference to one of the `definitions`."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self._names: dict[Any, str] = {}

    def schema(self, kind: Any) -> Schema:
        """TypeError for a type that JSON data doesn't have."""
        origin, inner = get_origin(kind), get_args(kind)
        if kind in (Any, object):
            return {}
        if kind in _SIMPLE:
            return {"type": _SIMPLE[kind]}
        if origin in (Union, UnionType):
            return self._either(inner)
        if origin is tuple and inner[1:] != (...,):
            items = [self.schema(argument) for argument in inner]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        if inspect.isclass(origin) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.schema(inner[1])}
        if inspect.isclass(origin) and issubclass(origin, Iterable):
            return {"type": "array", "items": self.schema(inner[0])}
        if is_record(kind):
            return {"$ref": f"#/$defs/{self._defined(kind)}"}
        if inspect.isclass(kind) and issubclass(kind, Enum):
            return {"enum": [argument.value for argument in kind]}
        if inspect.isclass(kind) and issubclass(kind, PathLike):
            return {"type": "string"}
        raise TypeError(f"no JSON Schema for {kind!r}")

    def _either(self, kinds: tuple[Any, ...]) -> Schema:
        schemas = [self.schema(kind) for kind in kinds]
        if all(set(schema) == {"type"} for schema in schemas):
            return {"type": [schema["type"] for schema in schemas]}
        return {"anyOf": schemas}

    def _defined(self, kind: Any) -> str:
        """The name of a record's definition: that of the class, with its module's before it if taken."""
        if kind not in self._names:
            name = kind.__name__.lstrip("_")
            if name in self.definitions:
                name = f"{kind.__module__.rpartition('.')[2]}.{name}"
            self._names[kind] = name
            self.definitions[name] = {}  # a field may refer to it
            properties = {key: self.schema(hint) for key, hint in json_fields(kind).items()}
            self.definitions[name] = {"description": _described(kind, properties), **_object(properties)}
        return self._names[kind]
