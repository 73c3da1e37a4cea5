"""Which transaction of the package manager brought a driver's version onto this node, from its own log.

apt writes /var/log/apt/history.log (apt.conf(5), Dir::Log::History), libzypp /var/log/zypp/history, dnf
/var/log/dnf.rpm.log; where the log is gone, rpm's database still knows when a package was installed. Dates
are shown as they stand there: apt and libzypp write local time without a zone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpunode.dataclass import dataclass
from gpunode.facts.packages import Packages, upstream
from gpunode.host import Host

APT = "/var/log/apt/history.log"
DNF = "/var/log/dnf.rpm.log"
ZYPP = "/var/log/zypp/history"


@dataclass(frozen=True)
class Change:
    """One package that was installed or upgraded to `version`. `by` is the command line, if it is known."""

    date: str
    package: str
    version: str
    source: str
    line: int | None
    by: str = ""

    def __str__(self) -> str:
        return f"{self.date} {self.package} {self.version}{f' by {self.by}' if self.by else ''}"


def brought(host: Host, version: str, packages: Callable[[], Packages]) -> Change | None:
    """The last change that brought a driver package of `version` (``580.173.02``). `packages` is only asked
    where no log tells."""
    for path, parse in ((APT, apt_changes), (ZYPP, zypp_changes), (DNF, dnf_changes)):
        found = None
        for change in parse(host.read_text(path) or ""):
            if _is_driver(change.package) and upstream(change.version) == version:
                found = change
        if found is not None:
            return found
    dated = (one for one in packages().containing("nvidia") if one.installed_at and one.upstream == version)
    last = max(dated, key=lambda one: one.installed_at or 0, default=None)
    if last is None or last.installed_at is None:
        return None
    return Change(utc(last.installed_at), last.name, last.version, f"rpm -q --last {last.name}", None)


def _is_driver(package: str) -> bool:
    return "nvidia" in package or package.startswith(("libcuda1", "cuda-drivers"))


def utc(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def apt_changes(text: str) -> Iterator[Change]:
    """Packages after ``Install:`` and ``Upgrade:``, in the log's order."""
    date = by = ""
    for number, line in enumerate(text.splitlines(), 1):
        key, _, rest = line.partition(": ")
        if key == "Start-Date":
            date, by = " ".join(rest.split()), ""
        elif key == "Commandline":
            by = rest.strip()
        elif key in ("Install", "Upgrade"):
            for item in rest.split("), "):
                name, _, versions = item.partition(" (")
                words = [word for word in versions.rstrip(")").split(", ") if word != "automatic"]
                if name and any(words):
                    yield Change(date, name.partition(":")[0], words[-1], APT, number, by)


def zypp_changes(text: str) -> Iterator[Change]:
    """Lines ``DATE|install|NAME|VERSION|ARCH|WHO|...``; the ``command`` line before them says by what."""
    by = ""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("|")
        if len(words) >= 4 and words[1].strip() == "command":
            by = words[3].strip().replace("'", "")
        elif len(words) >= 4 and words[1].strip() == "install":
            yield Change(words[0], words[2], words[3], ZYPP, number, by)


def dnf_changes(text: str) -> Iterator[Change]:
    """Lines ``DATE SUBDEBUG Upgrade: NAME-EPOCH:VERSION-RELEASE.ARCH``."""
    for number, line in enumerate(text.splitlines(), 1):
        date, _, rest = line.partition(" ")
        level, _, action = rest.partition(" ")
        key, _, full = action.partition(": ")
        parts = full.strip().rpartition(".")[0].rsplit("-", 2)
        # "Upgraded" names the version that went away
        if level == "SUBDEBUG" and key in ("Upgrade", "Installed") and len(parts) == 3:
            yield Change(date, parts[0], f"{parts[1]}-{parts[2]}", DNF, number)


TOOLKIT_PACKAGE = "nvidia-container-toolkit"


def toolkit_installed(host: Host, packages: Packages, program: str) -> tuple[float, str] | None:
    """When the toolkit came onto this node (seconds since the epoch) and what tells so; None if nothing does.

    An upgrade isn't an installation: only where no log knows the package is its file's time taken.
    """
    apt = host.read_text(APT) or ""
    lines = apt.splitlines()
    changes = [one for one in apt_changes(apt) if one.package.startswith(TOOLKIT_PACKAGE)]
    changes += [one for one in dnf_changes(host.read_text(DNF) or "") if one.package == TOOLKIT_PACKAGE]
    for change in reversed(changes):
        upgrade = change.source == APT and change.line and lines[change.line - 1].startswith("Upgrade")
        when = None if upgrade else _seconds(change.date)
        if when is not None:
            return when, f"{change.source}: {change}"
    if changes:
        return None
    package = packages.installed.get(TOOLKIT_PACKAGE)
    if package is not None and package.installed_at:
        return package.installed_at, f"rpm -q --last {package.name}: {utc(package.installed_at)}"
    found = host.stat(program) if host.live else None  # times of a recorded machine say nothing
    return (found.st_ctime, f"{program}, since {utc(found.st_ctime)}") if found is not None else None


def _seconds(date: str) -> float | None:
    """apt writes local time without a zone, dnf with one."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(date).timestamp()
    except ValueError:
        return None
