"""A long life in a short time: one plugin process, and all events of a year.

Kubelet restarts, reloads, temporary XIDs, pods, removed sockets, garbage on the socket. Forbidden
are a lost device, a wrong response, more threads, file descriptors or memory at the end than after two
rounds. GPUNODE_SOAK=20 makes it twenty times as long.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from fixtures.scenario import Event, Scenario, gpu_uuid, machine
from fixtures.stubs import StubNode, have_compiler, stub_node
from gpunode.daemons.grpc_client import channel_to
from gpunode.host import Host
from gpunode.plugin.kubelet import server
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import RESOURCE, eventually

LENGTH = float(os.environ.get("GPUNODE_SOAK", "1"))
WARM_UP = 2  # rounds until everything has run, and Python's table of interned strings has its size
ROUNDS = max(2, int(10 * LENGTH))
RESTARTS, RELOADS, XIDS, ALLOCATIONS = 20, 50, 100, 1000  # in each round
GPUS = 8
APPLICATION_XIDS = (13, 31, 43, 45)  # of these a GPU must stay healthy
CONTAINED = 94  # a contained memory error: cleared when its program ends
pytestmark = [
    pytest.mark.xdist_group("soak"),
    pytest.mark.full,
    pytest.mark.skipif(not have_compiler(), reason="gcc is not installed"),
]


class Soak:
    """The process, its node and its kubelet. The seed is fixed: a failure is the same the next time."""

    def __init__(self, short: Path) -> None:
        self.random = random.Random(4)
        self.short = short
        (short / "dp").mkdir()
        self.kubelet = KubeletStub(Host(), str(short / "dp"))
        self.kubelet.start()
        self.scenario: Scenario = machine(GPUS)
        self.node: StubNode = stub_node(short, self.scenario, libraries="nvml")
        self.config = short / "config.yaml"
        self.configure(replicas=1)
        self.socket = short / "dp/nvidia-gpu.sock"
        command = [sys.executable, "-m", "gpunode", "plugin", "serve", "--config-file", str(self.config)]
        command += ["--kubelet-socket", str(short / "dp/kubelet.sock"), "--state-dir", str(short / "state")]
        command += ["--health-hold-down", "0s"]  # a longer one doubles with each mark of a GPU within an hour
        with (short / "log").open("w") as log:
            environ = {**os.environ, **self.node.env}
            environ.pop("GPUNODE_SOAK", None)  # the plugin warns of unknown variables
            self.process = subprocess.Popen(command, env=environ, stderr=log, stdout=subprocess.DEVNULL)

    def configure(self, replicas: int) -> None:
        sharing = f"sharing:\n  timeSlicing:\n    resources: [{{name: {RESOURCE}, replicas: {replicas}}}]\n"
        new = self.config.with_suffix(".new")
        new.write_text("version: v1\n" + (sharing if replicas > 1 else ""))
        new.replace(self.config)

    def log(self) -> str:
        return (self.short / "log").read_text()

    def ready(self, count: int = GPUS, seconds: float = 30.0) -> None:
        assert self.process.poll() is None, self.log()[-3000:]
        assert self.kubelet.wait_allocatable(RESOURCE, count, seconds), self.log()[-3000:]

    def measure(self) -> dict[str, int]:
        """Threads, file descriptors and resident KiB of the process now."""
        proc = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return {
            "threads": int(status["Threads"]),
            "descriptors": len(list((proc / "fd").iterdir())),
            "resident": int(status["VmRSS"].split()[0]),
        }

    def measure_at_rest(self, before: dict[str, int]) -> dict[str, int]:
        """Measure once the process has closed the connections that its clients closed: it has as many file
        descriptors as before, or two more."""
        most = before["descriptors"] + 2
        assert eventually(lambda: self.measure()["descriptors"] <= most), (before, self.measure())
        return self.measure()

    # --- events ----------------------------------------------------------------------------------------

    def restarts(self) -> None:
        """Kubelet restarts, some right after our socket was deleted, and one deletion without a restart."""
        for turn in range(RESTARTS):
            if turn % 5 == 4:
                self.socket.unlink(missing_ok=True)
            self.kubelet.restart()
            # one that has just failed is known, too
            assert eventually(lambda: self.kubelet.capacity(RESOURCE) == GPUS), self.log()[-3000:]
        assert eventually(self.socket.exists), self.log()[-3000:]
        start = len(self.log())
        self.socket.unlink()
        # a new registration alone may still be one with the deleted socket
        again = re.compile(r"socket was deleted.*the kubelet watches", re.DOTALL)
        assert eventually(lambda: again.search(self.log()[start:]) is not None), self.log()[-3000:]

    def reloads(self) -> None:
        """Repeats of the same."""
        for _ in range(RELOADS - 2):
            self.reload()

    def reload(self) -> None:
        """One, and wait for it: two signals at once would count for one."""
        again = "reading the GPUs and the config file again"
        before = self.log().count(again)
        self.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: self.log().count(again) > before), self.log()[-3000:]

    def edits(self) -> None:
        for replicas in (2, 1):
            self.configure(replicas)
            self.process.send_signal(signal.SIGHUP)
            self.ready(GPUS * replicas)

    def xids(self) -> None:
        """Dozens of programs' errors, which mark no GPU, and a few that mark theirs."""
        sick = {gpu_uuid(index) for index in self.random.sample(range(GPUS), 3)}
        for turn in range(XIDS):
            counts = turn >= XIDS - len(sick)
            uuid = sorted(sick)[XIDS - 1 - turn] if counts else gpu_uuid(self.random.randrange(GPUS))
            number = CONTAINED if counts else self.random.choice(APPLICATION_XIDS)
            self.scenario = self.scenario.with_event(Event(uuid, data=number))
        healed = self.log().count("GPU is healthy again") + len(sick)
        self.node.write(self.scenario)
        assert eventually(lambda: self.log().count("GPU is healthy again") == healed), self.log()[-3000:]
        marks = re.findall(r"device=(\S+) index=\d+ code=(\S+)", self.log())
        assert {device for device, _ in marks[-len(sick) :]} == sick
        assert {code for _, code in marks} == {"xid-94"}

    def allocations(self) -> None:
        for turn in range(ALLOCATIONS):
            if turn % 50 == 49:
                self.nonsense(turn)
            count = self.random.randint(1, GPUS)
            given = self.kubelet.allocate(RESOURCE, count)
            assert len(set(given.ids)) == count
            assert given.envs["NVIDIA_VISIBLE_DEVICES"].split(",") == list(given.ids)
            self.kubelet.release(RESOURCE, given.ids)

    def nonsense(self, turn: int) -> None:
        """A request that must fail, invalid bytes, or a client that disconnects in the middle."""
        kind = turn // 50 % 4
        with channel_to(self.socket) as channel:
            if kind == 0:
                request = pb.AllocateRequest(
                    container_requests=[pb.ContainerAllocateRequest(devices_ids=["GPU-none"])]
                )
                with pytest.raises(grpc.RpcError, match="GPU-none"):
                    server.method(channel, server.DEVICE_PLUGIN, "Allocate")(request, timeout=30.0)
            elif kind == 1:
                with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                    channel.unary_unary(f"/{server.DEVICE_PLUGIN.name}/Allocate")(b"\xff\xff", timeout=30.0)  # type: ignore[arg-type]
            elif kind == 2:
                stream = server.method(channel, server.DEVICE_PLUGIN, "ListAndWatch")(pb.Empty())
                next(stream)
                stream.cancel()
            else:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(self.socket))
                    client.sendall(b"GET / HTTP/1.1\r\n\r\n")

    def round(self) -> None:
        """Independent events happen at once: GPUs fail under a kubelet that restarts, and a request for a GPU
        may not notice a reload that changes nothing."""
        with ThreadPoolExecutor(1) as aside:
            for here, there in ((self.restarts, self.xids), (self.allocations, self.reloads)):
                other = aside.submit(there)
                here()
                other.result(120.0)
                self.ready()
        self.edits()


@pytest.fixture
def soak(short: Path) -> Iterator[Soak]:
    made = Soak(short)
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()
    made.kubelet.stop()


def test_simulated_year_leaves_no_leaks(soak: Soak) -> None:
    soak.ready()
    idle = soak.measure()
    for _ in range(WARM_UP):
        soak.round()
    first = soak.measure_at_rest(idle)
    for _ in range(ROUNDS - 1):
        soak.round()
    last = soak.measure_at_rest(first)
    assert last["threads"] <= first["threads"] + 4, (first, last)
    assert last["resident"] <= first["resident"] + 3072, (first, last)
    log = soak.log()
    assert "Traceback" not in log
    assert "a bug" not in log
    assert {line.partition("=")[0] for line in log.splitlines()} == {"time"}  # nor a line from gRPC
    soak.process.terminate()
    assert soak.process.wait(30.0) == 0
    assert not soak.socket.exists()
