"""The options of the node's labels: GPU feature discovery's, and where the labels go.

Rows for `options.OPTIONS`. `plugin serve` takes them from the config file and the environment alone, but for
``--labels``; `gpunode labels` has them all.
"""

from __future__ import annotations

from typing import Any

PREFIX = "GPUNODE_LABELS_"
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
