"""The metrics that `--listen` serves: names, kinds, labels and meanings. docs/metrics.md explains them.

Prometheus' conventions: base units (seconds, bytes, ratios of 0 to 1), counters end in ``_total``. A label
called `resource` is an extended resource's name, `uuid` a physical GPU's.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """One metric; `kind` is gauge, counter or histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


_CONTAINER = ("namespace", "pod", "container", "make", "accelerator_id", "model")

FAMILIES = {
    family.name: family
    for family in (
        Family("gpunode_build_info", "gauge", ("version", "vendor"), "Always 1: what is serving."),
        Family("gpunode_plugin_start_time_seconds", "gauge", (), "When the plugin started."),
        Family(
            "gpunode_plugin_ready", "gauge", (), "1 if GPUs are seen and the kubelet watches all of them."
        ),
        Family("gpunode_plugin_driver_up", "gauge", (), "1 if the driver answers and shows GPUs."),
        Family(
            "gpunode_plugin_settings_applied",
            "gauge",
            (),
            "0 if the GPUs seen last can't be advertised as the settings ask; what was before still is.",
        ),
        Family(
            "gpunode_plugin_config_last_reload_successful",
            "gauge",
            (),
            "0 if the config file as it is now was refused; the last good one is in effect.",
        ),
        Family(
            "gpunode_plugin_config_last_reload_success_timestamp_seconds",
            "gauge",
            (),
            "When the settings in effect were taken.",
        ),
        Family(
            "gpunode_plugin_devices",
            "gauge",
            ("resource", "health", "reason"),
            "Devices that the kubelet is told of; reason is the problem's code, empty for healthy ones.",
        ),
        Family("gpunode_plugin_left_out", "gauge", (), "GPUs and partitions that are not advertised."),
        Family(
            "gpunode_plugin_watched",
            "gauge",
            ("resource",),
            "1 if the kubelet's ListAndWatch stream is open since the last registration.",
        ),
        Family(
            "gpunode_plugin_registrations_total",
            "counter",
            ("resource",),
            "Registrations that the kubelet accepted.",
        ),
        Family(
            "gpunode_plugin_rpcs_total",
            "counter",
            ("resource", "method", "code"),
            "Calls that were answered; a ListAndWatch counts when its stream has ended.",
        ),
        Family(
            "gpunode_plugin_rpc_duration_seconds",
            "histogram",
            ("method",),
            "How long calls took in the plugin, streams left out.",
        ),
        Family(
            "gpunode_plugin_allocations_total",
            "counter",
            ("resource", "outcome"),
            "Allocate calls; outcome is ok, not-found, invalid, unhealthy or error.",
        ),
        Family(
            "gpunode_plugin_allocated_devices_total",
            "counter",
            ("resource",),
            "Devices that were handed out.",
        ),
        Family(
            "gpunode_plugin_preference_fallbacks_total",
            "counter",
            ("resource",),
            "Preferences that came from the simple rule because the good one failed.",
        ),
        Family("gpunode_plugin_mps_up", "gauge", ("resource",), "1 if the resource's MPS daemon serves it."),
        Family(
            "gpunode_plugin_events_total",
            "counter",
            ("uuid", "xid"),
            "Critical events of the driver; xid is its number, or ecc-double or ecc-single.",
        ),
        Family(
            "gpunode_plugin_pod_resources_up",
            "gauge",
            (),
            "1 if the kubelet's PodResources answered; without it there are no gpunode_container_ metrics.",
        ),
        Family(
            "gpunode_gpu_info",
            "gauge",
            ("gpu", "uuid", "model", "make", "pci", "numa"),
            "Always 1: a GPU of this node; gpu is its index.",
        ),
        Family("gpunode_gpu_healthy", "gauge", ("uuid",), "0 if the GPU or a part of it has a problem."),
        Family(
            "gpunode_gpu_problem_since_timestamp_seconds",
            "gauge",
            ("uuid", "reason", "mend"),
            "Since when a GPU has a problem (0: unknown), and what mends it.",
        ),
        Family("gpunode_gpu_duty_cycle_ratio", "gauge", ("uuid",), "How much of the time a kernel ran."),
        Family("gpunode_gpu_memory_total_bytes", "gauge", ("uuid",), "The GPU's memory."),
        Family("gpunode_gpu_memory_used_bytes", "gauge", ("uuid",), "Its memory in use."),
        Family(
            "gpunode_container_devices",
            "gauge",
            ("namespace", "pod", "container", "resource"),
            "Devices that a container holds.",
        ),
        Family(
            "gpunode_container_gpu_shares",
            "gauge",
            _CONTAINER,
            "Shares of a shared GPU that a container holds; its part of the use can't be told.",
        ),
        Family(
            "gpunode_container_gpu_duty_cycle_ratio",
            "gauge",
            _CONTAINER,
            "How much of the time a kernel ran on a GPU that a container holds alone.",
        ),
        Family(
            "gpunode_container_gpu_memory_total_bytes",
            "gauge",
            _CONTAINER,
            "Memory of a GPU or partition that a container holds alone.",
        ),
        Family(
            "gpunode_container_gpu_memory_used_bytes",
            "gauge",
            _CONTAINER,
            "Memory in use on a GPU or partition that a container holds alone.",
        ),
    )
}
