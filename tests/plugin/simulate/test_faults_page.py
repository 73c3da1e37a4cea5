"""docs/simulate.md lists what there is."""

from __future__ import annotations

import re

from gpunode.plugin.simulate.faults import FAULTS, parse_script
from gpunode.plugin.simulate.node import MODELS, load
from tests.cli import REPOSITORY

PAGE = (REPOSITORY / "docs/simulate.md").read_text()


def test_every_model_stands_there_as_it_is() -> None:
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE, re.MULTILINE))
    for key, model in MODELS.items():
        assert rows[key].startswith(f"{model.name} | {model.count} | ")
        profiles = [profile.name for profile in model.profiles]
        listed = re.findall(r"`([^`]+)`", rows[key].rpartition("|")[2])
        if rows[key].endswith("as `a100`") or rows[key].endswith("as `a100-80gb`"):
            assert profiles == [profile.name for profile in MODELS[listed[0]].profiles]
        else:
            assert listed == profiles


def test_every_fault_and_its_values_stand_there() -> None:
    for name, kind in FAULTS.items():
        assert f"`{name}`" in PAGE
        assert all(f"`{word}`" in PAGE for word in kind.value if isinstance(kind.value, tuple))


def test_the_examples_mean_something() -> None:
    for spec in re.findall(r"--simulate ([a-z0-9][^ \n`]*)", PAGE):
        load(spec)
    (script,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert len(parse_script(script, "page")) == 4
