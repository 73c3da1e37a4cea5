"""`gpunode setup`: the stages in order, and where it stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.machines import recorded_host
from gpunode.commands import configure_runtime, setup, verify
from gpunode.commands.configure_runtime import RuntimeChoice
from gpunode.host import Host
from gpunode.output.result import Block, ErrorInfo, ExitCode, Result, Style, Text
from gpunode.runtime.engine import Request
from tests.cli import gpunode
from tests.silent import SilentProgress

CONTAINERD = "etc/containerd/config.toml"


def stages(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(stage["name"], stage["status"]) for stage in document["data"]["stages"]]


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.is_symlink()
    }


def test_fresh_node_is_configured_and_its_gpus_compute(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("fresh-node-with-driver", root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "containerd", "-o", "json")
    assert ran.code == 0, ran.err
    assert stages(ran.document) == [("doctor", "ok"), ("configure-runtime", "ok"), ("verify-host", "ok")]
    assert ran.document["data"]["engine"] == "containerd"
    assert "runtimes.nvidia]" in (root / CONTAINERD).read_text()
    devices = ran.document["data"]["stages"][2]["result"]["devices"]
    assert {device["status"] for device in devices} == {"ok"}
    assert len(devices) == 8


def test_setup_under_another_root_claims_no_proof(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("fresh-node-with-driver", root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "docker")
    assert ran.code == 0, ran.err
    assert "docker is configured, but not verified" in ran.out.splitlines()[-1]
    assert "$ gpunode configure-runtime --runtime docker" in ran.out.splitlines()


@pytest.mark.parametrize("machine", ["pci-no-gpu", "driver-lib-mismatch", "nouveau-loaded"])
def test_fault_that_setup_cannot_fix_stops_it_before_any_write(tmp_path: Path, machine: str) -> None:
    root = tmp_path / "node"
    recorded_host(machine, root)
    before = files(root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "containerd", "-o", "json")
    assert ran.code == 1
    assert stages(ran.document) == [("doctor", "fail")]
    assert ran.document["status"] == "fail"
    assert "gpunode doctor failed" in ran.document["errors"][0]["message"]
    assert files(root) == before


def test_missing_toolkit_is_a_step_and_no_fault_of_the_doctor_step(tmp_path: Path) -> None:
    """Packages are only installed on the node itself, so with another root setup stops at that step."""
    root = tmp_path / "node"
    recorded_host("toolkit-missing", root)
    before = files(root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "containerd", "-o", "json")
    assert ran.code == 3
    assert stages(ran.document) == [("doctor", "ok"), ("toolkit", "fail")]
    assert ran.document["data"]["stages"][1]["command"] == "gpunode toolkit install"
    assert files(root) == before
    table = gpunode("--root", str(root), "setup", "--runtime", "containerd")
    assert "(the step toolkit)" in table.out
    assert table.out.splitlines()[-1] == "Stopped at: gpunode toolkit install"


def test_dry_run_shows_the_missing_toolkit_and_the_configuration_after_it(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("fresh-node-with-driver", root)
    (root / "usr/bin/nvidia-container-runtime").unlink()
    before = files(root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "containerd", "--dry-run", "-o", "json")
    assert ran.code == 0, ran.err
    assert stages(ran.document) == [("doctor", "ok"), ("toolkit", "ok"), ("configure-runtime", "ok")]
    _, toolkit, configuration = ran.document["data"]["stages"]
    assert any("nvidia-container-toolkit" in command for command in toolkit["result"]["commands"])
    assert toolkit["result"]["dryRun"] and configuration["result"]["dryRun"]
    table = gpunode("--root", str(root), "setup", "--runtime", "containerd", "--dry-run")
    assert "$ gpunode toolkit install --dry-run" in table.out.splitlines()
    assert "+++ /etc/containerd/config.toml" in table.out
    assert files(root) == before


def test_no_toolkit_is_installed_for_an_engine_that_is_not_there(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("fresh-node-with-driver", root)
    (root / "usr/bin/nvidia-container-runtime").unlink()
    ran = gpunode("--root", str(root), "setup", "--runtime", "crio", "--dry-run", "-o", "json")
    assert ran.code == 3
    assert stages(ran.document) == [("doctor", "ok"), ("toolkit", "fail")]
    assert ran.document["errors"][0]["message"] == "crio is not installed on this node"


def test_dry_run_keeps_a_refusal_that_the_toolkit_step_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub of configure-runtime: the real refusal needs a Docker with running containers."""
    root = tmp_path / "node"
    host = recorded_host("fresh-node-with-driver", root)
    (root / "usr/bin/nvidia-container-runtime").unlink()
    stops = ErrorInfo("containers-running", "restarting docker stops its 2 running containers", "--yes")
    refused = (ErrorInfo("toolkit-missing", "nvidia-container-runtime is not there", ""), stops)
    result = Result("RuntimeConfiguration", None, "fail", ExitCode.PRECONDITION, errors=refused)
    monkeypatch.setattr(configure_runtime, "run", lambda *_: result)
    request = Request(runtimes=("docker",), dry_run=True)
    ran = setup.set_up_containers(host, request, RuntimeChoice(), SilentProgress())
    assert (ran.exit_code, ran.errors) == (ExitCode.PRECONDITION, (stops,))


def test_installed_toolkit_is_no_stage(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("fresh-node-with-driver", root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "containerd", "--dry-run")
    assert ran.code == 0, ran.err
    assert "gpunode toolkit install" not in ran.out


def test_output_says_where_setup_stopped_and_what_to_do_first(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("driver-lib-mismatch", root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "containerd")
    assert "Fix first, as root: driver-lib-mismatch\n  1. kubectl drain " in ran.out
    assert "\n  2. reboot\n" in ran.out
    assert ran.out.splitlines()[-1] == "Stopped at: gpunode doctor"
    assert "error: gpunode doctor failed" in ran.err


@pytest.mark.full
def test_stopped_kubelet_does_not_stop_setup_for_containers(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("kubelet-not-running", root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "containerd", "-o", "json")
    assert ran.code == 0, ran.err
    table = gpunode("--root", str(root), "setup", "--runtime", "containerd")
    assert "kubelet-not-running" in table.out
    assert "not needed for containers" in table.out


def test_later_stage_keeps_the_reports_of_earlier_ones(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("fresh-node-with-driver", root)
    (root / "etc/docker").mkdir(parents=True, exist_ok=True)
    (root / "etc/docker/daemon.json").mkdir()
    ran = gpunode("--root", str(root), "setup", "--runtime", "docker", "-o", "json")
    assert ran.code == 1
    assert stages(ran.document)[0] == ("doctor", "ok")
    assert stages(ran.document)[-1] == ("configure-runtime", "fail")
    assert "directory" in ran.document["errors"][0]["message"]


@pytest.mark.full
def test_fault_of_another_engine_does_not_stop_setup(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("containerd-config-not-toml", root)
    docker = gpunode("--root", str(root), "setup", "--runtime", "docker")
    assert docker.code == 0, docker.err
    assert "(not needed for docker)" in docker.out
    assert gpunode("--root", str(root), "setup", "--runtime", "containerd").code == 1


@pytest.mark.parametrize("machine", ["crio-conmon-missing", "podman-cdi"])
def test_fault_of_an_engine_without_docker_does_not_stop_its_setup(tmp_path: Path, machine: str) -> None:
    """3: the doctor's error is about the other engine, and Docker isn't on that node."""
    root = tmp_path / "node"
    recorded_host(machine, root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "docker")
    assert (ran.code, "(not needed for docker)" in ran.out) == (3, True), ran.out
    assert "docker is not installed" in ran.err


def test_daemon_with_unread_changes_is_reloaded(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("docker-not-restarted", root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "docker")
    assert ran.code == 0, ran.err
    assert "docker-not-restarted" in ran.out.splitlines()[1]
    assert "(gpunode configure-runtime)" in ran.out.splitlines()[1]


def test_node_without_the_toolkit_is_set_up_with_cdi(tmp_path: Path) -> None:
    root = tmp_path / "node"
    recorded_host("toolkit-missing", root)
    ran = gpunode("--root", str(root), "setup", "--runtime", "containerd", "--cdi")
    assert ran.code == 0, ran.err
    assert "toolkit-missing" in ran.out.splitlines()[1]
    assert "(not needed with --cdi)" in ran.out.splitlines()[1]
    assert "$ gpunode configure-runtime --runtime containerd --cdi" in ran.out.splitlines()
    assert "enable_cdi = true" in (root / CONTAINERD).read_text()
    assert 'kind: "nvidia.com/gpu"' in (Host(root).read_text("/var/run/cdi/nvidia.yaml") or "")


@pytest.mark.full
def test_stale_specification_is_rewritten_only_with_cdi(tmp_path: Path) -> None:
    root = tmp_path / "node"
    host = recorded_host("cdi-spec-stale", root)
    host.make_dirs("/var/run/cdi")
    (root / "etc/cdi/nvidia.yaml").rename(host.path("/var/run/cdi/nvidia.yaml"))
    plain = gpunode("--root", str(root), "setup", "--runtime", "containerd")
    assert (plain.code, "cdi-spec-stale" in plain.out) == (1, True)
    ran = gpunode("--root", str(root), "setup", "--runtime", "containerd", "--cdi", "-o", "json")
    assert stages(ran.document)[0] == ("doctor", "ok"), ran.out


@pytest.mark.parametrize(("engine", "code"), [("podman", 3), ("crio", 3), ("k3s", 1), ("auto", 1)])
def test_broken_engine_file_stops_setup_only_for_that_engine(tmp_path: Path, engine: str, code: int) -> None:
    """3: the doctor passed, and the requested engine isn't on that node."""
    root = tmp_path / "node"
    recorded_host("containerd-config-not-toml", root)
    assert gpunode("--root", str(root), "setup", "--runtime", engine).code == code


def interrupted(*_: object, **__: object) -> Result:
    raise KeyboardInterrupt


def test_interrupted_setup_names_its_changes_and_the_undo_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = recorded_host("fresh-node-with-driver", tmp_path / "node")
    monkeypatch.setattr(verify, "run", interrupted)
    printed: list[Block] = []
    result = setup.set_up_containers(
        host,
        Request(("containerd",), configures=True),
        RuntimeChoice(),
        SilentProgress(),
        lambda *blocks: printed.extend(blocks),
    )
    assert result.exit_code is ExitCode.INTERRUPTED
    assert [stage.name for stage in result.data.stages] == ["doctor", "configure-runtime"]
    journal = result.data.stages[1].result.journal
    (error,) = result.errors
    assert error.message == "interrupted during gpunode verify; changed: /etc/containerd/config.toml"
    assert error.hint == f"undo it with: gpunode --root {host.root} rollback {journal}"
    assert Text("$ gpunode verify", Style.COMMAND) in printed


def test_interrupt_before_any_change_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = recorded_host("fresh-node-with-driver", tmp_path / "node")
    monkeypatch.setattr(configure_runtime, "run", interrupted)
    request = Request(("containerd",), configures=True)
    result = setup.set_up_containers(host, request, RuntimeChoice(), SilentProgress())
    (error,) = result.errors
    assert error.message == (
        "interrupted during gpunode configure-runtime --runtime containerd; nothing was left changed"
    )
