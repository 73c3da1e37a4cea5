"""Why a container didn't start: what the engine's long chain of messages means, and what mends it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpunode.errors import DaemonError


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
        r"unresolvable CDI devices|failed to inject CDI|unknown CDI device",
        "cdi-unresolvable",
        "no CDI specification names the GPUs",
        "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
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


def explain(error: DaemonError, engine: str, runtime_name: str) -> DaemonError:
    """The same failure with its cause in front; an unknown one comes back with the handler named."""
    told = error.message
    for cause in CAUSES:
        if re.search(cause.pattern, told, re.DOTALL):
            return DaemonError(
                f"{cause.meaning} (handler {runtime_name}): {told}",
                hint=cause.hint.format(engine=engine),
                code=cause.code,
            )
    return DaemonError(f"handler {runtime_name}: {told}", hint=error.hint, code=error.code)


def missing_handler(engine: str, runtime_name: str, known: tuple[str, ...]) -> DaemonError:
    """The running daemon doesn't list the handler: asked before anything is made."""
    return DaemonError(
        f'{engine} as it runs now has no runtime "{runtime_name}"; it knows {", ".join(known) or "none"}',
        hint=f"gpunode configure-runtime --runtime {engine}",
        code="handler-missing",
    )


def timed_out(seconds: float) -> DaemonError:
    """The program ran longer than it was given; it has been killed."""
    return DaemonError(
        f"the program in the container did not end within {seconds:g} s and was killed",
        hint="see whether the GPU hangs: gpunode doctor; dmesg | grep -i nvrm",
        code="timeout",
    )
