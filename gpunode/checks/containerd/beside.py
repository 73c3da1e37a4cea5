"""What else containerd is asked for on a GPU node: NRI, pinned memory, and settings that are going away."""

from __future__ import annotations

from gpunode.checks.containerd import remedies
from gpunode.checks.containerd.daemon import judged
from gpunode.checks.fixes import everywhere
from gpunode.checks.model import Check, Verdict, note, ok, seen, skip, warn
from gpunode.errors import DaemonError
from gpunode.facts import gates
from gpunode.facts.containerd import dig
from gpunode.facts.engines import containerd_role
from gpunode.facts.node import Node
from gpunode.facts.rdma import locked_memory, rdma_adapters
from gpunode.facts.toolkit_container import nri_plugin
from gpunode.result import Fix

_NRI = "io.containerd.nri.v1.nri"
_NO_WARNINGS = "ContainerdHasNoDeprecationWarnings"
_ENOUGH_BYTES = 1 << 30  # NCCL's buffers for one adapter; systemd gives 8 MiB


def containerd_nri(node: Node) -> Verdict:
    config = judged(node)
    if node.containerd is None or config is None:
        return skip(containerd_role(node).reason)
    plugin = nri_plugin(node.host, node.processes)
    if plugin is None:
        return skip("nobody injects GPUs by NRI here")
    who = seen(f"/proc/{plugin.pid}", f"{plugin.name} with its NRI plugin on")
    version = node.containerd.version
    release = ".".join(map(str, version))
    if gates.can("containerd", "nri-plugin", version) is False:
        text = f"the toolkit's NRI plugin needs containerd {gates.first('containerd', 'nri-plugin')}"
        evidence = seen(node.containerd.binary or "containerd", release)
        return warn(text, who, evidence, fix=remedies.newer(node))
    switch = dig(config.merged, "plugins", _NRI, "disable")
    listed = config.merged.get("disabled_plugins")
    if switch is True or (isinstance(listed, list) and _NRI in listed):
        return warn("containerd's NRI is switched off", who, seen(config.path, f"{_NRI}: disabled"))
    if switch is None and gates.can("containerd", "nri-default", version) is False:
        return warn(
            f"containerd {release} has NRI off unless its file says disable = false",
            who,
            seen(config.path, f"no disable in {_NRI}"),
        )
    return ok("containerd's NRI is on", who)


def containerd_deprecations(node: Node) -> Verdict:
    role = containerd_role(node)
    if node.containerd is None or not role.used:
        return skip(role.reason)
    try:
        told = node.cri.conditions.get(_NO_WARNINGS)
    except DaemonError as error:
        return skip(f"containerd doesn't say what it runs with: {error.message}")
    if told is not False:
        return ok("containerd warns of nothing")
    evidence = seen(f"CRI Status at {node.containerd.socket}", f"{_NO_WARNINGS} = false")
    address = f"--address {node.containerd.socket} "
    return note(
        "containerd says that something here uses what its next release drops",
        evidence,
        fix=Fix(f"ctr {address}deprecations list"),
    )


def containerd_memlock(node: Node) -> Verdict:
    daemon = node.containerd
    if daemon is None or not containerd_role(node).used:
        return skip(containerd_role(node).reason)
    adapters = rdma_adapters(node.host)
    if not adapters or daemon.process is None:
        return skip("no RDMA adapter is here" if not adapters else "containerd isn't running")
    limit = locked_memory(node.host, daemon.process.pid)
    if limit is None or limit < 0 or limit >= _ENOUGH_BYTES:
        return ok("containers may pin memory for RDMA") if limit is not None else skip("no limit is told")
    unit = daemon.unit or "containerd.service"
    drop = f"/etc/systemd/system/{unit}.d/10-memlock.conf"
    command = (
        f"mkdir -p {drop.rpartition('/')[0]} && printf '[Service]\\nLimitMEMLOCK=infinity\\n' > {drop} && "
        f"systemctl daemon-reload && systemctl restart {unit}"
    )
    return note(
        f"containers without the capability IPC_LOCK may pin {limit >> 10} KiB for RDMA",
        seen(f"/proc/{daemon.process.pid}/limits", f"Max locked memory {limit}"),
        seen("/sys/class/infiniband", ", ".join(adapters[:4])),
        fix=Fix(command, True, "restart"),
    )


CHECKS = (
    Check(
        id="containerd-nri",
        title="containerd's NRI serves the toolkit's plugin",
        layer="containerd",
        severity="warning",
        looks_at=(
            "the toolkit's container (nvidia-ctk-installer) with ENABLE_NRI_PLUGIN, against containerd's "
            "release and the disable of its NRI plugin."
        ),
        why=(
            "The GPU operator's plugin puts GPUs into containers through NRI. Without NRI nobody does, and "
            "pods that ask for GPUs start without them."
        ),
        remedy=everywhere(
            "${EDITOR:-vi} /etc/containerd/config.toml && systemctl restart containerd", "restart"
        ),
        run=containerd_nri,
        blocked_by=("pci-no-gpu", "containerd-config-version", "containerd-not-restarted"),
        refs=("https://github.com/containerd/containerd/blob/main/docs/NRI.md",),
        table=gates.TABLE,
    ),
    Check(
        id="containerd-deprecations",
        title="containerd warns of nothing",
        layer="containerd",
        severity="info",
        looks_at=f"the condition {_NO_WARNINGS} of the running daemon (CRI Status).",
        why="What it warns of works now and stops with an upgrade: old settings, images or callers.",
        remedy=everywhere("ctr deprecations list"),
        run=containerd_deprecations,
        blocked_by=("pci-no-gpu", "containerd-not-restarted"),
        refs=("https://github.com/containerd/containerd/blob/main/RELEASES.md#deprecated-features",),
    ),
    Check(
        id="containerd-memlock",
        title="Containers may pin memory for RDMA",
        layer="containerd",
        severity="info",
        looks_at=(
            "the limit of locked memory of the running containerd (/proc/PID/limits), which containers "
            "inherit, where RDMA adapters are."
        ),
        why=(
            "NCCL over InfiniBand or RoCE pins its buffers: 'ibv_reg_mr: Cannot allocate memory'. Kubernetes "
            "has no setting for the limit; pods with the capability IPC_LOCK don't need it."
        ),
        remedy=everywhere("systemctl edit containerd"),
        run=containerd_memlock,
        blocked_by=("pci-no-gpu", "containerd-not-restarted"),
        refs=("https://github.com/NVIDIA/nccl-tests/issues/206",),
    ),
)
