"""mig-parted's files: accepted ones, and every error with its line."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import UsageError
from gpunode.mig.config import Filter, InvalidMigConfig, parse
from gpunode.mig.model import GpuLayout, parse_name
from tests.mig.conftest import EXAMPLES

ENTRY = "    - devices: all\n      mig-enabled: true\n      mig-devices: {1g.5gb: 7}\n"
HEAD = "version: v1\nmig-configs:\n  one:\n"


def faults(text: str) -> list[tuple[int, str]]:
    with pytest.raises(InvalidMigConfig) as raised:
        parse(text.encode(), "mig.yaml")
    return list(raised.value.faults)


def test_complete_file_is_parsed() -> None:
    text = (
        "version: v1\nmig-configs:\n  mixed:\n    - device-filter: ['0x20B010DE', '0x20B010DE:0x134F10DE']\n"
        "      devices: [0, 2, 2]\n      mig-enabled: yes\n"
        "      mig-devices: {1g.5gb: 2, 1c.3g.20gb: 1, 2g.10gb: 0}\n"
        "    - {devices: all, mig-enabled: false}\n"
    )
    config = parse(text.encode(), "mig.yaml")
    first, second = config.labels["mixed"]
    assert first.filters == (Filter(0x20B010DE), Filter(0x20B010DE, 0x134F10DE))
    assert first.devices == (0, 2) and first.enabled and first.line == 4
    assert dict(first.profiles) == {"1g.5gb": 2, "1c.3g.20gb": 1}
    assert second.devices is None and not second.enabled and not second.filters and second.line == 8


def test_json_is_accepted() -> None:
    data = {"version": "v1", "mig-configs": {"a": [{"devices": [0], "mig-enabled": True, "mig-devices": {}}]}}
    assert parse(json.dumps(data, indent="\t").encode(), "x.json").labels["a"][0].devices == (0,)


def test_empty_filter_matches_every_gpu() -> None:
    text = HEAD + "    - {device-filter: '', devices: all, mig-enabled: false}\n"
    assert parse(text.encode(), "x").labels["one"][0].selects(GpuLayout("GPU-3", 3, "a GPU", "", 1, 2))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("mig-configs: {a: [{devices: all, mig-enabled: false}]}", 1, "version is missing"),
        ("version: v2\nmig-configs: {a: [{devices: all, mig-enabled: false}]}", 1, "unknown version: 'v2'"),
        ("version: v1\n", 1, "needs at least one label"),
        ("version: v1\nmig-configs: []\n", 2, "expected labels"),
        (
            "version: v1\nmore: 1\nmig-configs: {a: [{devices: all, mig-enabled: false}]}",
            2,
            "unknown key: more",
        ),
        ("version: v1\nmig-configs:\n  a: []\n", 3, "a: at least one entry is required"),
        (HEAD + "    - mig-enabled: false\n", 4, "devices is missing"),
        (HEAD + "    - devices: all\n", 4, "mig-enabled is missing"),
        (HEAD + "    - devices: al\n      mig-enabled: false\n", 4, "devices is all or a list"),
        (HEAD + "    - devices: 0\n      mig-enabled: false\n", 4, "devices is all or a list"),
        (HEAD + "    - devices: [0, -1]\n      mig-enabled: false\n", 4, "'-1' is not the index"),
        (HEAD + "    - devices: all\n      mig-enabled: 1\n", 5, "mig-enabled is true or false"),
        (HEAD + "    - devices: all\n      mig-enabled: true\n", 4, "mig-devices is required"),
        (HEAD + ENTRY.replace("true", "false"), 6, "must be empty"),
        (HEAD + ENTRY.replace("1g.5gb", "1g5gb"), 6, "'1g5gb' is not a MIG profile"),
        (HEAD + ENTRY.replace("7", "-7"), 6, "'-7' is not a count"),
        (HEAD + ENTRY.replace("7", "0"), 6, "all counts are 0"),
        (HEAD + ENTRY.replace("devices:", "device:", 1), 4, "unknown key: device; known: devices"),
        (
            HEAD + "    - devices: all\n      device-filter: 20B0\n      mig-enabled: false\n",
            5,
            "its form is",
        ),
        (HEAD + ENTRY + "  one:\n" + ENTRY, 7, "duplicate key"),
        (HEAD + ENTRY + "---\n" + HEAD + ENTRY, 8, "a second document"),
        ("version: v1\n\tmig-configs: 1\n", 2, "not YAML"),
        ("- a\n", 1, "expected the keys version and mig-configs"),
        ("", 1, "expected the keys version and mig-configs"),
    ],
)
def test_error_has_its_line(text: str, line: int, message: str) -> None:
    found = faults(text)
    assert any(where == line and message in what for where, what in found), found


def test_all_errors_are_reported_at_once() -> None:
    text = HEAD + "    - devices: al\n      mig-enabled: true\n      mig-devices: {x: 1, 1g.5gb: a}\n"
    assert [line for line, _ in faults(text)] == [4, 6, 6]


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("1g.5gb", "1g.5gb"),
        ("1c.1g.5gb", "1g.5gb"),
        ("1c.3g.20gb", "1c.3g.20gb"),
        ("1g.10gb+me", "1g.10gb+me"),
        ("1g.24gb+me.all", "1g.24gb+me.all"),
        ("1g.24gb-me", "1g.24gb-me"),
        ("2g.48gb+gfx,me", "2g.48gb+gfx,me"),
        ("2g.48gb+me,gfx", "2g.48gb+gfx,me"),
    ],
)
def test_profile_names_are_parsed(name: str, canonical: str) -> None:
    parsed = parse_name(name)
    assert parsed is not None and parsed.text == canonical


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1g",
        "1g.5gb ",
        "0g.5gb",
        "4c.3g.20gb",
        "1g.5gb+",
        "1g.5gb+me,me",
        "1g.5gb+me-gfx",
        "1g.5gb+1a",
        "1g.5gb+.a",
    ],
)
def test_invalid_profile_name_is_refused(name: str) -> None:
    assert parse_name(name) is None


def test_labels_are_selected() -> None:
    config = parse((HEAD + ENTRY).encode(), "x")
    assert config.select("")[0] == "one"
    with pytest.raises(UsageError, match="no configuration 'on'") as raised:
        config.select("on")
    assert raised.value.hint == "did you mean one?"
    two = parse((HEAD + ENTRY + "  two:\n" + ENTRY).encode(), "x")
    with pytest.raises(UsageError, match="several configurations") as raised:
        two.select("")
    assert raised.value.hint.endswith("one, two")


def test_documented_examples_are_valid() -> None:
    with open(EXAMPLES, "rb") as file:
        config = parse(file.read(), EXAMPLES)
    assert {"all-disabled", "all-enabled", "all-1g", "all-balanced"} < set(config.labels)


@given(st.text(alphabet="0123456789cgb.+-,mealfx ", max_size=16))
def test_name_equals_its_canonical_form(text: str) -> None:
    parsed = parse_name(text)
    if parsed is not None:
        assert parse_name(parsed.text) == parsed
        assert re.match(r"(\d+c\.)?\d+g\.\d+gb", text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["version", "mig-configs", "devices", "mig-enabled", "mig-devices", "device-filter", "a"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_file_is_read_or_refused(data: object) -> None:
    try:
        parse(json.dumps(data).encode(), "x")
    except InvalidMigConfig as error:
        assert error.faults
