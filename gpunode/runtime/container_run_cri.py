"""Run a program through the CRI, as the kubelet would: images in, one pod, all removed.

The pod has the node's network, so it needs no CNI plugin. Its sandbox needs the configured pause image; where
that is missing, a stand-in is imported under its name and removed again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING

from gpunode.daemons import cri_pods
from gpunode.daemons.cri import Cri
from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError, PreconditionError
from gpunode.host import Host
from gpunode.result import Progress
from gpunode.runtime.container_causes import explain, timed_out
from gpunode.runtime.container_leftovers import MAKER_LABEL, OURS, is_dead, labels, maker, maker_of_image
from gpunode.runtime.container_run import ContainerOutcome, ContainerRequest, clean_up, new_token
from gpunode.runtime.container_way import Way

if TYPE_CHECKING:
    from gpunode.runtime.host_image import HostFiles, Names

_SEEN_SECONDS = 10.0


@dataclass(frozen=True)
class CriEngine:
    """What differs between the engines that speak the CRI.

    `bring_in` imports an archive and `take_out` removes a name from where the CRI sees images; both give what
    they complained of, "" if nothing. `cgroup_parent` is for `cri_pods.Pod`. `pull` says how a person brings
    an image in, with ``{image}``.
    """

    cri: Cri
    way: Way
    pause: str
    cgroup_parent: str
    bring_in: Callable[[bytes], str]
    take_out: Callable[[str], str]
    pull: str

    @property
    def name(self) -> str:
        """As people write it."""
        return self.way.reading.title


def run_on(
    host: Host, engine: CriEngine, request: ContainerRequest, progress: Progress, begun: float
) -> ContainerOutcome:
    """Run the program; `begun` is when the request came, on the host's monotonic clock."""
    remove_leftovers(host, engine.cri, progress)
    with ExitStack() as cleanup:
        token = new_token()
        images = _Images(host, engine, progress, cleanup, f"{maker(host)}-{token}")
        reference = images.require(request.image) if request.image else images.make()
        images.stand_in(engine.pause)
        logs = cleanup.enter_context(host.temporary_directory())
        pod = cri_pods.Pod(
            token=token,
            handler=engine.way.handler,
            image=reference,
            log_directory=str(logs),
            arguments=request.argv,
            cgroup_parent=engine.cgroup_parent,
            env=request.env,
            devices=engine.way.devices,
            labels=labels(host),
        )
        # by label, and before it exists: an interrupt may come between the request and its answer
        cleanup.callback(clean_up, progress, "the sandbox", partial(_remove_pods, engine.cri, pod))
        with progress.step(f"run it through {engine.name}, {engine.way}"):
            code = _run_pod(host, engine, pod, request.timeout)
        out, err = cri_pods.read_log(host.read_text(f"{logs}/{cri_pods.LOG_NAME}") or "")
    return ContainerOutcome(code, out, err, host.monotonic() - begun, engine.way)


def remove_leftovers(host: Host, cri: Cri, progress: Progress) -> None:
    """Remove what runs left that were killed: their sandboxes, then their images with all names."""

    def remove() -> None:
        for sandbox, found in cri_pods.labelled_sandboxes(cri, OURS).items():
            if is_dead(host, found.get(MAKER_LABEL, "")):
                cri_pods.remove_sandbox(cri, sandbox)
        for name in cri_pods.image_names(cri):
            if is_dead(host, maker_of_image(name)):
                cri_pods.remove_image(cri, name)

    clean_up(progress, "what an earlier run left", remove)


def _run_pod(host: Host, engine: CriEngine, pod: cri_pods.Pod, timeout: float) -> int:
    cri = engine.cri
    try:
        container = cri_pods.start_pod(cri, pod)
    except DaemonError as error:
        raise explain(host, error, engine.way) from error
    ended: list[cri_pods.Exit] = []

    def has_ended() -> bool:
        seen = cri_pods.container_exit(cri, container)
        ended.extend([seen] if seen else [])
        return bool(ended)

    if not host.wait_until(has_ended, timeout):
        raise timed_out(timeout)
    if ended[0].reason in ("StartError", "ContainerCannotRun"):
        raise explain(host, DaemonError(ended[0].message), engine.way)
    return ended[0].code


def _remove_pods(cri: Cri, pod: cri_pods.Pod) -> None:
    for sandbox in cri_pods.sandboxes(cri, pod.label):
        cri_pods.remove_sandbox(cri, sandbox)


class _Images:
    """Brings images in and takes them out again when `cleanup` closes."""

    def __init__(
        self, host: Host, engine: CriEngine, progress: Progress, cleanup: ExitStack, tag: str
    ) -> None:
        self.host = host
        self.engine = engine
        self.progress = progress
        self.cleanup = cleanup
        self.tag = tag

    def require(self, reference: str) -> str:
        """The caller's image, which must be here."""
        if not cri_pods.has_image(self.engine.cri, reference):
            raise PreconditionError(
                f"{self.engine.name} holds no image {reference}, and gpunode pulls none",
                hint=self.engine.pull.format(image=reference),
            )
        return reference

    def make(self) -> str:
        """An image from this node's files."""
        from gpunode.runtime.host_image import verification_image

        with self.progress.step("make an image from this node's own files"):
            by_handler = not self.engine.way.devices
            reference, archive = verification_image(self.files, self.names, by_handler=by_handler)
            self.bring_in(reference, archive)
        return reference

    def stand_in(self, reference: str) -> None:
        """Something that sleeps, where the sandbox image is missing. A digest can't be stood in for."""
        from gpunode.runtime.container_leftovers import STAND_IN
        from gpunode.runtime.host_image import pause_image

        if not reference or "@" in reference or cri_pods.has_image(self.engine.cri, reference):
            return
        self.progress.note(
            f"the sandbox image {reference} is missing: a stand-in takes its place for this run"
        )
        self.cleanup.callback(self.take_out, f"{STAND_IN}:{self.tag}")
        self.bring_in(reference, pause_image(self.files, reference, self.names))

    @cached_property
    def files(self) -> HostFiles:
        """This node's files, gathered once for both images."""
        from gpunode.runtime.host_image import assemble

        return assemble(self.host)

    @cached_property
    def names(self) -> Names:
        """What marks both images as this run's."""
        from gpunode.runtime.host_image import Names

        return Names(self.tag, labels(self.host))

    def bring_in(self, reference: str, archive: bytes) -> None:
        """Import and wait until the CRI, which may learn of it by an event, knows it."""
        self.cleanup.callback(self.take_out, reference)
        failed = self.engine.bring_in(archive)
        log = f"journalctl -u {self.engine.way.reading.option} -n 50"
        if failed:
            raise DaemonError(f"{self.engine.name} can't be given an image: {failed}", hint=log)
        seen = partial(cri_pods.has_image, self.engine.cri, reference)
        if not self.host.wait_until(seen, _SEEN_SECONDS):
            raise DaemonError(
                f"{self.engine.name} was given {reference} and its CRI doesn't see it", hint=log
            )

    def take_out(self, reference: str) -> None:
        """Remove a name and, if it was the last one, the image."""
        failed = self.engine.take_out(reference)
        if failed:
            self.progress.note(f"{reference} is still there: {failed}")
