"""YAML as plain data: refusals before it costs time, memory or stack, and their messages."""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpunode.host import documents
from gpunode.host.documents import DocumentError, load

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
LEVELS = range(1, 12)
BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}\n" for level in LEVELS
)
SHARED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in LEVELS
)
REFUSED = {
    "a: &a [*a]": "line 1: nested too deeply",
    "a: " + "[" * 100_000: "line 1: nested too deeply",
    "- " * 100_000: "line 1: nested too deeply",
    "\n".join(" " * level + "a:" for level in range(70)): "line 65: nested too deeply",
    BOMB: "more than 500000 values, merged ones included",
    "a: 1\n---\nb: 2": "line 3: a second document",
    "a: b: c": "line 1: not YAML: a second ':' on a line",
    "a: 1\nb: *nothing": "line 2: not YAML: ",
    "a: \x07": "line 1: not YAML: the character U+0007",
    "a: \udcff": "not YAML: ",
    "? [a]\n: b": "line 1: not YAML: ",
    "a: !!python/object/apply:os.system [x]": "line 1: not YAML: could not determine a constructor",
    "a: !!int b": "a value doesn't have the type that its tag or form requires",
    "a: 2026-99-99": "a value doesn't have the type that its tag or form requires",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: " ".join(text.split())[:30])
def test_tags_and_other_types_are_refused(text: str) -> None:
    with pytest.raises(DocumentError) as caught:
        load(text)
    assert REFUSED[text] in str(caught.value)


def test_oversized_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DocumentError, match="larger than 16 MiB"):
        load(" " * (documents.MAX_DATA_BYTES + 1))
    monkeypatch.setattr(documents, "_MAX_VALUES", 10)
    assert load("[1, 2, 3]") == [1, 2, 3]
    with pytest.raises(DocumentError, match="more than 10 values, merged ones included"):
        load(str(list(range(11))))
    with pytest.raises(DocumentError, match="more than 10 values"):
        load(str(list(range(100))))


SECRET = {
    "token: *hunter2": "line 1: an alias (*NAME) isn't allowed",
    "a: &a [1]\nb: *a": "line 2: an alias (*NAME) isn't allowed",
    "token: %hunter2": "line 1: not YAML: ",
    "token: !hunter2 x": "line 1: not YAML: could not determine a constructor",
    "token: !!int hunter2": "a value doesn't have the type that its tag or form requires",
    "token: 'hunter2": "line 1: not YAML: ",
    "token: hunter2: x": "line 1: not YAML: a second ':' on a line",
    "a:\n    token: hunter2\n  b: c": "line 3: not YAML: ",
    "? [hunter2]\n: b": "line 1: not YAML: ",
    "hunter2: \udcff": "not YAML: ",
    "hunter2: 1\n---\nhunter2: 2": "line 3: a second document",
    "hunter2: " + "[" * 100: "line 1: nested too deeply",
}


@pytest.mark.parametrize("text", SECRET)
def test_error_in_a_text_with_secrets_quotes_nothing(text: str) -> None:
    with pytest.raises(DocumentError) as caught:
        load(text, secret=True)
    assert SECRET[text] in str(caught.value)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value)).replace(repr(text), "")


def test_caller_may_lower_the_limit() -> None:
    with pytest.raises(DocumentError, match="larger than 1 MiB"):
        load(" " * ((1 << 20) + 1), max_bytes=1 << 20)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing\n", None),
        ("null", None),
        ("a: 1\n---\n", {"a": 1}),
        ("a: &a [1]\nb: *a", {"a": [1], "b": [1]}),
        ("a: &a {x: 1}\nb: {<<: *a, y: 2}", {"a": {"x": 1}, "b": {"x": 1, "y": 2}}),
    ],
)
def test_document_is_plain_data(text: str, value: Any) -> None:
    assert load(text) == value


def test_aliases_share_one_value() -> None:
    data = load(SHARED)
    assert len(data["a11"]) == 9
    assert data["a11"][0] is data["a11"][8] is data["a10"]


@given(VALUES)
def test_dumped_yaml_loads_unchanged(value: Any) -> None:
    assert load(yaml.safe_dump(value)) == value


@given(st.text(alphabet="abc:-[]{}&*!<>|'\"#\n 01,?", max_size=60))
def test_any_text_is_data_or_an_error(text: str) -> None:
    with suppress(DocumentError):
        load(text)
