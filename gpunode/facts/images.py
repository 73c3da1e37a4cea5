"""CUDA and driver requirements of a container image, from the engines that hold it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from operator import eq, ge, gt, le, lt, ne
from types import MappingProxyType
from typing import Any, NamedTuple

from gpunode.daemons.cri import image_config
from gpunode.daemons.docker import DockerApi
from gpunode.errors import DaemonError
from gpunode.facts import tables
from gpunode.host import Host
from gpunode.output.typed import as_dict, as_strings

DAEMON_SECONDS = 3.0
_PODMAN_SECONDS = 10.0
_REQUIRE = "NVIDIA_REQUIRE_"
_OURS = ("NVIDIA_", "CUDA_")
# Tegra's own variable for mounts, not a condition
_NO_CONDITION = "NVIDIA_REQUIRE_JETPACK"
_TRUE = ("1", "t", "true", "all")  # NVIDIA_DISABLE_REQUIRE as the toolkit reads it (strconv.ParseBool)


class Image(NamedTuple):
    """An image of one engine's store. `environment` is what its containers start with."""

    engine: str
    environment: Mapping[str, str] = MappingProxyType({})

    @property
    def requirements(self) -> dict[str, str]:
        """The NVIDIA_REQUIRE_* by name; {} if the image disables them itself."""
        if self.environment.get("NVIDIA_DISABLE_REQUIRE", "").lower() in _TRUE:
            return {}
        return {
            name: value
            for name, value in self.environment.items()
            if name.startswith(_REQUIRE) and not name.startswith(_NO_CONDITION)
        }

    @property
    def cuda(self) -> str:
        """The CUDA release that it was built with, such as ``12.4.1``; empty if unknown."""
        return self.environment.get("CUDA_VERSION", "")


class Search(NamedTuple):
    """The image, None if no engine has it; `held_not` are the engines that reported so, `silent` those that
    didn't answer, with the reason."""

    image: Image | None
    held_not: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


def find_image(host: Host, reference: str, docker: str, cri: Mapping[str, str], podman: bool) -> Search:
    """Query one engine after another; nothing is pulled.

    `docker` is the socket of its API, empty without Docker; `cri` maps each CRI engine's name to its socket.
    """
    held_not: list[str] = []
    silent: list[str] = []
    for engine, read in _engines(host, reference, docker, cri, podman):
        try:
            config = read()
        except DaemonError as error:
            silent.append(f"{engine}: {error.message}")
            continue
        if config is not None:
            pairs = (pair.partition("=") for pair in as_strings(config.get("Env")))
            environment = {name: value for name, _, value in pairs}
            return Search(Image(engine, environment), tuple(held_not), tuple(silent))
        held_not.append(engine)
    return Search(None, tuple(held_not), tuple(silent))


def _engines(
    host: Host, reference: str, docker: str, cri: Mapping[str, str], podman: bool
) -> Iterator[tuple[str, Callable[[], dict[str, Any] | None]]]:
    if docker:
        query = partial(DockerApi(host, docker, DAEMON_SECONDS).image_config, reference)
        yield "Docker", partial(_of_daemon, host, docker, reference, query)
    for name, socket in cri.items():
        query = partial(image_config, host, socket, reference, DAEMON_SECONDS)
        yield name, partial(_of_daemon, host, socket, reference, query)
    if podman:
        yield "podman", partial(_of_podman, host, reference)


def _of_daemon(
    host: Host, socket: str, reference: str, query: Callable[[], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """The answer, which is recorded without variables that may contain an image's secrets."""
    if not host.live:
        return _recorded(host, socket, reference)
    config = query()
    env = config.get("Env") if config else None
    variables = (
        [variable for variable in env if str(variable).startswith(_OURS)] if isinstance(env, list) else []
    )
    host.heard("daemons", socket, {"images": {} if config is None else {reference: {"Env": variables}}})
    return config


def _of_podman(host: Host, reference: str) -> dict[str, Any] | None:
    """podman's exit code 125 covers every failure, including an unknown image."""
    done = host.run(("podman", "image", "inspect", "--", reference), timeout=_PODMAN_SECONDS)
    if done.timed_out:
        raise DaemonError(f"podman didn't answer within {_PODMAN_SECONDS:g} s", code="timeout")
    if not done.ok:
        return None
    try:
        answer = json.loads(done.stdout)
    except (ValueError, RecursionError):
        answer = None
    first = answer[0] if isinstance(answer, list) and answer else None
    return as_dict(first.get("Config")) if isinstance(first, dict) else {}


def _recorded(host: Host, socket: str, reference: str) -> dict[str, Any] | None:
    seen = host.recorded("daemons", socket)
    if not isinstance(seen, dict):
        raise DaemonError("the recording has no answer", code="absent")
    images = seen.get("images")
    config = images.get(reference) if isinstance(images, dict) else None
    return config if isinstance(config, dict) else None


# The language of NVIDIA_REQUIRE_*: an image's requirements for the driver and the GPU that it runs on.
#
# Alternatives are separated by spaces, the conditions of one by commas:
# ``cuda>=12.4 brand=tesla,driver>=535``. Properties are cuda, driver, arch (a GPU's compute capability) and
# brand; versions compare number by number, trailing zeros are ignored, brands compare without regard to case.
# The language is that of libnvidia-container (dsl.c), with which the runtime checks images.

VERSIONS = ("cuda", "driver", "arch")
PROPERTIES = (*VERSIONS, "brand")
_CONDITION = re.compile(r"([^<>=!]+)(<=|>=|!=|=|<|>)([^<>=!]+)")
_OPERATORS = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
_NUMBERS = re.compile(r"[0-9.]+")
_LONGEST = 20_000  # characters; the longest of NVIDIA's own images has 3,000
_DIGITS = 9


class Comparison(NamedTuple):
    """One comparison: ``driver``, ``>=``, ``535``."""

    name: str
    operator: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.value}"


def parse(text: str) -> tuple[tuple[Comparison, ...], ...]:
    """Alternatives of conditions. ValueError for what the runtime calls an invalid expression."""
    if len(text) > _LONGEST:
        raise ValueError("too long for a requirement")
    groups = (tuple(map(_comparison, filter(None, group.split(",")))) for group in text.split(" "))
    return tuple(filter(None, groups))


def _comparison(text: str) -> Comparison:
    match = _CONDITION.fullmatch(text)
    name = match[1].lower() if match else ""
    if match is None or name not in PROPERTIES:
        raise ValueError(f"{text!r} is not a condition")
    if name in VERSIONS:
        numbers(match[3])
    elif match[2] not in ("=", "!="):
        raise ValueError(f"{text!r}: brands can only be compared for equality")
    return Comparison(name, match[2], match[3])


def numbers(text: str) -> tuple[int, ...]:
    """A version as numbers that compare, without trailing zeros. ValueError if it is not a version."""
    parts = [part for part in text.split(".") if part]
    if not _NUMBERS.fullmatch(text) or not parts or max(map(len, parts)) > _DIGITS:
        raise ValueError(f"{text!r} is not a version")
    values = [int(part) for part in parts]
    while values and values[-1] == 0:
        values.pop()
    return tuple(values)


def satisfied(
    alternatives: Iterable[Iterable[Comparison]], facts: Mapping[str, Collection[str]]
) -> bool | None:
    """Whether one alternative is satisfied; None if unknown.

    No alternative at all requires nothing. `facts` maps a property to its possible values: one if it is
    known, several or none if it isn't.
    """
    answers = [
        _all(_holds(condition, facts.get(condition.name, ())) for condition in group)
        for group in alternatives
    ]
    if True in answers or not answers:
        return True
    return None if None in answers else False


def _all(answers: Iterable[bool | None]) -> bool | None:
    results = tuple(answers)
    if False in results:
        return False
    return None if None in results else True


def _holds(condition: Comparison, values: Collection[str]) -> bool | None:
    answers = {_compared(condition, value) for value in values}
    return answers.pop() if len(answers) == 1 else None


def _compared(condition: Comparison, value: str) -> bool:
    if condition.name == "brand":
        return (value.lower() == condition.value.lower()) == (condition.operator == "=")
    return bool(_OPERATORS[condition.operator](numbers(value), numbers(condition.value)))


# Sample images that guides recommend for a GPU test, and the CUDA release of each.

TABLE = "sample_images"
VECTOR_ADD = "nvcr.io/nvidia/k8s/cuda-sample"


def sample_cuda(reference: str) -> str:
    """The CUDA release of a sample's image, empty for any other image. The tag may name the distribution
    that the image was built on (``vectoradd-cuda11.7.1-ubi8``), and a digest may follow it."""
    image = reference.removeprefix("docker.io/").partition("@")[0]
    rows = tables.table(TABLE).rows if image else ()
    known = ((f"{row['image']}:{row['tag']}", row["cuda"]) for row in rows)
    return next((cuda for name, cuda in known if image == name or image.startswith(f"{name}-")), "")


def vector_add_image() -> str:
    """NVIDIA's newest vector-add sample for Kubernetes, with its tag."""
    rows = [row for row in tables.table(TABLE).rows if row["image"] == VECTOR_ADD]
    newest = max(rows, key=lambda row: tables.numbers(row["cuda"]))
    return f"{newest['image']}:{newest['tag']}"
