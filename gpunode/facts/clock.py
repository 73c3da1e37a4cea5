"""What time this machine believes it is."""

from __future__ import annotations

from gpunode.facts.processes import boot_time, uptime
from gpunode.host import Host

NOT_BEFORE = 1735689600  # 2025-01-01: no gpunode is older


def clock(host: Host) -> float:
    """Seconds since the epoch as the machine's own clock has it; on a recorded machine when it was recorded,
    0 if that can't be told."""
    if host.live:
        return host.now()
    boot, seconds = boot_time(host), uptime(host)
    return boot + seconds if boot and seconds else 0.0
