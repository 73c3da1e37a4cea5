"""The patches: for any node they make the requested change and touch nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.api_objects import record_writer
from fixtures.json_patch import PatchFailed, apply
from gpunode.kubernetes.changes import (
    capacity_patch,
    label_patch,
    pointer,
    writer_of,
)

KEYS = st.text("ab/~.01", min_size=1, max_size=4)
LABELS = st.dictionaries(KEYS, st.text("xyz", max_size=2), max_size=4)


def node(**parts: Any) -> dict[str, Any]:
    return {"metadata": {"name": "n", "resourceVersion": "7"}, "spec": {}, "status": {}, **parts}


@pytest.mark.parametrize(
    ("parts", "made"),
    [
        (("status", "capacity", "nvidia.com/gpu"), "/status/capacity/nvidia.com~1gpu"),
        (("a~b/c",), "/a~0b~1c"),
        (("~1",), "/~01"),
        ((), ""),
    ],
)
def test_pointers_follow_rfc_6901(parts: tuple[str, ...], made: str) -> None:
    assert pointer(*parts) == made


@given(
    existing=st.none() | LABELS,
    desired=st.dictionaries(KEYS, st.none() | st.text("xyz", max_size=2), max_size=4),
)
def test_label_patch_gives_the_desired_labels(
    existing: dict[str, str] | None, desired: dict[str, str | None]
) -> None:
    before = node()
    if existing is not None:
        before["metadata"]["labels"] = existing
    patch = label_patch(before, desired)
    after = apply(before, patch)
    expected = {**(existing or {}), **desired}
    expected = {key: value for key, value in expected.items() if value is not None}
    assert after["metadata"].get("labels", {}) == expected
    assert label_patch(after, desired) == []
    if expected == (existing or {}):
        assert patch == []


@given(
    existing=LABELS, desired=st.dictionaries(KEYS, st.none() | st.just("x"), min_size=1, max_size=3), at=KEYS
)
def test_node_changed_meanwhile_refuses_or_keeps_the_change(
    existing: dict[str, str], desired: dict[str, str | None], at: str
) -> None:
    before = node()
    before["metadata"]["labels"] = existing
    patch = label_patch(before, desired)
    meanwhile = copy.deepcopy(before)
    meanwhile["metadata"] |= {"labels": {**existing, at: "theirs"}, "resourceVersion": "8"}
    try:
        after = apply(meanwhile, patch)
    except PatchFailed:
        return
    touched = {one["path"] for one in patch}
    assert pointer("metadata", "labels", at) not in touched
    assert after["metadata"]["labels"][at] == "theirs"


@pytest.mark.parametrize(
    "status", [{}, {"capacity": {}}, {"capacity": {"cpu": "4"}}, {"capacity": {"a.b/c": "1"}}]
)
@pytest.mark.parametrize("count", [None, 0, 8])
def test_capacity_is_a_string(status: dict[str, Any], count: int | None) -> None:
    before = node(status=status)
    after = apply(before, capacity_patch(before, "a.b/c", count))
    found = after["status"].get("capacity", {}).get("a.b/c")
    assert found == (None if count is None else str(count))
    assert after["status"].get("capacity", {}).get("cpu") == status.get("capacity", {}).get("cpu")


def test_writer_of_a_capacity() -> None:
    before = node(status={"capacity": {}})
    after = copy.deepcopy(before)
    after["status"]["capacity"]["a.b/c"] = "1"
    record_writer(before, after, "gpunode")
    assert writer_of(after, "a.b/c") == "gpunode"
    assert writer_of(after, "a.b/d") == ""
    later = copy.deepcopy(after)
    later["status"]["capacity"]["a.b/c"] = "2"
    record_writer(after, later, "kubelet")
    assert writer_of(later, "a.b/c") == "kubelet"


@pytest.mark.parametrize(
    "managed", [None, 1, [], [None], [{}], [{"fieldsV1": []}], [{"fieldsV1": {"f:status": 1}}]]
)
def test_malformed_managed_fields_give_no_writer(managed: Any) -> None:
    assert writer_of({"metadata": {"managedFields": managed}}, "a.b/c") == ""
