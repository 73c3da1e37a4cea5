"""The toolkit's config.toml, and the ldconfig that it names."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import EVERYWHERE_BUT_TEGRA, HOST, Check, Verdict, fail, note, ok, seen, skip
from gpunode.checks.toolkit import remedies
from gpunode.checks.toolkit.ways import cli_user
from gpunode.errors import ConfigError
from gpunode.facts import gates
from gpunode.facts.containerd import dig
from gpunode.facts.daemons import Daemon
from gpunode.facts.engines import containerd_role, crio_role, docker_role
from gpunode.facts.node import Node
from gpunode.facts.processes import environment
from gpunode.facts.system import BARE_METAL, CONTAINER, TEGRA, VM, WSL2
from gpunode.facts.toolkit_settings import LDCONFIG, MODE, NO_CGROUPS, RUNTIMES, Settings
from gpunode.facts.traits import OPERATOR_DRIVER
from gpunode.gpu.library_paths import DRIVER_ROOT
from gpunode.host import COMMAND_NOT_FOUND
from gpunode.result import Evidence, Fix

_LDCONFIG_SECONDS = 5.0
# what an upgrade leaves beside an edited file
_UNMERGED = (".dpkg-dist", ".dpkg-new", ".rpmnew")


def toolkit_config_invalid(node: Node) -> Verdict:
    try:
        settings = node.toolkit_settings
    except ConfigError as error:
        path, _, rest = error.message.partition(":")
        line = rest.partition(":")[0]
        number = int(line) if line.isdigit() else None
        where = f"+{number} {path}" if number else path
        fix = Fix(f"${{EDITOR:-vi}} {where}")
        return fail(f"{path} can't be parsed", seen(path, error.message, number), fix=fix)
    if not settings.exists:
        return ok(f"there is no {settings.path}: the toolkit's defaults hold")
    wrong = _problems(node, settings)
    if wrong:
        evidence = [_at(settings, name, problem) for name, problem in wrong]
        fix = remedies.change(settings, "unset", *(name for name, _ in wrong))
        return fail(
            f"{settings.path}: {wrong[0][0]}: {wrong[0][1]}", *evidence, *_left(node, settings), fix=fix
        )
    return _programs(node, settings) or ok(f"{settings.path} holds what the toolkit takes")


def _problems(node: Node, settings: Settings) -> list[tuple[str, str]]:
    """Releases before 1.17.3 also took the container's own ldconfig, a path without @."""
    lax = gates.can("toolkit", "host-ldconfig", node.toolkit.version) is False
    own = _named(settings).startswith("/")
    return [one for one in settings.problems() if not (lax and own and one[0] == LDCONFIG)]


def _named(settings: Settings) -> str:
    """The ldconfig that stands in the file."""
    return str(dig(settings.tree, *LDCONFIG.split(".")) or "")


def _programs(node: Node, settings: Settings) -> Verdict | None:
    """ldconfig and the low-level runtime that the file names, if it names any."""
    host, ldconfig = node.host, _named(settings)
    program = ldconfig.removeprefix("@")
    if program.startswith(f"{DRIVER_ROOT}/") and not host.is_dir(OPERATOR_DRIVER):
        return skip(f"{program} comes with the GPU operator's driver container, which is not running")
    if ldconfig.startswith("@") and not host.executable(program):
        other = next(
            (path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if host.executable(path)), ""
        )
        fix = remedies.change(settings, "set", f"{LDCONFIG}=@{other}") if other else None
        return fail(
            f"{LDCONFIG} names {program}, which isn't there", _at(settings, LDCONFIG, ldconfig), fix=fix
        )
    runtimes = [str(one) for one in settings.value(RUNTIMES)]
    callers = _callers(node)
    if not settings.line(RUNTIMES) or not callers or any(_found(node, one, callers) for one in runtimes):
        return None
    fix = remedies.low_level(node, settings)
    return fail(f"none of {', '.join(runtimes)} is there", _at(settings, RUNTIMES, runtimes), fix=fix)


def _callers(node: Node) -> list[Daemon]:
    """Daemons that start NVIDIA's runtime with the PATH of the system's services.

    k3s, rke2 and their like bring runc and add its place to the PATH of their containerd, where the host
    lacks it; what CRI-O's handlers find is crio-runtime-path's to judge.
    """
    docker = node.docker if docker_role(node).used else None
    containerd = node.containerd if containerd_role(node).used else None
    return [one for one in (docker, containerd) if one is not None and not one.manager]


def _found(node: Node, program: str, callers: list[Daemon]) -> bool:
    """Whether one of the toolkit's low-level runtimes is here: by its path, or on a PATH by its name."""
    host = node.host
    if host.executable(program) or host.which(program):
        return True
    paths = (environment(host, one.process.pid).get("PATH", "") for one in callers if one.process is not None)
    places = [place for path in paths for place in path.split(":") if place]
    return "/" not in program and any(host.executable(f"{place}/{program}") for place in places)


def _at(settings: Settings, name: str, value: object) -> Evidence:
    return seen(settings.path, f"{name}: {value}", settings.line(name))


def _left(node: Node, settings: Settings) -> list[Evidence]:
    """The packaged file that an upgrade left beside an edited one."""
    paths = [settings.path + ending for ending in _UNMERGED]
    return [seen(path, "the packaged file of a later release") for path in paths if node.host.is_file(path)]


def ldconfig_fails(node: Node) -> Verdict:
    program = str(node.toolkit_settings.value(LDCONFIG)).removeprefix("@")
    if not node.host.executable(program):
        return skip(f"there is no {program} to be run")
    done = node.host.run([program, "-p"], timeout=_LDCONFIG_SECONDS)
    if done.code == COMMAND_NOT_FOUND and not node.host.live:
        return skip(f"what {program} does wasn't recorded")
    if done.ok:
        return ok(f"{program} runs")
    told = done.stderr.strip().partition("\n")[0]
    reason = f"no answer within {_LDCONFIG_SECONDS:g} s" if done.timed_out else f"exit {done.code}: {told}"
    return fail(f"{program} can't be run", seen(f"{program} -p", reason))


def no_cgroups_wrong(node: Node) -> Verdict:
    settings = node.toolkit_settings
    if settings.value(NO_CGROUPS) is not True:
        return ok("nvidia-container-cli sets up device permissions")
    evidence = _at(settings, NO_CGROUPS, "true")
    user = cli_user(node)
    if not user:
        return ok(f"{NO_CGROUPS} is true, and no engine of root's calls nvidia-container-cli", evidence)
    if node.docker_rootless:
        summary = f"{NO_CGROUPS} is true, which a rootless Docker here needs and root's engines can't have"
        return note(summary, evidence, seen("nvidia-container-cli", user))
    fix = remedies.change(settings, "set", f"{NO_CGROUPS}=false")
    return fail(f"{NO_CGROUPS} is true, but {user}", evidence, fix=fix)


def runtime_mode(node: Node) -> Verdict:
    settings = node.toolkit_settings
    mode, evidence = str(settings.value(MODE)), _at(settings, MODE, settings.value(MODE))
    fix = remedies.change(settings, "set", f"{MODE}=auto")
    if mode == "csv" and node.kind != TEGRA:
        return fail("the runtime's mode is csv, which is for Tegra", evidence, fix=fix)
    # before jit-cdi the mode auto means legacy as well
    if mode == "legacy" and _engines(node) and gates.can("toolkit", "jit-cdi", node.toolkit.version):
        return note(
            "the runtime's mode is legacy: containers may lose their GPUs on a daemon-reload", evidence
        )
    return ok(f"the runtime's mode is {mode}")


def _engines(node: Node) -> bool:
    return any(role(node).used for role in (docker_role, containerd_role, crio_role))


CHECKS = (
    Check(
        id="toolkit-config-invalid",
        title="The toolkit can read its configuration",
        layer="toolkit",
        severity="error",
        looks_at=(
            "/etc/nvidia-container-runtime/config.toml, or that beside the toolkit which the GPU operator "
            "installed: syntax, types, and the ldconfig and low-level runtimes that it names."
        ),
        why=(
            "Every program of the toolkit reads this file each time a container starts. With an error in it, "
            "or an ldconfig that isn't there, no GPU container starts."
        ),
        remedy=fixes.everywhere("gpunode toolkit config get"),
        run=toolkit_config_invalid,
        blocked_by=("toolkit-missing",),
        classes=(BARE_METAL, VM, WSL2, TEGRA),
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/tree/main/config",),
    ),
    Check(
        id="ldconfig-fails",
        title="ldconfig can be run",
        layer="toolkit",
        severity="error",
        looks_at="the ldconfig that config.toml names, asked to print its cache, which changes nothing.",
        why=(
            "The toolkit runs the host's ldconfig for each GPU container, so that programs in it find the "
            "driver's libraries. If it fails, the container isn't started."
        ),
        remedy=fixes.per_family(
            "apt install --reinstall libc-bin",
            "dnf reinstall glibc",
            "zypper install --force glibc",
            "ldconfig -p",
        ),
        run=ldconfig_fails,
        blocked_by=("toolkit-missing", "toolkit-config-invalid"),
        classes=HOST,
        refs=("https://github.com/NVIDIA/libnvidia-container/issues/177",),
    ),
    Check(
        id="no-cgroups-wrong",
        title="The toolkit gives containers device permissions",
        layer="toolkit",
        severity="error",
        looks_at=f"{NO_CGROUPS} in config.toml, and whether an engine of root's calls nvidia-container-cli.",
        why=(
            "With no-cgroups a container sees the device files and isn't allowed to open them: 'Failed to "
            "initialize NVML: Unknown Error' in every container. Only rootless engines need it."
        ),
        remedy=fixes.everywhere(f"gpunode toolkit config set {NO_CGROUPS}=false"),
        run=no_cgroups_wrong,
        blocked_by=("toolkit-missing", "toolkit-config-invalid"),
        classes=HOST,
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/580",),
    ),
    Check(
        id="runtime-mode",
        title="The toolkit's runtime works in a mode that fits",
        layer="toolkit",
        severity="error",
        looks_at=f"{MODE} in config.toml: auto, legacy, csv, cdi or jit-cdi.",
        why=(
            "In mode csv the runtime reads files that only Tegra has: GPU containers fail to start. In mode "
            "legacy systemd takes a running container's device permissions away when it reloads its units."
        ),
        remedy=fixes.everywhere(f"gpunode toolkit config set {MODE}=auto"),
        run=runtime_mode,
        blocked_by=("toolkit-missing", "toolkit-config-invalid"),
        classes=(*(kind for kind in EVERYWHERE_BUT_TEGRA if kind != CONTAINER), TEGRA),
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/tree/main/cmd/nvidia-container-runtime",),
    ),
)
