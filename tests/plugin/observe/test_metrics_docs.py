"""docs/metrics.md names exactly the existing metrics."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from gpunode.plugin.observe.metrics import FAMILIES

PAGE = (Path(__file__).parents[3] / "docs/metrics.md").read_text()


def series(text: str) -> set[str]:
    """The metrics that an expression or a sentence names, without a histogram's suffixes."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bgpunode_\w+[a-z]\b", text)}


def test_metrics_table_is_up_to_date() -> None:
    rows = re.findall(r"^\| `(gpunode_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
    documented = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows
    }
    assert documented == {one.name: (one.kind, one.labels, one.text) for one in FAMILIES.values()}


def test_every_metric_named_on_the_page_exists() -> None:
    assert series(PAGE) - {"gpunode_container"} <= set(FAMILIES)


def test_queries_and_alerts_use_existing_labels() -> None:
    blocks = re.findall(r"```(promql|yaml)\n(.*?)```", PAGE, re.DOTALL)
    expressions = [text for kind, text in blocks if kind == "promql"]
    for kind, text in blocks:
        if kind == "yaml":
            [group] = yaml.safe_load(text)["groups"]
            expressions += [rule["expr"] for rule in group["rules"]]
            assert all(rule["annotations"]["summary"] for rule in group["rules"])
    assert len(expressions) == 7
    for expression in expressions:
        for name, matchers in re.findall(r"(gpunode_\w+)\{([^}]*)\}", expression):
            family = FAMILIES[re.sub(r"_bucket$", "", name)]
            assert {matcher.split("=")[0].rstrip("!") for matcher in matchers.split(",")} <= set(
                family.labels
            )


def test_names_follow_prometheus_conventions() -> None:
    for family in FAMILIES.values():
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.text.endswith(".")
        assert len(set(family.labels)) == len(family.labels)
