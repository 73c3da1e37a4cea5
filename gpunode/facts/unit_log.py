"""The last line that a unit's own processes wrote to systemd's journal in this boot."""

from __future__ import annotations

from gpunode.host import Host

COMMAND = ("journalctl", "-b", "-q", "-n", "1", "--no-pager", "-o", "cat")
_SECONDS = 3.0


def last_line(host: Host, unit: str) -> str:
    """Empty if there is none, or if this user may not read it.

    By the field that journald sets itself (systemd.journal-fields(7)): `-u` would also match systemd's own
    messages about the unit, and the last of those only says that it failed.
    """
    done = host.run((*COMMAND, f"_SYSTEMD_UNIT={unit}"), timeout=_SECONDS)
    lines = done.stdout.split("\n") if done.ok else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
