"""The package database: what is installed in which version, from dpkg's status file or one query of rpm.

The status file is dpkg(1)'s, with the fields of deb-control(5); a held package has ``hold`` as the first word
of its Status. rpm's answer is the whole database, since rpm reads all of it for any pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpunode.dataclass import dataclass, field
from gpunode.host import LARGE_BYTES, Host

STATUS = "/var/lib/dpkg/status"
RPM_QUERY = ("rpm", "-qa", "--qf", r"%{NAME}\t%{EVR}\t%{INSTALLTIME}\n")
SECONDS = 10.0  # rpm needs less than one; one that waits for a lock must not hold us up


@dataclass(frozen=True)
class Package:
    """`version` is the manager's: ``3:550.90.07-1.el9``. `held` as dpkg knows it (other locks are
    package_locks.py's); `installed_at` in seconds since the epoch, None where the manager doesn't keep it."""

    name: str
    version: str
    held: bool = False
    installed_at: float | None = None

    @property
    def upstream(self) -> str:
        """The version without epoch and packager's revision: ``550.90.07``."""
        return upstream(self.version)


@dataclass(frozen=True)
class Packages:
    """`manager` is dpkg, rpm, or empty where there is no database that we can read; then nothing is known,
    which isn't the same as nothing being installed."""

    manager: str = ""
    installed: Mapping[str, Package] = field(default_factory=dict)

    def version(self, *names: str) -> str | None:
        """The upstream version of the first of these names that is installed."""
        return next((self.installed[name].upstream for name in names if name in self.installed), None)

    def starting(self, *prefixes: str) -> tuple[Package, ...]:
        """Installed packages whose names start so, by name."""
        return tuple(self.installed[name] for name in sorted(self.installed) if name.startswith(prefixes))

    def containing(self, word: str) -> tuple[Package, ...]:
        """Installed packages that have `word` in their names, by name."""
        return tuple(self.installed[name] for name in sorted(self.installed) if word in name)


def upstream(version: str) -> str:
    """``550.90.07`` of ``3:550.90.07-0ubuntu0.22.04.1``."""
    return version.partition(":")[2].partition("-")[0] if ":" in version else version.partition("-")[0]


def read_packages(host: Host) -> Packages:
    """Whichever database this node has; of several versions of one package the one installed last."""
    found = {package.name: package for package in _from_dpkg(host.read_text(STATUS, LARGE_BYTES) or "")}
    if found:
        return Packages("dpkg", found)
    answer = host.run(RPM_QUERY, timeout=SECONDS)
    if not answer.ok:
        return Packages()
    for package in sorted(_from_rpm(answer.stdout), key=lambda one: one.installed_at or 0):
        found[package.name] = package
    return Packages("rpm", found)


def _from_dpkg(status: str) -> Iterator[Package]:
    for block in status.split("\n\n"):
        wanted, installed, _ = _field(block, "Status").partition(" ok installed")
        name = _field(block, "Package")
        if installed and name:
            yield Package(name, _field(block, "Version"), wanted == "hold")


def _field(block: str, name: str) -> str:
    """A field that stands in one line; string search, since a status file has thousands of blocks."""
    start = 0 if block.startswith(f"{name}: ") else block.find(f"\n{name}: ") + 1
    if start == 0 and not block.startswith(f"{name}: "):
        return ""
    end = block.find("\n", start)
    return block[start + len(name) + 2 : end if end >= 0 else len(block)].strip()


def _from_rpm(answer: str) -> Iterator[Package]:
    for line in answer.splitlines():
        name, _, rest = line.partition("\t")
        version, _, seconds = rest.partition("\t")
        known = seconds.isascii() and seconds.isdigit() and len(seconds) < 12
        if name and version:
            yield Package(name, version, installed_at=float(seconds) if known else None)
