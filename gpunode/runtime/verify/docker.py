"""Run a program through Docker: load the image, one container with GPUs, its output, all removed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from secrets import token_hex
from typing import Any

from gpunode.daemons.docker import DEFAULT_SOCKET, DockerApi
from gpunode.errors import DaemonError, PreconditionError
from gpunode.facts.daemons import parse_version
from gpunode.facts.docker import find_docker, programs
from gpunode.host import Host
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
    first_contact,
    labels,
    remove_leftovers,
    require_image,
)
from gpunode.runtime.verify.failures import explain, timed_out
from gpunode.runtime.verify.image import make_image

_START_SECONDS = 60.0


def run_on_docker(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """See `runtime.verify.run_program`."""
    start = host.monotonic()
    api = DockerApi(host, _socket(host, request))
    way = _way(host, api, request)
    containers, images = partial(api.labelled_containers, OURS), partial(api.image_names, VERIFICATION)
    remove_leftovers(host, progress, containers, api.remove_container, images, api.remove_image)
    token = token_hex(4)  # distinguishes this run from concurrent ones
    with ExitStack() as cleanup:
        image = request.image or make_image(
            host, way, token, progress, cleanup, api.load_image, api.remove_image
        )
        name = f"gpunode-verify-{token}"
        # by name, and before it exists: an interrupt may come between the request and its response
        cleanup.callback(clean_up, progress, f"container {name}", partial(api.remove_container, name))
        with progress.step(f"run it through Docker, {way}"):
            code = _run_container(host, api, request, way, image, name)
        out, err = api.logs(name)
    return ContainerOutcome(code, out, err, host.monotonic() - start, way)


def _socket(host: Host, request: ContainerRequest) -> str:
    if request.socket:
        if host.socket_state(request.socket) == "absent":
            raise PreconditionError(
                f"there is no socket at {request.socket}", hint="leave out --socket, or start Docker"
            )
        return request.socket
    daemon = find_docker(host, request.config or None)
    if daemon is None:
        host.refuse_unsafe("dockerd")
        raise PreconditionError("Docker is not on this node", hint="apt install docker.io, or use containerd")
    return daemon.socket or DEFAULT_SOCKET


def _way(host: Host, api: DockerApi, request: ContainerRequest) -> GpuAccess:
    """How the container gets its GPUs; checked before anything is made, like the caller's image."""
    info = first_contact(api.info)
    known = tuple(sorted(programs(info, "Runtimes")))
    way = choose(host, request.runtime_name, request.cdi, known, _reading(info))
    if request.image:
        require_image("Docker", request.image, api.has_image(request.image), f"docker pull {request.image}")
    return way


def _reading(info: Mapping[str, Any]) -> CdiReading:
    """Docker reports its CDI directories from 25 on, an empty list where CDI is off."""
    version = parse_version(str(info.get("ServerVersion", "")))
    directories = info.get("CDISpecDirs")
    if not isinstance(directories, list):
        return CdiReading("docker", version)
    readable = tuple(directory for directory in directories if isinstance(directory, str))
    return CdiReading("docker", version, bool(readable), readable)


def _run_container(
    host: Host, api: DockerApi, request: ContainerRequest, way: GpuAccess, image: str, name: str
) -> int:
    try:
        api.create_container(specification(request, way, image, labels(host)), name)
        api.start_container(name, _START_SECONDS)
    except DaemonError as error:
        raise explain(host, error, way) from error
    try:
        return api.wait_container(name, request.timeout)
    except DaemonError as error:
        with suppress(DaemonError):
            api.kill_container(name)
        raise timed_out(request.timeout) if error.code == "timeout" else error from error


def specification(
    request: ContainerRequest, way: GpuAccess, image: str, marks: Mapping[str, str]
) -> dict[str, Any]:
    """The body of ``POST /containers/create``; `marks` are its labels."""
    settings: dict[str, Any] = {
        "NetworkMode": "none",
        "LogConfig": {"Type": "json-file"},  # the daemon's own default may be a log driver that can't be read
    }
    if way.devices:
        settings["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": list(way.devices)}]
    else:
        settings["Runtime"] = way.handler
    body: dict[str, Any] = {
        "Image": image,
        "Env": [f"{name}={value}" for name, value in request.env.items()],
        "Labels": dict(marks),
        "HostConfig": settings,
    }
    if request.argv:
        body["Cmd"] = list(request.argv)
    return body
