"""Findings and their fixes, and what the command of a fix disturbs on a node, in words."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import NamedTuple

from gpunode.errors import GpunodeError
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker import beyond_reload
from gpunode.facts.node import Node
from gpunode.output.typed import INTERNAL, StrEnum


class Step(NamedTuple):
    """One step of a fix: a program without a shell, or a file or a link.

    Either `argv`, or `path` with `content` (the whole file) or `link` (the symlink's target). `disruptive` as
    in `Fix`.
    """

    argv: tuple[str, ...] = ()
    path: str = ""
    content: str = ""
    link: str = ""
    disruptive: str = "none"


@dataclass(frozen=True)
class Fix:
    """One command that fixes a finding, or with `look` one that only shows what is needed to choose a fix.

    `disruptive` is none, restart, drain or reboot, and `effect` says what that means on this node. A fix with
    `steps` can be carried out by `doctor --fix --apply`; one that is also `safe` disturbs nothing, can be
    rolled back, and needs no further permission. `change` says what to change in the file that the command
    opens in an editor: one line of text, then lines to paste into the file, if any. `before` is what to do
    before the command, `note` what to know or to do beside it: both are one line of text, then one for each
    command.

    Not part of the JSON contract: `disturbs` is what the command restarts or replaces, one of the
    texts below, `before_reboot` the command without the reboot that ends it, and `then` the command that
    `note` names, if it is a step of its own.
    """

    command: str
    _: KW_ONLY
    needs_root: bool = True
    disruptive: str = "none"
    safe: bool = False
    steps: tuple[Step, ...] = ()
    change: str = ""
    look: bool = False
    note: str = ""
    effect: str = ""
    before: str = ""
    disturbs: str = field(default="", metadata=INTERNAL)
    before_reboot: str = field(default="", metadata=INTERNAL)
    then: Fix | None = field(default=None, metadata=INTERNAL)

    def after(self, command: str) -> Fix:
        """The same fix with another command before its own."""
        before = self.before_reboot and f"{command} && {self.before_reboot}"
        whole = f"{command} && {self.command}"
        return replace(self, command=whole, before_reboot=before, safe=False, steps=())

    def then_reboot(self) -> Fix:
        """The same fix, completed by a reboot."""
        whole = f"{self.command} && reboot"
        return replace(self, command=whole, before_reboot=self.command, disruptive="reboot")


class Evidence(NamedTuple):
    """What was seen: `source` is a path or a command, `line` is 1-based or None."""

    source: str
    value: str
    line: int | None = None


class FindingStatus(StrEnum):
    """Status of a finding; `error` means that the check itself failed."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check, in the JSON contract's field order.

    `severity`: error, warning or info. A `note` has passed and is useful to know. `skipped` is why there is
    no result: not-applicable, blocked, unreadable, left-out, hangs or nothing-to-judge; empty if there is
    one. `ignored` is the reason for which an error only counts as a warning. `reboot`: it belongs to the
    section "Safe to reboot?".
    """

    id: str
    title: str
    status: FindingStatus
    severity: str
    summary: str
    evidence: tuple[Evidence, ...] = ()
    why: str = ""
    fixes: tuple[Fix, ...] = field(default=(), metadata={"json": "fix"})
    blocked_by: str | None = None
    refs: tuple[str, ...] = ()
    milliseconds: float = 0.0
    layer: str = ""
    note: bool = False
    skipped: str = ""
    ignored: str | None = None
    reboot: bool = False


_DISTURBS = {"restart": "restarts a daemon", "drain": "stops GPU work", "reboot": "reboots this machine"}
_UNKNOWN = "stops its containers unless live-restore is on"
_RELOADS_DOCKER = "reloads Docker: running containers continue"

# What a command disturbs, by `Fix.disturbs`. The first two depend on the node's Docker: `_of_docker`.
LOADS_DOCKER = "loads Docker's runtimes"  # by a reload or a restart
RESTARTS_DOCKER = "restarts Docker"
LOADS_OTHER_DOCKER = f"reloads Docker; a restart, if it needs one (see --dry-run), {_UNKNOWN}"
RESTARTS_OTHER_DOCKER = f"restarts Docker, which {_UNKNOWN}"
RESTARTS_KUBERNETES = (
    "restarts this node's Kubernetes, and its API server if it has one: running pods continue"
)
RESTARTS_CONTAINERD = "restarts containerd: running containers continue"
RESTARTS_CRIO = "restarts CRI-O: running containers continue"
RESTARTS_KUBELET = "restarts the kubelet: running pods continue"
RESTARTS_FABRIC_MANAGER = "restarts the fabric manager"
RESTARTS_IMEX = "restarts the IMEX daemon"
RESTARTS_PLUGIN = "restarts the device plugin: running pods continue"
RESTARTS_PLUGINS = "restarts the device plugin on all nodes of the cluster: running pods continue"
DISRUPTS_NOTHING = "disrupts nothing that runs"
# the libraries of the new driver don't match the module that is loaded
REPLACES_DRIVER = "GPU programs that start before the reboot fail"
# by `gpunode configure-runtime --runtime`; any other runtime is a Kubernetes distribution
BY_RUNTIME = {"docker": LOADS_DOCKER, "containerd": RESTARTS_CONTAINERD, "crio": RESTARTS_CRIO}


def effect_of(fix: Fix, node: Node) -> str:
    """What a fix disturbs, its own `effect` if it has one; empty for nothing."""
    if fix.effect or fix.disruptive == "none":
        return fix.effect
    if fix.disturbs in (LOADS_DOCKER, RESTARTS_DOCKER):
        return _of_docker(node, fix.disturbs)
    own = "" if fix.before_reboot else fix.disturbs
    return own or _DISTURBS[fix.disruptive]


def _of_docker(node: Node, disturbs: str) -> str:
    """What a command does to the containers of the system's Docker, as checks have read it; a daemon that
    hangs must not be queried again."""
    docker = node.__dict__.get("docker")
    if not isinstance(docker, Daemon):
        return LOADS_OTHER_DOCKER if disturbs == LOADS_DOCKER else RESTARTS_OTHER_DOCKER
    if docker.process is None:
        return "starts Docker, which isn't running"
    if disturbs == LOADS_DOCKER and not _beyond_reload(node, docker):
        return _RELOADS_DOCKER
    return f"restarts Docker, which {_containers(node)}"


def _beyond_reload(node: Node, docker: Daemon) -> bool:
    """As `gpunode configure-runtime` decides it. A fact that can't be read counts as a reason to restart."""
    try:
        return bool(beyond_reload(node.host, docker))
    except (GpunodeError, OSError):
        return True


def _containers(node: Node) -> str:
    """What a restart of Docker does to its containers, from the report that a check has read; a check that
    wasn't selected hasn't read it."""
    info = node.__dict__.get("docker_info")
    if not isinstance(info, dict):
        return _UNKNOWN
    live_restore, running = info.get("LiveRestoreEnabled"), info.get("ContainersRunning")
    if live_restore is True:
        return "stops no container: live-restore is on"
    if live_restore is not False or not isinstance(running, int):
        return _UNKNOWN
    if running == 0:
        return "stops no container: none is running"
    return f"stops {running} running containers" if running > 1 else "stops 1 running container"
