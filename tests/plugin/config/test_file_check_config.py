"""`gpunode plugin check-config` as a user runs it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from fixtures.amd import amd_machine
from fixtures.machines import recorded_host
from fixtures.scenario import machine
from fixtures.stubs import have_compiler, stub_node
from gpunode.plugin.config.file import by_key
from tests.cli import REPOSITORY, Ran, gpunode
from tests.plugin.config.resolving import FILES

PAGE = REPOSITORY / "docs/device-plugin.md"
H100 = ("--simulate", "h100:4")


def check(*argv: str, **env: str) -> Ran:
    return gpunode("plugin", "check-config", "-o", "json", *argv, env=env)


def values(ran: Ran) -> dict[str, tuple[Any, str]]:
    return {one["option"]: (one["value"], one["from"]) for one in ran.document["data"]["settings"]}


def test_source_of_each_value_is_printed() -> None:
    file = FILES / "with-gfd.yaml"
    ran = check(str(file), "--device-id-strategy", "index", *H100, GDS_ENABLED="true")
    assert ran.code == 0, ran.err
    found = values(ran)
    assert found["--mig-strategy"] == ("mixed", f"{file}:3")
    assert found["--device-id-strategy"] == ("index", "--device-id-strategy")
    assert found["--gds-enabled"] == (True, "GDS_ENABLED")
    assert found["--cdi-annotation-prefix"] == ("cdi.k8s.io/", "default")
    assert ran.document["kind"] == "PluginConfig"


def test_advertised_devices_are_printed(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "resources: {exclude: [3]}\nsharing:\n  timeSlicing:\n    renameByDefault: true\n"
        "    resources: [{name: nvidia.com/gpu, replicas: 10, devices: [0, 1]}]\n"
    )
    data = check(str(file), *H100).document["data"]
    counts = {one["name"]: len(one["devices"]) for one in data["resources"]}
    assert counts == {"nvidia.com/gpu.shared": 20, "nvidia.com/gpu": 1}
    assert [one["index"] for one in data["leftOut"]] == ["3"]
    table = gpunode("plugin", "check-config", str(file), *H100)
    assert re.search(
        r"nvidia.com/gpu.shared +20 +0 +GPU-\S+ +NVIDIA H100 80GB HBM3 +10 by time-slicing", table.out
    )
    assert f"{file}: valid" in table.out


def test_whole_devices_beside_shares_have_no_number_of_shares(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2, devices: [1]}]}}\n"
    )
    out = gpunode("plugin", "check-config", str(file), *H100).out
    assert re.search(r"nvidia.com/gpu +5 +0 +GPU-\S+ +NVIDIA H100 80GB HBM3\s*$", out, re.MULTILINE)
    assert re.search(r"^ +1 +GPU-\S+ +NVIDIA H100 80GB HBM3 +2 by time-slicing", out, re.MULTILINE)


def test_simulated_node_needs_no_imex_channel() -> None:
    found = check(*H100, "--imex-channel-ids", "0", "--imex-required")
    devices = found.document["data"]["resources"][0]["devices"]
    assert [one["problem"] for one in devices] == [""] * 4
    assert "IMEX" not in found.out


def test_recorded_machine_is_used(tmp_path: Path) -> None:
    recorded_host("containerd-not-restarted", tmp_path)
    ran = gpunode("--root", str(tmp_path), "-o", "json", "plugin", "check-config")
    assert ran.code == 0, ran.err
    data = ran.document["data"]
    assert data["resources"] or data["unknown"]


def test_file_is_checked_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("flags: {migStrategy: single}\n")
    ran = gpunode("--root", str(tmp_path), "plugin", "check-config", "/c.yaml")
    assert ran.code == 0, ran.err
    assert "the devices that would be advertised are unknown" in ran.out
    assert re.search(r"--mig-strategy +single +/c.yaml:1", ran.out)


def test_relative_file_is_resolved_from_the_working_directory(tmp_path: Path) -> None:
    file = os.path.relpath(FILES / "with-gfd.yaml")
    ran = gpunode("--root", str(tmp_path), "-o", "json", "plugin", "check-config", file)
    assert ran.code == 0, ran.err
    assert values(ran)["--mig-strategy"] == ("mixed", f"{FILES}/with-gfd.yaml:3")


def test_invalid_file_exits_with_1_and_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("flags:\n  migStrategy: all\n  passDeviceSpecs: true\nsharing: 3\n")
    ran = check(str(file))
    assert ran.code == 1
    assert [one["code"] for one in ran.document["errors"]] == ["config"] * 3
    assert [line for line in ran.err.splitlines() if line.startswith("error: ")] == [
        f"error: {file}:2: flags.migStrategy: 'all' is not one of none, single, mixed",
        next(line for line in ran.err.splitlines() if "its place is flags.plugin.passDeviceSpecs" in line),
        f"error: {file}:4: sharing: expected a mapping of timeSlicing, mps; found '3'",
    ]
    assert "Traceback" not in ran.err


def test_invalid_command_line_exits_with_2() -> None:
    ran = check("--mig-strategy", "all", "--listen=nowhere")
    assert ran.code == 2
    assert [one["code"] for one in ran.document["errors"]] == ["usage", "usage"]
    served = gpunode("plugin", "serve", "--mig-strategy", "all", "-o", "json")
    assert (served.code, served.document["kind"]) == (2, "PluginRun")
    assert served.err.splitlines() == [
        "error: --mig-strategy: 'all' is not one of none, single, mixed",
        "hint: see gpunode plugin serve --help",
    ]


def test_missing_file_exits_with_1(tmp_path: Path) -> None:
    ran = check(str(tmp_path / "nowhere.yaml"))
    assert ran.code == 1
    assert "nowhere.yaml: does not exist" in ran.err
    assert gpunode("plugin", "serve", "--config-file", str(tmp_path / "nowhere.yaml")).code == 1


def test_setting_without_a_match_on_this_node_gives_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "resources:\n  include: ['*H100*']\n  exclude: [17]\n"
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}\n"
    )
    ran = check(str(file), *H100)
    assert ran.code == 0
    assert ran.document["status"] == "warn"
    messages = "\n".join(ran.document["messages"])
    assert "17" in messages and "nvidia.com/mig-1g.5gb" in messages


@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
@pytest.mark.parametrize("flag", ["--driver-root-ctr-path", "--driver-root"])
def test_driver_is_found_as_by_plugin_serve(tmp_path: Path, flag: str) -> None:
    node = stub_node(tmp_path, machine(2), libraries="nvml")
    directory = tmp_path / "root/usr/lib64"
    directory.mkdir(parents=True)
    (directory / "libnvidia-ml.so.1").symlink_to(Path(node.env["LD_LIBRARY_PATH"]) / "libnvidia-ml.so.1")
    env = {name: value for name, value in node.env.items() if name != "LD_LIBRARY_PATH"}
    data = check(flag, str(tmp_path / "root"), **env).document["data"]
    assert data["unknown"] == ""
    assert [len(one["devices"]) for one in data["resources"]] == [2]


def test_tegra_is_one_device_without_nvml() -> None:
    data = check("--device-discovery-strategy", "tegra").document["data"]
    assert [device["id"] for one in data["resources"] for device in one["devices"]] == ["tegra"]


def test_key_in_the_wrong_section_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("sharing:\n  timeSlicing:\n  resources:\n  - {name: nvidia.com/gpu, replicas: 4}\n")
    (error,) = check(str(file)).document["errors"]
    assert "sharing.timeSlicing.resources" in error["message"]
    assert error["hint"] == "move it there, or correct its indentation"


def test_pattern_without_a_match_gives_a_warning_with_the_models(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "resources:\n  gpus:\n  - {pattern: 'H100*', name: h100}\n  - {pattern: '*', name: gpu}\n"
    )
    (message,) = check(str(file), *H100).document["messages"]
    assert (
        message
        == "warning: resources.gpus: H100*: no model here is called so; there is NVIDIA H100 80GB HBM3"
    )


def test_settings_impossible_on_this_node_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "sharing:\n  timeSlicing:\n    resources:\n"
        "    - {name: nvidia.com/gpu, replicas: 2, devices: [0]}\n"
        "    - {name: nvidia.com/gpu, replicas: 3, devices: ['*H100*']}\n"
    )
    ran = check(str(file), *H100)
    assert ran.code == 1
    (error,) = ran.document["errors"]
    assert error["message"].startswith(f"{file}:1: sharing.timeSlicing: device 0 (GPU-")
    assert "is shared by two entries" in error["message"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--pass-device-specs"],
        ["--pass-device-specs=true"],
        ["--pass-device-specs", "true"],
        ["-pass-device-specs=T"],
        ["--pass-device-specs=false", "--pass-device-specs=1"],
        ["--pass-device-specs", "--fail-on-init-error=false"],
    ],
    ids=" ".join,
)
def test_booleans_are_written_as_in_go(argv: list[str]) -> None:
    ran = check(*argv, str(FILES / "version-only.yaml"))
    assert ran.code == 0, ran.err
    assert values(ran)["--pass-device-specs"] == (True, "--pass-device-specs")


def test_every_alias_list_and_single_dash_is_accepted() -> None:
    argv = ["--nvidia-driver-root=/run/nvidia/driver", "--nvidia-dev-root", "/", "-mig-strategy=mixed"]
    argv += ["--container-driver-root", "/host", "--nvidia-ctk-path=/x", "--imex-channel-ids", "0"]
    argv += ["--device-list-strategy", "envvar", "--device-list-strategy=cdi-cri,cdi-annotations"]
    found = values(check(*argv, "--kubelet-socket", ""))
    assert found["--driver-root"][0] == "/run/nvidia/driver"
    assert (found["--dev-root"][0], found["--mig-strategy"][0]) == ("/", "mixed")
    assert found["--driver-root-ctr-path"] == ("/host", "--driver-root-ctr-path")
    assert found["--nvidia-cdi-hook-path"][0] == "/x"
    assert found["--device-list-strategy"][0] == ["envvar", "cdi-cri", "cdi-annotations"]
    assert found["--imex-channel-ids"][0] == [0]
    assert found["--kubelet-socket"] == ("", "--kubelet-socket")


def test_unknown_flag_is_a_usage_error() -> None:
    ran = check("--mig-stratgy=none")
    assert ran.code == 2
    assert "--mig-strategy" in ran.err


EXAMPLES = re.findall(r"```(?:yaml|json)\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_page_are_valid(number: int, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(EXAMPLES[number])
    more = ["--mps"] if "mps:" in EXAMPLES[number] else []
    ran = check(str(file), "--simulate", "h100:8", *more)
    assert ran.code == 0, ran.err
    assert not [one for one in ran.document["messages"] if "unknown" in one]


def test_page_has_examples_and_every_key() -> None:
    text = PAGE.read_text()
    assert len(EXAMPLES) >= 5
    shared = ("renameByDefault", "failRequestsGreaterThanOne", "resources[].devices")
    assert [key for key in shared if f"`{key}`" not in text] == []
    labels = PAGE.with_name("labels.md").read_text()
    lacking = [k for k, row in by_key().items() if f"`{k}`" not in (labels if row.part else text)]
    assert lacking == []


def test_amd_devices_are_read_from_sysfs(tmp_path: Path) -> None:
    amd_machine(tmp_path, "mi300x")
    ran = check("--root", str(tmp_path), "--vendor", "amd")
    assert ran.code == 0, ran.err
    (resource,) = ran.document["data"]["resources"]
    assert (resource["name"], len(resource["devices"])) == ("amd.com/gpu", 8)


def test_amd_node_without_the_driver_has_unknown_devices(tmp_path: Path) -> None:
    amd_machine(tmp_path, "mi300x", loaded=False)
    ran = check("--root", str(tmp_path), "--vendor", "amd")
    assert ran.code == 0, ran.err
    assert ran.document["data"]["resources"] == [] and "amdgpu" in ran.document["data"]["unknown"]
