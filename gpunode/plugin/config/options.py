"""The options of `plugin serve` and `gpunode labels`, one row each: flags, variables, file key, values, help.

The command line, the environment, the config file's schema, the origin of each value and the tables in the
documentation all come from `OPTIONS`. Defaults are those of `plugin.config.settings.Settings`.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "GPUNODE_PLUGIN_SERVE_"
LABELS_PREFIX = "GPUNODE_LABELS_"
OUTPUT_FILE = "/etc/kubernetes/node-feature-discovery/features.d/gfd"
"""GPU feature discovery's default, which NFD reads."""
LISTS = ("words", "choices", "integers", "selectors", "xids")
SINKS = ("stdout", "file", "node-feature", "node")
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


@dataclass(frozen=True)
class Option:
    """`kind` is one of those in values.py; `key` is the dotted path in the config file, empty for none.

    `variables` are those of NVIDIA's plugin, tried in order after our own. An option that is not `live` needs
    a restart. `part` is the only command with a flag for the option; `plugin serve` accepts it in the file
    and the environment. `known` are the words with a meaning where any word is accepted. `setting` is the
    dotted path in `Settings`, where it isn't `field`.
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
    setting: str = ""

    @property
    def variable(self) -> str:
        """Our own variable."""
        prefix = LABELS_PREFIX if self.part else PREFIX
        return prefix + self.flags[0].removeprefix("--").upper().replace("-", "_")

    @property
    def path(self) -> str:
        """The option's dotted path in `Settings`."""
        return self.setting or self.field

    @property
    def takes_many(self) -> bool:
        return self.kind in LISTS


OPTIONS = (
    # --- NVIDIA's plugin ---
    Option(
        "mig_strategy",
        ("--mig-strategy",),
        "How MIG devices are advertised: as GPUs (single), by profile (mixed) or not.",
        kind="choice",
        key="flags.migStrategy",
        variables=("MIG_STRATEGY",),
        allowed=MIG_STRATEGIES,
    ),
    Option(
        "fail_on_init_error",
        ("--fail-on-init-error",),
        "Accepted for compatibility; the plugin always waits for a missing driver.",
        kind="boolean",
        key="flags.failOnInitError",
        variables=("FAIL_ON_INIT_ERROR",),
    ),
    Option(
        "driver_root",
        ("--driver-root", "--nvidia-driver-root"),
        "Directory of the driver on the node.",
        kind="path",
        key="flags.nvidiaDriverRoot",
        variables=("NVIDIA_DRIVER_ROOT",),
    ),
    Option(
        "dev_root",
        ("--dev-root", "--nvidia-dev-root"),
        "Directory that contains dev/; the driver root by default.",
        kind="path",
        key="flags.nvidiaDevRoot",
        variables=("NVIDIA_DEV_ROOT",),
    ),
    Option(
        "container_driver_root",
        ("--driver-root-ctr-path", "--container-driver-root"),
        "Mount point of the driver root if gpunode runs in a container.",
        kind="path",
        key="flags.plugin.containerDriverRoot",
        variables=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        live=False,
    ),
    Option(
        "pass_device_specs",
        ("--pass-device-specs",),
        "Also pass device nodes, so that containers keep them after cgroup updates.",
        kind="boolean",
        key="flags.plugin.passDeviceSpecs",
        variables=("PASS_DEVICE_SPECS",),
    ),
    Option(
        "device_list_strategy",
        ("--device-list-strategy",),
        "How GPUs are passed to the container runtime.",
        kind="choices",
        key="flags.plugin.deviceListStrategy",
        variables=("DEVICE_LIST_STRATEGY",),
        allowed=LIST_STRATEGIES,
    ),
    Option(
        "device_id_strategy",
        ("--device-id-strategy",),
        "How GPUs are identified to the runtime.",
        kind="choice",
        key="flags.plugin.deviceIDStrategy",
        variables=("DEVICE_ID_STRATEGY",),
        allowed=("uuid", "index"),
    ),
    Option(
        "gdrcopy_enabled",
        ("--gdrcopy-enabled",),
        "Pass the GDRCopy device to containers.",
        kind="boolean",
        key="flags.gdrcopyEnabled",
        variables=("GDRCOPY_ENABLED",),
    ),
    Option(
        "gds_enabled",
        ("--gds-enabled",),
        "Pass the GPUDirect Storage devices to containers.",
        kind="boolean",
        key="flags.gdsEnabled",
        variables=("GDS_ENABLED",),
    ),
    Option(
        "mofed_enabled",
        ("--mofed-enabled",),
        "Pass the InfiniBand devices to containers.",
        kind="boolean",
        key="flags.mofedEnabled",
        variables=("MOFED_ENABLED",),
    ),
    Option(
        "cdi_annotation_prefix",
        ("--cdi-annotation-prefix",),
        "Prefix of the keys of CDI annotations.",
        key="flags.plugin.cdiAnnotationPrefix",
        variables=("CDI_ANNOTATION_PREFIX",),
    ),
    Option(
        "nvidia_cdi_hook_path",
        ("--nvidia-cdi-hook-path", "--nvidia-ctk-path"),
        "Path of the hook program in CDI specifications.",
        kind="path",
        key="flags.plugin.nvidiaCTKPath",
        variables=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
    ),
    Option(
        "mps_root",
        ("--mps-root",),
        "Directory of the MPS daemons; /run/nvidia/mps with --mps.",
        kind="path",
        key="flags.mpsRoot",
        variables=("MPS_ROOT",),
        live=False,
    ),
    Option(
        "shared_devices_allocation_policy",
        ("--shared-devices-allocation-policy",),
        "Distribute shares over the GPUs, or fill one GPU first.",
        kind="choice",
        key="flags.plugin.sharedDevicesAllocationPolicy",
        variables=("SHARED_DEVICES_ALLOCATION_POLICY",),
        allowed=("distributed", "packed"),
    ),
    Option(
        "device_discovery_strategy",
        ("--device-discovery-strategy",),
        "How GPUs are discovered; vfio (labels only): GPUs reserved for virtual machines.",
        kind="choice",
        key="flags.deviceDiscoveryStrategy",
        variables=("DEVICE_DISCOVERY_STRATEGY",),
        allowed=("auto", "nvml", "tegra", "vfio"),
        live=False,
    ),
    Option(
        "imex_channel_ids",
        ("--imex-channel-ids",),
        "IMEX channels passed to containers: none, or 0.",
        kind="integers",
        key="imex.channelIDs",
        variables=("IMEX_CHANNEL_IDS",),
    ),
    Option(
        "imex_required",
        ("--imex-required",),
        "Advertise nothing while the IMEX channel's device is missing.",
        kind="boolean",
        key="imex.required",
        variables=("IMEX_REQUIRED",),
    ),
    Option(
        "kubelet_socket",
        ("--kubelet-socket",),
        "Socket of the kubelet; empty: serve without registration.",
        kind="socket",
        key="flags.gpunode.kubeletSocket",
        variables=("KUBELET_SOCKET",),
        live=False,
    ),
    Option(
        "config_file",
        ("--config-file",),
        "Configuration file, YAML or JSON; reloaded when it changes.",
        variables=("CONFIG_FILE",),
    ),
    Option(
        "cdi_feature_flags",
        ("--cdi-feature-flags",),
        "Features of the CDI specifications.",
        kind="words",
        key="flags.gpunode.cdiFeatureFlags",
        variables=("CDI_FEATURE_FLAGS",),
        known=FEATURES,
    ),
    Option(
        "cdi_disable_hooks",
        ("--cdi-disable-hooks",),
        "Hooks omitted from CDI specifications; all omits every hook.",
        kind="words",
        key="flags.gpunode.cdiDisableHooks",
        variables=("CDI_DISABLE_HOOKS",),
        known=HOOKS,
    ),
    # --- gpunode's own ---
    Option(
        "vendor",
        ("--vendor",),
        "GPU vendor: nvidia or amd.",
        kind="choice",
        key="flags.gpunode.vendor",
        allowed=("nvidia", "amd"),
        live=False,
    ),
    Option(
        "resource_name",
        ("--resource-name",),
        "Resource name of whole GPUs; amd.com/gpu with --vendor amd.",
        kind="resource",
        key="flags.gpunode.resourceName",
    ),
    Option(
        "resource_naming_strategy",
        ("--resource-naming-strategy", "--resource_naming_strategy"),
        "AMD: one resource name for all GPUs, or one per partition type.",
        kind="choice",
        key="flags.gpunode.resourceNamingStrategy",
        allowed=("single", "mixed"),
    ),
    Option(
        "registration",
        ("--registration",),
        "Register with the kubelet, or through its plugin watcher.",
        kind="choice",
        key="flags.gpunode.registration",
        allowed=("kubelet", "watcher"),
        live=False,
    ),
    Option(
        "include",
        ("--include",),
        "Serve only these GPUs: index, UUID, PCI address, or glob of the model.",
        kind="selectors",
        key="resources.include",
    ),
    Option(
        "exclude",
        ("--exclude",),
        "Ignore these GPUs: index, UUID, PCI address, or glob of the model.",
        kind="selectors",
        key="resources.exclude",
    ),
    Option(
        "mps",
        ("--mps",),
        "Run the MPS control daemons that sharing.mps requires.",
        kind="boolean",
        key="flags.gpunode.mps",
        live=False,
    ),
    Option(
        "health_disable",
        ("--health-disable",),
        "XIDs that don't make a GPU unhealthy; xids: every XID; all: every error.",
        kind="xids",
        key="health.disable",
        variables=("DP_DISABLE_HEALTHCHECKS",),
        setting="health.disabled",
    ),
    Option(
        "health_enable",
        ("--health-enable",),
        "XIDs that always make a GPU unhealthy; all: every XID.",
        kind="xids",
        key="health.enable",
        variables=("DP_ENABLE_HEALTHCHECKS",),
        setting="health.enabled",
    ),
    Option(
        "health_hold_down",
        ("--health-hold-down",),
        "How long a GPU stays unhealthy after its last error; infinite: until a restart.",
        kind="hold",
        key="health.holdDown",
        setting="health.hold_seconds",
    ),
    Option(
        "health_poll_interval",
        ("--health-poll-interval",),
        "Interval of health checks.",
        kind="interval",
        key="health.pollInterval",
        setting="health.poll_seconds",
    ),
    Option(
        "rediscover_seconds",
        ("--rediscover-seconds",),
        "Interval of GPU discovery.",
        kind="seconds",
        key="flags.gpunode.rediscoverSeconds",
        live=False,
    ),
    Option(
        "log_format",
        ("--log-format",),
        "Format of the log on stderr: key=value text, or one JSON object a line.",
        kind="choice",
        key="flags.gpunode.logFormat",
        allowed=("text", "json"),
        live=False,
    ),
    Option(
        "listen",
        ("--listen",),
        "Serve /metrics, /healthz and /readyz on this address; port 0 selects a free port.",
        kind="address",
        key="flags.gpunode.listen",
        live=False,
    ),
    Option(
        "state_dir",
        ("--state-dir",),
        "Directory of the status file and the health state.",
        kind="path",
        key="flags.gpunode.stateDir",
        live=False,
    ),
    Option(
        "pod_resources_socket",
        ("--pod-resources-socket",),
        "Socket of the kubelet's pod resources API.",
        kind="socket",
        key="flags.gpunode.podResourcesSocket",
        live=False,
    ),
    Option(
        "simulate",
        ("--simulate",),
        "Serve simulated GPUs; see docs/simulate.md.",
        key="flags.gpunode.simulate",
        live=False,
    ),
    Option(
        "lenient",
        ("--lenient",),
        "Report unknown keys and invalid XIDs as warnings.",
        kind="boolean",
    ),
    # --- labels: GPU feature discovery's, and the destinations of labels; flags of `gpunode labels` ---
    Option(
        "labels_to",
        ("--labels",),
        "Also publish the node's labels to these destinations.",
        kind="choices",
        key="flags.gpunode.labels",
        allowed=SINKS,
        live=False,
        setting="labels.to",
    ),
    Option(
        "output_file",
        ("--output-file",),
        f"A feature file for Node Feature Discovery; {OUTPUT_FILE} with --to file.",
        kind="path",
        key="flags.gfd.outputFile",
        variables=("GFD_OUTPUT_FILE",),
        part="labels",
        setting="labels.output_file",
    ),
    Option(
        "use_node_feature_api",
        ("--use-node-feature-api",),
        "Same as --to node-feature.",
        kind="boolean",
        key="flags.useNodeFeatureAPI",
        variables=("GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API"),
        part="labels",
        setting="labels.use_node_feature_api",
    ),
    Option(
        "oneshot",
        ("--oneshot",),
        "Publish the labels once; false: same as --watch.",
        kind="boolean",
        key="flags.gfd.oneshot",
        variables=("GFD_ONESHOT",),
        part="labels",
        setting="labels.oneshot",
    ),
    Option(
        "sleep_interval",
        ("--sleep-interval",),
        "With --watch, update interval; infinite: only when GPUs change.",
        kind="hold",
        key="flags.gfd.sleepInterval",
        variables=("GFD_SLEEP_INTERVAL",),
        part="labels",
        setting="labels.sleep_seconds",
    ),
    Option(
        "no_timestamp",
        ("--no-timestamp",),
        "Omit the timestamp label.",
        kind="boolean",
        key="flags.gfd.noTimestamp",
        variables=("GFD_NO_TIMESTAMP",),
        part="labels",
        setting="labels.no_timestamp",
    ),
    Option(
        "machine_type_file",
        ("--machine-type-file",),
        "File that contains the machine's product name.",
        kind="path",
        key="flags.gfd.machineTypeFile",
        variables=("GFD_MACHINE_TYPE_FILE",),
        part="labels",
        setting="labels.machine_type_file",
    ),
    Option(
        "firmware",
        ("--firmware",),
        "AMD: add labels for firmware versions.",
        kind="boolean",
        key="flags.gpunode.firmware",
        part="labels",
        setting="labels.firmware",
    ),
    Option(
        "kubeconfig",
        ("--kubeconfig",),
        "Kubeconfig file; kubelet uses the kubelet's. Default in a pod: its account.",
        key="flags.gpunode.kubeconfig",
        part="labels",
        setting="labels.kubeconfig",
    ),
    Option(
        "kube_context",
        ("--context",),
        "Kubeconfig context to use.",
        key="flags.gpunode.context",
        part="labels",
        setting="labels.kube_context",
    ),
    Option(
        "server",
        ("--server",),
        "URL of a kubectl proxy, such as http://127.0.0.1:8001.",
        key="flags.gpunode.server",
        part="labels",
        setting="labels.server",
    ),
    Option(
        "namespace",
        ("--namespace",),
        "Namespace of the NodeFeature object; the account's by default.",
        key="flags.gpunode.namespace",
        variables=("NAMESPACE",),
        part="labels",
        setting="labels.namespace",
    ),
    Option(
        "node_name",
        ("--node-name", "--node"),
        "Name of the Node; the host name by default.",
        key="flags.gpunode.nodeName",
        variables=("NODE_NAME",),
        part="labels",
        setting="labels.node_name",
    ),
    Option(
        "pod_name",
        ("--pod-name",),
        "Name of this pod, so that its DaemonSet owns the NodeFeature object.",
        variables=("POD_NAME",),
        part="labels",
        setting="labels.pod_name",
    ),
    Option(
        "kube_api_qps",
        ("--kube-api-qps",),
        "Accepted for compatibility and ignored.",
        variables=("KUBE_API_QPS",),
        part="labels",
    ),
    Option(
        "kube_api_burst",
        ("--kube-api-burst",),
        "Accepted for compatibility and ignored.",
        variables=("KUBE_API_BURST",),
        part="labels",
    ),
)
BY_FIELD = {option.field: option for option in OPTIONS}
METAVARS = {
    **{
        "boolean": "[true|false]",
        "path": "PATH",
        "socket": "PATH",
        "resource": "NAME",
        "seconds": "DURATION",
    },
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
    """The placeholder for the value in help and tables."""
    words = "|".join(option.allowed)
    if option.kind == "choices":
        return f"{words},..."
    return words or METAVARS.get(option.kind, "TEXT")
