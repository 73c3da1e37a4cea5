"""Who upgrades packages on this node without being asked, and which ones are kept from it.

unattended-upgrades reads apt's configuration (apt.conf(5); its own README has the keys), dnf-automatic
/etc/dnf/automatic.conf, and on SUSE a cron job or a timer does it. What is held, locked or pinned stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from gpunode.dataclass import dataclass
from gpunode.host import SMALL_BYTES, Host

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


@dataclass(frozen=True)
class Setting:
    """One value of apt's configuration; `name` in lower case with ``::`` between its parts."""

    name: str
    value: str
    source: str
    line: int


@dataclass(frozen=True)
class Automatic:
    """Who upgrades, and where that is said. `origins` are the repositories that it takes from, as its
    configuration names them (apt alone); `kept` are the patterns of packages that it leaves alone, regular
    expressions with `regex`, else globs."""

    tool: str
    source: str
    value: str
    line: int | None = None
    origins: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    regex: bool = False

    def leaves(self, package: str) -> bool:
        """Whether a package of this name is kept from it."""
        if not self.regex:
            return any(fnmatchcase(package, pattern) for pattern in self.kept)
        return any(_matches(pattern, package) for pattern in self.kept)


def _matches(pattern: str, package: str) -> bool:
    try:
        return re.match(pattern, package) is not None
    except re.error:
        return False  # unattended-upgrades would stop at it; another pattern may still hold


def automatic_upgrades(host: Host, family: str) -> Automatic | None:
    """Who upgrades packages by itself, None if nobody does. `family` is debian, rhel or suse."""
    find = {"debian": _apt, "rhel": _dnf, "suse": _zypp}.get(family)
    return find(host) if find else None


def _apt(host: Host) -> Automatic | None:
    if not host.executable(_APT_PROGRAM):
        return None
    settings = tuple(apt_settings(host))
    last = {one.name: one for one in settings}
    on = last.get(_PERIODIC)
    enabled = last.get("apt::periodic::enable")
    # 0 or nothing is off; a number or "always" how often
    if on is None or on.value in ("", "0") or (enabled is not None and enabled.value == "0"):
        return None
    lists = ("unattended-upgrade::allowed-origins", "unattended-upgrade::origins-pattern")
    origins = tuple(one.value for one in settings if one.name in lists)
    kept = tuple(one.value for one in settings if one.name == "unattended-upgrade::package-blacklist")
    shown = f'APT::Periodic::Unattended-Upgrade "{on.value}"'
    pinned = tuple(f"{re.escape(name).replace(chr(92) + '*', '.*')}$" for name in apt_pins(host))
    return Automatic("unattended-upgrades", on.source, shown, on.line, origins, (*kept, *pinned), regex=True)


def apt_settings(host: Host) -> Iterator[Setting]:
    """Everything that apt's configuration files set, in the order in which they are read."""
    names = (path for path in host.glob(_APT_DIRECTORY, "*"))
    files = [path for path in names if "." not in path.rpartition("/")[2] or path.endswith(".conf")]
    for path in (*files, "/etc/apt/apt.conf"):
        yield from parse_apt_conf(host.read_text(path, SMALL_BYTES) or "", path)


def parse_apt_conf(text: str, path: str) -> Iterator[Setting]:
    """The settings of one file: ``A::B "v";`` and ``A { B "v"; "item"; };``."""
    token = re.compile(r'"([^"\n]*)"|//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*|([{};])|([^\s{};"]+)', re.M | re.S)
    above: list[str] = []
    name, value, line = "", None, 1
    counted, at = 1, 0
    for found in token.finditer(text):
        if found[1] is not None:
            counted, at = counted + text.count("\n", at, found.start()), found.start()
            value, line = found[1], counted
        elif found[3]:
            name = found[3].strip(":")
        elif found[2] == "{":
            above.append(name)
            name, value = "", None
        elif found[2]:
            if value is not None:
                yield Setting("::".join(filter(None, (*above, name))).lower(), value, path, line)
            if found[2] == "}":
                above = above[:-1]
            name, value = "", None


def apt_pins(host: Host) -> Iterator[str]:
    """Names and globs of packages that apt's preferences hold at a version (apt_preferences(5))."""
    for path in ("/etc/apt/preferences", *host.glob("/etc/apt/preferences.d", "*")):
        text = "" if host.is_dir(path) else host.read_text(path) or ""
        for stanza in text.split("\n\n"):
            fields = dict(_field(line) for line in stanza.splitlines() if ":" in line)
            if fields.get("pin", "").startswith("version"):
                yield from (word for word in fields.get("package", "").split() if word != "*")


def _field(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip().lower(), value.strip()


def _dnf(host: Host) -> Automatic | None:
    timer = next((name for name in _DNF_TIMERS if host.is_symlink(f"{_TIMERS}/{name}")), None)
    if timer is None:
        return None
    values = {name: (value, line) for name, value, line in _assignments(host.read_text(_DNF_CONFIG) or "")}
    apply, line = values.get("apply_updates", ("no", 0))
    applies = apply.lower() in ("yes", "true", "1", "on") or timer == "dnf-automatic-install.timer"
    # NVIDIA's repository publishes no security advisories, so that these alone never bring a driver
    if not applies or values.get("upgrade_type", ("default", 0))[0] == "security":
        return None
    kept = [pattern for path in _DNF_EXCLUDES for pattern in _excluded(host.read_text(path) or "")]
    kept += [
        pattern
        for path in host.glob("/etc/yum.repos.d", "*.repo")
        for pattern in _excluded(host.read_text(path) or "")
    ]
    kept += dnf_locks(host)
    source = _DNF_CONFIG if line else f"{_TIMERS}/{timer}"
    return Automatic(
        timer, source, "apply_updates = yes" if line else "enabled", line or None, kept=tuple(kept)
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
    kept = tuple(zypp_locks(host))
    name = job.rpartition("/")[2]
    return Automatic(name, job, "enabled", kept=kept)


def zypp_locks(host: Host) -> Iterator[str]:
    """Names and globs of packages that zypp's locks hold."""
    locks = (_field(line) for line in (host.read_text(_ZYPP_LOCKS) or "").splitlines())
    return (value for key, value in locks if key == "solvable_name")
