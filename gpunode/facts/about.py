"""What every room of `Node` has: the machine itself, and what was asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from gpunode.dataclass import dataclass, field
from gpunode.errors import DaemonError
from gpunode.host import Host

DAEMON_SECONDS = 3.0  # a healthy daemon answers within milliseconds, a busy one within a second
NVML_SECONDS = 15.0
NVML_SECONDS_MANY = 20.0  # without persistence GPUs wake up one after another, eight in more than ten seconds
FEW_GPUS = 4

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Questions:
    """What the user wants to know beyond the usual.

    `expect_gpus` is how many GPUs there should be, None if nobody said. `cuda` is the CUDA release that
    programs here need ("12.8"), `image` a container image whose requirements are compared, both empty if
    nobody asked. `deep` allows checks that run something: a container, a plugin's RPC.
    """

    expect_gpus: int | None = None
    cuda: str = ""
    image: str = ""
    deep: bool = False


@dataclass(frozen=True)
class Trial:
    """What came of something that was tried; `passed` is None if it couldn't be, and `text` says why."""

    passed: bool | None
    text: str


@dataclass(frozen=True)
class About:
    """The ground of `Node`. `trials` are what a deep check may run, by engine, each on the GPU of a UUID."""

    host: Host
    questions: Questions = field(default_factory=Questions)
    trials: Mapping[str, Callable[[Host, str], Trial]] = field(default_factory=dict)


def or_raise(answer: _Answer | DaemonError) -> _Answer:
    """A daemon's answer, or what kept it from giving one: a topic keeps both, so that a daemon that hangs is
    waited for once and not by every check."""
    if isinstance(answer, DaemonError):
        raise answer
    return answer
