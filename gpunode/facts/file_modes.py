"""Who may read a file. A recorded machine says so itself: a copy has the mode of whoever copied it."""

from __future__ import annotations

import stat

from gpunode.host import Host


def mode_of(host: Host, path: str) -> int | None:
    """Permission bits of what the path leads to; None if there is nothing, or nothing is recorded."""
    if not host.live:
        recorded = host.recorded("modes", path)
        return int(recorded, 8) if recorded is not None else None
    found = host.stat(path)
    return stat.S_IMODE(found.st_mode) if found is not None else None
