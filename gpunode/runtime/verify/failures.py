"""Why a container didn't start: the meaning of the engine's long error messages, and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpunode.cdi.locations import STANDARD
from gpunode.cdi.versions import reads, text
from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts.cdi import SpecFile
from gpunode.host import Host
from gpunode.runtime.verify.container import (
    KIND,
    CdiReading,
    GpuAccess,
    gpu_specs,
    no_specification,
    rewriting,
)


@dataclass(frozen=True)
class Cause:
    """One known failure: its pattern, its meaning and its fix. ``{engine}`` is filled in."""

    pattern: str
    code: str
    meaning: str
    hint: str


CAUSES = (
    Cause(
        r"no runtime for .* is configured|unknown or invalid runtime name|[Uu]nknown runtime specified",
        "handler-missing",
        "the running daemon has no such runtime handler",
        "gpunode configure-runtime --runtime {engine}",
    ),
    Cause(
        r"nvml error: driver not loaded",
        "driver-not-loaded",
        "the NVIDIA kernel module isn't loaded",
        "modprobe nvidia, then gpunode doctor",
    ),
    Cause(
        r"load library failed: libnvidia-ml\.so",
        "libnvidia-ml-missing",
        "libnvidia-ml.so.1 of the driver isn't on this node or not in the loader's cache",
        "ldconfig, then gpunode doctor",
    ),
    Cause(
        r"nvml error: driver/library version mismatch",
        "driver-lib-mismatch",
        "kernel module and driver libraries are of different versions",
        "reboot, or unload and load the nvidia modules; see gpunode explain driver-lib-mismatch",
    ),
    Cause(
        r"nvml error: insufficient permissions",
        "device-permission",
        "the runtime may not open the NVIDIA devices",
        "ls -l /dev/nvidia*; gpunode doctor",
    ),
    Cause(
        r"crun: .*hybrid|cgroups? in hybrid mode",
        "cgroup-hybrid",
        "crun can't use this node's hybrid control groups",
        'set runtime = "runc" under [engine] in /etc/containers/containers.conf, or boot with'
        " systemd.unified_cgroup_hierarchy=1",
    ),
    Cause(
        r"error setting rlimit",
        "rlimit",
        "the engine may not raise a resource limit that it gives to every container",
        "lower default_ulimits under [containers] in /etc/containers/containers.conf",
    ),
    Cause(
        r"unresolvable CDI devices|failed to inject CDI|unknown CDI device|setting up CDI devices"
        r"|CDI device injection failed|could not select device driver .?cdi",
        "cdi-unresolvable",
        "the engine finds no CDI specification that names the GPUs",
        "gpunode cdi refresh",
    ),
    Cause(
        r"expected cgroupsPath to be of format|SystemdCgroup",
        "cgroup-driver",
        "the runtime handler's SystemdCgroup differs from what the daemon uses",
        "gpunode configure-runtime --runtime {engine}",
    ),
    Cause(
        r"bpf_prog_query\(BPF_CGROUP_DEVICE\)|cgroup subsystem devices not found",
        "toolkit-cgroup2",
        "this NVIDIA Container Toolkit is too old for the cgroups of this kernel",
        "upgrade nvidia-container-toolkit, then gpunode doctor",
    ),
    Cause(
        r"nvidia-container-cli",
        "nvidia-container-cli",
        "nvidia-container-cli can't set the container up",
        "nvidia-container-cli -k -d /dev/stderr info; gpunode doctor",
    ),
    Cause(
        r"nvidia-container-runtime.*(executable file not found|no such file or directory)"
        r"|(executable file not found|no such file or directory).*nvidia-container-runtime",
        "toolkit-missing",
        "nvidia-container-runtime isn't where the configuration says",
        "install nvidia-container-toolkit, then gpunode configure-runtime --runtime {engine}",
    ),
    Cause(
        r"failed to get sandbox image|failed to pull image",
        "sandbox-image",
        "the sandbox (pause) image is not on this node and can't be pulled",
        "import it, or name one in sandbox_image that is here: ctr -n k8s.io images ls",
    ),
)


def explain(host: Host, error: DaemonError, way: GpuAccess) -> DaemonError:
    """The same failure with its cause in front; an unknown one with how the container got its GPUs.

    Where the GPUs come by CDI, the specification's files are checked first: engines report any error in them
    as "unresolvable".
    """
    message = error.message
    if way.devices:
        explanation = explain_cdi(host, error, way)
        if explanation is not None:
            return explanation
    for cause in CAUSES:
        if re.search(cause.pattern, message, re.DOTALL):
            return DaemonError(
                f"{cause.meaning} ({way}): {message}",
                hint=cause.hint.format(engine=way.reading.option),
                code=cause.code,
            )
    return DaemonError(f"{way}: {message}", hint=error.hint, code=error.code)


def timed_out(seconds: float) -> DaemonError:
    """The program exceeded its timeout and has been killed."""
    return DaemonError(
        f"the program in the container did not end within {seconds:g} s and was killed",
        hint="see whether the GPU hangs: gpunode doctor; dmesg | grep -i nvrm",
        code="timeout",
    )


# Errors in the CDI specifications when an engine can't use them, because engines give few details.

_LIBCUDA = "libcuda.so"
_UNRESOLVED = "unresolvable CDI devices"


def explain_cdi(host: Host, error: DaemonError, way: GpuAccess) -> DaemonError | None:
    """Why a container with CDI devices didn't start, from the files themselves; None if they look right."""
    try:
        specs = gpu_specs(host, way.reading)
    except GpunodeError:
        return None  # not readable for this user: only the engine's own message is known
    if not specs:
        none = no_specification(way.reading)
        return DaemonError(f"{none.message} ({way}): {error.message}", hint=none.hint, code=none.code)
    fault = next(_missing(host, specs, error.message), None)
    if fault is None and _UNRESOLVED in error.message:
        fault = next(_faults(specs, way), None)
    if fault is None:
        return None
    return DaemonError(f"{fault.what} ({way}): {error.message}", hint=fault.hint, code=fault.code)


@dataclass(frozen=True)
class _Fault:
    """One error in the files, and its fix."""

    what: str
    hint: str
    code: str = "cdi-unresolvable"


def _missing(host: Host, specs: Sequence[SpecFile], message: str) -> Iterator[_Fault]:
    """Paths in the specifications that the message names and that don't exist on the node."""
    for spec in specs:
        paths = (*spec.mounts, *spec.hooks, *(node.path for node in spec.nodes))
        for path in paths:
            if path in message and not host.exists(path):
                what = f"{spec.path} names {path}, which does not exist: it is older than the driver"
                yield _Fault(what, rewriting(spec.path), "cdi-stale")


def _faults(specs: Sequence[SpecFile], way: GpuAccess) -> Iterator[_Fault]:
    """Why none of these files gives the engine its devices: the first is the one to report."""
    desired = {device.partition("=")[2] for device in way.devices}
    naming = [spec for spec in specs if desired & set(spec.names)]
    for spec in naming or specs:
        if spec.problem:
            yield _Fault(f"{spec.path} {spec.problem}", rewriting(spec.path))
        elif _too_new(spec, way.reading):
            yield _Fault(_too_new(spec, way.reading), rewriting(spec.path))
    if not naming:
        have = ", ".join(dict.fromkeys(name for spec in specs for name in spec.names)) or "none"
        what = f"{_places(specs)} names no device {', '.join(sorted(desired))}; it has {have}"
        yield _Fault(what, rewriting(specs[-1].path))
    directories = [spec.path.rpartition("/")[0] for spec in naming]
    twice = [
        naming_spec for naming_spec in naming if directories.count(naming_spec.path.rpartition("/")[0]) > 1
    ]
    if twice:
        what = f"{_places(twice)} name the same device in one directory, and engines then take neither"
        yield _Fault(what, f"keep one of them: rm {twice[-1].path}")


def _places(specs: Sequence[SpecFile]) -> str:
    return " and ".join(spec.path for spec in specs)


def _too_new(spec: SpecFile, reading: CdiReading) -> str:
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


def without_driver(host: Host, way: GpuAccess) -> GpunodeError:
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
