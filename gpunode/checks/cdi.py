"""What the specifications say, and whether those who read them understand it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gpunode.cdi.spec import reads, text
from gpunode.checks import fixes
from gpunode.checks.fixes import everywhere
from gpunode.checks.model import EVERYWHERE_BUT_TEGRA, HOST, Verdict, check, fail, note, ok, seen, skip, warn
from gpunode.checks.units import after_reading_log, seen_unit
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts import boot
from gpunode.facts.cdi import DIRECTORIES, CdiSpec, known_gpus, stale_parts, vendor_specs
from gpunode.facts.containerd import dig
from gpunode.facts.daemons import parse_version
from gpunode.facts.engines import containerd_role, crio_role, docker_role, podman_role
from gpunode.facts.node import Node
from gpunode.facts.system import WSL2, mode_of
from gpunode.facts.tables import gate
from gpunode.facts.toolkit import DEFAULT_KIND, MODE, SPEC_DIRS, SYSTEM_DIRECTORIES, nvidia_hooks
from gpunode.facts.writers import is_nvidia_program
from gpunode.output.result import Evidence, Fix

# The engines of this node that read CDI specifications.

# the toolkit's programs that put GPUs into containers without a specification on disk
HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-runtime")


@dataclass(frozen=True)
class Reader:
    """One engine that is used here and has CDI on. `needs`: it gets GPUs in no other way."""

    name: str
    version: tuple[int, ...]
    needs: bool = False


def readers(node: Node) -> tuple[Reader, ...]:
    """Daemons that don't answer are left out: whether their CDI is on is unknown."""
    return tuple(_readers(node))


def _readers(node: Node) -> Iterator[Reader]:
    programs = node.toolkit.programs
    alone = not any(name in programs for name in HOOKS)
    if node.docker is not None and docker_role(node).used and docker_directories(node):
        yield Reader("docker", node.docker.version, alone)
    if node.containerd is not None and containerd_role(node).used and _containerd_on(node):
        yield Reader("containerd", node.containerd.version, alone)
    if node.crio is not None and crio_role(node).used:
        yield Reader("crio", node.crio.version, alone)
    if node.podman is not None and podman_role(node).used:
        yield Reader("podman", node.podman.version, needs=True)


def judge(node: Node) -> Callable[..., Verdict]:
    """`fail` where an engine or the toolkit's runtime takes specifications, else `warn`: nothing breaks."""
    try:
        mode = node.toolkit_settings.value(MODE)
    except ConfigError:
        mode = ""
    return fail if mode == "cdi" or readers(node) else warn


def docker_directories(node: Node) -> tuple[str, ...]:
    """Where the running Docker looks for specifications, () where its CDI is off or it doesn't say."""
    try:
        found = node.docker_info.get("CDISpecDirs")
    except DaemonError:
        return ()
    return tuple(str(one) for one in found if one) if isinstance(found, list) else ()


def _containerd_on(node: Node) -> bool:
    try:
        return dig(node.cri.config, "enableCDI") is True
    except DaemonError:
        return False


# Specifications that a reboot deletes: whether a service writes them again.

_VOLATILE = ("/run/", "/var/run/")
_WRITERS = ("nvidia-cdi-refresh.service", "gpunode-cdi-refresh.service")
_COMMANDS = ("cdi generate", "cdi refresh", "cdi-refresh")


@check(
    "cdi-lost-at-reboot",
    "cdi",
    title="CDI specifications outlive a reboot",
    severity="warning",
    looks_at=(
        "specifications for GPUs in /var/run/cdi, where an engine reads them, and who writes them at boot: "
        "NVIDIA's or gpunode's unit, the GPU operator, a unit, crontab or rule of this node."
    ),
    remedy=everywhere("gpunode cdi refresh --install"),
    blocked_by=("module-not-loaded", "cdi-spec-stale"),
    unless=("operator-driver", "immutable"),
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
    reboot=True,
)
def cdi_lost_at_reboot(node: Node) -> Verdict:
    """/var/run lives in memory. After the reboot the file isn't there, and containers that ask for GPUs by
    CDI fail with 'unresolvable CDI devices' until somebody writes it again.
    """
    specs = [spec for spec in node.cdi_specs if spec.serves_gpus]
    lost = [spec for spec in specs if spec.path.startswith(_VOLATILE)]
    if not lost:
        return skip("no CDI specification for GPUs lies where a reboot clears it away")
    if len(lost) < len(specs):
        return ok("another specification outlives a reboot")
    if not readers(node):
        return skip("no engine here reads CDI specifications")
    writer = _writer(node)
    if writer:
        return ok("the specification is written again after a reboot", seen(writer, "writes it"))
    if _WRITERS[0] not in node.units:
        return skip(f"systemd doesn't tell of {_WRITERS[0]}")
    states = ((name, node.units.get(name)) for name in _WRITERS)
    found = [seen(name, str(state)) for name, state in states if state is not None]
    return warn(
        f"{lost[0].path} is gone after the next reboot, and nothing writes it again",
        *(seen(spec.path, f"{spec.kind}, in a file system that lives in memory") for spec in lost),
        *found,
        fix=_enable(node),
    )


def _writer(node: Node) -> str:
    for name in _WRITERS:
        unit = node.units.get(name)
        if unit is not None and (unit.at_boot or unit.file == "static"):
            return name
    if node.host.is_dir(boot.OPERATOR):
        return boot.OPERATOR
    return boot.started(node.host, _COMMANDS, besides=_WRITERS[:1], rules=True)


def _enable(node: Node) -> Fix | None:
    """NVIDIA's own units, where the toolkit brought them."""
    unit = node.units.get(_WRITERS[0])
    if unit is None or not unit.installed or unit.load == "masked":
        return None
    return Fix(f"systemctl enable --now {_WRITERS[0]} nvidia-cdi-refresh.path")


REBOOT_CHECKS = (cdi_lost_at_reboot,)


# Which specification counts where two name the same device: the one in the later directory.


def rank(spec: CdiSpec) -> int:
    """Its directory's place in the engines' order."""
    directory = spec.path.rpartition("/")[0]
    return DIRECTORIES.index(directory) if directory in DIRECTORIES else -1


def hidden_by(specs: Iterable[CdiSpec], spec: CdiSpec) -> CdiSpec | None:
    """The specification in a later directory that names every device of this one, None if there is none."""
    if not spec.devices:
        return None
    later = (other for other in specs if rank(other) > rank(spec) and other.kind == spec.kind)
    return next((other for other in later if set(spec.names) <= set(other.names)), None)


_UVM = "/dev/nvidia-uvm"
_SPEC = "https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md"
_NONE = "there is no CDI specification for GPUs"


def _of_gpus(node: Node) -> list[CdiSpec]:
    """Those that give containers GPUs and that engines take: none that a later directory hides whole."""
    return [spec for spec in node.cdi_specs if spec.serves_gpus and hidden_by(node.cdi_specs, spec) is None]


@check(
    "cdi-uvm-absent-in-spec",
    "cdi",
    title="CDI specifications have unified memory's device",
    looks_at=f"specifications of kind nvidia.com/gpu that list GPUs' files: whether {_UVM} is there.",
    remedy=fixes.REFRESH_CDI,
    blocked_by=("module-not-loaded", "uvm-not-loaded", "dev-nodes-missing", "cdi-spec-stale"),
    classes=HOST,
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1967",),
)
def cdi_uvm_absent_in_spec(node: Node) -> Verdict:
    """CUDA needs this device. A specification that was made before the module nvidia-uvm was loaded lacks it:
    in containers nvidia-smi works, and CUDA fails with error 999.
    """
    specs = _of_gpus(node)
    if not specs:
        return skip(_NONE)
    if node.host.device(_UVM) is None:
        return skip(f"there is no {_UVM} on this node")
    for spec in specs:
        paths = {one.path for one in spec.nodes}
        gpus = sorted(path for path in paths if path.removeprefix("/dev/nvidia").isdigit())
        if gpus and _UVM not in paths:
            evidence = (seen(spec.path, f"has {', '.join(gpus[:4])}, and no {_UVM}"), seen(_UVM, "is there"))
            return judge(node)(
                f"{spec.path} leaves out {_UVM}", *evidence, fix=fixes.rewrite_cdi(spec.path, spec.kind)
            )
    return ok(f"{specs[0].path} has {_UVM}")


@check(
    "cdi-duplicate",
    "cdi",
    title="No device is in two specifications",
    looks_at="device names of NVIDIA's specifications in /etc/cdi and /var/run/cdi.",
    remedy=fixes.everywhere("gpunode cdi list"),
    blocked_by=("pci-no-gpu",),
    classes=(*HOST, WSL2),
    refs=(_SPEC,),
)
def cdi_duplicate(node: Node) -> Verdict:
    """Two files of one directory that name the same device are in conflict, and the device can't be resolved.
    A file in /var/run/cdi hides one in /etc/cdi, whose edits then do nothing, until a boot at which the first
    isn't written.
    """
    specs = [spec for spec in node.cdi_specs if not spec.problem]
    if len(specs) < 2:
        return ok("no two specifications name the same device") if specs else skip(_NONE)
    for one, other in _pairs(specs):
        names = sorted(set(one.names) & set(other.names))
        if names and rank(one) == rank(other):
            shown = ", ".join(f"{one.kind}={name}" for name in names[:3])
            extra = one if "nvidia.yaml" in other.path else other
            return judge(node)(
                f"two specifications name {shown}, so engines take neither",
                seen(one.path, one.kind),
                seen(other.path, other.kind),
                fix=Fix(f"mv {extra.path} {extra.path}.disabled"),
            )
    for spec in specs:
        above = hidden_by(tuple(specs), spec)
        if above is not None and (above.devices, above.edits) != (spec.devices, spec.edits):
            fix = Fix(f"mv {spec.path} {spec.path}.disabled")
            evidence = (seen(spec.path, "hidden"), seen(above.path, "the one that engines take"))
            return warn(f"{spec.path} is hidden by {above.path} and says something else", *evidence, fix=fix)
    return ok("no device is named in two specifications that differ")


def _pairs(specs: list[CdiSpec]) -> Iterator[tuple[CdiSpec, CdiSpec]]:
    for number, one in enumerate(specs):
        yield from ((one, other) for other in specs[number + 1 :] if other.kind == one.kind)


@check(
    "cdi-unsupported-version",
    "cdi",
    title="Engines read the specifications' version",
    looks_at=(
        "cdiVersion of the specifications, and which one each engine in use reads by its release, where its "
        "CDI is on."
    ),
    remedy=fixes.REFRESH_CDI,
    blocked_by=("pci-no-gpu", "cdi-spec-stale"),
    classes=HOST,
    table="cdi_versions",
    refs=(_SPEC, "https://github.com/NVIDIA/nvidia-container-toolkit/issues/1940"),
)
def cdi_unsupported_version(node: Node) -> Verdict:
    """An engine passes over a specification of a version that it doesn't know and says 'unresolvable CDI
    devices'. gpunode cdi refresh writes the lowest version that will do.
    """
    specs = [spec for spec in _of_gpus(node) if parse_version(spec.version)]
    if not specs:
        return skip(_NONE)
    here = readers(node)
    for spec in specs:
        late = [reader for reader in here if _too_new(spec, reader)]
        if late:
            return _unread(spec, late)
    names = ", ".join(reader.name for reader in here) or "no engine with CDI is here to read them"
    return ok(f"specifications of version {specs[0].version} are read by: {names}")


def _too_new(spec: CdiSpec, reader: Reader) -> bool:
    known = reads(reader.name, reader.version)
    return known is not None and bool(reader.version) and parse_version(spec.version) > known


def _unread(spec: CdiSpec, late: list[Reader]) -> Verdict:
    evidence = [seen(spec.path, f"cdiVersion {spec.version}")]
    for reader in late:
        known = reads(reader.name, reader.version)
        release = ".".join(map(str, reader.version))
        evidence.append(seen(reader.name, f"{release} reads up to {text(known) if known else 'none'}"))
    names = ", ".join(reader.name for reader in late)
    summary = f"{names} can't read {spec.path}: it is of version {spec.version}"
    fix = fixes.rewrite_cdi(spec.path, spec.kind)
    if any(reader.needs for reader in late):
        return fail(summary, *evidence, fix=fix)
    return warn(summary, *evidence, fix=fix)


@check(
    "cdi-wsl-dxcore",
    "cdi",
    title="CDI specifications have libdxcore.so",
    severity="warning",
    looks_at="specifications of kind nvidia.com/gpu under WSL2: whether they mount libdxcore.so.",
    remedy=fixes.everywhere("nvidia-ctk cdi generate --mode=wsl --output=/var/run/cdi/nvidia.yaml"),
    blocked_by=("pci-no-gpu",),
    classes=(WSL2,),
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1739",),
)
def cdi_wsl_dxcore(node: Node) -> Verdict:
    """Under WSL2 the driver's libraries reach the GPU by libdxcore.so; without it there is none."""
    for spec in _of_gpus(node):
        if any(path.endswith("/libdxcore.so") for path in spec.mounts):
            continue
        fix = Fix(f"nvidia-ctk cdi generate --mode=wsl --output={spec.path}")
        return warn(f"{spec.path} leaves out libdxcore.so", seen(spec.path, "no libdxcore.so"), fix=fix)
    return ok("specifications have libdxcore.so") if _of_gpus(node) else skip(_NONE)


CONTENTS_CHECKS = (
    cdi_uvm_absent_in_spec,
    cdi_duplicate,
    cdi_unsupported_version,
    cdi_wsl_dxcore,
)


# CDI specifications: do they still describe this machine?

_SHOWN = 6


@check(
    "cdi-spec-stale",
    "cdi",
    title="CDI specifications fit this machine",
    looks_at=(
        "every specification of kind nvidia.com/... in /etc/cdi and /var/run/cdi that no other hides: "
        "mounted files, device files and their numbers, hooks, the driver version in library names, and the "
        "GPUs that devices are named after. Where no engine takes specifications this is a warning."
    ),
    remedy=fixes.REFRESH_CDI,
    blocked_by=(
        "module-not-loaded",
        "driver-lib-mismatch",
        "dev-nodes-missing",
        "mig-caps-missing",
        "dev-node-major-stale",
        "uvm-not-loaded",
        "nvml-hang",
    ),
    classes=HOST,
    refs=("https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md",),
)
def cdi_spec_stale(node: Node) -> Verdict:
    """A specification lists files of the driver that it was made for. After an upgrade or a reboot they may
    be gone, and containers fail with 'cannot stat' or CUDA error 999. Docker 29.2 and later try CDI first.
    """
    specs = tuple(spec for spec in node.cdi_specs if hidden_by(node.cdi_specs, spec) is None)
    if not specs:
        return skip("there is no CDI specification for NVIDIA devices")
    for spec in specs:
        wrong = tuple(_wrong(node, spec))
        if wrong:
            more = len(wrong) - _SHOWN
            shown = (*wrong[:_SHOWN], seen(spec.path, f"and {more} more")) if more > 0 else wrong
            fix = fixes.rewrite_cdi(spec.path, spec.kind)
            return judge(node)(f"{spec.path} doesn't describe this machine any more", *shown, fix=fix)
    return ok(f"{len(specs)} CDI specification{'s' if len(specs) > 1 else ''} fit this machine")


def _wrong(node: Node, spec: CdiSpec) -> Iterator[Evidence]:
    if spec.problem:
        yield seen(spec.path, spec.problem)
    names_gpus = any(name.startswith("GPU-") for name in spec.names)
    gpus = known_gpus(node.nvml.inventory) if names_gpus and node.module is not None else None
    version = node.module.version if node.module else ""
    yield from (seen(spec.path, part) for part in stale_parts(node.host, spec, version, gpus))


SPECS_CHECKS = (cdi_spec_stale,)


# Whether there is a specification where one is needed, and who keeps it true.

_DIRECTORIES = "/etc/cdi, /var/run/cdi"
_SERVICE, _PATH = "nvidia-cdi-refresh.service", "nvidia-cdi-refresh.path"
_OURS = "gpunode-cdi-refresh.path"


@check(
    "cdi-spec-missing",
    "cdi",
    title="There is a CDI specification where one is needed",
    looks_at=(
        f"{_DIRECTORIES}, where the toolkit's mode is cdi, or podman is the only engine and has neither "
        "hook nor runtime of NVIDIA's."
    ),
    remedy=fixes.REFRESH_CDI,
    blocked_by=(
        "module-not-loaded",
        "driver-lib-mismatch",
        "dev-nodes-missing",
        "uvm-not-loaded",
        "toolkit-missing",
        "toolkit-config-invalid",
    ),
    classes=HOST,
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
)
def cdi_spec_missing(node: Node) -> Verdict:
    """Engines find GPUs by this file alone: without it they say 'unresolvable CDI devices'."""
    if any(spec.serves_gpus for spec in node.cdi_specs) or _own_kind(node):
        return ok("there is a CDI specification for GPUs")
    asked = _asked(node)
    if not asked:
        return skip("there is no CDI specification for GPUs, and nothing here asks for one")
    unit = node.units.get(_SERVICE)
    failed = [seen(_SERVICE, str(unit))] if unit and unit.active == "failed" else []
    return fail("there is no CDI specification for GPUs", *asked, seen(_DIRECTORIES, "none"), *failed)


def _own_kind(node: Node) -> bool:
    """Whether there is one where the toolkit in mode cdi looks, and of the kind that it takes: the GPU
    operator's toolkit has a kind of its own (management.nvidia.com/gpu)."""
    settings = node.toolkit_settings
    if settings.value(MODE) != "cdi":
        return False
    kind, directories = settings.value(DEFAULT_KIND), settings.value(SPEC_DIRS)
    return any(spec.kind == kind and spec.devices for spec in vendor_specs(node.host, directories))


def _asked(node: Node) -> list[Evidence]:
    """Who gets GPUs by CDI alone here."""
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
    "cdi",
    title="Docker reads CDI specifications where GPUs come by them",
    looks_at="CDISpecDirs of the running Docker, where there is a specification for GPUs.",
    remedy=fixes.everywhere("gpunode configure-runtime --runtime docker --cdi", "restart"),
    blocked_by=("toolkit-missing", "docker-not-running", "docker-config-invalid-json"),
    classes=HOST,
    table="version_gates",
    refs=("https://docs.docker.com/build/building/cdi/",),
)
def cdi_disabled(node: Node) -> Verdict:
    """Without the toolkit's hook and without CDI Docker has no way to GPUs: 'could not select device driver'.
    Docker 25 has CDI where it is switched on, 28.2 and later unless it is switched off.
    """
    docker = node.docker
    if docker is None or docker.process is None or not docker_role(node).used:
        return skip("no Docker runs here that containers with GPUs would use")
    specs = [spec for spec in node.cdi_specs if spec.serves_gpus]
    if not specs:
        return skip("there is no CDI specification for GPUs")
    try:
        node.docker_info  # noqa: B018 - read for its failure
    except DaemonError as error:
        return skip(f"Docker doesn't say what it runs with: {error.message}")
    directories = docker_directories(node)
    if directories:
        return ok(f"Docker reads specifications in {', '.join(directories)}")
    release = ".".join(map(str, docker.version))
    evidence = (seen("docker info", "no CDISpecDirs"), seen(specs[0].path, specs[0].kind))
    if not any(name in node.toolkit.programs for name in HOOKS):
        if docker.version and docker.version < gate("docker", "cdi"):
            fix = fixes.INSTALL_TOOLKIT.other
            return fail(f"GPUs come by CDI alone, and Docker {release} knows no CDI", *evidence, fix=fix)
        return fail("GPUs come by CDI alone here, and Docker's CDI is off", *evidence)
    if docker.version >= gate("docker", "cdi-default"):
        return note(f"Docker {release} has CDI switched off: --device nvidia.com/gpu doesn't work", *evidence)
    return ok("Docker's CDI is off, and the toolkit's hook gives containers their GPUs", *evidence)


@check(
    "cdi-perms",
    "cdi",
    title="Rootless engines can read the specifications",
    severity="warning",
    looks_at="modes of specifications and their directories, where podman or a rootless Docker is.",
    remedy=fixes.everywhere("chmod o+r /var/run/cdi/nvidia.yaml"),
    blocked_by=("pci-no-gpu",),
    classes=EVERYWHERE_BUT_TEGRA,
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/146",),
)
def cdi_perms(node: Node) -> Verdict:
    """An engine passes over a specification that its user can't read: 'unresolvable CDI devices'."""
    specs = [spec for spec in node.cdi_specs if spec.serves_gpus]
    if not specs:
        return skip("there is no CDI specification for GPUs")
    rootless = [daemon.user for daemon in node.docker_rootless]
    if node.podman is None and not rootless:
        return skip("nobody runs a rootless engine here, only root reads specifications")
    for spec in specs:
        directory = spec.path.rpartition("/")[0]
        wanted = ((directory, 0o005), (spec.path, 0o004))
        modes = [(path, mode_of(node.host, path), bits) for path, bits in wanted]
        closed = [(path, mode) for path, mode, bits in modes if mode is not None and mode & bits != bits]
        if closed:
            evidence = (seen(path, f"mode {mode:04o}") for path, mode in closed)
            fix = Fix(
                " && ".join(f"chmod o+r{'x' if path == directory else ''} {path}" for path, _ in closed)
            )
            return warn(f"only root can read {spec.path}", *evidence, fix=fix)
    return ok("everybody can read the specifications")


@check(
    "cdi-refresh-inactive",
    "cdi",
    title="The specification is rewritten when the driver changes",
    severity="warning",
    looks_at=f"{_SERVICE} and {_PATH} as systemd has them, or gpunode's own units.",
    remedy=fixes.everywhere(f"systemctl enable --now {_PATH}"),
    blocked_by=("module-not-loaded", "driver-lib-mismatch", "dev-nodes-missing", "toolkit-missing"),
    classes=EVERYWHERE_BUT_TEGRA,
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
)
def cdi_refresh_inactive(node: Node) -> Verdict:
    """They write the specification at boot and when the driver is replaced. Without them it is missing or old
    after that, and containers don't start.
    """
    service, path = node.units.get(_SERVICE), node.units.get(_PATH)
    if service is None or not service.installed:
        return skip(f"{_SERVICE} isn't installed")
    ours = node.units.get(_OURS)
    if ours is not None and ours.runs:
        return ok(f"{_OURS} keeps the specification true")
    if service.active == "failed":
        fix = after_reading_log(_SERVICE, f"systemctl restart {_SERVICE}")
        return warn(f"{_SERVICE} failed: no specification was written", *seen_unit(node, _SERVICE), fix=fix)
    if service.at_boot and path is not None and path.installed and not path.runs:
        return warn(f"{_PATH} isn't on", seen(_PATH, str(path)), seen(_SERVICE, str(service)))
    return ok(f"{_SERVICE}: {service}")


SUPPLY_CHECKS = (
    cdi_spec_missing,
    cdi_disabled,
    cdi_perms,
    cdi_refresh_inactive,
)
