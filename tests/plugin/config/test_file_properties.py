"""Any file: no traceback, and the origin of every accepted value is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from gpunode.plugin.config.file import by_key, known_keys, read_file
from gpunode.plugin.config.options import Option
from gpunode.plugin.config.resolve import option_value
from tests.plugin.config.resolving import FILES, sources

pytestmark = pytest.mark.full

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Document = tuple[dict[str, Any], list[Option]]
SCALARS = some.none() | some.booleans() | some.integers(-5, 300) | some.floats() | some.text(max_size=12)
KEYS = some.sampled_from([key.rpartition(".")[2] for key in known_keys()]) | some.text(max_size=8)
TREES = some.recursive(
    SCALARS,
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


def value_of(option: Option) -> some.SearchStrategy[Any]:
    """Values that users may write for an option in a file."""
    words = {
        "boolean": some.booleans(),
        "path": some.sampled_from(["/", "/run/nvidia/driver", "/host/usr/bin/nvidia-ctk"]),
        "socket": some.just("/var/lib/k0s/kubelet/device-plugins/kubelet.sock"),
        "resource": some.sampled_from(["nvidia.com/gpu", "example.com/a100"]),
        "seconds": some.integers(1, 3600),
        "hold": some.sampled_from(["0s", "5m", "infinite", 60_000_000_000]),
        "interval": some.sampled_from(["5s", "1m30s"]),
        "address": some.sampled_from([":9400", "127.0.0.1:1"]),
        "integers": some.sampled_from([[], [0]]),
        "xids": some.lists(some.sampled_from(["all", 48, 79, "31"]), max_size=3, unique=True),
        "selectors": some.lists(some.sampled_from([0, "1", "*H100*", "0:1"]), max_size=3, unique=True),
        "words": some.just(["all"]),
        "text": some.just("cdi.k8s.io/"),
    }
    if option.allowed:
        for_labels_alone = {"vfio", "stdout"}
        one = some.sampled_from([word for word in option.allowed if word not in for_labels_alone])
        return some.lists(one, min_size=1, unique=True) if option.takes_many else one
    return words[option.kind]


@some.composite
def documents(draw: some.DrawFn) -> Document:
    """A file that holds some options, and their names."""
    skipped = {"simulate", "vendor"}
    chosen = draw(some.lists(some.sampled_from(sorted(by_key())), unique=True))
    options = [by_key()[key] for key in chosen if by_key()[key].field not in skipped]
    tree: dict[str, Any] = {}
    for option in options:
        holder = tree
        *parents, last = option.key.split(".")
        for parent in parents:
            holder = holder.setdefault(parent, {})
        holder[last] = draw(value_of(option))
    return tree, options


@QUICK
@given(documents())
def test_accepted_option_knows_its_line(
    tmp_path: Path, document: tuple[dict[str, Any], list[Option]]
) -> None:
    tree, options = document
    text = json.dumps(tree, indent=1)
    lines = text.splitlines()
    file = tmp_path / "c.yaml"
    file.write_text(text)
    resolved = sources(file=file).resolve()
    assert resolved.problems == ()
    for option in options:
        path, _, number = resolved.origins[option.field].rpartition(":")
        assert path == str(file)
        assert option.key.rpartition(".")[2] in lines[int(number) - 1]
    written = {option.field for option in options}
    assert {field for field in resolved.origins if field != "config_file"} == written


@QUICK
@given(documents())
def test_flag_and_file_give_the_same_value(
    tmp_path: Path, document: tuple[dict[str, Any], list[Option]]
) -> None:
    tree, options = document
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(tree))
    by_file = sources(file=file).resolve().valid_settings()
    flags = {}
    for option in options:
        value = option_value(by_file, option)
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        text = f"{value}s" if option.kind in ("hold", "interval") and value != "infinite" else text
        flags[option.field] = text.lower() if option.kind == "boolean" else text
    by_flag = sources(flags).resolve()
    assert by_flag.problems == ()
    assert all(option_value(by_flag.settings, option) == option_value(by_file, option) for option in options)


@QUICK
@given(TREES)
def test_any_tree_causes_no_traceback(tree: Any) -> None:
    found = read_file(json.dumps(tree).encode("utf-8", "surrogatepass"), "c")
    assert all(one.where and one.message for one in found.problems)


@QUICK
@given(some.binary(max_size=200) | some.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_cause_no_traceback(data: bytes) -> None:
    for lenient in (False, True):
        found = read_file(data, "c", lenient=lenient)
        assert all(one.where and one.message for one in found.problems)


@QUICK
@given(some.data())
def test_truncated_or_scrambled_file_causes_no_traceback(data: some.DataObject) -> None:
    text = data.draw(some.sampled_from(sorted(FILES.iterdir()))).read_bytes()
    start = data.draw(some.integers(0, len(text)))
    end = data.draw(some.integers(start, len(text)))
    for bad in (text[:start] + data.draw(some.binary(max_size=3)) + text[end:], text[:end]):
        assert all(one.where and one.message for one in read_file(bad, "c").problems)
