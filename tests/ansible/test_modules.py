"""The collection's modules, run by Ansible on this machine with recorded nodes and stand-in libraries."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.machines import recorded_host
from fixtures.scenario import Fault, mig_machine
from tests.ansible.controller import Controller
from tests.gpu_node import NodeMaker, make_node
from tests.integration.verify_support import GPUS
from tests.mig.conftest import MigMaker, mig_node

__all__ = ["make_node", "mig_node"]
pytestmark = pytest.mark.full
CONTAINERD = "/etc/containerd/config.toml"


@pytest.fixture
def program(tmp_path: Path) -> str:
    """gpunode of this checkout."""
    return executable(tmp_path / "gpunode", f'exec {shlex.quote(sys.executable)} -m gpunode "$@"')


def executable(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def task(module: str, **options: Any) -> dict[str, Any]:
    return {f"gpunode.node.{module}": options}


def test_runtime_predicts_changes_and_then_has_none(
    controller: Controller, program: str, tmp_path: Path
) -> None:
    root = recorded_host("containerd-runtime-missing", tmp_path / "node").root
    before = (root / CONTAINERD[1:]).read_text()
    node = {"executable": program, "root": str(root)}
    present, absent = task("runtime", **node), task("runtime", state="absent", **node)
    (predicted,) = controller.results(present, options=("--check", "--diff"))
    assert predicted["changed"] and predicted["restart_needed"], predicted
    assert '+        runtime_type = "io.containerd.runc.v2"' in predicted["diff"][0]["prepared"]
    assert (root / CONTAINERD[1:]).read_text() == before
    done, again, gone, gone_again = controller.results(present, present, absent, absent)
    assert done["changed"] and done["engines"][0]["journal"] and "diff" not in done
    assert not again["changed"] and not again["engines"][0]["journal"], again
    assert gone["changed"] and not gone_again["changed"]
    assert (root / CONTAINERD[1:]).read_text() == before


def test_runtime_configures_several_engines(controller: Controller, program: str, tmp_path: Path) -> None:
    root = recorded_host("docker-runtime-missing", tmp_path / "node").root
    options = {"runtime": ["docker", "containerd"], "cdi": False, "executable": program, "root": str(root)}
    (refused, done) = controller.results(
        task("runtime", also=["legacy"], **{**options, "runtime": ["crio"]}),
        task("runtime", set_as_default=True, **{**options, "runtime": ["docker"]}),
    )
    assert refused["failed"] and refused["code"] and "hint: " in refused["msg"], refused
    assert done["changed"] and [one["engine"] for one in done["engines"]] == ["docker"]


def test_doctor_info_reports_faults_and_does_not_fail(
    controller: Controller, program: str, tmp_path: Path
) -> None:
    root = recorded_host("driver-lib-mismatch", tmp_path / "node").root
    whole, one, none, unknown = controller.results(
        task("doctor_info", executable=program, root=str(root)),
        task("doctor_info", executable=program, root=str(root), only=["wsl2"], expect_gpus=0),
        task("doctor_info", executable=program, root=str(tmp_path)),
        task("doctor_info", executable=program, root=str(root), only=["no-such-check"]),
    )
    assert (whole["status"], whole["changed"], whole["first"]["id"]) == ("fail", False, "driver-lib-mismatch")
    assert whole["report"]["kind"] == "DoctorReport" and whole["counts"]["fail"] == 1
    assert [finding["id"] for finding in one["report"]["data"]["findings"]] == ["wsl2"]
    assert none["failed"] and none["code"] == "not-a-machine" and "hint: name a mounted host" in none["msg"]
    assert unknown["failed"] and "no-such-check" in unknown["msg"]


def test_mig_applies_a_layout_once(mig_node: MigMaker, controller: Controller, tmp_path: Path) -> None:
    node = mig_node(mig_machine("h100"))
    space = " ".join(map(shlex.quote, node.space))
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in node.env.items() if name != "PATH")
    path = f"PATH={shlex.quote(node.env['PATH'])}"
    program = executable(
        tmp_path / "gpunode", f'exec env {words} {path} {space} {shlex.quote(sys.executable)} -m gpunode "$@"'
    )
    wish = [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.10gb": 7}}]
    config = {"version": "v1", "mig-configs": {"seven": wish}}
    same = task("mig", config=config, executable=program)
    (predicted,) = controller.results(same, options=("--check", "--diff"))
    assert predicted["changed"] and "devices" not in predicted, predicted
    assert "MIG off, no instances" in predicted["diff"][0]["before"]
    assert "MIG on, 1g.10gb at 0, 1g.10gb at 1" in predicted["diff"][0]["after"]
    assert node.devices() == {}
    done, again, impossible, both = controller.results(
        same,
        same,
        task("mig", config=config, label="eight", executable=program),
        task("mig", config=config, config_file="/etc/mig.yaml", executable=program),
    )
    assert done["changed"] and len(done["devices"]) == 7 and node.devices() == {"1g.10gb": 7}
    assert not again["changed"], again
    assert impossible["failed"] and "eight" in impossible["msg"]
    assert both["failed"] and "mutually exclusive" in both["msg"]


def test_labels_are_written_once(controller: Controller, program: str, tmp_path: Path) -> None:
    root = recorded_host("healthy-h100", tmp_path / "node").root
    same = task("labels", output_file="/etc/features", executable=program, root=str(root))
    (predicted,) = controller.results(same, options=("--check", "--diff"))
    assert predicted["changed"] and "nvidia.com/gpu.count=8" in predicted["diff"][0]["prepared"], predicted
    assert not (root / "etc/features").exists()
    done, again = controller.results(same, same)
    assert done["changed"] and done["labels"]["nvidia.com/gpu.count"] == "8"
    assert "nvidia.com/gpu.count=8" in (root / "etc/features").read_text().splitlines()
    assert not again["changed"], again


def test_verify_computes_and_is_skipped_in_check_mode(
    controller: Controller, program: str, make_node: NodeMaker, tmp_path: Path
) -> None:
    root = recorded_host("healthy-h100", tmp_path / "node").root
    node = make_node(replace(GPUS, faults=(Fault("cuInit", code=999, times=100),)))
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in node.env.items())
    broken = executable(tmp_path / "broken", f'exec env {words} {program} "$@"')
    same = task("verify", executable=program, root=str(root))
    (skipped,) = controller.results(same, options=("--check",))
    assert skipped["skipped"] and not skipped["changed"]
    done, refused, contradiction = controller.results(
        same,
        task("verify", executable=broken),
        task("verify", executable=program, root=str(root), namespace="gpus"),
    )
    assert [one["status"] for one in done["devices"]] == ["ok"] * 8 and not done["changed"]
    assert refused["failed"] and refused["exit_code"] == 1 and refused["msg"], refused
    assert f"hint: gpunode --root {root} verify --on kubernetes" in contradiction["msg"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo oops >&2; exit 7", "printed no envelope of gpunode (exit code 7): oops"),
        ("echo '[]'", "printed no envelope of gpunode (exit code 0): []"),
        ('echo \'{"apiVersion": "other/v1"}\'', "printed no envelope of gpunode"),
    ],
)
def test_another_program_named_gpunode(
    script: str, message: str, controller: Controller, tmp_path: Path
) -> None:
    (failed,) = controller.results(task("doctor_info", executable=executable(tmp_path / "other", script)))
    assert failed["failed"] and message in failed["msg"] and failed["code"] == "no-envelope"


def test_a_missing_gpunode_is_one_clear_error(controller: Controller) -> None:
    missing, default = controller.results(
        task("runtime", executable="/opt/nothing/gpunode"),
        {**task("verify"), "environment": {"PATH": os.defpath}},
    )
    assert missing["msg"].startswith(
        "there is no program /opt/nothing/gpunode; hint: install gpunode with the role"
    )
    assert default["msg"].startswith("gpunode is not installed on this node; hint: ")
    assert missing["code"] == default["code"] == "gpunode-missing"
