"""The toolkit's config.toml, and the ldconfig that it names."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import EVERYWHERE_BUT_TEGRA, HOST, Check, Verdict, fail, note, ok, seen, skip
from gpunode.checks.toolkit.ways import cli_user
from gpunode.errors import ConfigError
from gpunode.facts.engines import containerd_role, crio_role, docker_role
from gpunode.facts.node import Node
from gpunode.facts.system import BARE_METAL, CONTAINER, TEGRA, VM, WSL2
from gpunode.facts.toolkit_settings import LDCONFIG, MODE, NO_CGROUPS, RUNTIMES, Settings
from gpunode.host import COMMAND_NOT_FOUND
from gpunode.result import Evidence, Fix

_SET = "gpunode toolkit config set "
_LDCONFIG_SECONDS = 5.0
# where packages put runc and crun beyond a service's PATH; the toolkit looks for bare names on PATH alone
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
    wrong = settings.problems()
    if wrong:
        evidence = [_at(settings, name, problem) for name, problem in wrong]
        fix = Fix(f"gpunode toolkit config unset {' '.join(name for name, _ in wrong)}")
        return fail(
            f"{settings.path}: {wrong[0][0]}: {wrong[0][1]}", *evidence, *_left(node, settings), fix=fix
        )
    return _programs(node, settings) or ok(f"{settings.path} holds what the toolkit takes")


def _programs(node: Node, settings: Settings) -> Verdict | None:
    """ldconfig and the low-level runtime that the file names, if it names any."""
    host, ldconfig = node.host, str(settings.value(LDCONFIG))
    program = ldconfig.removeprefix("@")
    if settings.line(LDCONFIG) and ldconfig.startswith("@") and not host.executable(program):
        other = next(
            (path for path in ("/sbin/ldconfig.real", "/sbin/ldconfig") if host.executable(path)), ""
        )
        fix = Fix(f"{_SET}{LDCONFIG}=@{other}") if other else None
        return fail(
            f"{LDCONFIG} names {program}, which isn't there", _at(settings, LDCONFIG, ldconfig), fix=fix
        )
    runtimes = [str(one) for one in settings.value(RUNTIMES)]
    if not settings.line(RUNTIMES) or any(host.executable(one) or host.which(one) for one in runtimes):
        return None
    fix = Fix(f"gpunode toolkit config unset {RUNTIMES}")
    return fail(f"none of {', '.join(runtimes)} is there", _at(settings, RUNTIMES, runtimes), fix=fix)


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
    return fail(f"{NO_CGROUPS} is true, but {user}", evidence)


def runtime_mode(node: Node) -> Verdict:
    settings = node.toolkit_settings
    mode, evidence = str(settings.value(MODE)), _at(settings, MODE, settings.value(MODE))
    fix = Fix(f"{_SET}{MODE}=auto")
    if mode == "csv" and node.kind != TEGRA:
        return fail("the runtime's mode is csv, which is for Tegra", evidence, fix=fix)
    if mode == "legacy" and _engines(node):
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
        remedy=fixes.everywhere(f"{_SET}{NO_CGROUPS}=false"),
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
        remedy=fixes.everywhere(f"{_SET}{MODE}=auto"),
        run=runtime_mode,
        blocked_by=("toolkit-missing", "toolkit-config-invalid"),
        classes=(*(kind for kind in EVERYWHERE_BUT_TEGRA if kind != CONTAINER), TEGRA),
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/tree/main/cmd/nvidia-container-runtime",),
    ),
)
