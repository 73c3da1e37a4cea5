"""Fixtures of the verify tests: a GPU node made of stubs, and an interrupted run."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from fixtures.scenario import Fault, Scenario, StubGpu
from fixtures.stub_runtime import build_stub_runtime
from fixtures.stubs import SCENARIO_IN_CONTAINER, StubNode, stub_node
from gpunode.runtime.verify.container import ContainerRequest
from tests.waiting import PATIENCE, eventually

UUIDS = ("GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-aaaaaaaaaaaa")
GPUS = Scenario((StubGpu(0, UUIDS[0], "0000:3b:00.0"), StubGpu(1, UUIDS[1], "0000:5e:00.0", minor=1)))
HANGING = GPUS.with_faults(Fault("cuInit", hang=60.0))
INTERRUPTED = """\
import sys
from gpunode.gpu.vectoradd import MODULE
from gpunode.host import Host
from tests.silent import SilentProgress
from gpunode.runtime.verify import run_program
from gpunode.runtime.verify.container import ContainerRequest
request = ContainerRequest(sys.argv[1], socket=sys.argv[2], argv=("-m", MODULE, "--timeout", "60"))
try:
    run_program(Host(), request, SilentProgress())
except KeyboardInterrupt:
    sys.exit(130)
"""


@dataclass
class Notes:
    """A progress that records its messages."""

    notes: list[str] = field(default_factory=list)

    def step(self, text: str) -> nullcontext[None]:
        return nullcontext()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def info(self, text: str) -> None:
        self.notes.append(text)

    def following(self, text: str, name: str) -> nullcontext[Callable[[str], None]]:
        return nullcontext(self.notes.append)


@dataclass(frozen=True)
class GpuNode:
    """Stub libraries and the runtimes `nvidia` (adds them to containers) and `broken` (refuses)."""

    stubs: StubNode
    nvidia: Path
    broken: Path


def gpu_node(directory: Path) -> GpuNode:
    stubs = stub_node(directory, GPUS)
    nvidia = build_stub_runtime(
        directory / "nvidia-container-runtime",
        libraries=stubs.libraries,
        scenario=stubs.scenario_path,
        scenario_target=SCENARIO_IN_CONTAINER,
    )
    refusal = "nvidia-container-cli: initialization error: nvml error: driver not loaded"
    return GpuNode(stubs, nvidia, build_stub_runtime(directory / "broken-runtime", fail=refusal))


def comes_to(query: Callable[[], object], expected: object) -> None:
    """Fail unless the daemon finally reports that. containerd's CRI learns of changes by ctr through an
    event, and gpunode removes its images with ctr."""
    assert eventually(lambda: query() == expected), query()


def interrupt_when(
    request: ContainerRequest, running: Callable[[], bool], number: signal.Signals = signal.SIGINT
) -> int:
    """Run the program from another process, interrupt it once the container runs; its exit code."""
    argv = [sys.executable, "-c", INTERRUPTED, request.engine, request.socket]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            assert eventually(lambda: running() or child.poll() is not None)
            assert child.poll() is None, child.communicate()[1].decode()
            os.kill(child.pid, number)
            child.communicate(timeout=PATIENCE)
        finally:
            child.kill()
    return child.returncode
