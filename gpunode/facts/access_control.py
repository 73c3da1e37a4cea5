"""Mandatory access control: what SELinux and AppArmor denied to containers that tried to use a GPU.

Denials are in the kernel's log, or, where auditd runs, in its own log (audit(8), type AVC). Those of other
programs than containers are left out: desktops deny a browser the driver's files all day long.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gpunode.facts.kernel_log import SOURCE, KernelLine
from gpunode.host import Host

AUDIT_LOG = "/var/log/audit/audit.log"
_SELINUX = "/sys/fs/selinux"
_TAIL_BYTES = 1 << 20  # auditd keeps 8 MiB in a file; older denials aren't relevant
# domains of container-selinux, and how it labels NVIDIA's device files
_CONTAINER = ":container_"
_NVIDIA_TYPE = ":xserver_misc_device_t:"
# looking at a file isn't using it: listing /dev causes this denial for every file
_LOOKING = {"getattr", "search"}
_PROFILES = ("docker-default", "cri-containerd", "crio-default", "containers-default", "lxc-", "snap.docker.")
_NVIDIA_FILES = ("/dev/nvidia", "/proc/driver/nvidia", "/run/nvidia")


class Denial(NamedTuple):
    """`when` in seconds since the epoch, 0 if unknown; `subject` is SELinux's context, AppArmor's profile."""

    source: str
    text: str
    when: float
    subject: str


def selinux_enforcing(host: Host) -> bool:
    return (host.read_text(f"{_SELINUX}/enforce") or "").strip() == "1"


def selinux_boolean(host: Host, name: str) -> bool | None:
    """Whether a boolean of the policy is on now (its file: now and pending); None if it doesn't exist."""
    text = host.read_text(f"{_SELINUX}/booleans/{name}") or ""
    return text.startswith("1") if text else None


def selinux_denials(host: Host, log: tuple[KernelLine, ...]) -> tuple[Denial, ...]:
    """Enforced denials of containers that tried to use NVIDIA's files, oldest first. `Unreadable` if this
    user has no permission to read auditd's log."""
    lines = [(SOURCE, line.text) for line in log]
    lines += [(AUDIT_LOG, line) for line in host.read_tail(AUDIT_LOG, _TAIL_BYTES).splitlines()]
    candidates = (line for line in lines if "avc:" in line[1] and "permissive=1" not in line[1])
    denials = [denial for source, text in candidates if (denial := _selinux(source, text))]
    return tuple(sorted(denials, key=lambda entry: entry.when))


def _selinux(source: str, text: str) -> Denial | None:
    """The program's own name (comm) is ignored: nvidia-smi may be denied anything."""
    denied = re.search(r"denied\s+\{([^}]*)\}", text)
    if denied is None or set(denied[1].split()) <= _LOOKING:
        return None
    fields = dict(re.findall(r'(\w+)="?([^"\s]*)', text))
    if _CONTAINER not in fields.get("scontext", ""):
        return None
    names = f"{fields.get('path', '')} {fields.get('name', '')}"
    if "nvidia" not in names and _NVIDIA_TYPE not in f"{fields.get('tcontext', '')}:":
        return None
    return Denial(source, text, _audit_time(text), fields["scontext"])


def apparmor_denials(log: tuple[KernelLine, ...]) -> tuple[Denial, ...]:
    """Denials for containers' profiles that name a file of the driver, oldest first."""
    denials = []
    for line in log:
        if 'apparmor="DENIED"' not in line.text:
            continue
        fields = dict(re.findall(r'(\w+)="([^"]*)"', line.text))
        profile, name = fields.get("profile", ""), fields.get("name", "")
        if profile.startswith(_PROFILES) and name.startswith(_NVIDIA_FILES):
            denials.append(Denial(SOURCE, line.text, _audit_time(line.text), profile))
    return tuple(denials)


def _audit_time(text: str) -> float:
    match = re.search(r"audit\((\d{1,12})\.", text, re.ASCII)
    return float(match[1]) if match else 0.0
