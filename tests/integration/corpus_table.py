"""The corpus as a table: every file on every available release.

With GPUNODE_RECORD_CORPUS=1 the outcomes are written to fixtures/configs/results.json, from which the
documentation's table is generated; otherwise a cell with another outcome than recorded fails.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fixtures.corpus import Case, cases, minor, record, recorded
from fixtures.newer_engines import Unavailable, search_path, sources
from tests.integration import driver_namespace
from tests.integration.conftest import path_of, refuse_for, require
from tests.integration.corpus_cells import Cell, Judge, explain
from tests.integration.forked_cli import ForkedCli, every_module

RECORDS = os.environ.get("GPUNODE_RECORD_CORPUS") == "1"
Key = tuple[str, Case, str]
# in memory: gpunode syncs its files, and a thousand times on a disk takes minutes
_DIRECTORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
# what the node's other engines print for their versions: starting the real programs takes 0.1 s in each run
_OTHERS = {
    "containerd": {"dockerd": "Docker version 20.10.24, build x", "podman": "podman version 4.3.1"},
    "docker": {"containerd": "containerd example.com/containerd 1.6.20 x", "podman": "podman version 4.3.1"},
}
_PROGRAMS = {"containerd": "containerd", "docker": "dockerd"}
# gpunode queries the version in each run, which is a quarter of a cell's time without this
_PROGRAM = """\
#!/bin/sh
if [ "$*" = --version ]; then echo '{version}'; exit; fi
exec {program} "$@"
"""
# without Go's garbage collection a program that only reads a file takes a seventh to a third less time
_ENVIRONMENT = {"GOGC": "off"}


def keys(engine: str) -> list[Any]:
    """A pytest parameter for every cell."""
    cells = itertools.product(sources(), cases(engine))
    return [
        pytest.param((source, case, variant), id=" ".join(filter(None, [source, case.name, variant])))
        for source, case in cells
        for variant in ("", *case.variants)
    ]


class Table:
    """The cells of one engine that this process has run."""

    def __init__(
        self, engine: str, judge: Callable[[str], Judge], cli: ForkedCli, no_driver: str, directory: Path
    ) -> None:
        """`no_driver` is the reason why `cli` sees no driver, so that --cdi can't be tried. `directory` is
        for programs of engines."""
        self._engine, self._make_judge, self._cli = engine, judge, cli
        self._no_driver, self._directory = no_driver, directory
        self._programs: dict[str, Path] = {}
        self._judges: dict[str, Judge | None] = {}
        self._cells: dict[Key, Cell] = {}

    def check(self, key: Key) -> None:
        """Fail with everything that is wrong with one cell; skip a release that isn't here."""
        source, case, variant = key
        if variant == "cdi" and self._no_driver:
            refuse_for([f"a mount namespace with a driver in it ({self._no_driver})"])
        path_of(source)  # skips the test where these engines can't be fetched
        judge = self._judge(source)
        assert judge is not None
        twin = next(name for name in sources() if self._release(name) == minor(judge.release))
        if twin != source:
            pytest.skip(f"{source} has the same release of {self._engine} as {twin}")
        with tempfile.TemporaryDirectory(prefix="gpn-cell-", dir=_DIRECTORY) as name:
            cell = Cell(judge, self._cli, case, variant, Path(name), self._programs_of(judge)).run()
        self._cells[key] = cell
        assert not cell.complaints, explain(cell)
        column = recorded().get(self._engine, {}).get(minor(judge.release))
        if column is not None and not RECORDS:
            known = column["cells"].get(cell.label)
            assert cell.end == known, f"{cell.label} is recorded as {known}: run `make corpus docs`"

    def close(self) -> None:
        """Store every column that is complete and correct, on request."""
        expected = sum(1 + len(case.variants) for case in cases(self._engine))
        for source, judge in self._judges.items() if RECORDS else ():
            own = [cell for key, cell in self._cells.items() if key[0] == source]
            ends = {cell.label: cell.end for cell in own if not cell.complaints}
            if judge and len(ends) == expected:
                record(self._engine, judge.release, ends, every_run=not source.startswith("/"))

    def _judge(self, source: str) -> Judge | None:
        """None if its engines can't be fetched."""
        if source not in self._judges:
            try:
                self._judges[source] = self._make_judge(search_path(source))
            except Unavailable:
                self._judges[source] = None
        return self._judges[source]

    def _programs_of(self, judge: Judge) -> Path:
        """A directory with the judge's program and those of the node's other engines."""
        if judge.path not in self._programs:
            place = self._directory / f"programs-{len(self._programs)}"
            place.mkdir()
            program = shutil.which(_PROGRAMS[self._engine], path=judge.path) or ""
            said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
            text = _PROGRAM.format(version=said.stdout.strip(), program=program)
            _write(place / _PROGRAMS[self._engine], text)
            for name, text in _OTHERS[self._engine].items():
                _write(place / name, f"#!/bin/sh\necho '{text}'\n")
            self._programs[judge.path] = place
        return self._programs[judge.path]

    def _release(self, source: str) -> str | None:
        judge = self._judge(source)
        return minor(judge.release) if judge else None


@contextmanager
def table(engine: str, judge: Callable[[str], Judge]) -> Iterator[Table]:
    """The table for the cells that this process runs."""
    require("gcc", "unshare")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpn-driver-")))
        prefix = driver_namespace.enter(directory)
        problem = driver_namespace.problem(prefix)
        environ = {**os.environ, **_ENVIRONMENT}
        cli = stack.enter_context(ForkedCli(() if problem else prefix, environ, every_module()))
        made = Table(engine, judge, cli, problem, directory)
        stack.callback(made.close)
        yield made


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
