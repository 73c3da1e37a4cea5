"""Start times of the commands as ratios to ``python -c pass``, measured in turn in the same run.

Absolute times depend on the machine; the ratio says how much of a start is ours. Exit 1 if one is over
its budget.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpunode.commands.demo import build_demo_node

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "15"))
GPUNODE = [str(Path(sys.executable).parent / "gpunode")]
# an installed gpunode has its bytecode; a shell that forbids writing it would measure the compiler
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name != "PYTHONDONTWRITEBYTECODE" and not name.startswith("GPUNODE_")
}


def seconds(argv: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(argv, env=ENVIRONMENT, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "node"
        build_demo_node(root)
        budgets = {
            "gpunode --version": ([*GPUNODE, "--version"], 7.0),
            "gpunode doctor -o json": ([*GPUNODE, "--root", str(root), "doctor", "-o", "json"], 14.0),
            "gpunode configure-runtime --dry-run": (
                [*GPUNODE, "--root", str(root), "configure-runtime", "--runtime", "containerd", "--dry-run"],
                13.0,
            ),
        }
        bare = [sys.executable, "-c", "pass"]
        for argv in [bare, *(argv for argv, _ in budgets.values())]:
            seconds(argv)  # bytecode is written and files are cached before anything counts
        times: dict[str, list[float]] = {label: [] for label in ["python -c pass", *budgets]}
        for _ in range(ROUNDS):
            times["python -c pass"].append(seconds(bare))
            for label, (argv, _budget) in budgets.items():
                times[label].append(seconds(argv))
    base = statistics.median(times["python -c pass"])
    print(f"{'command':38} {'median ms':>9} {'ratio':>6} {'budget':>6}")
    print(f"{'python -c pass':38} {base * 1000:9.1f} {1:6.1f}")
    over = False
    for label, (_argv, budget) in budgets.items():
        median = statistics.median(times[label])
        ratio = median / base
        over = over or ratio > budget
        print(
            f"{label:38} {median * 1000:9.1f} {ratio:6.1f} {budget:6.1f}{'  OVER' if ratio > budget else ''}"
        )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
