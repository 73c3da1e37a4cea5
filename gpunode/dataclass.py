"""`@dataclass(frozen=True)` that starts fast: the same class, made in a tenth of the time.

The standard library writes the methods of each dataclass as source and compiles them at every start, about
0.3 ms a class, and brings `inspect` along, which takes as long as the bare interpreter's half. A hundred
classes of facts and findings were more than half of the doctor's start. Here the methods are closures over
the fields. Type checkers and readers see the standard library's `dataclass`, `field`, `fields` and `replace`;
its own `fields`, `replace`, `asdict` and inheritance take these classes for what they look like, and
tests/test_dataclass.py holds every class of the package against the original. All other kinds (ordered,
slots, not frozen) are the original's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import dataclasses

__all__ = ["dataclass", "field", "field_names", "fields", "replace"]

_FROZEN = {"frozen": True}
_PARAMS = SimpleNamespace(
    init=True, repr=True, eq=True, order=False, unsafe_hash=False, frozen=True, match_args=True
)
_MISSING: Any = type("MISSING", (), {"__repr__": lambda _: "MISSING"})()
_OPTIONS = ("default", "default_factory", "init", "repr", "hash", "compare")


class _Field:
    """What `field` was told, and later the field's name and type; under the names of `dataclasses.Field`."""

    __slots__ = ("compare", "default", "default_factory", "hash", "init", "name", "repr", "type")
    type: Any

    def __init__(
        self,
        default: Any = _MISSING,
        default_factory: Any = _MISSING,
        init: bool = True,
        repr: bool = True,
        hash: bool | None = None,
        compare: bool = True,
    ) -> None:
        self.name, self.type = "", None
        self.default, self.default_factory = default, default_factory
        self.init, self.repr, self.hash, self.compare = init, repr, hash, compare

    def original(self) -> dataclasses.Field[Any]:
        """The same, not yet part of a class, as the standard library has it."""
        import dataclasses

        told = {name: getattr(self, name) for name in _OPTIONS}
        made: dataclasses.Field[Any] = dataclasses.field(
            **{name: value for name, value in told.items() if value is not _MISSING}
        )
        return made


class _Fields:
    """`__dataclass_fields__` of a class: made when somebody asks, who then has `dataclasses` already."""

    def __init__(self, own: Mapping[str, _Field]) -> None:
        self.own = own
        self._made: dict[str, dataclasses.Field[Any]] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, dataclasses.Field[Any]]:
        if len(self._made) != len(self.own):
            self._made = {name: _finished(one) for name, one in self.own.items()}
        return self._made


def _finished(one: _Field) -> dataclasses.Field[Any]:
    import dataclasses

    made = one.original()
    made.name, made.type, made.kw_only = one.name, one.type, False
    made._field_type = dataclasses._FIELD  # type: ignore[attr-defined]  # what `dataclasses.fields` asks for
    return made


if TYPE_CHECKING:
    from dataclasses import dataclass, field, fields, replace
else:
    field = _Field

    def dataclass(cls: type | None = None, /, **options: bool) -> Callable[[type], type] | type:
        """As `dataclasses.dataclass`, whose work it leaves to it unless `frozen` is the only option."""
        if cls is None and options == _FROZEN:
            return _frozen
        import dataclasses

        def original(cls: type) -> type:
            for name, value in tuple(cls.__dict__.items()):
                if isinstance(value, _Field):
                    setattr(cls, name, value.original())
            return dataclasses.dataclass(cls, **options)

        return original if cls is None else original(cls)

    def fields(kind: Any) -> tuple[Any, ...]:
        """As `dataclasses.fields`; without the fields' metadata."""
        kept = _kept(kind if isinstance(kind, type) else type(kind))
        if kept is not None:
            return tuple(kept.own.values())
        import dataclasses

        return dataclasses.fields(kind)

    def replace(instance: Any, /, **changes: Any) -> Any:
        """As `dataclasses.replace`."""
        kind = type(instance)
        kept = _kept(kind)
        if kept is None or any(not one.init for one in kept.own.values()):
            import dataclasses

            return dataclasses.replace(instance, **changes)
        return kind(**{name: getattr(instance, name) for name in kept.own if name not in changes}, **changes)


def field_names(kind: type) -> tuple[str, ...] | None:
    """The names of a class's fields, in order; None if it is no dataclass."""
    kept = _kept(kind)
    found = kept.own if kept else getattr(kind, "__dataclass_fields__", None)
    return None if found is None else tuple(found)


def _kept(kind: type) -> _Fields | None:
    """A class's fields as they are kept here, None for one that is the original's."""
    found = kind.__dict__.get("__dataclass_fields__")
    return found if isinstance(found, _Fields) else None


def _frozen(cls: type) -> type:
    fields = _collected(cls)
    every = tuple(fields.values())
    hashed = tuple(one.name for one in every if (one.compare if one.hash is None else one.hash))
    named = {
        "__init__": _init(cls, every),
        "__repr__": _repr(tuple(one.name for one in every if one.repr)),
        "__eq__": _eq(tuple(one.name for one in every if one.compare)),
        "__hash__": _hash(hashed),
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
        "__dataclass_fields__": _Fields(fields),
        "__dataclass_params__": _PARAMS,
        "__replace__": replace,  # copy.replace since Python 3.13
        "__match_args__": tuple(one.name for one in every if one.init),
    }
    for name, value in given.items():
        setattr(cls, name, value)
    return cls


def _collected(cls: type) -> dict[str, _Field]:
    """The bases' fields, then its own, by name; an own one stands where the base's stood."""
    found: dict[str, _Field] = {}
    for base in cls.__mro__[-1:0:-1]:
        kept = _kept(base)
        if kept is not None:
            found.update(kept.own)
        elif "__dataclass_fields__" in base.__dict__:
            raise TypeError(f"{cls.__qualname__}: its base {base.__qualname__} is the standard library's")
    for name, kind in cls.__annotations__.items():  # its own only, since Python 3.10
        found[name] = _field(cls, name, kind)
    return found


def _field(cls: type, name: str, kind: Any) -> _Field:
    default = cls.__dict__.get(name, _MISSING)
    if not isinstance(default, _Field):
        if default.__class__.__module__ == "dataclasses":
            raise TypeError(f"field {name}: import `field` from gpunode.dataclass")
        if default.__class__.__hash__ is None:
            raise ValueError(f"mutable default {type(default)} for field {name}: use default_factory")
        own = _Field(default)
    else:
        own = default
        if own.default is _MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, own.default)
    own.name, own.type = name, kind
    return own


def _init(cls: type, fields: tuple[_Field, ...]) -> Callable[..., None]:
    names = tuple(one.name for one in fields if one.init)
    plain = {one.name: one.default for one in fields if one.default is not _MISSING}
    made = tuple((one.name, one.default_factory) for one in fields if one.default_factory is not _MISSING)
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


def _values(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """What these fields of an instance hold, to be compared and hashed."""
    if len(names) < 2:  # of one attribute there would be no tuple
        return lambda self: tuple([getattr(self, name) for name in names])
    return attrgetter(*names)


def _eq(names: tuple[str, ...]) -> Callable[[Any, object], bool]:
    values = _values(names)

    def __eq__(self: Any, other: object) -> bool:
        if other is self:
            return True
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    return __eq__


def _hash(names: tuple[str, ...]) -> Callable[[Any], int]:
    values = _values(names)
    return lambda self: hash(values(self))


def _refuse_to_set(self: object, name: str, value: object) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")
