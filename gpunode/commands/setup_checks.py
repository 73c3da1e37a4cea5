"""What `setup --kubernetes` makes of the doctor's findings, and its proofs at the end."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpunode.commands.setup import mended_by_configuring
from gpunode.commands.setup_steps import State, Step
from gpunode.dataclass import replace
from gpunode.facts.distributions import DISTRIBUTIONS
from gpunode.host import Host
from gpunode.result import ErrorInfo, ExitCode, Finding, FindingStatus, Result, Style, Text

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


def with_reason(result: Result, excuse: Callable[[Finding], str]) -> Result:
    """The doctor's result with the faults that stopped it as one error."""
    if result.exit_code is ExitCode.OK:
        return result
    findings: tuple[Finding, ...] = result.data["findings"]
    bad = [one for one in findings if one.status is FindingStatus.FAIL and not excuse(one)]
    if not bad:
        return result
    told = "; ".join(f"{one.id}: {one.summary}" for one in bad)
    error = ErrorInfo("doctor-failed", told, f"find out more: gpunode explain {bad[0].id}")
    return replace(result, errors=(error,))


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
    in_engine = verify.Options(
        on=way.engine, config=options.engine.config, socket=options.engine.socket, cdi=options.engine.cdi
    )
    by_cdi = " --cdi" if options.engine.cdi else ""
    first = _proof("verify-host", "gpunode verify", lambda: verify.run(host, verify.Options(), way.progress))
    if not host.live:
        return (first,)  # nothing can be started under --root
    command = f"gpunode verify --on {way.engine}{by_cdi}"
    return (first, _proof("verify-container", command, lambda: verify.run(host, in_engine, way.progress)))


def pod_step(way: Way) -> Step:
    """A pod on this node, through the API server."""
    from gpunode.commands import verify_kubernetes

    options = way.options

    def prove() -> Result:
        wanted = verify_kubernetes.Options(
            image=options.test_image,
            node=options.node,
            resource=_resource(way.host),
            runtime_class=verify_kubernetes.AUTO if way.handler else "",
            access=options.access,
        )
        return verify_kubernetes.run(way.host, wanted, way.progress)

    return _proof("verify", shlex.join(("gpunode", "verify", "--on", "kubernetes", *way.words)), prove)


def _resource(host: Host) -> str:
    """What the kubelet counts whole GPUs by, else the first of NVIDIA's resources that it can hand out."""
    from gpunode.commands.setup_plugin import serving

    offered = [name for name, count in serving(host).counts if count]
    return "nvidia.com/gpu" if "nvidia.com/gpu" in offered or not offered else offered[0]


def _proof(name: str, command: str, prove: Callable[[], Result]) -> Step:
    def planned() -> Result:
        return Result("Verification", None, blocks=(Text(f"would run: {command}", Style.COMMAND),))

    return Step(name, command, lambda: State(_RUN), planned, prove)
