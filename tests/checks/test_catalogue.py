import json
import re
from pathlib import Path

import pytest

from gpunode.checks.catalogue import ALL_CHECKS, BY_ID, LAYERS, find_check
from gpunode.checks.fixes import FAMILIES
from gpunode.checks.model import PREFLIGHTS
from gpunode.commands import explain
from gpunode.errors import UsageError
from gpunode.facts.traits import TRAITS
from gpunode.host import Host
from gpunode.output.render import plain_lines
from scripts.checks_page import markdown
from tests.checks.remedies import holes, placeholders
from tests.silent import silent_session

LEDGER = Path(__file__).parent / "catalogue.json"


def test_every_failure_mode_in_the_catalogue_has_a_check_or_a_reason():
    """catalogue.json: by section, id to "" for a check, to "in ID" if another check reports it too, or to
    the reason why a node can't report it."""
    known = {
        name: why for section in json.loads(LEDGER.read_text()).values() for name, why in section.items()
    }
    assert {name for name, why in known.items() if not why} - set(BY_ID) == set()
    assert {name for name, why in known.items() if why} & set(BY_ID) == set()
    assert {why.removeprefix("in ") for why in known.values() if why.startswith("in ")} <= set(BY_ID)


def test_check_ids_are_unique_and_in_the_order_of_the_report():
    assert len(BY_ID) == len(ALL_CHECKS)
    assert list(BY_ID) == [one for layer in LAYERS.values() for one in layer.split()]


def test_blockers_exist_and_have_no_cycle():
    def depth(identifier, seen=()):
        assert identifier not in seen, f"cycle through {seen}"
        return 1 + max((depth(one, (*seen, identifier)) for one in BY_ID[identifier].blocked_by), default=0)

    assert all(depth(check.id) < 20 for check in ALL_CHECKS)


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.id)
def test_every_check_has_complete_and_well_formed_metadata(check):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", check.id)
    assert check.layer in LAYERS and check.severity in ("error", "warning", "info") and check.classes
    assert set(check.needs) | set(check.unless) <= set(TRAITS)
    assert set(check.preflight) <= set(PREFLIGHTS)
    assert len(check.looks_at) > 20 and len(check.why) > 40
    assert check.refs and all(re.fullmatch(r"https://\S+", address) for address in check.refs)
    assert check.title and check.title[-1].isalnum() and check.why.endswith(".")
    for family in FAMILIES:
        fix = check.fix_for(family)
        assert fix.command and "\n" not in fix.command
        assert fix.disruptive in ("none", "restart", "drain", "reboot")
        assert ("reboot" in fix.command) == (fix.disruptive == "reboot") or fix.command.startswith("follow ")
        assert "nvidia-ctk runtime" not in fix.command
        assert not fix.look or (fix.note and fix.disruptive == "none" and not fix.safe)
        assert not placeholders(fix.command) and not holes(fix.command)
        assert not re.search(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d|\b(pct|kill) (\w+ )?\d", fix.command)


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.id)
def test_explain_prints_facts_reason_and_fixes_of_every_distribution(check):
    result = explain.explain(silent_session(Host(Path("/"))), check.id)
    text = "\n".join(line for block in result.blocks for line in plain_lines(block))
    assert result.kind == "CheckExplanation"
    assert check.title in text
    fixes = [check.fix_for(family) for family in FAMILIES]
    assert all((fix.before_reboot or fix.command) in text for fix in fixes)
    reboots = any(fix.command == "reboot" or fix.before_reboot for fix in fixes)
    assert text.splitlines().count("    reboot") == reboots and "&& reboot" not in text
    assert set(result.data.fixes) == set(FAMILIES)
    look = check.fix_for("other").look
    headings = ("prints a Look for this node" in text, "prints a Fix for this node" in text)
    assert headings == (look, not look)


def test_explain_without_an_id_lists_all():
    result = explain.explain(silent_session(Host(Path("/"))))
    assert result.kind == "CheckList"
    assert [one.id for one in result.data.checks] == [check.id for check in ALL_CHECKS]


def test_unknown_id_suggests_the_nearest():
    with pytest.raises(UsageError) as raised:
        find_check("driver-lib-missmatch")
    assert "driver-lib-mismatch" in raised.value.hint


def test_checks_page_in_docs_is_up_to_date():
    page = Path(__file__).parents[2] / "docs" / "checks.md"
    assert page.read_text() == markdown(), "run: make docs"
