"""Nodes whose pods get GPUs without an nvidia handler, or without a device plugin: these are healthy."""

import json

import pytest

from fixtures.machines import expected, machine
from gpunode.checks import device_plugin, gpu_operator
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.commands.demo import build_machine
from gpunode.facts.device_plugins import stage_log
from gpunode.facts.node import Node
from gpunode.host import Host
from tests.checks.test_kubelet_checks import CONTAINER, POD_RESOURCES, judge, offered, silent

PLUGINS = "k8s.device-plugin.nvidia.com/gpu"
SUSE = "/run/containerd/containerd.sock"


def by_nri(spec):
    running(spec, "nvidia-ctk-installer\0--enable-nri-plugin\0")


def by_plugins_specification(spec):
    device = {"name": "GPU-0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}
    text = json.dumps({"cdiVersion": "0.5.0", "kind": PLUGINS, "devices": [device]})
    spec["files"]["/etc/cdi/k8s.device-plugin.nvidia.com-gpu.json"] = text


def by_dra(spec):
    spec["dirs"].append("/var/lib/kubelet/plugins/gpu.nvidia.com")


def by_mounts(spec):
    running(spec, "/usr/bin/nvidia-gpu-device-plugin\0-logtostderr\0")


def running(spec, command, pid=7000):
    other = next(path for path in spec["files"] if path.startswith("/proc/") and path.endswith("/stat"))
    spec["files"] |= {f"/proc/{pid}/cmdline": command, f"/proc/{pid}/stat": spec["files"][other]}


def without_handler(cdi=True):
    """A kubeadm node whose containerd 2 has only runc."""
    spec = machine("healthy-suse-kubelet")
    status = spec["recording"]["daemons"][SUSE]["status"]
    status["handlers"] = ["", "runc"]
    status["config"]["enableCDI"] = cdi
    del status["config"]["containerd"]["runtimes"]["nvidia"]
    spec["files"]["/etc/containerd/config.toml"] = "version = 3\n"
    return spec


@pytest.mark.parametrize("way", [by_nri, by_plugins_specification, by_dra, by_mounts])
@pytest.mark.parametrize("name", ["k3s-nvidia-wrong-root", "k3s-nvidia-not-detected", "k3s-wrong-template"])
def test_k3s_without_the_nvidia_handler_passes_if_gpus_use_another_path(name, way, tmp_path):
    spec = machine(name)
    way(spec)
    for identifier in (name, "containerd-runtime-missing"):
        assert judge(identifier, spec, tmp_path / identifier).status is not FindingStatus.FAIL


@pytest.mark.parametrize("way", [by_nri, by_plugins_specification, by_dra, by_mounts])
def test_containerd_without_the_handler(way, tmp_path):
    identifier = "containerd-runtime-missing"
    assert judge(identifier, without_handler(), tmp_path / "none").status is FindingStatus.FAIL
    spec = without_handler()
    way(spec)
    assert silent(judge(identifier, spec, tmp_path / "way"))
    off = without_handler(cdi=False)
    way(off)
    needs_cdi = way in (by_plugins_specification, by_dra)
    assert (judge(identifier, off, tmp_path / "off").status is FindingStatus.FAIL) == needs_cdi


@pytest.mark.parametrize("way", [by_nri, by_plugins_specification, by_mounts])
@pytest.mark.parametrize("name", ["crio-hooks-unread", "crio-runtime-missing"])
def test_crio_without_handler_or_hook(name, way, tmp_path):
    spec = machine(name)
    [identifier] = [one for one in ("crio-hooks-mode", "crio-runtime-missing") if one in expected(name)]
    assert judge(identifier, spec, tmp_path / "none").status is FindingStatus.FAIL
    way(spec)
    found = judge(identifier, spec, tmp_path / "way")
    assert silent(found) or "hasn't loaded the" in found.summary


def test_dra_and_mounts_do_not_need_the_toolkit(tmp_path):
    for way in (by_dra, by_mounts):
        spec = without_handler()
        spec["executables"] = [path for path in spec["executables"] if "/usr/bin/nvidia-c" not in path]
        identifier, place = "toolkit-missing", tmp_path / way.__name__
        assert judge(identifier, spec, place / "without").status is FindingStatus.FAIL
        way(spec)
        assert silent(judge(identifier, spec, place / "with"))


def holding(handler, nodes=True):
    """A pod that holds a GPU and sees it, under this handler."""
    spec = without_handler()
    gpu = {"major": 195, "minor": 0, "mode": "0666"}
    if nodes:
        spec["recording"]["devices"]["/proc/7001/root/dev/nvidia0"] = gpu
    running(spec, "python\0")
    spec["files"] |= {
        path.replace("7000", "7001"): text for path, text in spec["files"].items() if "7000" in path
    }
    spec["files"]["/proc/7001/cgroup"] = f"0::/kubepods.slice/cri-containerd-{CONTAINER}.scope\n"
    pod = {
        "id": CONTAINER,
        "name": "main",
        "pod": "train-0",
        "namespace": "ml",
        "image": "i",
        "handler": handler,
    }
    spec["recording"]["daemons"][SUSE]["containers"] = [pod]
    held = {
        "namespace": "ml",
        "pod": "train-0",
        "container": "main",
        "resource": "nvidia.com/gpu",
        "ids": ["G"],
    }
    spec["recording"]["sockets"][POD_RESOURCES] = "listening"
    spec["recording"]["daemons"][POD_RESOURCES] = {"allocatable": {"nvidia.com/gpu": ["G"]}, "pods": [held]}
    return spec


def test_pods_holding_gpus_show_that_gpu_access_works(tmp_path):
    identifier = "containerd-runtime-missing"
    assert silent(judge(identifier, holding(""), tmp_path / "default"))
    # with nvidia's handler it was started when that existed
    assert judge(identifier, holding("nvidia"), tmp_path / "nvidia").status is FindingStatus.FAIL


def test_gpu_of_a_virtual_machine_in_a_pod_is_not_checked(tmp_path):
    spec = holding("", nodes=False)
    by_nri(spec)
    assert judge("runtimeclass-missing", spec, tmp_path / "a").status is FindingStatus.WARN
    spec["dirs"].append("/proc/7001/root/dev/vfio")
    assert judge("runtimeclass-missing", spec, tmp_path / "b").status is FindingStatus.SKIP


def test_pods_that_use_gpus_without_a_plugin(tmp_path):
    spec = holding("nvidia")
    spec["recording"]["daemons"][POD_RESOURCES] = {"allocatable": {}, "pods": []}
    by_nri(spec)
    found = judge("plugin-not-registered", spec, tmp_path / "a")
    assert found.status is FindingStatus.PASS and found.note and "ml/train-0" in found.evidence[0].value
    spec["recording"]["daemons"][SUSE]["containers"][0]["pod"] = "dcgm-exporter-x"
    assert judge("plugin-not-registered", spec, tmp_path / "b").status is FindingStatus.FAIL


def test_missing_plugin_is_skipped_while_the_operator_starts(tmp_path, monkeypatch):
    spec = machine("operator-validations")
    spec["recording"]["daemons"][POD_RESOURCES] = offered({})["recording"]["daemons"][POD_RESOURCES]
    spec["recording"]["sockets"][POD_RESOURCES] = "listening"

    def young(host, operator, stage):
        found = stage_log(host, operator, stage)
        return found and (*found[:2], host.now() - 60)

    for module in (device_plugin, gpu_operator):
        monkeypatch.setattr(module, "stage_log", young)
    found = judge("plugin-not-registered", spec, tmp_path)
    assert found.status is FindingStatus.SKIP and "still starting" in found.summary


@pytest.mark.parametrize(
    ("containerd", "kubelet", "status"),
    [
        ("1.6.33", (1, 30, 2), "fail"),
        ("1.7.27", (1, 27, 9), "fail"),
        ("1.7.27", (1, 30, 2), "pass"),
        ("1.7.27", (), "pass"),
    ],
)
def test_cdi_names_dropped_by_kubelet_or_containerd_are_a_mismatch(containerd, kubelet, status, tmp_path):
    spec = machine("plugin-strategy-mismatch")
    spec["recording"]["daemons"][SUSE]["status"]["config"].pop("enableCDI")  # 1.6 doesn't report it
    output = {"stdout": f"containerd github.com/containerd/containerd {containerd} 0\n"}
    spec["recording"]["commands"]["/usr/bin/containerd --version"] = output
    node = Node(Host(build_machine(spec, tmp_path), environ={}))
    node.__dict__["kubelet_version"] = kubelet
    assert BY_ID["plugin-strategy-mismatch"].run(node).status.value == status
