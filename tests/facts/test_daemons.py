"""Which daemon, which file, which socket: from processes, units and files of a recorded tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.errors import ConfigError
from gpunode.facts.containerd import find_containerd, load_config
from gpunode.facts.daemons import parse_version
from gpunode.facts.docker import find_docker, flag_conflicts, parse_daemon_json
from gpunode.facts.systemd import read_unit
from gpunode.host import Host
from tests.files import write

DOCKER_UNIT = """[Unit]
Description=x
[Service]
EnvironmentFile=-/etc/default/docker
ExecStart=/usr/sbin/dockerd -H fd:// \\
  $DOCKER_OPTS
"""


class Node:
    """A recorded tree under construction."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = Host(root)

    def file(self, path: str, text: str, mode: int = 0o644) -> None:
        write(self.root, path, text, mode)

    def process(self, pid: int, *argv: str, cgroup: str = "") -> None:
        self.file(f"/proc/{pid}/cmdline", "\0".join(argv) + "\0")
        self.file(f"/proc/{pid}/stat", f"{pid} (x) S " + " ".join(["0"] * 40))
        if cgroup:
            self.file(f"/proc/{pid}/cgroup", f"0::{cgroup}\n")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3", (1, 6, 20)),
        ("containerd github.com/containerd/containerd/v2 2.1.9+unknown ", (2, 1, 9)),
        ("containerd github.com/containerd/containerd/v2 v2.1.0 061792f0", (2, 1, 0)),
        ("Docker version 20.10.24+dfsg1, build 5d6db84", (20, 10, 24)),
        ("Docker version 29.0, build 1", (29, 0)),
        ("nothing", ()),
    ],
)
def test_version_formats_of_distributions_are_parsed(output: str, version: tuple[int, ...]) -> None:
    assert parse_version(output) == version


def test_unit_is_expanded_with_drop_ins_and_environment_file(node: Node) -> None:
    node.file("/usr/lib/systemd/system/docker.service", DOCKER_UNIT)
    node.file("/etc/default/docker", '# x\nDOCKER_OPTS="--debug --label a=b"\n')
    unit = read_unit(node.host, "docker.service")
    assert unit is not None
    assert unit.argv == ("/usr/sbin/dockerd", "-H", "fd://", "--debug", "--label", "a=b")
    node.file(
        "/etc/systemd/system/docker.service.d/over.conf",
        "[Service]\nEnvironment=A=1\nExecStart=\nExecStart=-/usr/bin/dockerd --x=${A}${B}y $NONE\n",
    )
    unit = read_unit(node.host, "docker.service")
    assert unit is not None and unit.argv == ("/usr/bin/dockerd", "--x=1y")


def test_drop_in_of_the_same_name_in_etc_hides_the_packages(node: Node) -> None:
    node.file("/lib/systemd/system/docker.service", DOCKER_UNIT)
    node.file("/lib/systemd/system/docker.service.d/a.conf", "[Service]\nExecStart=/lib/one\n")
    node.file("/etc/systemd/system/docker.service.d/a.conf", "[Service]\nExecStart=/etc/two\n")
    unit = read_unit(node.host, "docker.service")
    assert unit is not None and unit.argv == ("/etc/two",)


def test_masked_and_missing_units_are_not_read(node: Node) -> None:
    assert read_unit(node.host, "docker.service") is None
    (node.root / "etc/systemd/system").mkdir(parents=True)
    (node.root / "etc/systemd/system/docker.service").symlink_to("/dev/null")
    assert read_unit(node.host, "docker.service") is None


def test_running_process_takes_precedence_over_its_unit(node: Node) -> None:
    node.file("/usr/lib/systemd/system/docker.service", DOCKER_UNIT)
    argv = ("/usr/sbin/dockerd", "--config-file=/srv/d.json", "-H", "unix:///srv/d.sock")
    node.process(7, *argv, cgroup="/system.slice/docker.service")
    found = find_docker(node.host)
    assert found is not None and found.process is not None
    assert (found.config_path, found.socket, found.unit) == ("/srv/d.json", "/srv/d.sock", "docker.service")


def test_private_daemon_is_not_the_system_daemon(node: Node) -> None:
    node.file("/usr/lib/systemd/system/docker.service", DOCKER_UNIT)
    node.process(7, "dockerd", "--config-file", "/tmp/d.json", cgroup="/system.slice/ci-runner.service")
    found = find_docker(node.host)
    assert found is not None
    assert (found.process, found.config_path, found.unit) == (
        None,
        "/etc/docker/daemon.json",
        "docker.service",
    )
    named = find_docker(node.host, "/tmp/d.json")
    assert named is not None and named.process is not None and named.unit is None


def test_socket_is_read_from_hosts_in_the_file(node: Node) -> None:
    node.file("/usr/sbin/dockerd", "x", 0o755)
    node.file("/etc/docker/daemon.json", '{"hosts": ["tcp://0.0.0.0:1", "unix:///x.sock"]}')
    found = find_docker(node.host)
    assert found is not None and found.socket == "/x.sock"


def test_node_without_engines_has_none(node: Node) -> None:
    assert find_docker(node.host) is None
    assert find_containerd(node.host) is None


def test_containerd_of_dockerd_is_ignored_and_that_of_k3s_is_named(node: Node) -> None:
    node.file("/usr/bin/containerd", "x", 0o755)
    node.process(5, "containerd", "--config", "/var/run/docker/containerd/containerd.toml")
    found = find_containerd(node.host)
    assert found is not None and found.process is None
    node.process(
        6, "containerd", "-c", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "-a", "/k.sock"
    )
    found = find_containerd(node.host)
    assert found is not None and found.socket == "/k.sock"
    assert "managed by k3s" in found.config_source


def test_containerd_socket_is_read_from_its_file(node: Node) -> None:
    node.file("/usr/bin/containerd", "x", 0o755)
    node.file("/etc/containerd/config.toml", 'version = 2\n[grpc]\naddress = "/srv/c.sock"\n')
    found = find_containerd(node.host)
    assert found is not None and found.socket == "/srv/c.sock"


@pytest.mark.parametrize(
    ("argv", "config", "conflicts"),
    [
        ("dockerd -H fd://", {"hosts": []}, ("hosts",)),
        ("dockerd --host=fd:// -D", {"hosts": [], "debug": True}, ("hosts", "debug")),
        ("dockerd --add-runtime x=y", {"runtimes": {}}, ()),
        ("dockerd --default-runtime x", {"default-runtime": "x"}, ("default-runtime",)),
        ("dockerd --log-opt a=b --config-file /x", {"log-opts": {}, "log-driver": "x"}, ("log-opts",)),
    ],
)
def test_flags_conflict_with_the_file(
    argv: str, config: dict[str, object], conflicts: tuple[str, ...]
) -> None:
    assert flag_conflicts(tuple(argv.split()), config) == conflicts


def test_json_error_has_file_line_and_column() -> None:
    with pytest.raises(ConfigError, match=r"^/d\.json:2:5: "):
        parse_daemon_json('{\n"a" 1}', "/d.json")


def test_imports_replace_plugin_tables_before_2_and_merge_since(node: Node) -> None:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    runtime = f"[{cri}.containerd.runtimes"
    node.file(
        "/etc/containerd/config.toml",
        f'version = 2\nimports = ["conf.d/*.toml"]\ndisabled_plugins = ["a"]\n{runtime}.runc]\nx = 1\n',
    )
    node.file(
        "/etc/containerd/conf.d/n.toml",
        f'version = 2\ndisabled_plugins = ["cri"]\n{runtime}.nvidia]\ny = 2\n',
    )
    old = load_config(node.host, "/etc/containerd/config.toml", (1, 7, 24))
    assert set(old.runtimes) == {"nvidia"} and old.disabled == ("cri",)
    new = load_config(node.host, "/etc/containerd/config.toml", (2, 1))
    assert set(new.runtimes) == {"runc", "nvidia"}
    assert new.files == ("/etc/containerd/config.toml", "/etc/containerd/conf.d/n.toml")
    assert (new.version, new.default_runtime) == (2, "runc")


@pytest.mark.parametrize(
    ("text", "version", "plugin"), [("", 1, "cri"), ("version = 4", 4, "io.containerd.cri.v1.runtime")]
)
def test_version_determines_the_plugin(node: Node, text: str, version: int, plugin: str) -> None:
    node.file("/c.toml", text)
    config = load_config(node.host, "/c.toml")
    assert (config.version, config.plugin) == (version, plugin)


@pytest.mark.parametrize(
    "text", ["plugins = 3", 'imports = "x"', "disabled_plugins = 1", "[plugins]\n'cri' = []"]
)
def test_wrong_types_do_not_break_reading(node: Node, text: str) -> None:
    node.file("/c.toml", text)
    config = load_config(node.host, "/c.toml")
    assert (config.runtimes, config.disabled, config.default_runtime) == ({}, (), "runc")


def test_toml_error_has_file_line_and_column(node: Node) -> None:
    node.file("/c.toml", "version = 2\nx =\n")
    with pytest.raises(ConfigError, match=r"^/c\.toml:2:4: "):
        load_config(node.host, "/c.toml")
