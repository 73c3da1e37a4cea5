"""The containerd of a Kubernetes distribution: k3s, rke2, k0s and microk8s.

Each starts it as a child process (microk8s as a service of its snap), with a file that it writes itself. The
facts are from the distributions' own sources: k3s pkg/agent/containerd and pkg/agent/templates, rke2's units,
k0s pkg/component/worker/containerd and pkg/config/cfgvars.go, microk8s' run-containerd-with-args.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gpunode.facts.daemons import (
    Daemon,
    distribution_unit,
    exe_of,
    manager,
    parse_version,
    same_file,
    socket_path,
)
from gpunode.facts.processes import Process, option_value, running
from gpunode.facts.registry import DISTRIBUTIONS
from gpunode.facts.systemd import SystemdUnit, read_unit
from gpunode.host import Host


class _Kind(NamedTuple):
    """Files and settings of a distribution; ``{data}`` is its data directory.

    `variable` and `settings` are the environment variable and the YAML file that may set another one. With
    the flags `other_engine` it runs no containerd of its own.
    """

    data: str
    config: str
    socket: str
    binaries: tuple[str, ...]
    log: str = ""
    variable: str = ""
    settings: str = ""
    other_engine: tuple[str, ...] = ()


_RANCHER_CONFIG = "{data}/agent/etc/containerd/config.toml"
_RANCHER_LOG = "{data}/agent/containerd/containerd.log"
_RANCHER_SOCKET = "/run/k3s/containerd/containerd.sock"
_RANCHER_OTHERS = ("--container-runtime-endpoint", "--docker", "--disable-agent")
_KINDS = {
    "k3s": _Kind(
        "/var/lib/rancher/k3s",
        _RANCHER_CONFIG,
        _RANCHER_SOCKET,
        ("{data}/data/current/bin/containerd",),
        _RANCHER_LOG,
        "K3S_DATA_DIR",
        "/etc/rancher/k3s/config.yaml",
        _RANCHER_OTHERS,
    ),
    "rke2": _Kind(
        "/var/lib/rancher/rke2",
        _RANCHER_CONFIG,
        _RANCHER_SOCKET,
        ("{data}/bin/containerd", "{data}/data/*/bin/containerd"),
        _RANCHER_LOG,
        "RKE2_DATA_DIR",
        "/etc/rancher/rke2/config.yaml",
        _RANCHER_OTHERS,
    ),
    "k0s": _Kind(
        "/var/lib/k0s",
        "/etc/k0s/containerd.toml",
        "/run/k0s/containerd.sock",
        ("{data}/bin/containerd",),
        other_engine=("--cri-socket",),
    ),
    "microk8s": _Kind(
        "/var/snap/microk8s/current",
        "{data}/args/containerd.toml",
        "/var/snap/microk8s/common/run/containerd.sock",
        ("/snap/microk8s/current/bin/containerd",),
    ),
}
K0S_MARK = "# k0s_managed=true"
K0S_DROP_INS = "/etc/k0s/containerd.d"
_WANTS = "/etc/systemd/system/multi-user.target.wants"
_CONFIG_FLAGS = ("--config", "-c")


def find_distribution(host: Host, name: str, processes: Sequence[Process] | None = None) -> Daemon | None:
    """The containerd of the distribution `name` (one of `DISTRIBUTIONS`), running or not.

    None if the distribution isn't installed, or uses another engine than its own. `config_path` is the file
    that the distribution writes and containerd reads; `unit` is what restarts both. `processes` are those
    that run, if the caller knows them: reading /proc takes time.
    """
    kind = _KINDS[name]
    known = running(host, "containerd") if processes is None else processes
    own = (
        candidate
        for candidate in known
        if candidate.name == "containerd" and manager(host, candidate) == name
    )
    process = next(own, None)
    unit = _unit(host, name, process)
    if process is None and (unit is None or _uses_another(host, kind, unit)):
        return None
    data = _data_directory(host, kind, process, unit)
    config = (process.option(*_CONFIG_FLAGS) if process else None) or kind.config.replace("{data}", data)
    # microk8s runs from its revision's directory; ``current`` leads to it and survives a refresh
    current = re.sub(r"^/var/snap/microk8s/[^/]+/", "/var/snap/microk8s/current/", config)
    if same_file(host, current, config):
        config = current
    binary = _binary(host, kind, process, data)
    address = (process.option("--address", "-a") if process else None) or kind.socket
    where = f"process {process.pid}" if process else (unit.files[0] if unit else "")
    return Daemon(
        name="containerd",
        binary=binary,
        version=_version(host, binary),
        config_path=config,
        config_source=f"{where} (managed by {name})",
        socket=socket_path(address) or address,
        unit=unit.name if unit else None,
        argv=process.argv if process else (),
        process=process,
        manager=name,
        log=kind.log.replace("{data}", data),
    )


def distribution_at(host: Host, endpoint: str) -> Daemon | None:
    """The distribution's containerd with this socket, a running one first; None if none has it."""
    processes = running(host, "containerd")
    daemons = (find_distribution(host, name, processes) for name in DISTRIBUTIONS)
    there = [daemon for daemon in daemons if daemon is not None and same_file(host, daemon.socket, endpoint)]
    return min(there, key=lambda daemon: daemon.process is None, default=None)


def k0s_manages(host: Host, config_path: str) -> bool:
    """Whether k0s manages this file: its first non-empty line says so, or it doesn't exist."""
    text = host.read_text(config_path)
    lines = (line for line in (text or "").splitlines() if line)
    return text is None or next(lines, "") == K0S_MARK


def sources(host: Host, daemon: Daemon) -> tuple[str, ...]:
    """The files that a user edits in place of a distribution's rendered file, if they exist."""
    if daemon.manager == "k0s" and not k0s_manages(host, daemon.config_path):
        return (daemon.config_path,)
    directory = daemon.config_path.rpartition("/")[0]
    names = {
        "k3s": ("config-v3.toml.tmpl", "config.toml.tmpl"),
        "rke2": ("config-v3.toml.tmpl", "config.toml.tmpl"),
        "microk8s": ("containerd-template.toml",),
    }
    paths = (f"{directory}/{name}" for name in names.get(daemon.manager, ()))
    return tuple(path for path in paths if host.exists(path))


def _unit(host: Host, name: str, process: Process | None = None) -> SystemdUnit | None:
    """The service to restart: the running containerd's, else the enabled one, else an installed one."""
    units = DISTRIBUTIONS[name].units
    own = distribution_unit(host, process) if process else ""
    enabled = [unit for unit in units if host.is_symlink(f"{_WANTS}/{unit}")]
    candidates = dict.fromkeys((*filter(None, [own]), *enabled, *units))
    return next(filter(None, (read_unit(host, unit) for unit in candidates)), None)


def _uses_another(host: Host, kind: _Kind, unit: SystemdUnit) -> bool:
    """Whether a stopped distribution would run no containerd of its own."""
    if any(argument.partition("=")[0] in kind.other_engine for argument in unit.argv):
        return True
    if unit.name == "k0scontroller.service" and "controller" in unit.argv:
        return not {"--enable-worker", "--single", "--enable-worker=true", "--single=true"} & set(unit.argv)
    names = (flag.removeprefix("--") for flag in kind.other_engine)
    return any(_setting(host, kind, name) not in ("", "false") for name in names)


def _data_directory(host: Host, kind: _Kind, process: Process | None, unit: SystemdUnit | None) -> str:
    """The distribution's data directory: from the running containerd, else as it would be started."""
    suffix = kind.config.removeprefix("{data}")
    config = (process.option(*_CONFIG_FLAGS) if process else None) or ""
    if suffix != kind.config and config.endswith(suffix):
        return config.removesuffix(suffix)
    root = process.option("--root") if process else None
    if root and root.endswith("/containerd"):
        return root.removesuffix("/containerd").removesuffix("/agent")
    argv = unit.argv if unit else ()
    variable = unit.environment.get(kind.variable, "") if unit else ""
    value = option_value(argv, "--data-dir", "-d") or variable or _setting(host, kind, "data-dir")
    return value.rstrip("/") or kind.data


def _setting(host: Host, kind: _Kind, key: str) -> str:
    """A value in the distribution's YAML settings; the last file of their directory takes precedence; "" if
    unset."""
    if not kind.settings:
        return ""
    value = ""
    for path in (kind.settings, *sorted(host.glob(f"{kind.settings}.d", "*.yaml"))):
        text = host.text_or_empty(path)  # a command that needs root reports one that it can't read elsewhere
        values = re.findall(rf"""^["']?{key}["']?[ \t]*:[ \t]*["']?([^"'\s#]+)""", text, re.MULTILINE)
        value = values[-1] if values else value
    return value


def _binary(host: Host, kind: _Kind, process: Process | None, data: str) -> str | None:
    if process is not None:
        for path in (exe_of(host, process.pid) or "", process.argv[0]):
            if path.startswith("/") and host.executable(path):
                return path
    for pattern in kind.binaries:
        parent, every, rest = pattern.replace("{data}", data).partition("/*")
        for path in reversed(host.glob(parent, "*")) if every else (parent,):
            if host.executable(f"{path}{rest}"):
                return f"{path}{rest}"
    return None


def _version(host: Host, binary: str | None) -> tuple[int, ...]:
    """containerd's version; () if unknown. k3s's containerd is one program with many names: under any other
    name, such as /proc/PID/exe, it prints k3s's own version."""
    if binary is None:
        return ()
    answer = host.run([binary, "--version"], timeout=5.0)
    return parse_version(answer.stdout) if answer.ok and answer.stdout.startswith("containerd") else ()
