"""Fixes that several layers share, one command per distribution family, and the plan of fixes for findings.

Commands that set up a container engine are gpunode's own; the fixes of the driver's packages are in
checks/driver_packages.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gpunode.checks import finding as effects
from gpunode.checks.finding import Finding, FindingStatus, Fix, Step
from gpunode.facts.kernel_modules import INITRAMFS, NOUVEAU_FILE, NOUVEAU_TEXT, NOVA_FILE, NOVA_TEXT
from gpunode.facts.node import Node
from gpunode.facts.system import CONTAINER, WSL2
from gpunode.facts.toolkit import BY_MOUNTS
from gpunode.host.redact import without_secrets

EDITOR = "${EDITOR:-vi}"
_SHOWN = 100  # characters of a line
FAMILIES = ("debian", "rhel", "suse", "other")


class FixByFamily(NamedTuple):
    """One command per family; `other` is for unknown distributions."""

    debian: Fix
    rhel: Fix
    suse: Fix
    other: Fix

    def for_family(self, family: str) -> Fix:
        """The fix for debian, rhel or suse; `other` for anything else."""
        known = {"debian": self.debian, "rhel": self.rhel, "suse": self.suse}
        return known.get(family, self.other)

    def then_reboot(self) -> FixByFamily:
        """The same commands, completed by a reboot."""
        return FixByFamily(*(fix.then_reboot() for fix in (self.debian, self.rhel, self.suse, self.other)))


def look(command: str, note: str, *, needs_root: bool = True) -> Fix:
    """A command that only shows the cause; `note` says what to do with what it shows."""
    return Fix(command, needs_root=needs_root, look=True, note=note)


def per_family(debian: str, rhel: str, suse: str, other: str, **fields: Any) -> FixByFamily:
    """One command for each family, all with these fields of `Fix`."""
    return FixByFamily(*(Fix(command, **fields) for command in (debian, rhel, suse, other)))


DRIVER_GUIDE = "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/"
TOOLKIT_GUIDE = "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"


def edit_file(path: str, line: int | None, change: str, then: Fix | None = None) -> Fix:
    """Open a file at a line in an editor, then restart what reads it. `change` is what to change there, as in
    `Fix`."""
    command = " ".join((EDITOR, *([f"+{line}"] if line else ()), path))
    place = f"{path}, line {line}" if line else path
    return replace(then.after(command) if then else Fix(command), change=f"In {place}: {change}")


def restart_later(fix: Fix) -> Fix:
    """An edit without the restart of containerd that ends it: only once the file can be parsed does the
    doctor find what else is wrong in it. A distribution renders its file at a restart, which can't wait."""
    edit, _, again = fix.command.rpartition(" && ")
    if again != RESTART_CONTAINERD.command:
        return fix
    note = (
        "Then run gpunode doctor. Only if it finds no other error in this file, restart containerd; running "
        f"containers continue:\n{again}"
    )
    return replace(fix, command=edit, disruptive="none", disturbs="", note=note)


def syntax(text: str | None, line: int | None) -> str:
    """The change for `edit_file` that corrects a syntax error, with the line that the parser stopped at."""
    lines = (text or "").splitlines()
    stopped_at = lines[line - 1].strip()[:_SHOWN] if line and line <= len(lines) else ""
    if not stopped_at:
        return "correct the syntax error shown above"
    text = without_secrets(stopped_at).encode("utf-8", "backslashreplace").decode()  # a byte that isn't UTF-8
    return f"correct the syntax error in this line or just before it: {text}"


_PACKAGES = {  # by family, in the order of FAMILIES
    "install": ("apt install", "dnf install", "zypper install"),
    "reinstall": ("apt install --reinstall", "dnf reinstall", "zypper install --force"),
    "upgrade": ("apt update && apt install --only-upgrade", "dnf upgrade", "zypper update"),
    "remove": ("apt remove", "dnf remove", "zypper remove"),
}


def packages(family: str, verb: str, names: Sequence[str]) -> str:
    """The command that does `verb`, one of `_PACKAGES`, with these packages; empty without a name, or on an
    unknown distribution."""
    command = dict(zip(FAMILIES, _PACKAGES[verb], strict=False)).get(family)
    return f"{command} {' '.join(names)}" if command and names else ""


def package_fix(verb: str, names: Sequence[str], other: str, **fields: Any) -> FixByFamily:
    """`verb`, one of `_PACKAGES`, with the package of this name in each family; `other` is a command."""
    debian, rhel, suse = (
        packages(family, verb, [name]) for family, name in zip(FAMILIES, names, strict=False)
    )
    return per_family(debian, rhel, suse, other, **fields)


def upgrade(node: Node, names: Sequence[str], disturbs: str) -> Fix | None:
    """Upgrade those of these packages that are installed, which restarts their daemon: a package manager may
    refuse the whole command because of one unknown name. None without any, or on an unknown distribution."""
    installed = [name for name in names if name in node.packages.installed]
    command = packages(node.distribution.family, "upgrade", installed)
    return Fix(command, disruptive="restart", disturbs=disturbs) if command else None


def restart(unit: str, disturbs: str) -> Fix:
    """Restart a systemd unit."""
    return Fix(f"systemctl restart {unit}", disruptive="restart", disturbs=disturbs)


RESCAN_PCI = Fix(
    "echo 1 > /sys/bus/pci/rescan",
    disturbs=effects.DISRUPTS_NOTHING,
    note=(
        "If no GPU appears, power the node off and check the GPU's seat and power cables; for a virtual "
        "machine, "
        "check on its host that the GPU is passed through"
    ),
)
POWER_OFF = Fix(
    "systemctl poweroff",
    disruptive="drain",
    note="While it is off, disconnect the node's power, connect the GPU's power cables, and wait a minute "
    "before you connect the power again",
    disturbs="powers the node off: it has to be switched on at its management controller (BMC)",
)

NO_REBOOT = "If this fails, don't reboot"


def keep_out(path: str, content: str, commands: Sequence[tuple[str, ...]]) -> Fix:
    """Write a file of modprobe.d and include it in the initramfs; it takes effect at the next boot."""
    text = content.replace("\n", "\\n")
    parts = [f"printf '{text}' > {path}", *(_command_text(argv) for argv in commands)]
    steps = (Step(path=path, content=content), *(Step(argv=argv) for argv in commands))
    return Fix(" && ".join(parts), safe=True, steps=steps)


def _command_text(argv: tuple[str, ...]) -> str:
    return " ".join(f'"{word}"' if " " in word else word for word in argv)


def blacklist(path: str, content: str) -> FixByFamily:
    """Keep kernel modules from loading, and reboot: only the reboot is disruptive. The kernel's arguments
    are for nouveau alone."""
    most = None if "nouveau" in content else 1
    fixes = (keep_out(path, content, INITRAMFS.get(family, ())[:most]) for family in FAMILIES)
    reboot = Step(argv=("systemctl", "reboot"), disruptive="reboot")
    return FixByFamily(
        *(replace(fix, steps=(*fix.steps, reboot), note=NO_REBOOT).then_reboot() for fix in fixes)
    )


BLACKLIST_NOUVEAU = blacklist(NOUVEAU_FILE, NOUVEAU_TEXT)
BLACKLIST_NOVA = blacklist(NOVA_FILE, NOVA_TEXT)


def rebind(*addresses: str) -> Fix:
    """Unbind GPUs from their driver and bind them to nvidia. A plain probe isn't enough: a driver with their
    ids would bind to them again (kernel: sysfs-bus-pci, driver_override)."""
    return Fix(
        f"modprobe nvidia; cd /sys/bus/pci && for gpu in {' '.join(addresses)}; do "
        "echo $gpu > devices/$gpu/driver/unbind; echo nvidia > devices/$gpu/driver_override; "
        "echo $gpu > drivers_probe; done",
        disruptive="drain",
    )


LOAD_MODULE = Fix("modprobe nvidia && modprobe nvidia-uvm", safe=True)

REBOOT = Fix("reboot", disruptive="reboot")
ON_HOST = "run on the host of this container: gpunode doctor"

READ_KERNEL_LOG = look(
    "dmesg | grep -i -e nvrm -e nvidia | tail -n 20",
    "The last lines name the fault. Only if they contain 'fallen off the bus' or 'RmInitAdapter failed', "
    "shut the node down, which ends all that runs on it, and disconnect its power for a minute; if the "
    "fault returns, the GPU, its slot or its power supply must be replaced",
)

UNSAFE_PATH = "Only root may have write permission to each directory of the path and to the program"

MAKE_NODES = Fix("nvidia-modprobe -c0 -u", safe=True)


def make_nodes(minors: tuple[int, ...]) -> Fix:
    """Create device files with these minors (255 is /dev/nvidiactl), and those of unified memory."""
    options = " ".join(f"-c{minor}" for minor in minors)
    return Fix(f"nvidia-modprobe {options} && nvidia-modprobe -c0 -u", safe=True)


LOAD_UVM = Fix("modprobe nvidia-uvm && nvidia-modprobe -c0 -u", safe=True)

RESET = Fix(
    "nvidia-smi --gpu-reset",
    disruptive="drain",
    before="First end all work on the GPU: the reset fails while fuser -v /dev/nvidia* lists a process",
    note="On Kubernetes a drain leaves the pods of DaemonSets running, such as the device plugin and DCGM, "
    "which have the GPU open too. If you can't end them, reboot: that resets the GPU as well",
    disturbs="resets only an idle GPU",  # nvidia-smi(1): no program may use it
)

INSTALL_TOOLKIT = Fix("gpunode toolkit install", disturbs=effects.DISRUPTS_NOTHING)
UPGRADE_TOOLKIT = Fix("gpunode toolkit install --upgrade")

CONFIGURE = "gpunode configure-runtime"


def configure(runtime: str, *options: str) -> Fix:
    """Register the nvidia runtime with an engine, or with a Kubernetes distribution's containerd."""
    disturbs = effects.BY_RUNTIME.get(runtime, effects.RESTARTS_KUBERNETES)
    if runtime == "docker" and "--cdi" in options:  # a reload doesn't load this setting
        disturbs = effects.RESTARTS_DOCKER
    return Fix(" ".join((CONFIGURE, "--runtime", runtime, *options)), disruptive="restart", disturbs=disturbs)


def new_cgroup_driver(node: Node, fix: Fix, engine: str) -> Fix:
    """A fix that changes the cgroup driver of the kubelet's engine: drain first, because the sandboxes of
    running pods can't be created again with another driver
    (https://kubernetes.io/docs/setup/production-environment/container-runtimes/#cgroup-drivers). A reboot
    ends the pods that a drain leaves; a container isn't rebooted by itself."""
    before = f"This changes {engine}'s cgroup driver, which must not change under running pods"
    drained = replace(fix, disruptive="drain", before=before)
    if node.kind in (CONTAINER, WSL2):
        return drained
    effect = "pods that a drain leaves, such as those of DaemonSets, may fail until the reboot"
    return replace(drained.then_reboot(), disruptive="drain", effect=effect)


START_DOCKER = restart("docker", effects.RESTARTS_DOCKER)
EDIT_DAEMON_JSON = Fix("${EDITOR:-vi} /etc/docker/daemon.json")
RELOAD_DOCKER = Fix("systemctl reload docker")
CONFIGURE_DOCKER = configure("docker")

EDIT_CONTAINERD = Fix("${EDITOR:-vi} /etc/containerd/config.toml")
RESTART_CONTAINERD = restart("containerd", effects.RESTARTS_CONTAINERD)
CONFIGURE_CONTAINERD = configure("containerd")


def restart_managed(manager: str, unit: str | None) -> Fix:
    """Restart a Kubernetes distribution's own containerd, which renders its file again."""
    if manager == "microk8s":
        command = "snap restart microk8s.daemon-containerd"
        return Fix(command, disruptive="restart", disturbs=effects.RESTARTS_KUBERNETES)
    return restart((unit or manager).removesuffix(".service"), effects.RESTARTS_KUBERNETES)


REFRESH_CDI = Fix("gpunode cdi refresh", safe=True)
_STANDARD_CDI = "/var/run/cdi/nvidia.yaml"
# specifications of devices that aren't GPUs, by class: nvidia-ctk's modes that generate them
_OTHER_CDI = {
    "gdrcopy": "gdrcopy",
    "gds": "gds",
    "imex-channel": "imex",
    "mofed": "mofed",
    "nvswitch": "nvswitch",
}


def rewrite_cdi(path: str, kind: str) -> Fix:
    """Write one CDI specification again, with the tool for its kind, into the same file."""
    mode = _OTHER_CDI.get(kind.partition("/")[2])
    if mode is not None:
        return Fix(f"nvidia-ctk cdi generate --mode={mode} --output={path}")
    standard = path == _STANDARD_CDI
    return Fix("gpunode cdi refresh" if standard else f"gpunode cdi generate --output-file={path}", safe=True)


START_KUBELET = restart("kubelet", effects.RESTARTS_KUBELET)
RESTART_PLUGIN = Fix("systemctl restart gpunode-device-plugin")
# NVIDIA's plugin is a pod, which the kubelet starts again, also if its container waits for a restart. The pod
# of its MPS daemon has a similar name: the programs on shared GPUs would end with it
RESTART_PLUGIN_POD = Fix(
    "crictl pods --state ready --name nvidia-device-plugin | "
    "awk '/nvidia-device-plugin/ && !/mps-control/ {print $1}' | xargs --no-run-if-empty crictl stopp",
    disruptive="restart",
    disturbs=effects.RESTARTS_PLUGIN,
)


def keep_one_plugin(offered: str) -> Fix:
    """Show the device plugins; all but one of those that offer these resources must go."""
    return look(
        "kubectl get daemonsets --all-namespaces | grep --ignore-case device-plugin",
        f"Of the plugins that offer {offered}, keep the one that offers what your pods request. First change "
        "the request of the workloads that use another one's resource, or scale them to 0, and wait until "
        "their pods have ended (a deleted one would be created again): the plugin that stays doesn't count "
        "them and would allocate their GPUs again. Then uninstall only the others, by their Helm release or "
        "operator, which would create a deleted DaemonSet again. This affects every node of the cluster",
        needs_root=False,
    )


EVERY_NODE = "This changes the device plugin on every node of the cluster"
MOUNTS_EVERYWHERE = (
    f"{EVERY_NODE}. First run this on each of its other GPU nodes, where pods otherwise get no GPUs: gpunode "
    f"toolkit config set {BY_MOUNTS}=true"
)
THIS_NODE = "Where kubectl runs elsewhere, write this node's name instead of $(uname -n)"


def set_plugin_variable(setting: str) -> Fix:
    """Set a variable of NVIDIA's device plugin (``MIG_STRATEGY=mixed``), wherever it runs: kubectl sets a
    variable in one namespace at a time, and each installation method uses other labels."""
    command = (
        "kubectl get daemonsets --all-namespaces --no-headers | "
        "awk '$2 ~ /nvidia-device-plugin/ && $2 !~ /mps-control/ {print $1, $2}' | "
        "while read -r namespace name; do "
        f'kubectl set env --namespace "$namespace" "daemonset/$name" {setting}; done'
    )
    return Fix(command, disruptive="restart", disturbs=effects.RESTARTS_PLUGINS, before=EVERY_NODE)


# The plan of fixes for findings, which can be shown or carried out in part.

_BAD = (FindingStatus.FAIL, FindingStatus.WARN)
# programs that gpunode may run itself in plain calls; packages and keys are left to the administrator
_PLAIN = ("systemctl", "modprobe", "nvidia-modprobe", "ldconfig", "gpunode", "snap")
_REBOOT = "reboot"
_SHELL = set("|&;<>$`*?'\"{}()[]\\~#")
_WORSE = ("none", "restart", "drain", "reboot")


class PlannedFix(NamedTuple):
    """The fix of one finding.

    `disruptive`, the worst of its steps, and `look` are as in `Fix`. `way` is safe (--apply carries out its
    steps up to the first disruptive one), allow (needs --allow for each kind of disruption), or hand: the
    user must do it.
    """

    id: str
    summary: str
    command: str
    way: str
    disruptive: str
    steps: tuple[Step, ...]
    look: bool


def planned_fixes(findings: Collection[Finding]) -> tuple[PlannedFix, ...]:
    """One for each bad finding with a fix, in the order of `findings`; see `checks.report.in_order`."""
    return tuple(_planned(finding) for finding in findings if finding.status in _BAD and finding.fixes)


def allowed_steps(planned: PlannedFix, allow: Collection[str]) -> tuple[Step, ...]:
    """Steps that may be carried out: non-disruptive ones if the fix is safe, and the allowed ones."""
    if planned.way == "hand" or (planned.way == "allow" and planned.disruptive not in allow):
        return ()
    count = next(
        (number for number, step in enumerate(planned.steps) if step.disruptive not in ("none", *allow)),
        len(planned.steps),
    )
    return planned.steps[:count]


def _planned(finding: Finding) -> PlannedFix:
    fix = finding.fixes[0]
    command = " && ".join(fix.command for fix in finding.fixes)
    parts = [steps_of(fix) for fix in finding.fixes]
    steps = tuple(step for part in parts for step in part) if all(parts) else ()
    disruptive = max(
        (*(fix.disruptive for fix in finding.fixes), *(step.disruptive for step in steps)), key=_WORSE.index
    )
    way = "hand"
    if steps and fix.safe and steps[0].disruptive == "none":
        way = "safe"
    elif steps and disruptive != "none":
        way = "allow"
    return PlannedFix(finding.id, finding.summary, command, way, disruptive, steps, fix.look)


def steps_of(fix: Fix) -> tuple[Step, ...]:
    """Steps that carry out a fix without a shell; () if only the user can do it.

    A command of plain calls (``a b && c d``) of programs that only start, load or configure something is its
    own steps.
    """
    if fix.steps:
        return fix.steps
    result = []
    disruptive = "none" if fix.disruptive == _REBOOT else fix.disruptive
    for part in fix.command.split(" && "):
        words = shlex.split(part) if not _SHELL & set(part) else []
        if words == [_REBOOT]:
            result.append(Step(("systemctl", _REBOOT), disruptive=_REBOOT))
        elif words and words[0] in _PLAIN and "edit" not in words:  # a person must operate the editor
            result.append(Step(tuple(words), disruptive=disruptive))
        else:
            return ()
    return tuple(result)
