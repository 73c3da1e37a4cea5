"""Every containerd file of the corpus on every containerd that is here; `config dump` judges."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.corpus import cases
from fixtures.engines import start_containerd
from fixtures.newer_engines import INSTALLED, SUITES
from tests.integration.conftest import path_of
from tests.integration.corpus_containerd import Containerd
from tests.integration.corpus_table import Key, Table, keys, table
from tests.integration.forked_cli import ForkedCli
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.full, pytest.mark.containerd]


@pytest.fixture(scope="module")
def cells() -> Iterator[Table]:
    with table("containerd", Containerd.on) as made:
        yield made


@pytest.mark.parametrize("key", keys("containerd"))
def test_only_the_runtime_changes_and_is_removed_again(cells: Table, key: Key) -> None:
    cells.check(key)


@pytest.mark.parametrize("source", (INSTALLED, *SUITES))
@pytest.mark.parametrize("name", ("imports-missing", "imports-missing-v3"))
def test_validation_detects_errors_that_only_a_start_reports(
    source: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    judge = Containerd.on(path_of(source))
    case = next(case for case in cases("containerd") if case.name == name)
    main = case.unpack(tmp_path / "etc", tmp_path / "program")
    with ForkedCli() as cli:
        assert judge.load(main, cli) is None
    monkeypatch.setenv("PATH", judge.path)
    engine = start_containerd(main.read_text())
    try:
        done = subprocess.run(engine.argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    finally:
        engine.stop()
    assert done.returncode == 1 and "nowhere.toml: no such file" in done.stderr
