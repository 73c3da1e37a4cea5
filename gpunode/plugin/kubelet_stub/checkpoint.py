"""The kubelet's file of what it gave to whom, ``kubelet_internal_checkpoint``."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpunode.host import Host
from gpunode.plugin.kubelet_stub.allocations import Held

NAME = "kubelet_internal_checkpoint"
NO_NUMA_NODE = -1


def write(
    host: Host,
    directory: str,
    held: Sequence[Held],
    healthy: Mapping[str, Iterable[str]],
    numa: Mapping[str, Mapping[str, int]],
) -> None:
    """Put it beside the sockets. `numa` is each resource's NUMA node by device."""
    data = {
        "PodDeviceEntries": [_entry(one, numa.get(one.resource, {})) for one in held] or None,
        "RegisteredDevices": {name: sorted(ids) for name, ids in healthy.items()},
    }
    # the real checksum is a hash of Go's own notation of the data; nobody but the kubelet compares it
    document = {"Data": data, "Checksum": binascii.crc32(json.dumps(data, sort_keys=True).encode())}
    path = host.path(f"{directory}/{NAME}")
    new = path.with_name(f".{NAME}.new")  # not made durable: a test's kubelet writes it thousands of times
    new.write_text(json.dumps(document))
    new.replace(path)


def read(host: Host, directory: str) -> list[Held]:
    """What containers hold; nothing if there is no file."""
    text = host.read_text(f"{directory}/{NAME}")
    entries = (json.loads(text)["Data"]["PodDeviceEntries"] or ()) if text else ()
    return [
        Held(
            entry["PodUID"],
            entry["ContainerName"],
            entry["ResourceName"],
            tuple(sorted(device for ids in entry["DeviceIDs"].values() for device in ids)),
            base64.b64decode(entry["AllocResp"]),
        )
        for entry in entries
    ]


def _entry(held: Held, numa: Mapping[str, int]) -> dict[str, Any]:
    by_node: dict[str, list[str]] = {}
    for device in held.ids:
        by_node.setdefault(str(numa.get(device, NO_NUMA_NODE)), []).append(device)
    return {
        "PodUID": held.pod,
        "ContainerName": held.container,
        "ResourceName": held.resource,
        "DeviceIDs": by_node,
        "AllocResp": base64.b64encode(held.response).decode(),
    }
