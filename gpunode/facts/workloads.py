"""Running containers with NVIDIA's device files, and whether they may still open them.

Nothing is executed in a container and engines are queried only for container names: /proc/PID/cgroup lists a
container's processes, /proc/PID/root/dev the device files that it sees. Whether its control group still
allows opening them can be read where the kernel shows it (cgroup v1, devices.list). In cgroup v2 that is a
BPF program which no file shows; there systemd's own list for the container's scope (DeviceAllow) is what it
enforces from its next daemon-reload on, and each reload recreates the directory of its generators.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from gpunode.facts.devices import needed
from gpunode.facts.processes import Process
from gpunode.facts.services import shown_units
from gpunode.host import Host
from gpunode.host.reading import DeviceNode

_ID = re.compile(r"[0-9a-f]{64}")
_V1_DEVICES = "/sys/fs/cgroup/devices"
# systemd.generator(7): flushed and filled again whenever systemd reloads
_GENERATORS = ("/run/systemd/generator", "/run/systemd/generator.early", "/run/systemd/generator.late")
_SHOW_RULES = ("systemctl", "show", "--property=Id,DevicePolicy,DeviceAllow")
_SECONDS = 3.0


class Container(NamedTuple):
    """A running container. `pid` is its first process, `id` the engine's. `group` is its control group (v2),
    `devices_group` that of the devices controller (v1), each empty where there is none. `nodes` are NVIDIA's
    files in its /dev, only those that every CUDA program opens."""

    pid: int
    id: str
    started: float
    group: str
    devices_group: str
    nodes: tuple[DeviceNode, ...]

    @property
    def scope(self) -> str:
        """systemd's unit for it; empty if the runtime manages cgroups itself (cgroupfs)."""
        parts = (part for part in self.group.split("/") if self.id in part)
        return next((part for part in parts if part.endswith(".scope")), "")


class DeviceRule(NamedTuple):
    """What systemd allows a unit to open: `policy` is auto, closed or strict, `allow` DeviceAllow's
    entries."""

    policy: str
    allow: tuple[str, ...]

    def allows(self, major: int, minor: int, majors: Mapping[str, int]) -> bool:
        """Whether a character device is allowed; `majors` is driver name to number (/proc/devices).

        An entry is a path such as /dev/char/195:0, or char-NAME with shell wildcards
        (systemd.resource-control(5)).
        """
        if self.policy == "auto" and not self.allow:
            return True
        drivers = [name for name, number in majors.items() if number == major]
        for entry in self.allow:
            path = entry.partition(" ")[0]
            if path in (f"/dev/char/{major}:{minor}", f"/dev/char/{major}:*", f"char-{major}"):
                return True
            if path.startswith("char-") and any(fnmatchcase(name, path[5:]) for name in drivers):
                return True
            if "nvidia" in path and not path.startswith("char-"):
                return True  # identified by its path: an uncertain match isn't worth a false alarm
        return False


def containers(host: Host, processes: Sequence[Process]) -> tuple[Container, ...]:
    """Every running container. `Unreadable` without root, if there is any."""
    result: dict[str, Container] = {}
    for process in sorted(processes, key=lambda entry: entry.pid):
        groups = container_of(host, process.pid)
        if groups.id and groups.id not in result:
            nodes = _nodes(host, process.pid)
            result[groups.id] = Container(
                process.pid, groups.id, process.started, groups.group, groups.devices_group, nodes
            )
    return tuple(result.values())


class ContainerGroups(NamedTuple):
    """The id of a process's container, its group in v2 and that of v1's devices; empty if there is none."""

    id: str
    group: str
    devices_group: str


def container_of(host: Host, pid: int) -> ContainerGroups:
    """From /proc/PID/cgroup."""
    unified = devices = ""
    for line in host.text_or_empty(f"/proc/{pid}/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            unified = path
        elif "devices" in controllers.split(","):
            devices = path
    ids = _ID.findall(devices or unified)
    return ContainerGroups(ids[-1] if ids else "", unified, devices)


def _nodes(host: Host, pid: int) -> tuple[DeviceNode, ...]:
    root = f"/proc/{pid}/root"
    return tuple(node for node in host.devices(f"{root}/dev") if needed(node.path.removeprefix(root)))


def v1_allows(host: Host, container: Container) -> Sequence[tuple[int, int]] | None:
    """Device numbers that v1's devices controller allows, -1 for any; None if they can't be read."""
    if not container.devices_group:
        return None
    text = host.read_text(f"{_V1_DEVICES}{container.devices_group}/devices.list")
    return None if text is None else parse_devices_list(text)


def parse_devices_list(text: str) -> tuple[tuple[int, int], ...]:
    """Lines ``c 195:0 rwm``, ``c 195:* rwm`` or ``a *:* rwm``; -1 means any number."""
    result = []
    for line in text.splitlines():
        match = re.match(r"[ac] (\d{1,7}|\*):(\d{1,7}|\*) ", line, re.ASCII)
        if match:
            major, minor = (-1 if part == "*" else int(part) for part in match.groups())
            result.append((major, minor))
    return tuple(result)


def device_rules(host: Host, scopes: Iterable[str]) -> Mapping[str, DeviceRule]:
    """systemd's rules by unit, from one query for all; {} if it reports nothing."""
    done = host.run([*_SHOW_RULES, *sorted(set(scopes))], timeout=_SECONDS)
    return parse_rules(done.stdout) if done.ok else {}


def parse_rules(text: str) -> dict[str, DeviceRule]:
    """The rules that ``systemctl show`` prints; DeviceAllow occurs once for each entry."""
    rules = {}
    for pairs in shown_units(text):
        fields = {key: value for key, value in pairs if key != "DeviceAllow"}
        if fields.get("Id") and fields.get("DevicePolicy"):
            allow = tuple(value for key, value in pairs if key == "DeviceAllow" and value)
            rules[fields["Id"]] = DeviceRule(fields["DevicePolicy"], allow)
    return rules


def last_reload(host: Host) -> float:
    """When systemd last read its units (seconds since the epoch), 0 if unknown."""
    times = [status.st_mtime for status in map(host.stat, _GENERATORS) if status is not None]
    return max(times, default=0.0)
