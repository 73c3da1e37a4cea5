"""Whether those who call the toolkit find it, once and not twice, and what it says when called."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.devices.persistence import keep_initialised
from gpunode.checks.model import HOST, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.checks.toolkit.ways import cli_user
from gpunode.errors import ConfigError
from gpunode.facts.engines import crio_role, docker_role, podman_role
from gpunode.facts.node import Node
from gpunode.facts.oci_hooks import SYSTEM_DIRECTORIES, nvidia_hooks
from gpunode.facts.processes import environment
from gpunode.host import COMMAND_NOT_FOUND
from gpunode.result import Fix

# what dockerd looks for on its own PATH when it starts, to serve --gpus
_HOOKS = ("nvidia-container-runtime-hook", "nvidia-cdi-hook")
# the GPU operator's, who gives Docker the whole path of a runtime instead
_OPERATOR = ("/usr/local/nvidia/toolkit/", "/run/nvidia/toolkit/")
_CLI = "nvidia-container-cli"
_CLI_SECONDS = 15.0
_SLOW = "driver rpc error: timed out"
# what nvidia-container-cli says, and what that means
_SAYINGS = (
    (
        _SLOW,
        "the driver takes too long to wake the GPUs: nvidia-persistenced isn't on",
    ),
    ("driver not loaded", "it doesn't see the kernel module"),
    ("driver/library version mismatch", "the module and the libraries are of different releases"),
    ("load library failed", "it doesn't find a library of the driver"),
    ("ldcache error", "it can't read the cache of ldconfig"),
    ("cgroup subsystem devices not found", "it is too old for cgroup v2"),
    ("bpf_prog_query", "it may not set device permissions"),
    ("unrecognized option", "its packages are of different releases"),
    ("symbol lookup error", "its packages are of different releases"),
    ("overflowuid", "it can't read /proc"),
)


def toolkit_not_on_daemon_path(node: Node) -> Verdict:
    docker, role = node.docker, docker_role(node)
    if docker is None or docker.process is None or not role.used or docker.manager:
        return skip("no Docker of the system's runs here")
    path = environment(node.host, docker.process.pid).get("PATH", "")
    if not path:
        return skip("dockerd's PATH can't be told")
    places = path.split(":")
    found = {name: node.toolkit.programs[name] for name in _HOOKS if name in node.toolkit.programs}
    if all(path.startswith(_OPERATOR) for path in found.values()):
        return skip("there is no hook of the toolkit's that Docker would look for")
    if any(node.host.executable(f"{place}/{name}") for place in places for name in _HOOKS):
        return ok("dockerd finds the toolkit on its PATH")
    process = f"/proc/{docker.process.pid}/environ"
    place = next(iter(found.values())).rpartition("/")[0]
    unit = docker.unit or "docker.service"
    drop = f"/etc/systemd/system/{unit}.d/10-path.conf"
    text = f"[Service]\\nEnvironment=PATH={path}:{place}\\n"
    command = (
        f"mkdir -p {drop.rpartition('/')[0]} && printf '{text}' > {drop} && "
        f"systemctl daemon-reload && systemctl restart {unit}"
    )
    evidence = (seen(where, "installed") for where in found.values())
    return warn(
        f"dockerd's PATH has no {place}, where the toolkit is",
        seen(process, f"PATH={path}"),
        *evidence,
        fix=Fix(command, disruptive="restart"),
    )


def hook_conflict(node: Node) -> Verdict:
    if not podman_role(node).used and not crio_role(node).used:
        return skip("neither podman nor CRI-O, which run hooks, is this node's engine")
    directories = dict.fromkeys((*SYSTEM_DIRECTORIES, *_podman_directories(node)))
    hooks = nvidia_hooks(node.host, directories)
    # the others tell the hook to leave their containers alone
    specs = [spec for spec in node.cdi_specs if spec.serves_gpus and not spec.stills_toolkit]
    if not hooks:
        return ok("no OCI hook puts GPUs into containers")
    evidence = [seen(hook.path, f"runs {hook.program}") for hook in hooks]
    if not specs:
        return ok("GPUs come by an OCI hook, which leaves those alone that come by CDI", *evidence)
    fix = Fix(" && ".join(f"mv {hook.path} {hook.path}.disabled" for hook in hooks))
    return warn("GPUs come by an OCI hook and by CDI", *evidence, seen(specs[0].path, specs[0].kind), fix=fix)


def _podman_directories(node: Node) -> tuple[str, ...]:
    try:
        return node.podman_files.strings("hooks_dir") if node.podman is not None else ()
    except ConfigError:
        return ()  # podman passes over such a file


def toolkit_cli_probe(node: Node) -> Verdict:
    """Without --load-kmods, which would load modules and make device files."""
    if not node.host.live and node.host.recorded("commands", f"{_path(node)} info") is None:
        return skip("what nvidia-container-cli says wasn't recorded")
    if node.module is None or node.nvml.inventory is None:
        return skip("the driver gives no answer, so its container program has none either")
    if not node.host.is_root and node.host.live:
        return skip("needs root: nvidia-container-cli is asked as an engine would", "unreadable")
    done = node.host.run([_path(node), "info"], timeout=_CLI_SECONDS)
    if done.ok or done.code == COMMAND_NOT_FOUND:
        return ok("nvidia-container-cli sees the driver")
    if done.timed_out:
        return fail(
            f"nvidia-container-cli gave no answer within {_CLI_SECONDS:g} s",
            seen(f"{_CLI} info", "no answer"),
        )
    told = " ".join(done.stderr.split())[-300:]
    meaning = next(
        (means for saying, means in _SAYINGS if saying in told), "it doesn't work with this driver"
    )
    evidence = seen(f"{_CLI} info", told or f"exit {done.code}")
    fix = keep_initialised(node) if _SLOW in told else None
    return fail(f"nvidia-container-cli fails: {meaning}", evidence, fix=fix)


def _path(node: Node) -> str:
    return node.toolkit.programs.get(_CLI, _CLI)


def toolkit_cli(node: Node) -> Verdict:
    if _CLI not in node.toolkit.programs:
        return skip("nvidia-container-cli isn't installed")
    user = cli_user(node)
    return toolkit_cli_probe(node) if user else skip("no engine of this node calls nvidia-container-cli")


CHECKS = (
    Check(
        id="toolkit-not-on-daemon-path",
        title="dockerd finds the toolkit",
        layer="toolkit",
        severity="warning",
        looks_at="PATH in dockerd's own environment, and where the toolkit's hook programs are.",
        why=(
            "Docker looks for the toolkit on its own PATH, once, when it starts. What lies elsewhere it "
            "doesn't find: 'could not select device driver \"\" with capabilities: [[gpu]]'."
        ),
        remedy=fixes.START_DOCKER,
        run=toolkit_not_on_daemon_path,
        blocked_by=("toolkit-missing", "docker-not-running"),
        needs=("docker",),
        refs=("https://github.com/moby/moby/blob/master/daemon/devices_nvidia_linux.go",),
    ),
    Check(
        id="hook-conflict",
        title="GPUs are put into containers once",
        layer="toolkit",
        severity="warning",
        looks_at=(
            f"hooks of NVIDIA's in {', '.join(SYSTEM_DIRECTORIES)} where podman or CRI-O is the engine, and "
            "CDI specifications that don't set NVIDIA_VISIBLE_DEVICES=void for the hook."
        ),
        why=(
            "Podman and CRI-O run the hook for every container that CDI has already given its GPUs to. The "
            "same files are mounted twice, and the container fails to start."
        ),
        remedy=fixes.everywhere(f"ls {' '.join(SYSTEM_DIRECTORIES)}"),
        run=hook_conflict,
        blocked_by=("pci-no-gpu", "toolkit-missing"),
        classes=HOST,
        refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
    ),
    Check(
        id="toolkit-cli-probe",
        title="nvidia-container-cli sees the driver",
        layer="toolkit",
        severity="error",
        looks_at=(
            "nvidia-container-cli info, in a child that is given 15 seconds, where an engine calls it: only "
            "on --deep, since it wakes every GPU."
        ),
        why="Docker's --gpus and the runtime in mode legacy call it for each container, and get the same.",
        remedy=fixes.everywhere("nvidia-container-cli -d /dev/stderr info"),
        run=toolkit_cli,
        blocked_by=(
            *("module-not-loaded", "driver-lib-mismatch", "libnvidia-ml-missing", "libcuda-missing"),
            *("dev-nodes-missing", "uvm-not-loaded", "nvml-hang", "toolkit-missing", "toolkit-too-old"),
            *("toolkit-versions-mixed", "toolkit-config-invalid", "ldconfig-fails"),
        ),
        classes=HOST,
        deep=True,
        refs=(
            "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html",
        ),
    ),
)
