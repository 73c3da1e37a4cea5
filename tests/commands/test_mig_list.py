"""`gpunode mig list` and `mig export` as a user runs them, on the stub of NVML."""

from __future__ import annotations

import json
import os

import pytest
import yaml

from fixtures.scenario import (
    Fault,
    StubGpuInstance,
    gpu_uuid,
    machine,
    mig_machine,
    mig_uuid,
    mixed_layout,
    with_mig,
)
from fixtures.stubs import have_compiler, stub_node
from gpunode.host import Host
from gpunode.mig.session import MigSession
from tests.cli import gpunode

pytestmark = pytest.mark.skipif(not have_compiler() and not os.environ.get("CI"), reason="gcc is missing")


@pytest.fixture
def node(tmp_path):
    """A node for `gpunode`: the scenario may be rewritten."""
    return stub_node(tmp_path, with_mig(mig_machine("h100", "h100", "a30"), 0, mixed_layout(0)))


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_list_draws_the_slots_and_names_the_devices(node):
    ran = gpunode("mig", "list", env=node.env)
    assert ran.code == 0, ran.err
    shown = lines(ran.out)
    assert shown[1] == f"GPU 0  NVIDIA H100 80GB HBM3  MIG on  {gpu_uuid(0)}"
    assert shown[2].split() == [str(slot) for slot in range(8)]
    assert shown[3] == "  [2g          ][1g+me][1g   ][3g                        ]"
    rows = [line.split() for line in shown[4:9]]
    assert rows == [
        ["GI", "CI", "PROFILE", "SLOTS", "MEMORY", "UUID"],
        ["3", "0", "2g.20gb", "0-1", "19.6", "GiB", mig_uuid(0, 1)],
        ["9", "0", "1g.10gb+me", "2", "9.8", "GiB", mig_uuid(0, 2)],
        ["10", "0", "1g.10gb", "3", "9.8", "GiB", mig_uuid(0, 3)],
        ["1", "0", "3g.40gb", "4-7", "39.5", "GiB", mig_uuid(0, 0)],
    ]
    assert shown[9:] == [
        f"GPU 1  NVIDIA H100 80GB HBM3  MIG off  {gpu_uuid(1)}",
        f"GPU 2  NVIDIA A30  MIG off  {gpu_uuid(2)}",
    ]


def test_unusable_instance_is_listed_in_its_four_slots(node):
    empty = mig_machine("a30", enabled=True).with_gpu(0, gpu_instances=(StubGpuInstance(3, 0, 1),))
    node.write(empty)
    shown = lines(gpunode("mig", "list", env=node.env).out)
    assert shown[2].split() == ["0", "1", "2", "3"]
    assert shown[3] == "     .    [1g.6gb]   .       ."
    assert shown[5].endswith("no compute instance: unusable")


def test_instance_created_by_another_process_is_listed(node):
    with MigSession(Host(environ={**os.environ, **node.env})) as session:
        session.set_mode(gpu_uuid(2), True)
        gi, _ = session.create_gpu_instance(gpu_uuid(2), 5)
        session.create_compute_instance(gpu_uuid(2), gi, 1)
        uuid = session.layouts().gpus[2].instances[0].compute[0].uuid
    data = gpunode("mig", "list", "-o", "json", env=node.env).document["data"]
    (instance,) = data["gpus"][2]["instances"]
    assert (instance["name"], instance["placement"]) == ("2g.12gb", {"start": 0, "size": 2})
    assert instance["compute"] == [
        {
            "id": 0,
            "slices": 1,
            "placement": {"start": 0, "size": 1},
            "uuid": uuid,
            "profile": "1c.2g.12gb",
        }
    ]


def test_json_has_the_whole_layout(node):
    document = gpunode("mig", "list", "-o", "json", env=node.env).document
    assert (document["kind"], document["status"], document["exitCode"]) == ("MigLayout", "ok", 0)
    first, second, _ = document["data"]["gpus"]
    assert (first["capable"], first["current"], first["pending"], first["slots"]) == (True, True, True, 8)
    assert first["deviceId"] == 0x233010DE
    assert [one["compute"][0]["profile"] for one in first["instances"]] == [
        *("3g.40gb", "2g.20gb", "1g.10gb+me", "1g.10gb")
    ]
    assert second["profiles"][2]["placements"] == [{"start": 0, "size": 4}, {"start": 4, "size": 4}]
    assert {one["free"] for one in second["profiles"]} == {None}


@pytest.mark.parametrize("options", [(), ("--profiles",)])
def test_every_line_fits_a_terminal(options, node):
    node.write(mig_machine("rtx-pro-6000", "h200", "b200", "a30", enabled=True))
    shown = gpunode("mig", "list", *options, env=node.env).out.splitlines()
    assert [line for line in shown if len(line) > 80] == []


def test_profiles_list_what_fits_and_what_is_free(node):
    ran = gpunode("mig", "list", "--profiles", env=node.env)
    assert ran.code == 0, ran.err
    options = [line.split() for line in lines(ran.out)]
    assert options[14][:9] == ["3g.40gb", "9", "39.5", "GiB", "60", "2", "-", "0,4:4", "3x1c"]
    assert options[1][:2] == ["GPU", "0"]
    four = next(row for row in options if row[:1] == ["4g.24gb"])
    assert four[7:] == ["0:4", "4x1c", "2x2c"]
    node.write(mig_machine("h100", "h100", "h100"))
    assert lines(gpunode("mig", "list", "--profiles", env=node.env).out)[1].startswith("GPUs 0, 1, 2  ")


@pytest.mark.parametrize(
    ("reported", "mode"),
    [({"mig_next": 1}, "MIG off, on after a reset"), ({}, "MIG off")],
)
def test_pending_mode_is_printed(node, reported, mode):
    node.write(mig_machine("a100-40gb").with_gpu(0, reported=reported))
    shown = gpunode("mig", "list", env=node.env).out
    assert f" {mode} GPU-" in " ".join(shown.split())


def test_gpus_without_mig_are_marked(node):
    node.write(machine(1, name="NVIDIA L40S", cc="8.9"))
    ran = gpunode("mig", "list", env=node.env)
    assert (ran.code, "NVIDIA L40S  no MIG" in ran.out) == (0, True)


def test_missing_rights_give_the_exit_code_of_a_precondition(node):
    node.write(
        with_mig(mig_machine("h100"), 0, mixed_layout(0)).with_faults(Fault("nvmlDeviceGetGpuInstances", 4))
    )
    ran = gpunode("mig", "list", env=node.env)
    assert (ran.code, "instances unreadable" in ran.out) == (3, True)
    assert "error: the MIG instances of GPU 0 can't be read: no permission" in ran.err
    ran = gpunode("mig", "export", "-o", "json", env=node.env)
    assert ran.document["errors"][0]["code"] == "mig-permission"
    assert (ran.code, ran.document["data"]) == (3, {})


def test_with_mig_off_no_rights_are_needed_to_list(node):
    node.write(mig_machine("h100").with_faults(Fault("nvmlDeviceGetGpuInstancePossiblePlacements", 4)))
    assert gpunode("mig", "list", env=node.env).code == 0
    assert gpunode("mig", "list", "--profiles", env=node.env).code == 3


def test_lost_gpu_is_named_and_the_others_are_listed(node):
    node.write(mig_machine("h100", "h100").with_gpu(0, lost=True))
    ran = gpunode("mig", "list", env=node.env)
    assert (ran.code, f"MIG off  {gpu_uuid(1)}" in ran.out) == (1, True)
    assert "error: 1 of 2 GPUs can't be read: GPU 0: the GPU is lost" in ran.err
    ran = gpunode("mig", "export", env=node.env)
    assert (ran.code, ran.out) == (1, ""), "half a configuration is not printed"


def test_export_prints_the_mig_parted_format(node):
    ran = gpunode("mig", "export", "-l", "today", env=node.env)
    assert ran.code == 0, ran.err
    assert yaml.safe_load(ran.out) == {
        "version": "v1",
        "mig-configs": {
            "today": [
                {
                    "device-filter": "0x233010DE",
                    "devices": [0],
                    "mig-enabled": True,
                    "mig-devices": {"1g.10gb": 1, "1g.10gb+me": 1, "2g.20gb": 1, "3g.40gb": 1},
                },
                {
                    "device-filter": ["0x233010DE", "0x20B710DE"],
                    "devices": [1, 2],
                    "mig-enabled": False,
                    "mig-devices": {},
                },
            ]
        },
    }
    assert json.loads(gpunode("mig", "export", "-l", "today", "--format", "json", env=node.env).out) == (
        yaml.safe_load(ran.out)
    )


def test_export_warns_about_what_a_configuration_cannot_express(node):
    empty = mig_machine("a30", enabled=True).with_gpu(0, gpu_instances=(StubGpuInstance(3, 0, 1),))
    node.write(empty)
    ran = gpunode("mig", "export", env=node.env)
    assert ran.code == 0
    assert "GPU 0: GPU instance 3 holds no compute instance and is left out" in ran.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "toml"), "unknown format 'toml'"),
        (("-l", "a b"), "'a b' can't be a configuration's label"),
        (("-l", ""), "'' can't be a configuration's label"),
    ],
)
def test_export_refuses_contradicting_options(node, words, message):
    ran = gpunode("mig", "export", *words, env=node.env)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_unloaded_driver_is_reported(node):
    node.write(mig_machine("h100").with_faults(Fault("nvmlInitWithFlags", 9)))
    ran = gpunode("mig", "list", "-o", "json", env=node.env)
    assert (ran.code, ran.document["errors"][0]["code"]) == (1, "mig")
    assert "the NVIDIA kernel module is not loaded (NVML 9)" in ran.err


def test_reading_changes_nothing(node):
    for words in (("list",), ("list", "--profiles"), ("export",)):
        gpunode("mig", *words, env=node.env)
    assert node.mig_changes() == []


# --- recorded machines --------------------------------------------------------------------------------------


def test_recorded_machine_is_listed_as_recorded(node, tmp_path):
    seen = gpunode("mig", "list", "-o", "json", env=node.env).document["data"]
    root = tmp_path / "recorded"
    (root / ".gpunode").mkdir(parents=True)
    (root / ".gpunode/recording.json").write_text(json.dumps({"nvml": {"mig": seen}}))
    ran = gpunode("--root", str(root), "mig", "list", "-o", "json")
    assert (ran.code, ran.document["data"]) == (0, seen)


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({}, "nothing was recorded of this machine's MIG\nhint: gpunode report records it on that node"),
        ({"mig": {}}, "nvml.mig.gpus is missing"),
        ({"mig": {"gpus": [{"index": 0}]}}, "nvml.mig.gpus[0].uuid is missing"),
        ({"mig": {"gpus": 3}}, "nvml.mig.gpus must be a list"),
    ],
)
def test_invalid_recording_is_reported(tmp_path, recorded, message):
    (tmp_path / ".gpunode").mkdir()
    (tmp_path / ".gpunode/recording.json").write_text(json.dumps({"nvml": recorded}))
    ran = gpunode("--root", str(tmp_path), "mig", "list")
    assert (ran.code, message in ran.err) == (1, True), ran.err


def test_directory_in_place_of_a_configuration_gets_a_hint(tmp_path):
    ran = gpunode("mig", "plan", "-f", str(tmp_path))
    assert ran.code != 0
    assert ran.err.startswith(f"error: {tmp_path} is a directory\nhint: name a file in it: --config-file ")
