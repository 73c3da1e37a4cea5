"""Whether the driver keeps the GPUs initialised while nobody uses them."""

from __future__ import annotations

from gpunode.checks.devices import remedies
from gpunode.checks.driver import targets
from gpunode.checks.model import Check, Verdict, note, ok, seen, skip, warn
from gpunode.checks.units import seen_unit
from gpunode.facts import gpu_support
from gpunode.facts.node import Node
from gpunode.facts.units import read_unit
from gpunode.result import Fix

_UNIT = "nvidia-persistenced.service"
_PROGRAM = "nvidia-persistenced"
_OWN_PACKAGE = 590  # the first branch for which NVIDIA's repository for Ubuntu has nvidia-persistenced
_CHASSIS = "/sys/class/dmi/id/chassis_type"
_PORTABLE = ("8", "9", "10", "11", "14", "30", "31", "32")  # SMBIOS: portable, laptop, notebook, tablet, ...
_SOCKET = "/run/nvidia-persistenced/socket"


def persistence_off(node: Node) -> Verdict:
    told = [gpu for gpu in node.conditions if gpu.persistence is not None]
    if not told:
        return skip("NVML doesn't tell the persistence mode")
    if any(gpu.persistence for gpu in told):
        return ok("the driver keeps the GPUs initialised")
    if any(gpu.display_active or any(one.graphics for one in gpu.processes or ()) for gpu in told):
        return ok("a desktop keeps the GPUs initialised")
    if (node.host.read_text(_CHASSIS) or "").strip() in _PORTABLE:
        return ok("a portable computer lets its GPU sleep")
    if _trouble(node):
        return skip("the persistence daemon is broken, which persistenced-broken tells")
    off = seen("NVML", f"persistence mode is off on all {len(told)} GPUs")
    state = node.units.get(_UNIT)
    if (state is not None and state.runs) or any(one.name == _PROGRAM for one in node.processes):
        return note("the persistence daemon runs, told to leave persistence mode off", off)
    if (state is not None and state.installed) or read_unit(node.host, _UNIT) is not None:
        return warn("nothing keeps the GPUs initialised", off, seen(_UNIT, state or "doesn't run"))
    return warn("nothing keeps the GPUs initialised", off, seen(_UNIT, "isn't installed"), fix=_install(node))


def keep_initialised(node: Node) -> Fix | None:
    """What starts the daemon, or installs it; None where it runs."""
    state = node.units.get(_UNIT)
    if state is not None and state.runs:
        return None
    if (state is not None and state.installed) or read_unit(node.host, _UNIT) is not None:
        return remedies.START_PERSISTENCED.other
    return _install(node)


def _install(node: Node) -> Fix:
    """For Ubuntu the daemon is in nvidia-compute-utils-BRANCH, whose name nvidia-utils-BRANCH tells, until
    branch 590 also in NVIDIA's repository. The .run installer leaves the program and a sample of its unit; a
    package would bring libraries of its own version.
    """
    if targets.run_installed(node):
        return remedies.UNIT_OF_RUN_INSTALLER
    if node.distribution.id == "ubuntu":
        for package in node.packages.containing("nvidia-utils-"):
            branch = package.name.removeprefix("nvidia-utils-")
            if branch != package.name:
                return remedies.install_daemon(f"apt install nvidia-compute-utils-{branch}")
        if 0 < (number := gpu_support.branch(node.driver_version)) < _OWN_PACKAGE:
            return remedies.install_daemon(f"apt install nvidia-compute-utils-{number}")
    return remedies.INSTALL_PERSISTENCED.for_family(node.distribution.family)


def persistenced_broken(node: Node) -> Verdict:
    unit = read_unit(node.host, _UNIT)
    trouble = _trouble(node)
    if trouble is None:
        return ok("the persistence daemon is fine") if unit else skip("nvidia-persistenced isn't installed")
    evidence = [*seen_unit(node, _UNIT)] if trouble[0] == _UNIT else [seen(*trouble)]
    fix = keep_initialised(node) if unit is None else None
    user = _missing_user(node, unit.argv if unit else ())
    if user:
        evidence.append(seen("/etc/passwd", f"no user {user}, which the unit wants"))
        fix = remedies.make_user(user)
    if node.host.which("nvidia-modprobe") is None:
        unsafe = node.host.unsafe_program("nvidia-modprobe")
        absent = ("nvidia-modprobe", "isn't installed; the daemon makes device files with it")
        evidence.append(seen(*(unsafe or absent)))
    return warn("the persistence daemon is broken", *evidence, fix=fix)


def _trouble(node: Node) -> tuple[str, str] | None:
    """Where it shows and what: the unit has failed, or nobody is behind its socket any more."""
    state = node.units.get(_UNIT)
    if state is not None and state.active == "failed":
        return _UNIT, str(state)
    if node.host.socket_state(_SOCKET) == "refused":
        return _SOCKET, "nobody listens"
    return None


def _missing_user(node: Node, argv: tuple[str, ...]) -> str:
    """The user that the unit names, if neither /etc/passwd nor another source of users may have it."""
    from gpunode.facts.processes import option_value

    user = option_value(argv, "--user", "-u") or ""
    text = node.host.read_text("/etc/passwd")
    if not user or user.isdecimal() or not text:
        return ""
    return "" if any(line.startswith(f"{user}:") for line in text.splitlines()) else user


CHECKS = (
    Check(
        id="persistenced-broken",
        title="The persistence daemon works",
        layer="devices",
        severity="warning",
        looks_at=f"{_UNIT} as systemd has it, {_SOCKET}, and the user that the unit names.",
        why=(
            "The toolkit puts the daemon's socket into containers: one that nobody listens at stops them "
            "with 'no such device or address'. Without the daemon each first use of a GPU takes seconds."
        ),
        remedy=remedies.RESTART_PERSISTENCED,
        run=persistenced_broken,
        blocked_by=("module-not-loaded", "driver-lib-mismatch", "dev-nodes-missing"),
        unless=("vgpu-guest",),
        refs=("https://docs.nvidia.com/deploy/driver-persistence/",),
    ),
    Check(
        id="persistence-off",
        title="The driver keeps the GPUs initialised",
        layer="devices",
        severity="warning",
        looks_at=f"NVML's persistence mode of each GPU, and whether {_PROGRAM} runs.",
        why=(
            "Without persistence the driver shuts a GPU down with its last user: the next container waits "
            "seconds for it, eight GPUs for more than ten ('driver rpc error: timed out'), and settings "
            "such as clocks are lost."
        ),
        remedy=remedies.START_PERSISTENCED,
        run=persistence_off,
        blocked_by=("nvml-hang", "persistenced-broken"),
        unless=("vgpu-guest",),
        refs=("https://docs.nvidia.com/deploy/driver-persistence/",),
    ),
)
