"""Label sets by model, layout, MIG strategy and sharing method, compared with GPU feature discovery.

The tables in this directory are its own output (0.20, built from its sources), with the same stub of NVML
and the same settings: a section for each case, and in it the labels about GPUs. They were not generated with
gpunode.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest

from fixtures.mig_tables import BOARDS, MIB, StubProfile
from fixtures.scenario import Scenario, StubMig, machine, mig_uuid, with_mig
from fixtures.stubs import have_compiler, stub_node
from gpunode.gpu.model import Inventory, inventory_from_json
from gpunode.host import Host
from gpunode.plugin.config.settings import LabelSettings, Settings, SharedResource, Sharing
from gpunode.plugin.labels.make import planned
from gpunode.plugin.labels.model import Machine
from gpunode.plugin.labels.nvidia import nvidia_labels
from tests.gpu.children import run_python

pytestmark = pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
TABLES = Path(__file__).parent / "tables"
MODELS = {
    "a100": ("NVIDIA A100-SXM4-40GB", "8.0", 40960, BOARDS["a100-40gb"].profiles),
    "h100": ("NVIDIA H100 80GB HBM3", "9.0", 81559, BOARDS["h100"].profiles),
    "b200": ("NVIDIA B200", "10.0", 183359, BOARDS["b200"].profiles),
    "l40s": ("NVIDIA L40S", "8.9", 46068, ()),
    "t4": ("Tesla T4", "7.5", 15360, ()),
    "v100": ("Tesla V100-SXM3-32GB", "7.0", 32768, ()),
}
LAYOUTS = {
    "whole": ((), ()),
    "alike": ((0,) * 7, (0,) * 7),
    "several": ((2, 1, 7, 0), (2, 2)),
    "some": ((0,) * 7, None),
}
"""Two GPUs: the GPU instance profiles of each, by NVML's index of them; None or nothing: MIG is off."""
REPLICAS = 4
LOOK = """
import json, sys
from pathlib import Path
from gpunode.gpu.inventory import discover
from gpunode.gpu.nvml import Nvml
from gpunode.output.typed import plain
here = Path(sys.argv[1])
found = {}
for scenario in sorted(Path(sys.argv[2]).iterdir()):
    here.write_text(scenario.read_text())
    with Nvml() as nvml:
        found[scenario.name] = plain(discover(nvml))
print(json.dumps(found))
"""


def node(model: str, layout: str) -> Scenario:
    """Two GPUs of that model, with that MIG layout."""
    name, cc, mib, profiles = MODELS[model]
    found = machine(2, name=name, cc=cc)
    known = {profile.index: profile for profile in profiles}
    for gpu, wanted in enumerate(LAYOUTS[layout]):
        found = found.with_gpu(gpu, memory=mib * MIB)
        if wanted:
            found = with_mig(found, gpu, [_part(gpu, at, known[one]) for at, one in enumerate(wanted)])
    return found


def _part(gpu: int, at: int, profile: StubProfile) -> StubMig:
    engines = (profile.slices, profile.media, 0, profile.media, profile.media)
    sizes = {"gslices": profile.slices, "cslices": profile.slices, "megabytes": profile.megabytes}
    return StubMig(
        at, mig_uuid(gpu, at), gi=at + 1, profile=profile.index, sms=profile.sms, engines=engines, **sizes
    )


def cases(model: str) -> list[tuple[str, str, str]]:
    """Layout, MIG strategy, sharing method. MPS isn't for GPUs in MIG mode, nor with the strategy mixed."""
    layouts = LAYOUTS if MODELS[model][3] else ("whole",)
    ways = ("none", "time-slicing", "renamed", "mps")
    every = ((a, b, c) for a in layouts for b in ("none", "single", "mixed") for c in ways)
    return [case for case in every if case[2] != "mps" or (case[0] == "whole" and case[1] != "mixed")]


def shared_names(model: str) -> tuple[str, ...]:
    """Shared resources: whole GPUs, and the smallest MIG device."""
    profiles = MODELS[model][3]
    return ("nvidia.com/gpu", *((f"nvidia.com/mig-{profiles[0].name}",) if profiles else ()))


def settings(model: str, strategy: str, way: str) -> Settings:
    names = shared_names(model)[: 1 if way == "mps" else None]
    entries = tuple(SharedResource(name, REPLICAS) for name in names)
    kind = "time-slicing" if way == "renamed" else way
    sharing = None if way == "none" else Sharing(kind, entries, rename_by_default=way == "renamed")
    named = LabelSettings(no_timestamp=True)
    return Settings(mig_strategy=strategy, sharing=sharing, mps_root="/run/nvidia/mps", labels=named)


def table(model: str) -> dict[str, dict[str, str]]:
    """Sections of a table; a line ``[whole mixed none]`` begins each."""
    found: dict[str, dict[str, str]] = {}
    for line in (TABLES / f"{model}.txt").read_text().splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line:
            key, _, value = line.partition("=")
            section[key] = value
    return found


def gpu_labels(values: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Labels about GPUs, without those about the machine or the driver."""
    others = ("gfd.", "gpu.machine", "gpu.mode", "cuda.", "vgpu.")
    return {key: value for key, value in values if not key.removeprefix("nvidia.com/").startswith(others)}


@pytest.fixture(scope="module")
def inventories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Inventory]:
    """NVML's data of every node, by model and layout; one process queries them all."""
    place = tmp_path_factory.mktemp("labels")
    scenarios = place / "scenarios"
    scenarios.mkdir()
    for model in MODELS:
        for layout in dict.fromkeys(case[0] for case in cases(model)):
            node(model, layout).write(scenarios / f"{model} {layout}")
    stub = stub_node(place, machine(1))
    answers = run_python(LOOK, stub.env, str(stub.scenario_path), str(scenarios))
    return {name: inventory_from_json(one) for name, one in answers.items()}


EVERY = list(chain.from_iterable(((model, *case) for case in cases(model)) for model in MODELS))


@pytest.mark.parametrize(("model", "layout", "strategy", "way"), EVERY, ids=map(" ".join, EVERY))
def test_labels_match_gpu_feature_discovery(
    model: str, layout: str, strategy: str, way: str, inventories: dict[str, Inventory]
) -> None:
    chosen = settings(model, strategy, way)
    seen = inventories[f"{model} {layout}"]
    found = nvidia_labels(chosen, seen, planned(Host(Path("/nowhere"), {}), chosen, seen), Machine(), 0.0)
    assert gpu_labels(found.values.items()) == table(model)[f"{layout} {strategy} {way}"]


def test_tables_have_no_other_cases() -> None:
    for model in MODELS:
        assert list(table(model)) == [" ".join(case) for case in cases(model)]
