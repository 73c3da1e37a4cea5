"""The comparison: correct results pass, and no wrong one does."""

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.gpu.vectoradd import ELEMENTS, NOTICE, expected, inputs, judge, largest_error, vector_add


@pytest.fixture(scope="module")
def want():
    return expected()


def test_inputs_and_sums_are_distinct_and_exact_in_float32(want):
    left, right = inputs()
    assert len(left) == len(right) == len(want) == ELEMENTS == 1 << 20
    assert [x + y for x, y in zip(left, right, strict=True)] == list(want)
    assert len(set(want)) == len(set(left)) == len(set(right)) == ELEMENTS


def test_correct_sums_pass_with_no_error(want):
    result = judge(0, "GPU-1", "name", array("f", want), want, 1.5)
    assert (result.status, result.max_error, result.elements, result.message) == ("ok", 0.0, ELEMENTS, "")


@given(st.integers(0, ELEMENTS - 1), st.sampled_from([math.nan, math.inf, -1.0, 0.1]))
def test_single_wrong_element_is_detected(position, value):
    right = array("f", range(1000))
    got = array("f", right)
    got[position % 1000] = value
    assert largest_error(got, right) != 0.0
    result = judge(0, "", "", got, right, 0.0)
    assert result.status == "fail"
    assert f"first at {position % 1000}:" in result.message


def test_nan_has_no_largest_error(want):
    got = array("f", want)
    got[7] = math.nan
    assert judge(0, "", "", got, want, 0.0).max_error is None


def test_swapped_neighbours_are_detected(want):
    got = array("f", want)
    got[41], got[42] = got[42], got[41]
    result = judge(0, "", "", got, want, 0.0)
    assert (result.status, result.max_error) == ("fail", 1.5)
    assert "2 of 1048576" in result.message


def test_simulated_devices_are_marked():
    results = list(vector_add([(0, "GPU-a", "x"), (1, "GPU-b", "y")]))
    assert [(one.index, one.uuid, one.status, one.max_error) for one in results] == [
        (0, "GPU-a", "ok", 0.0),
        (1, "GPU-b", "ok", 0.0),
    ]
    assert all(one.message == NOTICE for one in results)
