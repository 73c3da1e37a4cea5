"""Run a program through containerd's CRI: images come in by ctr."""

from __future__ import annotations

from typing import Any

from gpunode.daemons.cri import Cri, CriStatus
from gpunode.dataclass import dataclass
from gpunode.errors import PreconditionError
from gpunode.facts.cdi import DIRECTORIES
from gpunode.facts.daemons import Daemon, parse_version
from gpunode.host import Host
from gpunode.result import Progress
from gpunode.runtime.container_run import ContainerOutcome, ContainerRequest, first_contact
from gpunode.runtime.container_run_cri import CriEngine, run_on
from gpunode.runtime.container_way import CdiReading, choose
from gpunode.runtime.find import FINDERS

_IMPORT_SECONDS = 120.0
_CLIENTS = {"microk8s": ("/snap/bin/microk8s.ctr",)}  # others have it as their own subcommand


def run(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """See `container_run.run_program`."""
    begun = host.monotonic()
    daemon = FINDERS[request.engine](host, request.config or None)
    socket = request.socket or (daemon.socket if daemon else "")
    if not socket:
        name = request.engine
        install = (
            "apt install containerd" if name == "containerd" else f"install {name}, or name another engine"
        )
        host.refuse_unsafe(name)
        raise PreconditionError(f"{name} is not on this node", hint=install)
    unit = daemon.unit if daemon and daemon.unit else request.engine
    with Cri(host, socket, service=unit.removesuffix(".service")) as cri:
        status = first_contact(cri.status)
        reading = _reading(cri, status, "" if request.engine == "containerd" else request.engine)
        way = choose(host, request.runtime_name, request.cdi, status.handlers, reading)
        snapshotter = _text(_table(status.config.get("containerd")).get("snapshotter"))
        ctr = _Ctr(host, _client(host, daemon), socket, snapshotter)
        # runc refuses a cgroup that is no slice where systemd makes the cgroups
        systemd = status.systemd_cgroup(way.handler or status.default_handler)
        engine = CriEngine(
            cri,
            way,
            pause=_pause_name(host, status, daemon),
            cgroup_parent="system.slice" if systemd else "",
            bring_in=ctr.bring_in,
            take_out=ctr.take_out,
            pull=f"{' '.join(ctr.client)} -n k8s.io images pull {{image}}",
        )
        return run_on(host, engine, request, progress, begun)


def _client(host: Host, daemon: Daemon | None) -> tuple[str, ...]:
    """How ctr is started: the one beside the daemon, else the node's, else what a distribution has for it."""
    beside = (daemon.binary or "").rpartition("/")[0] if daemon else ""
    manager = daemon.manager if daemon else ""
    own = _CLIENTS.get(manager, (manager, "ctr"))
    candidates = ((f"{beside}/ctr",), ("ctr",), own) if beside else (("ctr",), own)
    found = (one for one in candidates if one[0] and host.which(one[0]) is not None)
    return next(found, ("ctr",))


def _reading(cri: Cri, status: CriStatus, manager: str) -> CdiReading:
    """containerd 1.6 says nothing of CDI; 1.7 to 2.2 have a switch, which later ones may leave out."""
    enabled = status.config.get("enableCDI")
    directories = status.config.get("cdiSpecDirs")
    found = tuple(filter(None, map(_text, directories))) if isinstance(directories, list) else ()
    version = parse_version(cri.version()[1])
    switch = enabled if isinstance(enabled, bool) else None
    return CdiReading("containerd", version, switch, found or DIRECTORIES, manager)


def _pause_name(host: Host, status: CriStatus, daemon: Daemon | None) -> str:
    """The sandbox image's name: containerd 1.x tells it in its status, 2.x only in its configuration."""
    told = _text(status.config.get("sandboxImage"))
    if told or daemon is None or daemon.binary is None:
        return told
    import tomllib

    done = host.run((daemon.binary, "--config", daemon.config_path, "config", "dump"))
    try:
        tree: Any = tomllib.loads(done.stdout) if done.ok else {}
    except tomllib.TOMLDecodeError:
        return ""
    for key in ("plugins", "io.containerd.cri.v1.images", "pinned_images", "sandbox"):
        tree = _table(tree).get(key)
    return _text(tree)


@dataclass(frozen=True)
class _Ctr:
    """containerd's own client, in the namespace of the CRI."""

    host: Host
    client: tuple[str, ...]
    socket: str
    snapshotter: str

    def bring_in(self, archive: bytes) -> str:
        """What it complained of."""
        extra = ("--snapshotter", self.snapshotter) if self.snapshotter else ()
        return self._images("import", *extra, "-", stdin=archive)

    def take_out(self, reference: str) -> str:
        """Remove the name and, with ``--sync``, what nothing else refers to."""
        failed = self._images("rm", "--sync", reference)
        gone = not failed or "not found" in failed
        return "" if gone else f"{' '.join(self.client)} -n k8s.io images rm {reference} ({failed})"

    def _images(self, *arguments: str, stdin: bytes | None = None) -> str:
        argv = (*self.client, "--address", self.socket, "--namespace", "k8s.io", "images", *arguments)
        done = self.host.run(argv, timeout=_IMPORT_SECONDS, stdin=stdin)
        if done.timed_out:
            return f"it did not end within {_IMPORT_SECONDS:g} s"
        return "" if done.ok else f"ctr: {done.stderr.strip() or f'exit code {done.code}'}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
