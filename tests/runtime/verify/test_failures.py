"""Messages of engines and NVIDIA's tools, and the explanations printed instead."""

import pytest

from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.runtime.verify.container import CdiReading, GpuAccess, missing_handler
from gpunode.runtime.verify.failures import CAUSES, explain

CLI = "nvidia-container-cli: initialization error: "
MESSAGES = [
    (
        'RunPodSandbox: failed to get sandbox runtime: no runtime for "nvidia" is configured',
        "handler-missing",
    ),
    ("Unknown runtime specified nvidia", "handler-missing"),
    ("unknown or invalid runtime name: nvidia", "handler-missing"),
    (f"OCI runtime create failed: {CLI}nvml error: driver not loaded: unknown", "driver-not-loaded"),
    (f"{CLI}load library failed: libnvidia-ml.so.1: cannot open shared object file", "libnvidia-ml-missing"),
    (f"{CLI}nvml error: driver/library version mismatch: unknown", "driver-lib-mismatch"),
    (f"{CLI}nvml error: insufficient permissions: unknown", "device-permission"),
    (f"{CLI}something new", "nvidia-container-cli"),
    ("could not apply: unresolvable CDI devices nvidia.com/gpu=all: unknown", "cdi-unresolvable"),
    ("setting up CDI devices: failed to inject devices: failed to stat CDI host device", "cdi-unresolvable"),
    ("crun: cgroups in hybrid mode not supported, drop all controllers: OCI runtime error", "cgroup-hybrid"),
    (
        "error setting rlimits for ready process: error setting rlimit type 7: operation not permitted",
        "rlimit",
    ),
    ('runc: expected cgroupsPath to be of format "slice:prefix:name" for systemd cgroups', "cgroup-driver"),
    ("nvidia-container-cli: mount error: bpf_prog_query(BPF_CGROUP_DEVICE) failed", "toolkit-cgroup2"),
    ('exec: "nvidia-container-runtime": executable file not found in $PATH: unknown', "toolkit-missing"),
    ("fork/exec /usr/bin/nvidia-container-runtime: no such file or directory", "toolkit-missing"),
    ('failed to get sandbox image "registry.k8s.io/pause:3.6": failed to pull image', "sandbox-image"),
]


@pytest.mark.parametrize(("message", "code"), MESSAGES)
def test_known_message_gets_its_cause_and_a_command(message, code):
    explained = explain(Host(), DaemonError(message), GpuAccess(CdiReading("containerd"), "nvidia"))
    assert explained.code == code
    assert message in explained.message
    assert explained.hint
    assert "{" not in explained.hint


def test_every_cause_is_tested():
    assert {cause.code for cause in CAUSES} == {code for _, code in MESSAGES}


def test_unknown_failure_keeps_its_code_and_hint():
    error = DaemonError("out of cheese", hint="buy some", code="daemon")
    explained = explain(Host(), error, GpuAccess(CdiReading("docker"), "nvidia"))
    assert (explained.message, explained.hint, explained.code) == (
        "handler nvidia: out of cheese",
        "buy some",
        "daemon",
    )


def test_missing_handler_error_names_the_known_ones_and_the_command():
    explained = missing_handler(CdiReading("docker"), "nvidia", ("io.containerd.runc.v2", "runc"))
    assert "io.containerd.runc.v2, runc" in explained.message
    assert "gpunode configure-runtime --runtime docker; " in explained.hint
    assert explained.hint.endswith("gpunode configure-runtime --runtime docker --cdi")
