"""Unusual nodes: kind on a workstation, k3s, LXC, files without an end."""

import os

import pytest

from gpunode.errors import ConfigError
from gpunode.facts.docker import find_docker, rootless_docker
from gpunode.facts.kubelet import find_kubelet, setting
from gpunode.facts.processes import running
from gpunode.facts.system import CONTAINER, node_class, read_distribution
from gpunode.host import Host

STAT = "({}) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 500 0 0"


def process(root, pid, *argv, nspid=None, uid=0):
    place = root / "proc" / str(pid)
    place.mkdir(parents=True)
    (place / "cmdline").write_bytes(b"\0".join(word.encode() for word in argv) + b"\0")
    (place / "stat").write_text(f"{pid} " + STAT.format("x"))
    (place / "status").write_text(f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{nspid or pid}\n")


def test_kubelet_of_a_kind_cluster_is_not_the_nodes(tmp_path):
    process(tmp_path, 900, "/usr/bin/kubelet", "--config=/var/lib/kubelet/config.yaml", nspid="900\t214")
    process(tmp_path, 901, "dockerd", nspid="901\t1")
    process(tmp_path, 902, "/usr/bin/dockerd", "-H", "fd://")
    host = Host(tmp_path, environ={})
    assert [one.pid for one in running(host)] == [902]
    assert find_kubelet(host, running(host)) is None


def test_rootless_docker_is_not_the_system_docker(tmp_path):
    process(tmp_path, 903, "dockerd", uid=1000)
    host = Host(tmp_path, environ={})
    assert find_docker(host) is None
    users = rootless_docker(host)
    assert users is not None and users.pid == 903
    process(tmp_path, 904, "/usr/bin/dockerd", "-H", "fd://")
    systems = find_docker(host)
    assert systems is not None and systems.process is not None
    assert systems.process.pid == 904


@pytest.mark.parametrize(
    ("argv", "endpoint"),
    [
        (("/usr/local/bin/k3s server",), "/run/k3s/containerd/containerd.sock"),
        (("/usr/local/bin/k3s agent",), "/run/k3s/containerd/containerd.sock"),
        (
            ("/snap/microk8s/7229/kubelite", "--kubelet-args-file=/x"),
            "/var/snap/microk8s/common/run/containerd.sock",
        ),
        (("/usr/bin/kubelet",), "/run/containerd/containerd.sock"),
    ],
)
def test_kubelet_of_a_distribution_is_found_with_its_engine(argv, endpoint, tmp_path):
    process(tmp_path, 700, *argv)
    host = Host(tmp_path, environ={})
    kubelet = find_kubelet(host, running(host))
    assert kubelet is not None and kubelet.process is not None
    assert kubelet.process.pid == 700
    assert kubelet.endpoint == endpoint


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("containerRuntimeEndpoint: 'unix:///run/x.sock'\n", "unix:///run/x.sock"),
        ('containerRuntimeEndpoint: ""\ncgroupRoot: /\n', None),
        ("containerRuntimeEndpoint:\ncgroupRoot: /\n", None),
        ('  "containerRuntimeEndpoint": "unix:///run/x.sock",\n', "unix:///run/x.sock"),
    ],
)
def test_setting_is_read_with_any_quotes_and_empty_is_unset(text, value):
    assert setting(text, "containerRuntimeEndpoint") == value


@pytest.mark.parametrize("mark", ["run/systemd/container", "run/secrets/kubernetes.io/serviceaccount/token"])
def test_lxc_and_pods_are_containers(mark, tmp_path):
    (tmp_path / mark).parent.mkdir(parents=True)
    (tmp_path / mark).write_text("lxc\n")
    assert node_class(Host(tmp_path, environ={})) == CONTAINER


def test_pipe_in_place_of_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file") as raised:
        Host(tmp_path, environ={}).read_text("/pipe")
    assert "ls -lL /pipe" in raised.value.hint


def test_file_that_would_fill_the_memory_is_refused(tmp_path):
    with (tmp_path / "huge").open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(ConfigError, match="larger than 16 MiB"):
        Host(tmp_path, environ={}).read_text("/huge")


def test_pipes_in_etc_do_not_stop_the_distribution_from_being_read(tmp_path):
    etc = tmp_path / "etc"
    etc.mkdir()
    os.mkfifo(etc / "redhat-release")
    (etc / "os-release").symlink_to("/usr/lib/os-release")
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/os-release").write_text(
        'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n'
    )
    found = read_distribution(Host(tmp_path, environ={}))
    assert (found.id, found.version, found.family) == ("rocky", "9.4", "rhel")


def test_symlink_loop_has_no_target(tmp_path):
    (tmp_path / "loop").symlink_to("/loop")
    host = Host(tmp_path, environ={})
    assert not (host.is_file("/loop") or host.is_dir("/loop/below") or host.exists("/loop"))


def test_only_the_command_line_of_other_programs_is_read(tmp_path, monkeypatch):
    process(tmp_path, 41, "/usr/bin/dockerd", "-H", "fd://")
    process(tmp_path, 42, "/usr/bin/sleep", "9")
    process(tmp_path, 43)
    (tmp_path / "proc/43/cmdline").write_bytes(b"")  # a kernel thread
    read = []
    genuine = Host.read_bytes

    def noted(host, path, *limit):
        read.append(path)
        return genuine(host, path, *limit)

    monkeypatch.setattr(Host, "read_bytes", noted)
    host = Host(tmp_path, environ={})
    assert [one.pid for one in running(host, "dockerd", "crio")] == [41]
    assert [path for path in read if path.startswith(("/proc/42/", "/proc/43/"))] == [
        "/proc/42/cmdline",
        "/proc/43/cmdline",
    ]
    assert [one.pid for one in running(host)] == [41, 42]
