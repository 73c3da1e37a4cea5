"""Encoding: YAML and JSON are equivalent, strings stay strings, and our files are recognized."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpunode.cdi.spec import (
    Edits,
    Hook,
    Mount,
    NodeEdit,
    Spec,
    SpecDevice,
    as_tree,
    encode,
    format_of,
    made_by_gpunode,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
EDITS = st.builds(
    Edits,
    st.tuples(TEXT),
    st.tuples(st.builds(NodeEdit, NAMES, TEXT, st.integers(0, 0o777), st.integers(0, 2**32 - 1))),
    st.lists(st.builds(Mount, TEXT, TEXT, st.tuples(TEXT)), max_size=2).map(tuple),
    st.lists(st.builds(Hook, TEXT, st.tuples(TEXT)), max_size=2).map(tuple),
    st.lists(st.integers(1, 2**32 - 1), max_size=2).map(tuple),
)
SPECS = st.builds(
    Spec,
    TEXT,
    st.lists(st.builds(SpecDevice, TEXT, EDITS), min_size=1, max_size=3).map(tuple),
    EDITS,
    numbers=st.just(()),  # they are in a comment
)


@pytest.mark.full
@given(SPECS)
def test_yaml_and_json_parse_to_the_same_specification(spec):
    tree = json.loads(json.dumps(as_tree(spec)))
    assert json.loads(encode(spec, "json")) == tree
    assert yaml.safe_load(encode(spec, "yaml")) == tree


@pytest.mark.parametrize("name", ["0", "no", "1:2", "1e3", "null", "~", "0x10"])
def test_names_that_look_like_other_yaml_types_stay_strings(name):
    spec = Spec("nvidia.com/gpu", (SpecDevice(name, Edits(("A=1",))),), Edits())
    assert yaml.safe_load(encode(spec, "yaml"))["devices"][0]["name"] == name


def test_only_fields_that_cdi_knows_are_written():
    """Engines read strictly: with one unknown field none of the devices is known."""
    node, mount, hook = (
        NodeEdit("/dev/a", "/x/dev/a", 0o660, 44),
        Mount("/c", "/h"),
        Hook("/bin/h", ("h",), ("E=1",)),
    )
    spec = Spec(
        "v/c", (SpecDevice("0", Edits(nodes=(node,))),), Edits(("A=1",), (node,), (mount,), (hook,), (44,))
    )
    tree = as_tree(spec)
    assert list(tree) == ["cdiVersion", "kind", "devices", "containerEdits"]
    assert list(tree["devices"][0]) == ["name", "containerEdits"]
    edits = tree["containerEdits"]
    assert list(edits) == ["env", "deviceNodes", "mounts", "hooks", "additionalGids"]
    assert [list(edits[key][0]) for key in ("deviceNodes", "mounts", "hooks")] == [
        ["path", "hostPath", "fileMode", "gid"],
        ["hostPath", "containerPath", "options"],
        ["hookName", "path", "args", "env"],
    ]


def test_own_file_is_recognized_by_its_first_line_and_lists_device_numbers():
    spec = Spec("v/c", (SpecDevice("a", Edits()),), Edits(), numbers=(("/dev/nvidia-uvm", 508, 0),))
    data = encode(spec, "yaml")
    assert made_by_gpunode(data)
    assert b"#   /dev/nvidia-uvm 508:0\n" in data
    assert not any(
        made_by_gpunode(other) for other in (None, b"", b"---\ncdiVersion: 0.5.0\n", encode(spec, "json"))
    )


def test_format_follows_the_file_extension():
    assert [format_of(path) for path in ("/a/b.yaml", "b.json", "b.yml", "/a.json/b", "yaml")] == [
        "yaml", "json", None, None, "yaml",
    ]  # fmt: skip
