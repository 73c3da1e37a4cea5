"""The kubelet's own memory of devices, a file: what it could hand out and which pods hold what.

``kubelet_internal_checkpoint`` in the device plugin directory, JSON with a checksum (Kubernetes,
pkg/kubelet/cm/devicemanager/checkpoint). It knows pods by UID only; the kubelet's log directories, called
NAMESPACE_NAME_UID, give their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpunode.daemons.pod_resources import Holding
from gpunode.dataclass import dataclass, field
from gpunode.errors import ConfigError
from gpunode.host import Host

NAME = "kubelet_internal_checkpoint"
_LOGS = "/var/log/pods"


@dataclass(frozen=True)
class Checkpoint:
    """`healthy` is what the kubelet last counted as allocatable, by resource.

    `holdings` may include pods that have ended: the kubelet forgets those when it next hands something out.
    """

    healthy: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    holdings: tuple[Holding, ...] = ()


def read_checkpoint(host: Host, directory: str) -> Checkpoint | None:
    """None if there is no such file. `Unreadable`, or `ConfigError` if it isn't what a kubelet writes."""
    path = f"{directory}/{NAME}"
    text = host.read_text(path)
    if text is None:
        return None
    try:
        data = json.loads(text)["Data"]
        registered = {
            str(name): tuple(sorted(_strings(ids)))
            for name, ids in (data.get("RegisteredDevices") or {}).items()
        }
        entries = tuple(_entry(item) for item in data.get("PodDeviceEntries") or ())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no kubelet's checkpoint: {error!r}", hint="the kubelet writes it anew by itself"
        ) from error
    return Checkpoint(registered, _named(host, entries))


def _entry(item: Mapping[str, Any]) -> Holding:
    """DeviceIDs is NUMA node to ids since Kubernetes 1.20, and was a plain list before."""
    ids = item.get("DeviceIDs") or ()
    if isinstance(ids, Mapping):
        ids = [one for group in ids.values() for one in group or ()]
    return Holding(
        "",
        "",
        str(item["ContainerName"]),
        str(item["ResourceName"]),
        tuple(sorted(_strings(ids))),
        str(item["PodUID"]),
    )


def _strings(ids: Any) -> list[str]:
    if not isinstance(ids, list | tuple) or not all(isinstance(one, str) for one in ids):
        raise TypeError("device ids that are no strings")
    return list(ids)


def _named(host: Host, entries: tuple[Holding, ...]) -> tuple[Holding, ...]:
    """With namespace and name of the pods whose logs are here."""
    if not entries:
        return entries
    known = {}
    for name in host.listdir(_LOGS):
        namespace, _, rest = name.partition("_")
        pod, _, uid = rest.rpartition("_")
        known[uid] = (namespace, pod)
    found = []
    for one in entries:
        namespace, pod = known.get(one.pod_uid, ("", ""))
        found.append(Holding(namespace, pod, one.container, one.resource, one.ids, one.pod_uid))
    return tuple(found)
