"""The dataclasses that start fast are what the standard library would have made."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import gpunode
from gpunode.dataclass import _PARAMS, dataclass, field, fields, replace

FIELD = ("name", "type", "default", "default_factory", "init", "repr", "hash", "compare", "kw_only")


@dataclass(frozen=True)
class Device:
    """Three fields, one hidden from comparison."""

    name: str
    slots: Sequence[int] = field(default_factory=list)
    seen: float = field(default=0.0, compare=False, repr=False)


@dataclass(frozen=True)
class Card(Device):
    """Inherits, and gives a field another default."""

    seen: float = 1.0
    bus: str = "pci"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("no name")


def every_class() -> Iterator[type[Any]]:
    """The package's dataclasses that gpunode/dataclass.py made."""
    for module in pkgutil.walk_packages(gpunode.__path__, "gpunode."):
        if module.name.rpartition(".")[2] == "__main__" or "_pb2" in module.name:
            continue
        for one in vars(importlib.import_module(module.name)).values():
            ours = inspect.isclass(one) and one.__module__ == module.name
            if ours and one.__dict__.get("__dataclass_params__") is _PARAMS:
                yield one


def original(cls: type[Any]) -> type[Any]:
    """What the standard library makes of the same fields and bases."""
    own = inspect.get_annotations(cls)
    inherited = cls.__dataclass_fields__
    made = dataclasses.make_dataclass(
        cls.__name__,
        [(name, kind, inherited[name]) for name, kind in own.items()],
        bases=cls.__bases__,
        namespace={"__post_init__": cls.__post_init__} if "__post_init__" in cls.__dict__ else {},
        frozen=True,
    )
    made.__qualname__ = cls.__qualname__
    return made


def test_every_class_of_the_package_is_as_the_original():
    classes = list(every_class())
    assert len(classes) > 200
    for cls in classes:
        twin = original(cls)
        for mine, theirs in zip(dataclasses.fields(cls), dataclasses.fields(twin), strict=True):
            assert [getattr(mine, one) for one in FIELD] == [getattr(theirs, one) for one in FIELD], cls
        assert cls.__match_args__ == twin.__match_args__
        values = {field.name: f"<{field.name}>" for field in dataclasses.fields(cls)}
        mine, theirs = object.__new__(cls), object.__new__(twin)
        mine.__dict__.update(values)
        theirs.__dict__.update(values)
        if "__repr__" not in cls.__dict__ or cls.__repr__.__module__ == "gpunode.dataclass":
            assert repr(mine) == repr(theirs)
        if cls.__hash__.__module__ == "gpunode.dataclass":
            assert hash(mine) == hash(theirs)


@pytest.mark.parametrize(
    "arguments",
    [
        (("a",), {}),
        (("a", [1]), {"seen": 2.0}),
        ((), {"name": "a", "bus": "x"}),
        ((), {}),
        (("a",), {"name": "b"}),
        (("a", [], 1.0, "x", "y"), {}),
        (("a",), {"colour": "red"}),
        (("",), {}),
    ],
)
def test_calls_do_what_the_original_does(arguments):
    args, kwargs = arguments
    twin = original(Card)
    try:
        expected = twin(*args, **kwargs)
    except (TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            Card(*args, **kwargs)
    else:
        assert vars(Card(*args, **kwargs)) == vars(expected)


def test_a_complaint_names_what_is_wrong():
    call: Callable[..., Card] = Card  # with arguments that no type checker lets through
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        call("a", colour="red")
    with pytest.raises(TypeError, match="multiple values for argument 'name'"):
        call("a", name="b")
    with pytest.raises(TypeError, match="missing 1 required arguments: 'name'"):
        call()
    with pytest.raises(TypeError, match="takes 5 positional arguments but 6 were given"):
        call("a", [], 1.0, "x", "y")


def test_instances_are_frozen_equal_hashable_copied_and_replaced():
    one = Card("a", (1,), seen=3.0)
    unchecked: Any = one
    with pytest.raises(dataclasses.FrozenInstanceError):
        unchecked.name = "b"
    with pytest.raises(dataclasses.FrozenInstanceError):
        del unchecked.name
    assert one == Card("a", (1,), seen=3.0) != Card("a", (1,), seen=4.0)
    assert Device("a", seen=1.0) == Device("a", seen=2.0)
    assert Device("a", (1,)) != Card("a", (1,))
    assert hash(one) == hash(Card("a", (1,), seen=3.0))
    assert one == one
    for put in (replace, dataclasses.replace):
        assert put(one, bus="x") == Card("a", (1,), 3.0, "x")
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            put(one, colour="red")
    assert copy.deepcopy(one) == one == pickle.loads(pickle.dumps(one))
    assert dataclasses.asdict(one) == {"name": "a", "slots": (1,), "seen": 3.0, "bus": "pci"}
    assert Device("a").slots is not Device("a").slots
    assert repr(one) == "Card(name='a', slots=(1,), seen=3.0, bus='pci')"


def test_a_mutable_default_is_refused():
    with pytest.raises(ValueError, match="mutable default"):

        @dataclass(frozen=True)
        class Wrong:
            names: list[str] = []  # noqa: RUF012


def test_a_field_of_the_standard_library_is_refused():
    with pytest.raises(TypeError, match=r"import `field` from gpunode\.dataclass"):

        @dataclass(frozen=True)
        class Wrong:
            names: list[str] = dataclasses.field(default_factory=list)


def test_fields_and_replace_take_the_originals_too():
    assert [(one.name, one.type) for one in fields(Card)] == [
        (one.name, one.type) for one in dataclasses.fields(Card)
    ]
    assert fields(Card("a")) == fields(Card)

    @dataclasses.dataclass(frozen=True)
    class Theirs:
        name: str
        hidden: int = dataclasses.field(default=1, init=False)

    assert [one.name for one in fields(Theirs)] == ["name", "hidden"]
    assert replace(Theirs("a"), name="b") == Theirs("b")
    with pytest.raises(ValueError, match="hidden"):
        replace(Theirs("a"), hidden=2)


def test_nothing_of_the_standard_librarys_is_loaded_for_them():
    program = (
        "import sys\n"
        "from gpunode.dataclass import dataclass, field, fields, replace\n"
        "@dataclass(frozen=True)\n"
        "class Device:\n"
        "    name: str\n"
        "    slots: list[int] = field(default_factory=list)\n"
        "assert replace(Device('a'), name='b') == Device('b')\n"
        "assert [one.name for one in fields(Device)] == ['name', 'slots']\n"
        "print({'dataclasses', 'inspect'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_other_kinds_are_the_originals_and_may_inherit():
    @dataclass(frozen=True, order=True)
    class Rank:
        number: int
        names: tuple[str, ...] = field(default=(), compare=False)

    @dataclasses.dataclass(frozen=True)
    class Half(Card):
        side: str = "left"

    assert Rank(1, ("a",)) < Rank(2) and Rank(1, ("a",)) == Rank(1)
    assert Half("a").side == "left"
    with pytest.raises(TypeError, match="cannot inherit non-frozen"):
        dataclasses.make_dataclass("Loose", [("side", str, "left")], bases=(Card,))
