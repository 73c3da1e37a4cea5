"""The NVIDIA Container Toolkit, which puts GPUs into containers."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import EVERYWHERE_BUT_TEGRA, NO_ENGINE, Check, Verdict, fail, ok, seen, skip
from gpunode.checks.toolkit import remedies
from gpunode.facts.engines import docker_role
from gpunode.facts.gpu_ways import Way, dra_directory, mounting
from gpunode.facts.node import Node
from gpunode.facts.system import TEGRA
from gpunode.result import Fix
from gpunode.tables import gate

# one of these starts containers; the others are helpers and leftovers
_NEEDED = ("nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-cdi-hook")


def toolkit_missing(node: Node) -> Verdict:
    found = node.toolkit.programs
    if any(name in found for name in _NEEDED):
        return ok("the container toolkit is installed", *(seen(path, name) for name, path in found.items()))
    if node.docker is None and node.containerd is None and node.kubelet is None:
        return skip("there is no container engine on this node that would use it")
    if node.docker is not None and node.docker.manager == "snap" and docker_role(node).used:
        return skip("Docker is a snap, which brings a toolkit of its own: see docker-snap")
    alone = [
        spec for spec in node.cdi_specs if spec.serves_gpus and all(map(node.host.executable, spec.hooks))
    ]
    if alone:
        hooks = ", ".join(alone[0].hooks) or "no hooks"
        return ok("no container toolkit, and none is needed: GPUs come by CDI", seen(alone[0].path, hooks))
    place = dra_directory(node)  # that driver brings its hook along
    way = Way("GPUs are handed out by NVIDIA's DRA driver", place, "there") if place else mounting(node)
    if way is not None:
        return ok(f"no container toolkit, and none is needed: {way.summary}", seen(way.source, way.value))
    unsafe = [one for one in map(node.host.unsafe_program, _NEEDED) if one is not None]
    if unsafe:
        return fail(
            "the NVIDIA Container Toolkit's programs can be written by other users",
            *(seen(path, reason) for path, reason in unsafe),
            fix=Fix(f"namei -l {unsafe[0][0]}", needs_root=False),
        )
    looked = "none of nvidia-container-runtime, nvidia-container-runtime-hook, nvidia-cdi-hook"
    return fail("the NVIDIA Container Toolkit isn't installed", seen("PATH", looked))


def toolkit_too_old(node: Node) -> Verdict:
    version = node.toolkit.version
    if not version:
        return skip("the toolkit's version can't be told")
    text = ".".join(map(str, version))
    evidence = seen(node.toolkit.version_source, text)
    for name in _gates(node):
        least = gate("toolkit", name)
        if version < least:
            older = f"toolkit {text} is older than {'.'.join(map(str, least))}"
            return fail(older, evidence, fix=remedies.upgrade(node))
    return ok(f"toolkit {text} is new enough", evidence)


def _gates(node: Node) -> tuple[str, ...]:
    """The gates of version_gates.json that this node asks for."""
    cgroup = ("cgroup-v2",) if node.host.is_file("/sys/fs/cgroup/cgroup.controllers") else ()
    if node.kubelet is None:
        return cgroup  # the others are device plugins' needs
    return ("device-plugin", *cgroup, *(("tegra",) if node.kind == TEGRA else ()))


CHECKS = (
    Check(
        id="toolkit-missing",
        title="The container toolkit is installed",
        layer="toolkit",
        severity="error",
        looks_at=(
            "nvidia-container-runtime, nvidia-container-runtime-hook and nvidia-cdi-hook on PATH and where "
            "the GPU operator puts them; a file that is empty or not executable counts as missing. A CDI "
            "specification of kind nvidia.com/gpu without hooks needs none of them."
        ),
        why=(
            "Engines know nothing of GPUs: the toolkit adds device files and driver libraries to a "
            "container. Without it Docker says 'could not select device driver' and pods see no GPU."
        ),
        remedy=fixes.INSTALL_TOOLKIT,
        run=toolkit_missing,
        blocked_by=("pci-no-gpu", "driver-not-installed", "wsl2", "jetson"),
        classes=EVERYWHERE_BUT_TEGRA,
        unless=NO_ENGINE,
        refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html",),
    ),
    Check(
        id="toolkit-too-old",
        title="The container toolkit is new enough",
        layer="toolkit",
        severity="error",
        looks_at=(
            "nvidia-ctk --version, else that of nvidia-container-cli or nvidia-container-runtime. The least "
            "is 1.8.0 with cgroup v2, where a kubelet is 1.7.0, and 1.11.0 on Tegra."
        ),
        why=(
            "Device plugins need toolkit 1.7.0; older ones also fail on cgroup v2 with 'cgroup subsystem "
            "devices not found'."
        ),
        remedy=fixes.UPGRADE_TOOLKIT,
        run=toolkit_too_old,
        blocked_by=("toolkit-missing",),
        classes=(*EVERYWHERE_BUT_TEGRA, TEGRA),
        table="version_gates",
        refs=("https://github.com/NVIDIA/k8s-device-plugin#prerequisites",),
    ),
)
