"""Time of ``gpunode labels`` and ``gpunode gpus`` on a stub of NVML.

BENCH_LABELS_PEER names a program that is measured in turn with it and must not be faster, such as
``gpu-feature-discovery --oneshot --use-node-feature-api=false --output-file=``. The comparison is only fair
if the GPUs are on a PCI bus, which both read: a bind mount in a mount namespace of our own (root). And if
NVML needs time to start, as on hardware: a warm nvidia-smi takes 0.09 s, and the driver one to three seconds
a GPU if nothing keeps it loaded (NVIDIA, Driver Persistence). A stub that starts at once is measured as well,
for Python's own share, and is no comparison.
"""

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fixtures.scenario import Fault, Scenario, machine
from fixtures.stubs import have_compiler, stub_node
from gpunode.gpu.child import module_argv
from gpunode.gpu.nvml import sysfs_address
from gpunode.host.process import run_process
from scripts.bench_timing import BARE, GPUNODE, Case, Cost, least, report

# Python with Typer is 6 to 7 of it, before anything of gpunode is loaded;
# NVML's child is 6, of which pynvml is 3
LIMIT_GPUS = 15.0
"""Ratio to a bare Python that ``gpus`` may take beside NVML's own time."""
LIMIT_LABELS = 17.0
LIMIT_BESIDE_NVML = 14.0
"""The same without the child that queries NVML: 150 ms where a bare Python takes 10.7 ms."""
GPUS = (1, 4, 8)
START = 0.02
"""Seconds that NVML takes to start, as little as hardware may do with."""
PEER = os.environ.get("BENCH_LABELS_PEER", "")
BUS = Path("/sys/bus/pci/devices")
_OTHERS = 40  # bridges and the like, which every server has
_NO_WINDOW = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"


def main(rounds: int) -> bool:
    """Whether it is within its budget, and no slower than the peer, with every number of GPUs."""
    if not have_compiler():
        print("labels: not measured, needs gcc for the stand-in of NVML")
        return True
    if os.geteuid() == 0 and "--own-mounts" not in sys.argv:
        argv = (
            "unshare",
            "--mount",
            sys.executable,
            "-m",
            "scripts.bench_labels",
            str(rounds),
            "--own-mounts",
        )
        done = run_process(argv, 600.0, None, os.environ)
        print(done.stdout + done.stderr[-2000:], end="")
        return done.code == 0
    with tempfile.TemporaryDirectory() as name:
        within = [_with(Path(name), count, rounds) for count in GPUS]
    return all(within)


def _with(directory: Path, count: int, rounds: int) -> bool:
    at_once = machine(count)
    bus = directory / str(count)
    mounted = "--own-mounts" in sys.argv
    if mounted:
        _mount(bus, at_once)
    try:
        own_share = _measured(
            f"{count} GPUs, NVML at once", stub_node(directory, at_once).env, rounds, race=False
        )
        if not PEER:
            return own_share
        slow = at_once.with_faults(Fault("nvmlInitWithFlags", hang=START))
        return _measured(f"{count} GPUs", stub_node(directory, slow).env, rounds, race=True) and own_share
    finally:
        if mounted:
            _run("umount", str(BUS))


def _measured(where: str, environ: Mapping[str, str], rounds: int, *, race: bool) -> bool:
    own, peer, child = f"labels, {where}", f"the other one, {where}", f"NVML's child, {where}"
    cases = {own: Case((GPUNODE, "labels"), float("inf") if race else LIMIT_LABELS, environ)}
    if not race:
        cases[f"gpus, {where}"] = Case((GPUNODE, "gpus"), LIMIT_GPUS, environ)
        cases[child] = Case(
            module_argv("gpunode.gpu.nvml_health", '{"conditions": false}'), float("inf"), environ
        )
    if PEER:
        cases[peer] = Case(tuple(shlex.split(PEER)), float("inf"), environ)
    costs = least(cases, rounds)
    within = report(cases, {label: costs[label] for label in (BARE, *cases)})
    if child in costs:
        beside = (costs[own].wall - costs[child].wall) / costs[BARE].wall
        print(f"labels beside NVML's child: {beside:.1f}, budget {LIMIT_BESIDE_NVML:.1f}")
        within &= beside <= LIMIT_BESIDE_NVML
    return within and not (race and _slower(costs[own], costs[peer]))


def _slower(own: Cost, peer: Cost) -> bool:
    """Wall-clock time, printed."""
    if own.wall > peer.wall:
        print(f"labels took {(own.wall - peer.wall) * 1000:.1f} ms longer than the other one  OVER")
    return own.wall > peer.wall


def _mount(bus: Path, scenario: Scenario) -> None:
    """The node's GPUs on a PCI bus of this process's mount namespace."""
    for gpu in scenario.gpus:
        _device(bus / sysfs_address(gpu.pci), "10de", "2330", "030200")
    for number in range(_OTHERS):
        _device(bus / f"0000:00:{number % 32:02x}.{number // 32}", "8086", "1234", "060000")
    _run("mount", "--bind", str(bus), str(BUS))


def _run(*argv: str) -> None:
    done = run_process(argv, 10.0, None, os.environ)
    if not done.ok:
        raise SystemExit(f"{' '.join(argv)}: {done.stderr}")


def _device(directory: Path, vendor: str, device: str, kind: str) -> None:
    """As sysfs-pci has it (Documentation/PCI/sysfs-pci.rst)."""
    directory.mkdir(parents=True)
    words = {"vendor": vendor, "device": device, "class": kind}
    for name, word in words.items():
        (directory / name).write_text(f"0x{word}\n")
    (directory / "numa_node").write_text("0\n")
    (directory / "resource").write_text(_NO_WINDOW * 13)
    head = bytes.fromhex(vendor)[::-1] + bytes.fromhex(device)[::-1]
    (directory / "config").write_bytes((head + bytes(5) + bytes.fromhex(kind)[::-1]).ljust(256, b"\0"))


if __name__ == "__main__":
    sys.exit(0 if main(int(sys.argv[1])) else 1)
