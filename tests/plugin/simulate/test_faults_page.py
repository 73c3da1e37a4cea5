"""docs/simulate.md lists all models and faults."""

from __future__ import annotations

import re

from gpunode.plugin.simulate.faults import FAULTS, parse_script
from gpunode.plugin.simulate.node import MODELS, load
from tests.cli import REPOSITORY

PAGE = (REPOSITORY / "docs/simulate.md").read_text()


def test_every_model_is_documented_as_implemented() -> None:
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE, re.MULTILINE))
    for key, model in MODELS.items():
        assert rows[key].startswith(f"{model.name} | {model.count} | ")
        profiles = [profile.name for profile in model.profiles]
        listed = re.findall(r"`([^`]+)`", rows[key].rpartition("|")[2])
        if rows[key].endswith("as `a100`") or rows[key].endswith("as `a100-80gb`"):
            assert profiles == [profile.name for profile in MODELS[listed[0]].profiles]
        else:
            assert listed == profiles


def test_every_fault_is_documented_with_its_values() -> None:
    for name, kind in FAULTS.items():
        assert f"`{name}`" in PAGE
        assert all(f"`{word}`" in PAGE for word in kind.value if isinstance(kind.value, tuple))


def test_documented_examples_are_valid() -> None:
    for spec in re.findall(r"--simulate ([a-z0-9][^ \n`]*)", PAGE):
        load(spec)
    (script,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert len(parse_script(script, "page")) == 4
