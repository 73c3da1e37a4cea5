"""Notes about Docker that follow from no file: pods, the whole node's no-cgroups, the owner of a Docker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpunode.errors import PreconditionError
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker import find_docker
from gpunode.host import Host
from gpunode.host.recording import RECORDING
from gpunode.runtime import docker
from gpunode.runtime.docker_rootless import refuse_another_users
from gpunode.runtime.engine import Active, DesiredConfig, Handler
from tests.files import write

WANTED = DesiredConfig((Handler("nvidia", "nvidia-container-runtime"),))
DAEMON = Daemon("docker", None, (28,), "/etc/docker/daemon.json", "", "/run/docker.sock", None)


def process(root: Path, pid: int, *argv: str, uid: int = 0) -> None:
    write(root, f"/proc/{pid}/cmdline", "\0".join(argv) + "\0")
    write(root, f"/proc/{pid}/stat", f"{pid} (x) S " + " ".join(["0"] * 40))
    write(root, f"/proc/{pid}/status", f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")


def kubelet_on(root: Path, socket: str, version: str) -> Host:
    process(root, 5, "/usr/bin/kubelet", f"--container-runtime-endpoint=unix://{socket}")
    process(root, 6, "/usr/bin/cri-dockerd", "--network-plugin=cni")
    answer = {"code": 0, "stdout": f"cri-dockerd {version} (HEAD)\n"}
    write(root, f"/{RECORDING}", json.dumps({"commands": {"/usr/bin/cri-dockerd --version": answer}}))
    return Host(root, environ={})


@pytest.mark.parametrize(
    ("socket", "version", "expected"),
    [
        ("/run/cri-dockerd.sock", "0.4.0", "RuntimeClass with handler nvidia"),
        ("/run/cri-dockerd.sock", "0.3.16", "knows no RuntimeClass"),
        ("/var/run/dockershim.sock", "0.4.0", "knows no RuntimeClass"),
        ("/run/containerd/containerd.sock", "0.4.0", ""),
    ],
)
def test_runtime_of_pods_depends_on_the_cri_shim(
    tmp_path: Path, socket: str, version: str, expected: str
) -> None:
    host = kubelet_on(tmp_path, socket, version)
    notes = docker.notes(host, DAEMON, WANTED, None)
    assert any(expected in note for note in notes) if expected else notes == ()


def test_no_note_on_pods_if_the_runtime_is_the_default(tmp_path: Path) -> None:
    host = kubelet_on(tmp_path, "/run/cri-dockerd.sock", "0.3.16")
    default = DesiredConfig(WANTED.handlers, set_as_default=True)
    assert docker.notes(host, DAEMON, default, None) == ()
    assert docker.notes(host, DAEMON, WANTED, Active(("nvidia", "runc"), "nvidia")) == ()


def test_no_cgroups_for_the_whole_node_is_reported_with_its_line(tmp_path: Path) -> None:
    config = "/etc/nvidia-container-runtime/config.toml"
    write(tmp_path, config, "[nvidia-container-cli]\n#no-cgroups = true\nno-cgroups = true\n")
    (note,) = docker.notes(Host(tmp_path, environ={}), DAEMON, WANTED, None)
    assert note.startswith(f"{config}:3 ") and "no-cgroups=false" in note
    write(tmp_path, config, "[nvidia-container-cli]\n#no-cgroups = true\n")
    assert docker.notes(Host(tmp_path, environ={}), DAEMON, WANTED, None) == ()


def test_containers_kept_by_live_restore_are_named_only_for_a_restart() -> None:
    kept = Active(("runc",), "runc", running_containers=3, live_restore=True)
    assert "keeps 3 running containers during the restart" in docker.survivors(kept, "restart")[0]
    assert docker.survivors(kept, "reload") == ()
    assert docker.survivors(Active(("runc",), "runc", running_containers=3), "restart") == ()


def test_rootless_docker_is_left_to_its_user(tmp_path: Path) -> None:
    write(tmp_path, "/etc/passwd", "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n")
    process(tmp_path, 4100, "dockerd", uid=1000)
    host = Host(tmp_path, environ={})
    command = "sudo -Hu alice XDG_RUNTIME_DIR=/run/user/1000 gpunode configure-runtime --runtime docker"
    with pytest.raises(PreconditionError, match="only alice's rootless Docker") as only:
        refuse_another_users(host, find_docker(host), "")
    assert command in only.value.hint
    own = "/home/alice/.config/docker/daemon.json"
    with pytest.raises(PreconditionError, match=f"{own} belongs to alice") as named:
        refuse_another_users(host, find_docker(host, own), own)
    assert command in named.value.hint
    refuse_another_users(host, find_docker(host, "/etc/docker/daemon.json"), "/etc/docker/daemon.json")
    unit = "/lib/systemd/system/docker.service"
    write(tmp_path, unit, "[Service]\nExecStart=/usr/bin/dockerd -H fd://\n")
    system = find_docker(host)
    assert system is not None
    refuse_another_users(host, system, "")
    (note,) = docker.notes(host, system, WANTED, None)
    assert note.startswith("alice's rootless Docker (pid 4100)") and command in note
    process(tmp_path, 4200, "/usr/bin/dockerd", "-H", "fd://")
    refuse_another_users(host, find_docker(host), "")
