"""Checks of NVIDIA's GPU operator: the progress of its validator, and leftovers of a removed operator."""

from __future__ import annotations

import re
from dataclasses import replace

from gpunode.checks import fixes
from gpunode.checks.containerd_config import if_parsable
from gpunode.checks.device_plugin import PATIENCE, shown
from gpunode.checks.finding import DISRUPTS_NOTHING, Fix
from gpunode.checks.model import Verdict, check, fail, ok, seen, skip, warn
from gpunode.facts.device_plugins import POD_LOGS, TOOLKIT, VALIDATIONS, stage_log
from gpunode.facts.node import Node
from gpunode.facts.traits import OPERATOR_DRIVER
from gpunode.gpu.library_paths import IN_DRIVER_ROOT

_BELOW = (
    *("pci-no-gpu", "driver-not-installed", "module-not-loaded", "driver-lib-mismatch", "nvml-hang"),
    *("kubelet-not-running", "containerd-not-restarted", "containerd-runtime-missing"),
)

_REFS = ("https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/troubleshooting.html",)

# the toolkit stage runs nvidia-smi, which only the nvidia runtime adds to its container
_NO_SMI = '"nvidia-smi": executable file not found'
_TOOLKIT_LOGS = "*_nvidia-container-toolkit-daemonset-*"
_TOOLKIT_LOG = fixes.look(
    f"tail -n 20 {POD_LOGS}/{_TOOLKIT_LOGS}/*/*.log",
    "This is the log of the operator's toolkit pod, which registers the nvidia runtime with the engine: fix "
    "its last error, and the validator continues by itself",
)
_TRY_RUNTIME = Fix(
    "gpunode verify --on containerd",
    look=True,
    disturbs=DISRUPTS_NOTHING,
    note="No toolkit pod of the operator has run on this node, so the validator uses the node's own nvidia "
    "runtime. If this fails, fix what it reports; if it succeeds, the RuntimeClass must have the handler "
    "nvidia:\nkubectl get runtimeclass nvidia --output yaml",
)


@check(
    "operator-validations",
    title="The GPU operator's validator has passed all stages",
    looks_at="the status files of its validator in /run/nvidia/validations (driver, toolkit, cuda, plugin: "
    "the first missing one) and, after 20 minutes, its log.",
    fix=fixes.look(
        "kubectl get pods --namespace gpu-operator",
        "The log of the first pod that isn't Running or Completed names the cause: kubectl logs",
    ),
    blocked_by=(*_BELOW, "operator-host-driver-conflict"),
    needs=("kubelet",),
    refs=_REFS,
)
def operator_validations(node: Node) -> Verdict:
    """All other pods of the operator, including the device plugin, wait for these stages in an init container
    (Init:0/1). The last lines of the stage's log give the reason.
    """
    operator = node.operator
    if not operator.validators:
        return skip("no validator of the GPU operator runs on this node")
    stage = operator.missing
    if not stage:
        return ok("the GPU operator's validator has passed every stage")
    if stage == "plugin" and not (node.allocatable and node.allocatable.nvidia):
        return skip("the GPU operator's validator is waiting for a device plugin")
    log = stage_log(node.host, operator, stage)
    if log is None:
        return skip(f"the GPU operator's validator hasn't started {stage}")
    path, lines, since = log
    if node.host.now() - since < PATIENCE:
        return skip(f"the GPU operator's validator is running {stage}")
    answer = seen(f"{VALIDATIONS}/{stage}-ready", "missing")
    last = [seen(path, shown(line)) for line in lines[-1:]]
    judge = fail if stage in ("driver", "toolkit") else warn
    summary = f"the GPU operator's validator is stuck at {stage}"
    fix = fixes.look(
        f"tail -n 50 {path}", "Fix what the last error names; the validator then retries by itself"
    )
    if stage == "toolkit" and lines and _NO_SMI in lines[-1]:
        summary += ": its container has no nvidia-smi"
        fix = _TOOLKIT_LOG if node.host.glob(POD_LOGS, _TOOLKIT_LOGS) else _TRY_RUNTIME
    return judge(summary, answer, *last, fix=fix)


@check(
    "operator-host-driver-conflict",
    title="The loaded driver is the GPU operator's",
    looks_at=f"the version of the loaded module against the version of the libraries in {OPERATOR_DRIVER}.",
    fix=Fix(
        # for this node only: driver.enabled=false would remove the driver from every other node as well
        'kubectl label node "$(uname -n)" nvidia.com/gpu.deploy.driver=false --overwrite',
        disruptive="drain",
        needs_root=False,
        note=f"The operator removes its driver from this node, which then uses its own. {fixes.THIS_NODE}",
    ),
    needs=("operator-driver",),
    refs=_REFS,
)
def operator_host_driver_conflict(node: Node) -> Verdict:
    """The operator gives pods its own driver's libraries. With the module of another driver that the node
    loaded, they fail with Driver/library version mismatch.
    """
    versions = _container_driver(node)
    if not versions:
        return skip("the version of the GPU operator's driver is unknown")
    loaded = node.module.version if node.module else None
    if not loaded or loaded in versions:
        return ok(f"the GPU operator's driver is {', '.join(versions)}")
    version, path = next(iter(versions.items()))
    return fail(
        f"the loaded module isn't the GPU operator's: {loaded}, not {version}",
        seen("/sys/module/nvidia/version", loaded),
        seen(path, version),
    )


def _container_driver(node: Node) -> dict[str, str]:
    """Paths of the NVML libraries in the driver's container, by version."""
    known: dict[str, str] = {}
    for directory in IN_DRIVER_ROOT:
        for path in node.host.glob(directory, "libnvidia-ml.so.*"):
            match = re.search(r"\.so\.(\d+\.\d[\d.]*)$", path)
            if match:
                known.setdefault(match[1], path)
    return known


_ASIDE = "mv /usr/local/nvidia/toolkit /usr/local/nvidia/toolkit.old"
# containerd calls the runtime that started a container to stop it and for exec, until the container ends
_ASIDE_LATER = (
    "GPU pods that run now need the old files until they end: a drain ends them. Then move the files:\n"
    f"{_ASIDE}"
)


def _again(runtime: str) -> Fix:
    """Register the node's own toolkit with the engine."""
    return replace(fixes.configure(runtime), note=_ASIDE_LATER)


@check(
    "operator-leftovers",
    title="No engine uses files of a removed GPU operator",
    severity="warning",
    looks_at="/usr/local/nvidia/toolkit and containerd's files that name it, if no pod of the operator is "
    "on this node.",
    fix=_again("containerd"),
    blocked_by=("pci-no-gpu", "kubelet-not-running", "containerd-runtime-missing"),
    needs=("kubelet", "containerd"),
    refs=("https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/uninstall.html",),
)
def operator_leftovers(node: Node) -> Verdict:
    """The operator's toolkit stays on the node after the operator is removed, and is no longer updated.
    Deleting the directory breaks every pod that uses the nvidia runtime.
    """
    if not node.host.is_dir(TOOLKIT):
        return ok(f"{TOOLKIT} doesn't exist")
    if node.kubelet is None or node.kubelet.process is None or not node.host.is_dir(POD_LOGS):
        return skip("it is unknown which pods are on this node")
    if node.operator.pods:
        return ok("the GPU operator is on this node")
    config = if_parsable(node)
    for path in config.files if config else ():
        lines = (node.host.read_text(path) or "").splitlines()
        for number, line in enumerate(lines, 1):
            if f'"{TOOLKIT}/' in line or f"'{TOOLKIT}/" in line:
                absence = seen(POD_LOGS, "no pod of the GPU operator")
                return warn(
                    "containerd still uses the toolkit of a removed GPU operator",
                    seen(path, line.strip(), number),
                    absence,
                    fix=_configure_again(node),
                )
    return ok(f"no configuration refers to {TOOLKIT}")


def _configure_again(node: Node) -> Fix:
    """On a node without its own toolkit, install that first; k3s and rke2 detect theirs when they start."""
    daemon = node.containerd
    manager = daemon.manager if daemon else ""
    own = node.host.which("nvidia-container-runtime") or ""
    fix = _again(manager or "containerd")
    if daemon is not None and manager in ("k3s", "rke2"):
        effect = "restarts this node's Kubernetes: GPU pods that still run can't be stopped afterwards"
        restart = fixes.restart_managed(manager, daemon.unit).after(_ASIDE)
        fix = replace(restart, disruptive="drain", effect=effect)
    if own and not own.startswith(TOOLKIT):
        return fix
    return fix.after(fixes.INSTALL_TOOLKIT.command)
