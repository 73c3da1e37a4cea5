"""Specifications that a reboot clears away: whether anybody writes them again."""

from __future__ import annotations

from gpunode.checks.cdi.readers import readers
from gpunode.checks.fixes import everywhere
from gpunode.checks.model import Check, Verdict, ok, seen, skip, warn
from gpunode.facts.node import Node
from gpunode.result import Fix

_VOLATILE = ("/run/", "/var/run/")
_WRITERS = ("nvidia-cdi-refresh.service", "gpunode-cdi-refresh.service")
_COMMANDS = ("cdi generate", "cdi refresh", "cdi-refresh")


def cdi_lost_at_reboot(node: Node) -> Verdict:
    specs = [spec for spec in node.cdi_specs if spec.serves_gpus]
    lost = [spec for spec in specs if spec.path.startswith(_VOLATILE)]
    if not lost:
        return skip("no CDI specification for GPUs lies where a reboot clears it away")
    if len(lost) < len(specs):
        return ok("another specification outlives a reboot")
    if not readers(node):
        return skip("no engine here reads CDI specifications")
    writer = _writer(node)
    if writer:
        return ok("the specification is written again after a reboot", seen(writer, "writes it"))
    if _WRITERS[0] not in node.units:
        return skip(f"systemd doesn't tell of {_WRITERS[0]}")
    states = ((name, node.units.get(name)) for name in _WRITERS)
    found = [seen(name, str(state)) for name, state in states if state is not None]
    return warn(
        f"{lost[0].path} is gone after the next reboot, and nothing writes it again",
        *(seen(spec.path, f"{spec.kind}, in a file system that lives in memory") for spec in lost),
        *found,
        fix=_enable(node),
    )


def _writer(node: Node) -> str:
    from gpunode.facts import next_boot

    for name in _WRITERS:
        unit = node.units.get(name)
        if unit is not None and (unit.at_boot or unit.file == "static"):
            return name
    if node.host.is_dir(next_boot.OPERATOR):
        return next_boot.OPERATOR
    return next_boot.started(node.host, _COMMANDS, besides=_WRITERS[:1], rules=True)


def _enable(node: Node) -> Fix | None:
    """NVIDIA's own units, where the toolkit brought them."""
    unit = node.units.get(_WRITERS[0])
    if unit is None or not unit.installed or unit.load == "masked":
        return None
    return Fix(f"systemctl enable --now {_WRITERS[0]} nvidia-cdi-refresh.path")


CHECKS = (
    Check(
        id="cdi-lost-at-reboot",
        title="CDI specifications outlive a reboot",
        layer="cdi",
        severity="warning",
        looks_at=(
            "specifications for GPUs in /var/run/cdi, where an engine reads them, and who writes them at "
            "boot: NVIDIA's or gpunode's unit, the GPU operator, a unit, crontab or rule of this node."
        ),
        why=(
            "/var/run lives in memory. After the reboot the file isn't there, and containers that ask for "
            "GPUs by CDI fail with 'unresolvable CDI devices' until somebody writes it again."
        ),
        remedy=everywhere("gpunode cdi refresh --install"),
        run=cdi_lost_at_reboot,
        blocked_by=("module-not-loaded", "cdi-spec-stale"),
        unless=("operator-driver", "immutable"),
        refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
        reboot=True,
    ),
)
