"""What NVIDIA's GPU operator has left on this node: its pods' logs and its validator's marks.

Pods are known by the kubelet's log directories, NAMESPACE_POD_UID, which go with the pod. The validator
writes a file for each stage that it has passed, and takes it away when it ends (gpu-operator,
cmd/nvidia-validator).
"""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.facts.device_plugins import POD_LOGS
from gpunode.host import Host

VALIDATIONS = "/run/nvidia/validations"
TOOLKIT = "/usr/local/nvidia/toolkit"  # where its toolkit container installs the runtime
STAGES = ("driver", "toolkit", "cuda", "plugin")
_DRIVER_PODS = ("nvidia-driver-daemonset", "nvidia-gpu-driver-")  # of a ClusterPolicy, of an NVIDIADriver
_PARTS = (
    *("nvidia-operator-validator", "nvidia-container-toolkit-daemonset", *_DRIVER_PODS),
    *("gpu-operator", "nvidia-cuda-validator"),
)
_VALIDATOR = _PARTS[0]
_LOG_BYTES = 16 << 10
_FAILURE = re.compile(
    r"error|fail|fatal|unable|could not|cannot|can't|no such|not found|in use|denied|refus", re.IGNORECASE
)


@dataclass(frozen=True)
class Operator:
    """`pods` are the log directories of its pods, `validators` those of its validator's; `ready` the stages
    that have passed."""

    pods: tuple[str, ...]
    validators: tuple[str, ...]
    ready: tuple[str, ...]

    @property
    def drivers(self) -> tuple[str, ...]:
        """Log directories of the pods that install the driver on this node."""
        return tuple(pod for pod in self.pods if any(part in pod for part in _DRIVER_PODS))

    @property
    def missing(self) -> str:
        """The first stage that hasn't passed; empty if all have."""
        return next((stage for stage in STAGES if stage not in self.ready), "")


def find_operator(host: Host) -> Operator:
    """`Unreadable` where this user may not list the kubelet's logs."""
    pods = tuple(name for name in host.listdir(POD_LOGS) if any(part in name for part in _PARTS))
    done = host.listdir(VALIDATIONS) if pods else ()
    ready = tuple(stage for stage in STAGES if f"{stage}-ready" in done)
    return Operator(pods, tuple(name for name in pods if _VALIDATOR in name), ready)


def driver_failure(host: Host, operator: Operator) -> tuple[str, str] | None:
    """Path of the newest log of a container of the driver's pod, init containers included, and the last line
    in it about a failure, or else its last line; None if there is no such log."""
    last: tuple[str, str] | None = None
    for pod in operator.drivers:
        for container in host.listdir(f"{POD_LOGS}/{pod}"):
            path = _newest(host, f"{POD_LOGS}/{pod}/{container}")
            lines = [line for line in host.read_tail(path, _LOG_BYTES).splitlines() if line] if path else []
            bad = [line for line in lines if _FAILURE.search(line)]
            if bad:
                return path, bad[-1]
            if lines:
                last = path, lines[-1]
    return last


def _newest(host: Host, directory: str) -> str:
    """Path of the log of a container's last start; "" if it has none."""
    numbers = [int(name[:-4]) for name in host.listdir(directory) if name[:-4].isdecimal()]
    return f"{directory}/{max(numbers)}.log" if numbers else ""


def stage_log(host: Host, operator: Operator, stage: str) -> tuple[str, tuple[str, ...], float] | None:
    """The newest log of a stage's container, the end of it, and since when the container is there (seconds
    since the epoch, 0 on a recorded machine); None if it has none yet."""
    for pod in operator.validators:
        place = f"{POD_LOGS}/{pod}/{stage}-validation"
        path = _newest(host, place)
        if path:
            found = host.stat(place)
            since = found.st_mtime if found is not None and host.live else 0.0
            return path, tuple(host.read_tail(path, _LOG_BYTES).splitlines()), since
    return None
