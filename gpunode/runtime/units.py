"""systemd units that come and go with a change: enabled after their files, disabled before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError
from gpunode.facts.daemons import systemd_runs
from gpunode.host import Host
from gpunode.journal import Entry
from gpunode.runtime.engine import FileEdit

_SECONDS = 60.0
# takes the lock that whoever installs it holds, and has nothing to do before the next boot
_NOT_NOW = frozenset({"gpunode-mig.service"})


@dataclass(frozen=True)
class Moves:
    """What a change of files means for units: those to enable, to disable, and only to be read anew."""

    coming: tuple[str, ...] = ()
    going: tuple[str, ...] = ()
    staying: tuple[str, ...] = ()

    def prepare(self, host: Host) -> None:
        """Before the files change: a unit can be stopped and disabled only while its file is there.

        One that isn't enabled is fine.
        """
        if self.going and _acts(host):
            host.run(("systemctl", "disable", "--now", *self.going), timeout=_SECONDS)

    def settle(self, host: Host) -> None:
        """After the files have changed. `DaemonError` if systemd refuses a unit that comes."""
        if not _acts(host) or not (self.coming or self.going or self.staying):
            return
        commands: list[tuple[str, ...]] = [("systemctl", "daemon-reload")]
        now = tuple(unit for unit in self.coming if unit not in _NOT_NOW)
        later = tuple(unit for unit in self.coming if unit in _NOT_NOW)
        commands += [("systemctl", "enable", "--now", *now)] if now else []
        commands += [("systemctl", "enable", *later)] if later else []
        for argv in commands:
            answer = host.run(argv, timeout=_SECONDS)
            if not answer.ok and self.coming:
                said = (answer.stderr or answer.stdout).strip()[-500:]
                raise DaemonError(
                    f"{' '.join(argv)} failed: {said or f'status {answer.code}'}",
                    hint=f"look at them: systemctl status {' '.join(self.coming)}",
                )


def forth(units: Sequence[str], edits: Iterable[FileEdit]) -> Moves:
    """What becomes of those units whose files are among the edits."""
    stays = {edit.path.rpartition("/")[2]: edit.after is not None for edit in edits}
    return Moves(
        coming=tuple(unit for unit in units if stays.get(unit) is True),
        going=tuple(unit for unit in units if stays.get(unit) is False),
    )


def back(entry: Entry) -> Moves:
    """What becomes of an entry's units when its files are restored: a mere rewriting enabled none."""
    files = {file["path"].rpartition("/")[2]: file for file in entry.files}
    known = [unit for unit in entry.units if unit in files]
    return Moves(
        coming=tuple(unit for unit in known if not files[unit]["after"]),
        going=tuple(unit for unit in known if not files[unit]["existed"]),
        staying=tuple(unit for unit in known if files[unit]["existed"] and files[unit]["after"]),
    )


def _acts(host: Host) -> bool:
    return host.live and systemd_runs(host)
