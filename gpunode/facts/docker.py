"""Docker on this node: its dockerd, its daemon.json, and what the running daemon has loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from gpunode.errors import ConfigError, DaemonError, GpunodeError
from gpunode.facts.daemons import (
    Daemon,
    KnownDaemon,
    as_daemon_user,
    daemon_version,
    find_binary,
    locate,
    parse_version,
    record_version,
    same_file,
    socket_path,
)
from gpunode.facts.processes import Process, environment, option_value, option_values, running
from gpunode.facts.systemd import SystemdUnit, read_unit
from gpunode.facts.tables import can, table
from gpunode.facts.toml import dig
from gpunode.facts.toolkit import DEFAULT_PATH, find_toolkit
from gpunode.facts.users import Account, UserDirectories, account, places, sudo_name
from gpunode.facts.writers import is_nvidia_program
from gpunode.host import Host
from gpunode.output.typed import as_dict, as_strings, as_text, toml

# dockerd's daemon.json as text: its settings, syntax errors, and the socket that its daemon listens on.

DEFAULT_SOCKET = "/run/docker.sock"
_VERSION_SECONDS = 1.0  # a running dockerd answers in 2 ms


def socket_of(host: Host, argv: tuple[str, ...], config: str, default: str = DEFAULT_SOCKET) -> str:
    """The first unix socket that dockerd listens on: from -H/--host, else `hosts` in its file."""
    for address in addresses(host, argv, config):
        if address.startswith("fd://"):
            return default  # docker.socket of the package listens there for dockerd
        path = socket_path(address)
        if path:
            return path
    return default


def addresses(host: Host, argv: tuple[str, ...], config: str) -> tuple[str, ...]:
    """Addresses that dockerd is configured to listen on: -H/--host, and `hosts` in its file (none in an
    unreadable file)."""
    hosts = []
    for position, argument in enumerate(argv):
        head, equals, value = argument.partition("=")
        if head in ("-H", "--host"):
            hosts += [value] if equals else list(argv[position + 1 : position + 2])
        elif argument.startswith("-H") and len(argument) > 2:
            hosts.append(argument[2:])
    return (*hosts, *as_strings(_file_setting(host, config, "hosts")))


def _file_setting(host: Host, config: str, key: str) -> Any:
    """A key of daemon.json; None for an unreadable file: the command that edits or checks it reports what is
    wrong with it."""
    with suppress(GpunodeError):
        return parse_daemon_json(host.read_text(config) or "", config, twice=True).get(key)
    return None


def verifies_clients(host: Host, argv: tuple[str, ...], config: str) -> bool:
    """Whether dockerd requires a certificate of network clients (--tlsverify)."""
    word = option_value((*argv[1:], ""), "--tlsverify")
    if word is not None:
        return word.lower() not in ("false", "0", "f")
    return _file_setting(host, config, "tlsverify") is True


def listens_there(host: Host, argv: tuple[str, ...], config: str) -> bool:
    """Whether this dockerd listens on the socket of `socket_of`: one that listens only on TCP has none."""
    listeners = addresses(host, argv, config)
    return not listeners or any(
        address.startswith("fd://") or address == "unix://" or socket_path(address) for address in listeners
    )


def _docker_version(host: Host, daemon: Daemon) -> tuple[int, ...]:
    """Version reported by the running dockerd; its program runs (35 ms) only if its socket reports none."""
    if host.live and daemon.process is not None and listens_there(host, daemon.argv, daemon.config_path):
        from gpunode.daemons.docker import DockerApi

        with suppress(DaemonError):
            version = parse_version(DockerApi(host, daemon.socket, _VERSION_SECONDS).program_version())
            if version:
                record_version(host, "dockerd", version)
                return version
    return daemon_version(host, "dockerd", daemon.binary)


def parse_daemon_json(text: str, path: str, *, twice: bool = False) -> dict[str, Any]:
    """The object in a daemon.json; an empty file and ``null`` are {} as in dockerd.

    `ConfigError` names file, line and column of a syntax error, and a duplicate key. With `twice` the last
    value is used, as in dockerd; a command that edits the file must not guess.
    """
    body = text.removeprefix("\ufeff")
    if not body.strip(" \t\r\n"):
        return {}

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        double = next((key for key in keys if keys.count(key) > 1), None)
        if double is not None and not twice:
            raise _twice(double, body, path)
        return dict(pairs)

    def refuse(constant: str) -> Any:
        raise ConfigError(
            f"{path}: {constant} is not a JSON value", hint=f"correct it: ${{EDITOR:-vi}} {path}"
        )

    try:
        loaded = json.loads(body, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        reason = error.msg[:1].lower() + error.msg[1:]
        if error.msg == "Extra data":
            reason = "text after the end of the JSON object"
        raise ConfigError(
            f"{path}:{error.lineno}:{error.colno}: {reason}",
            hint=f"correct that line: ${{EDITOR:-vi}} +{error.lineno} {path}",
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"{path}: nested too deeply to be a Docker configuration", hint=f"inspect the file: less {path}"
        ) from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise ConfigError(f"{path}: {error}", hint=f"correct it: ${{EDITOR:-vi}} {path}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        names = {list: "an array", str: "a string", bool: "a boolean"}
        raise ConfigError(
            f"{path} contains {names.get(type(loaded), 'a number')} instead of a JSON object",
            hint=f"inspect the file: cat {path}",
        )
    return loaded


def _twice(key: str, text: str, path: str) -> ConfigError:
    """Names the position of the second one; without it if other objects in the file have such a key too."""
    name = re.escape(json.dumps(key, ensure_ascii=False))
    positions = [match.start() for match in re.finditer(rf"{name}\s*:", text)]
    lines = [text.count("\n", 0, position) + 1 for position in positions]
    place, more, jump = path, "", ""
    if len(positions) == 2:
        place = f"{path}:{lines[1]}:{positions[1] - text.rfind(chr(10), 0, positions[1])}"
        more, jump = f", first on line {lines[0]}", f"+{lines[1]} "
    return ConfigError(
        f'{place}: duplicate key "{key}"{more}',
        hint=f"keep only one of them: ${{EDITOR:-vi}} {jump}{path}",
    )


# dockerd's command line against its file: a setting in both is fatal, even with equal values.

# moby daemon/config: flags that may be repeated have a plural name in daemon.json
_PLURALS = {
    "host": "hosts",
    "label": "labels",
    "feature": "features",
    "dns-opt": "dns-opts",
    "log-opt": "log-opts",
    "exec-opt": "exec-opts",
    "storage-opt": "storage-opts",
    "cdi-spec-dir": "cdi-spec-dirs",
    "default-ulimit": "default-ulimits",
    "default-network-opt": "default-network-opts",
    "default-address-pool": "default-address-pools",
    "host-gateway-ip": "host-gateway-ips",
    "authorization-plugin": "authorization-plugins",
    "insecure-registry": "insecure-registries",
    "registry-mirror": "registry-mirrors",
    "node-generic-resource": "node-generic-resources",
    "cluster-store-opt": "cluster-store-opts",
    "add-runtime": "runtimes",
}
_SHORT = {"H": "host", "D": "debug", "l": "log-level", "b": "bridge", "G": "group", "p": "pidfile"}
_SHORT |= {"s": "storage-driver", "g": "graph", "r": "restart"}
_BOTH_ALLOWED = {"runtimes"}  # the one directive that dockerd merges from flag and file
# objects in daemon.json that are one setting; of any other object dockerd takes the members (flatOptions)
WHOLE = {"runtimes", "log-opts", "default-ulimits", "default-network-opts", "cluster-store-opts"}
WHOLE |= {"features", "builder", "nri-opts"}
# where distributions keep the flags that their unit reads from its environment
_ENVIRONMENT_FILES = ("/etc/default/docker", "/etc/sysconfig/docker")


def settings_of(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Settings of a command line, under their names in daemon.json."""
    result = []
    for argument in argv[1:]:
        flag = re.match(r"--([a-z0-9-]+)(?:=|$)", argument)
        short = re.match(r"-([A-Za-z])", argument)
        name = flag[1] if flag else _SHORT.get(short[1], "") if short else ""
        result.append(_PLURALS.get(name, name))
    return tuple(dict.fromkeys(filter(None, result)))


def flag_conflicts(argv: tuple[str, ...], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of daemon.json that dockerd also got as a flag; it refuses to start with any of them."""
    keys = file_settings(config)
    return tuple(key for key in settings_of(argv) if key in keys and key not in _BOTH_ALLOWED)


def file_settings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings of a daemon.json: its keys, and for an object that only groups settings their keys."""
    settings: list[str] = []
    for key, value in config.items():
        settings += value if isinstance(value, dict) and key not in WHOLE else [key]
    return tuple(dict.fromkeys(settings))


def flag_features(argv: tuple[str, ...]) -> dict[str, bool]:
    """What ``--feature NAME`` and ``--feature NAME=true`` switch (dockerd 28.0 and up)."""
    features: dict[str, bool] = {}
    for feature in option_values(argv, "--feature"):
        name, _, state = feature.partition("=")
        features[name] = state.lower() not in ("false", "0", "f")
    return features


def flag_runtimes(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the runtimes that ``--add-runtime NAME=PATH`` registers."""
    return tuple(runtime.partition("=")[0] for runtime in option_values(argv, "--add-runtime"))


FLAG_REASON = "a reload would forget the runtimes that --add-runtime gave dockerd"
HOOK = "nvidia-container-runtime-hook"


def beyond_reload(host: Host, daemon: Daemon) -> str:
    """Why a reload (SIGHUP) isn't enough for this running dockerd to load the nvidia runtime; empty if it
    is."""
    if flag_runtimes(daemon.argv):
        return FLAG_REASON
    if not host.live:
        return ""  # the mtime of a recorded file is that of the recording
    process, hook = daemon.process, host.which(HOOK)
    status = host.stat(hook) if hook else None
    if process and status and status.st_ctime > process.started:
        return f"{HOOK} is newer than the running dockerd, which looks for it only at start (--gpus)"
    return ""


def flag_default(argv: tuple[str, ...]) -> str:
    """Value of ``--default-runtime``; empty if it isn't set."""
    return option_value(argv[1:], "--default-runtime") or ""


def flag_place(host: Host, unit: str | None, key: str) -> str:
    """``FILE:LINE`` of the flag for `key` in a unit, a drop-in or an environment file, else empty."""
    names = [name for name, plural in _PLURALS.items() if plural == key] or [key]
    shorts = "|".join(rf"-{short}\b" for short, name in _SHORT.items() if name in names)
    pattern = re.compile("|".join(filter(None, [*(rf"--{name}\b(?!-)" for name in names), shorts])))
    unit_file = read_unit(host, unit) if unit else None
    for path in (*reversed(unit_file.files if unit_file else ()), *_ENVIRONMENT_FILES):
        for number, line in enumerate(host.text_or_empty(path).splitlines(), start=1):
            if pattern.search(line) and not line.lstrip().startswith(("#", ";")):
                return f"{path}:{number}"
    return ""


# Keys that dockerd accepts in its file: 20.10 can't check a file without starting, later releases can. Names
# and types are those of moby v20.10.24, cmd/dockerd and daemon/config: a key must be one of its flags, or the
# plural name of a repeatable flag. 26.1.5 and 28.5.2 refuse the same types, if they still know the key
# (tests/integration/test_docker_releases.py).

TABLE = "docker_keys"
_UNKNOWN = "don't match any configuration option: "  # dockerd's own error, which names the keys
_LISTED, VALIDATES = (20, 10), (23,)
_SECONDS = 5.0

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "number": ((int,), "an integer"),
    "string": ((str,), "a string"),
    "list": ((list,), "a list"),
    "object": ((dict,), "an object"),
    "any": ((object,), ""),
}
_KEYS = {
    "bool": "cri-containerd debug experimental icc init ip-forward ip-masq ip6tables iptables ipv6"
    " live-restore no-new-privileges raw-logs rootless selinux-enabled tls tlsverify userland-proxy",
    "number": "cpu-rt-period cpu-rt-runtime max-concurrent-downloads max-concurrent-uploads"
    " max-download-attempts mtu network-control-plane-mtu network-diagnostic-port oom-score-adjust"
    " shutdown-timeout",
    "string": "api-cors-header bip bridge cgroup-parent cluster-advertise cluster-store containerd"
    " containerd-namespace data-root default-cgroupns-mode default-gateway"
    " default-gateway-v6 default-ipc-mode default-runtime exec-root fixed-cidr fixed-cidr-v6 graph group"
    " host-gateway-ip init-path ip log-driver log-level metrics-addr pidfile seccomp-profile storage-driver"
    " swarm-default-advertise-addr tlscacert tlscert tlskey userland-proxy-path userns-remap",
    "list": "authorization-plugins default-address-pools dns dns-opts dns-search exec-opts hosts"
    " insecure-registries labels node-generic-resources registry-mirrors storage-opts",
    "object": "builder cluster-store-opts default-ulimits features log-opts runtimes",
    # the size takes a number and a string; the others mean nothing in the file (artifacts: since 28)
    "any": "default-shm-size add-runtime allow-nondistributable-artifact allow-nondistributable-artifacts"
    " authorization-plugin cluster-store-opt config-file containerd-plugins-namespace default-address-pool"
    " default-ulimit deprecated-key-path dns-opt exec-opt restart"
    " help host insecure-registry label log-opt node-generic-resource registry-mirror storage-opt version",
}
_KIND_OF = {name: kind for kind, names in _KEYS.items() for name in names.split()}
_MEMBERS = {  # what a member of these objects and of this list is; those of other lists are strings
    "cluster-store-opts": ("option", "string"),
    "default-address-pools": ("", "object"),
    "default-ulimits": ("limit", "object"),
    "features": ("feature", "bool"),
    "log-opts": ("log option", "string"),
    "runtimes": ("runtime", "object"),
}


def unknown_keys(host: Host, daemon: Daemon, tree: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Settings in a file that this dockerd doesn't know; None if unknown.

    Keys that are in no list are checked by dockerd itself (``--validate``, 23.0 and newer), which then only
    reads the file.
    """
    strange = tuple(
        key for key in file_settings(tree) if key not in _KIND_OF and key not in table(TABLE).rows
    )
    if daemon.version and _LISTED <= daemon.version < VALIDATES:
        return tuple(key for key in file_settings(tree) if key not in _KIND_OF)
    if not strange:
        return ()
    if daemon.version < VALIDATES or daemon.binary is None:
        return None
    answer = host.run([daemon.binary, "--validate", f"--config-file={daemon.config_path}"], timeout=_SECONDS)
    _, marker, keys = (answer.stderr + answer.stdout).partition(_UNKNOWN)
    if answer.ok:
        return ()
    unknown = tuple(key.strip() for key in keys.split("\n")[0].split(","))
    return tuple(key for key in strange if key in unknown) or None if marker else None


def wrong_types(tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings with a value of a type that dockerd can't start with: the keys down to it, and what is wrong.

    null counts as absent. dockerd doesn't read the values in an object that it doesn't know.
    """
    for key, value in tree.items():
        kind = _KIND_OF.get(key, "any")
        noun, member = _MEMBERS.get(key, ("", "string" if kind == "list" else "any"))
        if not _fits(value, kind):
            yield (key,), f"{key} is not {_KINDS[kind][1]}"
        elif isinstance(value, dict):
            for name, part in value.items():
                if not _fits(part, member):
                    yield (key, name), f'the {noun} "{name}" is not {_KINDS[member][1]}'
        elif isinstance(value, list) and not all(_fits(part, member) for part in value):
            yield (key,), f"{key} is not a list of {member}s"
    for name, entry in as_dict(tree.get("runtimes")).items():
        for key, kind in (("path", "string"), ("runtimeType", "string"), ("runtimeArgs", "list")):
            if not _fits(as_dict(entry).get(key), kind):
                yield ("runtimes", name), f'{key} of the runtime "{name}" is not {_KINDS[kind][1]}'


def _fits(value: Any, kind: str) -> bool:
    number = kind == "number" and isinstance(value, bool)  # in Python true is also a number
    return value is None or (isinstance(value, _KINDS[kind][0]) and not number)


def refused_by_20(tree: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """The keys that dockerd 20.10 refuses and the reason; both empty if it accepts the file."""
    for key, value in tree.items():
        groups = isinstance(value, dict) and key not in WHOLE
        for keys in ((key, inner) for inner in value) if groups else ((key,),):
            if keys[-1] not in _KIND_OF:
                return keys, f"dockerd 20.10 doesn't know {keys[-1]}"
    return next(wrong_types(tree), ((), ""))


# Docker's runtimes, in the form that its file and the running daemon's /info share.


def programs(tree: Mapping[str, Any], key: str = "runtimes") -> dict[str, str]:
    """Programs by runtime; empty if the engine itself finds one."""
    return {name: as_text(dig(entry, "path")) for name, entry in as_dict(tree.get(key)).items()}


def nvidia_programs(tree: Mapping[str, Any], key: str = "runtimes") -> dict[str, str]:
    """Programs of NVIDIA's runtimes, by name or program."""
    runtimes = programs(tree, key).items()
    return {name: path for name, path in runtimes if name == "nvidia" or is_nvidia_program(path)}


# The docker snap: a confined dockerd with a file, a unit and an NVIDIA runtime of its own.
#
# Its wrapper starts dockerd with ``--config-file=$SNAP_DATA/config/daemon.json``, where SNAP_DATA ends in the
# snap's revision; ``current`` beside it is a symlink to that revision's, and a refresh copies the directory.

CONFIG = "/var/snap/docker/current/config/daemon.json"
SNAP_UNIT = "snap.docker.dockerd.service"
# programs that dockerd can start there: it sees no program of the host
PROGRAMS = "/snap/docker/current/usr/bin"
_DATA = "/var/snap/docker/"


def find_snap(host: Host, processes: Sequence[Process], config: str | None = None) -> Daemon | None:
    """The snap's dockerd, running or installed; None without one, or if `config` isn't its file."""
    process = next((process for process in processes if is_snap(process)), None)
    if process is None and read_unit(host, SNAP_UNIT) is None:
        return None
    own = process.option("--config-file") if process else None
    path = CONFIG if own is None or same_file(host, own, CONFIG) else own
    if config and not same_file(host, config, path):
        return None
    argv = process.argv if process else ()
    return Daemon(
        name="docker",
        binary=None,  # outside its confinement its libraries are missing
        version=_version(host),
        config_path=path,
        config_source="the docker snap" + (f", process {process.pid}" if process else ""),
        socket=socket_of(host, argv, path),
        unit=SNAP_UNIT,
        argv=argv,
        process=process,
        manager="snap",
    )


def is_snap(process: Process) -> bool:
    """Whether a dockerd is the snap's, by the file that its wrapper names."""
    return (process.option("--config-file") or "").startswith(_DATA)


def _version(host: Host) -> tuple[int, ...]:
    """The snap has dockerd's version; its description is in every mounted revision."""
    described = host.read_text("/snap/docker/current/meta/snap.yaml") or ""
    match = re.search(r"^version: *['\"]?([^'\"\n]+)", described, re.MULTILINE)
    return parse_version(match[1]) if match else ()


# A user's rootless Docker: its daemon.json, socket and unit are in that user's directories.
#
# dockerd finds its file below ``$XDG_CONFIG_HOME`` (else ``~/.config``) and listens in ``$XDG_RUNTIME_DIR``
# where RootlessKit started it (moby cmd/dockerd). The variables that count are those of the running process.

ROOTLESS_UNIT = "docker.service"  # what dockerd-rootless-setuptool.sh installs for `systemctl --user`


def find_rootless(host: Host, daemons: Sequence[Process], config: str | None = None) -> Daemon | None:
    """The rootless Docker of the ordinary user who runs gpunode; None for root and for users without one."""
    if not host.live or host.is_root:
        return None
    own = [daemon for daemon in daemons if daemon.uid == host.uid]
    process = next(
        (daemon for daemon in own if not config or same_file(host, _config(host, daemon), config)), None
    )
    place = places(host, process)
    path = _config(host, process) if process else place.daemon_json
    unit = read_unit(host, ROOTLESS_UNIT, place.units)
    if config and not same_file(host, config, path):
        return None
    if process is None and unit is None and not config:
        return None
    return _daemon(host, process, unit, place, path)


def find_others(host: Host, daemons: Sequence[Process]) -> tuple[Daemon, ...]:
    """The rootless Dockers of other users than the one who runs gpunode."""
    own = {0, host.uid} if host.live else {0}
    others = []
    for process in daemons:
        uid = process.uid
        if uid not in own:
            place = places(host, process, uid)
            unit = read_unit(host.as_user(uid), ROOTLESS_UNIT, place.units)
            others.append(_daemon(host, process, unit, place, _config(host, process, uid), uid))
    return tuple(others)


def _daemon(
    host: Host,
    process: Process | None,
    unit: SystemdUnit | None,
    place: UserDirectories,
    path: str,
    uid: int | None = None,
) -> Daemon:
    user_host = host if uid is None else host.as_user(uid)
    daemon = Daemon(
        name="docker",
        binary=find_binary(host, "dockerd", process, None) if user_host is host else None,
        version=(),
        config_path=path,
        config_source=f"process {process.pid}, rootless" if process else "rootless Docker's default path",
        socket="",
        unit=ROOTLESS_UNIT if unit is not None and _runs_it(host, process, unit) else None,
        argv=process.argv if process else unit.argv if unit else (),
        process=process,
        user=account(host, host.uid if uid is None else uid).name,
    )
    return _with_socket(user_host, daemon, f"{place.runtime_directory}/docker.sock")


def _config(host: Host, process: Process, uid: int | None = None) -> str:
    return process.option("--config-file") or places(host, process, uid).daemon_json


def _runs_it(host: Host, process: Process | None, unit: SystemdUnit) -> bool:
    """Whether the user's systemd runs it: a dockerd that was started in a terminal is in another group."""
    if process is None:
        return True
    text = host.text_or_empty(f"/proc/{process.pid}/cgroup")
    parts = [part for line in text.splitlines() for part in line.rpartition(":")[2].split("/")]
    return unit.name in parts or not any(part.endswith((".service", ".scope")) for part in parts)


def as_user(user: Account) -> str:
    """The command that configures a user's rootless Docker, as root runs it."""
    runtime = f"XDG_RUNTIME_DIR={user.runtime_directory}"
    return f"sudo -Hu {sudo_name(user.name)} {runtime} gpunode configure-runtime --runtime docker"


DEFAULT_CONFIG = "/etc/docker/daemon.json"
_KNOWN = KnownDaemon("docker", "docker.service", DEFAULT_CONFIG, ("--config-file",))


def find_docker(host: Host, config: str | None = None) -> Daemon | None:
    """The dockerd that reads `config`, else the node's; None if there is none.

    An ordinary user gets their own rootless one if they have one. Otherwise it is the system's, or the snap's
    if only that runs or is installed.
    """
    daemons = running(host, "dockerd")
    own = find_rootless(host, daemons, config)
    if own is not None:
        return own
    roots = tuple(daemon for daemon in daemons if daemon.uid == 0)
    snap = find_snap(host, roots, config)
    if snap is not None and config:
        return snap
    system = _system(host, tuple(root for root in roots if not is_snap(root)), config)
    if snap is not None and (system is None or (system.process is None and snap.process is not None)):
        return snap
    return system


def _system(host: Host, processes: tuple[Process, ...], config: str | None) -> Daemon | None:
    daemon = locate(host, _KNOWN, processes, config)
    return _with_socket(host, daemon, DEFAULT_SOCKET) if daemon is not None else None


def _with_socket(host: Host, daemon: Daemon, default: str) -> Daemon:
    """The daemon with its socket and its version."""
    daemon = daemon._replace(socket=socket_of(host, daemon.argv, daemon.config_path, default))
    return daemon._replace(version=_docker_version(host, daemon))


def rootless_docker(host: Host) -> Process | None:
    """A dockerd that an ordinary user runs, None if there is none."""
    processes = (process for process in running(host, "dockerd") if process.uid != 0)
    return next(processes, None)


# How containers of a user's rootless Docker get their GPUs, and whether the hook works there.
#
# The toolkit's prestart hook writes device cgroups, which a rootless engine may not: ``no-cgroups`` in the
# toolkit configuration that dockerd's environment selects prevents that. CDI doesn't need the hook.

CONFIG_VARIABLE = "NVIDIA_CTK_CONFIG_FILE_PATH"


def hook_injects(host: Host, daemon: Daemon, programs: tuple[str, ...]) -> bool:
    """Whether a container may get its GPUs through the hook: in legacy mode, or with ``--gpus``.

    `programs` are those of Docker's nvidia runtimes.
    """
    if any(path.endswith(".legacy") for path in programs):
        return True
    mode = _setting(host, daemon, "nvidia-container-runtime", "mode") or "auto"
    if mode != "auto":
        # in cdi, jit-cdi and csv the hook refuses to run, so --gpus doesn't use it either
        return mode == "legacy"
    toolkit = find_toolkit(host)
    hook = "nvidia-container-runtime-hook" in toolkit.programs
    # before jit-cdi the mode auto means legacy; docker run --gpus used the hook before it used CDI
    return not can("toolkit", "jit-cdi", toolkit.version) or (
        hook and not can("docker", "gpus-by-cdi", daemon.version)
    )


def no_cgroups(host: Host, daemon: Daemon) -> bool:
    """Whether the toolkit configuration of this user, else of the node, makes the hook skip cgroups."""
    return _setting(host, daemon, "nvidia-container-cli", "no-cgroups") is True


def _setting(host: Host, daemon: Daemon, *keys: str) -> Any:
    """A value of the toolkit configuration that dockerd's environment selects; None for broken files."""
    config_path = environment(host, daemon.process.pid).get(CONFIG_VARIABLE) if daemon.process else None
    uid = daemon.process.uid if daemon.process else None
    path = config_path or places(host, daemon.process, uid).toolkit_config
    text = as_daemon_user(host, daemon).read_text(path) or host.read_text(DEFAULT_PATH) or ""
    try:
        return dig(toml(text), *keys)
    except ValueError:
        return None  # the command that edits the file reports what is wrong with it


# Docker Desktop for Linux, which runs containers in a virtual machine and redirects the `docker` command to
# it. It runs ``com.docker.backend`` as the user; the command line follows `currentContext` of the user's
# ~/.docker/config.json, which Desktop sets to ``desktop-linux``.

DESKTOP_CONTEXT = "desktop-linux"
_DESKTOP_PROGRAM = "com.docker.backend"


class Desktop(NamedTuple):
    """One user's running Docker Desktop. `context` is the context of their docker command, None if unknown;
    `config` is the file that sets it."""

    user: str
    pid: int
    config: str
    context: str | None


def running_desktops(host: Host, processes: Iterable[Process]) -> tuple[Desktop, ...]:
    """One per user; only homes of users who run Desktop are read."""
    desktops: dict[str, Desktop] = {}
    for process in processes:
        if process.name == _DESKTOP_PROGRAM:
            user = account(host, process.uid)
            config = f"{user.home.rstrip('/')}/.docker/config.json"
            desktops.setdefault(
                user.name,
                Desktop(user.name, process.pid, config, _context(host.as_user(process.uid), config)),
            )
    return tuple(desktops.values())


def _context(host: Host, path: str) -> str | None:
    try:
        text = host.read_text(path)
        tree: Any = json.loads(text) if text is not None else {}
    except (GpunodeError, ValueError, RecursionError):
        return None
    name = tree.get("currentContext", "default") if isinstance(tree, dict) else None
    return name if isinstance(name, str) else None
