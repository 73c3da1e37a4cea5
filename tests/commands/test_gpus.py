"""`gpunode gpus` as a user types it, on recorded machines."""

import json

import pytest

from fixtures.machines import machine, recorded_host
from gpunode.commands.demo import build_machine
from tests.cli import gpunode


@pytest.mark.parametrize(("name", "states"), [("healthy-docker-rocky9", {"-"}), ("healthy-h100", {"off"})])
def test_mig_is_off_only_on_gpus_that_support_it(name, states, tmp_path):
    root = recorded_host(name, tmp_path / "node").root
    ran = gpunode("gpus", "--root", str(root))
    assert ran.code == 0, ran.err
    assert {line.split()[-1] for line in ran.out.splitlines()[2:]} == states


def test_node_without_gpus_gets_a_warning(tmp_path):
    spec = machine("healthy-h100")
    spec["recording"]["nvml"]["inventory"]["gpus"] = []
    root = build_machine(spec, tmp_path / "node")
    ran = gpunode("gpus", "--root", str(root))
    assert (ran.code, "warning: no GPU was found" in ran.err) == (0, True)
    document = json.loads(gpunode("gpus", "--root", str(root), "-o", "json").out)
    assert (document["status"], document["data"]["gpus"]) == ("warn", [])
