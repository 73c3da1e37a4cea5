"""Selectors and globs: matching of units."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.plugin.model import Unit, glob_matches, matcher, pci_numbers, unmatched
from tests.plugin.gpus import mig_uuid, uuid

WHOLE = Unit(uuid(10), uuid(10), "10", name="NVIDIA A100-SXM4-80GB", pci="0000:3b:00.0")
PART = Unit(
    mig_uuid(10, 2), uuid(10), "10:2", name="NVIDIA A100-SXM4-80GB", pci="0000:3b:00.0", profile="1g.10gb+me"
)
OTHER = Unit(uuid(2), uuid(2), "2", name="Tesla T4", pci="0001:10:00.1")


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ("10", (WHOLE, PART)),
        ("10:2", (PART,)),
        ("10:0", ()),
        ("1", ()),
        (" 2 ", (OTHER,)),
        (uuid(10), (WHOLE, PART)),
        (uuid(10).lower(), (WHOLE, PART)),
        (mig_uuid(10, 2), (PART,)),
        ("0000:3b:00.0", (WHOLE, PART)),
        ("00000000:3B:00.0", (WHOLE, PART)),
        ("3b:00.0", (WHOLE, PART)),
        ("3B:00", (WHOLE, PART)),
        ("3b:00.1", ()),
        ("0001:10:00.1", (OTHER,)),
        ("10:00", ()),  # MIG device 0 of GPU 10
        ("*A100*", (WHOLE, PART)),
        ("tesla*", ()),
        ("Tesla T4", (OTHER,)),
        ("1g.*", (PART,)),
        ("*", (WHOLE, PART, OTHER)),
        ("", ()),
    ],
)
def test_selector_matches(selector, selected):
    test = matcher(selector)
    assert tuple(unit for unit in (WHOLE, PART, OTHER) if test(unit)) == selected


def test_unmatched_selectors_are_listed_in_order():
    assert unmatched(["7", "10", "GPU-nope"], [WHOLE, OTHER]) == ("7", "GPU-nope")


@given(st.integers(0, 0xFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7), st.booleans())
def test_every_spelling_of_an_address_is_the_same(domain, bus, device, function, upper):
    short = f"{bus:02x}:{device:02x}.{function}"
    spelled = [f"{domain:04x}:{short}", f"{domain:08x}:{short}"] + ([short] if domain == 0 else [])
    for text in spelled:
        assert pci_numbers(text.upper() if upper else text) == (domain, bus, device, function)


TEXT = st.text(alphabet="ab*.[", max_size=8)


@given(TEXT, TEXT)
def test_only_the_star_is_special(pattern, text):
    expression = ".*".join(re.escape(part) for part in pattern.split("*"))
    assert glob_matches(pattern, text) is (re.fullmatch(expression, text, re.DOTALL) is not None)


def test_pattern_with_many_stars_matches_quickly():
    assert not glob_matches("*a" * 500 + "b", "a" * 5000)
