"""The containerd of k3s, rke2, k0s and microk8s, from processes, units and settings of a recorded tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpunode.facts.containerd import find_containerd
from gpunode.facts.daemons import manager
from gpunode.facts.distributions import distribution_at, find_distribution, k0s_manages, sources
from gpunode.facts.processes import running
from gpunode.facts.registry import DISTRIBUTIONS
from tests.facts.test_daemons import Node

K3S = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
RKE2 = "/var/lib/rancher/rke2/agent/etc/containerd/config.toml"
SOCKET = "/run/k3s/containerd/containerd.sock"
MICROK8S = "/var/snap/microk8s/common"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def unit(node: Node, name: str, command: str, *settings: str) -> None:
    node.file(f"/etc/systemd/system/{name}", "\n".join(["[Service]", *settings, f"ExecStart={command}"]))


def rancher(node: Node, pid: int, config: str, cgroup: str = "") -> None:
    node.process(
        pid, "containerd", "-c", config, "-a", SOCKET, "--state", "/run/k3s/containerd", cgroup=cgroup
    )


@pytest.mark.parametrize("service", ["k3s.service", "k3s-agent.service"])
def test_k3s_runs_as_server_or_agent(node: Node, service: str) -> None:
    unit(node, service, "/usr/local/bin/k3s agent")
    rancher(node, 7, K3S, f"/system.slice/{service}")
    found = find_distribution(node.host, "k3s")
    assert found is not None and found.process is not None
    assert (found.manager, found.unit, found.config_path, found.socket) == ("k3s", service, K3S, SOCKET)
    assert found.log == "/var/lib/rancher/k3s/agent/containerd/containerd.log"


def test_running_unit_is_chosen_if_rke2_has_both(node: Node) -> None:
    unit(node, "rke2-server.service", "/usr/local/bin/rke2 server")
    unit(node, "rke2-agent.service", "/usr/local/bin/rke2 agent")
    rancher(node, 7, RKE2, "/system.slice/rke2-agent.service")
    found = find_distribution(node.host, "rke2")
    assert found is not None and (found.unit, found.manager) == ("rke2-agent.service", "rke2")
    assert find_distribution(node.host, "k3s") is None


def test_enabled_unit_is_chosen_if_rke2_is_stopped(node: Node) -> None:
    unit(node, "rke2-server.service", "/usr/local/bin/rke2 server")
    unit(node, "rke2-agent.service", "/usr/local/bin/rke2 agent")
    wants = node.root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True)
    (wants / "rke2-agent.service").symlink_to("/etc/systemd/system/rke2-agent.service")
    node.file("/var/lib/rancher/rke2/data/v1.34/bin/containerd", "x", 0o755)
    found = find_distribution(node.host, "rke2")
    assert found is not None and (found.process, found.unit) == (None, "rke2-agent.service")
    assert found.config_path == RKE2 and found.binary == "/var/lib/rancher/rke2/data/v1.34/bin/containerd"


@pytest.mark.parametrize(
    ("command", "settings", "files"),
    [
        ("/usr/local/bin/k3s server --data-dir /data/k3s", (), {}),
        ("/usr/local/bin/k3s server -d /data/k3s/", (), {}),
        ("/usr/local/bin/k3s server", ("Environment=K3S_DATA_DIR=/data/k3s",), {}),
        (
            "/usr/local/bin/k3s server",
            ("EnvironmentFile=-/etc/default/%N",),
            {"/etc/default/k3s": "K3S_DATA_DIR=/data/k3s\n"},
        ),
        ("/usr/local/bin/k3s server", (), {"/etc/rancher/k3s/config.yaml": "data-dir: /data/k3s\n"}),
        (
            "/usr/local/bin/k3s server",
            (),
            {
                "/etc/rancher/k3s/config.yaml": "data-dir: /old\n",
                "/etc/rancher/k3s/config.yaml.d/9.yaml": '"data-dir": "/data/k3s" # moved\n',
            },
        ),
    ],
    ids=["flag", "short flag", "environment", "environment file", "settings", "settings directory"],
)
def test_stopped_k3s_has_the_configured_data_directory(
    node: Node, command: str, settings: tuple[str, ...], files: dict[str, str]
) -> None:
    unit(node, "k3s.service", command, *settings)
    for path, text in files.items():
        node.file(path, text)
    found = find_distribution(node.host, "k3s")
    assert found is not None and found.config_path == "/data/k3s/agent/etc/containerd/config.toml"


def test_custom_data_directory_is_found_by_socket_and_service(node: Node) -> None:
    unit(node, "rke2-server.service", "/usr/local/bin/rke2 server")
    rancher(node, 7, "/data/agent/etc/containerd/config.toml")
    (process,) = running(node.host)
    assert manager(node.host, process) == "rke2"
    found = find_distribution(node.host, "rke2")
    assert found is not None and found.config_path == "/data/agent/etc/containerd/config.toml"
    assert found.log == "/data/agent/containerd/containerd.log"


@pytest.mark.parametrize(
    ("service", "command"),
    [
        ("k3s.service", "/usr/local/bin/k3s server --docker"),
        ("rke2-server.service", "/usr/local/bin/rke2 server --disable-agent"),
        ("k3s.service", "/usr/local/bin/k3s server --container-runtime-endpoint=/run/crio/crio.sock"),
        ("k0sworker.service", "/usr/local/bin/k0s worker --cri-socket=remote:/run/x.sock"),
        ("k0scontroller.service", "/usr/local/bin/k0s controller"),
    ],
)
def test_stopped_distribution_without_its_own_containerd_is_ignored(
    node: Node, service: str, command: str
) -> None:
    unit(node, service, command)
    assert [find_distribution(node.host, name) for name in DISTRIBUTIONS] == [None] * 4


@pytest.mark.parametrize("flag", ["--enable-worker", "--single", "--single=true"])
def test_k0s_controller_with_pods_has_a_containerd(node: Node, flag: str) -> None:
    unit(node, "k0scontroller.service", f"/usr/local/bin/k0s controller {flag} --data-dir=/srv/k0s")
    node.file("/srv/k0s/bin/containerd", "x", 0o755)
    found = find_distribution(node.host, "k0s")
    assert found is not None and found.unit == "k0scontroller.service"
    assert (found.config_path, found.binary) == ("/etc/k0s/containerd.toml", "/srv/k0s/bin/containerd")


def test_microk8s_paths_survive_a_snap_refresh(node: Node) -> None:
    unit(node, "snap.microk8s.daemon-containerd.service", "/usr/bin/snap run microk8s.daemon-containerd")
    node.file("/var/snap/microk8s/7229/args/containerd.toml", "version = 2\n")
    (node.root / "var/snap/microk8s/current").symlink_to("7229")
    address = ("--address", f"{MICROK8S}/run/containerd.sock")
    config = "/var/snap/microk8s/7229/args/containerd.toml"
    node.process(7, "/snap/microk8s/7229/bin/containerd", "--config", config, *address)
    found = find_distribution(node.host, "microk8s")
    assert found is not None and found.config_path == "/var/snap/microk8s/current/args/containerd.toml"
    assert found.socket == f"{MICROK8S}/run/containerd.sock"
    node.file("/var/snap/microk8s/current/args/containerd-template.toml", "version = 2\n")
    assert sources(node.host, found) == ("/var/snap/microk8s/current/args/containerd-template.toml",)


def test_system_containerd_and_k3s_are_separate(node: Node) -> None:
    unit(node, "k3s.service", "/usr/local/bin/k3s server")
    unit(node, "containerd.service", "/usr/bin/containerd")
    rancher(node, 7, K3S, "/system.slice/k3s.service")
    node.process(8, "/usr/bin/containerd", cgroup="/system.slice/containerd.service")
    system = find_containerd(node.host)
    assert system is not None and (system.manager, system.config_path) == ("", "/etc/containerd/config.toml")
    at = distribution_at(node.host, SOCKET)
    assert at is not None and at.manager == "k3s"
    assert distribution_at(node.host, "/run/containerd/containerd.sock") is None


def test_only_containerd_is_the_distributions_even_if_stopped(node: Node) -> None:
    unit(node, "k3s.service", "/usr/local/bin/k3s server")
    stopped = find_containerd(node.host)
    assert stopped is not None and (stopped.manager, stopped.process) == ("k3s", None)
    rancher(node, 7, K3S)
    found = find_containerd(node.host)
    assert found is not None and found.manager == "k3s" and found.process is not None


@pytest.mark.parametrize(
    ("text", "managed"),
    [
        ("# k0s_managed=true\nversion = 3\n", True),
        ("\n# k0s_managed=true\nversion = 2\n", True),
        ("version = 3\n# k0s_managed=true\n", False),
        ("", False),
    ],
)
def test_k0s_manages_a_file_with_its_first_line(node: Node, text: str, managed: bool) -> None:
    assert k0s_manages(node.host, "/etc/k0s/containerd.toml")
    node.file("/etc/k0s/containerd.toml", text)
    assert k0s_manages(node.host, "/etc/k0s/containerd.toml") is managed


def test_version_of_another_program_is_not_used(node: Node) -> None:
    """k3s's containerd is a program with many names, and with others it prints k3s's version."""
    unit(node, "k3s.service", "/usr/local/bin/k3s server")
    binary = "/var/lib/rancher/k3s/data/current/bin/containerd"
    node.file(binary, "x", 0o755)
    for said, version in (
        ("k3s version v1.34.2+k3s1 (1)", ()),
        ("containerd github.com/x v2.1.5-k3s1", (2, 1, 5)),
    ):
        answer = {"code": 0, "stdout": f"{said}\n", "stderr": ""}
        node.file("/.gpunode/recording.json", json.dumps({"commands": {f"{binary} --version": answer}}))
        found = find_distribution(type(node.host)(node.root), "k3s")
        assert found is not None and found.version == version
