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
from gpunode.commands.doctor import check_recording
from gpunode.daemons.cri import Cri, running_containers
from gpunode.daemons.pod_resources import list_pods
from gpunode.errors import ConfigError
from gpunode.facts.node import Node
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.host.recording import RECORDING
from gpunode.mig.session import MigError, read_layouts
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
def test_every_recorded_machine_is_accepted(tmp_path: Path, name: str) -> None:
    (tmp_path / RECORDING).parent.mkdir()
    (tmp_path / RECORDING).write_text(json.dumps(machine(name).get("recording", {})))
    host = Host(tmp_path, environ={})
    probe(host)
    for socket, answers in host.recording["daemons"].items():
        if "status" in answers:
            Cri(host, socket).status()
        if "containers" in answers and "info" not in answers:
            running_containers(host, socket, 1.0)
        if "pods" in answers:
            list_pods(host, socket)


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
    host = Host(build_machine(spec, tmp_path_factory.mktemp("m")), environ={})
    try:
        check_recording(host)
        read_layouts(host)
    except ConfigError as error:
        assert error.hint and path[0] in error.message
        return
    except MigError:
        pass  # most machines have no recorded layouts
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
    for argv in (("doctor",), ("gpus",)):
        ran = gpunode("--root", str(root), *argv)
        assert ran.code == 1
        error, hint = ran.err.splitlines()[-2:]
        assert error.startswith("error: .gpunode/recording.json: ") and error.endswith(says)
        assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xfe{}", "is not UTF-8"),
        (b"\x1f\x8b\x08", "is not UTF-8"),
        (b"{", "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"[]", "doesn't contain a JSON object"),
        (b"[" * 100_000, "is nested too deeply"),
    ],
    ids=["utf-16", "gzip", "cut off", "list", "deep"],
)
def test_command_line_says_what_a_broken_recording_is(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / RECORDING
    path.parent.mkdir()
    path.write_bytes(data)
    ran = gpunode("gpus", "--root", str(tmp_path))
    hint = "hint: record the machine again; the format is in docs/recorded-machines.md\n"
    assert (ran.code, ran.err) == (1, f"error: {RECORDING} {says}\n{hint}")


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        ([], "nvml.mig must be an object"),
        ({"gpus": [{"uuid": "GPU-0"}]}, "nvml.mig.gpus[0].index is missing"),
        (
            {"gpus": [{"uuid": "", "index": 0, "name": "", "pci": "", "slots": "8"}]},
            "nvml.mig.gpus[0].slots must be an integer",
        ),
    ],
)
def test_mig_list_names_the_wrong_key_of_the_layouts(tmp_path: Path, layouts: Any, says: str) -> None:
    spec: Any = dict(machine("healthy-docker-rocky9"))
    nvml = {**spec["recording"]["nvml"], "mig": layouts}
    spec["recording"] = {**spec["recording"], "nvml": nvml}
    ran = gpunode("--root", str(build_machine(spec, tmp_path / "m")), "mig", "list")
    error, hint = ran.err.splitlines()
    assert ran.code == 1 and error == f"error: .gpunode/recording.json: {says}"
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("status", "handlers"), "nvidia", "status.handlers must be a list"),
        (
            ("status", "conditions"),
            {"RuntimeReady": 1},
            "status.conditions.RuntimeReady must be true or false",
        ),
        (("containers",), [{"handler": 3}], "containers[0].handler must be a string"),
    ],
)
def test_answer_of_the_cri_that_is_malformed_is_an_error_of_the_checks_that_read_it(
    tmp_path: Path, path: tuple[str, ...], value: Any, says: str
) -> None:
    spec: Any = dict(machine("healthy-h100"))
    socket = "/run/containerd/containerd.sock"
    spec["recording"] = changed(spec["recording"], ("daemons", socket, *path), value)
    host = Host(build_machine(spec, tmp_path / "m"), environ={})
    with pytest.raises(ConfigError) as raised:
        _ = Node(host).cri, running_containers(host, socket, 1.0)
    assert raised.value.message == f".gpunode/recording.json: daemons.{socket}.{says}"
    findings = run_checks(Node(host))
    if path[0] == "status":
        assert any(raised.value.message in one.summary for one in findings)
    assert [one.summary for one in findings if "internal error" in one.summary] == []
