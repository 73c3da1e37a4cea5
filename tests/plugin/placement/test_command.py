"""`gpunode plugin explain-placement`, as people call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from fixtures.scenario import gpu_uuid, machine, with_nvswitch
from fixtures.stubs import have_compiler, stub_node
from tests.plugin.placement.machines import random_matrix

SPEC = ("--simulate", "h100:8,node=test")


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpunode", "plugin", "explain-placement", *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_links_groups_and_what_is_left_are_told_of_a_simulated_node() -> None:
    done = run("--size", "4", "--available", "0,2,3,5", "--available", "6,7", *SPEC)
    assert done.returncode == 0, done.stderr
    assert "GPU0  X     NV18" in done.stdout
    assert "NV18 through NVSwitch" in done.stdout
    assert "chosen of nvidia.com/gpu (aligned): 0, 2, 3, 5" in done.stdout
    assert "left for others: 6,7" in done.stdout
    assert "in common: NV NVLinks; a higher score is nearer" in done.stdout


def test_who_asks_for_all_there_is_gets_it_and_an_irregular_machine_is_told_to_be_unproven(
    tmp_path: Path,
) -> None:
    assert "all that is available is asked for" in run("--size", "8", *SPEC).stdout
    gpus = [{"index": n, "uuid": f"GPU-{n}", "name": "A40", "pci": f"0000:{n:02x}:00.0"} for n in range(16)]
    links = random_matrix(1)
    pairs = [
        {
            "first": f"GPU-{a}",
            "second": f"GPU-{b}",
            "level": 60 - links[a][b] % 100,
            "nvlinks": links[a][b] // 100,
        }
        for a, b in combinations(range(16), 2)
    ]
    (tmp_path / ".gpunode").mkdir()
    seen = {"inventory": {"driverVersion": "550.1", "gpus": gpus}, "topology": {"pairs": pairs}}
    (tmp_path / ".gpunode/recording.json").write_text(json.dumps({"nvml": seen}))
    done = run("--root", str(tmp_path), "--size", "4")
    assert done.returncode == 0, done.stderr
    assert "not proven to be the best" in done.stdout
    assert (
        json.loads(run("--root", str(tmp_path), "--size", "4", "-o", "json").stdout)["data"]["exact"] is False
    )


def test_json_has_the_whole_decision() -> None:
    done = run("--size", "2", "--must-include", "3", "-o", "json", *SPEC)
    document = json.loads(done.stdout)
    data = document["data"]
    assert document["kind"] == "PlacementExplanation"
    assert (data["simulated"], data["policy"], data["exact"]) == (True, "aligned", True)
    assert len(data["links"]) == 28
    assert {link["word"] for link in data["links"]} == {"NV18"}
    chosen = {unit["id"]: unit["index"] for unit in data["units"]}
    assert [chosen[one] for one in data["chosen"]] == ["3", "0"]
    assert data["candidates"][0]["indices"] == ["0", "3"]


def test_shares_of_a_config_file_are_told_by_unit(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {name: nvidia.com/gpu, replicas: 4}\n"
    )
    done = run("--size", "2", "--available", "1,2", "-o", "json", "--config-file", str(config), *SPEC)
    data = json.loads(done.stdout)["data"]
    assert data["policy"] == "distributed"
    assert [(use["index"], use["held"], use["chosen"]) for use in data["uses"]][:3] == [
        ("0", 4, 0),
        ("1", 0, 1),
        ("2", 0, 1),
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--size", "2", "--available", "9", *SPEC), 2, "nvidia.com/gpu has no device 9"),
        (("--size", "0", *SPEC), 2, "one device or more"),
        (("--size", "1", "--resource", "amd.com/gpu", *SPEC), 2, "nvidia.com/gpu"),
    ],
)
def test_what_there_isnt_is_named(words: tuple[str, ...], code: int, said: str) -> None:
    done = run(*words)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
def test_this_nodes_own_links_are_asked_and_a_lost_gpu_costs_only_itself(tmp_path: Path) -> None:
    scenario = with_nvswitch(machine(4)).with_gpu(1, lost=True)
    scenario = replace(scenario, ancestors={(0, 2): 40, (0, 3): 50, (2, 3): 50})
    node = stub_node(tmp_path, scenario, libraries="nvml")
    done = run("--size", "2", "-o", "json", **node.env)
    data = json.loads(done.stdout)["data"]
    assert data["chosen"] == [gpu_uuid(0), gpu_uuid(2)]
    assert {link["switchLinks"] for link in data["links"]} >= {18}


def test_a_recorded_machine_may_hold_its_links(tmp_path: Path) -> None:
    gpus = [{"index": n, "uuid": f"GPU-{n}", "name": "A40", "pci": f"0000:0{n}:00.0"} for n in range(4)]
    pairs = [{"first": "GPU-1", "second": "GPU-3", "level": 50, "nvlinks": 4}]
    (tmp_path / ".gpunode").mkdir()
    recording = {
        "nvml": {"inventory": {"driverVersion": "550.1", "gpus": gpus}, "topology": {"pairs": pairs}}
    }
    (tmp_path / ".gpunode/recording.json").write_text(json.dumps(recording))
    done = run("--root", str(tmp_path), "--size", "2", "-o", "json")
    assert json.loads(done.stdout)["data"]["chosen"] == ["GPU-1", "GPU-3"], done.stderr
