"""Every daemon.json of the corpus on every dockerd that is here; `dockerd --validate` or a start judges."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from fixtures.corpus import cases
from fixtures.engines import start_dockerd
from fixtures.newer_engines import INSTALLED, SUITES
from tests.integration.conftest import path_of
from tests.integration.corpus_docker import MISSES_RUNTIMES, Docker, refused_at_start
from tests.integration.corpus_table import Key, Table, keys, table
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.full, pytest.mark.docker]
FATAL = ("default-unknown", "runc-redefined", "runtime-type-and-path", "runtime-without-path")


@pytest.fixture(scope="module")
def cells() -> Iterator[Table]:
    with table("docker", Docker.on) as made:
        yield made


@pytest.mark.parametrize("key", keys("docker"))
def test_only_the_runtime_changes_and_is_removed_again(cells: Table, key: Key) -> None:
    cells.check(key)


@pytest.mark.parametrize("source", (INSTALLED, *SUITES))
@pytest.mark.parametrize("name", FATAL)
def test_validation_detects_errors_that_only_a_start_reports(
    source: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Docker.on(path_of(source))
    if judge.release < MISSES_RUNTIMES:
        pytest.skip("this dockerd refuses these before it starts, or not at all")
    text = next(case for case in cases("docker") if case.name == name).file.read_text()
    assert refused_at_start(text)
    monkeypatch.setenv("PATH", judge.path)
    engine = start_dockerd(text)
    try:
        done = subprocess.run(engine.argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    finally:
        engine.stop()
    assert done.returncode == 1 and "failed to start daemon: " in done.stderr
