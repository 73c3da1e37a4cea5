"""Who made a container or an image of ours, so that a later run can clear up after one that was killed.

Everything made for a verification carries its maker: boot, PID namespace, pid and start time. Only what this
very kernel says is dead counts as left over; a maker in another PID namespace can't be judged from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpunode.errors import GpunodeError
from gpunode.host import Host

RUN_LABEL = "gpunode.run"
MAKER_LABEL = "gpunode.maker"
OURS: Mapping[str, str] = {RUN_LABEL: "verify"}
VERIFICATION = "gpunode.local/verify"
STAND_IN = "gpunode.local/stand-in"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MAKER = r"[0-9a-f]{8}-\d+-\d+-\d+"


def maker(host: Host) -> str:
    """This process: ``BOOT-NAMESPACE-PID-START``, START in clock ticks since the boot (proc(5))."""
    pid, _, rest = (host.read_text("/proc/self/stat") or "").partition(" ")
    return f"{_boot(host)}-{_namespace(host)}-{pid}-{_start(rest)}"


def labels(host: Host) -> dict[str, str]:
    """What a container or an image of this run carries."""
    return {**OURS, MAKER_LABEL: maker(host)}


def maker_of_image(reference: str) -> str:
    """The maker in the name of an image of ours, ``gpunode.local/WHAT:...MAKER-TOKEN``; "" for any other."""
    names = "|".join(map(re.escape, (VERIFICATION, STAND_IN)))
    found = re.fullmatch(rf"(?:{names}):(?:[0-9a-f]+-)?({_MAKER})-[0-9a-f]+", reference, re.ASCII)
    return found[1] if found else ""


def is_dead(host: Host, who: str) -> bool:
    """Whether that maker surely runs no more."""
    if not re.fullmatch(_MAKER, who, re.ASCII):
        return False
    boot, namespace, pid, start = who.split("-")
    if namespace != _namespace(host):
        return False  # another namespace's pids; it may even show a boot id of its own (systemd-nspawn does)
    if boot != _boot(host):
        return True
    if not host.exists("/proc/1/stat"):
        return False  # a /proc that hides other users' processes (hidepid)
    try:
        stat = host.read_text(f"/proc/{pid}/stat")
    except GpunodeError:
        return False
    return stat is None or _start(stat) != start


def _boot(host: Host) -> str:
    return (host.read_text(_BOOT_ID) or "").strip()[:8] or "0" * 8


def _namespace(host: Host) -> str:
    """The number in ``pid:[4026531836]``."""
    return re.sub(r"\D", "", host.readlink("/proc/self/ns/pid") or "") or "0"


def _start(stat: str) -> str:
    """The 22nd field; counting starts behind the name, which may hold spaces and brackets."""
    fields = stat.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else "0"
