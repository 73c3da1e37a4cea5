"""A user's rootless Docker: its daemon.json, socket and unit lie in that user's directories.

dockerd finds its file below ``$XDG_CONFIG_HOME`` (else ``~/.config``) and listens in ``$XDG_RUNTIME_DIR``
where RootlessKit started it (moby cmd/dockerd). The variables that count are those of the running process.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.facts.daemons import Daemon, find_binary, same_file
from gpunode.facts.docker_file import docker_version, listens_there, socket_of
from gpunode.facts.processes import Process, environment
from gpunode.facts.units import Unit, read_unit
from gpunode.host import Host

UNIT = "docker.service"  # what dockerd-rootless-setuptool.sh installs for `systemctl --user`


@dataclass(frozen=True)
class Account:
    """A user of this node."""

    name: str
    uid: int
    home: str

    @property
    def runtime_directory(self) -> str:
        """Where systemd-logind makes the user's sockets' directory."""
        return f"/run/user/{self.uid}"


@dataclass(frozen=True)
class Places:
    """Where a user's programs keep configuration, and sockets while the user is logged in or lingers."""

    config_home: str
    runtime_directory: str

    @property
    def daemon_json(self) -> str:
        return f"{self.config_home}/docker/daemon.json"

    @property
    def toolkit_config(self) -> str:
        """The NVIDIA toolkit's configuration of this user."""
        return f"{self.config_home}/nvidia-container-runtime/config.toml"

    @property
    def units(self) -> tuple[str, ...]:
        """Directories of user units, systemd.unit(5); the first that has a file of a name wins."""
        return (
            f"{self.config_home}/systemd/user",
            "/etc/systemd/user",
            f"{self.runtime_directory}/systemd/user",
            "/run/systemd/user",
            "/usr/local/lib/systemd/user",
            "/usr/lib/systemd/user",
        )


def find_rootless(host: Host, daemons: Sequence[Process], config: str | None = None) -> Daemon | None:
    """The rootless Docker of the ordinary user who runs gpunode; None for root and for users without one."""
    if not host.live or host.is_root:
        return None
    own = [one for one in daemons if one.uid == host.uid]
    process = next((one for one in own if not config or same_file(host, _config(host, one), config)), None)
    place = places(host, process)
    path = _config(host, process) if process else place.daemon_json
    unit = read_unit(host, UNIT, place.units)
    if config and not same_file(host, config, path):
        return None
    if process is None and unit is None and not config:
        return None
    return _daemon(host, process, unit, place, path)


def find_others(host: Host, daemons: Sequence[Process]) -> tuple[Daemon, ...]:
    """The rootless Dockers that run here for other users than the one who runs gpunode."""
    own = {0, host.uid} if host.live else {0}
    found = []
    for process in daemons:
        uid = process.uid
        if uid not in own:
            place = places(host, process, uid)
            unit = read_unit(host.as_user(uid), UNIT, place.units)
            found.append(_daemon(host, process, unit, place, _config(host, process, uid), uid))
    return tuple(found)


def _daemon(
    host: Host, process: Process | None, unit: Unit | None, place: Places, path: str, uid: int | None = None
) -> Daemon:
    argv = process.argv if process else unit.argv if unit else ()
    theirs = host if uid is None else host.as_user(uid)
    binary = find_binary(host, "dockerd", process, None) if theirs is host else None
    socket = socket_of(theirs, argv, path, f"{place.runtime_directory}/docker.sock")
    asked = socket if listens_there(theirs, argv, path) else ""
    return Daemon(
        name="docker",
        binary=binary,
        version=docker_version(theirs, binary, process, asked),
        config_path=path,
        config_source=f"process {process.pid}, rootless" if process else "rootless Docker's default path",
        socket=socket,
        unit=UNIT if unit is not None and _runs_it(host, process, unit) else None,
        argv=argv,
        process=process,
        user=account(host, host.uid if uid is None else uid).name,
    )


def places(host: Host, process: Process | None = None, uid: int | None = None) -> Places:
    """The directories as `process` has them, else as whoever runs gpunode has, else as `uid` by default."""
    who = account(host, host.uid if uid is None else uid)
    own = host.environ if who.uid == host.uid and host.live else {}
    known = environment(host, process.pid) if process else own
    home = (known.get("HOME") or who.home).rstrip("/")
    return Places(
        (known.get("XDG_CONFIG_HOME") or f"{home}/.config").rstrip("/"),
        (known.get("XDG_RUNTIME_DIR") or who.runtime_directory).rstrip("/"),
    )


def _config(host: Host, process: Process, uid: int | None = None) -> str:
    return process.option("--config-file") or places(host, process, uid).daemon_json


def _runs_it(host: Host, process: Process | None, unit: Unit) -> bool:
    """Whether the user's systemd runs it: a dockerd that was started in a terminal is in another group."""
    if process is None:
        return True
    try:
        text = host.read_text(f"/proc/{process.pid}/cgroup") or ""
    except GpunodeError:
        return True
    parts = [part for line in text.splitlines() for part in line.rpartition(":")[2].split("/")]
    return unit.name in parts or not any(part.endswith((".service", ".scope")) for part in parts)


def account(host: Host, uid: int) -> Account:
    """The user by number, from /etc/passwd; one of a directory service is known by the number alone."""
    for line in (host.read_text("/etc/passwd") or "").splitlines():
        fields = line.split(":")
        if len(fields) > 5 and fields[2] == str(uid):
            return Account(fields[0], uid, fields[5])
    own = host.environ if uid == host.uid else {}
    return Account(own.get("USER") or str(uid), uid, own.get("HOME") or "/")


def sudo_name(name: str) -> str:
    """A user as sudo(8) takes one: a number without a name in the user database is written '#1000'."""
    return f"'#{name}'" if name.isdecimal() else name


def as_user(who: Account) -> str:
    """The command that prepares a user's rootless Docker, as root gives it."""
    runtime = f"XDG_RUNTIME_DIR={who.runtime_directory}"
    return f"sudo -Hu {sudo_name(who.name)} {runtime} gpunode configure-runtime --runtime docker"
