"""Run a program through containerd's CRI: images come in by ctr."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpunode.daemons.cri import Cri, CriStatus
from gpunode.errors import PreconditionError
from gpunode.facts.containerd import find_containerd
from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from gpunode.result import Progress
from gpunode.runtime.container_run import ContainerOutcome, ContainerRequest, first_contact
from gpunode.runtime.container_run_cri import CriEngine, run_on
from gpunode.runtime.container_way import CdiReading, choose

_IMPORT_SECONDS = 120.0


def run(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """See `container_run.run_program`."""
    begun = host.monotonic()
    daemon = find_containerd(host, request.config or None)
    socket = request.socket or (daemon.socket if daemon else "")
    if not socket:
        raise PreconditionError("containerd is not on this node", hint="apt install containerd")
    with Cri(host, socket) as cri:
        status = first_contact(cri.status)
        reading = _reading(cri, status)
        way = choose(host, request.runtime_name, request.cdi, status.handlers, reading)
        ctr = _Ctr(host, socket, _text(_table(status.config.get("containerd")).get("snapshotter")))
        # runc refuses a cgroup that is no slice where systemd makes the cgroups
        systemd = status.systemd_cgroup(way.handler or status.default_handler)
        engine = CriEngine(
            cri,
            way,
            pause=_pause_name(host, status, daemon),
            cgroup_parent="system.slice" if systemd else "",
            bring_in=ctr.bring_in,
            take_out=ctr.take_out,
            pull="ctr -n k8s.io images pull {image}",
        )
        return run_on(host, engine, request, progress, begun)


def _reading(cri: Cri, status: CriStatus) -> CdiReading:
    """containerd 1.6 says nothing of CDI; 1.7 to 2.2 have a switch, which later ones may leave out."""
    from gpunode.facts.daemons import parse_version

    enabled = status.config.get("enableCDI")
    directories = status.config.get("cdiSpecDirs")
    found = tuple(filter(None, map(_text, directories))) if isinstance(directories, list) else ()
    version = parse_version(cri.version()[1])
    plain = CdiReading("containerd", version, enabled if isinstance(enabled, bool) else None)
    return plain if not found else CdiReading("containerd", version, plain.enabled, found)


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
        return "" if gone else f"ctr -n k8s.io images rm {reference} ({failed})"

    def _images(self, *arguments: str, stdin: bytes | None = None) -> str:
        argv = ("ctr", "--address", self.socket, "--namespace", "k8s.io", "images", *arguments)
        done = self.host.run(argv, timeout=_IMPORT_SECONDS, stdin=stdin)
        if done.timed_out:
            return f"it did not end within {_IMPORT_SECONDS:g} s"
        return "" if done.ok else f"ctr: {done.stderr.strip() or f'exit code {done.code}'}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
