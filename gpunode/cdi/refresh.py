"""The systemd units and the udev rule that keep the standard specification up to date.

Changes on a node, and what reports them: the driver is loaded or unloaded, a GPU is bound or removed (udev);
its libraries, the module index or the hook program are replaced (files, by the path unit); MIG devices appear
for the first time (their nodes in /dev/nvidia-caps, by the path unit). A MIG layout that reuses the same
capabilities causes no event at all: the program that changes it must run `gpunode cdi refresh` afterwards.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from gpunode.host import Host

SERVICE = "gpunode-cdi-refresh.service"
PATH_UNIT = "gpunode-cdi-refresh.path"
UNITS = (PATH_UNIT, SERVICE)
SERVICE_FILE = f"/etc/systemd/system/{SERVICE}"
PATH_FILE = f"/etc/systemd/system/{PATH_UNIT}"
# after 60-persistent and NVIDIA's own 60-nvidia.rules, which make the device files
RULES_FILE = "/etc/udev/rules.d/90-gpunode-cdi.rules"
ENVIRONMENT_FILE = "/etc/gpunode/cdi-refresh.env"
MARKER = "# Made by gpunode (gpunode cdi refresh --install); gpunode cdi refresh --remove takes it away."

_SERVICE = """\
{marker}
[Unit]
Description=Write the CDI specification of the GPUs for container engines (gpunode)
# containers that start at boot find their devices; this orders the units, it does not require success
After=nvidia-persistenced.service nvidia-fabricmanager.service nvidia-mig-manager.service
Before=docker.service containerd.service crio.service kubelet.service podman-restart.service
# failures early in the boot must not use up the restarts for when the driver is loaded
StartLimitIntervalSec=0

[Service]
Type=oneshot
# GPUNODE_CDI_REFRESH_... sets any option
EnvironmentFile=-{environment}
# On a headless node this first creates the device files of unified memory; NVML creates the others. It also
# runs after the driver was unloaded, and must not load it again then.
ExecStartPre=-/bin/sh -c '[ ! -e /proc/driver/nvidia/version ] || exec /usr/bin/nvidia-modprobe -c 0 -u'
ExecStart={program} cdi refresh
TimeoutStartSec=180
{restart}UMask=0022

# It loads the driver's modules, makes its device files, queries NVML, and writes one directory.
RuntimeDirectory=cdi
RuntimeDirectoryMode=0755
RuntimeDirectoryPreserve=yes
{writable}CapabilityBoundingSet=CAP_SYS_MODULE CAP_SYS_ADMIN CAP_MKNOD CAP_CHOWN CAP_FOWNER CAP_DAC_OVERRIDE
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
PrivateNetwork=yes
RestrictAddressFamilies=AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
# Left out on purpose: PrivateDevices, DeviceAllow, and ProtectClock, which implies it (they shut the driver's
# devices out), ProcSubset (it hides /proc/driver/nvidia), PrivateTmp (MPS uses /tmp), ProtectKernelModules
# and ProtectKernelTunables (nvidia-modprobe loads modules and they set parameters).

[Install]
WantedBy=multi-user.target
"""

_RESTART = """\
Restart=on-failure
RestartSec=15
# 3: needs manual action, for example a reboot
RestartPreventExitStatus=3
"""
# systemd's NEWS for 244; an older one, such as RHEL 8's, refuses the whole unit
_RESTARTS_ONESHOT = 244

_PATH = """\
{marker}
[Unit]
Description=Watch the sources of the GPUs' CDI specification (gpunode)

[Path]
# the driver's module is built or removed, its libraries change, NVIDIA's hook comes or goes
PathChanged=/lib/modules/%v/modules.dep.bin
PathChanged=/etc/ld.so.cache
PathChanged=/usr/bin/nvidia-cdi-hook
# MIG devices that this boot hasn't had yet
PathChanged=/dev/nvidia-caps
Unit={service}

[Install]
WantedBy=multi-user.target
"""

_RULES = """\
{marker}
# The driver is loaded, or wholly unloaded; while its modules are unloaded one by one, no process may use it.
SUBSYSTEM=="module", ACTION=="add", KERNEL=="nvidia|nvidia_*", GOTO="gpunode"
SUBSYSTEM=="module", ACTION=="remove", KERNEL=="nvidia|nvidia_current", GOTO="gpunode"
# A GPU is bound to a driver, unbound, or gone (PCI class 03).
SUBSYSTEM=="pci", ACTION=="bind|unbind|remove", \\
  ENV{{PCI_ID}}=="10DE:*", ENV{{PCI_CLASS}}=="30*", GOTO="gpunode"
GOTO="gpunode_end"
LABEL="gpunode"
RUN+="{systemctl} --no-block start {service}"
LABEL="gpunode_end"
"""


def files(host: Host, directories: Iterable[str] = ()) -> tuple[tuple[str, bytes], ...]:
    """Path and content of each file for this node: units, then the rule. The service may also write
    `directories`; one with a name that systemd could misread is left out.
    """
    writable = (place for place in directories if re.fullmatch(r"/[\w./@+-]+", place, re.ASCII))
    values = {
        "marker": MARKER,
        "environment": ENVIRONMENT_FILE,
        "program": program(host),
        "service": SERVICE,
        "restart": _RESTART if _systemd_release(host) >= _RESTARTS_ONESHOT else "",
        "writable": "".join(f"ReadWritePaths=-{place}\n" for place in writable),
        "systemctl": host.which("systemctl") or "/usr/bin/systemctl",
    }
    texts = ((SERVICE_FILE, _SERVICE), (PATH_FILE, _PATH), (RULES_FILE, _RULES))
    return tuple((path, text.format(**values).encode()) for path, text in texts)


def _systemd_release(host: Host) -> int:
    """Such as 252; an unknown version counts as a new one."""
    match = re.match(r"systemd (\d{1,5})", host.run(["systemctl", "--version"], timeout=5.0).stdout)
    return int(match[1]) if match else _RESTARTS_ONESHOT


def program(host: Host) -> str:
    """The program that a unit starts: the running gpunode, by its absolute path.

    On a recorded or mounted node that is the node's own, or the path of its package.
    """
    if not host.live:
        return host.which("gpunode") or "/usr/local/bin/gpunode"
    script = f"{sys.executable.rpartition('/')[0]}/gpunode"
    if host.executable(script):
        return _quoted(script)
    return f"{_quoted(sys.executable)} -P -m gpunode"


def _quoted(path: str) -> str:
    """A program as ExecStart's first word (systemd.service(5), "COMMAND LINES"): ``%`` is special there.

    ``$`` isn't special in that place: systemd expands no variable in it, and ``$$`` would stay unchanged.
    systemd accepts no quotes and backslashes in a program's path.
    """
    escaped = path.replace("%", "%%")
    return escaped if re.fullmatch(r"[\w./%+-]+", escaped, re.ASCII) else f'"{escaped}"'
