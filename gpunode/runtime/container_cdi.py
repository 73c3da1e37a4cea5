"""What is wrong with the CDI specifications when an engine can't use them: engines themselves say little."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpunode.cdi.places import STANDARD
from gpunode.cdi.versions import reads, text
from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts.cdi import CdiSpec
from gpunode.host import Host
from gpunode.runtime.container_way import KIND, CdiReading, Way, gpu_specs, no_specification, rewriting

_LIBCUDA = "libcuda.so"
_UNRESOLVED = "unresolvable CDI devices"


def explain_cdi(host: Host, error: DaemonError, way: Way) -> DaemonError | None:
    """Why a container with CDI devices didn't start, from the files themselves; None if they look right."""
    try:
        specs = gpu_specs(host, way.reading)
    except GpunodeError:
        return None  # not ours to read: then the engine's own words must do
    if not specs:
        none = no_specification(way.reading)
        return DaemonError(f"{none.message} ({way}): {error.message}", hint=none.hint, code=none.code)
    found = next(_missing(host, specs, error.message), None)
    if found is None and _UNRESOLVED in error.message:
        found = next(_faults(specs, way), None)
    if found is None:
        return None
    return DaemonError(f"{found.what} ({way}): {error.message}", hint=found.hint, code=found.code)


@dataclass(frozen=True)
class _Fault:
    """One thing that is wrong with the files, and what mends it."""

    what: str
    hint: str
    code: str = "cdi-unresolvable"


def _missing(host: Host, specs: Sequence[CdiSpec], said: str) -> Iterator[_Fault]:
    """Paths of the specifications that the message names and that aren't on the node."""
    for spec in specs:
        paths = (*spec.mounts, *spec.hooks, *(node.path for node in spec.nodes))
        for path in paths:
            if path in said and not host.exists(path):
                what = f"{spec.path} names {path}, which isn't there: it is older than the driver"
                yield _Fault(what, rewriting(spec.path), "cdi-stale")


def _faults(specs: Sequence[CdiSpec], way: Way) -> Iterator[_Fault]:
    """Why none of these files gives the engine its devices: the first is what to tell."""
    wanted = {device.partition("=")[2] for device in way.devices}
    naming = [spec for spec in specs if wanted & set(spec.names)]
    for spec in naming or specs:
        if spec.problem:
            yield _Fault(f"{spec.path} {spec.problem}", rewriting(spec.path))
        elif _too_new(spec, way.reading):
            yield _Fault(_too_new(spec, way.reading), rewriting(spec.path))
    if not naming:
        have = ", ".join(dict.fromkeys(name for spec in specs for name in spec.names)) or "none"
        what = f"{_places(specs)} names no device {', '.join(sorted(wanted))}; it has {have}"
        yield _Fault(what, rewriting(specs[-1].path))
    directories = [spec.path.rpartition("/")[0] for spec in naming]
    twice = [one for one in naming if directories.count(one.path.rpartition("/")[0]) > 1]
    if twice:
        what = f"{_places(twice)} name the same device in one directory, and engines then take neither"
        yield _Fault(what, f"keep one of them: rm {twice[-1].path}")


def _places(specs: Sequence[CdiSpec]) -> str:
    return " and ".join(spec.path for spec in specs)


def _too_new(spec: CdiSpec, reading: CdiReading) -> str:
    """Empty if this engine reads it, or if its release isn't known."""
    newest = reads(reading.engine, reading.version) if reading.version else None
    parts = spec.version.split(".")
    if newest is None or len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return ""
    if tuple(map(int, parts)) <= newest:
        return ""
    release = ".".join(map(str, reading.version))
    return (
        f"{spec.path} is written for CDI {spec.version}, and {reading.engine} {release} reads"
        f" {text(newest)} at most"
    )


def without_driver(host: Host, way: Way) -> GpunodeError:
    """The container ran, by CDI, and its loader found no libcuda: what the specification lacks."""
    specs = [spec for spec in gpu_specs(host, way.reading) if spec.kind == KIND]
    mounted = [path for spec in specs for path in spec.mounts if _LIBCUDA in path.rpartition("/")[2]]
    if not mounted:
        what = f"{_places(specs) or 'the CDI specification'} mounts no {_LIBCUDA}"
    else:
        what = (
            f"{_places(specs)} mounts {mounted[0]}, but not where a loader without cache looks for"
            f" {_LIBCUDA}.1, and no hook of it made one"
        )
    return GpunodeError(
        f"the container started and its loader found no NVIDIA driver ({way}): {what}",
        hint=rewriting(specs[-1].path if specs else STANDARD),
        code="driver-not-injected",
    )
