"""Run a program through the CRI, as the kubelet would: import images, run one pod, remove everything.

The pod has the node's network, so it needs no CNI plugin. Its sandbox needs the configured pause image; if
that is missing, a substitute is imported under its name and removed again.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from secrets import token_hex
from typing import Any

from gpunode.daemons import cri_pods
from gpunode.daemons.cri import Cri, CriStatus
from gpunode.errors import DaemonError, GpunodeError, PreconditionError
from gpunode.facts.cdi import DIRECTORIES
from gpunode.facts.crio import (
    DEFAULT_SOCKET,
    compiled_default,
    drop_in_directory,
    find_crio,
    load_crio,
    running_crio,
)
from gpunode.facts.daemons import Daemon, parse_version
from gpunode.facts.toml import dig
from gpunode.host import Host
from gpunode.output.result import Progress
from gpunode.output.typed import as_strings, as_text, toml
from gpunode.runtime.find import FINDERS
from gpunode.runtime.verify.container import (
    OURS,
    STAND_IN,
    CdiReading,
    ContainerOutcome,
    ContainerRequest,
    GpuAccess,
    choose,
    clean_up,
    first_contact,
    labels,
    maker,
    remove_leftovers,
    require_image,
)
from gpunode.runtime.verify.failures import explain, timed_out
from gpunode.runtime.verify.image import HostFiles, Names, assemble, pause_image, verification_image
from gpunode.runtime.verify.podman import Podman

_SEEN_SECONDS = 10.0
_LOG_SECONDS = 2.0  # what a daemon may need to write the output of a container that has ended


@dataclass(frozen=True)
class CriEngine:
    """The differences between the engines that support the CRI.

    `load_image` imports an archive and `remove_image` removes a name from where the CRI finds images.
    `cgroup_parent` is for `cri_pods.Pod`. `pull` is the user's command for pulling an image, with
    ``{image}``.
    """

    cri: Cri
    way: GpuAccess
    pause: str
    cgroup_parent: str
    load_image: Callable[[bytes], None]
    remove_image: Callable[[str], None]
    pull: str

    @property
    def name(self) -> str:
        """The name in text for the user."""
        return self.way.reading.title


def run_on(
    host: Host, engine: CriEngine, request: ContainerRequest, progress: Progress, start: float
) -> ContainerOutcome:
    """Run the program; `start` is when the request came, on the host's monotonic clock."""
    # an image is removed with all its names
    cri = engine.cri
    remove_leftovers(
        host,
        progress,
        partial(cri_pods.sandboxes, cri, OURS),
        partial(cri_pods.remove_sandbox, cri),
        partial(cri_pods.image_names, cri),
        partial(cri_pods.remove_image, cri),
    )
    with ExitStack() as cleanup:
        token = token_hex(4)  # distinguishes this run from concurrent ones
        images = _Images(host, engine, progress, cleanup, f"{maker(host)}-{token}")
        reference = request.image or images.make()
        if request.image:
            has_image = cri_pods.has_image(cri, reference)
            require_image(engine.name, reference, has_image, engine.pull.format(image=reference))
        images.stand_in(engine.pause)
        logs = cleanup.enter_context(host.temporary_directory())
        pod = cri_pods.Pod(
            token=token,
            handler=engine.way.handler,
            image=reference,
            log_directory=str(logs),
            arguments=request.argv,
            cgroup_parent=engine.cgroup_parent,
            env=request.env,
            devices=engine.way.devices,
            labels=labels(host),
        )
        # by label, and before it exists: an interrupt may come between the request and its response
        cleanup.callback(clean_up, progress, "the sandbox", partial(_remove_pods, engine.cri, pod))
        with progress.step(f"run it through {engine.name}, {engine.way}"):
            code = _run_pod(host, engine, pod, request.timeout)
        out, err = cri_pods.read_log(_whole_log(host, f"{logs}/{cri_pods.LOG_NAME}"))
    return ContainerOutcome(code, out, err, host.monotonic() - start, engine.way)


def _run_pod(host: Host, engine: CriEngine, pod: cri_pods.Pod, timeout: float) -> int:
    cri = engine.cri
    try:
        container = cri_pods.start_pod(cri, pod)
    except DaemonError as error:
        raise explain(host, error, engine.way) from error
    ended: list[cri_pods.Exit] = []

    def has_ended() -> bool:
        seen = cri_pods.container_exit(cri, container)
        ended.extend([seen] if seen else [])
        return bool(ended)

    if not host.wait_until(has_ended, timeout):
        raise timed_out(timeout)
    if ended[0].reason in ("StartError", "ContainerCannotRun"):
        raise explain(host, DaemonError(ended[0].message), engine.way)
    return ended[0].code


def _whole_log(host: Host, path: str) -> str:
    """The log of a container that has ended.

    containerd copies the output in a thread of its own, and may report the exit before the last lines are in
    the file: they are there once it has some and no longer grows.
    """
    looks = [""]

    def is_whole() -> bool:
        looks.append(host.read_text(path) or "")
        return looks[-1] != "" and looks[-1] == looks[-2]

    host.wait_until(is_whole, _LOG_SECONDS)
    return looks[-1]


def _remove_pods(cri: Cri, pod: cri_pods.Pod) -> None:
    for sandbox in cri_pods.sandboxes(cri, pod.label):
        cri_pods.remove_sandbox(cri, sandbox)


@dataclass(frozen=True)
class _Images:
    """Imports images, and removes them when `cleanup` closes."""

    host: Host
    engine: CriEngine
    progress: Progress
    cleanup: ExitStack
    tag: str

    def make(self) -> str:
        """An image from this node's files."""
        with self.progress.step("make an image from this node's own files"):
            by_handler = not self.engine.way.devices
            reference, archive = verification_image(self.files, self.names, by_handler=by_handler)
            self.load(reference, archive)
        return reference

    def stand_in(self, reference: str) -> None:
        """A program that sleeps, if the sandbox image is missing. A digest can't be substituted."""
        if not reference or "@" in reference or cri_pods.has_image(self.engine.cri, reference):
            return
        self.progress.info(
            f"the sandbox image {reference} is missing: gpunode uses a temporary replacement for this run"
        )
        self.remove_at_end(f"{STAND_IN}:{self.tag}")
        self.load(reference, pause_image(self.files, reference, self.names))

    @cached_property
    def files(self) -> HostFiles:
        """This node's files, collected once for both images."""
        return assemble(self.host)

    @cached_property
    def names(self) -> Names:
        """The names and labels that mark both images as this run's."""
        return Names(self.tag, labels(self.host))

    def load(self, reference: str, archive: bytes) -> None:
        """Import and wait until the CRI, which may be notified by an event, has it."""
        self.remove_at_end(reference)
        log = f"journalctl -u {self.engine.way.reading.option} -n 50"
        try:
            self.engine.load_image(archive)
        except DaemonError as error:
            message = f"{self.engine.name} can't be given an image: {error.message}"
            raise DaemonError(message, hint=log) from error
        seen = partial(cri_pods.has_image, self.engine.cri, reference)
        if not self.host.wait_until(seen, _SEEN_SECONDS):
            raise DaemonError(
                f"{self.engine.name} was given {reference} and its CRI doesn't see it", hint=log
            )

    def remove_at_end(self, reference: str) -> None:
        """Remove a name at the end and, if it was the last one, the image."""
        remove = partial(self.engine.remove_image, reference)
        self.cleanup.callback(clean_up, self.progress, reference, remove)


# Run a program through containerd's CRI: ctr imports the images.

_IMPORT_SECONDS = 120.0
_CLIENTS = {"microk8s": ("/snap/bin/microk8s.ctr",)}  # others have it as their own subcommand


def run_on_containerd(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """See `runtime.verify.run_program`."""
    start = host.monotonic()
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
        snapshotter = as_text(dig(status.config, "containerd", "snapshotter"))
        ctr = _Ctr(host, _client(host, daemon), socket, snapshotter)
        # runc refuses a cgroup that is no slice where systemd makes the cgroups
        systemd = status.systemd_cgroup(way.handler or status.default_handler)
        engine = CriEngine(
            cri,
            way,
            pause=_pause_name(host, status, daemon),
            cgroup_parent="system.slice" if systemd else "",
            load_image=ctr.load_image,
            remove_image=ctr.remove_image,
            pull=f"{' '.join(ctr.client)} -n k8s.io images pull {{image}}",
        )
        return run_on(host, engine, request, progress, start)


def _client(host: Host, daemon: Daemon | None) -> tuple[str, ...]:
    """The command for ctr: the one beside the daemon, else the node's, else the distribution's."""
    beside = (daemon.binary or "").rpartition("/")[0] if daemon else ""
    manager = daemon.manager if daemon else ""
    own = _CLIENTS.get(manager, (manager, "ctr"))
    candidates = ((f"{beside}/ctr",), ("ctr",), own) if beside else (("ctr",), own)
    available = (client for client in candidates if client[0] and host.which(client[0]) is not None)
    return next(available, ("ctr",))


def _reading(cri: Cri, status: CriStatus, manager: str) -> CdiReading:
    """containerd 1.6 reports nothing of CDI; 1.7 to 2.2 have a switch, which later ones may omit."""
    enabled = status.config.get("enableCDI")
    version = parse_version(cri.version()[1])
    switch = enabled if isinstance(enabled, bool) else None
    return CdiReading("containerd", version, switch, _directories(status.config.get("cdiSpecDirs")), manager)


def _pause_name(host: Host, status: CriStatus, daemon: Daemon | None) -> str:
    """The sandbox image's name: containerd 1.x has it in its status, 2.x only in its configuration."""
    name = as_text(status.config.get("sandboxImage"))
    if name or daemon is None or daemon.binary is None:
        return name
    done = host.run((daemon.binary, "--config", daemon.config_path, "config", "dump"))
    try:
        tree: Any = toml(done.stdout) if done.ok else {}
    except ValueError:
        return ""
    return as_text(dig(tree, "plugins", "io.containerd.cri.v1.images", "pinned_images", "sandbox"))


@dataclass(frozen=True)
class _Ctr:
    """containerd's own client, in the namespace of the CRI."""

    host: Host
    client: tuple[str, ...]
    socket: str
    snapshotter: str

    def load_image(self, archive: bytes) -> None:
        """Import an archive."""
        extra = ("--snapshotter", self.snapshotter) if self.snapshotter else ()
        self._images("import", *extra, "-", stdin=archive)

    def remove_image(self, reference: str) -> None:
        """Remove the name and, with ``--sync``, what nothing else refers to."""
        try:
            self._images("rm", "--sync", reference)
        except DaemonError as error:
            if "not found" not in error.message:
                command = f"{' '.join(self.client)} -n k8s.io images rm {reference}"
                raise DaemonError(f"{command} ({error.message})") from error

    def _images(self, *arguments: str, stdin: bytes | None = None) -> None:
        argv = (*self.client, "--address", self.socket, "--namespace", "k8s.io", "images", *arguments)
        done = self.host.run(argv, timeout=_IMPORT_SECONDS, stdin=stdin)
        if done.timed_out:
            raise DaemonError(f"it did not end within {_IMPORT_SECONDS:g} s")
        if not done.ok:
            raise DaemonError(f"ctr: {done.stderr.strip() or f'exit code {done.code}'}")


# Run a program through CRI-O's CRI: podman or skopeo, which share its storage, import the images.


def run_on_crio(host: Host, request: ContainerRequest, progress: Progress) -> ContainerOutcome:
    """See `runtime.verify.run_program`."""
    start = host.monotonic()
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
        # CRI-O lists its handlers in the status from 1.31 on
        handlers = status.handlers or settings.handlers
        way = choose(host, request.runtime_name, request.cdi, handlers, reading)
        storage = _storage(host, settings)
        if storage is None and not request.image:
            raise PreconditionError(
                "CRI-O can't import an image by itself, and neither podman nor skopeo is installed",
                hint="apt install skopeo, or name an image that CRI-O has:"
                " gpunode verify --on crio --image REF",
            )
        importer = storage or _Skopeo(host, "", "")
        engine = CriEngine(
            cri,
            way,
            # without an importer a missing one can't be substituted; CRI-O then pulls it
            pause=settings.pause if storage else "",
            cgroup_parent="",  # CRI-O has a parent of its own for either cgroup manager
            load_image=importer.load_image,
            remove_image=importer.remove_image,
            pull="crictl pull {image}",
        )
        return run_on(host, engine, request, progress, start)


@dataclass(frozen=True)
class _Settings:
    """The part of CRI-O's configuration that a run needs; its defaults if it isn't reported."""

    handlers: tuple[str, ...] | None = None
    directories: tuple[str, ...] = DIRECTORIES
    pause: str = ""
    root: str = ""
    runroot: str = ""
    driver: str = ""


def _settings(host: Host, socket: str, daemon: Daemon | None) -> _Settings:
    """The running daemon's settings; those of its files if it doesn't answer that query."""
    try:
        config = running_crio(host, socket)
    except DaemonError:
        return _from_files(host, daemon)
    return _Settings(
        tuple(config.handlers) or None,
        _directories(config.setting("runtime", "cdi_spec_dirs")),
        as_text(config.setting("image", "pause_image")),
        as_text(config.setting("root")),
        as_text(config.setting("runroot")),
        as_text(config.setting("storage_driver")),
    )


def _from_files(host: Host, daemon: Daemon | None) -> _Settings:
    if daemon is None:
        return _Settings()
    try:
        config = load_crio(host, daemon.config_path, drop_in_directory(daemon))
    except GpunodeError:
        return _Settings()  # configure-runtime reports errors in a file; here only defaults depend on it
    handlers = dict.fromkeys((compiled_default(daemon.version), *config.handlers))
    directories = _directories(config.setting("runtime", "cdi_spec_dirs"))
    return _Settings(tuple(handlers), directories, as_text(config.setting("image", "pause_image")))


@dataclass(frozen=True)
class _Skopeo:
    """One skopeo, and CRI-O's containers-storage as it names that; the default one for an empty `place`."""

    host: Host
    binary: str
    place: str

    def load_image(self, archive: bytes) -> None:
        """Import an archive under each of its names."""
        with self.host.temporary_directory() as directory:
            path = f"{directory}/image.tar"
            self.host.write_atomic(path, archive, mode=0o600)
            for name in _names_of(archive):
                target = f"containers-storage:{self.place}{name}"
                argv = (self.binary, "--insecure-policy", "copy", f"docker-archive:{path}:{name}", target)
                done = self.host.run(argv, timeout=_IMPORT_SECONDS)
                if not done.ok:
                    raise DaemonError(done.stderr.strip() or f"exit code {done.code}")

    def remove_image(self, reference: str) -> None:
        """Remove a name."""
        done = self.host.run((self.binary, "delete", f"containers-storage:{self.place}{reference}"))
        if (
            not done.ok
            and "does not resolve to an image" not in done.stderr
            and "not known" not in done.stderr
        ):
            raise DaemonError(done.stderr.strip())


def _storage(host: Host, settings: _Settings) -> Podman | _Skopeo | None:
    """What can import images into CRI-O's storage on this node: podman, else skopeo; None if none can."""
    directories = (("--root", settings.root), ("--runroot", settings.runroot))
    options = [part for name, value in directories if value for part in (name, value)]
    options += ["--storage-driver", settings.driver] if settings.driver else []
    podman = host.which("podman")
    if podman is not None:
        return Podman(host, podman, tuple(options))
    skopeo = host.which("skopeo")
    if skopeo is None:
        return None
    whole = settings.driver and settings.root and settings.runroot
    place = f"[{settings.driver}@{settings.root}+{settings.runroot}]" if whole else ""
    return _Skopeo(host, skopeo, place)


def _names_of(archive: bytes) -> tuple[str, ...]:
    """The names in an archive made by gpunode."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile("manifest.json")
        manifest = json.loads(member.read()) if member else []
    return tuple(name for image in manifest for name in image["RepoTags"])


def _directories(value: Any) -> tuple[str, ...]:
    return tuple(filter(None, as_strings(value))) or DIRECTORIES
