"""Every option of `plugin serve`, once: flags, variables, config key, kind, what is allowed, help.

The command line, the environment, the config file's schema, the provenance of each value and the table in
docs/device-plugin.md all come from `OPTIONS`. Defaults are those of `plugin.config.settings.Settings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The options of the node's labels: GPU feature discovery's, and where the labels go.
#
# Rows for `options.OPTIONS`. `plugin serve` takes them from the config file and the environment alone, but
# for ``--labels``; `gpunode labels` has them all.

LABELS_PREFIX = "GPUNODE_LABELS_"
SINKS = ("stdout", "file", "node-feature", "node")
OUTPUT_FILE = "/etc/kubernetes/node-feature-discovery/features.d/gfd"
"""GPU feature discovery's default, which NFD reads."""


def _row(field: str, flags: tuple[str, ...], text: str, *more: Any, **rest: Any) -> dict[str, Any]:
    names = ("kind", "key", "variables", "allowed")
    given = dict(zip(names, more, strict=False))
    return {"field": field, "flags": flags, "help": text, "part": "labels", **given, **rest}


ROWS = (
    _row(
        "labels_to",
        ("--labels",),
        "Keep the node's labels as well, there: as gpunode labels --watch does.",
        *("choices", "flags.gpunode.labels", (), SINKS),
        part="",
        live=False,
    ),
    _row(
        "output_file",
        ("--output-file",),
        f"A feature file for Node Feature Discovery; {OUTPUT_FILE} with --to file.",
        *("path", "flags.gfd.outputFile", ("GFD_OUTPUT_FILE",)),
    ),
    _row(
        "use_node_feature_api",
        ("--use-node-feature-api",),
        "As --to node-feature.",
        *("boolean", "flags.useNodeFeatureAPI", ("GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API")),
    ),
    _row(
        "oneshot",
        ("--oneshot",),
        "Once, and no more; false is --watch.",
        *("boolean", "flags.gfd.oneshot", ("GFD_ONESHOT",)),
    ),
    _row(
        "sleep_interval",
        ("--sleep-interval",),
        "With --watch: how often everything is looked at anew; infinite: only when GPUs change.",
        *("hold", "flags.gfd.sleepInterval", ("GFD_SLEEP_INTERVAL",)),
    ),
    _row(
        "no_timestamp",
        ("--no-timestamp",),
        "Leave out when the labels changed last.",
        *("boolean", "flags.gfd.noTimestamp", ("GFD_NO_TIMESTAMP",)),
    ),
    _row(
        "machine_type_file",
        ("--machine-type-file",),
        "Where the machine's product name is read.",
        *("path", "flags.gfd.machineTypeFile", ("GFD_MACHINE_TYPE_FILE",)),
    ),
    _row(
        "firmware",
        ("--firmware",),
        "AMD: the versions of the GPUs' firmware too.",
        *("boolean", "flags.gpunode.firmware"),
    ),
    _row(
        "kubeconfig",
        ("--kubeconfig",),
        "How the API server is reached; kubelet: the kubelet's own. In a pod: its account.",
        *("text", "flags.gpunode.kubeconfig"),
    ),
    _row(
        "kube_context",
        ("--context",),
        "A context of the kubeconfig.",
        *("text", "flags.gpunode.context"),
    ),
    _row(
        "server",
        ("--server",),
        "A kubectl proxy, such as http://127.0.0.1:8001.",
        *("text", "flags.gpunode.server"),
    ),
    _row(
        "namespace",
        ("--namespace",),
        "Where the NodeFeature object lies; the account's own if not given.",
        *("text", "flags.gpunode.namespace", ("NAMESPACE",)),
    ),
    _row(
        "node_name",
        ("--node-name", "--node"),
        "This node's name in the cluster; the machine's if not given.",
        *("text", "flags.gpunode.nodeName", ("NODE_NAME",)),
    ),
    _row(
        "pod_name",
        ("--pod-name",),
        "The pod in which this runs: the NodeFeature object goes with its DaemonSet.",
        *("text", "", ("POD_NAME",)),
    ),
    _row(
        "kube_api_qps",
        ("--kube-api-qps",),
        "Taken for compatibility: there is a request a minute at most.",
        *("text", "", ("KUBE_API_QPS",)),
    ),
    _row(
        "kube_api_burst",
        ("--kube-api-burst",),
        "Taken for compatibility.",
        *("text", "", ("KUBE_API_BURST",)),
    ),
)


PREFIX = "GPUNODE_PLUGIN_SERVE_"


@dataclass(frozen=True)
class Option:
    """`kind` is one of those in values.py; `key` is the dotted path in the config file, empty for none.

    `variables` are those of NVIDIA's plugin, tried in order after our own. What can't change while we run is
    not `live`: it takes a restart. A `part` other than "" is a command of its own: `plugin serve` has no flag
    for it. `known` are the words that mean something where any word is taken.
    """

    field: str
    flags: tuple[str, ...]
    help: str
    kind: str = "text"
    key: str = ""
    variables: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    live: bool = True
    part: str = ""

    @property
    def variable(self) -> str:
        """Our own variable."""
        prefix = LABELS_PREFIX if self.part else PREFIX
        return prefix + self.flags[0].removeprefix("--").upper().replace("-", "_")

    @property
    def takes_many(self) -> bool:
        return self.kind in LISTS


LISTS = ("words", "choices", "integers", "selectors", "xids")
MIG_STRATEGIES = ("none", "single", "mixed")
LIST_STRATEGIES = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")
FEATURES = (
    *("enable-explicit-driver-libraries", "disable-nvsandboxutils", "enable-coherent-annotations"),
    *("disable-multiple-csv-devices", "no-additional-gids-for-device-nodes", "disable-ipc-discoverer"),
)
HOOKS = (
    *("all", "create-symlinks", "enable-cuda-compat", "update-ldcache", "chmod"),
    *("disable-device-node-modification", "update-application-profile"),
)

_NVIDIA = (
    Option(
        "mig_strategy",
        ("--mig-strategy",),
        "What MIG devices are advertised as.",
        *("choice", "flags.migStrategy", ("MIG_STRATEGY",), MIG_STRATEGIES),
    ),
    Option(
        "fail_on_init_error",
        ("--fail-on-init-error",),
        "Taken for compatibility: a missing driver is waited for either way.",
        *("boolean", "flags.failOnInitError", ("FAIL_ON_INIT_ERROR",)),
    ),
    Option(
        "driver_root",
        ("--driver-root", "--nvidia-driver-root"),
        "Where the driver is installed on the node.",
        *("path", "flags.nvidiaDriverRoot", ("NVIDIA_DRIVER_ROOT",)),
    ),
    Option(
        "dev_root",
        ("--dev-root", "--nvidia-dev-root"),
        "Above the node's dev/; the driver root if not given.",
        *("path", "flags.nvidiaDevRoot", ("NVIDIA_DEV_ROOT",)),
    ),
    Option(
        "container_driver_root",
        ("--driver-root-ctr-path", "--container-driver-root"),
        "Where the driver root is mounted, if gpunode itself runs in a container.",
        *("path", "flags.plugin.containerDriverRoot", ("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT")),
        live=False,
    ),
    Option(
        "pass_device_specs",
        ("--pass-device-specs",),
        "Hand out device nodes too, so that containers keep them when cgroups are rewritten.",
        *("boolean", "flags.plugin.passDeviceSpecs", ("PASS_DEVICE_SPECS",)),
    ),
    Option(
        "device_list_strategy",
        ("--device-list-strategy",),
        "How a container's runtime is told its GPUs.",
        *("choices", "flags.plugin.deviceListStrategy", ("DEVICE_LIST_STRATEGY",), LIST_STRATEGIES),
    ),
    Option(
        "device_id_strategy",
        ("--device-id-strategy",),
        "What GPUs are called towards the runtime.",
        *("choice", "flags.plugin.deviceIDStrategy", ("DEVICE_ID_STRATEGY",), ("uuid", "index")),
    ),
    Option(
        "gdrcopy_enabled",
        ("--gdrcopy-enabled",),
        "Give containers GDRCopy's device.",
        *("boolean", "flags.gdrcopyEnabled", ("GDRCOPY_ENABLED",)),
    ),
    Option(
        "gds_enabled",
        ("--gds-enabled",),
        "Give containers GPUDirect Storage's devices.",
        *("boolean", "flags.gdsEnabled", ("GDS_ENABLED",)),
    ),
    Option(
        "mofed_enabled",
        ("--mofed-enabled",),
        "Give containers the InfiniBand devices.",
        *("boolean", "flags.mofedEnabled", ("MOFED_ENABLED",)),
    ),
    Option(
        "cdi_annotation_prefix",
        ("--cdi-annotation-prefix",),
        "What the keys of CDI annotations begin with.",
        *("text", "flags.plugin.cdiAnnotationPrefix", ("CDI_ANNOTATION_PREFIX",)),
    ),
    Option(
        "nvidia_cdi_hook_path",
        ("--nvidia-cdi-hook-path", "--nvidia-ctk-path"),
        "The program on the node that CDI specifications name as their hook.",
        *("path", "flags.plugin.nvidiaCTKPath", ("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH")),
    ),
    Option(
        "mps_root",
        ("--mps-root",),
        "Where the MPS daemons' directories lie on the node; /run/nvidia/mps with --mps.",
        *("path", "flags.mpsRoot", ("MPS_ROOT",)),
        live=False,
    ),
    Option(
        "shared_devices_allocation_policy",
        ("--shared-devices-allocation-policy",),
        "Spread shares over the GPUs, or fill one GPU first.",
        *("choice", "flags.plugin.sharedDevicesAllocationPolicy", ("SHARED_DEVICES_ALLOCATION_POLICY",)),
        allowed=("distributed", "packed"),
    ),
    Option(
        "device_discovery_strategy",
        ("--device-discovery-strategy",),
        "How GPUs are found; vfio, for labels alone: those that are kept for virtual machines.",
        *("choice", "flags.deviceDiscoveryStrategy", ("DEVICE_DISCOVERY_STRATEGY",)),
        allowed=("auto", "nvml", "tegra", "vfio"),
        live=False,
    ),
    Option(
        "imex_channel_ids",
        ("--imex-channel-ids",),
        "The IMEX channels that containers get: none, or 0.",
        *("integers", "imex.channelIDs", ("IMEX_CHANNEL_IDS",)),
    ),
    Option(
        "imex_required",
        ("--imex-required",),
        "Advertise nothing while the IMEX channel's device is missing.",
        *("boolean", "imex.required", ("IMEX_REQUIRED",)),
    ),
    Option(
        "kubelet_socket",
        ("--kubelet-socket",),
        "Where the kubelet listens; empty: serve without registering.",
        *("socket", "flags.gpunode.kubeletSocket", ("KUBELET_SOCKET",)),
        live=False,
    ),
    Option(
        "config_file",
        ("--config-file",),
        "A config file, YAML or JSON; its edits take effect while we run.",
        *("text", "", ("CONFIG_FILE",)),
    ),
    Option(
        "cdi_feature_flags",
        ("--cdi-feature-flags",),
        "Features of the CDI specifications.",
        *("words", "flags.gpunode.cdiFeatureFlags", ("CDI_FEATURE_FLAGS",)),
        known=FEATURES,
    ),
    Option(
        "cdi_disable_hooks",
        ("--cdi-disable-hooks",),
        "Hooks that CDI specifications leave out; all for every one.",
        *("words", "flags.gpunode.cdiDisableHooks", ("CDI_DISABLE_HOOKS",)),
        known=HOOKS,
    ),
)
_OURS = (
    Option(
        "vendor",
        ("--vendor",),
        "Whose GPUs.",
        *("choice", "flags.gpunode.vendor"),
        allowed=("nvidia", "amd"),
        live=False,
    ),
    Option(
        "resource_name",
        ("--resource-name",),
        "What whole GPUs without a naming rule are advertised as; amd.com/gpu with --vendor amd.",
        *("resource", "flags.gpunode.resourceName"),
    ),
    Option(
        "resource_naming_strategy",
        ("--resource-naming-strategy", "--resource_naming_strategy"),
        "AMD: one name for all, or one for each partition type.",
        *("choice", "flags.gpunode.resourceNamingStrategy"),
        allowed=("single", "mixed"),
    ),
    Option(
        "registration",
        ("--registration",),
        "Call on the kubelet, or be found by its plugin watcher.",
        *("choice", "flags.gpunode.registration"),
        allowed=("kubelet", "watcher"),
        live=False,
    ),
    Option(
        "include",
        ("--include",),
        "These GPUs only: index, UUID, PCI address, or glob of the model.",
        *("selectors", "resources.include"),
    ),
    Option(
        "exclude",
        ("--exclude",),
        "Leave these GPUs alone: index, UUID, PCI address, or glob of the model.",
        *("selectors", "resources.exclude"),
    ),
    Option(
        "mps",
        ("--mps",),
        "Run the MPS control daemons that sharing.mps needs in this process.",
        *("boolean", "flags.gpunode.mps"),
        live=False,
    ),
    Option(
        "health_disable",
        ("--health-disable",),
        "XIDs that don't make a GPU unhealthy; all or xids for every one, and for ECC errors and the like.",
        *("xids", "health.disable", ("DP_DISABLE_HEALTHCHECKS",)),
    ),
    Option(
        "health_enable",
        ("--health-enable",),
        "XIDs that make a GPU unhealthy, whatever else is said of them; all for every one.",
        *("xids", "health.enable", ("DP_ENABLE_HEALTHCHECKS",)),
    ),
    Option(
        "health_hold_down",
        ("--health-hold-down",),
        "How long the cause must be gone before a GPU is healthy again; infinite: never.",
        *("hold", "health.holdDown"),
    ),
    Option(
        "health_poll_interval",
        ("--health-poll-interval",),
        "How often each GPU is asked for its condition.",
        *("interval", "health.pollInterval"),
    ),
    Option(
        "rediscover_seconds",
        ("--rediscover-seconds",),
        "How often NVML is asked which GPUs there are.",
        *("seconds", "flags.gpunode.rediscoverSeconds"),
        live=False,
    ),
    Option(
        "listen",
        ("--listen",),
        "Serve /metrics, /healthz and /readyz on this HOST:PORT; port 0: any free one, which the log names.",
        *("address", "flags.gpunode.listen"),
        live=False,
    ),
    Option(
        "state_dir",
        ("--state-dir",),
        "What outlives a restart: the status file and health memory.",
        *("path", "flags.gpunode.stateDir"),
        live=False,
    ),
    Option(
        "pod_resources_socket",
        ("--pod-resources-socket",),
        "Where the kubelet tells which pod holds which GPU.",
        *("socket", "flags.gpunode.podResourcesSocket"),
        live=False,
    ),
    Option(
        "simulate",
        ("--simulate",),
        "A simulated node instead of this one; see docs/simulate.md.",
        *("text", "flags.gpunode.simulate"),
        live=False,
    ),
    Option(
        "lenient",
        ("--lenient",),
        "Take unknown keys of the config file, and what is no XID, for warnings.",
        "boolean",
    ),
)
_LABELS = tuple(Option(**row) for row in ROWS)
OPTIONS = _NVIDIA + _OURS + _LABELS
BY_FIELD = {option.field: option for option in OPTIONS}
METAVARS = {
    **{"boolean": "BOOLEAN", "path": "PATH", "socket": "PATH", "resource": "NAME", "seconds": "SECONDS"},
    **{
        "hold": "DURATION",
        "interval": "DURATION",
        "address": "HOST:PORT",
        "integers": "N,...",
        "xids": "XID,...",
    },
    **{"selectors": "GPU,...", "words": "NAME,..."},
}


def metavar(option: Option) -> str:
    """What stands for the value in help and tables."""
    words = "|".join(option.allowed)
    if option.kind == "choices":
        return f"{words},..."
    return words or METAVARS.get(option.kind, "TEXT")
