"""Where a check applies is data: kinds of node and traits, never a condition inside the check."""

import ast
from pathlib import Path

import pytest

from fixtures.machines import machine, options, recorded_host
from gpunode.checks.catalogue import ALL_CHECKS, BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.checks.model import ENGINE_NODES
from gpunode.checks.runner import run_checks
from gpunode.commands import doctor
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Node, Questions
from gpunode.facts.system import BARE_METAL, CONTAINER, TEGRA, VM, WSL2
from gpunode.facts.traits import TRAITS
from gpunode.host import Host
from gpunode.output.render import plain_lines
from tests.silent import SilentProgress

CHECKS = Path(__file__).parents[2] / "gpunode" / "checks"
KINDS = (BARE_METAL, VM, WSL2, TEGRA, CONTAINER)
RECORDED = {
    "healthy-h100": BARE_METAL,
    "healthy-vm-passthrough": VM,
    "healthy-vgpu-guest": VM,
    "healthy-wsl2": WSL2,
    "healthy-jetson-orin": TEGRA,
    "lxc-unprivileged": CONTAINER,
}
# machines with a trait that skips checks, and the trait
WITH_TRAIT = {
    "healthy-vgpu-guest": "vgpu-guest",
    "gpu-bound-vfio-rocky9": "vfio-host",
    "gpu-operator-driver": "operator-driver",
    "flatcar-without-toolkit": "immutable",
}


@pytest.mark.parametrize("name", RECORDED)
def test_check_is_not_applicable_on_other_kinds_of_nodes(name, tmp_path):
    node = Node(recorded_host(name, tmp_path), Questions(**options(name)))
    assert node.kind == RECORDED[name]
    for finding in run_checks(node):
        if node.kind not in BY_ID[finding.id].classes:
            assert (finding.status, finding.skipped) == (FindingStatus.SKIP, "not-applicable"), finding


@pytest.mark.parametrize("name", WITH_TRAIT)
def test_trait_skips_the_checks_that_exclude_it(name, tmp_path):
    node, trait = Node(recorded_host(name, tmp_path), Questions(**options(name))), WITH_TRAIT[name]
    assert TRAITS[trait].holds(node)
    gone = {check.id for check in ALL_CHECKS if trait in check.unless}
    skipped = {one.id for one in run_checks(node) if one.skipped == "not-applicable"}
    assert gone and gone <= skipped


def test_no_check_tests_the_node_kind_itself() -> None:
    """An `if` about the node's kind that leads to a skip belongs in `classes`."""
    found = []
    for path in sorted(CHECKS.rglob("*.py")):
        if path.name == "runner.py":
            continue
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.If) and ".kind" in ast.unparse(statement.test):
                body = " ".join(ast.unparse(one) for one in statement.body)
                if "node.kind" in ast.unparse(statement.test) and body.startswith("return skip("):
                    found.append(f"{path.relative_to(CHECKS)}:{statement.lineno}")
    assert found == []


def test_engines_checks_apply_wherever_engines_run() -> None:
    """Docker in WSL, on a Jetson and in an LXC container is set up like any other."""
    assert set(ENGINE_NODES) == set(KINDS)
    for identifier in ("docker-not-running", "docker-runtime-missing", "containerd-runtime-missing"):
        assert BY_ID[identifier].classes == ENGINE_NODES


def test_single_process_container_skips_engine_checks(tmp_path):
    """It may see the host's processes (hostPID), but neither their files nor their sockets."""
    spec = machine("healthy-h100")
    spec["dirs"] = [path for path in spec["dirs"] if path != "/run/systemd/system"]
    spec["files"]["/.dockerenv"] = ""
    spec["recording"]["sockets"] = {}
    spec["recording"]["daemons"] = {}
    spec["executables"] = [path for path in spec["executables"] if "nvidia-c" not in path]
    node = Node(Host(build_machine(spec, tmp_path), environ={}))
    findings = run_checks(node)
    assert node.kind == CONTAINER and node.docker is not None
    engines = [one for one in findings if one.layer in ("docker", "containerd", "crio", "podman")]
    assert {one.skipped for one in engines} == {"not-applicable"}
    assert {one.id for one in findings if one.status is FindingStatus.FAIL} == set()


def test_docker_without_systemd_in_wsl_is_started_by_its_init_script(tmp_path):
    spec = machine("healthy-wsl2")
    spec["dirs"] = [path for path in spec.get("dirs", ()) if path != "/run/systemd/system"]
    spec["recording"]["sockets"].pop("/run/docker.sock")
    del spec["recording"]["daemons"]["/run/docker.sock"]
    findings = {one.id: one for one in run_checks(Node(Host(build_machine(spec, tmp_path), environ={})))}
    (fix,) = findings["docker-not-running"].fixes
    assert fix.command == "service docker restart"
    assert fix.effect == "restarts Docker, which stops its containers unless live-restore is on"


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("healthy-wsl2", "1 × NVIDIA GeForce RTX 4080 · driver 581.80"),
        ("healthy-jetson-orin", "1 × NVIDIA Jetson AGX Orin Developer Kit · driver 540.4.0"),
    ],
)
def test_gpu_without_a_bus_address_has_a_name(name, summary, tmp_path):
    result = doctor.run(recorded_host(name, tmp_path), SilentProgress())
    assert plain_lines(result.blocks[1])[0].startswith(summary)
