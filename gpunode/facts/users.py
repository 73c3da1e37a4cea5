"""Users of this node, and the directories of their programs."""

from __future__ import annotations

from typing import NamedTuple

from gpunode.facts.processes import Process, environment
from gpunode.host import Host


class Account(NamedTuple):
    """A user of this node."""

    name: str
    uid: int
    home: str

    @property
    def runtime_directory(self) -> str:
        """The directory of the user's sockets, which systemd-logind makes."""
        return f"/run/user/{self.uid}"


class UserDirectories(NamedTuple):
    """A user's directories for configuration, and for sockets while the user is logged in or lingers."""

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


def account(host: Host, uid: int) -> Account:
    """The user by number, from /etc/passwd; a user of a directory service has only the number."""
    for line in (host.read_text("/etc/passwd") or "").splitlines():
        fields = line.split(":")
        if len(fields) > 5 and fields[2] == str(uid):
            return Account(fields[0], uid, fields[5])
    own = host.environ if uid == host.uid else {}
    return Account(own.get("USER") or str(uid), uid, own.get("HOME") or "/")


def sudo_name(name: str) -> str:
    """A user in the form of sudo(8): a number without a name in the user database is written '#1000'."""
    return f"'#{name}'" if name.isdecimal() else name


def places(host: Host, process: Process | None = None, uid: int | None = None) -> UserDirectories:
    """The directories from `process`, else from the user who runs gpunode, else the defaults of `uid`."""
    user = account(host, host.uid if uid is None else uid)
    own = host.environ if user.uid == host.uid and host.live else {}
    known = environment(host, process.pid) if process else own
    home = (known.get("HOME") or user.home).rstrip("/")
    return UserDirectories(
        (known.get("XDG_CONFIG_HOME") or f"{home}/.config").rstrip("/"),
        (known.get("XDG_RUNTIME_DIR") or user.runtime_directory).rstrip("/"),
    )
