"""What `configure-runtime` costs on a real containerd in a private directory, beside what containerd costs.

Two figures: a run that finds nothing to change, and the whole of configure, restart, active. The daemon's own
share of the latter is a plain restart of the same engine, up to the moment when its CRI answers.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fixtures.engines import CONTAINERD_CONFIG, start_containerd
from tests.integration.configuring import Cli, configuring

OUR_SECONDS = 0.5


@dataclass(frozen=True)
class Changes:
    """Medians in seconds: a whole change, and a plain restart of the daemon."""

    whole: float
    restart: float

    @property
    def ours(self) -> float:
        """What is left for gpunode."""
        return self.whole - self.restart


def unchanged(environment: dict[str, str], rounds: int) -> tuple[float, float]:
    """Medians of ``python -c pass`` and of a run that finds nothing to change, taken in turn."""
    bare, ours = [], []
    with _engine() as cli:
        argv = [str(Path(sys.executable).parent / "gpunode"), *cli.argv("configure-runtime")[3:]]
        environ = {**environment, "GPUNODE_STATE_DIR": str(cli.state)}
        for _ in range(2):  # configured now, bytecode and files cached
            _seconds(argv, environ)
        for _ in range(rounds):
            bare.append(_seconds([sys.executable, "-c", "pass"], environ))
            ours.append(_seconds(argv, environ))
    return statistics.median(bare), statistics.median(ours)


def changes(environment: dict[str, str], rounds: int) -> Changes:
    """A whole change and a plain restart, taken in turn; the runtime is taken out again in between."""
    whole, restart = [], []
    with _engine() as cli:
        environ = {**environment, "GPUNODE_STATE_DIR": str(cli.state)}
        for _ in range(rounds):
            whole.append(_seconds(cli.argv("configure-runtime"), environ))
            _seconds(cli.argv("unconfigure-runtime"), environ)
            started = time.perf_counter()
            cli.engine.restart()
            restart.append(time.perf_counter() - started)
    return Changes(statistics.median(whole), statistics.median(restart))


@contextmanager
def _engine() -> Iterator[Cli]:
    """A private containerd and the command line for it."""
    with (
        tempfile.TemporaryDirectory() as directory,
        configuring(start_containerd(CONTAINERD_CONFIG), Path(directory)) as cli,
    ):
        yield cli


def _seconds(argv: list[str], environ: dict[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(argv, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started
