"""Settings of `plugin serve`: one frozen value made from flags, environment and config file (see config/).

Field names follow NVIDIA's flags; docs/device-plugin.md lists flag, variable and config key of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

from gpunode.host import PLUGIN_STATE

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_MAX_DOMAIN = 244  # 253, less the "requests." of quotas
_VENDORS = ("nvidia.com", "amd.com")
SOCKET_BYTES = 107  # unix(7): sun_path of a socket without the NUL at its end
_MAX_SOCKET = SOCKET_BYTES - len("/var/lib/kubelet/plugins_registry/@01234567")
MPS_ROOT = "/run/nvidia/mps"
KUBELET_SOCKET = "/var/lib/kubelet/device-plugins/kubelet.sock"
ALL_XIDS = -1
"""Stands for every XID in `HealthSettings`."""


class NameRule(NamedTuple):
    """Units with a product name (`kind` gpu) or profile (`kind` mig) that matches get this resource name.

    Only ``*`` is special in `pattern`. Rules are tried in order; the first match wins.
    """

    kind: str
    pattern: str
    name: str


class SharedResource(NamedTuple):
    """One entry of a sharing section: which units of a resource are shared, how often, under which name.

    `devices` None is all of them; a number is that many, the first ones by index; else selectors, see
    `selects`. `rename` is empty for the resource's own name (with rename_by_default plus ``.shared``).
    """

    name: str
    replicas: int
    rename: str = ""
    devices: int | tuple[str, ...] | None = None


class Sharing(NamedTuple):
    """`strategy` is time-slicing or mps."""

    strategy: str
    resources: tuple[SharedResource, ...]
    rename_by_default: bool = False
    fail_requests_greater_than_one: bool = False


class HealthSettings(NamedTuple):
    """Which events count. Numbers are XIDs; `ALL_XIDS` in a set means all of them.

    An XID in `enabled` always counts; one in `disabled` doesn't; the others follow their class in
    facts/xids.py. `hold_seconds` is how long the cause must be gone before a device returns.
    """

    disabled: frozenset[int] = frozenset()
    enabled: frozenset[int] = frozenset()
    hold_seconds: float = 60.0
    poll_seconds: float = 10.0


class LabelSettings(NamedTuple):
    """The node's labels; see labels/. Names are those of GPU feature discovery's flags.

    `to` are sinks: stdout, file, node-feature, node; if empty, other options decide. `sleep_seconds` may be
    infinite.
    """

    to: tuple[str, ...] = ()
    oneshot: bool = True
    no_timestamp: bool = False
    sleep_seconds: float = 60.0
    output_file: str = ""
    machine_type_file: str = "/sys/class/dmi/id/product_name"
    use_node_feature_api: bool = False
    firmware: bool = False  # AMD's
    kubeconfig: str = ""
    kube_context: str = ""
    server: str = ""
    namespace: str = ""
    node_name: str = ""
    pod_name: str = ""


@dataclass(frozen=True)
class Settings:
    """Paths are the node's own; times are seconds. Empty strings mean "not given" unless said otherwise.

    `container_driver_root` is where `driver_root` is mounted in the plugin's own container, if it runs in
    one. An empty `dev_root` is the driver root. `include` and `exclude` are selectors (index, UUID, PCI
    address, glob of the model); an empty `include` is every GPU. `resource_name` is the name of whole GPUs
    without a rule.
    """

    vendor: str = "nvidia"
    kubelet_socket: str = KUBELET_SOCKET  # empty: serve, don't register
    registration: str = "kubelet"  # or watcher
    resource_name: str = "nvidia.com/gpu"
    mig_strategy: str = "none"  # single, mixed
    resource_naming_strategy: str = "single"  # mixed; AMD's
    fail_on_init_error: bool = True
    driver_root: str = "/"
    dev_root: str = ""
    container_driver_root: str = "/driver-root"
    pass_device_specs: bool = False
    device_list_strategy: tuple[str, ...] = ("envvar",)  # volume-mounts, cdi-annotations, cdi-cri
    device_id_strategy: str = "uuid"  # index
    gdrcopy_enabled: bool = False
    gds_enabled: bool = False
    mofed_enabled: bool = False
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    nvidia_cdi_hook_path: str = "/usr/bin/nvidia-ctk"
    cdi_feature_flags: tuple[str, ...] = ()
    cdi_disable_hooks: tuple[str, ...] = ()
    mps_root: str = ""
    mps: bool = False  # own the control daemons in this process
    shared_devices_allocation_policy: str = "distributed"  # packed
    device_discovery_strategy: str = "auto"  # nvml, tegra; vfio for labels
    imex_channel_ids: tuple[int, ...] = ()
    imex_required: bool = False
    config_file: str = ""
    rules: tuple[NameRule, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    sharing: Sharing | None = None
    health: HealthSettings = HealthSettings()
    labels: LabelSettings = LabelSettings()
    simulate: str = ""
    log_format: str = "text"  # json
    listen: str = ""  # HOST:PORT of /metrics, /healthz and /readyz; empty: none
    state_dir: str = PLUGIN_STATE
    pod_resources_socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    rediscover_seconds: float = 30.0
    stream_wait_seconds: float = 5.0
    probe_seconds: float = 15.0

    @property
    def shares_by_mps(self) -> bool:
        """Whether `sharing` is MPS's."""
        return self.sharing is not None and self.sharing.strategy == "mps"

    @property
    def directory(self) -> str:
        """The directory of the plugin's sockets: the kubelet's device plugin directory."""
        return str(PurePosixPath(self.kubelet_socket or KUBELET_SOCKET).parent)

    def endpoint(self, resource: str) -> str:
        """The base name of a resource's socket: nvidia-gpu.sock for nvidia.com/gpu, as in other plugins.

        Other domains are written in full, before a character that no name contains: a config file may have
        both example.com/gpu and example.org/gpu. A name that is too long for a path is shortened.
        """
        domain, _, name = resource.partition("/")
        first = domain.partition(".")[0]
        plain = f"{first}-{name}.sock" if domain in _VENDORS else f"{domain}+{name}.sock"
        if len(plain) <= _MAX_SOCKET:
            return plain
        from zlib import crc32

        return f"{first[:16]}-{name[:24]}-{crc32(resource.encode()):08x}.sock"

    def socket(self, resource: str) -> str:
        return f"{self.directory}/{self.endpoint(resource)}"


def resource_name_problem(name: str) -> str:
    """Why Kubernetes would refuse this as an extended resource's name; empty if it wouldn't."""
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


def pod_resources_socket(kubelet_socket: str, value: str) -> str:
    """The path of the PodResources socket: as configured, or, for a kubelet in another directory, beside its
    other sockets."""
    if value != Settings.pod_resources_socket or kubelet_socket in ("", KUBELET_SOCKET):
        return value
    return str(PurePosixPath(kubelet_socket).parent.parent / "pod-resources/kubelet.sock")
