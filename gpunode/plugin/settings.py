"""What `plugin serve` is told, and the names and paths that follow from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpunode.errors import UsageError

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_MAX_DOMAIN = 244  # 253, less what the quota's "requests." takes


@dataclass(frozen=True)
class Settings:
    """Paths are the node's own. Times are seconds.

    `rediscover_seconds` is how often NVML is asked again which GPUs there are; `stream_wait_seconds` is how
    long the kubelet may take from a registration to its ListAndWatch before it is registered with again.
    """

    kubelet_socket: str = "/var/lib/kubelet/device-plugins/kubelet.sock"
    resource_name: str = "nvidia.com/gpu"
    rediscover_seconds: float = 30.0
    stream_wait_seconds: float = 5.0
    probe_seconds: float = 15.0

    def __post_init__(self) -> None:
        if problem := resource_name_problem(self.resource_name):
            raise UsageError(
                f"--resource-name {self.resource_name}: {problem}", hint="for example: nvidia.com/gpu"
            )
        if not self.kubelet_socket.startswith("/"):
            raise UsageError(
                f"--kubelet-socket {self.kubelet_socket}: not an absolute path",
                hint="for example: /var/lib/kubelet/device-plugins/kubelet.sock",
            )
        if not 0.1 <= self.rediscover_seconds <= 86_400:
            raise UsageError(
                f"--rediscover-seconds {self.rediscover_seconds:g}: not between 0.1 and 86400",
                hint="leave it out for every 30 s",
            )

    @property
    def directory(self) -> str:
        """The kubelet's device plugin directory."""
        return str(PurePosixPath(self.kubelet_socket).parent)

    @property
    def endpoint(self) -> str:
        """The base name of the plugin's socket: nvidia-gpu.sock for nvidia.com/gpu."""
        domain, _, name = self.resource_name.partition("/")
        return f"{domain.partition('.')[0]}-{name}.sock"

    @property
    def socket(self) -> str:
        return f"{self.directory}/{self.endpoint}"


def resource_name_problem(name: str) -> str:
    """Why Kubernetes would not take this as an extended resource's name; empty if it would."""
    domain, slash, part = name.partition("/")
    if not slash:
        return "an extended resource is called DOMAIN/NAME"
    if domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
        return "kubernetes.io is reserved"
    if domain.startswith("requests.") or len(domain) > _MAX_DOMAIN or not _DOMAIN.fullmatch(domain):
        return f"{domain!r} is not a domain in lower case"
    if not _NAME.fullmatch(part):
        return f"{part!r} is not a name of at most 63 letters, digits, '-', '_' and '.'"
    return ""
