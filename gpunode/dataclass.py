"""`@dataclass(frozen=True)` that starts fast: the same class, made in a tenth of the time.

The standard library writes the methods of each dataclass as source and compiles them at every start, about
0.3 ms a class. A hundred classes of facts and findings were more than half of the doctor's start. Here the
methods are closures over the fields. Type checkers and readers see the standard library's decorator;
`fields`, `replace`, `asdict` and inheritance take these classes for what they look like, and
tests/test_dataclass.py holds every class of the package against the original. All other kinds (ordered,
slots, not frozen) are the original's.
"""

from __future__ import annotations

import dataclasses
import inspect  # dataclasses imports it too
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

_FROZEN = {"frozen": True}
_PARAMS = SimpleNamespace(
    init=True, repr=True, eq=True, order=False, unsafe_hash=False, frozen=True, match_args=True
)

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Callable[[type], type] | type:
        """As `dataclasses.dataclass`, whose work it leaves to it unless `frozen` is the only option."""
        if cls is None and options == _FROZEN:
            return _frozen
        return dataclasses.dataclass(cls, **options)


def _frozen(cls: type) -> type:
    fields = _fields(cls)
    every = tuple(fields.values())
    hashed = tuple(one.name for one in every if (one.compare if one.hash is None else one.hash))
    named = {
        "__init__": _init(cls, every),
        "__repr__": _repr(tuple(one.name for one in every if one.repr)),
        "__eq__": _eq(tuple(one.name for one in every if one.compare)),
        "__hash__": lambda self: hash(tuple([getattr(self, name) for name in hashed])),
    }
    own = cls.__dict__
    for name, method in named.items():
        # A class that defines __eq__ alone has __hash__ = None by the language: a frozen dataclass gets one.
        if own.get(name) is None:
            method.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, method)
    given: dict[str, Any] = {
        "__setattr__": _refuse_to_set,
        "__delattr__": _refuse_to_delete,
        "__dataclass_fields__": fields,
        "__dataclass_params__": _PARAMS,
        "__match_args__": tuple(one.name for one in every if one.init),
    }
    for name, value in given.items():
        setattr(cls, name, value)
    return cls


def _fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The bases' fields, then its own, by name; an own one stands where the base's stood."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for base in cls.__mro__[-1:0:-1]:
        found.update(base.__dict__.get("__dataclass_fields__", {}))
    for name, kind in inspect.get_annotations(cls).items():
        found[name] = _field(cls, name, kind)
    return found


def _field(cls: type, name: str, kind: Any) -> dataclasses.Field[Any]:
    default = cls.__dict__.get(name, dataclasses.MISSING)
    field: dataclasses.Field[Any]
    if not isinstance(default, dataclasses.Field):
        if default.__class__.__hash__ is None:
            raise ValueError(f"mutable default {type(default)} for field {name}: use default_factory")
        field = dataclasses.field(default=default)
    else:
        field = default
        if field.default is dataclasses.MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, field.default)
    field.name, field.type, field.kw_only = name, kind, False
    field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]  # what `dataclasses.fields` asks for
    return field


def _init(cls: type, fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    missing = dataclasses.MISSING
    names = tuple(one.name for one in fields if one.init)
    plain = {one.name: one.default for one in fields if one.default is not missing}
    made = tuple((one.name, one.default_factory) for one in fields if one.default_factory is not missing)
    known, count = frozenset(names), len(names)
    size = len(known.union(plain, (name for name, _ in made)))
    after = getattr(cls, "__post_init__", None)

    def fits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return kwargs.keys() <= known and kwargs.keys().isdisjoint(names[: len(args)])

    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
        values = self.__dict__
        values.update(plain)
        values.update(zip(names, args, strict=False))
        values.update(kwargs)
        for name, factory in made:
            if name not in values:
                values[name] = factory()
        if len(values) != size or len(args) > count or (kwargs and not fits(args, kwargs)):
            raise TypeError(_complaint(cls, names, values, args, kwargs))
        if after is not None:
            self.__post_init__()

    return __init__


def _complaint(
    cls: type, names: tuple[str, ...], values: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """What is wrong with a call, in the language's own words."""
    call = f"{cls.__qualname__}.__init__()"
    for name in kwargs:
        if name not in names:
            return f"{call} got an unexpected keyword argument {name!r}"
        if name in names[: len(args)]:
            return f"{call} got multiple values for argument {name!r}"
    if len(args) > len(names):
        return f"{call} takes {len(names) + 1} positional arguments but {len(args) + 1} were given"
    lacking = [name for name in names if name not in values]
    return f"{call} missing {len(lacking)} required arguments: {', '.join(map(repr, lacking))}"


def _repr(names: tuple[str, ...]) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.__class__.__qualname__}({shown})"

    return __repr__


def _eq(names: tuple[str, ...]) -> Callable[[Any, object], bool]:
    def __eq__(self: Any, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        mine, others = [getattr(self, name) for name in names], [getattr(other, name) for name in names]
        return mine == others

    return __eq__


def _refuse_to_set(self: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
