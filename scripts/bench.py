"""Start times of the commands as ratios to ``python -c pass``, measured in turn in the same run.

Absolute times depend on the machine; the ratio says how much of a start is ours. Where a containerd can be
started, the time of a whole change on it is printed as well, beside the daemon's own share. Exit 1 if one is
over its budget.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpunode.commands.demo import build_demo_node

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "15"))
NOTHING_TO_CHANGE = 13.0
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
                NOTHING_TO_CHANGE,
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
        _row(label, median, ratio, budget)
    return 1 if _containerd() or over else 0


def _row(label: str, median: float, ratio: float, budget: float) -> None:
    mark = "  OVER" if ratio > budget else ""
    print(f"{label:38} {median * 1000:9.1f} {ratio:6.1f} {budget:6.1f}{mark}")


def _containerd() -> bool:
    """Whether a run on a real containerd is over its budget; says so where there is none to start."""
    if os.geteuid() != 0 or shutil.which("containerd") is None:
        print("on a real containerd: not measured, needs root and containerd")
        return False
    from scripts.bench_containerd import OUR_SECONDS, changes, unchanged

    bare, ours = unchanged(ENVIRONMENT, ROUNDS)
    _row("configure-runtime, nothing to change", ours, ours / bare, NOTHING_TO_CHANGE)
    change = changes(ENVIRONMENT, max(3, ROUNDS // 3))
    late = change.ours > OUR_SECONDS
    print(
        f"configure, restart, active: {change.whole:.2f} s; the daemon's restart {change.restart:.2f} s,"
        f" gpunode {change.ours:.2f} s, budget {OUR_SECONDS} s{'  OVER' if late else ''}"
    )
    return late or ours / bare > NOTHING_TO_CHANGE


if __name__ == "__main__":
    sys.exit(main())
