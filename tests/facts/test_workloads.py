"""Containers that use GPUs, from /proc alone; device rules of systemd and cgroup v1."""

import pytest

from gpunode.daemons.cri import CriContainer, combine
from gpunode.daemons.proto import cri_pb2 as pb
from gpunode.facts.device_plugins import plugin_processes
from gpunode.facts.processes import Process
from gpunode.facts.workloads import DeviceRule, container_of, parse_devices_list, parse_rules
from gpunode.host import Host

ID = "4f" * 32
MAJORS = {"nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 508, "pts": 136}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n", ID),
        (f"0::/system.slice/docker-{ID}.scope/init.scope\n", ID),
        (f"0::/docker/{ID}\n", ID),
        (f"11:cpuset,devices:/kubepods/besteffort/podx/{ID}\n0::/\n", ID),
        ("0::/user.slice/user-1000.slice\n", ""),
        ("", ""),
    ],
)
def test_cgroup_names_the_container(text, expected, tmp_path):
    place = tmp_path / "proc/77"
    place.mkdir(parents=True)
    (place / "cgroup").write_text(text)
    assert container_of(Host(tmp_path, environ={}), 77).id == expected


@pytest.mark.parametrize(
    ("allow", "allowed"),
    [
        (("/dev/char/195:255 rwm", "/dev/char/195:0 rw"), True),
        (("/dev/char/195:* rwm",), True),
        (("char-nvidia rwm",), True),
        (("char-nvidia* rwm",), True),
        (("char-* rwm",), True),
        (("char-195 rwm",), True),
        (("/dev/nvidia0 rw",), True),
        (("char-pts rwm", "/dev/char/1:3 rwm", "/dev/char/195:1 rw"), False),
    ],
)
def test_device_policy_of_systemd(allow, allowed):
    assert DeviceRule("strict", allow).allows(195, 0, MAJORS) is allowed


def test_unit_without_rules_may_open_everything():
    assert DeviceRule("auto", ()).allows(195, 0, MAJORS)
    assert not DeviceRule("closed", ()).allows(195, 0, MAJORS)


def test_rules_are_read_by_unit():
    text = (
        "Id=a.scope\nDevicePolicy=strict\nDeviceAllow=char-pts rwm\nDeviceAllow=/dev/char/1:3 rwm\n\n"
        "Id=b.scope\nDevicePolicy=auto\nDeviceAllow=\n\nId=\nDevicePolicy=auto\n"
    )
    assert parse_rules(text) == {
        "a.scope": DeviceRule("strict", ("char-pts rwm", "/dev/char/1:3 rwm")),
        "b.scope": DeviceRule("auto", ()),
    }


def test_devices_list_of_cgroup_v1():
    assert parse_devices_list("a *:* rwm\nc 195:* rw\nb 8:0 r\nc 508:0 rwm\nnonsense\n") == (
        (-1, -1),
        (195, -1),
        (508, 0),
    )


def test_containers_have_the_names_of_their_pods():
    sandbox = pb.PodSandbox(
        id="s1", metadata=pb.PodSandboxMetadata(name="train-0", namespace="ml"), runtime_handler="nvidia"
    )
    container = pb.Container(
        id="c1",
        pod_sandbox_id="s1",
        metadata=pb.ContainerMetadata(name="main"),
        image=pb.ImageSpec(image="pytorch:2"),
    )
    alone = pb.Container(id="c2", pod_sandbox_id="s2")
    lists = combine(
        pb.ListContainersResponse(containers=[container, alone]), pb.ListPodSandboxResponse(items=[sandbox])
    )
    assert lists == (
        CriContainer("c1", "main", "train-0", "ml", "pytorch:2", "nvidia"),
        CriContainer("c2", "", "", "", "", ""),
    )


def test_device_plugins_are_recognized_by_their_programs(tmp_path):
    ran = [
        ("/usr/bin/nvidia-device-plugin", "--pass-device-specs"),
        ("/usr/bin/python3", "/usr/bin/gpunode", "plugin", "serve"),
        ("/usr/bin/python3", "/usr/bin/gpunode", "plugin", "status"),
        ("gpu-feature-discovery",),
        ("/opt/gpunode/bin/python3", "-P", "-m", "gpunode.light", "3", "plugin", "serve"),  # earlier versions
        ("/opt/gpunode/bin/python3", "-P", "-m", "gpunode", "plugin", "serve"),
    ]
    processes = [Process(number, argv, 0.0) for number, argv in enumerate(ran, 1)]
    found = plugin_processes(Host(tmp_path, environ={}), processes)
    assert [one.name for one in found] == ["nvidia-device-plugin", "gpunode", "gpunode", "gpunode"]
    assert found[0].switched("--pass-device-specs", "PASS_DEVICE_SPECS")
    assert not found[1].switched("--pass-device-specs", "PASS_DEVICE_SPECS")
