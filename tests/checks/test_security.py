"""Access that is open on purpose, or to no user, is no finding."""

import pytest

from fixtures.machines import machine
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node
from gpunode.host import Host
from tests.required import required


def judged(tmp_path, identifier, name, change):
    spec = machine(name)
    change(spec)
    verdict = BY_ID[identifier].run(Node(Host(build_machine(spec, tmp_path), environ={})))
    return "note" if verdict.note else verdict.status.value


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:2375", "pass"),
        ("tcp://localhost:2375", "pass"),
        ("tcp://[::1]:2375", "pass"),
        ("tcp://:2375", "pass"),
        ("tcp://", "pass"),
        ("tcp://0.0.0.0:2375", "note"),
        ("tcp://gpu07.example.com:2375", "note"),
    ],
)
def test_only_network_addresses_are_reported(tmp_path, address, expected):
    def listen(spec):
        spec["files"]["/proc/1210/cmdline"] = f"/usr/bin/dockerd\0-H\0{address}\0"

    assert judged(tmp_path, "daemon-tcp", "healthy-docker-rocky9", listen) == expected


def test_docker_with_tls_certificates_passes(tmp_path):
    def listen(spec):
        spec["files"]["/proc/1210/cmdline"] = "/usr/bin/dockerd\0-H\0tcp://0.0.0.0:2376\0--tlsverify\0"

    assert judged(tmp_path, "daemon-tcp", "healthy-docker-rocky9", listen) == "pass"


def test_administrators_in_the_docker_group_pass(tmp_path):
    def group(spec):
        spec["files"]["/etc/group"] = "wheel:x:10:anna\ndocker:x:998:anna\n"

    assert judged(tmp_path, "docker-group", "healthy-docker-rocky9", group) == "pass"


def test_world_writable_socket_is_reported(tmp_path):
    def open_up(spec):
        spec["recording"]["modes"] = {"/run/docker.sock": "0666"}

    assert judged(tmp_path, "docker-group", "healthy-docker-rocky9", open_up) == "note"


STATUS = "/proc/3000/status"
CRI, PODS = "/run/containerd/containerd.sock", "/var/lib/kubelet/pod-resources/kubelet.sock"


def privileged(spec):
    spec["files"][STATUS] = spec["files"][STATUS].replace("00000000a80425fb", "000001ffffffffff")


def exporter(spec):
    spec["recording"]["daemons"][CRI]["containers"][0]["namespace"] = "gpu-operator"


def without_pod_resources(spec):
    del spec["recording"]["daemons"][PODS]


def without_gpus_by_variable(spec):
    spec["files"]["/proc/3000/environ"] = "NVIDIA_VISIBLE_DEVICES=void\0"


@pytest.mark.parametrize("change", [privileged, exporter, without_pod_resources, without_gpus_by_variable])
def test_containers_without_gpus_by_environment_leave_only_a_note(tmp_path, change):
    """The remaining note says that pods may use some GPUs."""
    name, identifier = "accept-envvar-unprivileged", "accept-envvar-unprivileged"
    assert judged(tmp_path, identifier, name, change) == "note"


def test_pods_selecting_their_runtime_class_pass(tmp_path):
    def by_class(spec):
        spec["recording"]["daemons"][CRI]["status"]["defaultHandler"] = "runc"

    name = "accept-envvar-unprivileged"
    assert judged(tmp_path, name, name, by_class) == "pass"


def test_hypervisor_driver_is_not_compared_with_other_releases(tmp_path):
    def manager(spec):
        spec["files"]["/sys/module/nvidia_vgpu_vfio/initstate"] = "live\n"

    assert judged(tmp_path, "driver-cve", "driver-cve", manager) == FindingStatus.SKIP.value


def test_pending_upgrade_needs_only_a_reboot(tmp_path):
    spec = machine("driver-cve")
    spec["recording"]["commands"]["modinfo -F version nvidia"] = {"stdout": "580.159.03\n"}
    verdict = BY_ID["driver-cve"].run(Node(Host(build_machine(spec, tmp_path), environ={})))
    assert required(verdict.fix).command == "reboot"


def test_operator_toolkit_is_upgraded_with_the_operator(tmp_path):
    spec = machine("toolkit-cve")
    names = [path.rpartition("/")[2] for path in spec["executables"] if "nvidia" in path]
    spec["executables"] = [f"/usr/local/nvidia/toolkit/{name}" for name in names]
    output = spec["recording"]["commands"].pop("/usr/bin/nvidia-ctk --version")
    spec["recording"]["commands"]["/usr/local/nvidia/toolkit/nvidia-ctk --version"] = output
    verdict = BY_ID["toolkit-cve"].run(Node(Host(build_machine(spec, tmp_path), environ={})))
    assert required(verdict.fix).command.startswith("follow https://docs.nvidia.com/")


@pytest.mark.parametrize(("default", "expected"), [("nvidia", "note"), ("crun", "pass")])
def test_default_runtime_of_crio_is_respected(tmp_path, default, expected):
    def change(spec):
        answers = spec["recording"]["daemons"]["/var/run/crio/crio.sock"]
        answers["config"] = f'[crio.runtime]\ndefault_runtime = "{default}"\n'
        config = "/etc/nvidia-container-runtime/config.toml"
        spec["files"][config] = "disable-require = false\n"

    assert judged(tmp_path, "accept-envvar-unprivileged", "healthy-crio", change) == expected
