"""Checks of the toolkit's config.toml, and of the ldconfig and the low-level runtimes that it names."""

from __future__ import annotations

from dataclasses import replace

from gpunode.checks import fixes
from gpunode.checks.finding import Evidence, Fix
from gpunode.checks.fixes import per_family
from gpunode.checks.model import (
    EVERYWHERE_BUT_TEGRA,
    Verdict,
    check,
    fail,
    note,
    ok,
    place_of,
    seen,
    skip,
)
from gpunode.checks.toolkit import change, cli_user
from gpunode.errors import ConfigError
from gpunode.facts import tables
from gpunode.facts.daemons import Daemon
from gpunode.facts.engines import containerd_role, crio_role, docker_role
from gpunode.facts.node import Node
from gpunode.facts.processes import environment
from gpunode.facts.system import BARE_METAL, CONTAINER, TEGRA, VM, WSL2
from gpunode.facts.toml import dig
from gpunode.facts.toolkit import (
    LDCONFIG,
    MODE,
    NO_CGROUPS,
    RUNTIMES,
    ToolkitSettings,
)
from gpunode.facts.traits import OPERATOR_DRIVER
from gpunode.gpu.library_paths import DRIVER_ROOT
from gpunode.host.process import COMMAND_NOT_FOUND

_LDCONFIG_SECONDS = 5.0
# what an upgrade leaves beside an edited file
_UNMERGED = (".dpkg-dist", ".dpkg-new", ".rpmnew")
# where packages install a low-level runtime that isn't on PATH
_LOW_LEVEL = ("/usr/libexec/crio/crun", "/usr/libexec/crio/runc")
_INSTALL_RUNC = per_family(
    "apt update && apt install runc",
    "dnf install runc",
    "zypper install runc",
    "follow https://github.com/opencontainers/runc#install",
)
# Docker's own package of containerd contains runc, and the distribution's would replace it
_REINSTALL_RUNC = fixes.package_fix(
    "reinstall", ["containerd.io"] * 3, "follow https://docs.docker.com/engine/install/"
)


def low_level(node: Node, settings: ToolkitSettings) -> Fix:
    """Set an installed low-level runtime, else install one."""
    host = node.host
    if host.which("runc") or host.which("crun"):
        return change(settings, "unset", RUNTIMES)
    path = next((path for path in _LOW_LEVEL if host.executable(path)), "")
    if path:
        return change(settings, "set", f"{RUNTIMES}={path}")
    install = _REINSTALL_RUNC if node.packages.version("containerd.io") else _INSTALL_RUNC
    return install.for_family(node.distribution.family)


@check(
    "toolkit-config-invalid",
    title="The toolkit's configuration is valid",
    looks_at="/etc/nvidia-container-runtime/config.toml, or the file beside the GPU operator's toolkit: "
    "syntax, types, and the ldconfig and low-level runtimes that it names.",
    fix=fixes.look(
        "gpunode toolkit config get",
        "Remove a setting that has a problem: gpunode toolkit config unset",
    ),
    blocked_by=("toolkit-missing",),
    classes=(BARE_METAL, VM, WSL2, TEGRA),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/tree/main/config",),
)
def toolkit_config_invalid(node: Node) -> Verdict:
    """The toolkit's programs read this file each time a container starts. With an error in it, or a wrong
    path of ldconfig, GPU containers don't start.
    """
    try:
        settings = node.toolkit_settings
    except ConfigError as error:
        place = place_of(error)
        path, number = place.source, place.line
        text = node.host.read_text(path) if number else None
        return fail(
            f"{path} can't be parsed",
            place,
            fix=fixes.edit_file(path, number, fixes.syntax(text, number)),
            why="The toolkit's programs read this file each time a container starts: GPU containers don't "
            "start with such an error in it.",
        )
    if not settings.exists:
        return ok(f"{settings.path} doesn't exist: the toolkit uses its defaults")
    wrong = _problems(node, settings)
    if wrong:
        evidence = [_at(settings, name, problem) for name, problem in wrong]
        fix = change(settings, "unset", *(name for name, _ in wrong))
        return fail(
            f"{settings.path}: {wrong[0][0]}: {wrong[0][1]}", *evidence, *_left(node, settings), fix=fix
        )
    return _programs(node, settings) or ok(f"{settings.path} is valid")


def _problems(node: Node, settings: ToolkitSettings) -> list[tuple[str, str]]:
    """Releases before 1.17.3 also took the container's own ldconfig, a path without @."""
    lax = tables.can("toolkit", "host-ldconfig", node.toolkit.version) is False
    own = _ldconfig_path(settings).startswith("/")
    return [problem for problem in settings.problems() if not (lax and own and problem[0] == LDCONFIG)]


def _ldconfig_path(settings: ToolkitSettings) -> str:
    """The ldconfig that the file names."""
    return str(dig(settings.tree, *LDCONFIG.split(".")) or "")


def _programs(node: Node, settings: ToolkitSettings) -> Verdict | None:
    """ldconfig and the low-level runtimes that the file names, if any."""
    host, ldconfig = node.host, _ldconfig_path(settings)
    program = ldconfig.removeprefix("@")
    if program.startswith(f"{DRIVER_ROOT}/") and not host.is_dir(OPERATOR_DRIVER):
        return skip(f"the GPU operator's driver container, which provides {program}, is not running")
    if ldconfig.startswith("@") and not host.executable(program):
        existing = next(
            (path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if host.executable(path)), ""
        )
        set_other = change(settings, "set", f"{LDCONFIG}=@{existing}")
        fix = (
            replace(set_other, note="@ marks a path on this host, not in the container") if existing else None
        )
        return fail(
            f"{LDCONFIG} is {program}, which doesn't exist", _at(settings, LDCONFIG, ldconfig), fix=fix
        )
    runtimes = [str(element) for element in settings.value(RUNTIMES)]
    callers = _callers(node)
    if (
        not settings.line(RUNTIMES)
        or not callers
        or any(_program_exists(node, runtime, callers) for runtime in runtimes)
    ):
        return None
    fix = low_level(node, settings)
    return fail(f"none of {', '.join(runtimes)} exists", _at(settings, RUNTIMES, runtimes), fix=fix)


def _callers(node: Node) -> list[Daemon]:
    """Daemons that start NVIDIA's runtime with the PATH of system services. k3s, rke2 and similar include
    runc and add its directory to the PATH of their containerd, if the host has none; crio-runtime-path checks
    what CRI-O's handlers find."""
    docker = node.docker if docker_role(node).used else None
    containerd = node.containerd if containerd_role(node).used else None
    return [daemon for daemon in (docker, containerd) if daemon is not None and not daemon.manager]


def _program_exists(node: Node, program: str, callers: list[Daemon]) -> bool:
    """Whether one of the toolkit's low-level runtimes exists: at its path, or on a PATH by its name."""
    host = node.host
    if host.executable(program) or host.which(program):
        return True
    paths = (
        environment(host, caller.process.pid).get("PATH", "")
        for caller in callers
        if caller.process is not None
    )
    places = [place for path in paths for place in path.split(":") if place]
    return "/" not in program and any(host.executable(f"{place}/{program}") for place in places)


def _at(settings: ToolkitSettings, name: str, value: object) -> Evidence:
    return seen(settings.path, f"{name}: {value}", settings.line(name))


def _left(node: Node, settings: ToolkitSettings) -> list[Evidence]:
    """The packaged file that an upgrade left beside an edited one."""
    paths = [settings.path + ending for ending in _UNMERGED]
    return [seen(path, "the packaged file of a later release") for path in paths if node.host.is_file(path)]


@check(
    "ldconfig-fails",
    title="ldconfig works",
    looks_at="whether the ldconfig that config.toml names can print its cache, which changes nothing.",
    fix=fixes.package_fix("reinstall", ("libc-bin", "glibc", "glibc"), "ldconfig -p"),
    blocked_by=("toolkit-missing", "toolkit-config-invalid"),
    refs=("https://github.com/NVIDIA/libnvidia-container/issues/177",),
)
def ldconfig_fails(node: Node) -> Verdict:
    """The toolkit runs the host's ldconfig for each GPU container, so that programs in the container find the
    driver's libraries. If it fails, the container doesn't start.
    """
    program = str(node.toolkit_settings.value(LDCONFIG)).removeprefix("@")
    if not node.host.executable(program):
        return skip(f"{program} doesn't exist")
    done = node.host.run([program, "-p"], timeout=_LDCONFIG_SECONDS)
    if done.code == COMMAND_NOT_FOUND and not node.host.live:
        return skip(f"the recording has no output of {program}")
    if done.ok:
        return ok(f"{program} works")
    answer = done.stderr.strip().partition("\n")[0]
    reason = f"no answer within {_LDCONFIG_SECONDS:g} s" if done.timed_out else f"exit {done.code}: {answer}"
    return fail(f"{program} can't run", seen(f"{program} -p", reason))


@check(
    "no-cgroups-wrong",
    title="The toolkit sets containers' device permissions",
    looks_at=f"{NO_CGROUPS} in config.toml, and whether an engine that runs as root uses "
    "nvidia-container-cli.",
    fix=Fix(f"gpunode toolkit config set {NO_CGROUPS}=false"),
    blocked_by=("toolkit-missing", "toolkit-config-invalid"),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/580",),
)
def no_cgroups_wrong(node: Node) -> Verdict:
    """With no-cgroups, a container has the device files but no permission to open them: 'Failed to initialize
    NVML: Unknown Error' in every container. Only rootless engines need this setting.
    """
    settings = node.toolkit_settings
    if settings.value(NO_CGROUPS) is not True:
        return ok("nvidia-container-cli sets device permissions")
    evidence = _at(settings, NO_CGROUPS, "true")
    user = cli_user(node)
    if not user:
        return ok(
            f"{NO_CGROUPS} is true, but no engine that runs as root uses nvidia-container-cli", evidence
        )
    if node.docker_rootless:
        summary = (
            f"{NO_CGROUPS} is true: a rootless Docker on this node needs it, but engines that run as root "
            "need false"
        )
        return note(summary, evidence, seen("nvidia-container-cli", user))
    fix = replace(
        change(settings, "set", f"{NO_CGROUPS}=false"),
        note="Then restart the containers that have GPUs: they get the permission only at a start",
    )
    summary = f"containers can't open the GPUs: {NO_CGROUPS} is true, but {user}"
    return fail(summary, evidence, fix=fix)


@check(
    "runtime-mode",
    title="The toolkit's runtime mode suits this node",
    looks_at=f"{MODE} in config.toml: auto, legacy, csv, cdi or jit-cdi.",
    fix=Fix(f"gpunode toolkit config set {MODE}=auto"),
    blocked_by=("toolkit-missing", "toolkit-config-invalid"),
    classes=(*(kind for kind in EVERYWHERE_BUT_TEGRA if kind != CONTAINER), TEGRA),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/tree/main/cmd/nvidia-container-runtime",),
)
def runtime_mode(node: Node) -> Verdict:
    """In mode csv the runtime reads files that exist only on Tegra: GPU containers don't start. In legacy
    mode, a systemd reload removes the device permissions of running containers.
    """
    settings = node.toolkit_settings
    mode, evidence = str(settings.value(MODE)), _at(settings, MODE, settings.value(MODE))
    fix = change(settings, "set", f"{MODE}=auto")
    if mode == "csv" and node.kind != TEGRA:
        why = "In mode csv the runtime reads files that exist only on Tegra: GPU containers don't start."
        return fail("the runtime's mode is csv, which is for Tegra", evidence, fix=fix, why=why)
    # before jit-cdi the mode auto means legacy as well
    if mode == "legacy" and _engines(node) and tables.can("toolkit", "jit-cdi", node.toolkit.version):
        return note(
            "the runtime's mode is legacy: containers may lose their GPUs after a daemon-reload", evidence
        )
    return ok(f"the runtime's mode is {mode}")


def _engines(node: Node) -> bool:
    return any(role(node).used for role in (docker_role, containerd_role, crio_role))
