"""Checks of CDI specifications, and of the engines that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from gpunode.cdi.versions import reads, text
from gpunode.checks import fixes
from gpunode.checks.containerd_config import running_config
from gpunode.checks.finding import DISRUPTS_NOTHING, Evidence, Fix
from gpunode.checks.model import (
    EVERYWHERE_BUT_TEGRA,
    HOST,
    Verdict,
    check,
    cut,
    fail,
    if_reported,
    next_boot_check,
    note,
    ok,
    seen,
    skip,
    warn,
)
from gpunode.checks.units import after_reading_log, runs, seen_unit
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts import boot
from gpunode.facts.cdi import DIRECTORIES, SpecFile, known_gpus, stale_parts, vendor_specs
from gpunode.facts.daemons import parse_version
from gpunode.facts.engines import containerd_role, crio_role, docker_role, podman_role
from gpunode.facts.node import Node
from gpunode.facts.system import WSL2, mode_of
from gpunode.facts.tables import gate
from gpunode.facts.toolkit import DEFAULT_KIND, MODE, SPEC_DIRS, SYSTEM_DIRECTORIES, nvidia_hooks
from gpunode.facts.writers import is_nvidia_program
from gpunode.output.result import many
from gpunode.output.typed import as_strings

# The engines of this node that read CDI specifications.

# the toolkit's programs that add GPUs to containers without a specification on disk
HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-runtime")


class Reader(NamedTuple):
    """An engine in use with CDI enabled. `needs`: it can add GPUs only through CDI."""

    name: str
    version: tuple[int, ...]
    needs: bool = False


def readers(node: Node) -> tuple[Reader, ...]:
    """Engines with CDI enabled; without daemons that don't answer, because their CDI state is unknown."""
    return tuple(_readers(node))


def _readers(node: Node) -> Iterator[Reader]:
    programs = node.toolkit.programs
    alone = not any(name in programs for name in HOOKS)
    if node.docker is not None and docker_role(node).used and docker_directories(node):
        yield Reader("docker", node.docker.version, alone)
    if (
        node.containerd is not None
        and containerd_role(node).used
        and running_config(node).get("enableCDI") is True
    ):
        yield Reader("containerd", node.containerd.version, alone)
    if node.crio is not None and crio_role(node).used:
        yield Reader("crio", node.crio.version, alone)
    if node.podman is not None and podman_role(node).used:
        yield Reader("podman", node.podman.version, needs=True)


def judge(node: Node) -> Callable[..., Verdict]:
    """`fail` if an engine or the toolkit's runtime uses specifications, else `warn`: nothing breaks."""
    try:
        mode = node.toolkit_settings.value(MODE)
    except ConfigError:
        mode = ""
    return fail if mode == "cdi" or readers(node) else warn


def docker_directories(node: Node) -> tuple[str, ...]:
    """Directories that the running Docker reads specifications from; () if CDI is off or unknown."""
    try:
        return _reported_directories(node)
    except DaemonError:
        return ()


def _reported_directories(node: Node) -> tuple[str, ...]:
    return tuple(filter(None, as_strings(node.docker_info.get("CDISpecDirs"))))


# Specifications that a reboot deletes, and the services that write them again.

_VOLATILE = ("/run/", "/var/run/")
WRITERS = ("nvidia-cdi-refresh.service", "gpunode-cdi-refresh.service")
_COMMANDS = ("cdi generate", "cdi refresh", "cdi-refresh")


@next_boot_check(
    "cdi-lost-at-reboot",
    title="CDI specifications survive a reboot",
    looks_at="specifications for GPUs in /var/run/cdi, where an engine reads them, and what writes them at "
    "boot: NVIDIA's or gpunode's unit, the GPU operator, or a unit, crontab or udev rule of this "
    "node.",
    fix=Fix("gpunode cdi refresh --install"),
    blocked_by=("module-not-loaded", "cdi-spec-stale"),
    unless=("operator-driver", "immutable"),
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
)
def cdi_lost_at_reboot(node: Node) -> Verdict:
    """/var/run is in memory, so a reboot deletes the file. Containers that request GPUs through CDI then fail
    with 'unresolvable CDI devices' until the file is written again.
    """
    specs = node.gpu_specs
    lost = [spec for spec in specs if spec.path.startswith(_VOLATILE)]
    if not lost:
        return skip("no CDI specification for GPUs is in a directory that a reboot clears")
    if len(lost) < len(specs):
        return ok("another CDI specification survives a reboot")
    if not readers(node):
        return skip("no engine on this node reads CDI specifications")
    writer = _writer(node)
    if writer:
        return ok("the CDI specification is written again after a reboot", seen(writer, "writes it"))
    if WRITERS[0] not in node.units:
        return skip(f"systemd doesn't report the state of {WRITERS[0]}")
    states = ((name, node.units.get(name)) for name in WRITERS)
    services = [seen(name, str(state)) for name, state in states if state is not None]
    return warn(
        f"{lost[0].path} is deleted by the next reboot, and nothing writes it again",
        *(seen(spec.path, f"{spec.kind}, in a file system in memory") for spec in lost),
        *services,
        fix=_enable(node),
    )


def enabled_writer(node: Node) -> str:
    """The service that writes the specification at boot; empty if none does, or if unknown."""
    units = (node.units.get(name) for name in WRITERS)
    return next((unit.name for unit in units if unit is not None and unit.may_start_at_boot), "")


def _writer(node: Node) -> str:
    if name := enabled_writer(node):
        return name
    if node.host.is_dir(boot.OPERATOR):
        return boot.OPERATOR
    return boot.started(node.host, _COMMANDS, besides=WRITERS[:1], rules=True)


def _enable(node: Node) -> Fix | None:
    """Enable NVIDIA's own units, if the toolkit installed them."""
    unit = node.units.get(WRITERS[0])
    if unit is None or not unit.installed or unit.load == "masked":
        return None
    return Fix(f"systemctl enable --now {WRITERS[0]} nvidia-cdi-refresh.path")


# Which specification takes effect if two define the same device: the one in the later directory.


def rank(spec: SpecFile) -> int:
    """Position of the specification's directory in the engines' order."""
    directory = spec.path.rpartition("/")[0]
    return DIRECTORIES.index(directory) if directory in DIRECTORIES else -1


def hidden_by(specs: Iterable[SpecFile], spec: SpecFile) -> SpecFile | None:
    """The specification in a later directory that defines all devices of this one; None if there is none."""
    if not spec.devices:
        return None
    later = (other for other in specs if rank(other) > rank(spec) and other.kind == spec.kind)
    return next((other for other in later if set(spec.names) <= set(other.names)), None)


_UVM = "/dev/nvidia-uvm"
_SPEC = "https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md"
NO_SPEC = "no CDI specification for GPUs exists"


def _of_gpus(node: Node) -> list[SpecFile]:
    """Effective specifications for GPUs: without those that a later directory overrides completely."""
    return [spec for spec in node.gpu_specs if hidden_by(node.cdi_specs, spec) is None]


@check(
    "cdi-uvm-absent-in-spec",
    title="CDI specifications include /dev/nvidia-uvm",
    looks_at="specifications of kind nvidia.com/gpu that list GPU device files: whether they include "
    f"{_UVM}.",
    fix=fixes.REFRESH_CDI,
    blocked_by=("module-not-loaded", "uvm-not-loaded", "dev-nodes-missing", "cdi-spec-stale"),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1967",),
)
def cdi_uvm_absent_in_spec(node: Node) -> Verdict:
    """CUDA needs this device. A specification that was generated before the module nvidia-uvm was loaded
    doesn't include it: in containers nvidia-smi works, but CUDA fails with error 999.
    """
    specs = _of_gpus(node)
    if not specs:
        return skip(NO_SPEC)
    if node.host.device(_UVM) is None:
        return skip(f"{_UVM} doesn't exist on this node")
    for spec in specs:
        paths = {file.path for file in spec.nodes}
        gpus = sorted(path for path in paths if path.removeprefix("/dev/nvidia").isdigit())
        if gpus and _UVM not in paths:
            evidence = (seen(spec.path, f"lists {', '.join(gpus[:4])}, but not {_UVM}"), seen(_UVM, "exists"))
            return judge(node)(
                f"{spec.path} doesn't include {_UVM}", *evidence, fix=fixes.rewrite_cdi(spec.path, spec.kind)
            )
    return ok(f"{specs[0].path} includes {_UVM}")


@check(
    "cdi-duplicate",
    title="Each device is defined in one CDI specification",
    looks_at="device names of NVIDIA's specifications in /etc/cdi and /var/run/cdi.",
    fix=fixes.look(
        "gpunode cdi list", "Rename one of two files that define the same device", needs_root=False
    ),
    classes=(*HOST, WSL2),
    refs=(_SPEC,),
)
def cdi_duplicate(node: Node) -> Verdict:
    """If two files in one directory define the same device, engines reject it as a conflict. A file in
    /var/run/cdi overrides one in /etc/cdi.
    """
    specs = [spec for spec in node.cdi_specs if not spec.problem]
    if len(specs) < 2:
        return ok("no two CDI specifications define the same device") if specs else skip(NO_SPEC)
    for first, second in combinations(specs, 2):
        names = sorted(set(first.names) & set(second.names)) if first.kind == second.kind else []
        if names and rank(first) == rank(second):
            extra = first if "nvidia.yaml" in second.path else second
            why = "Engines reject a device that two files in one directory define, as a conflict."
            return judge(node)(
                f"{first.path} and {second.path} define the same GPUs, so engines use neither",
                *(
                    seen(spec.path, ", ".join(f"{first.kind}={name}" for name in names[:3]))
                    for spec in (first, second)
                ),
                fix=Fix(
                    f"mv {extra.path} {extra.path}.disabled",
                    disturbs=DISRUPTS_NOTHING,
                    note="If the file comes back, stop the program that writes it",
                ),
                why=why,
            )
    for spec in specs:
        above = hidden_by(tuple(specs), spec)
        if above is not None and (above.devices, above.edits) != (spec.devices, spec.edits):
            fix = Fix(f"mv {spec.path} {spec.path}.disabled", disturbs=DISRUPTS_NOTHING)
            if not _writer(node):  # a reboot would then leave no specification
                fix = fix.after((_enable(node) or cdi_lost_at_reboot.fix_for("other")).command)
            evidence = (seen(spec.path, "overridden"), seen(above.path, "the file that engines use"))
            what = f"{spec.path} is overridden by {above.path}, which has different contents"
            why = (
                "Engines use the file in /var/run/cdi. A reboot deletes it: until it is written again, they "
                "use the one in /etc/cdi."
            )
            return warn(what, *evidence, fix=fix, why=why)
    return ok("no device is defined differently in two CDI specifications")


@check(
    "cdi-unsupported-version",
    title="Engines can read the version of the CDI specifications",
    looks_at="cdiVersion of the specifications, and the highest version that each engine with CDI enabled "
    "can read, by its release.",
    fix=fixes.REFRESH_CDI,
    blocked_by=("pci-no-gpu", "cdi-spec-stale"),
    table="cdi_versions",
    refs=(_SPEC, "https://github.com/NVIDIA/nvidia-container-toolkit/issues/1940"),
)
def cdi_unsupported_version(node: Node) -> Verdict:
    """An engine ignores a specification of a version that it doesn't know and reports 'unresolvable CDI
    devices'. gpunode cdi refresh writes the lowest version that has the features it needs.
    """
    specs = [spec for spec in _of_gpus(node) if parse_version(spec.version)]
    if not specs:
        return skip(NO_SPEC)
    here = readers(node)
    for spec in specs:
        late = [reader for reader in here if _too_new(spec, reader)]
        if late:
            return _unread(spec, late)
    names = ", ".join(reader.name for reader in here) or "no engine on this node has CDI enabled"
    return ok(f"these engines can read CDI version {specs[0].version}: {names}")


def _too_new(spec: SpecFile, reader: Reader) -> bool:
    known = reads(reader.name, reader.version)
    return known is not None and bool(reader.version) and parse_version(spec.version) > known


def _unread(spec: SpecFile, late: list[Reader]) -> Verdict:
    evidence = [seen(spec.path, f"cdiVersion {spec.version}")]
    for reader in late:
        known = reads(reader.name, reader.version)
        release = ".".join(map(str, reader.version))
        evidence.append(
            seen(reader.name, f"{release} reads versions up to {text(known) if known else 'none'}")
        )
    names = ", ".join(reader.name for reader in late)
    summary = f"{names} can't read {spec.path}: its CDI version is {spec.version}"
    fix = fixes.rewrite_cdi(spec.path, spec.kind)
    if any(reader.needs for reader in late):
        return fail(summary, *evidence, fix=fix)
    return warn(summary, *evidence, fix=fix)


@check(
    "cdi-wsl-dxcore",
    title="CDI specifications include libdxcore.so",
    severity="warning",
    looks_at="specifications of kind nvidia.com/gpu under WSL2: whether they mount libdxcore.so.",
    fix=Fix("nvidia-ctk cdi generate --mode=wsl --output=/var/run/cdi/nvidia.yaml"),
    classes=(WSL2,),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1739",),
)
def cdi_wsl_dxcore(node: Node) -> Verdict:
    """Under WSL2 the driver's libraries access the GPU through libdxcore.so. Without it, containers have no
    GPU.
    """
    for spec in _of_gpus(node):
        if any(path.endswith("/libdxcore.so") for path in spec.mounts):
            continue
        fix = Fix(f"nvidia-ctk cdi generate --mode=wsl --output={spec.path}")
        return warn(f"{spec.path} doesn't include libdxcore.so", seen(spec.path, "no libdxcore.so"), fix=fix)
    return ok("the CDI specifications include libdxcore.so") if _of_gpus(node) else skip(NO_SPEC)


# Whether CDI specifications still match this machine.

_SHOWN = 6


@check(
    "cdi-spec-stale",
    title="CDI specifications match this machine",
    looks_at="every specification of kind nvidia.com/... in /etc/cdi and /var/run/cdi that no other one "
    "overrides: mounted files, device files and their numbers, hooks, the driver version in "
    "library names, and the GPUs that the devices are named after. If no engine uses "
    "specifications, a mismatch is a warning.",
    fix=fixes.REFRESH_CDI,
    blocked_by=(
        "module-not-loaded",
        "driver-lib-mismatch",
        "dev-nodes-missing",
        "mig-caps-missing",
        "dev-node-major-stale",
        "uvm-not-loaded",
        "nvml-hang",
    ),
    refs=("https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md",),
)
def cdi_spec_stale(node: Node) -> Verdict:
    """A specification lists files of the driver version that it was generated for. After an upgrade or a
    reboot these files may no longer exist, and containers fail with 'cannot stat' or CUDA error 999. Docker
    29.2 and later try CDI first.
    """
    specs = tuple(spec for spec in node.cdi_specs if hidden_by(node.cdi_specs, spec) is None)
    if not specs:
        return skip("no CDI specification for NVIDIA devices exists")
    for spec in specs:
        wrong = tuple(_wrong(node, spec))
        if wrong:
            evidence = cut(wrong, _SHOWN, spec.path)
            fix = fixes.rewrite_cdi(spec.path, spec.kind)
            return judge(node)(f"{spec.path} no longer matches this machine", *evidence, fix=fix)
    return ok(f"{many(len(specs), 'CDI specification')} match this machine")


def _wrong(node: Node, spec: SpecFile) -> Iterator[Evidence]:
    if spec.problem:
        yield seen(spec.path, spec.problem)
    names_gpus = any(name.startswith("GPU-") for name in spec.names)
    gpus = known_gpus(node.nvml.inventory) if names_gpus and node.module is not None else None
    version = node.module.version if node.module else ""
    yield from (seen(spec.path, part) for part in stale_parts(node.host, spec, version, gpus))


# Whether a specification exists where one is needed, and what keeps it up to date.

_DIRECTORIES = "/etc/cdi, /var/run/cdi"
_SERVICE, _PATH = WRITERS[0], "nvidia-cdi-refresh.path"
_OURS = "gpunode-cdi-refresh.path"


@check(
    "cdi-spec-missing",
    title="A CDI specification exists where one is needed",
    looks_at=f"{_DIRECTORIES}, if the toolkit's mode is cdi, or if podman is the only engine and has "
    "neither NVIDIA's hook nor its runtime.",
    fix=fixes.REFRESH_CDI,
    blocked_by=(
        "module-not-loaded",
        "driver-lib-mismatch",
        "dev-nodes-missing",
        "uvm-not-loaded",
        "toolkit-missing",
        "toolkit-config-invalid",
    ),
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
)
def cdi_spec_missing(node: Node) -> Verdict:
    """With the toolkit's mode cdi, or with podman alone, containers get GPUs only through such a file.
    Without one they don't start: 'unresolvable CDI devices'.
    """
    if node.gpu_specs or _own_kind(node):
        return ok("a CDI specification for GPUs exists")
    users = _cdi_users(node)
    if not users:
        return skip("no CDI specification for GPUs exists, and no engine here needs one")
    unit = node.units.get(_SERVICE)
    failed = [seen(_SERVICE, str(unit))] if unit and unit.active == "failed" else []
    only = "Podman gives" if users[0].source == "podman" else "In the toolkit's mode cdi, the runtime gives"
    why = f"{only} GPUs to containers only through such a file: 'unresolvable CDI devices'."
    return fail(NO_SPEC, *users, seen(_DIRECTORIES, "none"), *failed, why=why)


def _own_kind(node: Node) -> bool:
    """Whether a specification of the toolkit's kind is in its directories, for the runtime mode cdi. The GPU
    operator's toolkit has its own kind (management.nvidia.com/gpu)."""
    settings = node.toolkit_settings
    if settings.value(MODE) != "cdi":
        return False
    kind, directories = settings.value(DEFAULT_KIND), settings.value(SPEC_DIRS)
    return any(spec.kind == kind and spec.devices for spec in vendor_specs(node.host, directories))


def _cdi_users(node: Node) -> list[Evidence]:
    """What gets GPUs only through CDI on this node."""
    settings = node.toolkit_settings
    if settings.value(MODE) == "cdi":
        return [seen(settings.path, f"{MODE}: cdi", settings.line(MODE))]
    role = podman_role(node)
    if not role.used or nvidia_hooks(node.host, SYSTEM_DIRECTORIES):
        return []
    try:
        runtimes = node.podman_files.runtimes
    except ConfigError:
        return []
    programs = (path for paths in runtimes.values() for path in paths)
    return [] if any(map(is_nvidia_program, programs)) else [seen("podman", role.reason)]


@check(
    "cdi-disabled",
    title="Docker reads CDI specifications if containers get GPUs through CDI",
    looks_at="CDISpecDirs of the running Docker, if a specification for GPUs exists.",
    fix=fixes.configure("docker", "--cdi"),
    blocked_by=("toolkit-missing", "docker-not-running", "docker-config-invalid-json"),
    table="version_gates",
    refs=("https://docs.docker.com/build/building/cdi/",),
)
@if_reported("docker")
def cdi_disabled(node: Node) -> Verdict:
    """Without the toolkit's hook and without CDI, Docker can't add GPUs to containers: 'could not select
    device driver'. Docker 25 and later support CDI if it is enabled; 28.2 and later enable it by default.
    """
    docker = node.docker
    if docker is None or docker.process is None or not docker_role(node).used:
        return skip("Docker isn't running, or isn't the engine for GPU containers on this node")
    specs = node.gpu_specs
    if not specs:
        return skip(NO_SPEC)
    directories = _reported_directories(node)
    if directories:
        return ok(f"Docker reads CDI specifications in {', '.join(directories)}")
    release = docker.release
    evidence = (seen("docker info", "no CDISpecDirs"), seen(specs[0].path, specs[0].kind))
    if not any(name in node.toolkit.programs for name in HOOKS):
        if docker.version and docker.version < gate("docker", "cdi"):
            fix = fixes.INSTALL_TOOLKIT
            return fail(
                f"containers can get GPUs only through CDI, and Docker {release} doesn't support CDI",
                *evidence,
                fix=fix,
            )
        return fail("containers can get GPUs only through CDI, and CDI is disabled in Docker", *evidence)
    if docker.version >= gate("docker", "cdi-default"):
        return note(f"CDI is disabled in Docker {release}: --device nvidia.com/gpu doesn't work", *evidence)
    return ok("CDI is disabled in Docker; the toolkit's hook adds GPUs to containers", *evidence)


@check(
    "cdi-perms",
    title="Rootless engines can read the CDI specifications",
    severity="warning",
    looks_at="modes of specifications and their directories, if podman or a rootless Docker is in use.",
    fix=Fix("chmod o+r /var/run/cdi/nvidia.yaml"),
    classes=EVERYWHERE_BUT_TEGRA,
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/146",),
)
def cdi_perms(node: Node) -> Verdict:
    """An engine ignores a specification that its user can't read: 'unresolvable CDI devices'."""
    specs = node.gpu_specs
    if not specs:
        return skip(NO_SPEC)
    rootless = [daemon.user for daemon in node.docker_rootless]
    if node.podman is None and not rootless:
        return skip("no rootless engine runs here; only root reads the CDI specifications")
    for spec in specs:
        directory = spec.path.rpartition("/")[0]
        required = ((directory, 0o005), (spec.path, 0o004))
        modes = [(path, mode_of(node.host, path), bits) for path, bits in required]
        closed = [(path, mode) for path, mode, bits in modes if mode is not None and mode & bits != bits]
        if closed:
            evidence = (seen(path, f"mode {mode:04o}") for path, mode in closed)
            command = " && ".join(f"chmod o+r{'x' if path == directory else ''} {path}" for path, _ in closed)
            fix = Fix(command, disturbs=DISRUPTS_NOTHING)
            return warn(f"only root can read {spec.path}", *evidence, fix=fix)
    return ok("all users can read the CDI specifications")


@check(
    "cdi-refresh-inactive",
    title="The CDI specification is updated when the driver changes",
    severity="warning",
    looks_at=f"{_SERVICE} and {_PATH} as systemd reports them, or gpunode's own units.",
    fix=Fix(f"systemctl enable --now {_PATH}"),
    blocked_by=("module-not-loaded", "driver-lib-mismatch", "dev-nodes-missing", "toolkit-missing"),
    classes=EVERYWHERE_BUT_TEGRA,
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
)
def cdi_refresh_inactive(node: Node) -> Verdict:
    """These units write the specification at boot and after a driver upgrade. Without them the specification
    is then missing or outdated, and GPU containers don't start.
    """
    service, path = node.units.get(_SERVICE), node.units.get(_PATH)
    if service is None or not service.installed:
        return skip(f"{_SERVICE} isn't installed")
    if runs(node, _OURS):
        return ok(f"{_OURS} keeps the CDI specification up to date")
    if service.active == "failed":
        fix = after_reading_log(_SERVICE, Fix(f"systemctl restart {_SERVICE}"))
        return warn(f"{_SERVICE} failed and wrote no CDI specification", *seen_unit(node, _SERVICE), fix=fix)
    if service.at_boot and path is not None and path.installed and not path.runs:
        return warn(f"{_PATH} isn't enabled", seen(_PATH, str(path)), seen(_SERVICE, str(service)))
    return ok(f"{_SERVICE}: {service}")
