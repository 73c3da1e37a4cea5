"""Why a container didn't start: what the engine's long chain of messages means, and what mends it."""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.runtime.container_way import Way


@dataclass(frozen=True)
class Cause:
    """One known failure: how it is spelled, what it means, what to run. ``{engine}`` is filled in."""

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


def explain(host: Host, error: DaemonError, way: Way) -> DaemonError:
    """The same failure with its cause in front; an unknown one comes back with the way named.

    Where the GPUs come by CDI, the specification's files are looked at first: engines call whatever is wrong
    with them "unresolvable".
    """
    told = error.message
    if way.devices:
        from gpunode.runtime.container_cdi import explain_cdi

        found = explain_cdi(host, error, way)
        if found is not None:
            return found
    for cause in CAUSES:
        if re.search(cause.pattern, told, re.DOTALL):
            return DaemonError(
                f"{cause.meaning} ({way}): {told}",
                hint=cause.hint.format(engine=way.reading.option),
                code=cause.code,
            )
    return DaemonError(f"{way}: {told}", hint=error.hint, code=error.code)


def timed_out(seconds: float) -> DaemonError:
    """The program ran longer than it was given; it has been killed."""
    return DaemonError(
        f"the program in the container did not end within {seconds:g} s and was killed",
        hint="see whether the GPU hangs: gpunode doctor; dmesg | grep -i nvrm",
        code="timeout",
    )
