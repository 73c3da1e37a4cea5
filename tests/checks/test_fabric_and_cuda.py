"""Cases close to false alarms: fabrics, MIG, virtual GPUs, GPUDirect, images."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from fixtures.machines import machine, merged, options, recorded_host
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.checks.fixes import set_plugin_variable
from gpunode.checks.mig import _instances
from gpunode.checks.preconditions import fitting
from gpunode.checks.runner import run_checks
from gpunode.commands import doctor
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node, Questions
from gpunode.gpu.model import Gpu
from gpunode.host import Host
from tests.cli import gpunode
from tests.required import required
from tests.silent import SilentProgress

PASS, SKIP, WARN, FAIL = FindingStatus.PASS, FindingStatus.SKIP, FindingStatus.WARN, FindingStatus.FAIL


def judge(identifier, name, root, change=(), remove=(), **asked):
    """The check's verdict on a machine with changes; `remove` names files."""
    spec = merged(machine(name), dict(change))
    spec["files"] = {path: text for path, text in spec["files"].items() if not path.startswith(tuple(remove))}
    host = Host(build_machine(spec, root), environ={})
    return BY_ID[identifier].run(Node(host, Questions(**asked)))


def conditions(**item):
    return {"recording": {"nvml": {"conditions": {str(index): item for index in range(8)}}}}


SXID = "[300000.1] nvidia-nvswitch2: SXid (PCI:0000:09:00.0): 20034, {}, Link 30 LTSSM Fault Up\n"
JUST_NOW = {"files": {"/proc/stat": f"btime {int(time.time()) - 20}\n"}}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (conditions(fabric={"state": "in-progress", "status": 0}), FAIL),
        (conditions(fabric={"state": "in-progress", "status": 0}) | JUST_NOW, SKIP),
        (conditions(fabric={"state": "not-started", "status": 0}, migMode=True), SKIP),
        (conditions(fabric={"state": "completed", "status": 0, "health": 0}), PASS),
        (conditions(fabric={"state": "completed", "status": 0, "health": 0xA6}), PASS),
        (conditions(fabric={"state": "completed", "status": 0, "health": 0x9A}), WARN),
        ({"files": {"/proc/driver/nvidia/params": "NvLinkDisable: 1\n"}}, SKIP),
    ],
)
def test_fabric_is_checked_only_after_its_training_time(change, status, tmp_path):
    assert judge("fabric-training", "healthy-h100-nvswitch", tmp_path, change).status is status


def test_fabric_manager_in_the_driver_container_is_accepted(tmp_path):
    change = {"recording": {"commands": {"systemctl show recorded": {"stdout": ""}}}}
    assert judge("fabricmanager-missing", "healthy-h100-nvswitch", tmp_path, change).status is PASS


def test_registered_gpus_need_no_fabric_manager_on_this_node(tmp_path):
    """The host of a virtual machine runs it where the switches are shared."""
    off = "Id=nvidia-fabricmanager.service\nLoadState=not-found\nActiveState=inactive\n"
    change = {"recording": {"commands": {"systemctl show recorded": {"stdout": off}}}}
    verdict = judge("fabricmanager-missing", "healthy-h100-nvswitch", tmp_path, change, ["/proc/1050/"])
    assert verdict.status is PASS


def test_missing_fabric_manager_is_skipped_without_systemd_data(tmp_path):
    change = merged(
        {"recording": {"commands": {"systemctl show recorded": {"stdout": ""}}}},
        conditions(fabric={"state": "not-started"}),
    )
    verdict = judge("fabricmanager-missing", "healthy-h100-nvswitch", tmp_path, change, ["/proc/1050/"])
    assert verdict.status is SKIP


def test_upgraded_fabric_manager_waiting_for_a_reboot_is_skipped(tmp_path):
    """The new package is installed while the old processes are still running."""
    change = {
        "files": {
            "/var/lib/dpkg/status": "Package: nvidia-fabricmanager-580\nStatus: install ok installed\n"
            "Version: 580.211.01-1\n"
        },
        "recording": {"commands": {"modinfo -F version nvidia": {"stdout": "580.211.01\n"}}},
    }
    assert judge("fabricmanager-version", "healthy-h100-nvswitch", tmp_path, change).status is SKIP


def test_old_log_entry_about_another_driver_is_ignored(tmp_path):
    log = (
        "[x] Fabric Manager version 580.95.05 is running with the following configuration options\n"
        "[x] fabric manager NVIDIA GPU driver interface version 580.95.05 don't match with driver version "
        "580.126.09. Please update\n"
    )
    change = {"files": {"/var/log/fabricmanager.log": log}}
    drop = ["/var/lib/dpkg", "/proc/1050/"]
    assert judge("fabricmanager-version", "healthy-h100-nvswitch", tmp_path, change, drop).status is SKIP


CHAINS = {
    "fabricmanager-version": ("fabricmanager-version", {"fabricmanager-missing", "fabric-training"}),
    "fabricmanager-missing": ("fabricmanager-missing", {"fabric-training"}),
    "fabric-topology": ("fabric-topology", {"fabricmanager-missing", "fabric-training"}),
    "mig-enabled-no-instances": (
        "mig-enabled-no-instances",
        {"mig-config-lost", "mig-cdi-stale", "mig-strategy-mismatch", "allocatable-zero"},
    ),
    "mig-strategy-gave-up": ("mig-strategy-mismatch", {"plugin-socket-dead", "allocatable-zero"}),
    "vgpu-driver-mismatch": ("vgpu-driver-mismatch", {"vgpu-license", "pci-gpu-count-mismatch"}),
    "image-needs-newer-driver": ("image-needs-newer-driver", {"no-kernel-image"}),
    "cuda-driver-version": ("cuda-driver-version", {"ptx-unsupported-toolchain", "no-kernel-image"}),
}


@pytest.mark.parametrize("name", CHAINS)
def test_root_cause_blocks_dependent_fabric_checks(name, tmp_path):
    cause, explained = CHAINS[name]
    node = Node(recorded_host(name, tmp_path), Questions(**options(name)))
    found = {one.id: one.blocked_by for one in run_checks(node)}
    assert {one for one in explained if found[one] == cause} == explained


@pytest.mark.parametrize(
    ("licence", "status"),
    [
        ({"supported": True, "licensed": True}, PASS),
        ({"supported": True}, PASS),  # a value that NVML doesn't report is no fault
        ({"supported": False, "licensed": False}, SKIP),
        ({}, SKIP),
    ],
)
def test_licence_is_missing_only_if_the_gpu_reports_it(licence, status, tmp_path):
    spec = machine("healthy-vgpu-guest")
    spec["recording"]["nvml"]["conditions"]["0"]["licence"] = licence
    host = Host(build_machine(spec, tmp_path), environ={})
    assert BY_ID["vgpu-license"].run(Node(host)).status is status


def test_freshly_booted_guest_is_still_requesting_its_licence(tmp_path):
    assert judge("vgpu-license", "vgpu-license", tmp_path, JUST_NOW).status is SKIP


@pytest.mark.parametrize(
    "settings", ["ServerAddress=licences.example\n", "ClientConfigTokenPath=/srv/tokens\n"]
)
def test_custom_licence_source_needs_no_token_in_the_default_directory(settings, tmp_path):
    change = {"files": {"/etc/nvidia/gridd.conf": settings, "/srv/tokens/a.tok": ""}}
    verdict = judge("vgpu-license", "vgpu-license-no-token", tmp_path, change)
    assert (verdict.status, verdict.fix) == (WARN, None)


@pytest.mark.parametrize(
    ("cc", "status"),
    [
        ({"ccEnabled": False}, PASS),
        ({"ccEnabled": True, "ccReady": True}, PASS),
        ({"ccEnabled": True}, PASS),
        ({"ccEnabled": True, "ccReady": False}, WARN),
    ],
)
def test_confidential_computing_fails_only_if_gpus_are_not_ready(cc, status, tmp_path):
    assert judge("cc-mode", "healthy-h100", tmp_path, conditions(**cc)).status is status


@pytest.mark.parametrize(
    ("change", "status", "noted"),
    [
        ({}, PASS, True),
        ({"files": {"/sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
                    "/sys/class/infiniband/mlx5_1/ports/1/link_layer": "Ethernet\n"}}, PASS, False),
        ({"files": {"/sys/module/nvidia_peermem/initstate": "live\n"}}, PASS, False),
        ({"files": {"/usr/lib/modules-load.d/nvidia.conf": "nvidia-peermem\n"}}, WARN, False),
    ],
)  # fmt: skip
def test_missing_peermem_is_reported_only_for_infiniband_without_dmabuf(change, status, noted, tmp_path):
    verdict = judge("peermem", "peermem-and-gds-not-loaded", tmp_path, change)
    assert (verdict.status, verdict.note) == (status, noted)


def test_image_requirement_unmet_by_one_gpu_is_a_warning(tmp_path):
    spec = machine("healthy-h100")
    spec["recording"]["nvml"]["inventory"]["gpus"][3]["computeCapability"] = "8.0"
    spec["recording"]["daemons"]["/run/docker.sock"]["images"] = {
        "a:1": {"Env": ["NVIDIA_REQUIRE_A=arch>=9.0"]}
    }
    host = Host(build_machine(spec, tmp_path), environ={})
    verdict = BY_ID["image-needs-newer-driver"].run(Node(host, Questions(image="a:1")))
    assert verdict.status is WARN
    assert "GPU 3" in verdict.summary


@pytest.mark.parametrize(
    ("env", "status"),
    [
        ([], PASS),
        (["CUDA_VERSION=12.8.1"], PASS),
        (["CUDA_VERSION=99.0.0"], FAIL),
        (["NVIDIA_REQUIRE_CUDA=cuda>=99.0", "NVIDIA_DISABLE_REQUIRE=1"], PASS),
        (["NVIDIA_REQUIRE_CUDA=cuda>=99.0"], FAIL),
        (["NVIDIA_REQUIRE_CUDA=nonsense"], FAIL),
        (["NVIDIA_REQUIRE_CUDA="], PASS),
    ],
)
def test_image_requirement_is_compared_with_the_node(env, status, tmp_path):
    change = {"recording": {"daemons": {"/run/docker.sock": {"images": {"a:1": {"Env": env}}}}}}
    verdict = judge("image-needs-newer-driver", "healthy-h100", tmp_path, change, image="a:1")
    assert verdict.status is status


@pytest.mark.parametrize(
    ("name", "image", "command"),
    [
        ("healthy-wsl2", "a:1", "follow https://docs.nvidia.com/cuda/wsl-user-guide/"),
        ("healthy-vgpu-guest", "a:1", "follow https://docs.nvidia.com/vgpu/"),
    ],
)
def test_driver_upgrade_command_follows_its_origin(name, image, command, tmp_path):
    fix = judge("cuda-driver-version", name, tmp_path, cuda="99.0").fix
    node = Node(recorded_host(name, tmp_path / "again"))
    assert fitting(node, required(fix)).command == command


def test_cuda_that_dropped_the_gpus_needs_an_older_cuda_not_a_newer_driver(tmp_path):
    spec = machine("cuda-driver-version")
    for gpu in spec["recording"]["nvml"]["inventory"]["gpus"]:
        gpu["computeCapability"] = "7.0"
    node = Node(Host(build_machine(spec, tmp_path), environ={}), Questions(cuda="13.0"))
    verdict = BY_ID["cuda-driver-version"].run(node)
    assert (verdict.status, required(verdict.fix).command) == (FAIL, "gpunode doctor --cuda 12.9")


@pytest.mark.parametrize("release", ["abc", "12", "12.8 ", "-1.0", "12.8;reboot"])
def test_invalid_cuda_release_is_refused(release, tmp_path):
    host = Host(build_machine(machine("healthy-h100"), tmp_path), environ={})
    if release.strip() == "12.8":
        assert doctor.run(host, SilentProgress(), questions=Questions(cuda=release)).exit_code == 0
    else:
        ran = gpunode("--root", str(tmp_path), "doctor", f"--cuda={release}")
        assert (ran.code, "not a CUDA release" in ran.err) == (2, True), ran.err


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("NVIDIA H100 80GB HBM3", "nvidia-smi mig -i 0,1 -cgi 19,19,19,19,19,19,19 -C"),
        ("NVIDIA A30", "nvidia-smi mig -i 0,1 -cgi 14,14,14,14 -C"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "nvidia-smi mig -i 0,1 -cgi 14,14,14,14 -C"),
        ("NVIDIA RTX PRO 5000 Blackwell", "nvidia-smi mig -lgip"),
    ],
)
def test_each_model_uses_its_own_mig_profiles(name, cut):
    gpus = [Gpu(index, f"GPU-{index}", name, "") for index in range(2)]
    assert _instances(Node(Host(Path("/nowhere"))), gpus).command == cut


def test_linked_a100s_are_reset_together_for_mig_mode(tmp_path):
    linked = {"nvlinks": [True] * 12, "migMode": False, "migModeNext": True, "virtualization": "none"}
    found = judge("mig-mode-pending", "healthy-suse-kubelet", tmp_path, conditions(**linked))
    assert found.status is WARN
    assert "nvidia-smi --gpu-reset;" in f"{found.fix.command};"


def test_gpu_without_the_nvidia_driver_needs_no_device_file(tmp_path):
    spec = machine("gpu-excluded-on-purpose")
    del spec["recording"]["devices"]["/dev/nvidia7"]
    node = Node(Host(build_machine(spec, tmp_path), environ={}))
    assert BY_ID["dev-nodes-missing"].run(node).status is PASS


def test_operator_driver_skips_the_fabric_manager_package_check(tmp_path):
    spec = machine("fabricmanager-version")
    spec.setdefault("dirs", []).append("/run/nvidia/driver/usr")
    found = run_checks(Node(Host(build_machine(spec, tmp_path), environ={})))
    (version,) = [one for one in found if one.id == "fabricmanager-version"]
    assert version.skipped == "not-applicable"


def test_missing_fabric_manager_of_the_operator_is_fixed_via_its_pod(tmp_path):
    spec = machine("fabricmanager-missing")
    spec.setdefault("dirs", []).append("/run/nvidia/driver/usr")
    verdict = BY_ID["fabricmanager-missing"].run(Node(Host(build_machine(spec, tmp_path), environ={})))
    assert verdict.status is FAIL
    assert required(verdict.fix).command.startswith("kubectl get pods ")


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (SXID.format("Non-fatal"), WARN),
        (SXID.format("Fatal"), FAIL),
        (SXID.format("Non-fatal").replace("300000", "100"), PASS),
        (SXID.format("Fatal").replace("300000", "100"), FAIL),
        (SXID.format("Fatal") + "[300500.1] NVRM: loading NVIDIA UNIX Open Kernel Module\n", PASS),
    ],
)
def test_nvswitch_errors_are_reported_only_while_relevant(log, status, tmp_path):
    change = {"files": {"/.gpunode/kernel.log": log, "/proc/uptime": "301000.0 1.0\n"}}
    assert judge("fabric-topology", "healthy-h100-nvswitch", tmp_path, change).status is status


@pytest.mark.parametrize(
    ("identifier", "name"),
    [("vgpu-driver-mismatch", "vgpu-driver-mismatch"), ("peermem", "peermem-invalid-context")],
)
def test_old_log_entries_before_a_driver_reload_are_ignored(identifier, name, tmp_path):
    log = machine(name)["files"]["/.gpunode/kernel.log"]
    log += "[200000.1] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.03\n"
    change = {"files": {"/.gpunode/kernel.log": log, "/proc/uptime": "300000.0 1.0\n"}}
    assert judge(identifier, name, tmp_path / "before").status in (WARN, FAIL)
    assert judge(identifier, name, tmp_path / "since", change).status is PASS


def test_operator_plugin_is_configured_by_its_cluster_policy(tmp_path):
    pod = {"dirs": ["/var/log/pods/gpu-operator_nvidia-operator-validator-x_1/toolkit-validation"]}
    alone = judge("mig-strategy-mismatch", "mig-strategy-mismatch", tmp_path / "alone")
    both = judge("mig-strategy-mismatch", "mig-strategy-mismatch", tmp_path / "both", pod)
    assert (alone.status, alone.fix) == (FAIL, None)
    assert "clusterpolicies.nvidia.com" in both.fix.command


def test_plugin_is_configured_in_its_own_namespace(tmp_path):
    lines = "kube-system nvidia-device-plugin-daemonset 1\nx nvdp-nvidia-device-plugin 1\n"
    lines += "x nvdp-nvidia-device-plugin-mps-control-daemon 1\nx other 1\n"
    lines += "nvidia-device-plugin node-feature-discovery-worker 1"
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nif [ "$1" = get ]; then echo "{lines}"; else echo "$*"; fi\n')
    kubectl.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", set_plugin_variable("MIG_STRATEGY=mixed").command],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "set env --namespace kube-system daemonset/nvidia-device-plugin-daemonset MIG_STRATEGY=mixed",
        "set env --namespace x daemonset/nvdp-nvidia-device-plugin MIG_STRATEGY=mixed",
    ]
    given = [check.fix_for("debian").command for check in BY_ID.values()]
    assert not [one for one in given if "kubectl set env --all-namespaces" in one]
