"""Checks of the container toolkit: it is installed, engines find it, and only one method adds GPUs."""

from __future__ import annotations

from dataclasses import replace

from gpunode.checks import fixes
from gpunode.checks.devices import keep_initialised
from gpunode.checks.finding import DISRUPTS_NOTHING, RESTARTS_DOCKER, Fix
from gpunode.checks.model import (
    EVERYWHERE_BUT_TEGRA,
    NO_ENGINE,
    Verdict,
    check,
    fail,
    note,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.checks.podman import hooks_dir
from gpunode.facts.cuda import driver_version
from gpunode.facts.driver import version_numbers
from gpunode.facts.engines import ROLES, containerd_role, crio_role, docker_role, podman_role
from gpunode.facts.gpu_use import GpuMethod, dra_directory, mounting
from gpunode.facts.node import Node
from gpunode.facts.packages import AptSource, read_sources
from gpunode.facts.processes import environment
from gpunode.facts.system import TEGRA, WSL2
from gpunode.facts.tables import gate, numbers, table
from gpunode.facts.toolkit import (
    DEFAULT_PATH,
    MODE,
    SYSTEM_DIRECTORIES,
    ToolkitSettings,
    nvidia_hooks,
)
from gpunode.facts.toolkit import runtime_mode as toolkit_runtime_mode
from gpunode.host.process import COMMAND_NOT_FOUND

# Fixes for this node's toolkit: upgrades come from its own source, settings go into its own file.

OPERATOR_PLACES = ("/usr/local/nvidia/toolkit/", "/run/nvidia/toolkit/")
OPERATOR_UPGRADE = Fix(
    "follow https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/upgrade.html",
    needs_root=False,
)


def upgrade(node: Node) -> Fix | None:
    """The GPU operator upgrades its own toolkit; None if the check's usual fix applies."""
    programs = node.toolkit.programs.values()
    if programs and all(path.startswith(OPERATOR_PLACES) for path in programs):
        return OPERATOR_UPGRADE
    return None


def change(settings: ToolkitSettings, verb: str, *words: str) -> Fix:
    """``gpunode toolkit config set|unset`` for the file that was checked."""
    where = "" if settings.path == DEFAULT_PATH else f"--config {settings.path} "
    command = f"gpunode toolkit config {verb} {where}{' '.join(words)}"
    return Fix(command, disturbs=DISRUPTS_NOTHING)


# The NVIDIA Container Toolkit, which adds GPUs to containers.

_ANY_ENGINE = "reloads or restarts the container engine"
REGISTER = f"Then register its runtime, which {_ANY_ENGINE}:\n{fixes.CONFIGURE}"


def then_register(node: Node, fix: Fix) -> Fix:
    """The installation of the toolkit, and then the registration of its runtime with the engine in use."""
    engines = {"docker": node.docker, "containerd": node.containerd, "crio": node.crio}
    used = [(name, daemon) for name, daemon in engines.items() if daemon and ROLES[name](node).used]
    register = Fix(fixes.CONFIGURE, disruptive="restart", disturbs=_ANY_ENGINE)
    if len(used) == 1:
        ((name, daemon),) = used
        register = fixes.configure(daemon.manager or name)
    return replace(fix, note=f"{REGISTER.partition(':')[0]}:\n{register.command}", then=register)


# one of these starts containers; the others are helpers and leftovers
_NEEDED = ("nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-cdi-hook")


@check(
    "toolkit-missing",
    title="The container toolkit is installed",
    looks_at="nvidia-container-runtime, nvidia-container-runtime-hook and nvidia-cdi-hook in PATH and in "
    "the GPU operator's directory; a file that is empty or not executable counts as missing. With "
    "a CDI specification of kind nvidia.com/gpu without hooks, none of them is needed.",
    fix=replace(fixes.INSTALL_TOOLKIT, note=REGISTER),
    blocked_by=("pci-no-gpu", "driver-not-installed", "wsl2", "jetson"),
    classes=EVERYWHERE_BUT_TEGRA,
    unless=NO_ENGINE,
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html",),
)
def toolkit_missing(node: Node) -> Verdict:
    """Engines don't support GPUs themselves: the toolkit adds device files and driver libraries to a
    container. Without it, docker run --gpus fails with 'could not select device driver', and pods get no GPU.
    """
    programs = node.toolkit.programs
    if any(name in programs for name in _NEEDED):
        return ok(
            "the container toolkit is installed", *(seen(path, name) for name, path in programs.items())
        )
    if node.docker is None and node.containerd is None and node.kubelet is None:
        return skip("this node has no container engine that would use it")
    if node.docker is not None and node.docker.manager == "snap" and docker_role(node).used:
        return skip("Docker is a snap with its own toolkit: see docker-snap")
    alone = [spec for spec in node.gpu_specs if all(map(node.host.executable, spec.hooks))]
    if alone:
        hooks = ", ".join(alone[0].hooks) or "no hooks"
        return ok(
            "no container toolkit is installed, and none is needed: containers get GPUs through CDI",
            seen(alone[0].path, hooks),
        )
    place = dra_directory(node)  # that driver includes its own hook
    way = GpuMethod("NVIDIA's DRA driver allocates the GPUs", place, "there") if place else mounting(node)
    if way is not None:
        return ok(
            f"no container toolkit is installed, and none is needed: {way.summary}",
            seen(way.source, way.value),
        )
    unsafe = [program for program in map(node.host.unsafe_program, _NEEDED) if program is not None]
    if unsafe:
        return fail(
            "other users can write to the NVIDIA Container Toolkit's programs",
            *(seen(path, reason) for path, reason in unsafe),
            fix=fixes.look(f"namei -l {unsafe[0][0]}", fixes.UNSAFE_PATH, needs_root=False),
            why="Engines run these programs as root for each GPU container, so gpunode doesn't count them.",
        )
    looked = "none of nvidia-container-runtime, nvidia-container-runtime-hook, nvidia-cdi-hook"
    install = then_register(node, fixes.INSTALL_TOOLKIT)
    return fail("the NVIDIA Container Toolkit isn't installed", seen("PATH", looked), fix=install)


@check(
    "toolkit-too-old",
    title="The container toolkit is new enough",
    looks_at="nvidia-ctk --version, else the version of nvidia-container-cli or nvidia-container-runtime. "
    "The minimum is 1.8.0 with cgroup v2, 1.7.0 with a kubelet, and 1.11.0 on Tegra.",
    fix=fixes.UPGRADE_TOOLKIT,
    blocked_by=("toolkit-missing",),
    classes=(*EVERYWHERE_BUT_TEGRA, TEGRA),
    table="version_gates",
    refs=("https://github.com/NVIDIA/k8s-device-plugin#prerequisites",),
)
def toolkit_too_old(node: Node) -> Verdict:
    """Device plugins need toolkit 1.7.0 or newer. On cgroup v2, a toolkit before 1.8.0 fails with 'cgroup
    subsystem devices not found'.
    """
    version = node.toolkit.version
    if not version:
        return skip("the toolkit's version is unknown")
    text = ".".join(map(str, version))
    evidence = seen(node.toolkit.version_source, text)
    for name in _gates(node):
        least = gate("toolkit", name)
        if version < least:
            older = f"toolkit {text} is older than {'.'.join(map(str, least))}"
            return fail(older, evidence, fix=upgrade(node), why=_NEEDS.get(name, ""))
    return ok(f"toolkit {text} is new enough", evidence)


_NEEDS = {
    "device-plugin": "Device plugins need toolkit 1.7.0 or newer.",
    "cgroup-v2": "On cgroup v2, a toolkit before 1.8.0 fails with 'cgroup subsystem devices not found'.",
}


def _gates(node: Node) -> tuple[str, ...]:
    """The gates of version_gates.json that apply to this node."""
    cgroup = ("cgroup-v2",) if node.host.is_file("/sys/fs/cgroup/cgroup.controllers") else ()
    if node.kubelet is None:
        return cgroup  # the others are device plugins' needs
    return ("device-plugin", *cgroup, *(("tegra",) if node.kind == TEGRA else ()))


# Installed releases of the toolkit and its packages, and their sources.

_MAIN = "nvidia-container-toolkit"
_LIBRARIES = ("libnvidia-container-tools", "libnvidia-container1")
PACKAGES = (_MAIN, f"{_MAIN}-base", *_LIBRARIES)
_REPOSITORY = "nvidia.github.io/"
# names of the repository's predecessors; they contain no release since 2023
_RETIRED = ("nvidia.github.io/nvidia-docker", "nvidia.github.io/nvidia-container-runtime")


@check(
    "toolkit-versions-mixed",
    title="The toolkit's packages have the same release",
    looks_at=f"the package database: {', '.join(PACKAGES)}.",
    fix=fixes.UPGRADE_TOOLKIT,
    blocked_by=("toolkit-missing", "toolkit-too-old"),
    table="version_gates",
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/release-notes.html",),
)
def toolkit_versions_mixed(node: Node) -> Verdict:
    """The toolkit calls nvidia-container-cli with options of its own release. An older one fails with
    'unrecognized option' or 'symbol lookup error', and GPU containers don't start.
    """
    versions = {name: node.packages.version(name) for name in PACKAGES}
    here = {name: version for name, version in versions.items() if version}
    if _MAIN not in here or len(here) < 2:
        return skip("the toolkit isn't installed as packages")
    evidence = tuple(seen(node.packages.manager, f"{name} {version}") for name, version in here.items())
    main = version_numbers(here[_MAIN])
    exact = main >= gate("toolkit", "exact-packages")
    wrong = [
        name
        for name, version in here.items()
        if version_numbers(version) != main
        and (exact or name not in _LIBRARIES or version_numbers(version) < main)
    ]
    if wrong:
        releases = ", ".join(dict.fromkeys(here[name] for name in wrong))
        return fail(
            f"the toolkit's packages are of different releases: {here[_MAIN]} and {releases}", *evidence
        )
    return ok(f"all packages of the toolkit have release {here[_MAIN]}", *evidence)


@check(
    "toolkit-known-bad-version",
    title="This toolkit release has no known fault that affects this node",
    looks_at="the toolkit's version against a table of releases with known faults, for the engines in use "
    "here and under WSL2 for the Windows driver. A fault that breaks every container is an error; "
    "a fault that affects only the configuration of an engine by nvidia-ctk is a note.",
    fix=fixes.UPGRADE_TOOLKIT,
    blocked_by=("toolkit-missing", "toolkit-too-old"),
    classes=EVERYWHERE_BUT_TEGRA,
    table="toolkit_bad_versions",
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/blob/main/CHANGELOG.md",),
)
def toolkit_known_bad_version(node: Node) -> Verdict:
    """A newer release of the toolkit fixes these faults; the evidence lists what each one breaks."""
    version = node.toolkit.version
    if not version:
        return skip("the toolkit's version is unknown")
    text = ".".join(map(str, version))
    faults = [
        row
        for row in table("toolkit_bad_versions").rows
        if numbers(row["from"]) <= version < numbers(row["fixed"])
        and (not row["where"] or ROLES[row["where"]](node).used)
        and _under_windows(node, row["windows_driver"])
    ]
    if not faults:
        return ok(f"no known fault of toolkit {text} affects this node")
    evidence = [seen(row["ref"], f"{row['what']}; fixed in {row['fixed']}") for row in faults]
    # checks of a configured engine cover its part of these faults
    harmful = [row for row in faults if not row["sets_up"]]
    summary = f"toolkit {text}: {(harmful or faults)[0]['what']}"
    if any(row["windows_driver"] for row in faults):
        return fail(summary, seen(node.toolkit.version_source, text), *evidence, fix=upgrade(node))
    judge = warn if harmful else note
    return judge(summary, seen(node.toolkit.version_source, text), *evidence, fix=upgrade(node))


def _under_windows(node: Node, oldest: str) -> bool:
    """Whether a fault that depends on the Windows driver of WSL2 applies; True for any other fault."""
    if not oldest:
        return True
    return node.kind == WSL2 and version_numbers(driver_version(node)) >= version_numbers(oldest)


@check(
    "apt-signed-by",
    title="apt has one source for the toolkit",
    severity="warning",
    looks_at="/etc/apt/sources.list and sources.list.d: entries for nvidia.github.io and their keys.",
    fix=fixes.look(
        "grep -rn nvidia.github.io /etc/apt/sources.list.d/",
        "Keep one entry of the repository and delete the others",
    ),
    classes=EVERYWHERE_BUT_TEGRA,
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html",),
)
def apt_signed_by(node: Node) -> Verdict:
    """With two keys for one repository, apt fails with 'Conflicting values set for option Signed-By'; with a
    retired repository, apt update fails. The node then gets no updates, including security fixes.
    """
    own = [source for source in read_sources(node.host) if _REPOSITORY in source.uri]
    if not own:
        return skip("apt has no source for NVIDIA's container toolkit")
    wrong = _conflicting(own)
    if wrong:
        keep, drop = wrong[0], [source for source in wrong[1:] if source.path != wrong[0].path]
        change = f"delete all but one of the entries for {keep.uri}"
        fix = _removal(drop) if drop else fixes.edit_file(keep.path, keep.line, change)
        evidence = (
            seen(source.path, f"{source.uri} signed by {source.signed_by or 'no key'}", source.line)
            for source in wrong
        )
        why = f"apt fails with 'Conflicting values set for option Signed-By'. {_NO_UPDATES}"
        return warn(f"apt has {keep.uri} twice, with different keys", *evidence, fix=fix, why=why)
    retired = [
        source
        for source in own
        if any(source.uri.split("://")[-1].startswith(address) for address in _RETIRED)
    ]
    if retired:
        evidence = (seen(source.path, source.uri, source.line) for source in retired)
        return warn(
            "apt uses a retired repository of the toolkit",
            *evidence,
            fix=_removal(retired),
            why=f"apt update fails with a retired repository. {_NO_UPDATES}",
        )
    return ok("apt has one source for the container toolkit", seen(own[0].path, own[0].uri, own[0].line))


_NO_UPDATES = "The node then gets no updates, including security fixes."


def _conflicting(sources: list[AptSource]) -> list[AptSource]:
    """Entries of the first repository with different keys; the one with the repository's own name first."""
    for source in sources:
        same = [
            candidate
            for candidate in sources
            if (_place(candidate), candidate.suite) == (_place(source), source.suite)
        ]
        if len({entry.signed_by for entry in same}) > 1:
            return sorted(same, key=lambda entry: (not entry.signed_by, _MAIN not in entry.path, entry.path))
    return []


def _place(source: AptSource) -> str:
    """The address with apt's variable for the architecture, which guides spell out or not."""
    head, slash, last = source.uri.rpartition("/")
    return f"{head}{slash}$(ARCH)" if last in ("amd64", "arm64") else source.uri


def _removal(sources: list[AptSource]) -> Fix:
    """Rename files with a suffix that apt ignores."""
    paths = dict.fromkeys(source.path for source in sources)
    command = " && ".join(f"mv {path} {path}.disabled" for path in paths)
    return Fix(f"{command} && apt update", disturbs=DISRUPTS_NOTHING)


# Which of the toolkit's methods the engines of this node use.


def cli_user(node: Node) -> str:
    """What calls nvidia-container-cli as root on this node, as text; empty if nothing does, or if that is
    unknown.

    Docker's --gpus does before it uses CDI devices, and the runtime does in mode legacy.
    """
    settings = node.toolkit_settings
    docker = node.docker if docker_role(node).used else None
    if docker is not None and docker.user:
        docker = None
    allowed = str(settings.value(MODE)) != "cdi"  # the hook refuses to run in this mode
    if docker and docker.version and docker.version < gate("docker", "gpus-by-cdi") and allowed:
        return f"Docker {docker.release} runs nvidia-container-cli for --gpus"
    if toolkit_runtime_mode(settings, node.toolkit.version) != "legacy":
        return ""
    if docker or any(role(node).used for role in (containerd_role, crio_role)):
        return "the nvidia runtime calls nvidia-container-cli (mode legacy)"
    return ""


# what dockerd searches on its own PATH when it starts, for --gpus
_HOOKS = ("nvidia-container-runtime-hook", "nvidia-cdi-hook")
_CLI = "nvidia-container-cli"
_CLI_SECONDS = 15.0
_SLOW = "driver rpc error: timed out"
# messages of nvidia-container-cli, and their meaning
_SAYINGS = (
    (
        _SLOW,
        "the driver takes too long to initialise the GPUs: nvidia-persistenced isn't enabled",
    ),
    ("driver not loaded", "it can't find the kernel module"),
    ("driver/library version mismatch", "the module and the libraries have different versions"),
    ("load library failed", "it can't find a library of the driver"),
    ("ldcache error", "it can't read the cache of ldconfig"),
    ("cgroup subsystem devices not found", "it is too old for cgroup v2"),
    ("bpf_prog_query", "it has no permission to set device permissions"),
    ("unrecognized option", "its packages have different releases"),
    ("symbol lookup error", "its packages have different releases"),
    ("overflowuid", "it can't read /proc"),
)


@check(
    "toolkit-not-on-daemon-path",
    title="dockerd finds the toolkit",
    severity="warning",
    looks_at="PATH in dockerd's own environment, and the directory of the toolkit's hook programs.",
    fix=fixes.START_DOCKER,
    blocked_by=("toolkit-missing", "docker-not-running"),
    needs=("docker",),
    refs=("https://github.com/moby/moby/blob/master/daemon/devices_nvidia_linux.go",),
)
def toolkit_not_on_daemon_path(node: Node) -> Verdict:
    """Docker searches its own PATH for the toolkit once, when it starts. It doesn't find a toolkit in another
    directory: 'could not select device driver "" with capabilities: [[gpu]]'.
    """
    docker, role = node.docker, docker_role(node)
    if docker is None or docker.process is None or not role.used or docker.manager:
        return skip("the system's Docker isn't running on this node")
    path = environment(node.host, docker.process.pid).get("PATH", "")
    if not path:
        return skip("dockerd's PATH is unknown")
    places = path.split(":")
    hooks = {name: node.toolkit.programs[name] for name in _HOOKS if name in node.toolkit.programs}
    if all(path.startswith(OPERATOR_PLACES) for path in hooks.values()):
        return skip("the toolkit has no hook that Docker would use")
    if any(node.host.executable(f"{place}/{name}") for place in places for name in _HOOKS):
        return ok("dockerd finds the toolkit in its PATH")
    process = f"/proc/{docker.process.pid}/environ"
    place = next(iter(hooks.values())).rpartition("/")[0]
    unit = docker.unit or "docker.service"
    drop = f"/etc/systemd/system/{unit}.d/10-path.conf"
    text = f"[Service]\\nEnvironment=PATH={path}:{place}\\n"
    fix = fixes.restart(unit, RESTARTS_DOCKER).after(
        f"mkdir -p {drop.rpartition('/')[0]} && printf '{text}' > {drop} && systemctl daemon-reload"
    )
    evidence = (seen(where, "installed") for where in hooks.values())
    return warn(
        f"dockerd's PATH doesn't include {place}, the toolkit's directory",
        seen(process, f"PATH={path}"),
        *evidence,
        fix=fix,
    )


@check(
    "hook-conflict",
    title="Only one method adds GPUs to containers",
    severity="warning",
    looks_at=f"NVIDIA's hooks in {', '.join(SYSTEM_DIRECTORIES)}, if podman or CRI-O is the engine, and CDI "
    "specifications that don't set NVIDIA_VISIBLE_DEVICES=void for the hook.",
    fix=fixes.look(
        f"ls {' '.join(SYSTEM_DIRECTORIES)}", "Rename NVIDIA's hook: the engine then uses CDI alone"
    ),
    blocked_by=("pci-no-gpu", "toolkit-missing"),
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
)
def hook_conflict(node: Node) -> Verdict:
    """Podman and CRI-O run the hook also for containers that already got their GPUs through CDI. The same
    files are mounted twice, and the container fails to start.
    """
    if not podman_role(node).used and not crio_role(node).used:
        return skip("neither podman nor CRI-O, which run hooks, is this node's engine")
    directories = dict.fromkeys((*SYSTEM_DIRECTORIES, *(hooks_dir(node) if node.podman else ())))
    hooks = nvidia_hooks(node.host, directories)
    # the others make the hook skip their containers
    specs = [spec for spec in node.gpu_specs if not spec.stills_toolkit]
    if not hooks:
        return ok("no OCI hook adds GPUs to containers")
    evidence = [seen(hook.path, f"runs {hook.program}") for hook in hooks]
    if not specs:
        return ok("an OCI hook adds GPUs to containers, except those that get them through CDI", *evidence)
    rename = " && ".join(f"mv {hook.path} {hook.path}.disabled" for hook in hooks)
    fix = Fix(rename, note="New containers then get GPUs through CDI alone")
    return warn(
        "containers get GPUs through both an OCI hook and CDI",
        *evidence,
        seen(specs[0].path, specs[0].kind),
        fix=fix,
    )


def _probe(node: Node) -> Verdict:
    """Without --load-kmods, which would load modules and create device files."""
    program = node.toolkit.programs[_CLI]
    if not node.host.live and node.host.recorded("commands", f"{program} info") is None:
        return skip("the recording has no output of nvidia-container-cli")
    if node.module is None or node.nvml.inventory is None:
        return skip("the driver doesn't answer, so nvidia-container-cli wasn't run")
    if not node.host.is_root and node.host.live:
        return skip("needs root to run nvidia-container-cli as an engine does", "unreadable")
    done = node.host.run([program, "info"], timeout=_CLI_SECONDS)
    if done.ok or done.code == COMMAND_NOT_FOUND:
        return ok("nvidia-container-cli can access the driver")
    if done.timed_out:
        return fail(
            f"nvidia-container-cli didn't finish within {_CLI_SECONDS:g} s",
            seen(f"{_CLI} info", "no answer"),
        )
    answer = " ".join(done.stderr.split())[-300:]
    meaning = next(
        (means for saying, means in _SAYINGS if saying in answer), "it doesn't work with this driver"
    )
    evidence = seen(f"{_CLI} info", answer or f"exit {done.code}")
    fix = keep_initialised(node) if _SLOW in answer else None
    return fail(f"nvidia-container-cli fails: {meaning}", evidence, fix=fix)


@check(
    "toolkit-cli-probe",
    title="nvidia-container-cli can access the driver",
    looks_at="nvidia-container-cli info in a child process with a limit of 15 seconds, if an engine calls "
    "it. Only with --deep, because it wakes every GPU.",
    fix=fixes.look("nvidia-container-cli -d /dev/stderr info", "The last lines name the library or device"),
    blocked_by=(
        "module-not-loaded",
        "driver-lib-mismatch",
        "libnvidia-ml-missing",
        "libcuda-missing",
        "dev-nodes-missing",
        "uvm-not-loaded",
        "nvml-hang",
        "toolkit-missing",
        "toolkit-too-old",
        "toolkit-versions-mixed",
        "toolkit-config-invalid",
        "ldconfig-fails",
    ),
    deep=True,
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html",),
)
def toolkit_cli(node: Node) -> Verdict:
    """Docker's --gpus and the runtime in legacy mode run it for each container, with the same result."""
    if _CLI not in node.toolkit.programs:
        return skip("nvidia-container-cli isn't installed")
    if not cli_user(node):
        return skip("no engine of this node calls nvidia-container-cli")
    return _probe(node)
