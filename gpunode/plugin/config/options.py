"""The options of `plugin serve` and `gpunode labels`, one row each: flags, variables, file key, values, help.

The command line, the environment, the config file's schema, the origin of each value and the tables in the
documentation all come from `OPTIONS`. Defaults are those of `plugin.config.settings.Settings`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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


class Option(NamedTuple):
    """The flag is named after `field`, unless `names` has other flags, the usual one first. `kind` is one of
    those in values.py; `key` is the dotted path in the config file, empty for none.

    `variables` are those of NVIDIA's plugin, tried in order after our own. An option that is not `live` needs
    a restart. `part` is the only command with a flag for the option; `plugin serve` accepts it in the file
    and the environment. `known` are the words with a meaning where any word is accepted. `setting` is the
    dotted path in `Settings`, where it isn't `field`. `default` are words for a default that isn't in
    `Settings`. An `ignored` option is accepted for existing deployments and has no effect. `word` is the
    placeholder for the value in help and tables, `section` the heading on help pages without "options".
    """

    field: str
    help: str
    kind: str = "text"
    key: str = ""
    variables: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    live: bool = True
    part: str = ""
    setting: str = ""
    default: str = ""
    ignored: bool = False
    word: str = ""
    section: Literal["Device", "Driver and CDI", "Health", "Kubernetes", "Output", ""] = ""
    names: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        return self.names or (f"--{self.field.replace('_', '-')}",)

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
        "Advertise MIG devices as GPUs (single), by profile (mixed) or not (none, the default).",
        section="Device",
        kind="choice",
        key="flags.migStrategy",
        variables=("MIG_STRATEGY",),
        allowed=MIG_STRATEGIES,
    ),
    Option(
        "fail_on_init_error",
        "Accepted and ignored: the plugin always waits for a missing driver.",
        ignored=True,
        kind="boolean",
        key="flags.failOnInitError",
        variables=("FAIL_ON_INIT_ERROR",),
    ),
    Option(
        "driver_root",
        "Directory of the driver on the node.",
        section="Driver and CDI",
        names=("--driver-root", "--nvidia-driver-root"),
        kind="path",
        key="flags.nvidiaDriverRoot",
        variables=("NVIDIA_DRIVER_ROOT",),
    ),
    Option(
        "dev_root",
        "Directory that contains dev/.",
        section="Driver and CDI",
        names=("--dev-root", "--nvidia-dev-root"),
        default="the driver root",
        kind="path",
        key="flags.nvidiaDevRoot",
        variables=("NVIDIA_DEV_ROOT",),
    ),
    Option(
        "container_driver_root",
        "Mount point of the driver root in gpunode's container.",
        section="Driver and CDI",
        names=("--driver-root-ctr-path", "--container-driver-root"),
        kind="path",
        key="flags.plugin.containerDriverRoot",
        variables=("DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"),
        live=False,
    ),
    Option(
        "pass_device_specs",
        "Also pass device nodes to containers.",
        section="Device",
        kind="boolean",
        key="flags.plugin.passDeviceSpecs",
        variables=("PASS_DEVICE_SPECS",),
    ),
    Option(
        "device_list_strategy",
        "Pass GPUs by NVIDIA's runtime (envvar, volume-mounts) or by CDI.",
        section="Device",
        kind="choices",
        key="flags.plugin.deviceListStrategy",
        variables=("DEVICE_LIST_STRATEGY",),
        allowed=LIST_STRATEGIES,
    ),
    Option(
        "device_id_strategy",
        "IDs of GPUs for the runtime.",
        section="Device",
        kind="choice",
        key="flags.plugin.deviceIDStrategy",
        variables=("DEVICE_ID_STRATEGY",),
        allowed=("uuid", "index"),
    ),
    Option(
        "gdrcopy_enabled",
        "Also pass /dev/gdrdrv, the GDRCopy device.",
        section="Device",
        kind="boolean",
        key="flags.gdrcopyEnabled",
        variables=("GDRCOPY_ENABLED",),
    ),
    Option(
        "gds_enabled",
        "Also pass the GPUDirect Storage devices.",
        section="Device",
        kind="boolean",
        key="flags.gdsEnabled",
        variables=("GDS_ENABLED",),
    ),
    Option(
        "mofed_enabled",
        "Also pass the InfiniBand devices.",
        section="Device",
        kind="boolean",
        key="flags.mofedEnabled",
        variables=("MOFED_ENABLED",),
    ),
    Option(
        "cdi_annotation_prefix",
        "Prefix of the keys of CDI annotations.",
        section="Driver and CDI",
        key="flags.plugin.cdiAnnotationPrefix",
        variables=("CDI_ANNOTATION_PREFIX",),
    ),
    Option(
        "nvidia_cdi_hook_path",
        "Path of NVIDIA's hook program.",
        section="Driver and CDI",
        names=("--nvidia-cdi-hook-path", "--nvidia-ctk-path"),
        default="/usr/bin/nvidia-ctk, else detected",
        kind="path",
        key="flags.plugin.nvidiaCTKPath",
        variables=("NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"),
    ),
    Option(
        "mps_root",
        "Directory of the MPS daemons.",
        section="Device",
        default="with --mps /run/nvidia/mps",
        kind="path",
        key="flags.mpsRoot",
        variables=("MPS_ROOT",),
        live=False,
    ),
    Option(
        "shared_devices_allocation_policy",
        "Distribute shares, or fill one GPU first.",
        section="Device",
        kind="choice",
        key="flags.plugin.sharedDevicesAllocationPolicy",
        variables=("SHARED_DEVICES_ALLOCATION_POLICY",),
        allowed=("distributed", "packed"),
    ),
    Option(
        "device_discovery_strategy",
        "How to find GPUs (tegra: Jetson; vfio: of VMs, for labels only).",
        section="Device",
        kind="choice",
        key="flags.deviceDiscoveryStrategy",
        variables=("DEVICE_DISCOVERY_STRATEGY",),
        allowed=("auto", "nvml", "tegra", "vfio"),
        live=False,
    ),
    Option(
        "imex_channel_ids",
        "IMEX channels for containers: 0 or none.",
        section="Device",
        kind="integers",
        key="imex.channelIDs",
        variables=("IMEX_CHANNEL_IDS",),
    ),
    Option(
        "imex_required",
        "Serve nothing without the IMEX channel.",
        section="Device",
        kind="boolean",
        key="imex.required",
        variables=("IMEX_REQUIRED",),
    ),
    Option(
        "kubelet_socket",
        "Socket of the kubelet; empty: don't register.",
        section="Kubernetes",
        kind="socket",
        key="flags.gpunode.kubeletSocket",
        variables=("KUBELET_SOCKET",),
        live=False,
    ),
    Option(
        "config_file",
        "Configuration file; changes are reread.",
        word="PATH",
        variables=("CONFIG_FILE",),
    ),
    Option(
        "cdi_feature_flags",
        "CDI features, such as disable-ipc-discoverer.",
        section="Driver and CDI",
        kind="words",
        key="flags.gpunode.cdiFeatureFlags",
        variables=("CDI_FEATURE_FLAGS",),
        known=FEATURES,
    ),
    Option(
        "cdi_disable_hooks",
        "Omit these hooks, such as chmod, or all.",
        section="Driver and CDI",
        kind="words",
        key="flags.gpunode.cdiDisableHooks",
        variables=("CDI_DISABLE_HOOKS",),
        known=HOOKS,
    ),
    # --- gpunode's own ---
    Option(
        "vendor",
        "Vendor of the GPUs.",
        section="Device",
        kind="choice",
        key="flags.gpunode.vendor",
        allowed=("nvidia", "amd"),
        live=False,
    ),
    Option(
        "resource_name",
        "Resource name of whole GPUs.",
        section="Device",
        default="nvidia.com/gpu or amd.com/gpu",
        kind="resource",
        key="flags.gpunode.resourceName",
    ),
    Option(
        "resource_naming_strategy",
        "AMD: one resource, or one for each partition type.",
        section="Device",
        names=("--resource-naming-strategy", "--resource_naming_strategy"),
        kind="choice",
        key="flags.gpunode.resourceNamingStrategy",
        allowed=("single", "mixed"),
    ),
    Option(
        "registration",
        "Register directly, or through the plugin watcher.",
        section="Kubernetes",
        kind="choice",
        key="flags.gpunode.registration",
        allowed=("kubelet", "watcher"),
        live=False,
    ),
    Option(
        "include",
        "Use only these GPUs: index, UUID, PCI address, or glob of the model.",
        section="Device",
        kind="selectors",
        key="resources.include",
    ),
    Option(
        "exclude",
        "Ignore these GPUs, named as for --include.",
        section="Device",
        kind="selectors",
        key="resources.exclude",
    ),
    Option(
        "mps",
        "Run the daemons that sharing.mps requires.",
        section="Device",
        kind="boolean",
        key="flags.gpunode.mps",
        live=False,
    ),
    Option(
        "health_disable",
        "XIDs (driver errors) to ignore; xids: every XID; all: every error.",
        section="Health",
        kind="xids",
        key="health.disable",
        variables=("DP_DISABLE_HEALTHCHECKS",),
        setting="health.disabled",
    ),
    Option(
        "health_enable",
        "XIDs that always count as errors, or all.",
        section="Health",
        kind="xids",
        key="health.enable",
        variables=("DP_ENABLE_HEALTHCHECKS",),
        setting="health.enabled",
    ),
    Option(
        "health_hold_down",
        "Time without errors after which a GPU is healthy again, or infinite.",
        section="Health",
        kind="hold",
        key="health.holdDown",
        setting="health.hold_seconds",
    ),
    Option(
        "health_poll_interval",
        "Interval of health checks.",
        section="Health",
        kind="interval",
        key="health.pollInterval",
        setting="health.poll_seconds",
    ),
    Option(
        "rediscover_seconds",
        "Interval of GPU discovery.",
        section="Health",
        kind="seconds",
        key="flags.gpunode.rediscoverSeconds",
        live=False,
    ),
    Option(
        "log_format",
        "Format of the log on stderr.",
        kind="choice",
        key="flags.gpunode.logFormat",
        allowed=("text", "json"),
        live=False,
    ),
    Option(
        "listen",
        "Address of /metrics, /healthz and /readyz; port 0: any free port.",
        section="Health",
        default="not served",
        kind="address",
        key="flags.gpunode.listen",
        live=False,
    ),
    Option(
        "state_dir",
        "State directory of the device plugin.",
        section="Health",
        kind="path",
        key="flags.gpunode.stateDir",
        live=False,
    ),
    Option(
        "pod_resources_socket",
        "Socket of the kubelet's pod resources API.",
        section="Kubernetes",
        kind="socket",
        key="flags.gpunode.podResourcesSocket",
        live=False,
    ),
    Option(
        "simulate",
        "Simulate these GPUs, such as h100:8.",
        section="Device",
        word="MODEL:N",
        key="flags.gpunode.simulate",
        live=False,
    ),
    Option(
        "lenient",
        "Warn of unknown keys instead of failing.",
        kind="boolean",
    ),
    # --- labels: GPU feature discovery's, and the destinations of labels; flags of `gpunode labels` ---
    Option(
        "labels_to",
        "Also publish the node's labels.",
        names=("--labels",),
        kind="choices",
        key="flags.gpunode.labels",
        allowed=SINKS,
        live=False,
        setting="labels.to",
    ),
    Option(
        "output_file",
        "Write to this file, for Node Feature Discovery.",
        section="Output",
        default="with --to file NFD's features.d/gfd",
        kind="path",
        key="flags.gfd.outputFile",
        variables=("GFD_OUTPUT_FILE",),
        part="labels",
        setting="labels.output_file",
    ),
    Option(
        "use_node_feature_api",
        "Same as --to node-feature.",
        section="Kubernetes",
        kind="boolean",
        key="flags.useNodeFeatureAPI",
        variables=("GFD_USE_NODE_FEATURE_API", "USE_NODE_FEATURE_API"),
        part="labels",
        setting="labels.use_node_feature_api",
    ),
    Option(
        "oneshot",
        "Publish once; false: same as --watch.",
        kind="boolean",
        key="flags.gfd.oneshot",
        variables=("GFD_ONESHOT",),
        part="labels",
        setting="labels.oneshot",
    ),
    Option(
        "sleep_interval",
        "Interval of --watch; infinite: when GPUs change.",
        kind="hold",
        key="flags.gfd.sleepInterval",
        variables=("GFD_SLEEP_INTERVAL",),
        part="labels",
        setting="labels.sleep_seconds",
    ),
    Option(
        "no_timestamp",
        "Omit the timestamp label.",
        section="Output",
        kind="boolean",
        key="flags.gfd.noTimestamp",
        variables=("GFD_NO_TIMESTAMP",),
        part="labels",
        setting="labels.no_timestamp",
    ),
    Option(
        "machine_type_file",
        "File with the machine's product name.",
        kind="path",
        key="flags.gfd.machineTypeFile",
        variables=("GFD_MACHINE_TYPE_FILE",),
        part="labels",
        setting="labels.machine_type_file",
    ),
    Option(
        "firmware",
        "AMD: add labels of the firmware versions.",
        kind="boolean",
        key="flags.gpunode.firmware",
        part="labels",
        setting="labels.firmware",
    ),
    Option(
        "kubeconfig",
        "Kubeconfig file, or kubelet for the kubelet's own.",
        section="Kubernetes",
        word="PATH",
        default="KUBECONFIG, the pod's account or ~/.kube/config",
        key="flags.gpunode.kubeconfig",
        part="labels",
        setting="labels.kubeconfig",
    ),
    Option(
        "kube_context",
        "Kubeconfig context.",
        section="Kubernetes",
        names=("--context",),
        default="the current one",
        word="NAME",
        key="flags.gpunode.context",
        part="labels",
        setting="labels.kube_context",
    ),
    Option(
        "server",
        "URL of a kubectl proxy, such as http://127.0.0.1:8001.",
        section="Kubernetes",
        word="URL",
        key="flags.gpunode.server",
        part="labels",
        setting="labels.server",
    ),
    Option(
        "namespace",
        "Namespace of the NodeFeature object.",
        section="Kubernetes",
        word="NAME",
        default="the account's",
        key="flags.gpunode.namespace",
        variables=("NAMESPACE",),
        part="labels",
        setting="labels.namespace",
    ),
    Option(
        "node_name",
        "Name of the Node.",
        section="Kubernetes",
        names=("--node", "--node-name"),
        word="NAME",
        default="the host name",
        key="flags.gpunode.nodeName",
        variables=("GPUNODE_LABELS_NODE_NAME", "NODE_NAME"),
        part="labels",
        setting="labels.node_name",
    ),
    Option(
        "pod_name",
        "Name of this pod; its DaemonSet then owns the NodeFeature object.",
        section="Kubernetes",
        word="NAME",
        variables=("POD_NAME",),
        part="labels",
        setting="labels.pod_name",
    ),
    Option(
        "kube_api_qps",
        "Accepted and ignored.",
        ignored=True,
        variables=("KUBE_API_QPS",),
        part="labels",
    ),
    Option(
        "kube_api_burst",
        "Accepted and ignored.",
        ignored=True,
        variables=("KUBE_API_BURST",),
        part="labels",
    ),
)
BY_FIELD = {option.field: option for option in OPTIONS}
METAVARS = {
    "boolean": "[true|false]",
    "path": "PATH",
    "socket": "PATH",
    "resource": "NAME",
    "seconds": "DURATION",
    "hold": "DURATION",
    "interval": "DURATION",
    "address": "HOST:PORT",
    "integers": "N,...",
    "xids": "XID,...",
    "selectors": "GPU,...",
    "words": "NAME,...",
}


def metavar(option: Option) -> str:
    """The placeholder for the value in help and tables."""
    words = option.word or "|".join(option.allowed)
    if option.kind == "choices":
        return f"{words},..."
    return words or METAVARS.get(option.kind, "TEXT")
