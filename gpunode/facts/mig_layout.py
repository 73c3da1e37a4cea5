"""MIG layouts: which GPUs are partitioned, who makes the partitions again, and drivers that get it wrong.

The driver forgets MIG's instances with every boot (NVIDIA's MIG user guide); mig-parted's unit or the GPU
operator's MIG manager makes them again, or a script of the node's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunode.errors import GpunodeError
from gpunode.facts.driver import version_numbers
from gpunode.tables import table

if TYPE_CHECKING:
    from gpunode.facts.node import Node
    from gpunode.gpu.model import Gpu

UNIT = "nvidia-mig-manager.service"
FAULTS = "mig_driver_faults"
_OPERATOR = "nvidia-mig-manager"  # the program in the operator's pod
_COMMANDS = ("nvidia-mig-parted", "nvidia-smi mig", "mig -cgi", "mig --create-gpu-instance")
# where a node's own scripts are started from: directory and pattern
_PLACES = (
    *(("/etc/systemd/system", "*.service"), ("/usr/local/lib/systemd/system", "*.service")),
    *(("/etc/cron.d", "*"), ("/etc", "crontab"), ("/etc", "rc.local"), ("/etc/rc.d", "rc.local")),
    *(("/var/spool/cron", "root"), ("/var/spool/cron/crontabs", "root"), ("/var/spool/cron/tabs", "root")),
)
_SCRIPTS = ("/usr/local/", "/opt/", "/root/", "/etc/", "/srv/", "/home/")
_LONGEST = 256 << 10  # bytes; a script is shorter, a program isn't


def partitioned(node: Node) -> list[Gpu]:
    """GPUs with MIG on, as NVML lists them; those that it can't be asked about are left out."""
    inventory = node.nvml.inventory
    return [gpu for gpu in inventory.gpus if gpu.mig_enabled and not gpu.error] if inventory else []


def keeper(node: Node) -> str:
    """Who makes the instances again after a reboot: a unit, a process or a file; empty if nobody does."""
    unit = node.units.get(UNIT)
    if unit is not None and (unit.at_boot or unit.file == "static"):
        return UNIT
    for process in node.processes:
        if process.name == _OPERATOR:
            return f"process {process.pid}, {_OPERATOR}"
    return next((path for path in _own(node) if _makes(node, path)), "")


def _own(node: Node) -> list[str]:
    return [path for place, pattern in _PLACES for path in node.host.glob(place, pattern)]


def _makes(node: Node, path: str, depth: int = 0) -> bool:
    """Whether a unit, a crontab or a script it starts makes MIG instances. mig-parted's own unit is asked of
    systemd; one that is there and off makes nothing."""
    if path.endswith(f"/{UNIT}"):
        return False
    try:
        size = node.host.stat(path)
        text = (node.host.read_text(path) or "") if size is not None and size.st_size <= _LONGEST else ""
    except GpunodeError:
        return True  # who can't look mustn't say that nobody does
    if any(command in text for command in _COMMANDS) or depth:
        return any(command in text for command in _COMMANDS)
    words = (word.removeprefix("ExecStart=").strip("\"'-@!+:;()&|") for word in text.split())
    scripts = dict.fromkeys(word for word in words if word.startswith(_SCRIPTS))
    return any(_makes(node, script, 1) for script in list(scripts)[:20] if node.host.is_file(script))


def known_fault(version: str) -> str | None:
    """The first release without the fault, for a driver that the table names; None for any other."""
    here = version_numbers(version)
    for row in table(FAULTS).rows:
        if version_numbers(row["first"]) <= here <= version_numbers(row["last"]):
            return str(row["fixed"])
    return None
