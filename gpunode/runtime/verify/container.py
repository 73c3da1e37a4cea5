"""GPUs for a container: by a runtime handler, or by devices that a CDI specification names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gpunode.cdi.locations import STANDARD
from gpunode.errors import DaemonError, GpunodeError, PreconditionError
from gpunode.facts.cdi import DIRECTORIES, SpecFile, nvidia_specs
from gpunode.facts.registry import ENGINES
from gpunode.gpu.vectoradd import DeviceResult
from gpunode.host import Host
from gpunode.output.result import ExitCode, Progress

KIND = "nvidia.com/gpu"
ALL = f"{KIND}=all"
DEFAULT_HANDLER = "nvidia"


@dataclass(frozen=True)
class CdiReading:
    """The running engine's support of CDI. `enabled` is None if it doesn't report it.

    `version` is the engine's own release, () if it isn't known; `directories` are those of its CDI files.
    `manager` is the distribution that runs this containerd, if any.
    """

    engine: str
    version: tuple[int, ...] = ()
    enabled: bool | None = None
    directories: tuple[str, ...] = DIRECTORIES
    manager: str = ""

    @property
    def option(self) -> str:
        """Its name for ``--runtime`` and ``--on``."""
        return self.manager or self.engine

    @property
    def title(self) -> str:
        """Its name in text for the user."""
        return f"{self.manager}'s containerd" if self.manager else ENGINES[self.engine].title


@dataclass(frozen=True)
class GpuAccess:
    """The handler to run with, or the engine's own default one ("") and CDI devices; never both."""

    reading: CdiReading
    handler: str = ""
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"cdi {', '.join(self.devices)}" if self.devices else f"handler {self.handler}"


def choose(
    host: Host, desired: str, cdi: bool, handlers: tuple[str, ...] | None, reading: CdiReading
) -> GpuAccess:
    """The handler `desired` if the engine has it, else CDI; only CDI if the caller sets `cdi`.

    `handlers` is None for an engine that doesn't report them. A handler that the user chose by a name other
    than the usual one is never replaced by CDI. The error names both alternatives.
    """
    if cdi:
        _require(host, reading)
        return GpuAccess(reading, devices=(ALL,))
    if handlers is None or desired in handlers:
        return GpuAccess(reading, desired)
    has_cdi = reading.enabled is not False and not _too_old(reading)
    if desired == DEFAULT_HANDLER and has_cdi and gpu_specs(host, reading):
        return GpuAccess(reading, devices=(ALL,))
    raise missing_handler(reading, desired, handlers)


def missing_handler(reading: CdiReading, desired: str, known: Sequence[str]) -> DaemonError:
    """The error if the running engine doesn't list the handler; checked before anything is created."""
    cure = f"gpunode configure-runtime --runtime {reading.option}"
    if desired in ("nvidia-cdi", "nvidia-legacy"):
        cure += f" --also {desired.removeprefix('nvidia-')}"
    elif desired != DEFAULT_HANDLER:
        cure += f" --nvidia-runtime-name {desired}"
    return DaemonError(
        f'{reading.title} as it runs now has no runtime "{desired}"; it knows {", ".join(known) or "none"}',
        hint=cure if _too_old(reading) else f"{cure}; or, without a runtime: {cure} --cdi",
        code="handler-missing",
    )


def gpu_specs(host: Host, reading: CdiReading) -> tuple[SpecFile, ...]:
    """Specifications of NVIDIA's GPUs in the engine's directories, broken ones included."""
    specs = nvidia_specs(host, reading.directories)
    return tuple(spec for spec in specs if spec.kind == KIND or (spec.problem and not spec.kind))


def _too_old(reading: CdiReading) -> bool:
    return bool(reading.version) and reading.version < ENGINES[reading.engine].cdi


def _require(host: Host, reading: CdiReading) -> None:
    """`PreconditionError` if the engine doesn't support CDI devices, or no specification has any."""
    name, since = reading.title, ENGINES[reading.engine].cdi
    if _too_old(reading):
        have, need = (".".join(map(str, version)) for version in (reading.version, since))
        raise PreconditionError(
            f"{name} {have} knows no CDI; {need} is the first that does",
            hint="upgrade it, or use the runtime handler:"
            f" gpunode configure-runtime --runtime {reading.option}",
            code="cdi-unknown",
        )
    if reading.enabled is False:
        raise PreconditionError(
            f"{name} as it runs now has CDI switched off",
            hint=f"gpunode configure-runtime --runtime {reading.option} --cdi",
            code="cdi-disabled",
        )
    if not gpu_specs(host, reading):
        raise no_specification(reading)


def no_specification(reading: CdiReading) -> PreconditionError:
    """The error if no file describes the GPUs."""
    return PreconditionError(
        f"no CDI specification of kind {KIND} is in {' or '.join(reading.directories)}",
        hint=rewriting(f"{reading.directories[-1]}/nvidia.yaml"),
        code="cdi-no-specification",
    )


def rewriting(path: str) -> str:
    """The command that rewrites this specification; one that refreshes by itself has a fixed path."""
    return "gpunode cdi refresh" if path == STANDARD else f"gpunode cdi generate --output-file {path}"


# The maker of a container or an image of gpunode's, so that a later run can remove those of a killed one.
#
# Everything that a verification creates has its maker as a label: boot, PID namespace, pid and start time. It
# counts as left over only if this kernel shows that the maker has ended; a maker in another PID namespace
# can't be judged.

RUN_LABEL = "gpunode.run"
MAKER_LABEL = "gpunode.maker"
OURS: Mapping[str, str] = {RUN_LABEL: "verify"}
VERIFICATION = "gpunode.local/verify"
STAND_IN = "gpunode.local/stand-in"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MAKER = r"[0-9a-f]{8}-\d+-\d+-\d+"


def maker(host: Host) -> str:
    """This process: ``BOOT-NAMESPACE-PID-START``, START in clock ticks since the boot (proc(5))."""
    pid, _, rest = (host.read_text("/proc/self/stat") or "").partition(" ")
    return f"{_boot(host)}-{_namespace(host)}-{pid}-{_start(rest)}"


def labels(host: Host) -> dict[str, str]:
    """The labels of a container or an image of this run."""
    return {**OURS, MAKER_LABEL: maker(host)}


def maker_of_image(reference: str) -> str:
    """The maker in an image's name, ``gpunode.local/WHAT:...MAKER-TOKEN``; "" for other images."""
    names = "|".join(map(re.escape, (VERIFICATION, STAND_IN)))
    match = re.fullmatch(rf"(?:{names}):(?:[0-9a-f]+-)?({_MAKER})-[0-9a-f]+", reference, re.ASCII)
    return match[1] if match else ""


def remove_leftovers(
    host: Host,
    progress: Progress,
    containers: Callable[[], Mapping[str, Mapping[str, str]]],
    remove_container: Callable[[str], None],
    images: Callable[[], Iterable[str]],
    remove_image: Callable[[str], None],
) -> None:
    """Remove what killed runs left: their containers, then their images."""

    def remove() -> None:
        for container, container_labels in containers().items():
            if is_dead(host, container_labels.get(MAKER_LABEL, "")):
                remove_container(container)
        for name in images():
            if is_dead(host, maker_of_image(name)):
                remove_image(name)

    clean_up(progress, "what an earlier run left", remove)


def is_dead(host: Host, container_maker: str) -> bool:
    """Whether that maker has certainly ended."""
    if not re.fullmatch(_MAKER, container_maker, re.ASCII):
        return False
    boot, namespace, pid, start = container_maker.split("-")
    if namespace != _namespace(host):
        return False  # another namespace's pids; it may even show a boot id of its own (systemd-nspawn does)
    if boot != _boot(host):
        return True
    if not host.exists("/proc/1/stat"):
        return False  # a /proc that hides other users' processes (hidepid)
    try:
        stat = host.read_text(f"/proc/{pid}/stat")
    except GpunodeError:
        return False
    return stat is None or _start(stat) != start


def _boot(host: Host) -> str:
    return (host.read_text(_BOOT_ID) or "").strip()[:8] or "0" * 8


def _namespace(host: Host) -> str:
    """The number in ``pid:[4026531836]``."""
    return re.sub(r"\D", "", host.readlink("/proc/self/ns/pid") or "") or "0"


def _start(stat: str) -> str:
    """The 22nd field; counting starts after the name, which may contain spaces and brackets."""
    fields = stat.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else "0"


_UNREACHABLE = ("absent", "refused", "denied", "not-a-socket", "cri-disabled")


_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class ContainerRequest:
    """What to run and on which engine.

    Without `image` it is the vector-add program, in an image made from this node. `engine` is one of
    `ENGINES`; a distribution's name means the containerd that it runs. `argv` replaces the image's command
    and keeps its entry point, which for the image made here is Python. An `image` must be on the node.
    `timeout` is in seconds from the program's start. `socket` and `config` name the daemon, if not the
    system's own. With `cdi` the GPUs come by CDI even if the engine has the handler `runtime_name`.
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
    """The program's result; `seconds` is from the request to the end, image and clean-up included.

    `way` is how the container got its GPUs.
    """

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    way: GpuAccess


def first_contact(question: Callable[[], _Answer]) -> _Answer:
    """The first request to the daemon: one that can't be reached is a missing precondition."""
    try:
        return question()
    except DaemonError as error:
        if error.code not in _UNREACHABLE:
            raise
        raise DaemonError(
            error.message, hint=error.hint, code=error.code, exit_code=ExitCode.PRECONDITION
        ) from error


def require_image(title: str, image: str, available: bool, pull: str) -> None:
    """`PreconditionError` if the engine lacks the user's image; `pull` is the command that fetches it."""
    if not available:
        raise PreconditionError(f"{title} holds no image {image}, and gpunode pulls none", hint=pull)


def clean_up(progress: Progress, what: str, remove: Callable[[], None]) -> None:
    """Remove something at the end; a failure is reported and doesn't replace an earlier one."""
    try:
        remove()
    except GpunodeError as error:
        progress.note(f"{what} was not deleted: {error.message}")


@dataclass(frozen=True)
class PodRun:
    """The pod's result. `code` and `reason` are empty if it passed; `log` is its last lines.

    `seconds` is from its creation to its end; `removed` whether it was deleted from the cluster.
    """

    server: str
    namespace: str
    name: str
    node: str
    resource: str
    runtime_class: str
    phase: str
    code: str
    reason: str
    seconds: float
    log: tuple[str, ...]
    removed: bool


@dataclass(frozen=True)
class Verification:
    """`data` of the envelope.

    `via` is how the container got its GPUs: a handler, or devices by CDI; for a pod, the device plugin or a
    resource claim. `pod` exists on kubernetes only.
    """

    on: str
    devices: tuple[DeviceResult, ...]
    image: str = ""
    via: str = ""
    pod: PodRun | None = None
