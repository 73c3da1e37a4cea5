"""Run a program through Docker: load the image, one container with the runtime, its output, all removed."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from gpunode.daemons.docker_api import DEFAULT_SOCKET, DockerApi
from gpunode.errors import DaemonError, PreconditionError
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

_START_SECONDS = 60.0


def run(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """See `container_run.run_program`."""
    begun = host.monotonic()
    api = DockerApi(host, _socket(host, request))
    _require_handler(api, request.runtime_name)
    token = new_token()
    with ExitStack() as cleanup:
        image = _image(host, api, request, token, progress, cleanup)
        name = f"gpunode-verify-{token}"
        # by name, and before it exists: an interrupt may come between the request and its answer
        cleanup.callback(clean_up, progress, f"container {name}", partial(api.remove_container, name))
        with progress.step(f"run it through docker's runtime {request.runtime_name}"):
            code = _run_container(api, request, image, name)
        out, err = api.logs(name)
    return ContainerOutcome(code, out, err, host.monotonic() - begun)


def _socket(host: Host, request: ContainerRequest) -> str:
    if request.socket:
        return request.socket
    from gpunode.facts.docker import find_docker

    daemon = find_docker(host, request.config or None)
    if daemon is None:
        raise PreconditionError("Docker is not on this node", hint="apt install docker.io, or use containerd")
    return daemon.socket or DEFAULT_SOCKET


def _require_handler(api: DockerApi, runtime_name: str) -> None:
    runtimes = first_contact(api.info).get("Runtimes")
    known = tuple(sorted(runtimes)) if isinstance(runtimes, dict) else ()
    if runtime_name not in known:
        raise missing_handler("docker", runtime_name, known)


def _image(
    host: Host, api: DockerApi, request: ContainerRequest, token: str, progress: Progress, cleanup: ExitStack
) -> str:
    """The image to run: the caller's, which must be there, or one from this node, removed on the way out."""
    if request.image:
        if not api.has_image(request.image):
            raise PreconditionError(
                f"Docker holds no image {request.image}, and gpunode pulls none",
                hint=f"docker pull {request.image}",
            )
        return request.image
    from gpunode.runtime.host_image import assemble, verification_image

    with progress.step("make an image from this node's own files"):
        reference, archive = verification_image(assemble(host), f"-{token}")
        cleanup.callback(clean_up, progress, f"image {reference}", partial(api.remove_image, reference))
        api.load_image(archive)
    return reference


def _run_container(api: DockerApi, request: ContainerRequest, image: str, name: str) -> int:
    try:
        api.create_container(specification(request, image), name)
        api.start_container(name, _START_SECONDS)
    except DaemonError as error:
        raise explain(error, "docker", request.runtime_name) from error
    try:
        return api.wait_container(name, request.timeout)
    except DaemonError as error:
        with suppress(DaemonError):
            api.kill_container(name)
        raise timed_out(request.timeout) if error.code == "timeout" else error from error


def specification(request: ContainerRequest, image: str) -> dict[str, Any]:
    """The body of ``POST /containers/create``."""
    body: dict[str, Any] = {
        "Image": image,
        "Env": [f"{name}={value}" for name, value in request.env.items()],
        "Labels": {"gpunode.run": "verify"},
        "HostConfig": {
            "Runtime": request.runtime_name,
            "NetworkMode": "none",
            "LogConfig": {"Type": "json-file"},  # the daemon's own default may be one that can't be read
        },
    }
    if request.argv:
        body["Cmd"] = list(request.argv)
    return body
