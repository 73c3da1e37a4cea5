"""Cases close to false alarms of the kubelet's checks: changes to recorded machines that keep them silent."""

import json

import pytest

from fixtures.machines import machine, overlay
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.checks.runner import Selection, run_checks
from gpunode.commands.demo import build_machine
from gpunode.facts import kubelet
from gpunode.facts import node as about
from gpunode.facts.kubelet import Kubelet
from gpunode.facts.node import Node
from gpunode.facts.processes import Process
from gpunode.host import Host
from tests.checks.test_patience_hanging_daemons import silent_socket

POD_RESOURCES = "/var/lib/kubelet/pod-resources/kubelet.sock"
K3S = "/var/lib/rancher/k3s/agent/etc/containerd"
CRI = "/run/k3s/containerd/containerd.sock"
LOG = (
    "/var/log/pods/kube-system_nvidia-device-plugin-daemonset-7x2lq_1f0c8e9a-5b1d-4c7e-9a33-0d6f7b2e4c11"
    "/nvidia-device-plugin-ctr/3.log"
)
CONTAINER = "5c0d7e" + "a1" * 29
RUNC = 'version = 3\n[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]\n'


def judge(identifier, spec, root):
    host = Host(build_machine(spec, root), environ={})
    findings = {one.id: one for one in run_checks(Node(host), Selection(only=[identifier]))}
    return findings[identifier]


def test_unresponsive_kubelet_is_one_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(about, "DAEMON_SECONDS", 0.3)
    monkeypatch.setattr(kubelet, "DEVICE_PLUGINS", str(tmp_path / "device-plugins"))
    process = Process(1, ("kubelet", f"--root-dir={tmp_path}"), 0.0)
    node = Node(Host())
    node.__dict__["kubelet"] = Kubelet(process, "kubelet.service", True, "/nonexistent", "", None)
    (tmp_path / "pod-resources").mkdir()
    with silent_socket(tmp_path / "pod-resources/kubelet.sock"):
        verdict = BY_ID["kubelet-not-running"].run(node)
        assert BY_ID["plugin-not-registered"].run(node).status is FindingStatus.SKIP
    assert verdict.status is FindingStatus.WARN and "0.3 s" in verdict.evidence[0].value


def offered(resources, name="plugin-not-registered"):
    """A machine with the GPUs GPU-0, GPU-1, ... whose kubelet can allocate these."""
    spec = machine(name)
    for number, gpu in enumerate(spec["recording"]["nvml"]["inventory"]["gpus"]):
        gpu["uuid"] = f"GPU-{number}"
    spec["recording"]["daemons"][POD_RESOURCES]["allocatable"] = resources
    return spec


def silent(finding):
    return finding.status in (FindingStatus.PASS, FindingStatus.SKIP) and not finding.note


@pytest.mark.parametrize(
    "resources",
    [
        {"nvidia.com/gpu.shared": ["GPU-5a::0"]},
        {"nvidia.com/mig-1g.10gb": ["MIG-1"]},
        {"aliyun.com/gpu-mem": ["x"]},
        {"volcano.sh/vgpu-number": ["x"]},
    ],
)
def test_gpus_under_any_resource_name_are_accepted(resources, tmp_path):
    assert silent(judge("plugin-not-registered", offered(resources), tmp_path))


def test_dra_needs_no_plugin(tmp_path):
    spec = overlay(
        machine("plugin-not-registered"), {"set": {"dirs": ["/var/lib/kubelet/plugins/gpu.nvidia.com"]}}
    )
    assert silent(judge("plugin-not-registered", spec, tmp_path))


def test_freshly_started_kubelet_gets_more_time(tmp_path):
    spec = machine("plugin-not-registered")
    spec["files"]["/proc/stat"] = f"btime {int(Host().now()) - 90}\n"
    assert silent(judge("plugin-not-registered", spec, tmp_path))


@pytest.mark.parametrize(
    ("resources", "status"),
    [
        ({"nvidia.com/gpu": [f"GPU-{one}" for one in range(8)]}, "pass"),
        ({"nvidia.com/gpu": [f"GPU-{one}" for one in range(7)]}, "warn"),
        ({"nvidia.com/gpu": [f"GPU-{one}::{share}" for one in range(8) for share in range(4)]}, "pass"),
        ({"nvidia.com/gpu": [f"GPU-{one}::{share}" for one in range(7) for share in range(4)]}, "warn"),
        ({"nvidia.com/gpu": ["GPU-0"], "nvidia.com/mig-1g.10gb": ["MIG-1", "MIG-2"]}, "pass"),
        (
            {"nvidia.com/gpu": ["GPU-0", "GPU-1"], "nvidia.com/h100": [f"GPU-{n}" for n in range(2, 8)]},
            "pass",
        ),
        ({"nvidia.com/gpu": [], "nvidia.com/mig-1g.10gb": []}, "fail"),
        ({"nvidia.com/gpu": [f"nvidia{one}/vgpu0" for one in range(8)]}, "pass"),
        ({"nvidia.com/gpu": ["MIG-1", "MIG-2"]}, "pass"),
        ({"nvidia.com/gpu": [f"GPU-other-{one}" for one in range(8)]}, "fail"),
        ({"nvidia.com/gpu": [f"fake-{one}" for one in range(16)], "nvidia.com/GA102GL": ["81"]}, "fail"),
        ({"cpu": []}, "skip"),
    ],
)
def test_expected_gpu_count_depends_on_the_resource(resources, status, tmp_path):
    assert judge("allocatable-zero", offered(resources), tmp_path).status.value == status


def test_devices_of_another_node_are_named(tmp_path):
    found = judge("allocatable-zero", offered({"nvidia.com/gpu": ["GPU-x::0", "GPU-x::1"]}), tmp_path)
    assert "devices of nvidia.com/gpu that are not this node's GPUs" in found.summary
    assert found.fixes[0].command == "gpunode plugin status"
    assert ["GPU-x::0" in one.value for one in found.evidence] == [True, False]


def test_gpunodes_own_plugin_is_restarted_as_a_service(tmp_path):
    unit = "/etc/systemd/system/gpunode-device-plugin.service"
    for number, name in enumerate(("plugin-not-registered", "allocatable-zero", "plugin-socket-dead")):
        spec = machine(name)
        spec["files"][unit] = "[Service]\nExecStart=/usr/bin/gpunode plugin serve\n"
        found = judge(name, spec, tmp_path / str(number))
        assert found.fixes[0].command == "systemctl restart gpunode-device-plugin"


def test_plugin_limited_to_some_gpus_offers_only_those(tmp_path):
    spec = offered({"nvidia.com/gpu": ["GPU-0"]}, "plugin-cannot-see-nvml")
    spec["files"]["/proc/2201/environ"] = "NVIDIA_VISIBLE_DEVICES=GPU-0\0"
    assert silent(judge("allocatable-zero", spec, tmp_path))


def test_plugin_that_registered_later_sees_its_gpus(tmp_path):
    spec = machine("plugin-cannot-see-nvml")
    spec["files"][LOG] += "2026-01-01T00:12:05.1Z stderr F Registered device plugin for 'nvidia.com/gpu'\n"
    assert silent(judge("plugin-cannot-see-nvml", spec, tmp_path / "registered"))
    spec = offered({"nvidia.com/gpu": ["GPU-0"]}, "plugin-cannot-see-nvml")
    assert silent(judge("plugin-cannot-see-nvml", spec, tmp_path / "offered"))


def test_runtime_class_is_the_fix_if_it_is_missing_in_the_pod(tmp_path):
    found = judge("plugin-cannot-see-nvml", machine("plugin-cannot-see-nvml"), tmp_path / "default")
    assert (
        "runtimeClassName" in found.fixes[0].command
        and "nvidia-device-plugin-daemonset" in found.fixes[0].command
    )
    spec = machine("plugin-cannot-see-nvml")
    spec["recording"]["daemons"]["/run/containerd/containerd.sock"]["containers"][0]["handler"] = "nvidia"
    found = judge("plugin-cannot-see-nvml", spec, tmp_path / "nvidia")
    assert found.fixes[0].command.startswith("crictl pods --state ready --name nvidia-device-plugin | awk ")


@pytest.mark.parametrize("strategies", ["cdi-cri,envvar", "envvar", "cdi-annotations"])
def test_strategy_supported_by_an_engine_passes(strategies, tmp_path):
    spec = machine("plugin-strategy-mismatch")
    spec["files"]["/proc/2201/environ"] = f"DEVICE_LIST_STRATEGY={strategies}\0"
    assert silent(judge("plugin-strategy-mismatch", spec, tmp_path))


def test_plugin_strategy_is_read_from_its_config_file(tmp_path):
    spec = machine("plugin-strategy-mismatch")
    spec["files"]["/proc/2201/environ"] = "CONFIG_FILE=/config/config.yaml\0"
    inside = "/proc/2201/root/config/config.yaml"
    spec["files"][inside] = "version: v1\nflags:\n  plugin:\n    deviceListStrategy:\n      - cdi-cri\n"
    assert judge("plugin-strategy-mismatch", spec, tmp_path / "list").status.value == "fail"
    spec["files"][inside] = 'flags: {plugin: {deviceListStrategy: "envvar", passDeviceSpecs: true}}\n'
    assert silent(judge("plugin-strategy-mismatch", spec, tmp_path / "word"))


def test_without_root_a_plugins_settings_are_unknown(tmp_path):
    spec = machine("plugin-strategy-mismatch")
    del spec["files"]["/proc/2201/environ"]
    found = judge("plugin-strategy-mismatch", spec, tmp_path)
    assert (found.status, found.skipped) == (FindingStatus.SKIP, "unreadable")


def test_plugin_being_replaced_may_run_twice(tmp_path):
    spec = machine("plugins-two-and-static-cpus")
    ticks = int(Host().now()) - 1767225600
    spec["files"]["/proc/2301/stat"] = spec["files"]["/proc/2301/stat"].replace(" 7000 ", f" {ticks * 100} ")
    assert silent(judge("plugin-multiple", spec, tmp_path))


@pytest.mark.parametrize("variables", ["PASS_DEVICE_SPECS=true\0", "DEVICE_LIST_STRATEGY=cdi-cri\0"])
def test_kubelet_knows_the_device_files(variables, tmp_path):
    spec = machine("plugins-two-and-static-cpus")
    for pid in (2201, 2301):
        spec["files"][f"/proc/{pid}/environ"] = variables
    assert silent(judge("plugin-device-specs", spec, tmp_path))


@pytest.mark.parametrize("handler", ["kata-qemu-nvidia-gpu", "runsc"])
def test_devices_of_sandboxes_are_not_checked(handler, tmp_path):
    spec = machine("runtimeclass-missing")
    spec["recording"]["daemons"]["/run/containerd/containerd.sock"]["containers"][0]["handler"] = handler
    assert silent(judge("runtimeclass-missing", spec, tmp_path))


@pytest.mark.parametrize(("handler", "status"), [("", "warn"), ("runc", "warn"), ("nvidia", "skip")])
def test_pods_without_a_driver_lack_gpus_only_under_another_handler(handler, status, tmp_path):
    spec = machine("gpu-arch-dropped-runtimeclass-missing")
    spec["recording"]["daemons"]["/run/containerd/containerd.sock"]["containers"][0]["handler"] = handler
    assert judge("runtimeclass-missing", spec, tmp_path).status.value == status


@pytest.mark.parametrize(
    ("settings", "left", "status"),
    [
        ("", 90, "pass"),
        ("", 40, "fail"),
        ("evictionHard:\n  imagefs.available: 5%\n", 40, "pass"),
        ("evictionHard:\n  imagefs.available: 50Gi\n", 40, "fail"),
        ('evictionHard:\n  imagefs.available: "0%"\n', 6, "warn"),
        ("evictionHard:\n  imagefs.available: nonsense\n", 40, "fail"),
    ],
)
def test_disk_pressure_follows_the_kubelets_thresholds(settings, left, status, tmp_path):
    spec = machine("disk-pressure")
    spec["files"]["/var/lib/kubelet/config.yaml"] += settings
    spec["recording"]["filesystems"]["/var/lib/containerd"]["left"] = left << 30
    assert judge("disk-pressure", spec, tmp_path).status.value == status


def test_missing_inodes_are_disk_pressure(tmp_path):
    spec = machine("disk-pressure")
    spec["recording"]["filesystems"]["/var/lib/containerd"]["left"] = 400 << 30
    spec["recording"]["filesystems"]["/var/lib/kubelet"]["inodesLeft"] = 1000
    found = judge("disk-pressure", spec, tmp_path)
    assert found.status is FindingStatus.FAIL and "inodes" in found.evidence[0].value


def test_etc_containerd_is_used_by_the_system_containerd(tmp_path):
    spec = machine("k3s-nvidia-wrong-root")
    spec["files"]["/proc/901/cmdline"] = "/usr/bin/containerd\0"
    spec["files"]["/proc/901/stat"] = spec["files"]["/proc/1333/stat"]
    spec["files"]["/proc/901/cgroup"] = "0::/system.slice/containerd.service\n"
    assert silent(judge("k3s-nvidia-wrong-root", spec, tmp_path))


@pytest.mark.parametrize(
    ("templates", "status"),
    [
        ({"config-v3.toml.tmpl": '{{ template "base" . }}\n'}, "pass"),
        ({"config-v3.toml.tmpl": RUNC}, "fail"),
        ({"config-v3.toml.tmpl": RUNC + "# runtimes.nvidia\n"}, "pass"),
        ({"config.toml.tmpl": '{{ template "base" . }}\n'}, "pass"),
        ({"config-v3.toml.tmpl": RUNC + "# runtimes.nvidia\n", "config.toml.tmpl": "# nvidia\n"}, "pass"),
        ({}, "pass"),
    ],
)
def test_k3s_template_files_that_are_read(templates, status, tmp_path):
    spec = machine("k3s-nvidia-not-detected")
    spec["files"] |= {f"{K3S}/{name}": text for name, text in templates.items()}
    verdict = judge("k3s-wrong-template", spec, tmp_path)
    assert verdict.status.value == status
    assert status == "pass" or verdict.fixes[0].command == "gpunode configure-runtime --runtime k3s"


def test_containerd_1_ignores_the_v3_template(tmp_path):
    spec = json.loads(json.dumps(machine("k3s-nvidia-not-detected")).replace("v2.2.1-k3s1", "v1.7.28-k3s1"))
    spec["files"][f"{K3S}/config-v3.toml.tmpl"] = "# runtimes.nvidia\n"
    spec["files"][f"{K3S}/config.toml"] = "version = 2\n"
    found = judge("k3s-wrong-template", spec, tmp_path)
    assert found.status is FindingStatus.FAIL and "configure-runtime" in found.fixes[0].command


def test_template_including_the_base_keeps_k3s_detection(tmp_path):
    spec = machine("k3s-nvidia-not-detected")
    spec["files"][f"{K3S}/config-v3.toml.tmpl"] = '{{ template "base" . }}\n'
    assert judge("k3s-nvidia-not-detected", spec, tmp_path / "base").status is FindingStatus.FAIL
    spec["files"][f"{K3S}/config-v3.toml.tmpl"] = "# runtimes.nvidia\n"
    assert silent(judge("k3s-nvidia-not-detected", spec, tmp_path / "own"))


def test_microk8s_with_the_link_passes(tmp_path):
    spec = machine("microk8s-paths")
    spec["dirs"] = [path for path in spec["dirs"] if not path.startswith("/var/lib/kubelet")]
    spec["files"] = {
        path: text for path, text in spec["files"].items() if not path.startswith("/var/lib/kubelet")
    }
    spec.setdefault("links", {})["/var/lib/kubelet"] = "/var/snap/microk8s/common/var/lib/kubelet"
    assert silent(judge("microk8s-paths", spec, tmp_path))


def test_k0s_config_imports_the_drop_ins(tmp_path):
    spec = machine("k0s-dropin")
    spec["files"]["/etc/k0s/containerd.toml"] = (
        "# k0s_managed=true\n" + spec["files"]["/etc/k0s/containerd.toml"]
    )
    assert silent(judge("k0s-dropin", spec, tmp_path))


def test_validator_waiting_for_the_plugin_is_left_to_the_plugin_check(tmp_path):
    spec = machine("operator-validations")
    for stage in ("toolkit", "cuda"):
        spec["files"][f"/run/nvidia/validations/{stage}-ready"] = ""
    assert silent(judge("operator-validations", spec, tmp_path))


def test_operator_toolkit_is_no_leftover_while_the_operator_runs(tmp_path):
    spec = machine("operator-leftovers")
    spec["files"]["/var/log/pods/gpu-operator_nvidia-container-toolkit-daemonset-x_1/c/0.log"] = ""
    assert silent(judge("operator-leftovers", spec, tmp_path))


def test_full_disk_is_reported_without_a_kubelet(tmp_path):
    spec = machine("disk-pressure-rocky9")
    spec["recording"]["filesystems"]["/var/lib/docker"]["left"] = 1000
    found = judge("disk-pressure", spec, tmp_path)
    assert found.status is FindingStatus.FAIL and found.summary.startswith("a disk is full: /var/lib/docker")
