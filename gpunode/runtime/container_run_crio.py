"""Run a program through CRI-O's CRI: images come in by podman or skopeo, which share its storage."""

from __future__ import annotations

from typing import Any

from gpunode.daemons.cri import Cri, CriStatus
from gpunode.daemons.crio_api import CrioApi
from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError, GpunodeError, PreconditionError
from gpunode.facts.cdi import DIRECTORIES
from gpunode.facts.containerd import dig
from gpunode.facts.crio import DEFAULT_SOCKET, compiled_default, drop_in_directory, find_crio, load_crio
from gpunode.facts.daemons import Daemon, parse_version
from gpunode.host import Host
from gpunode.result import Progress
from gpunode.runtime.container_run import ContainerOutcome, ContainerRequest, first_contact
from gpunode.runtime.container_run_cri import CriEngine, run_on
from gpunode.runtime.container_way import CdiReading, choose
from gpunode.runtime.podman_cli import Podman

_IMPORT_SECONDS = 120.0


def run(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """See `container_run.run_program`."""
    begun = host.monotonic()
    daemon = find_crio(host, request.config or None)
    socket = request.socket or (daemon.socket if daemon else DEFAULT_SOCKET)
    if not request.socket and daemon is None:
        host.refuse_unsafe("crio")
        raise PreconditionError("CRI-O is not on this node", hint="install cri-o, or use another engine")
    with Cri(host, socket, service="crio") as cri:
        status = first_contact(cri.status)
        settings = _settings(host, socket, daemon)
        version = parse_version(cri.version()[1])
        reading = CdiReading("crio", version, True, settings.directories)
        way = choose(host, request.runtime_name, request.cdi, _handlers(status, settings, version), reading)
        storage = _storage(host, settings)
        if storage is None and not request.image:
            raise PreconditionError(
                "CRI-O takes no image in by itself, and neither podman nor skopeo is here to do it",
                hint="apt install skopeo, or name an image that CRI-O has:"
                " gpunode verify --on crio --image REF",
            )
        importer = storage or _Storage(host)
        engine = CriEngine(
            cri,
            way,
            # without an importer nothing can stand in for a missing one; CRI-O then pulls it
            pause=settings.pause if storage else "",
            cgroup_parent="",  # CRI-O has a parent of its own for either cgroup manager
            bring_in=importer.bring_in,
            take_out=importer.take_out,
            pull="crictl pull {image}",
        )
        return run_on(host, engine, request, progress, begun)


@dataclass(frozen=True)
class _Settings:
    """What of CRI-O's configuration a run needs; its own defaults where it doesn't tell."""

    handlers: tuple[str, ...] | None = None
    directories: tuple[str, ...] = DIRECTORIES
    pause: str = ""
    root: str = ""
    runroot: str = ""
    driver: str = ""


def _settings(host: Host, socket: str, daemon: Daemon | None) -> _Settings:
    """As the running daemon has them; from its files if it doesn't answer that question."""
    try:
        tree = CrioApi(host, socket).config()
    except DaemonError:
        return _from_files(host, daemon)
    runtimes = dig(tree, "crio", "runtime", "runtimes")
    return _Settings(
        tuple(runtimes) if isinstance(runtimes, dict) else None,
        _strings(dig(tree, "crio", "runtime", "cdi_spec_dirs")) or DIRECTORIES,
        _text(dig(tree, "crio", "image", "pause_image")),
        _text(dig(tree, "crio", "root")),
        _text(dig(tree, "crio", "runroot")),
        _text(dig(tree, "crio", "storage_driver")),
    )


def _from_files(host: Host, daemon: Daemon | None) -> _Settings:
    if daemon is None:
        return _Settings()
    try:
        config = load_crio(host, daemon.config_path, drop_in_directory(daemon))
    except GpunodeError:
        return (
            _Settings()
        )  # configure-runtime says what is wrong with a file; here only defaults are at stake
    handlers = dict.fromkeys((compiled_default(daemon.version), *config.handlers))
    directories = _strings(config.setting("runtime", "cdi_spec_dirs")) or DIRECTORIES
    return _Settings(tuple(handlers), directories, _text(config.setting("image", "pause_image")))


def _handlers(status: CriStatus, settings: _Settings, version: tuple[int, ...]) -> tuple[str, ...] | None:
    """From the status (CRI-O 1.31 on), else from its configuration; None if neither tells."""
    if status.handlers:
        return status.handlers
    return settings.handlers


@dataclass(frozen=True)
class _Storage:
    """containers-storage as CRI-O keeps it, filled by podman or, without it, by skopeo."""

    host: Host
    podman: Podman | None = None
    skopeo: str = ""
    place: str = ""

    def bring_in(self, archive: bytes) -> str:
        """What the program complained of."""
        if self.podman is not None:
            return self.podman.load(archive)
        names = _names_of(archive)
        with self.host.temporary_directory() as directory:
            path = f"{directory}/image.tar"
            self.host.write_atomic(path, archive, mode=0o600)
            failures = (self._copy(path, name) for name in names)
            return next(filter(None, failures), "")

    def take_out(self, reference: str) -> str:
        """Remove a name; what the program complained of."""
        if self.podman is not None:
            return self.podman.remove_image(reference)
        done = self.host.run((self.skopeo, "delete", f"containers-storage:{self.place}{reference}"))
        gone = done.ok or "does not resolve to an image" in done.stderr or "not known" in done.stderr
        return "" if gone else done.stderr.strip()

    def _copy(self, path: str, name: str) -> str:
        target = f"containers-storage:{self.place}{name}"
        argv = (self.skopeo, "--insecure-policy", "copy", f"docker-archive:{path}:{name}", target)
        done = self.host.run(argv, timeout=_IMPORT_SECONDS)
        return "" if done.ok else done.stderr.strip() or f"exit code {done.code}"


def _storage(host: Host, settings: _Settings) -> _Storage | None:
    """What can put images into CRI-O's storage on this node; None if nothing can."""
    named = (("--root", settings.root), ("--runroot", settings.runroot))
    options = [part for name, value in named if value for part in (name, value)]
    options += ["--storage-driver", settings.driver] if settings.driver else []
    podman = host.which("podman")
    if podman is not None:
        return _Storage(host, Podman(host, podman, tuple(options)))
    skopeo = host.which("skopeo")
    if skopeo is None:
        return None
    whole = settings.driver and settings.root and settings.runroot
    place = f"[{settings.driver}@{settings.root}+{settings.runroot}]" if whole else ""
    return _Storage(host, None, skopeo, place)


def _names_of(archive: bytes) -> tuple[str, ...]:
    """The names in an archive of ours."""
    import io
    import json
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile("manifest.json")
        manifest = json.loads(member.read()) if member else []
    return tuple(name for image in manifest for name in image["RepoTags"])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(filter(None, map(_text, value))) if isinstance(value, list) else ()
