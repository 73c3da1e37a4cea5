"""What a container image says of the CUDA and the driver that it needs, asked of the engines that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpunode.dataclass import dataclass, field
from gpunode.errors import DaemonError
from gpunode.host import Host

if TYPE_CHECKING:
    from gpunode.facts.about_engines import AboutEngines

DAEMON_SECONDS = 3.0
_PODMAN_SECONDS = 10.0
_REQUIRE = "NVIDIA_REQUIRE_"
_OURS = ("NVIDIA_", "CUDA_")
# Tegra's own word for what is mounted, no condition
_NO_CONDITION = "NVIDIA_REQUIRE_JETPACK"
_TRUE = ("1", "t", "true", "all")  # NVIDIA_DISABLE_REQUIRE as the toolkit reads it (strconv.ParseBool)


@dataclass(frozen=True)
class Image:
    """An image of one engine's store. `environment` is what its containers start with."""

    engine: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def requirements(self) -> dict[str, str]:
        """The NVIDIA_REQUIRE_* by name; {} where the image switches them off itself."""
        if self.environment.get("NVIDIA_DISABLE_REQUIRE", "").lower() in _TRUE:
            return {}
        return {
            name: value
            for name, value in self.environment.items()
            if name.startswith(_REQUIRE) and not name.startswith(_NO_CONDITION)
        }

    @property
    def cuda(self) -> str:
        """The CUDA release that it was built with, such as ``12.4.1``; empty if it doesn't say."""
        return self.environment.get("CUDA_VERSION", "")


@dataclass(frozen=True)
class Search:
    """The image, None if nobody holds it; `held_not` are the engines that said so, `silent` those that gave
    no answer, with the reason."""

    image: Image | None
    held_not: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


def find_image(node: AboutEngines, reference: str) -> Search:
    """Ask one engine after another; nothing is pulled."""
    held_not: list[str] = []
    silent: list[str] = []
    for engine, ask in _engines(node, reference):
        try:
            config = ask()
        except DaemonError as error:
            silent.append(f"{engine}: {error.message}")
            continue
        if config is not None:
            return Search(Image(engine, _environment(config)), tuple(held_not), tuple(silent))
        held_not.append(engine)
    return Search(None, tuple(held_not), tuple(silent))


def _engines(node: AboutEngines, reference: str) -> Iterator[tuple[str, Callable[[], dict[str, Any] | None]]]:
    host = node.host
    if node.docker is not None:
        yield "Docker", lambda: _of_docker(host, node.docker.socket if node.docker else "", reference)
    for name, daemon in (("containerd", node.containerd), ("CRI-O", node.crio)):
        if daemon is not None:
            yield name, lambda socket=daemon.socket: _of_cri(host, socket, reference)  # type: ignore[misc]
    if node.podman is not None:
        yield "podman", lambda: _of_podman(host, reference)


def _of_docker(host: Host, socket: str, reference: str) -> dict[str, Any] | None:
    if not host.live:
        return _recorded(host, socket, reference)
    from gpunode.daemons.docker_api import DockerApi

    return _heard(host, socket, reference, DockerApi(host, socket, DAEMON_SECONDS).image_config(reference))


def _of_cri(host: Host, socket: str, reference: str) -> dict[str, Any] | None:
    if not host.live:
        return _recorded(host, socket, reference)
    from gpunode.daemons.cri_images import image_config

    return _heard(host, socket, reference, image_config(host, socket, reference, DAEMON_SECONDS))


def _heard(host: Host, socket: str, reference: str, config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Say it in a recording's terms, without variables that may hold an image's secrets."""
    env = config.get("Env") if config else None
    kept = [one for one in env if str(one).startswith(_OURS)] if isinstance(env, list) else []
    host.heard("daemons", socket, {"images": {} if config is None else {reference: {"Env": kept}}})
    return config


def _of_podman(host: Host, reference: str) -> dict[str, Any] | None:
    """podman's own exit code 125 stands for every failure, an unknown image among them."""
    from json import loads

    done = host.run(("podman", "image", "inspect", "--", reference), timeout=_PODMAN_SECONDS)
    if done.timed_out:
        raise DaemonError(f"podman gave no answer within {_PODMAN_SECONDS:g} s", code="timeout")
    if not done.ok:
        return None
    try:
        told = loads(done.stdout)
    except (ValueError, RecursionError):
        told = None
    first = told[0] if isinstance(told, list) and told else None
    config = first.get("Config") if isinstance(first, dict) else None
    return config if isinstance(config, dict) else {}


def _recorded(host: Host, socket: str, reference: str) -> dict[str, Any] | None:
    seen = host.recorded("daemons", socket)
    if not isinstance(seen, dict):
        raise DaemonError("no answer was recorded", code="absent")
    images = seen.get("images")
    config = images.get(reference) if isinstance(images, dict) else None
    return config if isinstance(config, dict) else None


def _environment(config: Mapping[str, Any]) -> dict[str, str]:
    """Env of an image's settings: ``NAME=VALUE`` strings; what is none is left out."""
    listed = config.get("Env")
    pairs = (item for item in (listed if isinstance(listed, list) else ()) if isinstance(item, str))
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
