"""A recording of a machine is checked when it is loaded: the key that is wrong is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.machines import HEALTHY, as_yaml, machine, names
from gpunode.checks.runner import run_checks
from gpunode.commands.demo import build_machine
from gpunode.errors import ConfigError
from gpunode.facts.node import Node
from gpunode.gpu import model, nvml, nvml_health
from gpunode.host import Host, recording
from gpunode.host.recording import parse_recording
from gpunode.mig import model as mig_model
from gpunode.output.typed import json_fields
from tests.cli import gpunode

MACHINES = (
    *("healthy-docker-rocky9", "mig-mixed-strategy", "healthy-vgpu-guest", "allocatable-zero"),
    *("crio-nri", "gpu-used-by-desktop", "docker-desktop"),
)
OTHERS: tuple[Any, ...] = (None, True, 0, -1, 2.5, "text", "", [], ["x"], [0], {}, {"x": {}}, [{}], 1 << 70)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return tree


@pytest.mark.parametrize("name", names())
def test_every_recorded_machine_is_accepted(name: str) -> None:
    parse_recording(json.dumps(machine(name).get("recording", {})))


@pytest.mark.parametrize("name", HEALTHY)
def test_rendered_tree_equals_the_file_it_is_built_from(tmp_path: Path, name: str) -> None:
    tree = build_machine(machine(name), tmp_path / "first")
    log = tree / ".gpunode/kernel.log"
    spec = yaml.safe_load(as_yaml(tree))
    assert spec.pop("expected") == {}
    if log.exists():
        spec["files"]["/.gpunode/kernel.log"] = spec.pop("kernel_log")
    copy = build_machine(spec, tmp_path / "second")
    assert entries(copy) == entries(tree)


def entries(root: Path) -> dict[str, object]:
    """Each path of the tree, with a link's target, a file's mode and content, and None for a directory."""

    def entry(path: Path) -> object:
        if path.is_symlink():
            return str(path.readlink())
        return (path.stat().st_mode, path.read_bytes()) if path.is_file() else None

    return {str(path.relative_to(root)): entry(path) for path in root.rglob("*")}


KNOWN = [name for name in MACHINES if name in names()]
PLACES = [
    (name, path)
    for name in KNOWN
    for section in ("nvml", "daemons")
    for path in places({section: machine(name)["recording"].get(section, {})})
    if len(path) > 1
]


@pytest.mark.full
@settings(max_examples=120, suppress_health_check=list(HealthCheck), deadline=None)
@given(place=st.sampled_from(PLACES), value=st.sampled_from(OTHERS))
def test_wrong_type_is_one_error_and_breaks_no_check(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[str, tuple[Any, ...]], value: Any
) -> None:
    name, path = place
    spec: Any = dict(machine(name))
    spec["recording"] = changed(spec["recording"], path, value)
    try:
        parse_recording(json.dumps(spec["recording"]))
    except ConfigError as error:
        assert error.hint and path[0] in error.message
        return
    host = Host(build_machine(spec, tmp_path_factory.mktemp("m")), environ={})
    broken = [one.summary for one in run_checks(Node(host)) if "internal error in the check" in one.summary]
    assert broken == []


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("nvml", "inventory", "gpus", 1, "memoryBytes"), "80G", "gpus[1].memoryBytes must be an integer"),
        (("nvml", "inventory", "gpus", 0, "index"), True, "nvml.inventory.gpus[0].index must be an integer"),
        (("nvml", "inventory", "gpus"), {}, "nvml.inventory.gpus must be a list"),
        (("nvml", "conditions", "0", "reading"), [], "nvml.conditions.0.reading must be an object"),
        (("nvml", "conditions"), {"x": {}}, "nvml.conditions.x: the key must be the index of a GPU"),
        (("nvml", "timeout"), "yes", "nvml.timeout must be true or false"),
        (("nvml", "error"), {"message": ""}, "nvml.error.code is missing"),
        (("daemons", "/run/docker.sock", "info"), [], "daemons./run/docker.sock.info must be an object"),
        (("daemons", "/run/docker.sock", "problem"), {"code": 3}, "problem.code must be a string"),
    ],
)
def test_command_line_names_the_wrong_key(
    tmp_path: Path, path: tuple[Any, ...], value: Any, says: str
) -> None:
    spec: Any = dict(machine("healthy-docker-rocky9"))
    spec["recording"] = changed(spec["recording"], path, value)
    root = build_machine(spec, tmp_path / "m")
    for argv in (("doctor",), ("gpus",), ("mig", "list")):
        ran = gpunode("--root", str(root), *argv)
        assert ran.code == 1
        error, hint = ran.err.splitlines()[-2:]
        assert error.startswith("error: .gpunode/recording.json: ") and error.endswith(says)
        assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (model.Gpu, recording._GPU),
        (model.MigDevice, recording._MIG_DEVICE | {"size": recording._SIZE}),
        (model.MigSize, recording._SIZE),
        (nvml_health.Condition, recording._CONDITION),
        (nvml.Fabric, recording._FABRIC),
        (nvml_health.Licence, recording._LICENCE),
        (nvml_health.GpuProcess, recording._PROCESS),
        (mig_model.GpuLayout, recording._LAYOUT),
        (mig_model.GpuInstance, recording._INSTANCE),
        (mig_model.ComputeInstance, recording._COMPUTE),
        (mig_model.Profile, recording._PROFILE),
    ],
)
def test_every_field_that_is_recorded_has_a_type(kind: Any, shape: dict[str, Any]) -> None:
    known = {key.removesuffix("!") for key in shape}
    identity = {"index", "uuid", "pci"} if kind is nvml_health.Condition else set()
    assert set(json_fields(kind)) - identity == known
