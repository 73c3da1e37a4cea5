"""`gpunode status runtime` with real daemons: their state before and after they read their files."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from fixtures.crio import start_crio
from fixtures.distributions import RUNTIME, DistributionNode
from fixtures.engines import start_containerd, start_dockerd
from tests.cli import Ran, checked, command, gpunode
from tests.integration.configuring import Cli, configuring
from tests.integration.conftest import path_of, require
from tests.integration.podman_node import PodmanNode
from tests.integration.systemd_stand_in import require_namespace
from tests.waiting import eventually

pytestmark = pytest.mark.full

P2 = "io.containerd.grpc.v1.cri"
P3 = "io.containerd.cri.v1.runtime"


def run(cli: Cli, *more: str) -> Ran:
    engine = cli.engine
    argv = ("--runtime", engine.kind, "--config", str(engine.config), "--socket", engine.socket)
    restart = ("--restart-command", engine.restart_command)
    return gpunode("status", "runtime", *argv, *restart, *more, env=dict(cli.environ))


def status(cli: Cli) -> dict[str, Any]:
    ran = run(cli, "-o", "json")
    assert ran.code == 0, ran.err
    (engine,) = ran.document["data"]["engines"]
    assert isinstance(engine, dict)
    return engine


def kinds(cli: Cli) -> list[tuple[str, str]]:
    return [(one["kind"], one["subject"]) for one in status(cli)["drift"]]


def handlers(cli: Cli) -> dict[str, bool]:
    return {one["name"]: one["active"] for one in status(cli)["handlers"]}


def with_runtime(program: Path) -> str:
    return (
        f'\n[plugins."{P2}".containerd.runtimes.gpu]\nruntime_type = "io.containerd.runc.v2"\n'
        f'[plugins."{P2}".containerd.runtimes.gpu.options]\nBinaryName = "{program}"\n'
    )


@pytest.mark.containerd
def test_containerd_has_drift_until_it_is_restarted(tmp_path: Path) -> None:
    with configuring(start_containerd(), tmp_path) as cli:
        first = status(cli)
        assert (first["running"], first["activeDefault"], first["drift"]) == (True, "runc", [])
        before = cli.engine.config.read_text()
        cli.engine.config.write_text(before + with_runtime(cli.program))
        assert kinds(cli) == [("not-active", "gpu")]
        ran = run(cli)
        assert f"  Fix: {cli.engine.restart_command}\n" in ran.out
        cli.engine.restart()
        assert (kinds(cli), handlers(cli)) == ([], {"runc": True, "gpu": True})
        cli.engine.config.write_text(before)
        assert kinds(cli) == [("not-in-file", "gpu")]
        cli.engine.restart()
        assert kinds(cli) == []


@pytest.mark.containerd
def test_files_of_configure_runtime_are_listed_as_gpunodes_without_drift(tmp_path: Path) -> None:
    with configuring(start_containerd(), tmp_path) as cli:
        cli.data("configure-runtime")
        found = status(cli)
        assert [(one["writer"], one["edited"]) for one in found["files"]] == [("gpunode", False)]
        assert found["drift"] == [] and handlers(cli) == {"runc": True, "nvidia": True}


@pytest.mark.docker
def test_docker_has_drift_until_it_has_read_its_file(tmp_path: Path) -> None:
    with configuring(start_dockerd(), tmp_path) as cli:
        assert kinds(cli) == []
        runtimes = {"gpu": {"path": str(cli.program)}}
        cli.engine.config.write_text(json.dumps({"runtimes": runtimes}))
        assert kinds(cli) == [("not-active", "gpu")]
        cli.engine.restart()
        assert kinds(cli) == [] and handlers(cli)["gpu"] is True
        runtimes["gpu"]["path"] = "/opt/other"
        cli.engine.config.write_text(json.dumps({"runtimes": runtimes, "default-runtime": "gpu"}))
        assert kinds(cli) == [("other-path", "gpu"), ("other-default", "default runtime")]


MAIN = f"""\
version = 3
imports = ["{{directory}}/conf.d/*.toml"]
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "gpunode.test/pause:1"
[plugins."{P3}"]
restrict_oom_score_adj = true
enable_cdi = true
max_container_log_line_size = 1000
[plugins."{P3}".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


@pytest.mark.containerd
def test_generated_copy_shadows_the_main_file_of_a_real_containerd_2(tmp_path: Path) -> None:
    path = path_of("forky")
    engine = start_containerd(MAIN, binary=shutil.which("containerd", path=path) or "", path=path)
    with configuring(engine, tmp_path) as cli:
        assert (status(cli)["cdi"], kinds(cli)) == (True, [])
        drop_in = engine.directory / "conf.d/99-nvidia.toml"
        drop_in.parent.mkdir()
        drop_in.write_text(
            f'version = 3\n\n[plugins]\n\n  [plugins."{P3}"]\n    enable_cdi = true\n'
            "    max_container_log_line_size = 1000\n    restrict_oom_score_adj = true\n\n"
            f'    [plugins."{P3}".containerd]\n\n      [plugins."{P3}".containerd.runtimes]\n\n'
            f'        [plugins."{P3}".containerd.runtimes.nvidia]\n'
            '          runtime_type = "io.containerd.runc.v2"\n\n'
            f'          [plugins."{P3}".containerd.runtimes.nvidia.options]\n'
            '            BinaryName = "/usr/bin/nvidia-container-runtime"\n'
        )
        engine.restart()
        text = engine.config.read_text()
        engine.config.write_text(
            text.replace("size = 1000", "size = 2000").replace("cdi = true", "cdi = false")
        )
        engine.restart()
        found = status(cli)
        assert [one["writer"] for one in found["files"]] == ["administrator", "nvidia-ctk"]
        # the drop-in requests CDI; the line size is a value that the main file has changed
        assert kinds(cli) == [("shadowed", "max_container_log_line_size")]
        assert found["cdi"] is True


@pytest.mark.docker
def test_cdi_in_a_real_docker_28_needs_a_restart(tmp_path: Path) -> None:
    binary = shutil.which("dockerd", path=path_of("forky")) or ""
    engine = start_dockerd({"features": {"cdi": True}}, binary=binary)
    with configuring(engine, tmp_path) as cli:
        assert (status(cli)["cdi"], kinds(cli)) == (True, [])
        engine.config.write_text(json.dumps({"features": {"cdi": False}}))
        assert kinds(cli) == [("other-cdi", "CDI")]
        engine.restart()
        assert (status(cli)["cdi"], kinds(cli)) == (False, [])


def test_crio_has_drift_until_it_is_restarted(tmp_path: Path) -> None:
    require("gcc")
    with start_crio("packaged") as engine:
        cli = Cli(engine, tmp_path / "state", engine.directory / "programs/usr/bin/nvidia-container-runtime")
        found = status(cli)
        assert (found["running"], found["cdi"], found["drift"]) == (True, True, [])
        drop_in = engine.directory / "etc/crio.conf.d/50-gpu.toml"
        drop_in.write_text(f'[crio.runtime.runtimes.gpu]\nruntime_path = "{cli.program}"\n')
        assert ("not-active", "gpu") in kinds(cli)
        assert {one["path"]: one["writer"] for one in status(cli)["files"]}[str(drop_in)] == "administrator"
        engine.restart()
        assert kinds(cli) == [] and handlers(cli)["gpu"] is True


@pytest.mark.containerd
def test_containerd_of_k3s_is_the_kubelets_and_its_file_belongs_to_k3s() -> None:
    require("unshare", "nsenter", "runc")
    require_namespace()
    node = DistributionNode("k3s", shutil.which("containerd", path=path_of("forky")) or "", 3).made()
    try:
        node.program(RUNTIME)
        node.start()
        done = node.gpunode("status", "runtime", "-o", "json")
    finally:
        node.end()
    assert done.returncode == 0, done.stderr
    engine = checked(done.stdout)["data"]["engines"][0]
    assert (engine["manager"], engine["kubelet"], engine["drift"]) == ("k3s", True, [])
    assert [file["writer"] for file in engine["files"]] == ["k3s"]
    assert {one["name"]: one["path"] for one in engine["handlers"] if one["active"]}["nvidia"] == RUNTIME


@pytest.mark.podman
def test_podman_has_no_daemon_and_lists_its_effective_files(tmp_path: Path) -> None:
    node = PodmanNode(tmp_path).prepare()
    (node.etc / "containers.conf").write_text(f'[engine.runtimes]\nnvidia = ["/nowhere", "{node.program}"]\n')
    engine: dict[str, Any] = {}

    def answered() -> bool:
        """A busy machine may not run podman within the limits for its version and its state."""
        done = node.run(*command("status", "runtime", "--runtime", "podman", "-o", "json"))
        assert done.returncode == 0, done.stderr
        (reported,) = checked(done.stdout)["data"]["engines"]
        engine.update(reported)
        return bool(engine["version"]) and not engine["silence"]

    assert eventually(answered), engine["silence"]
    assert (engine["running"], engine["cdi"], engine["drift"]) == (None, True, [])
    assert {one["name"]: (one["path"], one["active"]) for one in engine["handlers"]}["nvidia"] == (
        str(node.program),
        True,
    )
    writers = {one["path"]: one["writer"] for one in engine["files"]}
    assert writers["/etc/containers/containers.conf"] == "administrator"
    assert writers["/usr/share/containers/containers.conf"] == "package"


@pytest.mark.containerd
def test_unresponsive_daemon_times_out_after_three_seconds(tmp_path: Path) -> None:
    """A socket that accepts and sends nothing replaces a daemon that hangs."""
    path = tmp_path / "s.sock"
    config = tmp_path / "config.toml"
    config.write_text("version = 2\n")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        stop = threading.Event()
        held: list[socket.socket] = []
        thread = threading.Thread(target=_hold, args=(listener, stop, held))
        thread.start()
        argv = ("--runtime", "containerd", "--config", str(config), "--socket", str(path))
        ran = gpunode("status", "runtime", *argv, "-o", "json")
        stop.set()
        thread.join()
    (engine,) = ran.document["data"]["engines"]
    assert ran.code == 0 and "no answer within 3 seconds" in engine["silence"]
    assert len(held) <= 3  # for its version, its status, and once more by gRPC's library


def _hold(listener: socket.socket, stop: threading.Event, held: list[socket.socket]) -> None:
    """Accept all connections and keep them open."""
    listener.settimeout(0.1)
    while not stop.is_set():
        try:
            held.append(listener.accept()[0])
        except TimeoutError:
            continue
    for one in held:
        one.close()
