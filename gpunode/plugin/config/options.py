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
    a restart. `part` is the command that alone has a flag for the option; `plugin serve` takes the file and
    the environment. `known` are the words that mean something where any word is accepted. `setting` is the
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
        """Where the value goes: a dotted path in `Settings`."""
        return self.setting or self.field

    @property
    def takes_many(self) -> bool:
        return self.kind in LISTS


OPTIONS = (
    # --- NVIDIA's plugin ---
    Option(
        "mig_strategy",
        ("--mig-strategy",),
        "What MIG devices are advertised as.",
        kind="choice",
        key="flags.migStrategy",
        variables=("MIG_STRATEGY",),
        allowed=MIG_STRATEGIES,
    ),
    Option(
        "fail_on_init_error",
        ("--fail-on-init-error",),
        "Taken for compatibility: a missing driver is waited for either way.",
        kind="boolean",
        key="flags.failOnInitError",
        variables=("FAIL_ON_INIT_ERROR",),
    ),
    Option(
        "driver_root",
        ("--driver-root", "--nvidia-driver-root"),
        "Where the driver is installed on the node.",
        kind="path",
        key="flags.nvidiaDriverRoot",
        variables=("NVIDIA_DRIVER_ROOT",),
    ),
    Option(
        "dev_root",
        ("--dev-root", "--nvidia-dev-root"),
        "Above the node's dev/; the driver root if not given.",
        kind="path",
        key="flags.nvidiaDevRoot",
        variables=("NVIDIA_DEV_ROOT",),
    ),
    Option(
        "container_driver_root",
        ("--driver-root-ctr-path", "--container-driver-root"),
        "Where the driver root is mounted, if gpunode itself runs in a container.",
        kind="path",
        key="flags.plugin.containerDriverRoot",
        variables=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        live=False,
    ),
    Option(
        "pass_device_specs",
        ("--pass-device-specs",),
        "Hand out device nodes too, so that containers keep them when cgroups are rewritten.",
        kind="boolean",
        key="flags.plugin.passDeviceSpecs",
        variables=("PASS_DEVICE_SPECS",),
    ),
    Option(
        "device_list_strategy",
        ("--device-list-strategy",),
        "How a container's runtime is told its GPUs.",
        kind="choices",
        key="flags.plugin.deviceListStrategy",
        variables=("DEVICE_LIST_STRATEGY",),
        allowed=LIST_STRATEGIES,
    ),
    Option(
        "device_id_strategy",
        ("--device-id-strategy",),
        "What GPUs are called towards the runtime.",
        kind="choice",
        key="flags.plugin.deviceIDStrategy",
        variables=("DEVICE_ID_STRATEGY",),
        allowed=("uuid", "index"),
    ),
    Option(
        "gdrcopy_enabled",
        ("--gdrcopy-enabled",),
        "Give containers GDRCopy's device.",
        kind="boolean",
        key="flags.gdrcopyEnabled",
        variables=("GDRCOPY_ENABLED",),
    ),
    Option(
        "gds_enabled",
        ("--gds-enabled",),
        "Give containers GPUDirect Storage's devices.",
        kind="boolean",
        key="flags.gdsEnabled",
        variables=("GDS_ENABLED",),
    ),
    Option(
        "mofed_enabled",
        ("--mofed-enabled",),
        "Give containers the InfiniBand devices.",
        kind="boolean",
        key="flags.mofedEnabled",
        variables=("MOFED_ENABLED",),
    ),
    Option(
        "cdi_annotation_prefix",
        ("--cdi-annotation-prefix",),
        "What the keys of CDI annotations begin with.",
        key="flags.plugin.cdiAnnotationPrefix",
        variables=("CDI_ANNOTATION_PREFIX",),
    ),
    Option(
        "nvidia_cdi_hook_path",
        ("--nvidia-cdi-hook-path", "--nvidia-ctk-path"),
        "The program on the node that CDI specifications name as their hook.",
        kind="path",
        key="flags.plugin.nvidiaCTKPath",
        variables=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
    ),
    Option(
        "mps_root",
        ("--mps-root",),
        "Where the MPS daemons' directories lie on the node; /run/nvidia/mps with --mps.",
        kind="path",
        key="flags.mpsRoot",
        variables=("MPS_ROOT",),
        live=False,
    ),
    Option(
        "shared_devices_allocation_policy",
        ("--shared-devices-allocation-policy",),
        "Spread shares over the GPUs, or fill one GPU first.",
        kind="choice",
        key="flags.plugin.sharedDevicesAllocationPolicy",
        variables=("SHARED_DEVICES_ALLOCATION_POLICY",),
        allowed=("distributed", "packed"),
    ),
    Option(
        "device_discovery_strategy",
        ("--device-discovery-strategy",),
        "How GPUs are found; vfio, for labels alone: those that are kept for virtual machines.",
        kind="choice",
        key="flags.deviceDiscoveryStrategy",
        variables=("DEVICE_DISCOVERY_STRATEGY",),
        allowed=("auto", "nvml", "tegra", "vfio"),
        live=False,
    ),
    Option(
        "imex_channel_ids",
        ("--imex-channel-ids",),
        "The IMEX channels that containers get: none, or 0.",
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
        "Where the kubelet listens; empty: serve without registering.",
        kind="socket",
        key="flags.gpunode.kubeletSocket",
        variables=("KUBELET_SOCKET",),
        live=False,
    ),
    Option(
        "config_file",
        ("--config-file",),
        "A config file, YAML or JSON; its edits take effect while we run.",
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
        "Hooks that CDI specifications leave out; all for every one.",
        kind="words",
        key="flags.gpunode.cdiDisableHooks",
        variables=("CDI_DISABLE_HOOKS",),
        known=HOOKS,
    ),
    # --- gpunode's own ---
    Option(
        "vendor",
        ("--vendor",),
        "Whose GPUs.",
        kind="choice",
        key="flags.gpunode.vendor",
        allowed=("nvidia", "amd"),
        live=False,
    ),
    Option(
        "resource_name",
        ("--resource-name",),
        "What whole GPUs without a naming rule are advertised as; amd.com/gpu with --vendor amd.",
        kind="resource",
        key="flags.gpunode.resourceName",
    ),
    Option(
        "resource_naming_strategy",
        ("--resource-naming-strategy", "--resource_naming_strategy"),
        "AMD: one name for all, or one for each partition type.",
        kind="choice",
        key="flags.gpunode.resourceNamingStrategy",
        allowed=("single", "mixed"),
    ),
    Option(
        "registration",
        ("--registration",),
        "Call on the kubelet, or be found by its plugin watcher.",
        kind="choice",
        key="flags.gpunode.registration",
        allowed=("kubelet", "watcher"),
        live=False,
    ),
    Option(
        "include",
        ("--include",),
        "These GPUs only: index, UUID, PCI address, or glob of the model.",
        kind="selectors",
        key="resources.include",
    ),
    Option(
        "exclude",
        ("--exclude",),
        "Leave these GPUs alone: index, UUID, PCI address, or glob of the model.",
        kind="selectors",
        key="resources.exclude",
    ),
    Option(
        "mps",
        ("--mps",),
        "Run the MPS control daemons that sharing.mps needs in this process.",
        kind="boolean",
        key="flags.gpunode.mps",
        live=False,
    ),
    Option(
        "health_disable",
        ("--health-disable",),
        "XIDs that don't make a GPU unhealthy; all or xids for every one, and for ECC errors and the like.",
        kind="xids",
        key="health.disable",
        variables=("DP_DISABLE_HEALTHCHECKS",),
        setting="health.disabled",
    ),
    Option(
        "health_enable",
        ("--health-enable",),
        "XIDs that make a GPU unhealthy, whatever else is said of them; all for every one.",
        kind="xids",
        key="health.enable",
        variables=("DP_ENABLE_HEALTHCHECKS",),
        setting="health.enabled",
    ),
    Option(
        "health_hold_down",
        ("--health-hold-down",),
        "How long the cause must be gone before a GPU is healthy again; infinite: never.",
        kind="hold",
        key="health.holdDown",
        setting="health.hold_seconds",
    ),
    Option(
        "health_poll_interval",
        ("--health-poll-interval",),
        "How often each GPU is asked for its condition.",
        kind="interval",
        key="health.pollInterval",
        setting="health.poll_seconds",
    ),
    Option(
        "rediscover_seconds",
        ("--rediscover-seconds",),
        "How often NVML is asked which GPUs there are.",
        kind="seconds",
        key="flags.gpunode.rediscoverSeconds",
        live=False,
    ),
    Option(
        "listen",
        ("--listen",),
        "Serve /metrics, /healthz and /readyz on this HOST:PORT; port 0: any free one, which the log names.",
        kind="address",
        key="flags.gpunode.listen",
        live=False,
    ),
    Option(
        "state_dir",
        ("--state-dir",),
        "What outlives a restart: the status file and health memory.",
        kind="path",
        key="flags.gpunode.stateDir",
        live=False,
    ),
    Option(
        "pod_resources_socket",
        ("--pod-resources-socket",),
        "Where the kubelet tells which pod holds which GPU.",
        kind="socket",
        key="flags.gpunode.podResourcesSocket",
        live=False,
    ),
    Option(
        "simulate",
        ("--simulate",),
        "A simulated node instead of this one; see docs/simulate.md.",
        key="flags.gpunode.simulate",
        live=False,
    ),
    Option(
        "lenient",
        ("--lenient",),
        "Take unknown keys of the config file, and what is no XID, for warnings.",
        kind="boolean",
    ),
    # --- labels: GPU feature discovery's, and where the labels go; flags of `gpunode labels` ---
    Option(
        "labels_to",
        ("--labels",),
        "Keep the node's labels as well, there: as gpunode labels --watch does.",
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
        "As --to node-feature.",
        kind="boolean",
        key="flags.useNodeFeatureAPI",
        variables=("GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API"),
        part="labels",
        setting="labels.use_node_feature_api",
    ),
    Option(
        "oneshot",
        ("--oneshot",),
        "Once, and no more; false is --watch.",
        kind="boolean",
        key="flags.gfd.oneshot",
        variables=("GFD_ONESHOT",),
        part="labels",
        setting="labels.oneshot",
    ),
    Option(
        "sleep_interval",
        ("--sleep-interval",),
        "With --watch: how often everything is looked at anew; infinite: only when GPUs change.",
        kind="hold",
        key="flags.gfd.sleepInterval",
        variables=("GFD_SLEEP_INTERVAL",),
        part="labels",
        setting="labels.sleep_seconds",
    ),
    Option(
        "no_timestamp",
        ("--no-timestamp",),
        "Leave out when the labels changed last.",
        kind="boolean",
        key="flags.gfd.noTimestamp",
        variables=("GFD_NO_TIMESTAMP",),
        part="labels",
        setting="labels.no_timestamp",
    ),
    Option(
        "machine_type_file",
        ("--machine-type-file",),
        "Where the machine's product name is read.",
        kind="path",
        key="flags.gfd.machineTypeFile",
        variables=("GFD_MACHINE_TYPE_FILE",),
        part="labels",
        setting="labels.machine_type_file",
    ),
    Option(
        "firmware",
        ("--firmware",),
        "AMD: the versions of the GPUs' firmware too.",
        kind="boolean",
        key="flags.gpunode.firmware",
        part="labels",
        setting="labels.firmware",
    ),
    Option(
        "kubeconfig",
        ("--kubeconfig",),
        "How the API server is reached; kubelet: the kubelet's own. In a pod: its account.",
        key="flags.gpunode.kubeconfig",
        part="labels",
        setting="labels.kubeconfig",
    ),
    Option(
        "kube_context",
        ("--context",),
        "A context of the kubeconfig.",
        key="flags.gpunode.context",
        part="labels",
        setting="labels.kube_context",
    ),
    Option(
        "server",
        ("--server",),
        "A kubectl proxy, such as http://127.0.0.1:8001.",
        key="flags.gpunode.server",
        part="labels",
        setting="labels.server",
    ),
    Option(
        "namespace",
        ("--namespace",),
        "Where the NodeFeature object lies; the account's own if not given.",
        key="flags.gpunode.namespace",
        variables=("NAMESPACE",),
        part="labels",
        setting="labels.namespace",
    ),
    Option(
        "node_name",
        ("--node-name", "--node"),
        "This node's name in the cluster; the machine's if not given.",
        key="flags.gpunode.nodeName",
        variables=("NODE_NAME",),
        part="labels",
        setting="labels.node_name",
    ),
    Option(
        "pod_name",
        ("--pod-name",),
        "The pod in which this runs: the NodeFeature object goes with its DaemonSet.",
        variables=("POD_NAME",),
        part="labels",
        setting="labels.pod_name",
    ),
    Option(
        "kube_api_qps",
        ("--kube-api-qps",),
        "Taken for compatibility: there is a request a minute at most.",
        variables=("KUBE_API_QPS",),
        part="labels",
    ),
    Option(
        "kube_api_burst",
        ("--kube-api-burst",),
        "Taken for compatibility.",
        variables=("KUBE_API_BURST",),
        part="labels",
    ),
)
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
