"""Files of another engine or of an earlier kubelet say nothing about this kubelet's engine."""

import pytest

from fixtures.machines import machine
from gpunode.checks.finding import FindingStatus
from gpunode.commands.demo import build_machine
from gpunode.facts.kubelet import find_kubelet
from gpunode.facts.processes import Process
from gpunode.host import Host
from tests.checks.test_kubelet_checks import POD_RESOURCES, judge, offered

CONFIG = "/var/lib/kubelet/config.yaml"
OWN = "/run/k3s/containerd/containerd.sock"
DROP_INS = "/var/lib/rancher/rke2/agent/etc/kubelet.conf.d"


def test_full_disk_unused_by_the_kubelets_engine_passes(tmp_path):
    spec = machine("disk-pressure")
    assert judge("disk-pressure", spec, tmp_path / "a").status is FindingStatus.FAIL
    places = spec["recording"]["filesystems"]
    free = {**next(iter(places.values())), "left": 900 << 30, "size": 1000 << 30, "inodesLeft": 999999}
    for path in places:
        places[path] = free
    places["/var/lib/docker"] = {**free, "left": 90 << 30}
    assert judge("disk-pressure", spec, tmp_path / "b").status is FindingStatus.PASS


@pytest.mark.parametrize(
    ("argv", "endpoint", "driver"),
    [
        (("k3s", "server"), OWN, None),
        (
            ("kubelet", f"--container-runtime-endpoint=unix://{OWN}", f"--config-dir={DROP_INS}"),
            OWN,
            "systemd",
        ),
        (("/usr/bin/kubelet", f"--config={CONFIG}"), "/run/crio/crio.sock", "cgroupfs"),
        (
            ("/usr/bin/kubelet", f"--config={CONFIG}", f"--config-dir={DROP_INS}"),
            "/run/crio/crio.sock",
            "systemd",
        ),
        (("/usr/bin/kubelet", "--cgroup-driver=systemd"), "/run/crio/crio.sock", "systemd"),
    ],
    ids=["k3s", "rke2", "kubeadm", "kubeadm with drop-ins", "a flag"],
)
def test_files_of_a_removed_kubelet_are_ignored(argv, endpoint, driver, tmp_path):
    files = {
        CONFIG: "cgroupDriver: cgroupfs\n",
        "/var/lib/kubelet/kubeadm-flags.env": 'X="--container-runtime-endpoint=unix:///run/crio/crio.sock"\n',
        f"{DROP_INS}/00-a.conf": "kind: KubeletConfiguration\ncgroupDriver: cgroupfs\n",
        f"{DROP_INS}/10-b.conf": "kind: KubeletConfiguration\ncgroupDriver: systemd\n",
    }
    host = Host(build_machine({"files": files}, tmp_path), environ={})
    found = find_kubelet(host, [Process(7, argv, 0.0)])
    assert found is not None and (found.endpoint, found.cgroup_driver) == (endpoint, driver)


def test_nerdctl_needs_no_cri(tmp_path):
    spec = machine("containerd-cri-disabled-suse")
    for path in [path for path in spec["files"] if "kubelet" in path or path.startswith("/proc/1500/")]:
        del spec["files"][path]
    spec.pop("dirs")
    assert judge("containerd-cri-disabled", spec, tmp_path / "a").status is FindingStatus.FAIL
    spec["executables"].append("/usr/local/bin/nerdctl")
    found = judge("containerd-cri-disabled", spec, tmp_path / "b")
    assert found.status is FindingStatus.SKIP and "nerdctl" in found.summary


def test_stale_socket_passes_while_gpus_are_offered(tmp_path):
    spec = machine("plugin-socket-dead")
    spec["recording"]["sockets"][POD_RESOURCES] = "listening"
    spec["recording"]["daemons"][POD_RESOURCES] = {"allocatable": {"nvidia.com/gpu": ["GPU-0"]}, "pods": []}
    found = judge("plugin-socket-dead", spec, tmp_path)
    assert found.status is FindingStatus.PASS and found.note


def test_operator_toolkit_left_for_k3s_is_moved_before_the_restart(tmp_path):
    left = machine("healthy-k3s")
    left["dirs"] += ["/usr/local/nvidia/toolkit", "/var/log/pods"]
    path = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
    left["files"][path] = left["files"][path].replace("/usr/bin/nvidia", "/usr/local/nvidia/toolkit/nvidia")
    found = judge("operator-leftovers", left, tmp_path)
    assert found.status is FindingStatus.WARN
    commands = [fix.command for fix in found.fixes]
    assert commands == ["mv /usr/local/nvidia/toolkit /usr/local/nvidia/toolkit.old && systemctl restart k3s"]


def test_operator_plugin_gets_time_to_start(tmp_path):
    spec = offered({})
    spec["files"]["/var/log/pods/gpu-operator_nvidia-container-toolkit-daemonset-x_u/ctr/0.log"] = "x\n"
    found = judge("plugin-not-registered", spec, tmp_path)
    assert found.status is FindingStatus.FAIL and found.fixes[0].command.startswith("kubectl get pods")


def test_control_plane_without_ordinary_pods_needs_no_plugin(tmp_path):
    spec = offered({})
    spec["files"] |= {
        "/etc/kubernetes/manifests/kube-apiserver.yaml": "kind: Pod\n",
        "/var/log/pods/kube-system_kube-apiserver-a_1/kube-apiserver/0.log": "x\n",
        "/var/log/pods/calico-system_calico-node-x_2/calico-node/0.log": "x\n",
    }
    found = judge("plugin-not-registered", spec, tmp_path / "a")
    assert found.status is FindingStatus.PASS and found.note
    spec["files"]["/var/log/pods/default_web-7c9d_3/web/0.log"] = "x\n"
    assert judge("plugin-not-registered", spec, tmp_path / "b").status is FindingStatus.FAIL


def test_shared_gpus_under_any_resource_name_are_accepted(tmp_path):
    spec = offered({"tencent.com/vcuda-core": ["0", "1"]})
    assert judge("plugin-not-registered", spec, tmp_path).status is FindingStatus.PASS


@pytest.mark.parametrize("runs", [("k3s", "server"), None], ids=["runs", "stopped"])
def test_kubelet_package_beside_k3s_is_not_restarted(runs, tmp_path):
    unit = "[Service]\nExecStart=/usr/bin/x\n"
    files = {
        "/usr/lib/systemd/system/kubelet.service": unit,
        "/etc/systemd/system/k3s.service": unit,
        "/var/lib/rancher/k3s/agent/kubelet.kubeconfig": "x\n",
    }
    host = Host(build_machine({"files": files}, tmp_path), environ={})
    found = find_kubelet(host, [Process(7, runs, 0.0)] if runs else [])
    assert found is not None and (found.unit, found.endpoint, found.joined) == ("k3s.service", OWN, True)
