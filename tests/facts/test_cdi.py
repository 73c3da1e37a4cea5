"""Untrusted specifications: any file in the engines' directories is read or refused, and none crashes us."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpunode.cdi import locations
from gpunode.facts.cdi import parse_spec, vendor_specs
from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from tests.cli import gpunode

ENGINES = (Daemon("containerd", None, (1, 7, 2), "/etc/containerd/config.toml", "", "", None),)
KEYS = ("path", "hostPath", "name", "containerEdits", "deviceNodes", "major", "mounts", "hooks")
PATHS = st.sampled_from(["/dev/null", "/a\0b", "1.²"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), PATHS)
VALUES = st.recursive(
    SCALARS,
    lambda more: st.lists(more, max_size=3) | st.dictionaries(st.sampled_from(KEYS), more, max_size=3),
    max_leaves=8,
)


def items(*keys: str) -> st.SearchStrategy[Any]:
    return VALUES | st.lists(VALUES | st.fixed_dictionaries(dict.fromkeys(keys, SCALARS)), max_size=2)


EDITS = VALUES | st.fixed_dictionaries(
    {
        "deviceNodes": items("path", "hostPath", "major", "minor"),
        "mounts": items("hostPath"),
        "hooks": items("path"),
    }
)
DEVICES = st.lists(st.fixed_dictionaries({"name": SCALARS, "containerEdits": EDITS}), max_size=2)
SPECS = st.fixed_dictionaries(
    {
        "kind": st.just("nvidia.com/gpu") | SCALARS,
        "cdiVersion": SCALARS,
        "devices": VALUES | DEVICES,
        "containerEdits": EDITS,
    }
)


@pytest.mark.full
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(SPECS, st.sampled_from(["json", "yaml"]))
def test_any_types_are_listed_or_refused(tmp_path: Path, tree: Any, form: str) -> None:
    for old in tmp_path.iterdir():
        old.unlink()
    text = json.dumps(tree) if form == "json" else yaml.safe_dump(tree)
    (tmp_path / f"nvidia.{form}").write_bytes(text.encode("utf-8", "surrogatepass"))
    found = vendor_specs(Host(), (str(tmp_path),))
    devices = locations.listed(Host(), found)
    states = locations.files(Host(), found, ENGINES)
    assert len(states) == len(found)
    assert len(devices) == sum(len(spec.devices) for spec in found)


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 100_000, "{a: " * 50_000])
def test_deep_nesting_is_a_broken_file_and_no_crash(text: str, tmp_path: Path) -> None:
    (tmp_path / "etc/cdi").mkdir(parents=True)
    (tmp_path / "etc/cdi/nvidia.yaml").write_text(text)
    ran = gpunode("cdi", "list", "--root", str(tmp_path))
    assert (ran.code, "can't be parsed" in ran.out) == (0, True)


def test_nested_aliases_are_not_expanded() -> None:
    letters = "abcdefghij"
    layers = [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairwise(letters)]
    text = "\n".join(["kind: nvidia.com/gpu", "a: &a [x]", *layers, "devices: [{name: *j}, {name: 0}]"])
    spec = parse_spec(text, "/etc/cdi/nvidia.yaml")
    assert spec is not None
    assert spec.names == ("", "0")


def test_entries_that_are_not_files_stop_nothing(tmp_path: Path) -> None:
    place = tmp_path / "etc/cdi"
    (place / "nvidia-old.yaml").mkdir(parents=True)
    os.mkfifo(place / "nvidia-pipe.yaml")
    os.mkfifo(place / "other.yaml")
    (place / "nvidia-circle.yaml").symlink_to("nvidia-circle.yaml")
    (place / "nvidia-gone.yaml").symlink_to("/nowhere")
    ran = gpunode("cdi", "list", "--root", str(tmp_path), "-o", "json")
    problems = {one["path"].rpartition("/")[2]: one["problem"] for one in ran.document["data"]["files"]}
    assert set(problems) == {"nvidia-pipe.yaml", "nvidia-circle.yaml"}
    assert "not a regular file" in problems["nvidia-pipe.yaml"]
