"""Run one program in one container, with GPUs by a runtime handler or by CDI, and leave nothing.

Docker is asked through its API, containerd and CRI-O through the CRI as the kubelet asks them, podman by its
command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from gpunode.dataclass import dataclass, field
from gpunode.errors import DaemonError, GpunodeError, PreconditionError, UsageError
from gpunode.facts.distributions import DISTRIBUTIONS
from gpunode.host import Host
from gpunode.result import ExitCode, Progress
from gpunode.runtime.container_way import Way

ENGINES = ("containerd", "crio", "docker", "podman", *DISTRIBUTIONS)
_UNREACHABLE = ("absent", "refused", "denied", "not-a-socket", "cri-disabled")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class ContainerRequest:
    """What to run and where. Without `image` it is the vector-add program, in an image made from this node.

    `engine` is one of `ENGINES`; a distribution's name means the containerd that it brings.

    `argv` replaces the image's command and keeps its entry point, which for the image made here is Python.
    An `image` must be on the node. `timeout` counts seconds from the program's start. `socket` and `config`
    say which daemon, if not the system's own. With `cdi` the GPUs come by CDI even where the engine has the
    handler `runtime_name`.
    """

    engine: str
    runtime_name: str = "nvidia"
    image: str = ""
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 60.0
    socket: str = ""
    config: str = ""
    cdi: bool = False


@dataclass(frozen=True)
class ContainerOutcome:
    """How the program ended; `seconds` is from the request to the end, image and clean-up included.

    `way` is how the container was given its GPUs.
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    way: Way


def run_program(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """Run it to its end. `DaemonError` or `PreconditionError` says why it never ran or was killed."""
    if request.engine not in ENGINES:
        raise UsageError(f"no program can be run in {request.engine}", hint=f"one of: {', '.join(ENGINES)}")
    if not host.live:
        raise PreconditionError(
            f"no container can be started under --root {host.root}", hint="run it on the node itself"
        )
    if request.engine == "docker":
        from gpunode.runtime.container_run_docker import run
    elif request.engine == "podman":
        from gpunode.runtime.container_run_podman import run
    elif request.engine == "crio":
        from gpunode.runtime.container_run_crio import run
    else:
        from gpunode.runtime.container_run_containerd import run
    return run(host, request, progress)


def first_contact(question: Callable[[], _Answer]) -> _Answer:
    """Ask the daemon for the first time: one that can't be reached is a missing precondition."""
    try:
        return question()
    except DaemonError as error:
        if error.code not in _UNREACHABLE:
            raise
        raise DaemonError(
            error.message, hint=error.hint, code=error.code, exit_code=ExitCode.PRECONDITION
        ) from error


def clean_up(progress: Progress, what: str, remove: Callable[[], None]) -> None:
    """Remove something on the way out; a failure is told and hides no earlier one."""
    try:
        remove()
    except GpunodeError as error:
        progress.note(f"{what} is still there: {error.message}")


def new_token() -> str:
    """What tells this run's containers and images from another's that runs at the same time."""
    import secrets

    return secrets.token_hex(4)
