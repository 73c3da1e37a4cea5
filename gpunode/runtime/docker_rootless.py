"""The files of a user's rootless Docker beside its daemon.json, and who may change which Docker.

The toolkit's prestart hook may not write device cgroups there, so it needs ``no-cgroups``. Set in
/etc/nvidia-container-runtime, that would take the GPUs from every container of the node's other engines. But
the toolkit's programs read ``$XDG_CONFIG_HOME`` first (nvidia-container-toolkit api/config/v1), so the
setting is written to the user's own file, and dockerd gets the variable, which they inherit from it.
"""

from __future__ import annotations

from typing import NamedTuple

from gpunode.errors import PreconditionError
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker import CONFIG_VARIABLE, as_user, hook_injects, rootless_docker
from gpunode.facts.processes import Process, environment, running
from gpunode.facts.systemd import read_unit
from gpunode.facts.toolkit import DEFAULT_PATH
from gpunode.facts.users import account, places
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.runtime.engine import DesiredConfig, UnwantedConfig, decode
from gpunode.runtime.toolkit_file import with_settings

DROP_IN = "gpunode.conf"
_SETTING: dict[tuple[str, ...], bool] = {("nvidia-container-cli", "no-cgroups"): True}


class UserFiles(NamedTuple):
    """Files in addition to daemon.json; `restart` is why dockerd must restart for them, empty if it
    needn't."""

    edits: tuple[FileEdit, ...] = ()
    restart: str = ""
    notes: tuple[str, ...] = ()


def desired_files(host: Host, daemon: Daemon, desired: DesiredConfig) -> UserFiles:
    """The user's toolkit configuration with ``no-cgroups``, and the drop-in with dockerd's variable."""
    if (
        not daemon.user
        or not desired.handlers
        or not hook_injects(host, daemon, tuple(handler.path for handler in desired.handlers))
    ):
        return UserFiles()
    place = places(host, daemon.process)
    inherited = environment(host, daemon.process.pid) if daemon.process else {}
    path = inherited.get(CONFIG_VARIABLE) or place.toolkit_config
    before = host.read_bytes(path)
    text = decode(before if before is not None else host.read_bytes(DEFAULT_PATH), path)
    after = with_settings(text, path, _SETTING).encode()
    edits = [FileEdit(path, before, after, beside=True)]
    notes = []
    if before is None:
        notes.append(
            f"{path} is what {daemon.user}'s containers get their GPUs by;"
            f" later changes of {DEFAULT_PATH} don't reach them"
        )
    if inherited.get("XDG_CONFIG_HOME") or inherited.get(CONFIG_VARIABLE):
        return UserFiles(tuple(edits), "", tuple(notes))
    if daemon.unit is None:
        notes.append(
            f"start dockerd with XDG_CONFIG_HOME={place.config_home} in its environment: NVIDIA's programs"
            f" find {path} only there"
        )
        return UserFiles(tuple(edits), "", tuple(notes))
    unit = read_unit(host, daemon.unit, place.units)
    if unit is None or "XDG_CONFIG_HOME" not in unit.environment:
        edits.append(_drop_in(host, daemon, place.config_home))
    reason = f"dockerd must start with XDG_CONFIG_HOME, or NVIDIA's programs don't find {path}"
    return UserFiles(tuple(edits), reason, tuple(notes))


def unwanted_files(host: Host, daemon: Daemon, unwanted: UnwantedConfig) -> tuple[FileEdit, ...]:
    """The removal of the same files, where they have only what gpunode writes there."""
    if not daemon.user or "nvidia" not in unwanted.names:
        return ()
    place = places(host, daemon.process)
    drop_in = _drop_in(host, daemon, place.config_home)
    now = host.read_bytes(place.toolkit_config)
    expected = with_settings(decode(host.read_bytes(DEFAULT_PATH), DEFAULT_PATH), DEFAULT_PATH, _SETTING)
    removed = (
        [FileEdit(drop_in.path, drop_in.before, None, beside=True)] if drop_in.action == "unchanged" else []
    )
    if now is not None and now == expected.encode():
        removed.append(FileEdit(place.toolkit_config, now, None, beside=True))
    return tuple(removed)


def _drop_in(host: Host, daemon: Daemon, config_home: str) -> FileEdit:
    path = f"{config_home}/systemd/user/{daemon.unit}.d/{DROP_IN}"
    value = config_home.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    text = (
        "# Written by gpunode: NVIDIA's programs, which dockerd starts, look for this user's\n"
        "# nvidia-container-runtime/config.toml below XDG_CONFIG_HOME.\n"
        f'[Service]\nEnvironment="XDG_CONFIG_HOME={value}"\n'
    )
    return FileEdit(path, host.read_bytes(path), text.encode(), beside=True)


def refuse_another_users(host: Host, daemon: Daemon | None, config: str) -> None:
    """`PreconditionError` if root would change a user's rootless Docker.

    That is so with a file of that user's, or if there is no other Docker. Root would leave files that the
    user can't change, and can't reach the user's systemd. A process that is merely called dockerd blocks
    nothing for root: neither the system's Docker while that is stopped, nor a file that isn't the user's.
    """
    if host.live and not host.is_root:
        return
    if daemon is not None and (daemon.process is not None or not config):
        return
    others = [candidate for candidate in running(host, "dockerd") if candidate.uid != 0]
    for process in others:
        if config and not _is_config_of(host, process, config):
            continue
        user = account(host, process.uid)
        problem = (
            f"{config} belongs to {user.name}'s rootless Docker (pid {process.pid})"
            if config
            else f"only {user.name}'s rootless Docker (pid {process.pid}) runs here, the system has none"
        )
        raise PreconditionError(problem, hint=f"run it as that user: {as_user(user)}")
    if config.endswith("/.config/docker/daemon.json"):
        uid = next((uid for uid in _owners(host, config) if uid != 0), 0)
        if uid != 0:
            user = account(host, uid)
            raise PreconditionError(
                f"{config} belongs to {user.name}'s rootless Docker",
                hint=f"run it as that user: {as_user(user)}",
            )


def _is_config_of(host: Host, process: Process, config: str) -> bool:
    config_file = process.option("--config-file") or places(host, process, process.uid).daemon_json
    return config_file == config and (not host.live or process.uid in _owners(host, config))


def _owners(host: Host, path: str) -> tuple[int, ...]:
    """The owners of a file and of the nearest existing directory above it: they control links in it."""
    status, directory = host.stat(path), None
    while directory is None and path != "/":
        path = path.rpartition("/")[0] or "/"
        directory = host.stat(path)
    return tuple(owner.st_uid for owner in (status, directory) if owner is not None)


def beside_another_users(host: Host, daemon: Daemon) -> str:
    """A note that only a user's rootless Docker runs, and isn't the one that is changed."""
    if daemon.user or daemon.process is not None or (host.live and not host.is_root):
        return ""
    process = rootless_docker(host)
    if process is None:
        return ""
    user = account(host, process.uid)
    return (
        f"{user.name}'s rootless Docker (pid {process.pid}) runs here and stays as it is: this is about the"
        f" system's, which is stopped; for the user's: {as_user(user)}"
    )
