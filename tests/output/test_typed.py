"""Dataclasses read back from plain data: strict, lenient, and the path of keys in each error."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.output.typed import PlainError, from_plain, plain

Spot = tuple[int, str]


@dataclass(frozen=True)
class Part:
    part_name: str
    size: int | None = None


@dataclass(frozen=True)
class Whole:
    name: str
    count: int
    since: float
    ready: bool
    parts: tuple[Part, ...]
    first: Part | None
    spots: tuple[Spot, ...] = ()
    by_name: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    anything: Any = None


VALUES: dict[str, Any] = {
    "name": "a",
    "count": 3,
    "since": 1.5,
    "ready": True,
    "parts": [{"partName": "p", "size": 4}, {"partName": "q"}],
    "first": None,
    "spots": [[1, "x"]],
    "byName": {"k": [1, 2]},
    "anything": [{}],
}
WHOLE = Whole("a", 3, 1.5, True, (Part("p", 4), Part("q")), None, ((1, "x"),), {"k": (1, 2)}, [{}])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def test_dataclass_is_read_from_plain_data() -> None:
    assert from_plain(Whole, VALUES) == WHOLE
    assert from_plain(Whole, json.loads(json.dumps(plain(WHOLE)))) == WHOLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "name must be a string"),
        ({"count": True}, "count must be an integer"),
        ({"count": 1.0}, "count must be an integer"),
        ({"count": None}, "count must be an integer"),
        ({"since": "1"}, "since must be a number"),
        ({"since": 10**400}, "since is too large"),
        ({"ready": 1}, "ready must be true or false"),
        ({"parts": {}}, "parts must be a list"),
        ({"parts": [{"partName": "p"}, {"size": 1}]}, "parts[1].partName is missing"),
        ({"parts": [3]}, "parts[0] must be an object"),
        ({"first": {"partName": "p", "size": "x"}}, "first.size must be an integer"),
        ({"spots": [[1]]}, "spots[0] must have 2 items"),
        ({"byName": {"k": [1, "2"]}}, "byName.k[1] must be an integer"),
        ({"byName": []}, "byName must be an object"),
    ],
)
def test_error_names_the_path_of_keys(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlainError) as caught:
        from_plain(Whole, VALUES | change)
    assert str(caught.value) == message


def test_integer_is_accepted_as_a_number() -> None:
    since = from_plain(Whole, VALUES | {"since": 2}).since
    assert (since, type(since)) == (2.0, float)


def test_unknown_keys_are_ignored_or_refused() -> None:
    assert from_plain(Whole, VALUES | {"later": 1}) == WHOLE
    with pytest.raises(PlainError, match=r"^parts\[0\]\.later is not a known key$"):
        from_plain(Whole, VALUES | {"parts": [{"partName": "p", "later": 1}]}, unknown=False)


def test_lenient_reader_uses_defaults_or_empty_values() -> None:
    assert from_plain(Whole, {}, lenient=True) == Whole("", 0, 0.0, False, (), None)
    assert from_plain(Whole, {"name": 3, "count": "4", "ready": 1}, lenient=True).name == ""
    parts = [{"partName": "p", "size": "x"}, {}]
    assert from_plain(Whole, {"parts": parts}, lenient=True).parts == (Part("p"), Part(""))


@given(data=JSON)
def test_any_data_is_an_instance_or_an_error(data: Any) -> None:
    with contextlib.suppress(PlainError):
        from_plain(Whole, data)
    if isinstance(data, dict):
        assert isinstance(from_plain(Whole, data, lenient=True), Whole)
    else:
        with pytest.raises(PlainError, match="must be an object"):
            from_plain(Whole, data, lenient=True)
