"""Run a program through containerd's CRI with a runtime handler: images in by ctr, one pod, all removed.

The pod has the node's network, so it needs no CNI plugin. Its sandbox needs the configured pause image; where
that is missing, a stand-in is imported under its name and removed again.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from gpunode.daemons import cri_pods
from gpunode.daemons.cri import Cri, CriStatus
from gpunode.errors import DaemonError, PreconditionError
from gpunode.facts.containerd import find_containerd
from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from gpunode.result import Progress
from gpunode.runtime.container_causes import explain, missing_handler, timed_out
from gpunode.runtime.container_run import (
    ContainerOutcome,
    ContainerRequest,
    clean_up,
    first_contact,
    new_token,
)

if TYPE_CHECKING:
    from gpunode.runtime.host_image import HostFiles

_IMPORT_SECONDS = 120.0
_SEEN_SECONDS = 10.0


def run(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """See `container_run.run_program`."""
    begun = host.monotonic()
    daemon = find_containerd(host, request.config or None)
    socket = request.socket or (daemon.socket if daemon else "")
    if not socket:
        raise PreconditionError("containerd is not on this node", hint="apt install containerd")
    with ExitStack() as cleanup:
        cri = cleanup.enter_context(Cri(host, socket))
        status = first_contact(cri.status)
        if request.runtime_name not in status.handlers:
            raise missing_handler("containerd", request.runtime_name, status.handlers)
        token = new_token()
        images = _Images(host, cri, status, progress, cleanup)
        reference = images.require(request.image) if request.image else images.make(f"-{token}")
        images.stand_in(_pause_name(host, status, daemon))
        logs = cleanup.enter_context(host.temporary_directory())
        # runc refuses a cgroup that is no slice where systemd makes the cgroups
        parent = "system.slice" if status.systemd_cgroup(request.runtime_name) else ""
        pod = cri_pods.Pod(
            token=token,
            handler=request.runtime_name,
            image=reference,
            log_directory=str(logs),
            arguments=request.argv,
            cgroup_parent=parent,
            env=request.env,
        )
        # by label, and before it exists: an interrupt may come between the request and its answer
        cleanup.callback(clean_up, progress, "the sandbox", partial(_remove_pods, cri, pod))
        with progress.step(f"run it through containerd's handler {request.runtime_name}"):
            code = _run_pod(host, cri, pod, request.timeout)
        out, err = cri_pods.read_log(host.read_text(f"{logs}/{cri_pods.LOG_NAME}") or "")
    return ContainerOutcome(code, out, err, host.monotonic() - begun)


def _run_pod(host: Host, cri: Cri, pod: cri_pods.Pod, timeout: float) -> int:
    try:
        container = cri_pods.start_pod(cri, pod)
    except DaemonError as error:
        raise explain(error, "containerd", pod.handler) from error
    ended: list[cri_pods.Exit] = []

    def has_ended() -> bool:
        seen = cri_pods.container_exit(cri, container)
        ended.extend([seen] if seen else [])
        return bool(ended)

    if not host.wait_until(has_ended, timeout):
        raise timed_out(timeout)
    if ended[0].reason in ("StartError", "ContainerCannotRun"):
        raise explain(DaemonError(ended[0].message), "containerd", pod.handler)
    return ended[0].code


def _remove_pods(cri: Cri, pod: cri_pods.Pod) -> None:
    for sandbox in cri_pods.sandboxes(cri, pod.label):
        cri_pods.remove_sandbox(cri, sandbox)


def _pause_name(host: Host, status: CriStatus, daemon: Daemon | None) -> str:
    """The sandbox image's name: containerd 1.x tells it in its status, 2.x only in its configuration."""
    told = status.config.get("sandboxImage")
    if isinstance(told, str) and told:
        return told
    if daemon is None or daemon.binary is None:
        return ""
    import tomllib

    done = host.run((daemon.binary, "--config", daemon.config_path, "config", "dump"))
    try:
        tree: Any = tomllib.loads(done.stdout) if done.ok else {}
    except tomllib.TOMLDecodeError:
        return ""
    for key in ("plugins", "io.containerd.cri.v1.images", "pinned_images", "sandbox"):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, str) else ""


class _Images:
    """Brings images in and takes them out again when `cleanup` closes."""

    def __init__(
        self, host: Host, cri: Cri, status: CriStatus, progress: Progress, cleanup: ExitStack
    ) -> None:
        self.host = host
        self.cri = cri
        self.progress = progress
        self.cleanup = cleanup
        engine = status.config.get("containerd")
        snapshotter = engine.get("snapshotter") if isinstance(engine, dict) else None
        self.snapshotter = snapshotter if isinstance(snapshotter, str) else ""

    def require(self, reference: str) -> str:
        """The caller's image, which must be here."""
        if not cri_pods.has_image(self.cri, reference):
            raise PreconditionError(
                f"containerd holds no image {reference} in the namespace k8s.io, and gpunode pulls none",
                hint=f"ctr -n k8s.io images pull {reference}",
            )
        return reference

    def make(self, tag: str) -> str:
        """An image from this node's files."""
        from gpunode.runtime.host_image import verification_image

        with self.progress.step("make an image from this node's own files"):
            reference, archive = verification_image(self.files, tag)
            self.bring_in(reference, archive)
        return reference

    def stand_in(self, reference: str) -> None:
        """Something that sleeps, where the sandbox image is missing. A digest can't be stood in for."""
        from gpunode.runtime.host_image import pause_image

        if not reference or "@" in reference or cri_pods.has_image(self.cri, reference):
            return
        self.progress.note(
            f"the sandbox image {reference} is missing: a stand-in takes its place for this run"
        )
        self.bring_in(reference, pause_image(self.files, reference))

    @cached_property
    def files(self) -> HostFiles:
        """This node's files, gathered once for both images."""
        from gpunode.runtime.host_image import assemble

        return assemble(self.host)

    def bring_in(self, reference: str, archive: bytes) -> None:
        """Import and wait until the CRI, which learns of it by an event, knows it."""
        self.cleanup.callback(self.take_out, reference)
        extra = ("--snapshotter", self.snapshotter) if self.snapshotter else ()
        done = self.ctr("import", *extra, "-", stdin=archive)
        if done:
            raise DaemonError(f"ctr can't import an image: {done}", hint="journalctl -u containerd -n 50")
        if not self.host.wait_until(lambda: cri_pods.has_image(self.cri, reference), _SEEN_SECONDS):
            raise DaemonError(f"containerd imported {reference} and its CRI doesn't see it")

    def take_out(self, reference: str) -> None:
        """Remove the name and, with ``--sync``, what nothing else refers to."""
        failed = self.ctr("rm", "--sync", reference)
        if failed and "not found" not in failed:
            self.progress.note(f"{reference} is still there: ctr -n k8s.io images rm {reference} ({failed})")

    def ctr(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Run ``ctr images``; what it complained of if it failed."""
        argv = ("ctr", "--address", self.cri.socket, "--namespace", "k8s.io", "images", *arguments)
        done = self.host.run(argv, timeout=_IMPORT_SECONDS, stdin=stdin)
        if done.timed_out:
            return f"it did not end within {_IMPORT_SECONDS:g} s"
        return "" if done.ok else done.stderr.strip() or f"exit code {done.code}"
