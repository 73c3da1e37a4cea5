"""Docker as a snap, flags against the file, rules of 20.10: from files and processes of a recorded tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpunode.facts.docker import (
    find_docker,
    flag_conflicts,
    flag_default,
    flag_features,
    flag_place,
    flag_runtimes,
    listens_there,
    refused_by_20,
)
from gpunode.facts.users import account, places
from gpunode.host import Host
from tests.files import write

SNAP_UNIT = "[Service]\nExecStart=/usr/bin/snap run docker.dockerd\n"


def process(root: Path, pid: int, *argv: str) -> None:
    write(root, f"/proc/{pid}/cmdline", "\0".join(argv) + "\0")
    write(root, f"/proc/{pid}/stat", f"{pid} (x) S " + " ".join(["0"] * 40))


@pytest.fixture
def snap(tmp_path: Path) -> Path:
    write(tmp_path, "/etc/systemd/system/snap.docker.dockerd.service", SNAP_UNIT)
    write(tmp_path, "/var/snap/docker/2963/config/daemon.json", '{"log-level": "error"}')
    (tmp_path / "var/snap/docker/current").symlink_to("2963")
    write(tmp_path, "/snap/docker/2963/meta/snap.yaml", "name: docker\nversion: '29.3.1'\n")
    (tmp_path / "snap/docker/current").symlink_to("2963")
    return tmp_path


def run_snap(root: Path) -> None:
    argv = ["dockerd", "--group", "docker", "--config-file=/var/snap/docker/2963/config/daemon.json"]
    process(root, 40, *argv)


def test_snap_paths_survive_a_snap_refresh(snap: Path) -> None:
    run_snap(snap)
    found = find_docker(Host(snap))
    assert found is not None and found.process is not None
    assert found.config_path == "/var/snap/docker/current/config/daemon.json"
    assert (found.manager, found.unit, found.version) == ("snap", "snap.docker.dockerd.service", (29, 3, 1))
    assert found.binary is None  # outside its confinement it can't be run


def test_running_snap_is_chosen_if_the_package_docker_is_disabled(snap: Path) -> None:
    write(snap, "/usr/lib/systemd/system/docker.service", "[Service]\nExecStart=/usr/bin/dockerd -H fd://\n")
    write(snap, "/usr/bin/dockerd", "x", 0o755)
    stopped = find_docker(Host(snap))
    assert stopped is not None and stopped.manager == ""
    run_snap(snap)
    running = find_docker(Host(snap))
    assert running is not None and running.manager == "snap"
    named = find_docker(Host(snap), "/etc/docker/daemon.json")
    assert named is not None and (named.manager, named.unit) == ("", "docker.service")


def test_running_system_docker_is_chosen_before_the_snap(snap: Path) -> None:
    run_snap(snap)
    process(snap, 41, "/usr/bin/dockerd", "-H", "fd://")
    found = find_docker(Host(snap))
    assert found is not None and found.process is not None
    assert (found.process.pid, found.manager) == (41, "")
    named = find_docker(Host(snap), "/var/snap/docker/current/config/daemon.json")
    assert named is not None and named.manager == "snap"


@pytest.mark.parametrize(
    ("argv", "features"),
    [
        ("dockerd --feature cdi", {"cdi": True}),
        ("dockerd --feature=cdi=false --feature other=true", {"cdi": False, "other": True}),
        ("dockerd --debug", {}),
    ],
)
def test_features_in_flags(argv: str, features: dict[str, bool]) -> None:
    assert flag_features(tuple(argv.split())) == features


def test_runtimes_and_default_in_flags() -> None:
    argv = ("dockerd", "--add-runtime", "a=/x", "--add-runtime=b=/y", "--default-runtime", "a")
    assert (flag_runtimes(argv), flag_default(argv)) == (("a", "b"), "a")


def test_object_members_conflict_with_flags_unless_they_are_one_setting() -> None:
    argv = ("dockerd", "--http-proxy", "http://p", "--feature", "cdi")
    assert flag_conflicts(argv, {"proxies": {"http-proxy": "x"}}) == ("http-proxy",)
    assert flag_conflicts(argv, {"features": {"http-proxy": True}}) == ("features",)


def test_source_of_a_flag_is_named_down_to_the_environment_file(tmp_path: Path) -> None:
    unit = "[Service]\nEnvironmentFile=-/etc/sysconfig/docker\nExecStart=/usr/bin/dockerd $OPTIONS\n"
    write(tmp_path, "/usr/lib/systemd/system/docker.service", unit)
    write(
        tmp_path,
        "/etc/sysconfig/docker",
        "# --default-runtime in OPTIONS\nOPTIONS='--default-runtime=crun'\n",
    )
    host = Host(tmp_path)
    assert flag_place(host, "docker.service", "default-runtime") == "/etc/sysconfig/docker:2"
    write(
        tmp_path,
        "/etc/systemd/system/docker.service.d/o.conf",
        "[Service]\nExecStart=\nExecStart=/usr/bin/dockerd -H fd:// --label a=b\n",
    )
    place = "/etc/systemd/system/docker.service.d/o.conf:3"
    assert flag_place(host, "docker.service", "hosts") == place
    assert flag_place(host, "docker.service", "labels") == place
    assert flag_place(host, "docker.service", "features") == ""


@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        ({"debug": True, "hosts": ["fd://"], "tlsopts": {"tlscert": "/x"}, "default-shm-size": 64}, ()),
        ({"features": {"buildkit": True}, "log-opts": {"max-size": "1m"}, "mtu": None}, ()),
        ({"proxies": {"http-proxy": "x"}}, ("proxies", "http-proxy")),
        ({"debug": "yes"}, ("debug",)),
        ({"mtu": True}, ("mtu",)),
        ({"features": {"buildkit": "yes"}}, ("features", "buildkit")),
        ({"log-opts": {"max-file": 3}}, ("log-opts", "max-file")),
        ({"runtimes": {"nvidia": "x"}}, ("runtimes", "nvidia")),
        ({"runtimes": {"nvidia": {"path": 5}}}, ("runtimes", "nvidia")),
        ({"labels": [5]}, ("labels",)),
        ({"default-address-pools": [{"base": "10.0.0.0/8", "size": 24}], "labels": ["a=b"]}, ()),
        ({"default-address-pools": ["10.0.0.0/8"]}, ("default-address-pools",)),
        ({"debug": {}}, ("debug",)),
        ({"tlsopts": {"mtu": "x"}, "restart": "x", "allow-nondistributable-artifacts": "x"}, ()),
        ({"cdi-spec-dirs": []}, ("cdi-spec-dirs",)),
    ],
)
def test_keys_that_dockerd_20_refuses(tree: dict[str, object], keys: tuple[str, ...]) -> None:
    assert refused_by_20(tree)[0] == keys


def test_user_paths_follow_the_environment_of_the_running_dockerd(tmp_path: Path) -> None:
    uid = os.geteuid() + 77
    write(tmp_path, "/etc/passwd", f"root:x:0:0::/root:/bin/sh\nalice:x:{uid}:1::/home/alice:/bin/sh\n")
    host = Host(tmp_path, environ={"HOME": "/elsewhere", "XDG_CONFIG_HOME": "/mine"})
    assert account(host, uid).name == "alice"
    assert places(host, None, uid).daemon_json == "/home/alice/.config/docker/daemon.json"
    assert places(host, None, uid).runtime_directory == f"/run/user/{uid}"
    process(tmp_path, 9, "dockerd")
    write(tmp_path, "/proc/9/environ", "XDG_CONFIG_HOME=/c/\0XDG_RUNTIME_DIR=/r\0HOME=/home/alice\0")
    from gpunode.facts.processes import running

    found = places(host, running(host)[0], uid)
    assert (found.toolkit_config, found.runtime_directory) == (
        "/c/nvidia-container-runtime/config.toml",
        "/r",
    )


@pytest.mark.parametrize(
    ("arguments", "content", "expected"),
    [
        ("", "{}", True),
        ("-H fd://", "{}", True),
        ("-H tcp://0.0.0.0:2376 -H unix:///run/d.sock", "{}", True),
        ("-H tcp://0.0.0.0:2376", "{}", False),
        ("", '{"hosts": ["tcp://0.0.0.0:2376"]}', False),
        ("", '{"hosts": ["tcp://0.0.0.0:2376", "fd://"]}', True),
    ],
)
def test_dockerd_on_tcp_only_is_not_queried_at_another_socket(
    tmp_path: Path, arguments: str, content: str, expected: bool
) -> None:
    write(tmp_path, "/etc/docker/daemon.json", content)
    argv = ("dockerd", *arguments.split())
    assert listens_there(Host(tmp_path), argv, "/etc/docker/daemon.json") is expected
