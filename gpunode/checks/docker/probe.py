"""Docker, tried: a container that computes on a GPU. Only on --deep, where it can be started."""

from __future__ import annotations

from gpunode.checks.fixes import everywhere
from gpunode.checks.model import Check, Verdict, fail, ok, seen, skip
from gpunode.facts.engines import docker_role
from gpunode.facts.node import Node


def docker_gpus_run_probe(node: Node) -> Verdict:
    role = docker_role(node)
    if node.docker is None or not role.used:
        return skip(role.reason)
    start = node.trials.get("docker")
    if start is None:
        return skip("no container can be started from here")
    from gpunode.gpu.targets import plan

    uuids = plan(node.nvml.inventory).uuids
    if not uuids:
        return skip("NVML lists no GPU that could be tried")
    trial = start(node.host, uuids[0])
    if trial.passed is None:
        return skip(f"couldn't be tried: {trial.text}")
    tried = seen("gpunode verify --on docker", trial.text)
    if trial.passed:
        return ok("a container of Docker computes on a GPU", tried)
    return fail("a container of Docker can't compute on a GPU", tried)


CHECKS = (
    Check(
        id="docker-gpus-run-probe",
        title="A container of Docker computes on a GPU",
        layer="docker",
        severity="error",
        looks_at=(
            "a container that adds two vectors on one GPU, as gpunode verify --on docker does on all. Its "
            "image is made from this node's own Python: nothing is pulled, and image and container are "
            "removed again."
        ),
        why="Every part looks right, and still no GPU arrives in a container: the message names what lacks.",
        remedy=everywhere("gpunode verify --on docker"),
        run=docker_gpus_run_probe,
        blocked_by=(
            *("pci-no-gpu", "nvml-hang", "toolkit-missing", "docker-snap", "docker-desktop"),
            *("toolkit-versions-mixed", "toolkit-config-invalid", "ldconfig-fails", "no-cgroups-wrong"),
            *("cdi-disabled", "cdi-spec-stale", "cdi-uvm-absent-in-spec"),
            *(
                "docker-not-running",
                "docker-default-runtime",
                "docker-not-restarted",
                "docker-runtime-missing",
            ),
        ),
        deep=True,
        refs=("https://docs.docker.com/engine/containers/resource_constraints/#gpu",),
    ),
)
