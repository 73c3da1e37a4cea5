"""Checks of the GPUs' device files, of access to them, and of systemd's device rules for containers."""

from __future__ import annotations

import re
from dataclasses import replace

from gpunode.checks import driver_packages, fixes
from gpunode.checks.finding import DISRUPTS_NOTHING, RESTARTS_IMEX, Evidence, Fix, Step
from gpunode.checks.fixes import UPGRADE_TOOLKIT
from gpunode.checks.model import (
    HOST_OR_CONTAINER,
    Verdict,
    check,
    cut,
    fail,
    note,
    ok,
    prerequisite_check,
    seen,
    skip,
    warn,
)
from gpunode.checks.units import runs, seen_unit
from gpunode.facts import devices, driver
from gpunode.facts.cgroups import systemd_engines
from gpunode.facts.node import Node
from gpunode.facts.processes import option_value
from gpunode.facts.system import CONTAINER
from gpunode.facts.systemd import read_unit
from gpunode.facts.tables import gate
from gpunode.facts.traits import OPERATOR_DRIVER, TRAITS
from gpunode.facts.workloads import Container, last_reload, v1_allows
from gpunode.gpu.library_paths import DRIVER_ROOT
from gpunode.host.reading import DeviceNode
from gpunode.output.result import many

# Device files: they exist with the major numbers that the kernel uses now, including unified memory's.

_OPERATOR_DEV = f"{DRIVER_ROOT}/dev"  # a driver container keeps its device files where it is mounted
_GONE = "the GPU operator's driver container, which provides the device files, is not running"
_NODES_SHOWN = 6
_UVM = ("nvidia_uvm", "nvidia_current_uvm")  # the second is Debian's


@check(
    "dev-nodes-missing",
    title="The device files exist",
    looks_at="/dev/nvidiactl, and /dev/nvidiaN for each Device Minor in "
    "/proc/driver/nvidia/gpus/*/information.",
    fix=fixes.MAKE_NODES,
    blocked_by=("module-not-loaded",),
    refs=("https://github.com/NVIDIA/nvidia-modprobe",),
)
def dev_nodes_missing(node: Node) -> Verdict:
    """The kernel doesn't create these files: the first root process that uses a GPU does. Containers that
    start earlier fail, so the first GPU pod after a boot may fail while later ones work.
    """
    there = {device.path for device in node.device_nodes}
    # a GPU that the driver is configured to exclude is listed with a number and needs no file
    minors = [gpu.minor for gpu in node.driver_gpus if gpu.minor is not None and not gpu.excluded]
    expected = ["/dev/nvidiactl", *(f"/dev/nvidia{minor}" for minor in sorted(minors))]
    missing = [path for path in expected if path not in there]
    if missing and any(node.host.devices(_OPERATOR_DEV)):
        return skip(f"the GPU operator provides the device files in {_OPERATOR_DEV}")
    if missing and _container_is_gone(node):
        return skip(_GONE)
    if missing:
        return fail(
            f"{len(missing)} of {len(expected)} device files are missing",
            *(seen(path, "absent") for path in missing),
            fix=replace(fixes.make_nodes(tuple(_minor(path) for path in missing)), note=_AT_BOOT),
        )
    return ok(f"/dev/nvidiactl and {len(minors)} GPU device files exist")


_AT_BOOT = (
    "Start containers again that failed without them. At each boot nvidia-persistenced creates these files, "
    "if it is enabled: systemctl is-enabled nvidia-persistenced"
)


def _container_is_gone(node: Node) -> bool:
    return TRAITS["operator-driver"].holds(node) and not node.host.is_dir(OPERATOR_DRIVER)


@prerequisite_check(
    "mig-caps-missing",
    title="The device files of MIG instances exist",
    looks_at="/dev/nvidia-caps/nvidia-capN for each DeviceFileMinor below "
    "/proc/driver/nvidia/capabilities/gpu*/mig.",
    fix=Fix("nvidia-smi -L", note="Run as root, nvidia-smi creates the missing device files"),
    blocked_by=("module-not-loaded", "dev-nodes-missing"),
    refs=("https://docs.nvidia.com/datacenter/tesla/mig-user-guide/device-nodes-and-capabilities.html",),
)
def mig_caps_missing(node: Node) -> Verdict:
    """A program opens a MIG device through these files. Without them, a container with a MIG device doesn't
    start or finds no GPU.
    """
    expected = devices.mig_capability_nodes(node.host)
    if not expected:
        return skip("the driver reports no MIG instance")
    there = {device.path for device in node.device_nodes}
    operators = node.host.devices(f"{_OPERATOR_DEV}/nvidia-caps")
    there |= {device.path.removeprefix(DRIVER_ROOT) for device in operators}
    missing = [path for path in expected if path not in there]
    if missing:
        return fail(
            f"{len(missing)} of {len(expected)} device files of MIG instances are missing",
            *cut([seen(path, "absent") for path in missing], _NODES_SHOWN, "/dev/nvidia-caps"),
        )
    return ok(f"the {len(expected)} device files of the MIG instances exist")


def _minor(path: str) -> int:
    number = path.removeprefix("/dev/nvidia")
    return int(number) if number.isdigit() else devices.CONTROL_MINOR


@check(
    "dev-node-major-stale",
    title="Device files have the right major numbers",
    looks_at="the major number of every /dev/nvidia* and /dev/nvidia-caps/* against /proc/devices.",
    fix=fixes.MAKE_NODES,
    blocked_by=("module-not-loaded",),
    classes=HOST_OR_CONTAINER,
    refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1934",),
)
def dev_node_major_stale(node: Node) -> Verdict:
    """The major numbers of nvidia-uvm and nvidia-caps change from boot to boot. A file with an old number
    refers to another driver or to none: CUDA fails with error 999 or 100 although the file exists.
    """
    stale = []
    for device in node.device_nodes:
        expected = devices.expected_major(device.path, node.majors)
        if expected is not None and device.major != expected:
            stale.append((device, expected))
    if not stale:
        return ok("device files have the kernel's major numbers")
    evidence = (
        seen(device.path, f"major {device.major}, but the kernel uses {now}") for device, now in stale
    )
    paths = " ".join(device.path for device, _ in stale)
    return fail(
        "device files have a major number that the kernel doesn't use",
        *evidence,
        fix=Fix(f"rm {paths} && nvidia-modprobe -c0 -u"),
    )


@check(
    "uvm-not-loaded",
    title="The unified memory module is loaded",
    looks_at="/sys/module/nvidia_uvm and /dev/nvidia-uvm.",
    fix=fixes.LOAD_UVM,
    blocked_by=("module-not-loaded", "dev-nodes-missing"),
    classes=HOST_OR_CONTAINER,
    refs=("https://github.com/NVIDIA/open-gpu-kernel-modules/issues/689",),
)
def uvm_not_loaded(node: Node) -> Verdict:
    """CUDA needs nvidia-uvm, nvidia-smi doesn't: the GPUs look healthy, but every CUDA program fails with
    error 999. A root process on the host loads the module on demand; a process in a container can't.
    """
    if not any(driver.module_loaded(node.host, name) for name in _UVM):
        return fail("the module nvidia-uvm isn't loaded", seen("/sys/module/nvidia_uvm", "absent"))
    if any(device.path == f"{_OPERATOR_DEV}/nvidia-uvm" for device in node.host.devices(_OPERATOR_DEV)):
        return ok("nvidia-uvm is loaded and its device file exists", seen(_OPERATOR_DEV, "nvidia-uvm"))
    if _container_is_gone(node):
        return skip(_GONE)
    if node.kind != CONTAINER and all(device.path != "/dev/nvidia-uvm" for device in node.device_nodes):
        return fail("nvidia-uvm is loaded but /dev/nvidia-uvm is missing", seen("/dev/nvidia-uvm", "absent"))
    return ok("nvidia-uvm is loaded and its device file exists")


# Fixes for device files and the persistence daemon.

_ENABLE = ("systemctl", "enable", "--now", "nvidia-persistenced")
START_PERSISTENCED = Fix(" ".join(_ENABLE), safe=True, steps=(Step(argv=_ENABLE),))
_SAMPLE = "/usr/share/doc/NVIDIA_GLX-1.0/samples/nvidia-persistenced-init.tar.bz2"
UNIT_OF_RUN_INSTALLER = Fix(
    f'cd "$(mktemp --directory)" && tar --extract --file {_SAMPLE} && sh nvidia-persistenced-init/install.sh'
)

START_IMEX = fixes.restart("nvidia-imex", RESTARTS_IMEX)


def make_user(name: str) -> Fix:
    """Create a system user without a home, as the daemon's packages do."""
    return Fix(
        f"useradd --system --no-create-home --shell /usr/sbin/nologin {name} && "
        "systemctl restart nvidia-persistenced",
        disturbs=DISRUPTS_NOTHING,
    )


def change_mode(path: str) -> Fix | None:
    """Change the option in the file that sets it; None if the kernel's command line sets it."""
    if not path.startswith("/etc/"):
        return None
    pattern = "s/NVreg_DeviceFileMode=[0-9]*/NVreg_DeviceFileMode=0666/"
    note = "After the reboot every user of this node can open the GPUs"
    return Fix(f"sed -i '{pattern}' {path}", note=note).then_reboot()


def make_links(nodes: tuple[DeviceNode, ...]) -> Fix:
    """Create the links that udev creates for other devices; they last until the next boot. A link that
    exists by then must not stop the command."""
    links = [(f"/dev/char/{node.major}:{node.minor}", node.path.replace("/dev/", "../", 1)) for node in nodes]
    command = " && ".join(f"ln -sf {target} {path}" for path, target in links)
    steps = tuple(Step(path=path, link=target) for path, target in links)
    fixed = ".".join(map(str, gate("runc", "devices-by-number")))
    note = (
        f"{_LATER}. The links last until the next boot: then upgrade runc to {fixed} or newer, which needs "
        "none, or repeat this after each boot"
    )
    return Fix(command, safe=True, steps=steps, note=note)


_LATER = (
    "This protects only containers that start after it: restart the GPU containers that run now before you "
    "run 'systemctl daemon-reload' or install packages"
)
_AUTO = Fix("gpunode toolkit config set nvidia-container-runtime.mode=auto")


def by_cdi(old_toolkit: bool) -> Fix:
    """Use CDI, so that runc passes the GPUs to systemd; for toolkit releases that support it."""
    return replace(UPGRADE_TOOLKIT if old_toolkit else _AUTO, note=_LATER)


_RW = 0o006
_IMEX = "nvidia-imex.service"
_ZEROS = set("0-")
# NVIDIA's DRA driver runs an IMEX daemon in pods, and needs the node's own to be off
_DRA = ("compute-domain-kubelet-plugin", "compute-domain-daemon")


@check(
    "dev-perms",
    title="Users in containers can open the device files",
    severity="warning",
    looks_at="the modes of /dev/nvidiactl, /dev/nvidiaN and /dev/nvidia-uvm, and DeviceFileMode in "
    f"{driver.PARAMETERS}. Files in /dev/nvidia-caps are restricted to root by design.",
    fix=Fix(
        "echo 'options nvidia NVreg_DeviceFileMode=0666' > /etc/modprobe.d/nvidia-device-files.conf"
    ).then_reboot(),
    blocked_by=("module-not-loaded", "dev-nodes-missing", "dev-node-major-stale"),
    refs=("https://github.com/NVIDIA/nvidia-modprobe",),
)
def dev_perms(node: Node) -> Verdict:
    """If only root or a group can open these files, a container that runs as another user fails with
    'Insufficient Permissions', while the same container works as root.
    """
    nodes = _used_by_cuda(node)
    closed = tuple(file for file in nodes if file.mode & _RW != _RW)
    if not nodes:
        return skip("no NVIDIA device files exist")
    if not closed:
        return ok(f"all users can open the {len(nodes)} device files")
    evidence = [seen(file.path, f"mode {file.mode:04o}") for file in closed[:4]]
    expected = _configured_mode(node)
    if expected is not None and expected & _RW != _RW:
        evidence.append(seen(driver.PARAMETERS, f"DeviceFileMode {expected} ({expected:04o})"))
        words = f"the driver restricts {many(len(closed), 'device file')} to their group"
        if node.distribution.family == "suse":
            return note(words, *evidence)  # group video, as its packages set it
        option = node.module_options.option("nvidia", "NVreg_DeviceFileMode")
        if option is None:
            return warn(words, *evidence)
        evidence.append(seen(option.source, f"{option.name}={option.value}", option.line))
        return warn(words, *evidence, fix=change_mode(option.source))
    argv = ("chmod", "0666", *(file.path for file in closed))
    fix = Fix(" ".join(argv), safe=True, steps=(Step(argv=argv),))
    return warn(f"not all users can open {many(len(closed), 'device file')}", *evidence, fix=fix)


def _configured_mode(node: Node) -> int | None:
    """The mode that the loaded driver sets for its files (the decimal DeviceFileMode); None if unknown."""
    mode = driver.parameters(node.host).get("DeviceFileMode", "")
    return int(mode) if re.fullmatch(r"\d{1,4}", mode, re.ASCII) else None


def _used_by_cuda(node: Node) -> tuple[DeviceNode, ...]:
    """Files that every CUDA program opens. Those in nvidia-caps are restricted to root by design."""
    return tuple(file for file in node.device_nodes if devices.needed(file.path))


@check(
    "dev-char-symlinks",
    title="GPU containers keep their GPUs after a systemd reload",
    severity="warning",
    looks_at="engines with the systemd cgroup driver: whether containers get GPUs through a hook that runc "
    "doesn't know about (the toolkit's legacy mode), or from runc 1.1.3 to 1.1.6, which ignores "
    "devices without a link in /dev/char.",
    fix=Fix(
        "for file in /dev/nvidia?*; do [ -c $file ] && "
        "ln -sf $file /dev/char/$((0x$(stat -c %t $file))):$((0x$(stat -c %T $file))); done"
    ),
    blocked_by=("module-not-loaded", "dev-nodes-missing", "dev-node-major-stale"),
    table="version_gates",
    refs=(
        "https://github.com/NVIDIA/nvidia-docker/issues/1730",
        "https://github.com/opencontainers/runc/issues/3708",
    ),
)
def dev_char_symlinks(node: Node) -> Verdict:
    """'systemctl daemon-reload', which any package installation may run, makes systemd apply its own device
    list again. Running containers lose GPUs that aren't on the list: 'Failed to initialize NVML: Unknown
    Error'.
    """
    # A missing link alone is no fault: most nodes have none, and a runc that uses numbers needs none.
    engines = systemd_engines(node)
    if not engines:
        return skip(
            "no engine on this node uses the systemd cgroup driver, or none reports its cgroup driver"
        )
    losing = [engine for engine in engines if engine.forgets]
    nodes = _used_by_cuda(node)
    missing = tuple(file for file in nodes if not node.host.exists(f"/dev/char/{file.major}:{file.minor}"))
    if not losing:
        return ok(f"systemd knows the devices of {engines[0].name}'s containers")
    evidence: list[Evidence] = [seen(engine.source, engine.forgets) for engine in losing]
    by_hook = [engine for engine in losing if engine.by_hook]
    if by_hook:
        words = f"GPU containers of {by_hook[0].name} lose their GPUs when systemd is reloaded"
        return warn(words, *evidence, fix=by_cdi(by_hook[0].old_toolkit))
    if not missing:
        return ok("the links in /dev/char that this runc needs exist", *evidence)
    absent = [seen(f"/dev/char/{file.major}:{file.minor}", "absent") for file in missing]
    evidence += cut(absent, 4, "/dev/char")
    words = f"GPU containers of {losing[0].name} lose their GPUs when systemd is reloaded"
    return warn(words, *evidence, fix=make_links(missing))


@check(
    "imex-channels",
    title="IMEX channels exist",
    severity="warning",
    looks_at=f"{devices.IMEX_CHANNELS} and {_IMEX}, if the GPUs belong to an NVLink domain that spans "
    "several nodes.",
    fix=Fix(
        "echo 'options nvidia NVreg_CreateImexChannel0=1' > /etc/modprobe.d/nvidia-imex.conf"
    ).then_reboot(),
    blocked_by=("nvml-hang",),
    refs=("https://docs.nvidia.com/multi-node-nvlink-systems/imex-guide/",),
)
def imex_channels(node: Node) -> Verdict:
    """Programs share GPU memory with other nodes through an IMEX channel. Without a channel or its daemon,
    they work only within this node.
    """
    joined = [
        gpu
        for gpu in node.conditions
        if gpu.fabric.state == "completed" and set(gpu.fabric.cluster or "") - _ZEROS
    ]
    if not joined:
        return skip("the GPUs belong to no NVLink domain that spans several nodes")
    if any(process.name in _DRA for process in node.processes):
        return ok("the DRA driver provides IMEX channels to pods")
    state = node.units.get(_IMEX)
    domain = seen(f"NVML, GPU {joined[0].index}", f"NVLink domain {joined[0].fabric.cluster}")
    if state is not None and state.active == "failed":
        return warn("the IMEX daemon has failed", seen(_IMEX, state), domain, fix=START_IMEX)
    channels = node.host.devices(devices.IMEX_CHANNELS)
    closed = [channel for channel in channels if channel.mode & _RW != _RW]
    if closed:
        evidence = [seen(file.path, f"mode {file.mode:04o}") for file in closed[:4]]
        return note(f"only some users can open {len(closed)} of {len(channels)} IMEX channels", *evidence)
    if channels:
        return ok(f"{len(channels)} IMEX channels exist")
    if node.kubelet is not None and node.kubelet.joined:
        return ok("the DRA driver provides IMEX channels to pods")
    return note("no IMEX channel exists", seen(devices.IMEX_CHANNELS, "no channel"), domain)


# Running GPU containers: whether they can still open their device files.

_SLACK_SECONDS = 5.0  # a container's start and a reload are measured with different clocks
_SHOWN = 8
# the engine, by the prefix of its containers' control groups
_STOP = "crictl stop --timeout 60"  # the default, 0, ends them at once
_STOPS = (
    "stops these containers and ends their work: the kubelet starts them again unless restartPolicy is "
    "Never, or OnFailure and they exit with 0"
)
_AGAIN = (
    "The next systemctl daemon-reload, also by a package's installation, revokes them again, unless "
    "containers get their GPUs through CDI: gpunode explain runtime-mode-legacy"
)
_STARTED_BY = {
    "libpod": "podman restart",
    "docker": "docker restart",
    **dict.fromkeys(("kubepods", "cri-containerd", "crio"), _STOP),
}


@check(
    "cgroup-device-revoked",
    title="Running containers still have access to their GPUs",
    looks_at="every running container with NVIDIA's device files (/proc/PID/cgroup, /proc/PID/root/dev): "
    "their major numbers against /proc/devices, and the devices that its cgroup allows "
    "(devices.list of cgroup v1). No file shows the filter of cgroup v2, so there it is systemd's "
    "device list for the scope, if systemd was reloaded after the container started. gpunode runs "
    "nothing in a container.",
    # the check names the containers and how to restart each; without root they are unknown
    fix=fixes.look(
        "gpunode doctor cgroup-device-revoked", "It prints the command for this node's containers"
    ),
    blocked_by=("pci-no-gpu", "module-not-loaded"),
    refs=(
        "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html",
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/48",
    ),
)
def cgroup_device_revoked(node: Node) -> Verdict:
    """When systemd is reloaded, it applies its own device list, which doesn't include GPUs that the toolkit's
    hook added: 'Failed to initialize NVML: Unknown Error' in a container that worked before. The container
    must be restarted to get its GPUs again.
    """
    containers = node.gpu_containers
    if not containers:
        return skip("no running container has GPU device files")
    results = [(container, _lost_device(node, container)) for container in containers]
    lost = [(container, what) for container, what in results if what is not None]
    if not lost:
        return ok(f"{many(len(containers), 'container')} with GPUs: none shows signs of lost devices")
    evidence = [
        seen(what.source, f"{_name(node, container)}: {what.value}", what.line)
        for container, what in lost[:_SHOWN]
    ]
    names = ", ".join(_name(node, container) for container, _ in lost)
    summary = f"{many(len(lost), 'container')} lost GPUs while running: {names}"
    fix = _recreate([container for container, _ in lost])
    if fix and any(what.source.startswith(("systemctl ", "/sys/fs/cgroup/")) for _, what in lost):
        fix = replace(fix, note=_AGAIN)
    return fail(summary, *evidence, fix=fix)


def _lost_device(node: Node, container: Container) -> Evidence | None:
    """Evidence that this container can't open a device file any more; None if there is none. One with the
    host's whole /dev sees files that it was never allowed to open."""
    if node.host.device(f"/proc/{container.pid}/root/dev/mem") is not None:
        return None
    majors = node.majors
    for file in container.nodes:
        usual = f"/dev/{file.path.rpartition('/')[2]}"
        now = devices.expected_major(usual, majors)
        if now is not None and now != file.major:
            return seen(file.path, f"{usual} has major number {file.major}, but the driver now uses {now}")
    allowed = v1_allows(node.host, container)
    if allowed is not None:
        for file in container.nodes:
            if not any(major in (-1, file.major) and minor in (-1, file.minor) for major, minor in allowed):
                path = f"/sys/fs/cgroup/devices{container.devices_group}/devices.list"
                return seen(path, f"missing {file.major}:{file.minor} ({file.path.rpartition('/')[2]})")
        return None
    return _taken_by_systemd(node, container)


def _taken_by_systemd(node: Node, container: Container) -> Evidence | None:
    """From the next reload on systemd enforces its own device list for a scope, whatever the runtime had
    allowed."""
    if not container.scope or last_reload(node.host) <= container.started + _SLACK_SECONDS:
        return None
    rule = node.device_rules.get(container.scope)
    for file in container.nodes if rule is not None else ():
        if rule is not None and not rule.allows(file.major, file.minor, node.majors):
            name = file.path.rpartition("/")[2]
            return seen(
                f"systemctl show --property=DeviceAllow {container.scope}",
                f"missing {file.major}:{file.minor} ({name}); systemd was reloaded after it had started",
            )
    return None


def _name(node: Node, container: Container) -> str:
    """Name for users: pod and container, Docker's name, or the start of the container id."""
    for entry in node.cri_containers:
        if entry.id == container.id:
            return f"pod {entry.namespace}/{entry.pod}, container {entry.name}"
    for identifier, name, _ in node.docker_containers:
        if identifier == container.id:
            return f"Docker container {name}"
    return f"container {container.id[:12]}"


def _recreate(lost: list[Container]) -> Fix | None:
    """Restarting a container restores its devices; the kubelet restarts a pod's containers."""
    commands: dict[str, list[str]] = {}
    for container in lost:
        place = f"{container.group} {container.devices_group}"
        command = next((words for mark, words in _STARTED_BY.items() if mark in place), None)
        if command is not None:
            commands.setdefault(command, []).append(container.id[:12])
    if not commands:
        return None
    command = " && ".join(f"{command} {' '.join(ids)}" for command, ids in commands.items())
    disturbs = _STOPS if _STOP in commands else "restarts these containers, which ends their work"
    return Fix(command, disruptive="restart", disturbs=disturbs)


# Whether the driver keeps the GPUs initialised while they are idle.

_UNIT = "nvidia-persistenced.service"
_PROGRAM = "nvidia-persistenced"
_OWN_PACKAGE = 590  # the first branch for which NVIDIA's repository for Ubuntu has nvidia-persistenced
_CHASSIS = "/sys/class/dmi/id/chassis_type"
_PORTABLE = ("8", "9", "10", "11", "14", "30", "31", "32")  # SMBIOS: portable, laptop, notebook, tablet, ...
_SOCKET = "/run/nvidia-persistenced/socket"


@check(
    "persistence-off",
    title="The driver keeps the GPUs initialised",
    severity="warning",
    looks_at=f"NVML's persistence mode of each GPU, and whether {_PROGRAM} runs.",
    fix=START_PERSISTENCED,
    blocked_by=("nvml-hang", "persistenced-broken"),
    unless=("vgpu-guest",),
    refs=("https://docs.nvidia.com/deploy/driver-persistence/",),
)
def persistence_off(node: Node) -> Verdict:
    """Without persistence mode, the driver shuts a GPU down when its last user exits: the next container
    waits seconds for it, with eight GPUs more than ten seconds ('driver rpc error: timed out'), and settings
    such as clocks are lost.
    """
    reported = [gpu for gpu in node.conditions if gpu.persistence is not None]
    if not reported:
        return skip("NVML doesn't report the persistence mode")
    if any(gpu.persistence for gpu in reported):
        return ok("the driver keeps the GPUs initialised")
    if any(
        gpu.display_active or any(process.graphics for process in gpu.processes or ()) for gpu in reported
    ):
        return ok("a desktop keeps the GPUs initialised")
    if (node.host.read_text(_CHASSIS) or "").strip() in _PORTABLE:
        return ok("on a portable computer an idle GPU may power down")
    if _trouble(node):
        return skip("the persistence daemon is broken: see persistenced-broken")
    off = seen("NVML", f"persistence mode is off on all {len(reported)} GPUs")
    if runs(node, _UNIT) or any(process.name == _PROGRAM for process in node.processes):
        return note("the persistence daemon is running, but is configured to leave persistence mode off", off)
    state = (node.units.get(_UNIT) or "not running") if _installed(node) else "not installed"
    fix = keep_initialised(node)
    return warn("nothing keeps the GPUs initialised", off, seen(_UNIT, state), fix=fix)


def _installed(node: Node) -> bool:
    state = node.units.get(_UNIT)
    return (state is not None and state.installed) or read_unit(node.host, _UNIT) is not None


def keep_initialised(node: Node) -> Fix | None:
    """Start the persistence daemon, or install it; None if it runs."""
    if runs(node, _UNIT):
        return None
    return START_PERSISTENCED if _installed(node) else _install(node)


def _install(node: Node) -> Fix:
    """The .run installer leaves the program and a sample unit; a package would install libraries of its own
    version."""
    if node.run_installed:
        return UNIT_OF_RUN_INSTALLER
    install = fixes.packages(node.distribution.family, "install", [_package(node)])
    return Fix(" && ".join(filter(None, (install, " ".join(_ENABLE)))))


def _package(node: Node) -> str:
    """The package with the daemon: on Ubuntu nvidia-compute-utils-BRANCH, with the BRANCH of
    nvidia-utils-BRANCH; until branch 590 also in NVIDIA's repository."""
    if node.distribution.family == "suse":
        return driver_packages.suse_libraries(node)
    if node.distribution.id == "ubuntu":
        for package in node.packages.containing("nvidia-utils-"):
            branch = package.name.removeprefix("nvidia-utils-")
            if branch != package.name:
                return f"nvidia-compute-utils-{branch}"
        if 0 < (number := driver.branch(node.driver_version)) < _OWN_PACKAGE:
            return f"nvidia-compute-utils-{number}"
    return "nvidia-persistenced"


@check(
    "persistenced-broken",
    title="The persistence daemon works",
    severity="warning",
    looks_at=f"{_UNIT} as systemd reports it, {_SOCKET}, and the user that the unit names.",
    fix=Fix("systemctl restart nvidia-persistenced", disturbs=DISRUPTS_NOTHING),
    blocked_by=("module-not-loaded", "driver-lib-mismatch", "dev-nodes-missing"),
    unless=("vgpu-guest",),
    refs=("https://docs.nvidia.com/deploy/driver-persistence/",),
)
def persistenced_broken(node: Node) -> Verdict:
    """The toolkit mounts the daemon's socket into containers. If no process listens on it, they fail with 'no
    such device or address'. Without the daemon, each first use of a GPU takes seconds.
    """
    unit = read_unit(node.host, _UNIT)
    trouble = _trouble(node)
    if trouble is None:
        return ok("the persistence daemon works") if unit else skip("nvidia-persistenced isn't installed")
    failed = trouble[0] == _UNIT
    evidence = [*seen_unit(node, _UNIT)] if failed else [seen(*trouble)]
    summary = f"{_UNIT} has failed" if failed else "nvidia-persistenced doesn't run, but its socket exists"
    fix = keep_initialised(node) if unit is None else None
    user = _missing_user(node, unit.argv if unit else ())
    if user:
        evidence.append(seen("/etc/passwd", f"user {user}, which the unit needs, doesn't exist"))
        fix = make_user(user)
        summary = f"nvidia-persistenced can't start: its user {user} doesn't exist"
    elif node.host.which("nvidia-modprobe") is None:
        unsafe = node.host.unsafe_program("nvidia-modprobe")
        absent = ("nvidia-modprobe", "not installed; the daemon creates device files with it")
        evidence.append(seen(*(unsafe or absent)))
    return warn(summary, *evidence, fix=fix)


def _trouble(node: Node) -> tuple[str, str] | None:
    """Evidence of a fault: the unit has failed, or no process listens on its socket any more."""
    state = node.units.get(_UNIT)
    if state is not None and state.active == "failed":
        return _UNIT, str(state)
    if node.host.socket_state(_SOCKET) == "refused":
        return _SOCKET, "no process listens on it"
    return None


def _missing_user(node: Node, argv: tuple[str, ...]) -> str:
    """The unit's user, if neither /etc/passwd nor another source of users has it."""
    user = option_value(argv, "--user", "-u") or ""
    text = node.host.read_text("/etc/passwd")
    if not user or user.isdecimal() or not text:
        return ""
    return "" if any(line.startswith(f"{user}:") for line in text.splitlines()) else user
