"""Each deviation from NVIDIA's plugin in the table of docs/device-plugin.md, run as a user would."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.scenario import Event, Fault, gpu_uuid, machine
from fixtures.stubs import have_compiler, stub_node
from tests.cli import REPOSITORY, gpunode
from tests.plugin.gpus import bare_host, gpu, inventory
from tests.plugin.nodes import RESOURCE
from tests.plugin.nvidia.test_cdi import CDI, LIBRARIES, VERSION, Written
from tests.plugin.serving import kubelet

GENERIC = 999  # NVML_ERROR_UNKNOWN
ROWS = ("`resources`, `rename`, `devices`", "unknown key", "malformed", "--nvidia-dev-root", "stays Healthy")


def test_deviation_table_has_these_rows() -> None:
    page = (REPOSITORY / "docs/device-plugin.md").read_text()
    table = page.partition("## Differences")[2].partition("\n\nFurther")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(ROWS)
    assert all(part in row for part, row in zip(ROWS, rows, strict=True))


def test_names_and_devices_in_the_config_file_take_effect(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    shared = {"name": "nvidia.com/h100", "replicas": 2, "rename": "nvidia.com/half", "devices": [0]}
    document = {
        "version": "v1",
        "resources": {"gpus": [{"pattern": "*H100*", "name": "nvidia.com/h100"}]},
        "sharing": {"timeSlicing": {"resources": [shared]}},
    }
    config.write_text(json.dumps(document))
    ran = gpunode("plugin", "check-config", str(config), "--simulate", "h100:2", "-o", "json")
    assert ran.code == 0, ran.err
    found = {one["name"]: len(one["devices"]) for one in ran.document["data"]["resources"]}
    assert found == {"nvidia.com/half": 2, "nvidia.com/h100": 1}


@pytest.mark.parametrize(
    ("flags", "environ", "code", "error"),
    [
        (("--config-file", "/config.yaml"), {}, 1, "flags.migStrategi: unknown key"),
        ((), {"DP_DISABLE_HEALTHCHECKS": "79,abc"}, 2, "DP_DISABLE_HEALTHCHECKS: 'abc' is not an XID"),
    ],
)
def test_unknown_keys_and_malformed_xids_end_the_process(
    tmp_path: Path, flags: tuple[str, ...], environ: dict[str, str], code: int, error: str
) -> None:
    (tmp_path / "config.yaml").write_text("version: v1\nflags: {migStrategi: none}\n")
    command = ("--root", str(tmp_path), "plugin", "serve", "--simulate", "h100:1")
    ran = gpunode(*command, *flags, env=environ)
    assert (ran.code, error in ran.err) == (code, True), ran.err


def test_device_root_applies_to_cdi(tmp_path: Path) -> None:
    files = {f"{LIBRARIES}/libcuda.so.{VERSION}": "x", "/other/dev/placeholder": ""}
    made = Written(bare_host(tmp_path / "n", ("/other/dev/nvidia0",), files))
    made.write(replace(CDI, dev_root="/other", container_driver_root=""), inventory(gpu(0)))
    (device,) = made.tree()["devices"]
    assert device["containerEdits"]["deviceNodes"][0]["hostPath"] == "/other/dev/nvidia0"


@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
def test_gpu_without_events_stays_healthy(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = machine(2).with_faults(Fault("nvmlDeviceRegisterEvents", code=GENERIC, uuid=gpu_uuid(1)))
    stub = stub_node(short, scenario, libraries="nvml")
    for name, value in stub.env.items():
        monkeypatch.setenv(name, value)
    with kubelet(short) as (made, start):
        serving = start("--rediscover-seconds", "0.3")
        assert made.wait_allocatable(RESOURCE, 2, 30), serving.log()
        assert serving.says(gpu_uuid(1)), serving.log()
        stub.write(scenario.with_event(Event(gpu_uuid(0), data=79)))
        assert made.wait_allocatable(RESOURCE, 1, 30), serving.log()
        assert made.unhealthy(RESOURCE) == (gpu_uuid(0),)
