"""What mends device files and the daemon that keeps GPUs initialised."""

from __future__ import annotations

from gpunode.checks.fixes import UPGRADE_TOOLKIT, Remedy, everywhere, per_family
from gpunode.host import DeviceNode
from gpunode.result import Fix, Step

_ENABLE = ("systemctl", "enable", "--now", "nvidia-persistenced")
_START = Fix(" ".join(_ENABLE), safe=True, steps=(Step(argv=_ENABLE),))
START_PERSISTENCED = Remedy(_START, _START, _START, _START)
RESTART_PERSISTENCED = everywhere("systemctl restart nvidia-persistenced")
INSTALL_PERSISTENCED = per_family(
    f"apt install nvidia-persistenced && {' '.join(_ENABLE)}",
    f"dnf install nvidia-persistenced && {' '.join(_ENABLE)}",
    f"zypper install nvidia-compute-utils-G06 && {' '.join(_ENABLE)}",
    " ".join(_ENABLE),
)
_SAMPLE = "/usr/share/doc/NVIDIA_GLX-1.0/samples/nvidia-persistenced-init.tar.bz2"
UNIT_OF_RUN_INSTALLER = Fix(
    f'cd "$(mktemp --directory)" && tar --extract --file {_SAMPLE} && sh nvidia-persistenced-init/install.sh'
)

# the check names the containers and how each is restarted; without it nobody knows which
RESTART_CONTAINERS = everywhere("gpunode doctor cgroup-device-revoked")
START_IMEX = everywhere("systemctl restart nvidia-imex", "restart")
OPEN_DEVICES = everywhere(
    "echo 'options nvidia NVreg_DeviceFileMode=0666' > /etc/modprobe.d/nvidia-device-files.conf && reboot",
    "reboot",
)
MAKE_CHANNEL = everywhere(
    "echo 'options nvidia NVreg_CreateImexChannel0=1' > /etc/modprobe.d/nvidia-imex.conf && reboot", "reboot"
)
MAKE_LINKS = everywhere(
    "for file in /dev/nvidia?*; do [ -c $file ] && "
    "ln -sf $file /dev/char/$((0x$(stat -c %t $file))):$((0x$(stat -c %T $file))); done"
)


def install_daemon(command: str) -> Fix:
    return Fix(f"{command} && {' '.join(_ENABLE)}")


def make_user(name: str) -> Fix:
    """A system user without a home, as the daemon's packages make it."""
    return Fix(
        f"useradd --system --no-create-home --shell /usr/sbin/nologin {name} && "
        "systemctl restart nvidia-persistenced"
    )


def open_files(paths: tuple[str, ...]) -> Fix:
    argv = ("chmod", "0666", *paths)
    return Fix(" ".join(argv), safe=True, steps=(Step(argv=argv),))


def change_mode(path: str) -> Fix | None:
    """Change the option where it is set; None for the kernel's command line."""
    if not path.startswith("/etc/"):
        return None
    pattern = "s/NVreg_DeviceFileMode=[0-9]*/NVreg_DeviceFileMode=0666/"
    return Fix(f"sed -i '{pattern}' {path} && reboot", disruptive="reboot")


def make_links(nodes: tuple[DeviceNode, ...]) -> Fix:
    """The links that udev makes for other devices; they last until the next boot."""
    links = [(f"/dev/char/{one.major}:{one.minor}", one.path.replace("/dev/", "../", 1)) for one in nodes]
    command = " && ".join(f"ln -s {target} {path}" for path, target in links)
    return Fix(command, safe=True, steps=tuple(Step(path=path, link=target) for path, target in links))


_AUTO = Fix("gpunode toolkit config set nvidia-container-runtime.mode=auto")


def by_cdi(old_toolkit: bool) -> Fix:
    """Have the runtime describe GPUs to runc, which tells systemd: releases that can do so on their own."""
    return UPGRADE_TOOLKIT.other if old_toolkit else _AUTO
