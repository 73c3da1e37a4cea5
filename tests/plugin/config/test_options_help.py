"""The help of commands that take `plugin serve`'s options: what matters first, no longer than need be."""

from __future__ import annotations

import pytest

from tests.cli import gpunode


@pytest.mark.parametrize(
    ("verb", "first"),
    [
        (["plugin", "check-config"], "--from"),
        (["plugin", "serve"], "--mig-strategy"),
    ],
)
def test_a_command_s_own_options_come_first_and_those_of_all_last(verb: list[str], first: str) -> None:
    options = gpunode(*verb, "--help").out.partition("Options:")[2]
    assert options.split()[0] == first
    assert options.index("--mig-strategy") < options.index("--lenient") < options.index("--root")


def test_only_variables_that_do_not_follow_from_the_name_are_listed() -> None:
    text = " ".join(gpunode("plugin", "serve", "--help").out.split())
    assert "[env var: MIG_STRATEGY; default: (none)]" in text
    assert text.count("GPUNODE_PLUGIN_SERVE_") == 1  # how it follows
