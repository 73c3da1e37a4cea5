"""systemd units that come and go with a change: enabled after their files, disabled before them."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.errors import DaemonError
from gpunode.facts.daemons import systemd_runs
from gpunode.host import Host

_SECONDS = 60.0


def enable(host: Host, units: Sequence[str]) -> None:
    """Let systemd read the new files, then enable and start the units. `DaemonError` if it refuses."""
    if not units or not _acts(host):
        return
    for argv in (("systemctl", "daemon-reload"), ("systemctl", "enable", "--now", *units)):
        answer = host.run(argv, timeout=_SECONDS)
        if not answer.ok:
            said = (answer.stderr or answer.stdout).strip()[-500:]
            raise DaemonError(f"{' '.join(argv)} failed: {said or f'status {answer.code}'}")


def disable(host: Host, units: Sequence[str]) -> None:
    """Stop and disable the units while their files are still there; one that isn't enabled is fine."""
    if units and _acts(host):
        host.run(("systemctl", "disable", "--now", *units), timeout=_SECONDS)


def forget(host: Host, units: Sequence[str]) -> None:
    """Let systemd notice that the files of the units are gone."""
    if units and _acts(host):
        host.run(("systemctl", "daemon-reload"), timeout=_SECONDS)


def _acts(host: Host) -> bool:
    return host.live and systemd_runs(host)
