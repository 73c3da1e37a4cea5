"""Run a program through podman: load the image, one container, its output, all removed. Rootless too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpunode.errors import DaemonError, GpunodeError, PreconditionError
from gpunode.facts.cdi import DIRECTORIES
from gpunode.facts.podman import PodmanConfig, find_podman, load_podman
from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.output.result import Progress
from gpunode.runtime.verify.container import (
    OURS,
    VERIFICATION,
    CdiReading,
    ContainerOutcome,
    ContainerRequest,
    Way,
    choose,
    gpu_specs,
    labels,
    maker,
    new_token,
    remove_leftovers,
)
from gpunode.runtime.verify.failures import explain, timed_out
from gpunode.runtime.verify.image import Names, assemble, verification_image

# The podman command line: the few calls for running one program. It has no daemon to query.

ANSWER_SECONDS = 30.0
_LOAD_SECONDS = 120.0
_UNKNOWN = ("image not known", "no such container", "no container with name")


@dataclass(frozen=True)
class Podman:
    """One podman with its storage; `options` come before every subcommand."""

    host: Host
    binary: str
    options: tuple[str, ...] = ()

    def call(self, *arguments: str, timeout: float = ANSWER_SECONDS, stdin: bytes | None = None) -> Completed:
        """Run a subcommand and return its result, also after a failure."""
        return self.host.run((self.binary, *self.options, *arguments), timeout=timeout, stdin=stdin)

    def complaint(self, *arguments: str, timeout: float = ANSWER_SECONDS, stdin: bytes | None = None) -> str:
        """Run a subcommand; return the error, "" if it succeeded or there was nothing to remove."""
        done = self.call(*arguments, timeout=timeout, stdin=stdin)
        if done.timed_out:
            return f"it did not end within {timeout:g} s"
        known = any(words in done.stderr for words in _UNKNOWN)
        return "" if done.ok or known else said(done)

    def load(self, archive: bytes) -> str:
        """Load a ``docker save`` archive; return podman's error."""
        return self.complaint("load", "--quiet", timeout=_LOAD_SECONDS, stdin=archive)

    def has_image(self, reference: str) -> bool:
        """Whether podman has this image; nothing is pulled. `DaemonError` if podman fails."""
        answer = self.call("image", "exists", reference)
        if answer.code not in (0, 1):  # podman-image-exists(1): 1 is no, 125 a failure of podman's own
            raise DaemonError(f"podman image exists: {said(answer)}", hint="podman info")
        return answer.ok

    def remove_image(self, reference: str) -> str:
        """Remove a name and, if it was the last, the image; return podman's error."""
        return self.complaint("rmi", "--force", reference)

    def remove_container(self, name: str) -> str:
        """Kill it if necessary and remove it; return podman's error."""
        return self.complaint("rm", "--force", "--ignore", "--volumes", name)

    def labelled_containers(self, labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Ids of all containers with these labels, stopped ones included, each with all its labels."""
        filters = [part for item in labels.items() for part in ("--filter", "label={}={}".format(*item))]
        rows = self._listing("ps", "--all", *filters, "--format", "json")
        return {
            row["Id"]: {str(name): str(value) for name, value in row["Labels"].items()}
            for row in rows
            if isinstance(row.get("Id"), str) and isinstance(row.get("Labels"), dict)
        }

    def image_names(self, repository: str) -> tuple[str, ...]:
        """Every tag of one repository, sorted."""
        rows = self._listing("images", "--filter", f"reference={repository}", "--format", "json")
        lists = (row.get("Names") for row in rows)
        names = (name for row_names in lists if isinstance(row_names, list) for name in row_names)
        return tuple(sorted({name for name in names if isinstance(name, str)}))

    def _listing(self, *arguments: str) -> Sequence[dict[str, Any]]:
        done = self.call(*arguments)
        if not done.ok:
            raise DaemonError(f"podman {arguments[0]}: {said(done)}", hint="podman info")
        try:
            answer = json.loads(done.stdout or "[]")
        except (ValueError, RecursionError):
            answer = None
        return [entry for entry in answer if isinstance(entry, dict)] if isinstance(answer, list) else []


def said(done: Completed) -> str:
    """podman's error message, without its log lines around it."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return (errors or lines or [f"exit code {done.code}"])[-1]


_START_SECONDS = 30.0
_OWN_FAILURES = (125, 126, 127)  # podman-run(1): podman itself failed, or the runtime couldn't start it


def run_on_podman(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """See `container_run.run_program`."""
    start = host.monotonic()
    daemon = find_podman(host, request.config or None)
    if daemon is None or daemon.binary is None:
        host.refuse_unsafe("podman")
        raise PreconditionError(
            "podman is not on this node", hint="apt install podman, or use another engine"
        )
    podman = Podman(host, daemon.binary)
    way = _way(host, request, daemon.version, progress)
    if request.image and not podman.has_image(request.image):
        raise PreconditionError(
            f"podman holds no image {request.image}, and gpunode pulls none",
            hint=f"podman pull {request.image}",
        )
    remove_leftovers(
        host,
        progress,
        partial(podman.labelled_containers, OURS),
        lambda name: _take_out(progress, f"container {name}", partial(podman.remove_container, name)),
        partial(podman.image_names, VERIFICATION),
        lambda name: _take_out(progress, f"image {name}", partial(podman.remove_image, name)),
    )
    token = new_token()
    with ExitStack() as cleanup:
        image = request.image or _image(podman, way, token, progress, cleanup)
        name = f"gpunode-verify-{token}"
        # by name, and before it exists: killing podman leaves the container to its monitor
        cleanup.callback(_take_out, progress, f"container {name}", partial(podman.remove_container, name))
        with progress.step(f"run it through podman, {way}"):
            done = podman.call(
                *_arguments(host, request, way, image, name), timeout=request.timeout + _START_SECONDS
            )
        _refuse_failure(host, request, way, done)
    return ContainerOutcome(done.code, done.stdout, done.stderr, host.monotonic() - start, way)


def _way(host: Host, request: ContainerRequest, version: tuple[int, ...], progress: Progress) -> Way:
    """CDI is podman's default; a runtime of containers.conf if the node has no specification."""
    try:
        config = load_podman(host)
    except GpunodeError as error:
        progress.note(f"podman ignores a file: {error.message}")
        config = PodmanConfig(())
    reading = CdiReading("podman", version, True, config.strings("cdi_spec_dirs") or DIRECTORIES)
    by_cdi = request.cdi or request.runtime_name not in config.runtimes or bool(gpu_specs(host, reading))
    return choose(host, request.runtime_name, by_cdi, tuple(config.runtimes), reading)


def _take_out(progress: Progress, what: str, remove: partial[str]) -> None:
    failed = remove()
    if failed:
        progress.note(f"{what} was not deleted: {failed}")


def _image(podman: Podman, way: Way, token: str, progress: Progress, cleanup: ExitStack) -> str:
    """An image from this node, removed at the end."""
    with progress.step("make an image from this node's own files"):
        host = podman.host
        names = Names(f"{maker(host)}-{token}", labels(host))
        reference, archive = verification_image(assemble(host), names, by_handler=not way.devices)
        cleanup.callback(_take_out, progress, f"image {reference}", partial(podman.remove_image, reference))
        failed = podman.load(archive)
    if failed:
        raise DaemonError(f"podman can't load the image: {failed}", hint="podman info; df -h")
    return reference


def _arguments(host: Host, request: ContainerRequest, way: Way, image: str, name: str) -> tuple[str, ...]:
    """``podman run`` and its arguments. No log is kept: the output is passed on as it is written.

    The program is pid 1, which ignores SIGTERM, so it is stopped without a timeout.
    """
    marks = [part for item in labels(host).items() for part in ("--label", "{}={}".format(*item))]
    env_options = [part for item in request.env.items() for part in ("--env", "{}={}".format(*item))]
    gpus = [part for device in way.devices for part in ("--device", device)]
    before = () if way.devices else ("--runtime", way.handler)
    fixed = ("--rm", "--pull=never", "--network=none", "--log-driver=none", "--stop-timeout=0")
    return (*before, "run", f"--name={name}", *fixed, *marks, *env_options, *gpus, image, *request.argv)


def _refuse_failure(host: Host, request: ContainerRequest, way: Way, done: Completed) -> None:
    """A program may exit with podman's own codes too; podman's failures begin with ``Error:``."""
    if done.timed_out:
        raise timed_out(request.timeout)
    if done.code in _OWN_FAILURES and "Error: " in done.stderr:
        raise explain(host, DaemonError(said(done), hint="podman info"), way)
