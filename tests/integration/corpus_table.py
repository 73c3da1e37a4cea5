"""The corpus as a table: every file on every release that is here, two cells at a time.

With GPUNODE_RECORD_CORPUS=1 what the cells came to is written to fixtures/configs/results.json, from which
the documentation's table is made; otherwise a cell that comes to another end than recorded fails.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fixtures.corpus import Case, cases, minor, record, recorded
from fixtures.newer_engines import sources
from tests.integration import driver_namespace
from tests.integration.conftest import path_of, refuse_for, require
from tests.integration.corpus_cells import Cell, Judge, explain
from tests.integration.forked_cli import ForkedCli

_BOTH = ("gpunode.commands.configure_runtime", "gpunode.commands.configure_runtime", "gpunode.facts.cdi")
MODULES = {
    "containerd": (*_BOTH, "gpunode.runtime.containerd", "gpunode.runtime.toml_edit"),
    "docker": (*_BOTH, "gpunode.runtime.docker"),
}
"""What most of the thousands of runs import, a third of their time."""
RECORDS = os.environ.get("GPUNODE_RECORD_CORPUS") == "1"
Key = tuple[str, Case, str]
WORKERS = 2
# in memory: gpunode syncs what it writes, and a thousand times on a disk takes minutes
_PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def keys(engine: str) -> list[Any]:
    """A pytest parameter for every cell."""
    cells = itertools.product(sources(), cases(engine))
    return [
        pytest.param((source, case, variant), id=" ".join(filter(None, [source, case.name, variant])))
        for source, case in cells
        for variant in ("", *case.variants)
    ]


class Table:
    """The cells of one engine. All that were selected are begun with the first that is asked for."""

    def __init__(
        self,
        engine: str,
        judge: Callable[[str], Judge],
        selected: Sequence[Key],
        workers: Sequence[ForkedCli],
        no_driver: str,
    ) -> None:
        """`no_driver` says why `workers` see none, so that --cdi can't be tried."""
        self._engine, self._judge, self._selected = engine, judge, selected
        self._no_driver = no_driver
        self._clis = itertools.cycle(workers)
        self._pool = ThreadPoolExecutor(len(workers))
        self._judges: dict[str, Judge] = {}
        self._cells: dict[Key, Future[Cell]] = {}

    def check(self, key: Key) -> None:
        """Fail with everything that is wrong with one cell; skip a release that isn't here."""
        source, _, variant = key
        if variant == "cdi" and self._no_driver:
            refuse_for([f"a mount namespace with a driver in it ({self._no_driver})"])
        judge = self._judge_of(source)
        twin = next(name for name, one in self._judges.items() if minor(one.release) == minor(judge.release))
        if twin != source:
            pytest.skip(f"{source} has the same release of {self._engine} as {twin}")
        cell = self._future(key).result()
        assert not cell.complaints, explain(cell)
        column = recorded().get(self._engine, {}).get(minor(judge.release))
        if column is not None and not RECORDS:
            known = column["cells"].get(cell.label)
            assert cell.end == known, f"{cell.label} is recorded as {known}: run `make corpus docs`"

    def close(self) -> None:
        """Keep every column that is complete and right, if that was asked for."""
        self._pool.shutdown(cancel_futures=True)
        wanted = sum(1 + len(case.variants) for case in cases(self._engine))
        for source, judge in self._judges.items() if RECORDS else ():
            own = [future for key, future in self._cells.items() if key[0] == source]
            done = [future.result() for future in own if not future.cancelled() and not future.exception()]
            cells = {cell.label: cell.end for cell in done if not cell.complaints}
            if len(cells) == wanted:
                record(self._engine, judge.release, cells, every_run=not source.startswith("/"))

    def _judge_of(self, source: str) -> Judge:
        if source not in self._judges:
            self._judges[source] = self._judge(path_of(source))
        return self._judges[source]

    def _future(self, key: Key) -> Future[Cell]:
        for other in [key, *self._selected]:
            if other not in self._cells and other[0] == key[0]:
                self._cells[other] = self._pool.submit(self._run, other, next(self._clis))
        return self._cells[key]

    def _run(self, key: Key, cli: ForkedCli) -> Cell:
        source, case, variant = key
        with tempfile.TemporaryDirectory(prefix="gpn-cell-", dir=_PLACE) as name:
            return Cell(self._judges[source], cli, case, variant, Path(name)).run()


@contextmanager
def table(engine: str, judge: Callable[[str], Judge], request: pytest.FixtureRequest) -> Iterator[Table]:
    """The table for the cells that this run of pytest has selected."""
    require("gcc", "unshare")
    items = (getattr(item, "callspec", None) for item in request.session.items)
    params = (spec.params.get("key") for spec in items if spec is not None)
    selected = [key for key in params if key is not None and key[1].engine == engine]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpn-driver-")))
        prefix = driver_namespace.enter(directory)
        problem = driver_namespace.problem(prefix)
        inside = () if problem else prefix
        workers = [stack.enter_context(ForkedCli(inside, modules=MODULES[engine])) for _ in range(WORKERS)]
        made = Table(engine, judge, selected, workers, problem)
        stack.callback(made.close)
        yield made
