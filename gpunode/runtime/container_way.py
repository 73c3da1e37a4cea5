"""How a container is given its GPUs: by a runtime handler, or by devices that a CDI specification names."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.cdi.places import STANDARD
from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError, PreconditionError
from gpunode.facts.cdi import DIRECTORIES, CdiSpec, nvidia_specs
from gpunode.host import Host

KIND = "nvidia.com/gpu"
ALL = f"{KIND}=all"
DEFAULT_HANDLER = "nvidia"
_NAMES = {"containerd": "containerd", "crio": "CRI-O", "docker": "Docker", "podman": "podman"}
# the first release of each engine that a container can be given CDI devices by
_SINCE = {"containerd": (1, 7), "crio": (1, 24), "docker": (25,), "podman": (4, 1)}


@dataclass(frozen=True)
class CdiReading:
    """What an engine, as it runs now, makes of CDI. `enabled` is None where it doesn't say.

    `version` is the engine's own release, () if it isn't known; `directories` are where it looks. `manager`
    is the distribution whose containerd it is, if any.
    """

    engine: str
    version: tuple[int, ...] = ()
    enabled: bool | None = None
    directories: tuple[str, ...] = DIRECTORIES
    manager: str = ""

    @property
    def option(self) -> str:
        """The name by which ``--runtime`` and ``--on`` mean it."""
        return self.manager or self.engine

    @property
    def title(self) -> str:
        """As people write it."""
        return f"{self.manager}'s containerd" if self.manager else _NAMES.get(self.engine, self.engine)


@dataclass(frozen=True)
class Way:
    """The handler to run with, or the engine's own default one ("") and CDI devices; never both."""

    reading: CdiReading
    handler: str = ""
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"cdi {', '.join(self.devices)}" if self.devices else f"handler {self.handler}"


def choose(host: Host, wanted: str, cdi: bool, handlers: tuple[str, ...] | None, reading: CdiReading) -> Way:
    """The handler `wanted` if the engine has it, else CDI; CDI alone if the caller says `cdi`.

    `handlers` is None for an engine that doesn't tell them. A handler that the caller chose by another name
    than the usual one is never replaced by CDI. The error names both ways out.
    """
    if cdi:
        _require(host, reading)
        return Way(reading, devices=(ALL,))
    if handlers is None or wanted in handlers:
        return Way(reading, wanted)
    if wanted == DEFAULT_HANDLER and _reads(reading) and gpu_specs(host, reading):
        return Way(reading, devices=(ALL,))
    raise missing_handler(reading, wanted, handlers)


def missing_handler(reading: CdiReading, wanted: str, known: Sequence[str]) -> DaemonError:
    """The running engine doesn't list the handler: asked before anything is made."""
    cure = f"gpunode configure-runtime --runtime {reading.option}"
    if wanted in ("nvidia-cdi", "nvidia-legacy"):
        cure += f" --also {wanted.removeprefix('nvidia-')}"
    elif wanted != DEFAULT_HANDLER:
        cure += f" --nvidia-runtime-name {wanted}"
    return DaemonError(
        f'{reading.title} as it runs now has no runtime "{wanted}"; it knows {", ".join(known) or "none"}',
        hint=cure if _too_old(reading) else f"{cure}; or, without a runtime: {cure} --cdi",
        code="handler-missing",
    )


def gpu_specs(host: Host, reading: CdiReading) -> tuple[CdiSpec, ...]:
    """Specifications of NVIDIA's GPUs in the engine's directories, broken ones included."""
    specs = nvidia_specs(host, reading.directories)
    return tuple(spec for spec in specs if spec.kind == KIND or (spec.problem and not spec.kind))


def _too_old(reading: CdiReading) -> bool:
    since = _SINCE.get(reading.engine, ())
    return bool(reading.version) and reading.version < since


def _reads(reading: CdiReading) -> bool:
    return reading.enabled is not False and not _too_old(reading)


def _require(host: Host, reading: CdiReading) -> None:
    """`PreconditionError` where the engine can't take a CDI device, or nothing describes one."""
    name, since = reading.title, _SINCE.get(reading.engine, ())
    if _too_old(reading):
        have, need = (".".join(map(str, one)) for one in (reading.version, since))
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
    """No file describes the GPUs."""
    return PreconditionError(
        f"no CDI specification of kind {KIND} is in {' or '.join(reading.directories)}",
        hint=rewriting(f"{reading.directories[-1]}/nvidia.yaml"),
        code="cdi-no-specification",
    )


def rewriting(path: str) -> str:
    """The command that writes this specification anew; what refreshes by itself has one place only."""
    return "gpunode cdi refresh" if path == STANDARD else f"gpunode cdi generate --output {path}"
