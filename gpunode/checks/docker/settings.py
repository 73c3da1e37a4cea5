"""Docker's settings: keys that it doesn't know, a default runtime that is gone, a second cgroup driver."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.docker import remedies
from gpunode.checks.docker.file import line_of
from gpunode.checks.model import ENGINE_NODES, NO_ENGINE, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker_keys import TABLE, unknown_keys
from gpunode.facts.docker_runtimes import nvidia_programs, programs
from gpunode.facts.engines import docker_role
from gpunode.facts.node import Node
from gpunode.result import Fix


def docker_unknown_key(node: Node) -> Verdict:
    if node.docker is None:
        return skip(docker_role(node).reason)
    try:
        config = node.docker_config
    except ConfigError:
        return skip("Docker's file can't be parsed: see docker-config-invalid-json")
    keys = unknown_keys(node.host, node.docker, config)
    if keys is None:
        return skip("dockerd couldn't be asked about a setting that isn't in our list")
    if not keys:
        return ok("Docker knows every setting in its file")
    path = node.docker.config_path
    text = node.host.read_text(path) or ""
    places = [seen(path, f'"{key}"', line_of(text, f'"{key}"')) for key in keys]
    judge = fail if docker_role(node).used else warn
    fix = remedies.edit(node.docker, places[0].line)
    return judge(f"Docker has no setting {', '.join(keys)}", *places, fix=fix)


def docker_default_runtime(node: Node) -> Verdict:
    role = docker_role(node)
    if node.docker is None or not role.used:
        return skip(role.reason)
    try:
        info = node.docker_info
    except DaemonError as error:
        return skip(f"Docker doesn't say what it runs with: {error.message}")
    name = str(info.get("DefaultRuntime") or "")
    program = programs(info, "Runtimes").get(name, "")
    judged = name in nvidia_programs(info, "Runtimes") or program.startswith("/")
    if not judged or not program or node.host.which(program):
        return ok(f"the default runtime is {name or 'not told'}")
    path = node.docker.config_path
    line = line_of(node.host.read_text(path) or "", '"default-runtime"')
    told = seen(f"{node.docker.socket} /info", f"DefaultRuntime {name}: {program}")
    evidence = [seen(path, f'"default-runtime": "{name}"', line)] if line else []
    elsewhere = "nvidia-container-runtime" in node.toolkit.programs
    return fail(
        f"the program of Docker's default runtime {name} is missing, so that no container starts at all",
        *evidence,
        told,
        fix=None if elsewhere else remedies.edit(node.docker, line),
    )


def docker_cgroup_driver_mismatch(node: Node) -> Verdict:
    kubelet = node.kubelet
    if node.docker is None or kubelet is None or not kubelet.joined or kubelet.engine != "docker":
        return skip("no kubelet uses Docker here")
    try:
        docker = node.docker_info.get("CgroupDriver")
    except DaemonError as error:
        return skip(f"Docker doesn't say what it runs with: {error.message}")
    if kubelet.cgroup_driver is None or docker not in ("systemd", "cgroupfs"):
        return skip("the cgroup driver of Docker or of the kubelet can't be told")
    told = seen(f"{node.docker.socket} /info", f"CgroupDriver {docker}")
    if docker == kubelet.cgroup_driver:
        return ok(f"Docker and the kubelet use the cgroup driver {docker}", told)
    return fail(
        "Docker and the kubelet don't use the same cgroup driver: its exec-opts need "
        f"native.cgroupdriver={kubelet.cgroup_driver}",
        told,
        seen("KubeletConfiguration cgroupDriver", kubelet.cgroup_driver),
        fix=_same_driver(node, node.docker),
    )


def _same_driver(node: Node, docker: Daemon) -> Fix:
    """Docker is brought to the kubelet's driver: the other way round every pod would have to go."""
    text = node.host.read_text(docker.config_path) or ""
    return remedies.edit(docker, line_of(text, "native.cgroupdriver"))


CHECKS = (
    Check(
        id="docker-unknown-key",
        title="Docker knows every setting in its file",
        layer="docker",
        severity="error",
        looks_at=(
            "the keys of daemon.json. One that isn't in our list is put to dockerd --validate, which only "
            "reads the file. Where the kubelet uses another engine this is a warning."
        ),
        why=(
            "dockerd refuses to start with a setting that it doesn't know, such as default_runtime or "
            "runtime for default-runtime and runtimes; a running one lives on with what it read before."
        ),
        remedy=fixes.EDIT_DAEMON_JSON,
        run=docker_unknown_key,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=("pci-no-gpu", "docker-config-invalid-json"),
        preflight=("docker",),
        reboot=True,  # a running Docker lives on with what it read before
        refs=("https://docs.docker.com/reference/cli/dockerd/#daemon-configuration-file",),
        table=TABLE,
    ),
    Check(
        id="docker-default-runtime",
        title="Docker's default runtime is there",
        layer="docker",
        severity="error",
        looks_at=(
            "the default runtime of the running daemon (/info) and its program, where Docker is this "
            "node's engine."
        ),
        why=(
            "A default runtime that was left behind when its program went keeps every container from "
            'starting, with or without GPUs: exec: "nvidia-container-runtime": executable file not found.'
        ),
        remedy=remedies.CONFIGURE_DEFAULT,
        run=docker_default_runtime,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=(
            "pci-no-gpu",
            "toolkit-missing",
            "docker-snap",
            "docker-not-running",
            "docker-not-restarted",
        ),
        refs=("https://docs.docker.com/reference/cli/dockerd/#default-runtime",),
    ),
    Check(
        id="docker-cgroup-driver-mismatch",
        title="Docker and the kubelet use one cgroup driver",
        layer="docker",
        severity="error",
        looks_at="CgroupDriver of the running daemon (/info) and cgroupDriver of a kubelet that uses Docker.",
        why=(
            "The kubelet refuses to start, or its pods are killed, when Docker keeps cgroups in another way: "
            'kubelet cgroup driver: "systemd" is different from docker cgroup driver: "cgroupfs".'
        ),
        remedy=fixes.EDIT_DAEMON_JSON,
        run=docker_cgroup_driver_mismatch,
        classes=ENGINE_NODES,
        unless=NO_ENGINE,
        blocked_by=("pci-no-gpu", "docker-not-running"),
        refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/#cgroup-drivers",),
    ),
)
