"""What a node's own units, crontabs, scripts and udev rules start, and so make again after a reboot.

Whatever lies in /run and /dev is gone with a reboot. Who comes to say that nobody makes it again must have
looked wherever administrators put such things; who can't look there says nothing.
"""

from __future__ import annotations

from gpunode.errors import GpunodeError, Unreadable
from gpunode.facts.driver import Kernel, newer_kernels, version_key
from gpunode.host import Host

# where a node's own scripts are started from: directory and pattern
_PLACES = (
    *(("/etc/systemd/system", "*.service"), ("/usr/local/lib/systemd/system", "*.service")),
    *(("/etc/cron.d", "*"), ("/etc", "crontab"), ("/etc", "rc.local"), ("/etc/rc.d", "rc.local")),
    *(("/var/spool/cron", "root"), ("/var/spool/cron/crontabs", "root"), ("/var/spool/cron/tabs", "root")),
)
_RULES = (
    ("/etc/udev/rules.d", "*"),
    ("/usr/lib/udev/rules.d", "*nvidia*"),
    ("/lib/udev/rules.d", "*nvidia*"),
)
_MODULES = (
    *(("/etc", "modules"), ("/etc/modules-load.d", "*.conf"), ("/usr/lib/modules-load.d", "*.conf")),
    *(("/lib/modules-load.d", "*.conf"), ("/usr/local/lib/modules-load.d", "*.conf")),
    *(("/etc/modprobe.d", "*.conf"), ("/usr/lib/modprobe.d", "*.conf"), ("/lib/modprobe.d", "*.conf")),
)
_SCRIPTS = ("/usr/local/", "/opt/", "/root/", "/etc/", "/srv/", "/home/")
_LONGEST = 256 << 10  # bytes; a script is shorter, a program isn't
OPERATOR = "/run/nvidia/validations"
"""The GPU operator's mark on a node: its pods make devices, links and specifications after every boot."""


def started(
    host: Host, commands: tuple[str, ...], *, besides: tuple[str, ...] = (), rules: bool = False
) -> str:
    """The file of this node's own that has one of these commands run, directly or in a script that it starts;
    empty if none does. `besides` are units that are left out, since systemd knows better whether they are on;
    with `rules` udev's are searched too."""
    for directory, pattern in (*_PLACES, *(_RULES if rules else ())):
        for path in host.glob(directory, pattern):
            if path.rpartition("/")[2] not in besides and _runs(host, path, commands):
                return path
    return ""


def _runs(host: Host, path: str, commands: tuple[str, ...], depth: int = 0) -> bool:
    text = _text(host, path)
    if text is None:
        return True  # who can't look mustn't say that nobody does
    if depth or any(command in text for command in commands):
        return any(command in text for command in commands)
    words = (word.removeprefix("ExecStart=").strip("\"'-@!+:;()&|") for word in text.split())
    scripts = dict.fromkeys(word for word in words if word.startswith(_SCRIPTS))
    return any(_runs(host, script, commands, 1) for script in list(scripts)[:20] if host.is_file(script))


def loaded(host: Host, module: str) -> str:
    """The file that has a kernel module (``nvidia-uvm``) loaded at boot or along with another one: a list of
    modules, a dependency of modprobe.d, a rule of udev, a unit or script of the node's own; empty if there is
    none. ``-`` and ``_`` are the same in names."""
    for directory, pattern in (*_MODULES, *_RULES):
        for path in host.glob(directory, pattern):
            text = _text(host, path)
            if text is None or any(_names(line, module) for line in text.splitlines()):
                return path
    return started(host, (module, module.replace("-", "_"), "nvidia-modprobe"))


def _names(line: str, module: str) -> bool:
    """Whether a line speaks of the module, other than to keep it out or to give it options."""
    words = line.strip().replace("_", "-")
    return module in words and not words.startswith(("#", ";", "blacklist ", "options ", "alias "))


def _text(host: Host, path: str) -> str | None:
    """Empty for what is gone or too long to be a script, None for what this user may not read."""
    try:
        found = host.stat(path)
        return (host.read_text(path) or "") if found is not None and found.st_size <= _LONGEST else ""
    except (GpunodeError, OSError):
        return None


# Kernels that wait for a reboot, as the distribution itself tells: Debian's list, RHEL's chosen entry.

PACKAGES = "/run/reboot-required.pkgs"
GRUB = "/boot/grub2/grubenv"


def kernel_waiting(host: Host, kernels: tuple[Kernel, ...], running: str) -> str | None:
    """The installed kernel for which update-notifier asks for a reboot; None if it asks for none. Other
    packages on its list don't touch GPUs, and a driver's are compared with what is loaded."""
    lines = (host.read_text(PACKAGES) or "").splitlines()
    asked = {line.strip().removeprefix("linux-image-").removeprefix("unsigned-") for line in lines}
    newer = newer_kernels(kernels, running)
    waiting = (one.release for one in newer if one.release in asked)
    return max(waiting, key=version_key, default=None)


def chosen_kernel(host: Host) -> str:
    """The boot entry that grubby or grub2-set-default chose, such as ``MACHINEID-5.14.0-503.el9.x86_64``;
    empty if nobody did. `Unreadable` for an ordinary user where /boot is closed."""
    lines = (host.read_text(GRUB) or "").splitlines()
    return next((line.partition("=")[2].strip() for line in lines if line.startswith("saved_entry=")), "")


def chosen_release(host: Host, kernels: tuple[Kernel, ...]) -> str:
    """The installed kernel that this entry boots; empty if nobody chose one, or if this user may not look."""
    try:
        chosen = chosen_kernel(host)
    except Unreadable:
        return ""
    return next((one.release for one in kernels if chosen.endswith(f"-{one.release}")), "")
