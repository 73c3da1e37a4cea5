"""The package database: installed packages and versions, from dpkg's status file or one query of rpm.

The status file is dpkg(1)'s, with the fields of deb-control(5); a held package has ``hold`` as the first word
of its Status. For rpm the whole database is queried, because rpm reads all of it for any pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple

from gpunode.host import Host
from gpunode.host.files import LARGE_BYTES, SMALL_BYTES

STATUS = "/var/lib/dpkg/status"
RPM_QUERY = ("rpm", "-qa", "--qf", r"%{NAME}\t%{EVR}\t%{INSTALLTIME}\n")
SECONDS = 10.0  # rpm needs less than a second; one that waits for a lock must not block the doctor


class Package(NamedTuple):
    """`version` is the manager's: ``3:550.90.07-1.el9``. `held` is dpkg's hold (`locked` checks other locks);
    `installed_at` in seconds since the epoch, None where the manager doesn't record it."""

    name: str
    version: str
    held: bool = False
    installed_at: float | None = None

    @property
    def upstream(self) -> str:
        """The version without epoch and packager's revision: ``550.90.07``."""
        return upstream(self.version)


class Packages(NamedTuple):
    """`manager` is dpkg, rpm, or empty if there is no readable database; then nothing is known, which isn't
    the same as nothing being installed."""

    manager: str = ""
    installed: Mapping[str, Package] = MappingProxyType({})

    def version(self, *names: str) -> str | None:
        """The upstream version of the first of these names that is installed."""
        return next((self.installed[name].upstream for name in names if name in self.installed), None)

    def starting(self, *prefixes: str) -> tuple[Package, ...]:
        """Installed packages with this prefix, by name."""
        return tuple(self.installed[name] for name in sorted(self.installed) if name.startswith(prefixes))

    def containing(self, word: str) -> tuple[Package, ...]:
        """Installed packages that have `word` in their names, by name."""
        return tuple(self.installed[name] for name in sorted(self.installed) if word in name)


def upstream(version: str) -> str:
    """``550.90.07`` of ``3:550.90.07-0ubuntu0.22.04.1``."""
    return version.partition(":")[2].partition("-")[0] if ":" in version else version.partition("-")[0]


def read_packages(host: Host) -> Packages:
    """The packages in this node's database; of several versions of one package the one installed last."""
    packages = {package.name: package for package in _from_dpkg(host.read_text(STATUS, LARGE_BYTES) or "")}
    if packages:
        return Packages("dpkg", packages)
    answer = host.run(RPM_QUERY, timeout=SECONDS)
    if not answer.ok:
        return Packages()
    for package in sorted(_from_rpm(answer.stdout), key=lambda entry: entry.installed_at or 0):
        packages[package.name] = package
    return Packages("rpm", packages)


def _from_dpkg(status: str) -> Iterator[Package]:
    for block in status.split("\n\n"):
        desired, installed, _ = _field(block, "Status").partition(" ok installed")
        name = _field(block, "Package")
        if installed and name:
            yield Package(name, _field(block, "Version"), desired == "hold")


def _field(block: str, name: str) -> str:
    """The value of a one-line field; string search, because a status file has thousands of blocks."""
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


# The transaction of the package manager that installed a driver's version on this node, from its own log.
#
# apt writes /var/log/apt/history.log (apt.conf(5), Dir::Log::History), libzypp /var/log/zypp/history, dnf
# /var/log/dnf.rpm.log; where the log is gone, rpm's database still has a package's installation time. Dates
# are shown as written there: apt and libzypp write local time without a zone.

APT = "/var/log/apt/history.log"
DNF = "/var/log/dnf.rpm.log"
ZYPP = "/var/log/zypp/history"


class LoggedChange(NamedTuple):
    """One package that was installed or upgraded to `version`. `by` is the command line, if it is known."""

    date: str
    package: str
    version: str
    source: str
    line: int | None
    by: str = ""

    def __str__(self) -> str:
        return f"{self.date} {self.package} {self.version}{f' by {self.by}' if self.by else ''}"


def brought(host: Host, version: str, packages: Callable[[], Packages]) -> LoggedChange | None:
    """The last change that installed a driver package of `version` (``580.173.02``). `packages` is queried
    only if no log has it."""
    for path, parse in ((APT, apt_changes), (ZYPP, zypp_changes), (DNF, dnf_changes)):
        match = None
        for change in parse(host.read_text(path) or ""):
            if _is_driver(change.package) and upstream(change.version) == version:
                match = change
        if match is not None:
            return match
    dated = (
        package
        for package in packages().containing("nvidia")
        if package.installed_at and package.upstream == version
    )
    last = max(dated, key=lambda package: package.installed_at or 0, default=None)
    if last is None or last.installed_at is None:
        return None
    return LoggedChange(utc(last.installed_at), last.name, last.version, f"rpm -q --last {last.name}", None)


def _is_driver(package: str) -> bool:
    return "nvidia" in package or package.startswith(("libcuda1", "cuda-drivers"))


def utc(seconds: float) -> str:
    from datetime import datetime, timezone

    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def apt_changes(text: str) -> Iterator[LoggedChange]:
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
                    yield LoggedChange(date, name.partition(":")[0], words[-1], APT, number, by)


def zypp_changes(text: str) -> Iterator[LoggedChange]:
    """Lines ``DATE|install|NAME|VERSION|ARCH|WHO|...``; the ``command`` line before them has the command."""
    by = ""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("|")
        if len(words) >= 4 and words[1].strip() == "command":
            by = words[3].strip().replace("'", "")
        elif len(words) >= 4 and words[1].strip() == "install":
            yield LoggedChange(words[0], words[2], words[3], ZYPP, number, by)


def dnf_changes(text: str) -> Iterator[LoggedChange]:
    """Lines ``DATE SUBDEBUG Upgrade: NAME-EPOCH:VERSION-RELEASE.ARCH``."""
    for number, line in enumerate(text.splitlines(), 1):
        date, _, rest = line.partition(" ")
        level, _, action = rest.partition(" ")
        key, _, full = action.partition(": ")
        parts = full.strip().rpartition(".")[0].rsplit("-", 2)
        # "Upgraded" names the version that went away
        if level == "SUBDEBUG" and key in ("Upgrade", "Installed") and len(parts) == 3:
            yield LoggedChange(date, parts[0], f"{parts[1]}-{parts[2]}", DNF, number)


TOOLKIT_PACKAGE = "nvidia-container-toolkit"


def toolkit_installed(host: Host, packages: Packages, program: str) -> tuple[float, str] | None:
    """When the toolkit was installed on this node (seconds since the epoch) and the source of that time; None
    if unknown.

    An upgrade isn't an installation: the file's time is used only where no log has the package.
    """
    apt = host.read_text(APT) or ""
    lines = apt.splitlines()
    changes = [change for change in apt_changes(apt) if change.package.startswith(TOOLKIT_PACKAGE)]
    changes += [
        change for change in dnf_changes(host.read_text(DNF) or "") if change.package == TOOLKIT_PACKAGE
    ]
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
    status = host.stat(program) if host.live else None  # times of a recorded machine are meaningless
    return (status.st_ctime, f"{program}, since {utc(status.st_ctime)}") if status is not None else None


def _seconds(date: str) -> float | None:
    """apt writes local time without a zone, dnf with one."""
    from datetime import datetime

    try:
        form = "%Y-%m-%dT%H:%M:%S%z" if "T" in date else "%Y-%m-%d %H:%M:%S"
        return datetime.strptime(date, form).timestamp()
    except ValueError:
        return None


# Locks of packages at a version other than dpkg's holds: pins of apt, locks of dnf and of zypp, and the
# streams of dnf's modules.

_MODULES = "/etc/dnf/modules.d"


def locked(host: Host, family: str, *packages: str) -> bool:
    """Whether one of these packages is locked."""
    find = {"debian": apt_pins, "rhel": dnf_locks, "suse": zypp_locks}.get(family)
    patterns = tuple(find(host)) if find else ()
    return any(fnmatchcase(package, pattern) for package in packages for pattern in patterns)


def module_stream(host: Host, module: str) -> str:
    """The stream of a dnf module that is enabled here (``580-dkms``), empty if none is: packages of other
    streams are hidden then (dnf's modularity)."""
    settings = _assignments(host.read_text(f"{_MODULES}/{module}.module") or "")
    values = {name: value for name, value, _ in settings}
    return values.get("stream", "") if values.get("state") == "enabled" else ""


# Package sources of apt: addresses, and the key for each one (sources.list(5)).

MAIN = "/etc/apt/sources.list"
DIRECTORY = "/etc/apt/sources.list.d"


class AptSource(NamedTuple):
    """One address of one file; `line` is where its entry starts, `signed_by` is empty if it names no key."""

    path: str
    line: int
    uri: str
    suite: str
    signed_by: str


def read_sources(host: Host, main: str = MAIN, directory: str = DIRECTORY) -> tuple[AptSource, ...]:
    """All enabled sources, in either format, from the directories in apt's configuration."""
    sources: list[AptSource] = []
    for path in (main, *host.glob(directory, "*.list")):
        sources += _one_line(host.read_text(path) or "", path)
    for path in host.glob(directory, "*.sources"):
        sources += _deb822(host.read_text(path) or "", path)
    return tuple(sources)


def _one_line(text: str, path: str) -> Iterator[AptSource]:
    """``deb [signed-by=KEY arch=amd64] URI SUITE COMPONENT...``"""
    for number, line in enumerate(text.splitlines(), 1):
        kind, _, rest = line.partition("#")[0].strip().partition(" ")
        if kind not in ("deb", "deb-src"):
            continue
        options, key = "", ""
        rest = rest.strip()
        if rest.startswith("["):
            options, _, rest = rest[1:].partition("]")
        for option in options.split():
            name, _, value = option.partition("=")
            key = value if name.lower() == "signed-by" else key
        words = rest.split()
        if len(words) > 1:
            yield AptSource(path, number, words[0].rstrip("/"), words[1], key)


def _deb822(text: str, path: str) -> Iterator[AptSource]:
    number = 1
    for block in text.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                fields[name] = f"{fields.get(name, '')} {line.strip()}".strip()
                continue
            name = line.partition(":")[0].strip().lower()
            fields[name] = line.partition(":")[2].strip()
        if fields.get("enabled", "yes").lower() not in ("no", "false", "0", "off"):
            key = fields.get("signed-by", "")
            for uri in fields.get("uris", "").split():
                for suite in fields.get("suites", "").split():
                    yield AptSource(path, number, uri.rstrip("/"), suite, key)
        number += block.count("\n") + 2


# Automatic upgrades of packages on this node, and which packages are excluded from them.
#
# unattended-upgrades reads apt's configuration (apt.conf(5); its own README has the keys), dnf-automatic
# /etc/dnf/automatic.conf, and on SUSE a cron job or a timer upgrades. Held, locked or pinned packages stay.

_APT_DIRECTORY = "/etc/apt/apt.conf.d"
_APT_PROGRAM = "/usr/bin/unattended-upgrade"
_PERIODIC = "apt::periodic::unattended-upgrade"
_TIMERS = "/etc/systemd/system/timers.target.wants"
_DNF_TIMERS = ("dnf-automatic.timer", "dnf-automatic-install.timer", "dnf5-automatic.timer")
_DNF_CONFIG = "/etc/dnf/automatic.conf"
_DNF_LOCKS = (
    "/etc/dnf/plugins/versionlock.list",
    "/etc/dnf/versionlock.toml",
    "/etc/yum/pluginconf.d/versionlock.list",
)
_DNF_EXCLUDES = ("/etc/dnf/dnf.conf", _DNF_CONFIG)
_ZYPP_JOBS = (
    f"{_TIMERS}/transactional-update.timer",
    f"{_TIMERS}/os-update.timer",
    "/etc/cron.daily/opensuse.org-online_update",
    "/etc/cron.weekly/opensuse.org-online_update",
    "/etc/cron.monthly/opensuse.org-online_update",
)
_ZYPP_LOCKS = "/etc/zypp/locks"


class AptSetting(NamedTuple):
    """One value of apt's configuration; `name` in lower case with ``::`` between its parts."""

    name: str
    value: str
    source: str
    line: int


class Automatic(NamedTuple):
    """A tool that upgrades packages automatically, and where that is configured. `origins` are the
    repositories that it uses, as its configuration names them (apt only); `kept` are the patterns of excluded
    packages, regular expressions with `regex`, else globs."""

    tool: str
    source: str
    value: str
    line: int | None = None
    origins: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    regex: bool = False

    def leaves(self, package: str) -> bool:
        """Whether a package of this name is excluded."""
        if not self.regex:
            return any(fnmatchcase(package, pattern) for pattern in self.kept)
        return any(_matches(pattern, package) for pattern in self.kept)


def _matches(pattern: str, package: str) -> bool:
    try:
        return re.match(pattern, package) is not None
    except re.error:
        return False  # unattended-upgrades would fail on it; another pattern may still match


def automatic_upgrades(host: Host, family: str) -> Automatic | None:
    """The tool that upgrades packages automatically, or None. `family` is debian, rhel or suse."""
    find = {"debian": _apt, "rhel": _dnf, "suse": _zypp}.get(family)
    return find(host) if find else None


def _apt(host: Host) -> Automatic | None:
    if not host.executable(_APT_PROGRAM):
        return None
    settings = tuple(apt_settings(host))
    last = {setting.name: setting for setting in settings}
    on = last.get(_PERIODIC)
    enabled = last.get("apt::periodic::enable")
    # 0 or nothing is off; a number or "always" how often
    if on is None or on.value in ("", "0") or (enabled is not None and enabled.value == "0"):
        return None
    lists = ("unattended-upgrade::allowed-origins", "unattended-upgrade::origins-pattern")
    origins = tuple(setting.value for setting in settings if setting.name in lists)
    blacklist = tuple(
        setting.value for setting in settings if setting.name == "unattended-upgrade::package-blacklist"
    )
    setting_line = f'APT::Periodic::Unattended-Upgrade "{on.value}"'
    pinned = tuple(f"{re.escape(name).replace(chr(92) + '*', '.*')}$" for name in apt_pins(host))
    return Automatic(
        "unattended-upgrades", on.source, setting_line, on.line, origins, (*blacklist, *pinned), regex=True
    )


def apt_settings(host: Host) -> Iterator[AptSetting]:
    """All settings in apt's configuration files, in the order in which they are read."""
    names = host.glob(_APT_DIRECTORY, "*")
    files = [path for path in names if "." not in path.rpartition("/")[2] or path.endswith(".conf")]
    for path in (*files, "/etc/apt/apt.conf"):
        yield from parse_apt_conf(host.read_text(path, SMALL_BYTES) or "", path)


def parse_apt_conf(text: str, path: str) -> Iterator[AptSetting]:
    """The settings of one file: ``A::B "v";`` and ``A { B "v"; "item"; };``."""
    token = re.compile(r'"([^"\n]*)"|//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*|([{};])|([^\s{};"]+)', re.M | re.S)
    above: list[str] = []
    name, value, line = "", None, 1
    counted, at = 1, 0
    for match in token.finditer(text):
        if match[1] is not None:
            counted, at = counted + text.count("\n", at, match.start()), match.start()
            value, line = match[1], counted
        elif match[3]:
            name = match[3].strip(":")
        elif match[2] == "{":
            above.append(name)
            name, value = "", None
        elif match[2]:
            if value is not None:
                yield AptSetting("::".join(filter(None, (*above, name))).lower(), value, path, line)
            if match[2] == "}":
                above = above[:-1]
            name, value = "", None


def apt_pins(host: Host) -> Iterator[str]:
    """Names and globs of packages that apt's preferences hold at a version (apt_preferences(5))."""
    for path in ("/etc/apt/preferences", *host.glob("/etc/apt/preferences.d", "*")):
        text = "" if host.is_dir(path) else host.read_text(path) or ""
        for stanza in text.split("\n\n"):
            fields = dict(_setting_of(line) for line in stanza.splitlines() if ":" in line)
            if fields.get("pin", "").startswith("version"):
                yield from (word for word in fields.get("package", "").split() if word != "*")


def _setting_of(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip().lower(), value.strip()


def _dnf(host: Host) -> Automatic | None:
    timer = next((name for name in _DNF_TIMERS if host.is_symlink(f"{_TIMERS}/{name}")), None)
    if timer is None:
        return None
    values = {name: (value, line) for name, value, line in _assignments(host.read_text(_DNF_CONFIG) or "")}
    apply, line = values.get("apply_updates", ("no", 0))
    applies = apply.lower() in ("yes", "true", "1", "on") or timer == "dnf-automatic-install.timer"
    # NVIDIA's repository publishes no security advisories, so security-only upgrades never install a driver
    if not applies or values.get("upgrade_type", ("default", 0))[0] == "security":
        return None
    excluded = [pattern for path in _DNF_EXCLUDES for pattern in _excluded(host.read_text(path) or "")]
    excluded += [
        pattern
        for path in host.glob("/etc/yum.repos.d", "*.repo")
        for pattern in _excluded(host.read_text(path) or "")
    ]
    excluded += dnf_locks(host)
    source = _DNF_CONFIG if line else f"{_TIMERS}/{timer}"
    return Automatic(
        timer, source, "apply_updates = yes" if line else "enabled", line or None, kept=tuple(excluded)
    )


def dnf_locks(host: Host) -> Iterator[str]:
    """Names and globs of packages that dnf's version locks hold."""
    for path in _DNF_LOCKS:
        yield from _locked(host.read_text(path) or "")


def _assignments(text: str) -> Iterator[tuple[str, str, int]]:
    """``key = value`` lines of an ini file with their numbers, whatever the section."""
    for number, line in enumerate(text.splitlines(), 1):
        key, equals, value = line.partition("=")
        if equals and not line.lstrip().startswith(("#", ";")):
            yield key.strip().lower(), value.strip(), number


def _excluded(text: str) -> Iterator[str]:
    for key, value, _ in _assignments(text):
        if key in ("exclude", "excludepkgs"):
            yield from value.replace(",", " ").split()


def _locked(text: str) -> Iterator[str]:
    """Names in dnf's version locks: ``nvidia-driver-3:580.159.03-1.el9.*`` or ``name = "nvidia-driver"``."""
    for line in text.splitlines():
        word = line.strip()
        if word.startswith("name") and "=" in word:
            yield word.partition("=")[2].strip().strip('"')
        elif word and word[0] not in "#![":
            name = word.rsplit("-", 2)[0] if word.count("-") >= 2 else word
            yield f"{name}*" if "*" in name else name


def _zypp(host: Host) -> Automatic | None:
    job = next((path for path in _ZYPP_JOBS if host.is_symlink(path) or host.exists(path)), None)
    if job is None:
        return None
    excluded = tuple(zypp_locks(host))
    name = job.rpartition("/")[2]
    return Automatic(name, job, "enabled", kept=excluded)


def zypp_locks(host: Host) -> Iterator[str]:
    """Names and globs of packages that zypp's locks hold."""
    locks = (_setting_of(line) for line in (host.read_text(_ZYPP_LOCKS) or "").splitlines())
    return (value for key, value in locks if key == "solvable_name")
