"""The help of commands with `plugin serve`'s options: the important ones first, and short."""

from __future__ import annotations

import re

import pytest

from tests.cli import gpunode


@pytest.mark.parametrize(
    ("verb", "first"),
    [
        (["plugin", "check-config"], "--from"),
        (["plugin", "serve"], "--fail-on-init-error"),
    ],
)
def test_own_options_come_first_and_global_ones_last(verb: list[str], first: str) -> None:
    options = gpunode(*verb, "--help").out.partition("ptions:")[2]
    assert options.split()[0] == first
    assert options.index("--lenient") < options.index("--mig-strategy") < options.index("--root")


def test_informative_defaults_are_listed_without_variables() -> None:
    text = " ".join(gpunode("plugin", "serve", "--help").out.split())
    assert "[default: envvar]" in text
    assert "default: none" not in text and "default: false" not in text
    assert text.count("GPUNODE_PLUGIN_SERVE_") == 1
    assert re.search(r"^  MIG_STRATEGY +--mig-strategy$", gpunode("help", "environment").out, re.M)
