"""Run one program in one container, with GPUs by a runtime handler or by CDI, and leave nothing.

Docker is used through its API, containerd and CRI-O through the CRI like the kubelet, podman by its command
line.
"""

from __future__ import annotations

from gpunode.errors import PreconditionError, UsageError
from gpunode.facts.registry import DISTRIBUTIONS, ENGINES
from gpunode.host import Host
from gpunode.output.result import Progress
from gpunode.runtime.verify.container import ContainerOutcome, ContainerRequest


def run_program(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """Run it to its end. `DaemonError` or `PreconditionError` says why it never ran or was killed."""
    if not host.live:
        raise PreconditionError(
            f"no container can be started under --root {host.root}", hint="run it on the node itself"
        )
    if request.engine == "docker":
        from gpunode.runtime.verify.docker import run_on_docker as run
    elif request.engine == "podman":
        from gpunode.runtime.verify.podman import run_on_podman as run
    elif request.engine == "crio":
        from gpunode.runtime.verify.cri import run_on_crio as run
    elif request.engine == "containerd" or request.engine in DISTRIBUTIONS:
        from gpunode.runtime.verify.cri import run_on_containerd as run
    else:
        known = ", ".join((*sorted(ENGINES), *DISTRIBUTIONS))
        raise UsageError(f"no program can be run in {request.engine}", hint=f"one of: {known}")
    return run(host, request, progress)
