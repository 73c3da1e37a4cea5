"""The help of commands with `plugin serve`'s options: the important ones first, and short."""

from __future__ import annotations

import re

import pytest

from tests.cli import gpunode


@pytest.mark.parametrize(
    ("verb", "first", "most"),
    [(["plugin", "serve"], "--config-file", 100), (["labels"], "--watch", 90)],
)
def test_own_options_come_first_and_pages_are_short(verb: list[str], first: str, most: int) -> None:
    page = gpunode(*verb, "--help", env={"COLUMNS": "80"}).out
    options = page.partition("ptions:")[2]
    assert options.split()[0] == first and len(page.splitlines()) < most
    assert options.index("--lenient") < options.index("--mig-strategy") < options.index("--root")


def test_check_config_lists_only_its_own_options() -> None:
    ran = gpunode("plugin", "check-config", "--help")
    assert "--from gke" in ran.out and "gpunode plugin serve --help" in " ".join(ran.out.split())
    assert "--mig-strategy" not in ran.out


@pytest.mark.parametrize("flag", ["--fail-on-init-error", "--kube-api-qps"])
def test_options_without_effect_are_accepted_and_not_listed(flag: str) -> None:
    verb = ("labels",) if flag == "--kube-api-qps" else ("plugin", "check-config")
    assert flag not in gpunode(*verb, "--help").out
    ran = gpunode(*verb, f"{flag}={'5' if 'qps' in flag else 'false'}", "--simulate", "h100:1")
    assert ran.code == 0, ran.err


def test_informative_defaults_are_listed_without_variables() -> None:
    text = " ".join(gpunode("plugin", "serve", "--help").out.split())
    assert "[default: envvar]" in text
    assert "default: none" not in text and "default: false" not in text
    assert text.count("GPUNODE_PLUGIN_SERVE_") == 1
    assert re.search(r"^  MIG_STRATEGY +--mig-strategy$", gpunode("help", "environment").out, re.M)
