"""What a node's own units, crontabs, scripts and udev rules start, and so create again after a reboot.

A reboot deletes everything in /run and /dev. To report that nothing creates it again, every usual place must
have been searched; without permission to search, nothing is reported.
"""

from __future__ import annotations

from gpunode.errors import GpunodeError, Unreadable
from gpunode.facts.kernels import Kernel, newer_kernels, version_key
from gpunode.host import Host

# directories and patterns of the node's own scripts
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
_LONGEST = 256 << 10  # bytes; scripts are shorter than that, programs longer
OPERATOR = "/run/nvidia/validations"
"""Directory that the GPU operator leaves on a node: its pods create devices, links and specifications after
every boot."""


def started(
    host: Host, commands: tuple[str, ...], *, besides: tuple[str, ...] = (), rules: bool = False
) -> str:
    """The node's own file that runs one of these commands, directly or in a script that it starts; empty if
    none does. `besides` are units to leave out, because systemd reports whether they are enabled; with
    `rules` udev's rules are searched too."""
    for directory, pattern in (*_PLACES, *(_RULES if rules else ())):
        for path in host.glob(directory, pattern):
            if path.rpartition("/")[2] not in besides and _runs(host, path, commands):
                return path
    return ""


def _runs(host: Host, path: str, commands: tuple[str, ...], depth: int = 0) -> bool:
    text = _text(host, path)
    if text is None:
        return True  # without permission to search, report nothing
    if depth or any(command in text for command in commands):
        return any(command in text for command in commands)
    words = (word.removeprefix("ExecStart=").strip("\"'-@!+:;()&|") for word in text.split())
    scripts = dict.fromkeys(word for word in words if word.startswith(_SCRIPTS))
    return any(_runs(host, script, commands, 1) for script in list(scripts)[:20] if host.is_file(script))


def loaded(host: Host, module: str) -> str:
    """The file that loads a kernel module (``nvidia-uvm``) at boot or along with another one: a list of
    modules, a dependency in modprobe.d, a udev rule, a unit or script of this node; empty if there is none.
    ``-`` and ``_`` are equal in names."""
    for directory, pattern in (*_MODULES, *_RULES):
        for path in host.glob(directory, pattern):
            text = _text(host, path)
            if text is None or any(_names(line, module) for line in text.splitlines()):
                return path
    return started(host, (module, module.replace("-", "_"), "nvidia-modprobe"))


def _names(line: str, module: str) -> bool:
    """Whether a line concerns the module, other than to blacklist it or to set its options."""
    words = line.strip().replace("_", "-")
    return module in words and not words.startswith(("#", ";", "blacklist ", "options ", "alias "))


def _text(host: Host, path: str) -> str | None:
    """Empty for a file that doesn't exist or is too long for a script, None for one that this user can't
    read."""
    try:
        status = host.stat(path)
        return (host.read_text(path) or "") if status is not None and status.st_size <= _LONGEST else ""
    except (GpunodeError, OSError):
        return None


# Kernels that wait for a reboot, as the distribution itself reports them: Debian's list, RHEL's chosen entry.

PACKAGES = "/run/reboot-required.pkgs"
GRUB = "/boot/grub2/grubenv"


def kernel_waiting(host: Host, kernels: tuple[Kernel, ...], running: str) -> str | None:
    """The installed kernel for which update-notifier requests a reboot; None if there is none. Other packages
    on its list don't concern GPUs, and a driver's are compared with what is loaded."""
    lines = (host.read_text(PACKAGES) or "").splitlines()
    releases = {line.strip().removeprefix("linux-image-").removeprefix("unsigned-") for line in lines}
    newer = newer_kernels(kernels, running)
    waiting = (kernel.release for kernel in newer if kernel.release in releases)
    return max(waiting, key=version_key, default=None)


def chosen_kernel(host: Host) -> str:
    """The boot entry that grubby or grub2-set-default chose, such as ``MACHINEID-5.14.0-503.el9.x86_64``;
    empty if none is chosen. `Unreadable` for an ordinary user without access to /boot."""
    lines = (host.read_text(GRUB) or "").splitlines()
    return next((line.partition("=")[2].strip() for line in lines if line.startswith("saved_entry=")), "")


def chosen_release(host: Host, kernels: tuple[Kernel, ...]) -> str:
    """The installed kernel that this entry boots; empty if none is chosen, or without permission."""
    try:
        entry = chosen_kernel(host)
    except Unreadable:
        return ""
    return next((kernel.release for kernel in kernels if entry.endswith(f"-{kernel.release}")), "")
