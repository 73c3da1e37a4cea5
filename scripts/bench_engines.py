"""Cost of `configure-runtime` on real engines in private directories, compared with the engine's own.

On containerd and on Docker: a run that finds nothing to change, which a scheduled job repeats again and
again. On containerd also the whole of configure, restart, active. The daemon's own share of that is a plain
restart of the same engine, until its CRI responds.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fixtures.engines import CONTAINERD_CONFIG, start_containerd, start_dockerd
from scripts.bench_timing import GPUNODE, Case, Cost, cost, least
from tests.integration.configuring import Cli, configuring

OUR_SECONDS = 0.5


@dataclass(frozen=True)
class Changes:
    """The least of several, in seconds: a whole change, and a plain restart of the daemon."""

    whole: float
    restart: float

    @property
    def ours(self) -> float:
        """The share of gpunode."""
        return self.whole - self.restart


def unchanged(kind: str, budget: float, rounds: int) -> tuple[dict[str, Case], dict[str, Cost]]:
    """A run that finds nothing to change on a real engine, and the same as a dry run."""
    with _engine(kind) as cli:
        _gpunode(cli, "configure-runtime")
        argv = (GPUNODE, *cli.argv("configure-runtime")[3:])
        environ = {"GPUNODE_STATE_DIR": str(cli.state)}
        cases = {
            f"configure-runtime, {kind}, no change": Case(argv, budget, environ),
            f"configure-runtime, {kind}, --dry-run": Case((*argv, "--dry-run"), budget, environ),
        }
        return cases, least(cases, rounds)


def changes(rounds: int) -> Changes:
    """A whole change and a plain restart, in turn; the runtime is removed in between."""
    whole, restart = [], []
    with _engine("containerd") as cli:
        for _ in range(rounds):
            whole.append(_gpunode(cli, "configure-runtime"))
            _gpunode(cli, "unconfigure-runtime")
            started = time.perf_counter()
            cli.engine.restart()
            restart.append(time.perf_counter() - started)
    return Changes(min(whole), min(restart))


def _gpunode(cli: Cli, verb: str) -> float:
    argv = (sys.executable, *cli.argv(verb)[1:])
    return cost(Case(argv, 0.0, {"GPUNODE_STATE_DIR": str(cli.state)})).wall


@contextmanager
def _engine(kind: str) -> Iterator[Cli]:
    """A private engine and the command line for it."""
    engine = start_dockerd() if kind == "docker" else start_containerd(CONTAINERD_CONFIG)
    with tempfile.TemporaryDirectory() as directory, configuring(engine, Path(directory)) as cli:
        yield cli
