"""Start times of the commands as ratios to ``python -c pass``, measured in turn in the same run.

Absolute times depend on the machine; the ratio of the least times says how much of a start is ours. On a busy
machine the processor time, printed next to it, says the same with less noise. If containerd and Docker can be
started, a run on each that finds nothing to change is measured too, and a whole change on containerd next to
the daemon's own share; labels on a stub of NVML (bench_labels.py). Exit 1 if one is over its budget.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from gpunode.commands.demo import build_demo_node
from scripts import bench_labels
from scripts.bench_timing import GPUNODE, Case, least, report

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "25"))
DRY_RUN = 14.0
# grpcio and protobuf, which query containerd's CRI, are 5 to 6 of it: grpc imports asyncio and ssl
LIVE = {"containerd": 20.0, "docker": 16.0}
DOCTOR = 22.0
LIVE_DOCTOR = 26.0  # the daemons and the GPUs of this machine are asked, as far as it has any


def main() -> int:
    print(f"{'command':42} {'least ms':>9} {'ratio':>6} {'budget':>6} {'cpu ms':>9} {'ratio':>6}")
    within = _starts()
    within &= bench_labels.main(ROUNDS)
    for kind, program in (("containerd", "containerd"), ("docker", "dockerd")):
        within &= _engine(kind, program)
    within &= _whole_change()
    return 0 if within else 1


def _starts() -> bool:
    """On the simulated node, for which the doctor reports faults: it ends with 1."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "node"
        build_demo_node(root)
        on_it = (GPUNODE, "--root", str(root))
        configure = (*on_it, "configure-runtime", "--dry-run", "--runtime")
        cases = {
            "--version": Case((GPUNODE, "--version"), 8.0),
            "doctor -o json": Case((*on_it, "doctor", "-o", "json"), DOCTOR, exit_codes=(0, 1)),
            "doctor -o json, this machine": Case(
                (GPUNODE, "doctor", "-o", "json"), LIVE_DOCTOR, exit_codes=(0, 1)
            ),
            "plugin status -o json": Case((*on_it, "plugin", "status", "-o", "json"), 14.0),
            "configure-runtime --dry-run": Case((*configure, "containerd"), DRY_RUN),
            "configure-runtime --dry-run, docker": Case((*configure, "docker"), DRY_RUN),
        }
        return report(cases, least(cases, ROUNDS))


def _engine(kind: str, program: str) -> bool:
    """Prints a note if there is no such engine to start."""
    if not _startable(program):
        print(f"on a real {kind}: not measured, needs root and {program}")
        return True
    from scripts.bench_engines import unchanged

    return report(*unchanged(kind, LIVE[kind], ROUNDS))


def _whole_change() -> bool:
    if not _startable("containerd"):
        return True
    from scripts.bench_engines import OUR_SECONDS, changes

    change = changes(max(3, ROUNDS // 3))
    late = change.ours > OUR_SECONDS
    print(
        f"configure, restart, active: {change.whole:.2f} s; the daemon's restart {change.restart:.2f} s,"
        f" gpunode {change.ours:.2f} s, budget {OUR_SECONDS} s{'  OVER' if late else ''}"
    )
    return not late


def _startable(program: str) -> bool:
    return os.geteuid() == 0 and shutil.which(program) is not None


if __name__ == "__main__":
    sys.exit(main())
