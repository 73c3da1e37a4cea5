"""Run a program through podman: load the image, one container, its output, all removed. Rootless too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
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
    GpuAccess,
    choose,
    clean_up,
    gpu_specs,
    labels,
    remove_leftovers,
    require_image,
)
from gpunode.runtime.verify.failures import explain, timed_out
from gpunode.runtime.verify.image import make_image

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

    def require(self, *arguments: str, timeout: float = ANSWER_SECONDS, stdin: bytes | None = None) -> None:
        """Run a subcommand; `DaemonError` if it fails, unless there was nothing to remove."""
        done = self.call(*arguments, timeout=timeout, stdin=stdin)
        if done.timed_out:
            raise DaemonError(f"it did not end within {timeout:g} s")
        if not done.ok and not any(words in done.stderr for words in _UNKNOWN):
            raise DaemonError(said(done))

    def load_image(self, archive: bytes) -> None:
        """Load a ``docker save`` archive."""
        self.require("load", "--quiet", timeout=_LOAD_SECONDS, stdin=archive)

    def has_image(self, reference: str) -> bool:
        """Whether podman has this image; nothing is pulled. `DaemonError` if podman fails."""
        answer = self.call("image", "exists", reference)
        if answer.code not in (0, 1):  # podman-image-exists(1): 1 is no, 125 a failure of podman's own
            raise DaemonError(f"podman image exists: {said(answer)}", hint="podman info")
        return answer.ok

    def remove_image(self, reference: str) -> None:
        """Remove a name and, if it was the last, the image."""
        self.require("rmi", "--force", reference)

    def remove_container(self, name: str) -> None:
        """Kill it if necessary and remove it."""
        self.require("rm", "--force", "--ignore", "--volumes", name)

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
    """See `runtime.verify.run_program`."""
    start = host.monotonic()
    daemon = find_podman(host, request.config or None)
    if daemon is None or daemon.binary is None:
        host.refuse_unsafe("podman")
        raise PreconditionError(
            "podman is not on this node", hint="apt install podman, or use another engine"
        )
    podman = Podman(host, daemon.binary)
    way = _way(host, request, daemon.version, progress)
    if request.image:
        has_image = podman.has_image(request.image)
        require_image("podman", request.image, has_image, f"podman pull {request.image}")
    remove_leftovers(
        host,
        progress,
        partial(podman.labelled_containers, OURS),
        lambda name: clean_up(progress, f"container {name}", partial(podman.remove_container, name)),
        partial(podman.image_names, VERIFICATION),
        lambda name: clean_up(progress, f"image {name}", partial(podman.remove_image, name)),
    )
    token = token_hex(4)  # distinguishes this run from concurrent ones
    with ExitStack() as cleanup:
        load = partial(_load, podman)
        image = request.image or make_image(host, way, token, progress, cleanup, load, podman.remove_image)
        name = f"gpunode-verify-{token}"
        # by name, and before it exists: killing podman leaves the container to its monitor
        cleanup.callback(clean_up, progress, f"container {name}", partial(podman.remove_container, name))
        with progress.step(f"run it through podman, {way}"):
            done = podman.call(
                *_arguments(host, request, way, image, name), timeout=request.timeout + _START_SECONDS
            )
        _refuse_failure(host, request, way, done)
    return ContainerOutcome(done.code, done.stdout, done.stderr, host.monotonic() - start, way)


def _way(host: Host, request: ContainerRequest, version: tuple[int, ...], progress: Progress) -> GpuAccess:
    """CDI is podman's default; a runtime of containers.conf if the node has no specification."""
    try:
        config = load_podman(host)
    except GpunodeError as error:
        progress.note(f"podman ignores a file: {error.message}")
        config = PodmanConfig(())
    reading = CdiReading("podman", version, True, config.strings("cdi_spec_dirs") or DIRECTORIES)
    by_cdi = request.cdi or request.runtime_name not in config.runtimes or bool(gpu_specs(host, reading))
    return choose(host, request.runtime_name, by_cdi, tuple(config.runtimes), reading)


def _load(podman: Podman, archive: bytes) -> None:
    try:
        podman.load_image(archive)
    except DaemonError as error:
        message = f"podman can't load the image: {error.message}"
        raise DaemonError(message, hint="podman info; df -h") from error


def _arguments(
    host: Host, request: ContainerRequest, way: GpuAccess, image: str, name: str
) -> tuple[str, ...]:
    """``podman run`` and its arguments. No log is kept: the output is passed on as it is written.

    The program is pid 1, which ignores SIGTERM, so it is stopped without a timeout.
    """
    marks = [part for item in labels(host).items() for part in ("--label", "{}={}".format(*item))]
    env_options = [part for item in request.env.items() for part in ("--env", "{}={}".format(*item))]
    gpus = [part for device in way.devices for part in ("--device", device)]
    before = () if way.devices else ("--runtime", way.handler)
    fixed = ("--rm", "--pull=never", "--network=none", "--log-driver=none", "--stop-timeout=0")
    return (*before, "run", f"--name={name}", *fixed, *marks, *env_options, *gpus, image, *request.argv)


def _refuse_failure(host: Host, request: ContainerRequest, way: GpuAccess, done: Completed) -> None:
    """A program may exit with podman's own codes too; podman's failures begin with ``Error:``."""
    if done.timed_out:
        raise timed_out(request.timeout)
    if done.code in _OWN_FAILURES and "Error: " in done.stderr:
        raise explain(host, DaemonError(said(done), hint="podman info"), way)
