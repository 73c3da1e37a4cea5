"""Checks of Docker: it is running, with the nvidia runtime."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gpunode.checks import fixes
from gpunode.checks.finding import RESTARTS_DOCKER, RESTARTS_OTHER_DOCKER, Evidence, Fix
from gpunode.checks.fixes import per_family
from gpunode.checks.model import (
    Verdict,
    check,
    engine_check,
    fail,
    if_installed,
    if_reported,
    if_used,
    line_in,
    ok,
    place_of,
    seen,
    seen_in,
    skip,
    unparsable,
    warn,
)
from gpunode.checks.next_start import lost_at_restart
from gpunode.checks.units import after_reading_log, if_stopped_again, seen_unit
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts import tables
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker import (
    TABLE,
    VALIDATES,
    beyond_reload,
    flag_conflicts,
    listens_there,
    nvidia_programs,
    parse_daemon_json,
    programs,
    unknown_keys,
    wrong_types,
)
from gpunode.facts.engines import docker_role
from gpunode.facts.node import Node
from gpunode.facts.packages import toolkit_installed, utc
from gpunode.facts.processes import option_values
from gpunode.facts.services import UnitState
from gpunode.facts.system import TEGRA, WSL2
from gpunode.facts.users import sudo_name
from gpunode.host.redact import shown_arguments, without_secrets
from gpunode.output.typed import as_dict

docker_check = partial(engine_check, preflight=("docker",))

# Test of Docker with a container that computes on a GPU. Only with --deep, if a container can be started.


@check(
    "docker-gpus-run-probe",
    title="A Docker container can compute on a GPU",
    looks_at="a container that adds two vectors on one GPU; gpunode verify --on docker does the same on all "
    "GPUs. Its image is built from this node's own Python: nothing is pulled, and image and "
    "container are removed afterwards.",
    fix=fixes.look("gpunode verify --on docker", "Fix what it reports: it names the step that fails"),
    blocked_by=(
        "pci-no-gpu",
        "nvml-hang",
        "toolkit-missing",
        "docker-snap",
        "docker-desktop",
        "toolkit-versions-mixed",
        "toolkit-config-invalid",
        "ldconfig-fails",
        "no-cgroups-wrong",
        "cdi-disabled",
        "cdi-spec-stale",
        "cdi-uvm-absent-in-spec",
        "docker-not-running",
        "docker-default-runtime",
        "docker-not-restarted",
        "docker-runtime-missing",
    ),
    deep=True,
    refs=("https://docs.docker.com/engine/containers/resource_constraints/#gpu",),
)
@if_used("docker")
def docker_gpus_run_probe(node: Node, docker: Daemon) -> Verdict:
    """Each component may look right while containers still get no GPU. The error message names what is
    missing.
    """
    from gpunode.gpu.vectoradd import plan

    start = node.trials.get("docker")
    if start is None:
        return skip("gpunode can't start a container on this node")
    uuids = plan(node.nvml.inventory).uuids
    if not uuids:
        return skip("NVML lists no GPU to test")
    trial = start(node.host, uuids[0])
    if trial.passed is None:
        return skip(f"the test didn't run: {trial.text}")
    tried = seen("gpunode verify --on docker", trial.text)
    if trial.passed:
        return ok("a Docker container computes on a GPU", tried)
    return fail("a Docker container can't compute on a GPU", tried)


# Fixes for Docker itself.

_GUIDE = "https://docs.docker.com/engine/install/"

UPGRADE = fixes.package_fix(
    "upgrade",
    ("docker-ce", "docker-ce", "docker"),
    f"follow {_GUIDE}",
    disruptive="restart",
    disturbs=RESTARTS_DOCKER,
)

# settings that a running dockerd takes over on SIGHUP (moby daemon/reload.go)
_RELOADED = ("runtimes", "default-runtime", "live-restore", "insecure-registries", "registry-mirrors")

_USUAL = ("fd://", "unix:///run/docker.sock", "unix:///var/run/docker.sock")
_NO_COMMA = "Leave no comma before }"
_RELOADS = "Docker is running. This reloads it: running containers continue"

PACKAGES = ("docker-ce", "docker.io", "moby-engine", "docker")


def restart_docker(daemon: Daemon, verb: str = "restart") -> str:
    """Command that restarts or reloads this Docker: the system's, the snap's or a user's."""
    if daemon.manager == "snap":
        return "snap restart docker"
    return f"systemctl {'--user ' if daemon.user else ''}{verb} docker"


def edit(node: Node, docker: Daemon, line: int | None, change: str, *, reload: bool = False) -> Fix:
    """Open its file at a line, and restart dockerd. With `reload`, a running dockerd takes this change over
    without a restart."""
    again = _reload(node, docker) if reload and _reloads(node, docker) else _restart(node, docker)
    return fixes.edit_file(docker.config_path, line, change, _validated(docker, again))


def _validated(docker: Daemon, fix: Fix) -> Fix:
    """The fix, if dockerd accepts its file: dockerd doesn't start with a wrong one."""
    if docker.version < VALIDATES or docker.manager or docker.user:
        return fix
    return fix.after(f"dockerd --validate --config-file {docker.config_path}")


def _reloads(node: Node, docker: Daemon) -> bool:
    """Whether dockerd is running and can load its runtimes by a reload; a snap can only be restarted."""
    if docker.process is None or docker.manager == "snap":
        return False
    return not beyond_reload(node.host, docker)


_CONFIGURE = fixes.CONFIGURE_DOCKER.command
REPLACE_SNAP = per_family(
    f"snap remove docker && apt install docker.io && {_CONFIGURE}",
    f"snap remove docker && dnf install docker-ce && {_CONFIGURE}",
    f"snap remove docker && zypper install docker && {_CONFIGURE}",
    f"follow {_GUIDE}",
    disruptive="drain",
    note="The new Docker starts without the snap's containers and images; snap saved lists their snapshot",
    effect="stops and removes all containers of the snap, with its images and volumes",
    before="First save what you need: docker save, docker cp, and a copy of /var/snap/docker/common",
)
INSTALL = per_family(
    f"apt install docker.io && {_CONFIGURE}",
    f"dnf install docker-ce && {_CONFIGURE}",
    f"zypper install docker && {_CONFIGURE}",
    f"follow {_GUIDE}",
)

_FOR_DESKTOP = {"debian": "apt install docker-ce", "rhel": "dnf install docker-ce"}


def beside_desktop(node: Node, user: str) -> Fix:
    """Install a Docker on the node for a user of Docker Desktop. That needs Docker's own docker-ce-cli, which
    a distribution's docker.io would remove."""
    context = f"sudo -Hu {sudo_name(user)} docker context use default"
    if node.docker is not None:
        return Fix(context)
    install = _FOR_DESKTOP.get(node.distribution.family)
    if install is None:
        return Fix(f"follow {_GUIDE}", needs_root=False)
    return Fix(f"{install} && {context} && {_CONFIGURE}")


# Docker's file: it can be parsed, and repeats no flag.

_UNPARSABLE = "Docker's configuration file can't be parsed: see docker-config-invalid-json"


@docker_check(
    "docker-config-invalid-json",
    title="Docker's configuration file can be parsed",
    looks_at="the file that dockerd reads (--config-file, else /etc/docker/daemon.json), as strict JSON. A "
    "duplicate key is a warning; an empty file or a byte order mark is an error before Docker 23. "
    "If the kubelet uses another engine, all of this is a warning.",
    fix=fixes.EDIT_DAEMON_JSON,
    reboot=True,
    refs=(
        "https://docs.docker.com/engine/daemon/troubleshoot/",
        "https://github.com/NVIDIA/nvidia-docker/issues/542",
    ),
)
@if_installed("docker")
def docker_config_invalid_json(node: Node, docker: Daemon) -> Verdict:
    """A running Docker keeps the configuration that it loaded earlier. At its next start it refuses the file,
    and all of its containers stay down.
    """
    path = docker.config_path
    try:
        config = node.docker_config
    except ConfigError as error:
        where, change = unparsable(node.host, error)
        fix = _correct(node, docker, where.line, change)
        why = "" if docker.process else "Docker refuses the file and doesn't start with it."
        return _judge(node)(f"{path} can't be parsed", where, fix=fix, why=why)
    return _unusual_text(node, docker) or ok(
        f"{path} can be parsed" if config else f"{path} doesn't exist or is empty, which is valid"
    )


def _unusual_text(node: Node, docker: Daemon) -> Verdict | None:
    """Text that some dockerd releases refuse, or that dockerd reads differently than intended."""
    path, text = docker.config_path, node.host.read_text(docker.config_path)
    if text is None:
        return None
    if tables.can("docker", "empty-file", docker.version) is False:
        release = docker.release
        if not text.strip():
            fix = Fix(f"echo '{{}}' > {path}")
            return _judge(node)(f"Docker {release} refuses an empty file", seen(path, "empty"), fix=fix)
        if text.startswith("\ufeff"):
            fix = Fix(f"sed -i '1s/^\\xef\\xbb\\xbf//' {path}")
            answer = seen(path, "starts with a byte order mark", 1)
            return _judge(node)(f"Docker {release} can't read a byte order mark", answer, fix=fix)
    try:
        parse_daemon_json(text, path)
    except ConfigError as error:
        where = place_of(error)
        fix = _correct(node, docker, where.line, "delete all but one of the duplicate keys")
        what = f"{path} has a duplicate key: the last value takes effect"
        return warn(what, where, fix=fix, why="Docker ignores the other values of this setting.")
    return None


def _correct(node: Node, docker: Daemon, line: int | None, change: str) -> Fix:
    """Correct the file. A running dockerd needs nothing more, one that is this node's engine and isn't
    running has to start."""
    if docker.process is None and docker_role(node).used:
        return edit(node, docker, line, change)
    fix = fixes.edit_file(docker.config_path, line, change)
    if not _reloads(node, docker):
        return fix
    note = (
        "Docker keeps the settings that it has loaded. This loads the corrected file and stops no container:"
    )
    return replace(fix, note=f"{note}\n{_validated(docker, _reload(node, docker)).command}")


def _judge(node: Node) -> Callable[..., Verdict]:
    """`fail` for this node's engine, else `warn`: nothing that needs GPUs breaks."""
    return fail if docker_role(node).used else warn


def _readable(node: Node) -> dict[str, Any] | None:
    """daemon.json; None if it can't be parsed, which docker-config-invalid-json reports."""
    try:
        return node.docker_config
    except ConfigError:
        return None


@docker_check(
    "docker-flag-file-conflict",
    title="Docker's flags and file don't conflict",
    looks_at="the arguments of the running dockerd, else those in its unit and drop-ins, against the keys "
    "of daemon.json. Only runtimes may be set in both.",
    fix=fixes.EDIT_DAEMON_JSON,
    blocked_by=("pci-no-gpu", "docker-config-invalid-json"),
    reboot=True,
    refs=("https://docs.docker.com/engine/daemon/troubleshoot/",),
)
@if_installed("docker")
def docker_flag_file_conflict(node: Node, docker: Daemon) -> Verdict:
    """dockerd doesn't start if a setting is given both as a flag and in the file, even with equal values. A
    common conflict is -H fd:// in the unit and hosts in the file. A running dockerd keeps the configuration
    that it loaded earlier.
    """
    config = _readable(node)
    if config is None:
        return skip(_UNPARSABLE)
    keys = flag_conflicts(docker.argv, config)
    if not keys:
        return ok("no setting is given both as a flag and in the file")
    flags = seen(docker.unit or "dockerd's arguments", " ".join(shown_arguments(docker.argv)))
    path = docker.config_path
    places = {key: line_in(node.host, path, f'"{key}"') for key in keys}
    evidence = (seen(path, f"{_setting(key, config)} is also a flag", line) for key, line in places.items())
    # from the end of the file, so that the other line numbers remain right
    first, *others = sorted(places.items(), key=lambda place: -(place[1] or 0))
    parts = (f'delete "{first[0]}"', *(f'line {line or "?"}: delete "{key}"' for key, line in others))
    change = f"{'; '.join(parts)}. {_NO_COMMA}. Keep the flags"
    # a running dockerd started with the flag alone, so nothing changes for it
    fix = edit(node, docker, first[1], change, reload=True)
    if "hosts" in keys and (more := _other_addresses(docker.argv, config["hosts"])):
        unit = docker.unit or "dockerd's unit"
        fix = replace(fix, before=f"First, if clients need it, add to {unit}: -H {' -H '.join(more)}")
    stops = "runs, but can't start again" if docker.process else "can't start"
    summary = f"Docker {stops}: its flags and {path} both set {', '.join(keys)}"
    why = "dockerd doesn't start if a setting is both a flag and in the file, even with equal values."
    return _judge(node)(summary, *evidence, flags, fix=fix, why=f"{why}{_until_restarted(docker)}")


def _setting(key: str, config: dict[str, Any]) -> str:
    """A setting as in daemon.json; of an object and of a setting in one, only the name is shown."""
    value = config.get(key)
    shown = not isinstance(value, (dict, type(None)))
    return f'"{key}": {without_secrets(json.dumps(value))}' if shown else f'"{key}"'


def _other_addresses(argv: tuple[str, ...], hosts: object) -> list[str]:
    """Addresses of daemon.json's hosts that the flags don't have; systemd listens at the usual socket."""
    flags = option_values(argv, "-H", "--host")
    return [
        address
        for address in (hosts if isinstance(hosts, list) else [hosts])
        if isinstance(address, str) and not address.startswith(_USUAL) and address not in flags
    ]


def _until_restarted(docker: Daemon) -> str:
    running = " The running dockerd keeps the configuration that it loaded earlier."
    return running if docker.process else ""


@docker_check(
    "docker-not-running",
    title="Docker is running",
    looks_at="Docker's socket and whether the daemon answers within 3 seconds, if Docker is this node's "
    "engine. A stopped Docker is fine if the kubelet uses another engine or its unit is masked. A "
    "docker.socket of systemd isn't woken up, but docker.service behind it must not have failed.",
    fix=fixes.START_DOCKER,
    blocked_by=(
        "pci-no-gpu",
        "docker-config-invalid-json",
        "docker-unknown-key",
        "docker-flag-file-conflict",
    ),
    refs=("https://docs.docker.com/engine/daemon/troubleshoot/",),
)
@if_used("docker")
def docker_not_running(node: Node, docker: Daemon) -> Verdict:
    """Containers can't start while the daemon is down or hangs."""
    socket = docker.socket
    if docker.process is not None and not listens_there(node.host, docker.argv, docker.config_path):
        return ok(
            "Docker is running and listens only on TCP",
            seen("dockerd", " ".join(shown_arguments(docker.argv))),
        )
    if docker.process is None and _activated_by_systemd(node, socket):
        unit = _system_unit(node, docker)
        if unit is not None and unit.has_failed:
            summary = (
                "Docker failed; docker.socket is still active and starts it again on the next connection"
            )
            fix = after_reading_log(unit.name, _restart(node, docker))
            return fail(summary, *seen_unit(node, unit.name), fix=fix)
        return skip("docker.socket starts Docker on the first connection; this check doesn't start it")
    state = node.host.socket_state(socket)
    if state == "listening":
        return _hanging(node, docker) or ok("Docker is running", seen(socket, "listening"))
    if state == "denied":
        return skip(f"needs root or membership in the group docker to connect to {socket}")
    return _stopped(node, docker, seen(socket, state))


def _system_unit(node: Node, docker: Daemon) -> UnitState | None:
    """docker.service, if this Docker is the system's own."""
    return None if docker.manager or docker.user else node.units.get("docker.service")


def _stopped(node: Node, docker: Daemon, evidence: Evidence) -> Verdict:
    unit = _system_unit(node, docker)
    if unit is not None and unit.load == "masked":
        return skip("Docker is disabled on purpose: docker.service is masked")
    if unit is None or not unit.installed:
        return fail("Docker isn't running", evidence, fix=_restart(node, docker))
    fix = _restart(node, docker)
    if unit.file == "disabled":  # the next boot wouldn't start it either
        fix = replace(fix, command="systemctl enable --now docker")
    fix = replace(fix, note=if_stopped_again(unit.name.removesuffix(".service")))
    return fail("Docker isn't running", evidence, *seen_unit(node, unit.name), fix=fix)


def _hanging(node: Node, docker: Daemon) -> Verdict | None:
    """A daemon that accepts connections and doesn't answer."""
    try:
        node.docker_info  # noqa: B018 - read for its failure
    except DaemonError as error:
        if error.code == "timeout":
            return fail(
                "Docker is running, but doesn't answer",
                seen(docker.socket, error.message),
                fix=_restart(node, docker),
            )
    return None


def _restart(node: Node, docker: Daemon) -> Fix:
    command = _by_init(node, restart_docker(docker))
    disturbs = RESTARTS_OTHER_DOCKER if docker.manager == "snap" else RESTARTS_DOCKER
    return Fix(command, needs_root=not docker.user, disruptive="restart", disturbs=disturbs)


def _reload(node: Node, docker: Daemon) -> Fix:
    command = _by_init(node, restart_docker(docker, "reload"))
    return Fix(command, needs_root=not docker.user, note=_RELOADS)


def _by_init(node: Node, command: str) -> str:
    """WSL may run without systemd."""
    if node.kind == WSL2 and not node.host.systemd_runs():
        return re.sub(r"^systemctl (\w+) docker$", r"service docker \1", command)
    return command


def _load_runtimes(node: Node, docker: Daemon, config: dict[str, Any], info: dict[str, Any]) -> Fix:
    """dockerd reads runtimes and default-runtime again on SIGHUP. Docker 20.10 then crashes if its present
    default isn't in the file."""
    known = ("runc", *as_dict(config.get("runtimes")))
    crashes = not config.get("default-runtime") and info.get("DefaultRuntime") not in known
    if crashes or not _reloads(node, docker):
        return _restart(node, docker)
    return _reload(node, docker)


def _activated_by_systemd(node: Node, socket: str) -> bool:
    """Whether systemd listens for a dockerd that isn't running: connecting would start it."""
    table = (node.host.read_text("/proc/net/unix") or "").splitlines()
    names = {socket, socket.replace("/var/run/", "/run/")}
    return any(line.split()[-1] in names for line in table if line.split())


@engine_check(
    "docker-not-restarted",
    title="The running Docker has loaded its configuration file",
    looks_at="runtimes and default-runtime in daemon.json against what the running daemon reports (/info). "
    "If the kubelet uses another engine, a difference is a warning, and so is an nvidia runtime or default "
    "that only the running daemon has.",
    fix=fixes.RELOAD_DOCKER,
    blocked_by=(
        "pci-no-gpu",
        "docker-snap",
        "docker-config-invalid-json",
        "docker-unknown-key",
        "docker-flag-file-conflict",
        "docker-not-running",
    ),
    refs=(
        "https://docs.docker.com/reference/cli/dockerd/#configuration-reload-behavior",
        "https://github.com/NVIDIA/nvidia-docker/issues/1034",
    ),
)
@if_installed("docker")
def docker_not_restarted(node: Node, docker: Daemon) -> Verdict:
    """Docker reads its file only when it starts or reloads. Until then the nvidia runtime exists only on
    disk: unknown or invalid runtime name.
    """
    if docker.process is None and not docker_role(node).used:
        return skip(docker_role(node).reason)
    config = _readable(node)
    if config is None:
        return skip(_UNPARSABLE)
    runtimes = programs(config)
    info = node.docker_info
    path = docker.config_path
    missing = sorted(set(runtimes) - set(as_dict(info.get("Runtimes"))))
    default = config.get("default-runtime")
    evidence = [seen_in(node.host, path, f'runtime "{name}"', f'"{name}"') for name in missing]
    if isinstance(default, str) and default and default != info.get("DefaultRuntime"):
        evidence.append(seen_in(node.host, path, f'default-runtime "{default}"', '"default-runtime"'))
    active = ", ".join(sorted(as_dict(info.get("Runtimes")))) or "none"
    answer = seen(f"{docker.socket} /info", f"runtimes: {active}; default: {info.get('DefaultRuntime')}")
    if not evidence:
        own, now = nvidia_programs(info, "Runtimes"), str(info.get("DefaultRuntime") or "")
        refused = any(wrong_types(config))  # which docker-unknown-key reports
        lost = None if refused else lost_at_restart(node, docker, own, now, answer, _restart(node, docker))
        return lost or ok("the running Docker has loaded its configuration file")
    what = f"the runtime {', '.join(missing)}" if missing else f"the default runtime {default}"
    summary = f"Docker hasn't loaded {what} from {path} yet"
    return _judge(node)(summary, *evidence, answer, fix=_load_runtimes(node, docker, config, info))


@engine_check(
    "docker-runtime-missing",
    title="Docker has the nvidia runtime",
    looks_at="the runtimes of the running daemon (/info), and whether their binaries exist, if Docker is "
    "this node's engine. It is a warning if only --runtime=nvidia is affected, because docker run "
    "--gpus uses the toolkit's hook, and no fault if Docker adds GPUs through CDI.",
    fix=fixes.CONFIGURE_DOCKER,
    blocked_by=(
        "pci-no-gpu",
        "toolkit-missing",
        "docker-snap",
        "docker-not-running",
        "docker-not-restarted",
        "docker-default-runtime",
        "docker-config-invalid-json",
        "cdi-disabled",
    ),
    refs=("https://docs.docker.com/engine/containers/resource_constraints/#gpu",),
)
@if_used("docker")
def docker_runtime_missing(node: Node, docker: Daemon) -> Verdict:
    """Without the runtime, --runtime=nvidia and compose files that name it fail with 'unknown or invalid
    runtime name', and pods that the kubelet starts through Docker get no GPU.
    """
    info = node.docker_info
    active = programs(info, "Runtimes")
    answer = f"{docker.socket} /info"
    nvidia = nvidia_programs(info, "Runtimes")
    if not nvidia:
        registered = seen(answer, f"runtimes: {', '.join(sorted(active)) or 'none'}")
        return _not_registered(node, docker, info, registered)
    for name, path in nvidia.items():
        if path and not node.host.which(path):
            return _left_behind(node, docker, info, seen(answer, f"{name}: {path}"))
    return ok(f"Docker has loaded the runtime {', '.join(nvidia)}", seen(answer, ", ".join(sorted(active))))


def _left_behind(node: Node, docker: Daemon, info: dict[str, Any], evidence: Evidence) -> Verdict:
    """A runtime without its binary, after the toolkit was replaced by CDI: only its entry must be removed."""
    by_cdi = _by_cdi(node, info)
    name = evidence.value.partition(":")[0]
    line = line_in(node.host, docker.config_path, '"nvidia-container-runtime"')
    change = f'delete the entry "{name}" of "runtimes"'
    fix = edit(node, docker, line, change, reload=info.get("DefaultRuntime") != name) if by_cdi else None
    return (warn if by_cdi else fail)(f'the binary of the runtime "{name}" is missing', evidence, fix=fix)


def _by_cdi(node: Node, info: dict[str, Any]) -> bool:
    """Whether this Docker can add GPUs to containers through CDI."""
    return bool(info.get("CDISpecDirs")) and bool(node.gpu_specs)


def _not_registered(node: Node, docker: Daemon, info: dict[str, Any], evidence: Evidence) -> Verdict:
    """``--gpus`` needs no runtime: from 19.03 Docker calls the toolkit's hook, later releases use CDI."""
    kubelet = node.kubelet
    if kubelet is not None and kubelet.engine == "docker":
        return fail("the nvidia runtime isn't configured, and the kubelet's pods need it", evidence)
    if _by_cdi(node, info):
        return ok("Docker adds GPUs to containers through CDI; the nvidia runtime isn't configured", evidence)
    # on a Jetson --gpus alone isn't enough: only the runtime adds the files that a container needs
    hook = node.toolkit.programs.get("nvidia-container-runtime-hook")
    if hook and node.kind != TEGRA:
        late = _started_before(node, docker, hook)
        if late is not None:
            what = "Docker started before the toolkit was installed: --gpus works after a restart of Docker"
            return fail(what, *late, evidence, fix=_restart(node, docker))
        return warn("the nvidia runtime isn't configured: --gpus works, --runtime=nvidia doesn't", evidence)
    return fail("the nvidia runtime isn't configured", evidence)


def _started_before(node: Node, docker: Daemon, hook: str) -> tuple[Evidence, ...] | None:
    """Docker looks for the toolkit's hook only when it starts (moby, daemon/nvidia_linux.go)."""
    process = docker.process
    installation = toolkit_installed(node.host, node.packages, hook) if process else None
    if process is None or installation is None or installation[0] <= process.started:
        return None
    source, _, value = installation[1].partition(": ")
    return (
        seen(source, value or "installed"),
        seen(f"/proc/{process.pid}", f"dockerd, started {utc(process.started)}"),
    )


# Docker's settings: unknown keys, a missing default runtime, a different cgroup driver.


@docker_check(
    "docker-unknown-key",
    title="Docker supports every setting in its file",
    looks_at="the keys of daemon.json and the types of their values. A key that gpunode doesn't know is "
    "checked with dockerd --validate, which only reads the file. If the kubelet uses another engine, a "
    "setting that dockerd refuses is a warning.",
    fix=fixes.EDIT_DAEMON_JSON,
    blocked_by=("pci-no-gpu", "docker-config-invalid-json"),
    reboot=True,
    refs=("https://docs.docker.com/reference/cli/dockerd/#daemon-configuration-file",),
    table=TABLE,
)
@if_installed("docker")
def docker_unknown_key(node: Node, docker: Daemon) -> Verdict:
    """dockerd doesn't start with an unknown setting, or with a value of the wrong type. The names of settings
    have hyphens: default-runtime, not default_runtime. A running dockerd keeps the configuration that it
    loaded earlier.
    """
    config = _readable(node)
    if config is None:
        return skip(_UNPARSABLE)
    keys, path = unknown_keys(node.host, docker, config), docker.config_path
    wrong = dict(wrong_types(config))
    if wrong:
        refused, what = "a value of the wrong type", f"Docker can't start with {path}: "
        what += ", ".join(wrong.values())
        places = [seen_in(node.host, path, reason, f'"{keys[0]}"') for keys, reason in wrong.items()]
        change = f"correct the value: {'; '.join(wrong.values())}"
        reload = all(keys[0] in _RELOADED for keys in wrong)
    elif keys is None:
        return skip("gpunode doesn't know a setting and couldn't run dockerd --validate")
    elif not keys:
        return ok("Docker supports every setting in its file")
    else:
        refused, what = "an unknown setting", f"Docker doesn't know the setting {', '.join(keys)}"
        places = [seen_in(node.host, path, f'"{key}"', f'"{key}"') for key in keys]
        change = "; ".join(_renamed(key)[0] for key in keys)
        reload = all(_renamed(key)[1] in ("", *_RELOADED) for key in keys)
    fix = edit(node, docker, places[0].line, change, reload=reload)
    why = f"dockerd doesn't start with {refused}.{_until_restarted(docker)}"
    return _judge(node)(what, *places, fix=fix, why=why)


def _renamed(key: str) -> tuple[str, str]:
    """How to correct an unknown setting: rename a known misspelling, else delete it; and its right name."""
    name = {"runtime": "runtimes"}.get(key, key.replace("_", "-"))
    return (f'delete "{key}". {_NO_COMMA}', "") if name == key else (f'change "{key}" to "{name}"', name)


@engine_check(
    "docker-default-runtime",
    title="The binary of Docker's default runtime exists",
    looks_at="the default runtime of the running daemon (/info) and its binary, if Docker is this node's "
    "engine.",
    fix=fixes.configure("docker", "--set-as-default"),
    blocked_by=("pci-no-gpu", "toolkit-missing", "docker-snap", "docker-not-running", "docker-not-restarted"),
    reboot=True,
    refs=("https://docs.docker.com/reference/cli/dockerd/#default-runtime",),
)
@if_used("docker")
def docker_default_runtime(node: Node, docker: Daemon) -> Verdict:
    """If the binary of the default runtime is missing, no container starts, with or without GPUs: exec:
    "nvidia-container-runtime": executable file not found.
    """
    info = node.docker_info
    name = str(info.get("DefaultRuntime") or "")
    program = programs(info, "Runtimes").get(name, "")
    is_nvidia = name in nvidia_programs(info, "Runtimes") or program.startswith("/")
    if not is_nvidia or not program or node.host.which(program):
        return ok(f"the default runtime is {name or 'unknown'}")
    path = docker.config_path
    line = line_in(node.host, path, '"default-runtime"')
    answer = seen(f"{docker.socket} /info", f"DefaultRuntime {name}: {program}")
    evidence = [seen(path, f'"default-runtime": "{name}"', line)] if line else []
    elsewhere = "nvidia-container-runtime" in node.toolkit.programs
    return fail(
        f"the binary of Docker's default runtime {name} is missing, so no container can start",
        *evidence,
        answer,
        fix=None
        if elsewhere
        else edit(node, docker, line, f'change "{name}" to "runc"', reload=line is not None),
    )


@engine_check(
    "docker-cgroup-driver-mismatch",
    title="Docker and the kubelet use one cgroup driver",
    looks_at="CgroupDriver of the running daemon (/info) and cgroupDriver of a kubelet that uses Docker.",
    fix=fixes.EDIT_DAEMON_JSON,
    blocked_by=("pci-no-gpu", "docker-not-running"),
    refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/#cgroup-drivers",),
)
@if_reported("docker")
def docker_cgroup_driver_mismatch(node: Node) -> Verdict:
    """If Docker uses another cgroup driver, the kubelet refuses to start or its pods are killed: kubelet
    cgroup driver: "systemd" is different from docker cgroup driver: "cgroupfs".
    """
    kubelet = node.kubelet
    if node.docker is None or kubelet is None or not kubelet.joined or kubelet.engine != "docker":
        return skip("no kubelet uses Docker on this node")
    docker = node.docker_info.get("CgroupDriver")
    if kubelet.cgroup_driver is None or docker not in ("systemd", "cgroupfs"):
        return skip("the cgroup driver of Docker or of the kubelet is unknown")
    answer = seen(f"{node.docker.socket} /info", f"CgroupDriver {docker}")
    if docker == kubelet.cgroup_driver:
        return ok(f"Docker and the kubelet use the cgroup driver {docker}", answer)
    return fail(
        "Docker and the kubelet use different cgroup drivers: Docker's exec-opts need "
        f"native.cgroupdriver={kubelet.cgroup_driver}",
        answer,
        seen("KubeletConfiguration cgroupDriver", kubelet.cgroup_driver),
        fix=_same_driver(node, node.docker, kubelet.cgroup_driver),
    )


def _same_driver(node: Node, docker: Daemon, driver: str) -> Fix:
    """Change Docker to the kubelet's driver: the other direction would require restarting every pod."""
    line = line_in(node.host, docker.config_path, "native.cgroupdriver")
    fix = edit(node, docker, line, f'set "exec-opts": ["native.cgroupdriver={driver}"]')
    return fixes.new_cgroup_driver(node, fix, "Docker")
