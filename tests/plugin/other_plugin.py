"""Another device plugin, as its own process that tests can kill.

`python -m tests.plugin.other_plugin DIRECTORY SOCKET RESOURCE ID,...` behaves as most plugins do: it replaces
any file with the name of its socket, registers, and prints a line. It ends only with SIGKILL.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc

from gpunode.daemons.grpc_client import channel_to
from gpunode.plugin.kubelet import server as rpc
from gpunode.plugin.proto import deviceplugin_pb2 as pb


@contextmanager
def other_plugin(directory: Path, socket: str, resource: str, *ids: str) -> Iterator[subprocess.Popen[str]]:
    """Registered when it is yielded; killed at the end, which leaves its socket."""
    command = [sys.executable, "-m", "tests.plugin.other_plugin", str(directory), socket, resource]
    with subprocess.Popen([*command, ",".join(ids)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "registered\n"
            yield process
        finally:
            process.kill()


def main(directory: str, socket: str, resource: str, ids: str) -> None:
    forever = Event()

    def watch(request: Any, context: Any) -> Iterator[pb.ListAndWatchResponse]:
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID=one, health="Healthy") for one in ids.split(",")])
        forever.wait()

    functions: dict[str, rpc.Handler] = dict.fromkeys(rpc.DEVICE_PLUGIN.methods, lambda *_: pb.Empty())
    functions |= {"ListAndWatch": watch, "GetDevicePluginOptions": lambda *_: pb.DevicePluginOptions()}
    server = grpc.server(ThreadPoolExecutor(4), handlers=[rpc.handlers(rpc.DEVICE_PLUGIN, functions)])
    bound = Path(directory, f".{socket}")
    server.add_insecure_port(rpc.target(bound))
    server.start()
    bound.rename(Path(directory, socket))
    with channel_to(Path(directory, "kubelet.sock")) as channel:
        request = pb.RegisterRequest(version=rpc.VERSION, endpoint=socket, resource_name=resource)
        rpc.method(channel, rpc.REGISTRATION, "Register")(request, timeout=30.0)
    print("registered", flush=True)
    forever.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
