"""The XID catalogue, and which of its codes count."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.facts.xids import catalogue, xid
from gpunode.plugin.config.settings import ALL_XIDS, HealthSettings
from gpunode.plugin.health import counts, readings_count

NVIDIAS_SIX = {13, 31, 43, 45, 68, 109}
PAGE = Path(__file__).parents[2] / "docs/health.md"


def settings(disabled: set[int] | None = None, enabled: set[int] | None = None) -> HealthSettings:
    return HealthSettings(frozenset(disabled or ()), frozenset(enabled or ()))


def test_every_documented_code_is_listed_once_with_a_meaning() -> None:
    assert list(catalogue()) == list(range(1, 173))
    assert all(item.meaning and item.number == number for number, item in catalogue().items())


def test_xids_ignored_by_the_nvidia_plugin_are_ignored() -> None:
    assert not any(xid(number).counts for number in NVIDIAS_SIX)


@pytest.mark.parametrize(
    ("number", "kind", "whole"),
    [
        (13, "application", False),
        (48, "by-driver", False),
        (63, "ignore", False),
        (74, "reset", True),
        (79, "reboot", True),
        (94, "restart-app", False),
        (95, "reset", True),
        (109, "reset", False),
        (119, "reset", True),
        (54, "hardware", True),
        (154, "ignore", False),
        (9999, "by-driver", False),
    ],
)
def test_classes(number: int, kind: str, whole: bool) -> None:
    assert (xid(number).kind, xid(number).whole) == (kind, whole)


def test_unknown_code_counts() -> None:
    assert xid(4711).counts
    assert xid(4711).text == "XID 4711"


@pytest.mark.parametrize(
    ("disabled", "enabled", "counted", "ignored"),
    [
        (set(), set(), {48, 79, 94, 9999}, NVIDIAS_SIX),
        ({79}, set(), {48, 94}, NVIDIAS_SIX | {79}),
        ({ALL_XIDS}, set(), set(), {48, 79, 94, *NVIDIAS_SIX}),
        ({ALL_XIDS}, {48}, {48}, {79, 94, *NVIDIAS_SIX}),
        (set(), {13, 109}, {13, 109, 79}, {31}),
        (set(), {ALL_XIDS}, {13, 63, 79}, set()),
        ({79}, {ALL_XIDS}, {79, 13}, set()),
        ({79, 48}, {79}, {79}, {48}),
    ],
)
def test_codes_are_disabled_and_enabled(
    disabled: set[int], enabled: set[int], counted: set[int], ignored: set[int]
) -> None:
    made = settings(disabled, enabled)
    assert {number for number in counted | ignored if counts(number, made)} == counted


@given(st.sets(st.integers(0, 200)), st.sets(st.integers(0, 200)), st.integers(0, 200))
def test_enabled_overrides_disabled_overrides_the_class(
    disabled: set[int], enabled: set[int], number: int
) -> None:
    made = settings(disabled, enabled)
    expected = number in enabled or (number not in disabled and xid(number).counts)
    assert counts(number, made) is expected


def test_disabling_all_includes_the_readings() -> None:
    assert readings_count(settings())
    assert readings_count(settings({79}))
    assert not readings_count(settings({ALL_XIDS}, {48}))


def test_page_has_the_table_of_the_code() -> None:
    rows = [
        f"| {item.number} | {item.meaning} | {item.kind} | {'yes' if item.counts else 'no'} |"
        f" {'GPU' if item.whole else 'instance'} |"
        for item in catalogue().values()
    ]
    page = PAGE.read_text().splitlines()
    assert [line for line in page if line.startswith("| ") and line.split()[1].isdecimal()] == rows
