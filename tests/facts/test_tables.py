"""Every reference table has its sources, their date, and rows."""

import json
from datetime import date
from pathlib import Path

import pytest

from gpunode.checks.catalogue import ALL_CHECKS
from gpunode.facts import tables
from gpunode.facts.tables import ReferenceTable, all_tables, table

FILES = sorted(Path(tables.__file__).parent.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_table_has_source_and_date(path):
    tree = json.loads(path.read_text())
    assert set(tree) == {"source", "date", "about", "rows"}
    assert tree["source"] and all(source.startswith("https://") for source in tree["source"])
    assert date.fromisoformat(tree["date"]).isoformat() == tree["date"]
    assert tree["about"].endswith(".") and tree["rows"]
    assert table(path.stem).rows == tuple(tree["rows"])


def test_all_tables_are_listed_and_read_once():
    assert [one.name for one in all_tables()] == [path.stem for path in FILES]
    assert all(table(one.name) is one for one in all_tables())


def test_checks_name_only_existing_tables():
    assert {check.table for check in ALL_CHECKS if check.table} <= {path.stem for path in FILES}


def test_age_is_in_whole_days():
    one = ReferenceTable("x", ("https://example.com",), "2026-08-12", ())
    midnight = 1786492800  # 2026-08-12T00:00:00Z
    assert [one.age_days(midnight + seconds) for seconds in (0, 86399, 86400, -5)] == [0, 0, 1, 0]
