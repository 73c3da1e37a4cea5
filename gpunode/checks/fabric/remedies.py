"""What mends the fabric, MIG layouts and virtual GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from gpunode.checks import fixes
from gpunode.checks.driver import targets
from gpunode.checks.health import told
from gpunode.facts.driver import version_numbers
from gpunode.facts.fabric_manager import IB_UMAD, package_version
from gpunode.facts.node import Node
from gpunode.facts.traits import TRAITS
from gpunode.gpu.condition import Condition
from gpunode.result import Fix

_ENABLE = "systemctl enable --now nvidia-fabricmanager"
# a running manager loads the new version only when it restarts
_RESTART = "systemctl enable nvidia-fabricmanager && systemctl restart nvidia-fabricmanager"
_HOLDERS = ("nvidia-persistenced", "nvidia-dcgm")
_ONE_NAME = 580  # the first branch whose package has one name in all of NVIDIA's repositories
_VERSION = "$(cat /sys/module/nvidia/version)"

# apt takes a pattern for the packager's revision
MATCHING_MANAGER = fixes.per_family(
    f'apt install "nvidia-fabricmanager={_VERSION}*" && {_RESTART}',
    f"dnf install nvidia-fabricmanager-{_VERSION} && {_RESTART}",
    f"zypper install nvidia-fabricmanager={_VERSION} && {_RESTART}",
    "follow https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
    "restart",
)
START_MANAGER = fixes.everywhere(_ENABLE, "restart")
_LAYOUT = "/etc/gpunode-mig.yaml"
KEEP_LAYOUT = fixes.everywhere(
    f"gpunode mig export > {_LAYOUT} && gpunode mig apply --config-file {_LAYOUT} --persist"
)
MIXED_STRATEGY = fixes.everywhere(fixes.tell_plugin("MIG_STRATEGY=mixed"), needs_root=False)
# what the operator has set up it sets back
OPERATORS_STRATEGY = Fix(
    "kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge "
    """--patch '{"spec": {"mig": {"strategy": "mixed"}}}'""",
    False,
)
# guests get their driver from whoever runs the host, not from a public repository
GUEST_DRIVER = fixes.everywhere("follow https://docs.nvidia.com/vgpu/")
RESET = fixes.everywhere("nvidia-smi --gpu-reset", "drain")
DRIVER_PODS = fixes.everywhere(
    "kubectl get pods --all-namespaces --output wide --selector app.kubernetes.io/component=nvidia-driver",
    needs_root=False,
)
READ_MANAGER_LOG = fixes.everywhere("journalctl -b -u nvidia-fabricmanager -n 50")


def matching_manager(node: Node, version: str) -> Fix | None:
    """The package of exactly the loaded driver's version, under the name that it has here; None where that
    can't be told."""
    numbers = version_numbers(version)
    if not numbers:
        return None
    name = _manager_package(node, numbers[0])
    command = {
        "debian": f"apt install '{name}={version}*'",
        "rhel": f"dnf install {name}-{version}",
        "suse": f"zypper install --oldpackage {name}={version}",
    }.get(node.distribution.family)
    return Fix(f"{command} && {_RESTART}", True, "restart") if command else None


def _manager_package(node: Node, branch: int) -> str:
    """As it is installed, if it is of this branch. Ubuntu's archive names the branch, NVIDIA's repositories
    do so for apt, or write the name otherwise for rpm, up to 575."""
    installed = package_version(node.packages)
    if installed is not None and version_numbers(installed[1])[:1] == (branch,):
        return installed[0]
    if node.distribution.family != "debian":
        return "nvidia-fabricmanager" if branch >= _ONE_NAME else "nvidia-fabric-manager"
    archive = node.distribution.id == "ubuntu" and not targets.has_repository(node)
    named = branch < _ONE_NAME or archive or targets.from_ubuntu(node, branch)
    return f"nvidia-fabricmanager-{branch}" if named else "nvidia-fabricmanager"


def missing_manager(node: Node) -> Fix | None:
    """The GPU operator's driver brings its own: what became of it is for its pod to tell."""
    if TRAITS["operator-driver"].holds(node):
        return DRIVER_PODS.other
    return matching_manager(node, node.module.version if node.module else "")


def complete_manager(node: Node, needs: tuple[str, ...]) -> Fix | None:
    """What the fabric manager of a Blackwell baseboard stands on: packages, and the module ib_umad."""
    install = {"debian": "apt install", "rhel": "dnf install", "suse": "zypper install"}
    tool = install.get(node.distribution.family)
    packages = " ".join(need for need in needs if need != IB_UMAD)
    if packages and tool is None:
        return None
    steps = [f"{tool} {packages}"] if packages else []
    steps += [f"modprobe {IB_UMAD}"] if IB_UMAD in needs else []
    return Fix(" && ".join((*steps, _ENABLE)), True, "restart")


def reset(node: Node, gpus: Iterable[Condition]) -> Fix:
    """Reset these, once nobody uses them: services that only watch GPUs hold them as well."""
    units = (node.units.get(f"{name}.service") for name in _HOLDERS)
    running = " ".join(unit.name.removesuffix(".service") for unit in units if unit is not None and unit.runs)
    plain = told.reset(node, tuple(gpus))
    if not running or plain.disruptive != "drain":
        return plain
    return Fix(f"systemctl stop {running} && {plain.command}; systemctl start {running}", True, "drain")
