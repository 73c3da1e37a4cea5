"""JSON Schema of dataclasses: each type that data has, and what `plain` writes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator

from gpunode.checks.finding import Finding, FindingStatus
from gpunode.output.result import Result
from gpunode.output.schema import document


@dataclass(frozen=True)
class Part:
    """A part; `part_name` is its name."""

    part_name: str
    size: int | None
    inner: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Whole:
    """The whole, described in ``two``
    lines."""

    class_: str
    count: float
    ready: bool
    spot: tuple[int, str]
    parts: tuple[Part, ...]
    by_name: Mapping[str, tuple[int, ...]]
    state: FindingStatus
    path: Path
    either: Part | str | None
    names: frozenset[str] = field(default_factory=frozenset)
    anything: Any = None


parts = st.recursive(
    st.builds(Part, st.text(), st.none() | st.integers()),
    lambda inner: st.builds(Part, st.text(), st.integers(), st.lists(inner, max_size=2).map(tuple)),
    max_leaves=4,
)
wholes = st.builds(
    Whole,
    class_=st.text(),
    count=st.floats(allow_nan=False, allow_infinity=False),
    ready=st.booleans(),
    spot=st.tuples(st.integers(), st.text()),
    parts=st.lists(parts, max_size=2).map(tuple),
    by_name=st.dictionaries(st.text(), st.lists(st.integers(), max_size=2).map(tuple), max_size=2),
    state=st.sampled_from(FindingStatus),
    path=st.just(Path("/etc")),
    either=st.none() | st.text() | parts,
    names=st.frozensets(st.text(), max_size=2),
)


@given(wholes)
def test_output_matches_its_schema(whole: Whole) -> None:
    Draft202012Validator(document({"Whole": Whole})).validate(Result("Whole", whole).envelope())


def test_a_dataclass_is_an_object_with_all_its_fields() -> None:
    whole = document({"Whole": Whole})["$defs"]["Whole"]
    assert whole["description"] == "The whole, described in `two`\nlines."
    assert document({"Part": Part})["$defs"]["Part"]["description"] == "A part; `partName` is its name."
    assert whole["required"] == list(whole["properties"])
    shown = whole["properties"]
    assert shown["class"] == {"type": "string"}
    assert shown["spot"] == {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string"}],
        "items": False,
        "minItems": 2,
    }
    assert shown["byName"]["additionalProperties"] == {"type": "array", "items": {"type": "integer"}}
    assert shown["state"] == {"enum": ["pass", "warn", "fail", "skip", "error"]}
    assert shown["either"]["anyOf"][0] == {"$ref": "#/$defs/Part"}
    assert shown["anything"] == {}


def test_two_classes_of_one_name_stay_two() -> None:
    other: Any = dataclass(frozen=True)(
        type("Finding", (), {"__annotations__": {"x": int}, "__module__": "a.b"})
    )
    definitions = document({"One": tuple[Finding | other, ...]})["$defs"]
    assert {"Finding", "b.Finding"} <= set(definitions)
    assert list(definitions["b.Finding"]["properties"]) == ["x"]


@pytest.mark.parametrize("kind", [bytes, complex, type("Bare", (), {})])
def test_a_type_that_json_does_not_have_is_an_error(kind: Any) -> None:
    with pytest.raises(TypeError, match="no JSON Schema for"):
        document({"One": kind})
