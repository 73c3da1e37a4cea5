"""Time and processor time of command lines, run in turn so that they share whatever else the machine does."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GPUNODE = str(Path(sys.executable).parent / "gpunode")
BARE = "python -c pass"
# an installed gpunode has its bytecode; a shell that forbids writing it would measure the compiler
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name != "PYTHONDONTWRITEBYTECODE" and not name.startswith("GPUNODE_")
}


@dataclass(frozen=True)
class Cost:
    """Seconds of one run: on the clock, and of the processor (user and system, children included)."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Case:
    """A command line, the ratio to `BARE` that it may take, and its additional environment."""

    argv: tuple[str, ...]
    budget: float
    environ: Mapping[str, str] | None = None
    exit_codes: tuple[int, ...] = (0,)


def least(cases: Mapping[str, Case], rounds: int) -> dict[str, Cost]:
    """The least of many runs, and of `BARE` in turn with them: anything above it is other load.

    The busier the machine, the later the least comes: while a case is over its budget, up to three times as
    many rounds are run.
    """
    all_cases = {BARE: Case((sys.executable, "-c", "pass"), 1.0), **cases}
    for case in all_cases.values():
        for _ in range(2):  # bytecode is written and files are cached before anything counts
            cost(case)
    costs: dict[str, list[Cost]] = {label: [] for label in all_cases}
    for completed in range(1, 3 * rounds + 1):
        for label, case in all_cases.items():
            costs[label].append(cost(case))
        shares = {
            label: Cost(min(sample.wall for sample in samples), min(sample.cpu for sample in samples))
            for label, samples in costs.items()
        }
        if completed >= rounds and all(_ratio(shares, label) <= case.budget for label, case in cases.items()):
            break
    return shares


def _ratio(costs: Mapping[str, Cost], label: str) -> float:
    return costs[label].wall / costs[BARE].wall


def cost(case: Case) -> Cost:
    """Run it once; raises if it doesn't end as expected, since then something else was measured."""
    before = _children()
    started = time.perf_counter()
    done = subprocess.run(
        case.argv, env={**ENVIRONMENT, **(case.environ or {})}, capture_output=True, text=True, check=False
    )
    wall = time.perf_counter() - started
    if done.returncode not in case.exit_codes:
        raise SystemExit(f"{' '.join(case.argv)} ended with {done.returncode}: {done.stderr[-500:]}")
    return Cost(wall, _children() - before)


def report(cases: Mapping[str, Case], costs: Mapping[str, Cost]) -> bool:
    """Whether every case is within its budget."""
    base = costs[BARE]
    within = True
    for label, measured in costs.items():
        ratio = _ratio(costs, label)
        budget = cases[label].budget if label in cases else 1.0
        within &= ratio <= budget
        print(
            f"{label:42} {measured.wall * 1000:9.1f} {ratio:6.1f} {budget:6.1f} {measured.cpu * 1000:9.1f}"
            f" {measured.cpu / base.cpu:6.1f}{'  OVER' if ratio > budget else ''}"
        )
    return within


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
