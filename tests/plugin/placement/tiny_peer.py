"""A minimal device plugin: ``python -m tests.plugin.placement.tiny_peer KUBELET_SOCKET``.

It lists one GPU for each in the stub's scenario, prefers the first ones, and reads health from the
scenario.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from fixtures.stubs import SCENARIO_VARIABLE
from gpunode.daemons.grpc_client import channel_to
from gpunode.plugin.kubelet import server as rpc
from gpunode.plugin.proto import deviceplugin_pb2 as pb


def listed() -> pb.ListAndWatchResponse:
    text = Path(os.environ[SCENARIO_VARIABLE]).read_text()
    replicas = re.search(r"replicas: (\d+)", Path(os.environ["CONFIG_FILE"] or os.devnull).read_text())
    bad = set(re.findall(r"^event .*uuid=(\S+)", text, re.MULTILINE))
    response = pb.ListAndWatchResponse()
    for uuid in re.findall(r"^gpu .*uuid=(\S+)", text, re.MULTILINE):
        for one in [f"{uuid}::{n}" for n in range(int(replicas[1]))] if replicas else [uuid]:
            response.devices.add(ID=one, health="Unhealthy" if uuid in bad else "Healthy")
    return response


def watch(request: pb.Empty, context: grpc.ServicerContext) -> Iterator[pb.ListAndWatchResponse]:
    last = None
    while context.is_active():
        now = listed()
        if now != last:
            yield now
        last = now
        time.sleep(0.02)


def prefer(
    request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
) -> pb.PreferredAllocationResponse:
    (asked,) = request.container_requests
    chosen = dict.fromkeys([*asked.must_include_deviceIDs, *asked.available_deviceIDs])
    answer = pb.ContainerPreferredAllocationResponse(deviceIDs=list(chosen)[: asked.allocation_size])
    return pb.PreferredAllocationResponse(container_responses=[answer])


def main(kubelet: Path) -> None:
    functions: dict[str, rpc.Handler] = {
        "GetDevicePluginOptions": lambda request, context: pb.DevicePluginOptions(),
        "ListAndWatch": watch,
        "GetPreferredAllocation": prefer,
        "Allocate": lambda request, context: pb.AllocateResponse(
            container_responses=[pb.ContainerAllocateResponse()]
        ),
        "PreStartContainer": lambda request, context: pb.PreStartContainerResponse(),
    }
    server = grpc.server(ThreadPoolExecutor(8), handlers=[rpc.handlers(rpc.DEVICE_PLUGIN, functions)])
    server.add_insecure_port(rpc.target(kubelet.with_name("tiny.sock")))
    server.start()
    with channel_to(kubelet) as channel:
        request = pb.RegisterRequest(
            version=rpc.VERSION, endpoint="tiny.sock", resource_name="example.com/gpu"
        )
        rpc.method(channel, rpc.REGISTRATION, "Register")(request, timeout=10.0)
    server.wait_for_termination()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
