"""`gpunode plugin serve` as a process with a kubelet stub, for backends that need no library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpunode.daemons.grpc_client import channel_to
from gpunode.host import Host
from gpunode.plugin.kubelet import server
from gpunode.plugin.proto import deviceplugin_pb2 as pb
from tests.cli import start_gpunode
from tests.integration.forked_cli import Started
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import eventually

DIRECTORY = "/dp"


class Serving:
    """One running process. `arguments` follow ``plugin serve``; with a root it uses that one. `program` is
    what Python runs instead of gpunode."""

    def __init__(
        self,
        directory: Path,
        arguments: Iterable[str],
        root: Path | None = None,
        program: tuple[str, ...] = (),
    ) -> None:
        self.place = directory
        self.directory = (root or directory) / "dp"
        seen = DIRECTORY if root else str(directory / "dp")
        self.state = str(directory / "state")
        before = [*(["--root", str(root)] if root else []), "plugin", "serve"]
        own = ["--kubelet-socket", f"{seen}/kubelet.sock", "--state-dir", "/state" if root else self.state]
        self.log_path = directory / "log"
        env = {**os.environ, "GPUNODE_OUTPUT": "json"}
        words = [*before, *own, *arguments]
        self.process: subprocess.Popen[bytes] | Started
        if program:
            with self.log_path.open("a") as log:
                argv = [sys.executable, *program, *words]
                self.process = subprocess.Popen(argv, env=env, stderr=log, stdout=subprocess.DEVNULL)
        else:
            self.process = start_gpunode(*words, env=env, log=self.log_path)

    def log(self) -> str:
        return self.log_path.read_text()

    def says(self, words: str, seconds: float = 30.0) -> bool:
        return eventually(lambda: words in self.log(), seconds)

    def call(self, resource: str, name: str, request: Any) -> Any:
        """One RPC to the plugin itself, as the kubelet makes it."""
        domain, _, short = resource.partition("/")
        with channel_to(self.directory / f"{domain.partition('.')[0]}-{short}.sock") as channel:
            return server.method(channel, server.DEVICE_PLUGIN, name)(request, timeout=30.0)

    def allocate(self, resource: str, ids: Iterable[str]) -> Any:
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        return self.call(resource, "Allocate", request).container_responses[0]

    def prefer(self, resource: str, available: Iterable[str], size: int) -> list[str]:
        asked = pb.ContainerPreferredAllocationRequest(available_deviceIDs=available, allocation_size=size)
        request = pb.PreferredAllocationRequest(container_requests=[asked])
        return list(self.call(resource, "GetPreferredAllocation", request).container_responses[0].deviceIDs)

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


Start = Callable[..., Serving]


@contextmanager
def kubelet(
    scratch: Path, root: Path | None = None, program: tuple[str, ...] = ()
) -> Iterator[tuple[KubeletStub, Start]]:
    """A kubelet, and a function that starts plugins with it; all of them end. `program` replaces gpunode."""
    directory = DIRECTORY if root else str(scratch / "dp")
    started: list[Serving] = []

    def start(*arguments: str) -> Serving:
        started.append(Serving(scratch, arguments, root, program))
        return started[-1]

    with KubeletStub(Host(root, {}) if root else Host(), directory) as stub:
        try:
            yield stub, start
        finally:
            for serving in started:
                serving.end()
