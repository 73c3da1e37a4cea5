"""What is open on purpose, or to nobody, is no finding."""

import pytest

from fixtures.machines import machine
from gpunode.checks.catalogue import BY_ID
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.output.result import FindingStatus
from tests.sure import sure


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
def test_only_what_the_network_reaches_counts(tmp_path, address, expected):
    def listen(spec):
        spec["files"]["/proc/1210/cmdline"] = f"/usr/bin/dockerd\0-H\0{address}\0"

    assert judged(tmp_path, "daemon-tcp", "healthy-docker-rocky9", listen) == expected


def test_docker_with_certificates_is_no_finding(tmp_path):
    def listen(spec):
        spec["files"]["/proc/1210/cmdline"] = "/usr/bin/dockerd\0-H\0tcp://0.0.0.0:2376\0--tlsverify\0"

    assert judged(tmp_path, "daemon-tcp", "healthy-docker-rocky9", listen) == "pass"


def test_administrators_in_the_group_docker_are_no_finding(tmp_path):
    def group(spec):
        spec["files"]["/etc/group"] = "wheel:x:10:anna\ndocker:x:998:anna\n"

    assert judged(tmp_path, "docker-group", "healthy-docker-rocky9", group) == "pass"


def test_a_socket_that_everybody_may_write_to_is_told(tmp_path):
    def open_up(spec):
        spec["recording"]["modes"] = {"/run/docker.sock": "0666"}

    assert judged(tmp_path, "docker-group", "healthy-docker-rocky9", open_up) == "note"


STATUS = "/proc/3000/status"
CRI, PODS = "/run/containerd/containerd.sock", "/var/lib/kubelet/pod-resources/kubelet.sock"


def privileged(spec):
    spec["files"][STATUS] = spec["files"][STATUS].replace("00000000a80425fb", "000001ffffffffff")


def exporter(spec):
    spec["recording"]["daemons"][CRI]["containers"][0]["namespace"] = "gpu-operator"


def not_told(spec):
    del spec["recording"]["daemons"][PODS]


def nothing_taken(spec):
    spec["files"]["/proc/3000/environ"] = "NVIDIA_VISIBLE_DEVICES=void\0"


@pytest.mark.parametrize("change", [privileged, exporter, not_told, nothing_taken])
def test_containers_that_may_have_gpus_took_none(tmp_path, change):
    """What is left is the quiet note that pods may take some."""
    name, identifier = "accept-envvar-unprivileged", "accept-envvar-unprivileged"
    assert judged(tmp_path, identifier, name, change) == "note"


def test_pods_that_choose_their_runtime_are_no_finding(tmp_path):
    def by_class(spec):
        spec["recording"]["daemons"][CRI]["status"]["defaultHandler"] = "runc"

    name = "accept-envvar-unprivileged"
    assert judged(tmp_path, name, name, by_class) == "pass"


def test_a_hypervisors_driver_is_not_compared_with_other_releases(tmp_path):
    def manager(spec):
        spec["files"]["/sys/module/nvidia_vgpu_vfio/initstate"] = "live\n"

    assert judged(tmp_path, "driver-cve", "driver-cve", manager) == FindingStatus.SKIP.value


def test_an_upgrade_that_waits_needs_a_reboot_only(tmp_path):
    spec = machine("driver-cve")
    spec["recording"]["commands"]["modinfo -F version nvidia"] = {"stdout": "580.159.03\n"}
    verdict = BY_ID["driver-cve"].run(Node(Host(build_machine(spec, tmp_path), environ={})))
    assert sure(verdict.fix).command == "reboot"


def test_the_operators_toolkit_is_upgraded_with_the_operator(tmp_path):
    spec = machine("toolkit-cve")
    names = [path.rpartition("/")[2] for path in spec["executables"] if "nvidia" in path]
    spec["executables"] = [f"/usr/local/nvidia/toolkit/{name}" for name in names]
    told = spec["recording"]["commands"].pop("/usr/bin/nvidia-ctk --version")
    spec["recording"]["commands"]["/usr/local/nvidia/toolkit/nvidia-ctk --version"] = told
    verdict = BY_ID["toolkit-cve"].run(Node(Host(build_machine(spec, tmp_path), environ={})))
    assert sure(verdict.fix).command.startswith("follow https://docs.nvidia.com/")


@pytest.mark.parametrize(("default", "expected"), [("nvidia", "note"), ("crun", "pass")])
def test_crio_tells_its_default_runtime_too(tmp_path, default, expected):
    def change(spec):
        answers = spec["recording"]["daemons"]["/var/run/crio/crio.sock"]
        answers["config"] = f'[crio.runtime]\ndefault_runtime = "{default}"\n'
        config = "/etc/nvidia-container-runtime/config.toml"
        spec["files"][config] = "disable-require = false\n"

    assert judged(tmp_path, "accept-envvar-unprivileged", "healthy-crio", change) == expected
