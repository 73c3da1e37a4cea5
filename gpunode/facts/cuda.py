"""Variables that change every CUDA program, set for the whole node or for a container daemon.

The debuggers' and profilers' are those that DCGM's diagnostics refuse to run with
(https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/dcgm-error-codes.html); the other two hide GPUs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from gpunode.errors import GpunodeError
from gpunode.facts.driver import version_numbers
from gpunode.facts.images import numbers, parse, satisfied
from gpunode.facts.registry import DAEMONS
from gpunode.facts.systemd import read_unit
from gpunode.facts.tables import table
from gpunode.facts.topic import Stuck
from gpunode.gpu.child import module_argv
from gpunode.host import Host
from gpunode.host.files import SMALL_BYTES

if TYPE_CHECKING:
    from gpunode.facts.node import Node
    from gpunode.gpu.model import Gpu
    from gpunode.gpu.vectoradd import ProgramAnswer


DEBUGGING = (
    *("NSIGHT_CUDA_DEBUGGER", "CUDA_INJECTION32_PATH", "CUDA_INJECTION64_PATH", "CUDA_AUTO_BOOST"),
    *("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_COREDUMP_FILE", "CUDA_DEVICE_WAITS_ON_EXCEPTION"),
    *("CUDA_PROFILE", "COMPUTE_PROFILE", "OPENCL_PROFILE"),
)
HIDING = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_NOTHING = {False: ("", "0"), True: ("", "all")}  # harmless values, by whether the variable hides GPUs
_ENVIRONMENT = "/etc/environment"
_SYSTEMD = ("/etc/systemd/system.conf", "/etc/systemd/system.conf.d")
# by the running program: a distribution's agent and server are one program, whichever unit is installed
_UNITS = {
    **{engine.program: engine.units[:1] for engine in DAEMONS.values()},
    **{"kubelet": ("kubelet.service",), "k3s": ("k3s.service", "k3s-agent.service")},
    **{"rke2": ("rke2-server.service", "rke2-agent.service")},
    **{"k0s": ("k0scontroller.service", "k0sworker.service")},
}


class CudaVariable(NamedTuple):
    """One variable; `source` is the file, unit or environment that sets it, `line` 1-based for a file."""

    name: str
    value: str
    source: str
    line: int | None = None


def settings(host: Host, programs: Collection[str]) -> tuple[CudaVariable, ...]:
    """All settings that affect CUDA; a harmless value is left out. Of container daemons only the running
    `programs` count."""
    units = [unit for program, units in _UNITS.items() if program in programs for unit in units]
    # in its own environment a user may choose GPUs on purpose
    own = {name: host.environ[name] for name in DEBUGGING if name in host.environ}
    candidates = (
        *_of_node(host),
        *_of_units(host, units),
        *(CudaVariable(name, value, "the environment of gpunode itself") for name, value in own.items()),
    )
    return tuple(setting for setting in candidates if setting.value not in _NOTHING[setting.name in HIDING])


def _of_node(host: Host) -> Iterator[CudaVariable]:
    for path in (_ENVIRONMENT, _SYSTEMD[0], *host.glob(_SYSTEMD[1], "*.conf")):
        for number, line in enumerate(host.text_or_empty(path, SMALL_BYTES).splitlines(), 1):
            stripped = line.strip().removeprefix("export ")
            if path != _ENVIRONMENT:
                key, _, stripped = stripped.partition("=")
                if key.strip() != "DefaultEnvironment":
                    continue
            for name, value in _assignments(stripped, several=path != _ENVIRONMENT):
                yield CudaVariable(name, value, path, number)


def _assignments(text: str, *, several: bool) -> Iterator[tuple[str, str]]:
    """pam_env(8) reads one per line, systemd-system.conf(5) any number of words, quoted if necessary."""
    import shlex

    if not any(name in text for name in (*DEBUGGING, *HIDING)) or text.startswith("#"):
        return
    try:
        words = shlex.split(text) if several else [text.replace('"', "").replace("'", "")]
    except ValueError:
        return
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.strip() in (*DEBUGGING, *HIDING):
            yield name.strip(), value.strip()


def _of_units(host: Host, units: Collection[str]) -> Iterator[CudaVariable]:
    for unit in units:
        unit_file = read_unit(host, unit)
        for name, value in unit_file.environment.items() if unit_file is not None else ():
            if name in DEBUGGING or name in HIDING:
                yield CudaVariable(name, value, unit)


# CUDA releases: the drivers that run them and the GPUs that they support, from the tables.

DRIVERS = "cuda_drivers"
CAPABILITIES = "compute_capabilities"
_RELEASE = re.compile(r"(\d{1,3})\.(\d{1,3})(?:\.[\w.+-]*)?", re.ASCII)


def release_of(text: str) -> tuple[int, int] | None:
    """``12.8`` and ``12.8.1`` as (12, 8); None if it is not a release."""
    match = _RELEASE.fullmatch(text.strip())
    return (int(match[1]), int(match[2])) if match else None


class Release(NamedTuple):
    """`minimum` is the oldest driver that runs the release's programs, `own` the driver that was released
    with it and is the oldest that compiles its PTX."""

    cuda: str
    minimum: str
    own: str

    def runs_on(self, driver: str) -> bool:
        return version_numbers(driver) >= version_numbers(self.minimum)


def release(desired: tuple[int, int]) -> Release | None:
    """The table's row of a release; an unknown point release counts as the newest known one before it of the
    same major release. None for an unknown major release."""
    rows = ((release_of(row["cuda"]), row) for row in table(DRIVERS).rows)
    earlier = [(known, row) for known, row in rows if known and desired[:1] <= known <= desired]
    if not earlier:
        return None
    _, row = max(earlier, key=lambda pair: pair[0])
    return Release(row["cuda"], row["minimum"], row["own"])


def runs(desired: tuple[int, int], driver: str, offered: tuple[int, int] | None) -> tuple[bool | None, str]:
    """Whether programs of a release run on a driver that offers the CUDA `offered`, None if unknown, and
    which driver they need. For a release that is not in the table only this is certain: it runs on a driver
    of its own or a later CUDA, and on none of an earlier major release."""
    known = release(desired)
    if known is not None:
        return known.runs_on(driver), f"driver {known.minimum} or later"
    if offered is None or (desired > offered and desired[0] == offered[0]):
        return None, ""
    return desired <= offered, f"a driver for CUDA {desired[0]}"


def newest_of(driver: str) -> tuple[int, int] | None:
    """The newest release with this driver or an older one as its own: what the driver reports as its CUDA."""
    here = version_numbers(driver)
    known = (release_of(row["cuda"]) for row in table(DRIVERS).rows if version_numbers(row["own"]) <= here)
    return max(filter(None, known), default=None)


def makes_code_for(desired: tuple[int, int], capability: str) -> str:
    """Whether a release supports GPUs of a compute capability: yes, too-early, dropped or unknown."""
    row = _row_of(capability)
    if row is None:
        return "unknown"
    first, last = release_of(row["first"]), release_of(row["last"])
    if first is not None and desired < first:
        return "too-early"
    return "dropped" if last is not None and desired > last else "yes"


def first_for(capability: str) -> str:
    """The first release that supports such GPUs; empty if the table has none."""
    return row["first"] if (row := _row_of(capability)) else ""


def last_for(capability: str) -> str:
    """The last release that supports such GPUs; empty if there is none or the table doesn't know."""
    return row["last"] if (row := _row_of(capability)) else ""


def _row_of(capability: str) -> Mapping[str, str] | None:
    return next((row for row in table(CAPABILITIES).rows if row["capability"] == capability), None)


# Test of CUDA on this node: gpunode's vector addition on every device, in a child process.

DEVICE_SECONDS = 8.0
_SECONDS = 20.0  # less than the doctor's limit for one check


def run_cuda(host: Host) -> ProgramAnswer | None:
    """The program's result; a recorded machine has it under ``nvml.cuda``, None without it."""
    from gpunode.gpu.vectoradd import MODULE, arguments, read_answer

    if not host.live:
        recorded = host.recorded("nvml", "cuda")
        text = json.dumps(recorded) if recorded else ""
    else:
        done = host.run(module_argv(MODULE, *arguments((), DEVICE_SECONDS)), timeout=_SECONDS)
        if done.timed_out:
            raise Stuck(f"CUDA didn't answer within {_SECONDS:g} s", first=True)
        text = done.stdout
    if not text:
        return None
    try:
        answer = read_answer(text)
        if host.live:
            host.heard("nvml", "cuda", json.loads(text.strip().rpartition("\n")[2]))
        return answer
    except ValueError as error:
        raise GpunodeError(f"the vector addition returned an invalid result: {error}") from error


# The requested CUDA release, and what the node has: the driver, its CUDA, its GPUs.

# product names (nvmlDeviceGetName) and the brands that drivers have given such products (nvmlBrandType_t):
# it changed with the driver's branch for some
_BRANDS = (
    ("geforce rtx", ("geforce", "geforcertx")),
    ("geforce", ("geforce",)),
    ("quadro rtx", ("quadro", "quadrortx", "nvidiartx")),
    ("quadro", ("quadro",)),
    ("titan rtx", ("titan", "titanrtx")),
    ("titan", ("titan",)),
    ("tesla", ("tesla", "nvidia")),
    ("nvidia rtx", ("nvidiartx", "quadrortx", "quadro")),
    ("grid", ()),
    ("nvidia ", ("nvidia", "tesla")),
)


class RequestedRelease(NamedTuple):
    """A requested CUDA release, and its source: ``--cuda`` or the image."""

    release: tuple[int, int]
    source: str

    def __str__(self) -> str:
        return f"{self.release[0]}.{self.release[1]}"


def requested_release(node: Node) -> RequestedRelease | None:
    """--cuda, else the image's release; None if neither is given, or the image doesn't name one."""
    cuda_release = release_of(node.questions.cuda)
    if cuda_release is not None:
        return RequestedRelease(cuda_release, "--cuda")
    built = release_of(node.image.image.cuda) if node.image.image else None
    return RequestedRelease(built, f"CUDA_VERSION of {node.questions.image}") if built else None


def driver_version(node: Node) -> str:
    """The loaded driver, ``550.54.14``; empty if unknown. WSL2 has no module to read."""
    known = node.nvml.inventory if node.module is None else None
    version = node.module.version if node.module else (known.driver_version if known else "")
    return version if version_numbers(version) else ""


def driver_cuda(node: Node) -> tuple[int, int] | None:
    """The newest CUDA that the driver offers: reported by NVML, else from the table."""
    known = node.nvml.inventory
    reported = release_of(known.cuda_version) if known else None
    version = driver_version(node)
    return reported or (newest_of(version) if version else None)


def brands_of(name: str) -> tuple[str, ...]:
    """The brands that a driver may report for a GPU of this name; () if unknown."""
    lowered = name.lower()
    return next((brands for words, brands in _BRANDS if words in lowered), ())


class RequirementResult(NamedTuple):
    """One NVIDIA_REQUIRE_* against one GPU, or against the node (`gpu` None)."""

    name: str
    text: str
    gpu: Gpu | None
    holds: bool | None


def judge_requirements(node: Node, requirements: Mapping[str, str]) -> tuple[RequirementResult, ...]:
    """Every requirement on every GPU. ValueError for an invalid expression."""
    known = node.nvml.inventory
    facts: dict[str, tuple[str, ...]] = {}
    if driver_version(node):
        facts["driver"] = (driver_version(node),)
    cuda = driver_cuda(node)
    if cuda is not None:
        facts["cuda"] = (f"{cuda[0]}.{cuda[1]}",)
    gpus: list[Gpu | None] = [gpu for gpu in known.gpus if not gpu.error] if known else []
    return tuple(
        RequirementResult(name, text, gpu, _holds(text, facts, gpu))
        for name, text in sorted(requirements.items())
        for gpu in gpus or [None]
    )


def _holds(text: str, facts: Mapping[str, tuple[str, ...]], gpu: Gpu | None) -> bool | None:
    alternatives = parse(text)
    values = dict(facts)
    if gpu is not None and _version(gpu.compute_capability):
        values["arch"] = (gpu.compute_capability,)
    brands = brands_of(gpu.name) if gpu is not None else ()
    # only one brand is right: if all candidates lead to one result, that is the result
    answers = {satisfied(alternatives, {**values, "brand": (brand,)}) for brand in brands}
    return answers.pop() if len(answers) == 1 else satisfied(alternatives, values)


def _version(text: str) -> bool:
    try:
        return bool(numbers(text))
    except ValueError:
        return False
