"""What `setup --kubernetes` makes of the doctor's findings, and its proofs at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpunode.commands.setup import mended_by_configuring
from gpunode.commands.setup_steps import State, Step
from gpunode.facts.distributions import DISTRIBUTIONS
from gpunode.result import Finding, Result, Style, Text

if TYPE_CHECKING:
    from gpunode.commands.setup_way import Way
    from gpunode.kubernetes.api import Json

_ENGINE_LAYERS = {"docker", "containerd", "crio", "podman"}
_MENDED_BY = {
    "toolkit-missing": "the step toolkit",
    "plugin-not-registered": "the step plugin",
    "plugin-socket-dead": "the step plugin",
    "runtimeclass-missing": "the step runtime-class",
}
_RUN = "the proof, each time"


def excuse(finding: Finding, engine: str, cdi: bool) -> str:
    """Why a failed check doesn't stop the set-up; empty if it does."""
    mended = mended_by_configuring(finding, cdi) or _MENDED_BY.get(finding.id, "")
    if mended:
        return mended
    if finding.severity != "error":
        return "pods run all the same"
    own = "containerd" if engine in DISTRIBUTIONS else engine
    if finding.layer in _ENGINE_LAYERS - {own}:
        return f"not needed for {engine}"
    return ""


def gpu_labels(node: Json) -> tuple[str, ...]:
    """The labels of a Node by which the plugin's DaemonSet comes to it."""
    from gpunode.kubernetes.manifests.daemon_set import PluginSet, daemon_set
    from gpunode.kubernetes.patches import labels_of

    pod = daemon_set(PluginSet("any"))["spec"]["template"]["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = [one["matchExpressions"][0]["key"] for one in terms["nodeSelectorTerms"]]
    there = labels_of(node)
    return tuple(key for key in keys if there.get(key) == "true")


def node_steps(way: Way) -> tuple[Step, ...]:
    """Without a cluster: the host and, on a live node, a container of the kubelet's engine."""
    from gpunode.commands import verify

    options, host = way.options, way.host
    in_engine = verify.Options(on=way.engine, config=options.config, socket=options.socket, cdi=options.cdi)
    by_cdi = " --cdi" if options.cdi else ""
    first = _proof("verify-host", "gpunode verify", lambda: verify.run(host, verify.Options(), way.progress))
    if not host.live:
        return (first,)  # nothing can be started under --root
    command = f"gpunode verify --on {way.engine}{by_cdi}"
    return (first, _proof("verify-container", command, lambda: verify.run(host, in_engine, way.progress)))


def pod_step(way: Way) -> Step:
    """A pod on this node, through the API server."""
    from gpunode.commands import verify_kubernetes

    raise NotImplementedError(verify_kubernetes)


def _proof(name: str, command: str, prove: Callable[[], Result]) -> Step:
    def planned() -> Result:
        return Result("Verification", None, blocks=(Text(f"would run: {command}", Style.COMMAND),))

    return Step(name, command, lambda: State(_RUN), planned, prove)
