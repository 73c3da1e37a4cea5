"""What the next boot doesn't bring back: modules that were loaded by hand, links to device files."""

from __future__ import annotations

from gpunode.checks.cdi.readers import readers
from gpunode.checks.cdi.reboot import cdi_lost_at_reboot
from gpunode.checks.driver import remedies
from gpunode.checks.model import Check, Verdict, ok, seen, skip, warn
from gpunode.errors import GpunodeError
from gpunode.facts import driver
from gpunode.facts.node import Node
from gpunode.facts.toolkit_settings import MODE
from gpunode.result import FindingStatus

_UVM = "nvidia_uvm"
# units that load unified memory or make its device files when they start
_LOADERS = ("nvidia-cdi-refresh.service", "gpunode-cdi-refresh.service")
_LINKS = ("create-dev-char-symlinks",)


def uvm_lost_at_reboot(node: Node) -> Verdict:
    from gpunode.facts.next_boot import loaded

    if not driver.module_loaded(node.host, _UVM):
        return skip(f"{_UVM} isn't loaded now")
    cdi_alone = [one.name for one in readers(node) if one.needs]
    if not cdi_alone and _mode(node) != "cdi":
        return ok("the toolkit loads it for the first container that needs it")
    for name in _LOADERS:
        unit = node.units.get(name)
        if unit is not None and (unit.at_boot or unit.file == "static"):
            return ok(f"{name} loads it at boot")
    loader = _operator(node) or loaded(node.host, "nvidia-uvm")
    if loader:
        return ok(f"{_UVM} comes with the next boot", seen(loader, "has it loaded"))
    if not node.units:
        return skip("systemd doesn't tell what it starts at boot")
    if cdi_lost_at_reboot(node).status is FindingStatus.WARN:
        return skip("who writes the specification again loads it too")
    return warn(
        f"nothing loads {_UVM} after the next reboot, and GPUs come by CDI alone here",
        seen(f"/sys/module/{_UVM}", "loaded now"),
        seen("/etc/modules-load.d", f"no {_UVM}"),
    )


def _mode(node: Node) -> object:
    try:
        return node.toolkit_settings.value(MODE)
    except GpunodeError:
        return ""  # toolkit-config-invalid tells it


def _operator(node: Node) -> str:
    from gpunode.facts.next_boot import OPERATOR

    return OPERATOR if node.host.is_dir(OPERATOR) else ""


def dev_char_lost_at_reboot(node: Node) -> Verdict:
    from gpunode.facts.next_boot import started
    from gpunode.facts.systemd_groups import systemd_engines

    links = (f"/dev/char/{one.major}:{one.minor}" for one in node.device_nodes)
    here = [link for link in links if node.host.is_symlink(link)]
    if not here:
        return skip("no NVIDIA device file has a link in /dev/char")
    needing = [one for one in systemd_engines(node) if one.forgets and not one.by_hook]
    if not needing:
        return ok("no engine here needs the links in /dev/char")
    maker = _operator(node) or started(node.host, _LINKS, rules=True)
    if maker:
        return ok("the links come back with the next boot", seen(maker, "makes them"))
    return warn(
        f"nothing makes the {len(here)} links of NVIDIA's device files again after a reboot",
        seen(here[0], node.host.readlink(here[0]) or ""),
        seen(needing[0].source, needing[0].forgets),
        seen("/etc/udev/rules.d", f"no rule with {_LINKS[0]}"),
    )


CHECKS = (
    Check(
        id="uvm-lost-at-reboot",
        title="Unified memory comes with the next boot",
        layer="devices",
        severity="warning",
        looks_at=(
            "where containers get GPUs by CDI alone: modules-load.d, modprobe.d, udev's rules, units and "
            "scripts that load nvidia_uvm."
        ),
        why=(
            "The kernel doesn't load nvidia_uvm by itself. Without the toolkit's hook nobody does it for a "
            "container: after the reboot CUDA fails with error 999 in the first ones."
        ),
        remedy=remedies.LOAD_AT_BOOT,
        run=uvm_lost_at_reboot,
        blocked_by=("module-not-loaded", "uvm-not-loaded"),
        unless=("operator-driver", "immutable"),
        reboot=True,
        refs=("https://www.freedesktop.org/software/systemd/man/latest/modules-load.d.html",),
    ),
    Check(
        id="dev-char-lost-at-reboot",
        title="The links in /dev/char come with the next boot",
        layer="devices",
        severity="warning",
        looks_at=(
            "links in /dev/char to NVIDIA's device files, where a runc from 1.1.3 to 1.1.6 needs them, and "
            "what makes them at boot: a rule of udev, a unit or script of this node, the GPU operator."
        ),
        why=(
            "This runc tells systemd of a container's device files by these links. They are there now and "
            "lie in memory: after the reboot each daemon-reload takes the GPUs from running containers."
        ),
        remedy=remedies.LINK_AT_BOOT,
        run=dev_char_lost_at_reboot,
        blocked_by=("module-not-loaded", "dev-nodes-missing"),
        unless=("operator-driver", "immutable"),
        refs=("https://github.com/opencontainers/runc/issues/3708",),
        reboot=True,
    ),
)
