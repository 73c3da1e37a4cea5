"""Whether there is a specification where one is needed, and who keeps it true."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.cdi.readers import HOOKS, docker_directories
from gpunode.checks.model import EVERYWHERE_BUT_TEGRA, HOST, Check, Verdict, fail, note, ok, seen, skip, warn
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts.engines import docker_role, podman_role
from gpunode.facts.file_modes import mode_of
from gpunode.facts.node import Node
from gpunode.facts.oci_hooks import SYSTEM_DIRECTORIES, nvidia_hooks
from gpunode.facts.toolkit_settings import DEFAULT_KIND, MODE, SPEC_DIRS
from gpunode.facts.writers import is_nvidia_program
from gpunode.result import Evidence, Fix
from gpunode.tables import gate

_DIRECTORIES = "/etc/cdi, /var/run/cdi"
_SERVICE, _PATH = "nvidia-cdi-refresh.service", "nvidia-cdi-refresh.path"
_OURS = "gpunode-cdi-refresh.path"


def cdi_spec_missing(node: Node) -> Verdict:
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
    from gpunode.facts.cdi import vendor_specs

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


def cdi_disabled(node: Node) -> Verdict:
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


def cdi_perms(node: Node) -> Verdict:
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


def cdi_refresh_inactive(node: Node) -> Verdict:
    service, path = node.units.get(_SERVICE), node.units.get(_PATH)
    if service is None or not service.installed:
        return skip(f"{_SERVICE} isn't installed")
    ours = node.units.get(_OURS)
    if ours is not None and ours.runs:
        return ok(f"{_OURS} keeps the specification true")
    if service.active == "failed":
        fix = Fix(f"systemctl restart {_SERVICE}")
        return warn(f"{_SERVICE} failed: no specification was written", seen(_SERVICE, str(service)), fix=fix)
    if service.at_boot and path is not None and path.installed and not path.runs:
        return warn(f"{_PATH} isn't on", seen(_PATH, str(path)), seen(_SERVICE, str(service)))
    return ok(f"{_SERVICE}: {service}")


CHECKS = (
    Check(
        id="cdi-spec-missing",
        title="There is a CDI specification where one is needed",
        layer="cdi",
        severity="error",
        looks_at=(
            f"{_DIRECTORIES}, where the toolkit's mode is cdi, or podman is the only engine and has neither "
            "hook nor runtime of NVIDIA's."
        ),
        why="Engines find GPUs by this file alone: without it they say 'unresolvable CDI devices'.",
        remedy=fixes.REFRESH_CDI,
        run=cdi_spec_missing,
        blocked_by=(
            *("module-not-loaded", "driver-lib-mismatch", "dev-nodes-missing", "uvm-not-loaded"),
            *("toolkit-missing", "toolkit-config-invalid"),
        ),
        classes=HOST,
        refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
    ),
    Check(
        id="cdi-disabled",
        title="Docker reads CDI specifications where GPUs come by them",
        layer="cdi",
        severity="error",
        looks_at="CDISpecDirs of the running Docker, where there is a specification for GPUs.",
        why=(
            "Without the toolkit's hook and without CDI Docker has no way to GPUs: 'could not select device "
            "driver'. Docker 25 has CDI where it is switched on, 28.2 and later unless it is switched off."
        ),
        remedy=fixes.everywhere("gpunode configure-runtime --runtime docker --cdi", "restart"),
        run=cdi_disabled,
        blocked_by=("toolkit-missing", "docker-not-running", "docker-config-invalid-json"),
        classes=HOST,
        table="version_gates",
        refs=("https://docs.docker.com/build/building/cdi/",),
    ),
    Check(
        id="cdi-perms",
        title="Rootless engines can read the specifications",
        layer="cdi",
        severity="warning",
        looks_at="modes of specifications and their directories, where podman or a rootless Docker is.",
        why="An engine passes over a specification that its user can't read: 'unresolvable CDI devices'.",
        remedy=fixes.everywhere("chmod o+r /var/run/cdi/nvidia.yaml"),
        run=cdi_perms,
        blocked_by=("pci-no-gpu",),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/146",),
    ),
    Check(
        id="cdi-refresh-inactive",
        title="The specification is rewritten when the driver changes",
        layer="cdi",
        severity="warning",
        looks_at=f"{_SERVICE} and {_PATH} as systemd has them, or gpunode's own units.",
        why=(
            "They write the specification at boot and when the driver is replaced. Without them it "
            "is missing or old after that, and containers don't start."
        ),
        remedy=fixes.everywhere(f"systemctl enable --now {_PATH}"),
        run=cdi_refresh_inactive,
        blocked_by=("module-not-loaded", "driver-lib-mismatch", "dev-nodes-missing", "toolkit-missing"),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
    ),
)
