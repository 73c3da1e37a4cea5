"""Values and keys of a parsed TOML file, written as TOML again."""

import time

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from gpunode.facts.toml import as_key, as_value, headers, line_of_key
from gpunode.output.typed import toml

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.datetimes(),
    st.dates(),
    st.times(),
    TEXT,
)
VALUES = st.recursive(
    SCALARS, lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3)
)


@given(st.lists(TEXT, min_size=1, max_size=3), VALUES)
def test_both_parsers_read_a_written_setting_as_it_was(path, value):
    line = f"{as_key(tuple(path))} = {as_value(value)}"
    expected = value
    for key in reversed(path):
        expected = {key: expected}
    assert toml(line) == tomlkit.parse(line).unwrap() == expected


def test_ordinary_settings_look_as_people_write_them():
    assert as_key(("registry", "mirrors", "docker.io", "endpoint")) == 'registry.mirrors."docker.io".endpoint'
    assert as_value(["https://mirror.example.com", True, {"a-b": 1}]) == (
        '["https://mirror.example.com", true, {a-b = 1}]'
    )


@pytest.mark.parametrize(
    "value",
    [
        '"""\n[table]\nkey = 1\n"""',
        '"""\n\\"""\n[table]\nkey = 1\n"""""  # """',
        "'''\n[table]\nkey = 1\n'''''",
        "'\\' # '''",
        '["[", [\n[1],  # ]\n  "]", \'[\',\n2], {key = [\n"[table]"]},\n]',
    ],
)
def test_lines_inside_a_value_of_several_lines_are_no_keys(value):
    text = f"other = {value}\n\n[table]\nother = {value}\nkey = 2\n"
    assert list(toml(text)) == ["other", "table"]
    lines = text.splitlines()
    key, header = len(lines), len(lines) - value.count("\n") - 2
    assert (lines[header - 1], lines[key - 1]) == ("[table]", "key = 2")
    assert (line_of_key(text, ("table",)), line_of_key(text, ("table", "key"))) == (header, key)
    assert headers(text.splitlines(keepends=True)) == [(header - 1, ("table",))]


@pytest.mark.parametrize(
    "line",
    ['x = "' + '\\"' * 100_000, '"' + '\\"' * 100_000, " " * 200_000, "a." * 100_000, "x = " + '"a' * 99_999],
    ids=["string that no quote ends", "key that no quote ends", "blanks", "dots", "quotes"],
)
def test_time_of_a_search_grows_with_the_text_and_not_with_its_square(line):
    start = time.process_time()
    assert line_of_key(f"[table]\n{line}\nkey = 1\n", ("missing",)) == 0
    assert time.process_time() - start < 10  # it takes 50 ms; with the square of the text minutes
