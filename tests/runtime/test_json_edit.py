"""daemon.json edited as text: only our keys' bytes change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import ConfigError
from gpunode.runtime import docker
from gpunode.runtime.engine import DesiredConfig, Handler, UnwantedConfig

WANTED = DesiredConfig((Handler("nvidia", "nvidia-container-runtime"),))
ENTRY = {"path": "nvidia-container-runtime", "runtimeArgs": []}


def configured(text: str, desired: DesiredConfig = WANTED) -> str:
    return docker.configured(text, "daemon.json", desired)


@pytest.mark.parametrize("indent", ["\t", "  ", "    ", "   "])
def test_indentation_of_the_file_is_kept(indent: str) -> None:
    before = json.dumps({"debug": True, "log-opts": {"max-size": "1m"}}, indent=indent) + "\n"
    after = configured(before)
    assert after.startswith(before.removesuffix("\n}\n"))
    whole = json.dumps(json.loads(before) | {"runtimes": {"nvidia": ENTRY}}, indent=indent)
    assert after == whole + "\n"


@pytest.mark.parametrize("text", ["", " \n", "null", "\ufeff", "{}", "{ }\n", "\ufeff{}"])
def test_empty_file_is_accepted_as_by_dockerd(text: str) -> None:
    after = configured(text)
    assert json.loads(after.removeprefix("\ufeff")) == {"runtimes": {"nvidia": ENTRY}}
    assert after.startswith("\ufeff") == text.startswith("\ufeff")


def test_numbers_escapes_and_line_ends_keep_their_bytes() -> None:
    before = '{\r\n  "a": 12345678901234567890123,\r\n  "b": 1.10,\r\n  "c": "<&>\\u00e9"\r\n}'
    after = configured(before)
    assert after.startswith(before.removesuffix("\r\n}"))
    assert "\n" not in after.replace("\r\n", "")


def test_single_line_file_stays_one_line() -> None:
    assert configured('{"debug": true}') == (
        '{"debug": true, "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}}}'
    )


def test_entry_of_nvidia_ctk_is_unchanged() -> None:
    text = '{"runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}}'
    assert configured(text) == text


def test_features_are_merged() -> None:
    after = configured(
        '{"features": {"buildkit": false}}', DesiredConfig((Handler("nvidia", "x"),), cdi=True)
    )
    assert json.loads(after)["features"] == {"buildkit": False, "cdi": True}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{\n"a": 1,\n}', ":3:1:"),
        ('{"a": 1} {"b": 2}', ":1:10:"),
        ("[1]", "an array"),
        ('{"a": 1, "a": 2}', '"a"'),
        ('{"runtimes": []}', "runtimes is not an object"),
        ('{"runtimes": 3}', "runtimes is not an object"),
        ('{"features": "x"}', "features is not an object"),
        ('{"default-runtime": 1}', "default-runtime is not a string"),
        ('{"a": NaN}', "NaN"),
        ("[" * 100_000, "deep"),
    ],
)
def test_invalid_files_are_refused_with_their_position(text: str, place: str) -> None:
    with pytest.raises(ConfigError, match=r"daemon\.json") as caught:
        configured(text)
    assert place in caught.value.message


def test_previous_default_is_restored() -> None:
    text = '{"runtimes": {"crun": {"path": "crun"}}, "default-runtime": "crun"}'
    after = configured(text, DesiredConfig((Handler("nvidia", "n"),), set_as_default=True))
    assert json.loads(after)["default-runtime"] == "nvidia"
    back = docker.removed(after, "daemon.json", UnwantedConfig(("nvidia",), "crun"))
    assert json.loads(back) == json.loads(text)


def test_reload_text_resets_runtimes_and_default() -> None:
    assert json.loads(docker.for_reload("{}", "f")) == {"runtimes": {}, "default-runtime": "runc"}


values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False, width=32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
runtimes: st.SearchStrategy[Any] = st.dictionaries(
    st.sampled_from(["crun", "kata", "nvidia", "x y"]), st.fixed_dictionaries({"path": st.text()})
)
files: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "debug": st.booleans(),
        "features": st.dictionaries(st.sampled_from(["cdi", "buildkit"]), st.booleans()),
        "runtimes": runtimes,
        "default-runtime": st.sampled_from(["crun", "runc", "nvidia"]),
        "log-opts": values,
        'é"\\': values,
    },
)
layouts = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, 0, 1, 2, 4, "\t"]),
        "ensure_ascii": st.booleans(),
        "sort_keys": st.booleans(),
    }
)


@given(files, layouts, st.booleans(), st.booleans())
def test_only_our_keys_change(tree: dict[str, Any], layout: dict[str, Any], default: bool, cdi: bool) -> None:
    before = json.dumps(tree, **layout)
    desired = DesiredConfig((Handler("nvidia", "nvidia-container-runtime"),), default, cdi)
    after = configured(before, desired)
    expected = json.loads(before)
    entry = expected.get("runtimes", {}).get("nvidia")
    right = entry is not None and entry["path"] == "nvidia-container-runtime"
    expected.setdefault("runtimes", {})["nvidia"] = entry if right else ENTRY
    if default:
        expected["default-runtime"] = "nvidia"
    if cdi:
        expected.setdefault("features", {})["cdi"] = True
    assert json.loads(after) == expected
    assert configured(after, desired) == after


@given(files.filter(lambda tree: "nvidia" not in tree.get("runtimes", {})), layouts)
def test_removal_restores_the_meaning(tree: dict[str, Any], layout: dict[str, Any]) -> None:
    tree = {key: value for key, value in tree.items() if (key, value) != ("default-runtime", "nvidia")}
    before = json.dumps(tree, **layout)
    previous = tree.get("default-runtime", "")
    after = configured(before, DesiredConfig((Handler("nvidia", "n"),), set_as_default=True))
    back = json.loads(docker.removed(after, "daemon.json", UnwantedConfig(("nvidia",), previous)))
    if previous and previous != "runc" and previous not in tree.get("runtimes", {}):
        tree = {key: value for key, value in tree.items() if key != "default-runtime"}  # dockerd refuses it
    if not tree.get("runtimes"):
        tree = {key: value for key, value in tree.items() if key != "runtimes"}
    assert back == json.loads(json.dumps(tree))
