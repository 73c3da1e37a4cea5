"""The container engines and Kubernetes distributions that gpunode knows, for the packages that need them."""

from __future__ import annotations

from typing import NamedTuple


class ContainerEngine(NamedTuple):
    """One engine. Its key in `ENGINES` is its name for ``--runtime`` and ``--on``, and its checks' layer.

    `title` is its name in text, `program` that of its daemon or else its command. `units` are the systemd
    units that start the daemon, the usual one first; () for an engine without a daemon, which no kubelet can
    use and for which nothing is restarted. `cdi` is the first release with CDI devices, as in
    tables/cdi_versions.json. `default_handler` runs a container that names no handler if no file sets one;
    empty if that depends on the release or on installed programs. `config` is how the name of its file ends,
    by which ``--config`` alone selects it; empty for fixed files. `drop_ins` is whether ``--drop-in-config``
    can choose a file of it. `reloads` is whether a reload makes its files effective. `asked` is whether a dry
    run queries the daemon even where files change: the answer decides between reload and restart, and so
    whether running containers stop. Other engines restart in any case, and a query takes time. `on_path` is
    whether it finds a runtime's program by a bare name.
    """

    title: str
    program: str
    units: tuple[str, ...]
    cdi: tuple[int, ...]
    default_handler: str
    config: str = ""
    drop_ins: bool = False
    reloads: bool = False
    asked: bool = False
    on_path: bool = False

    @property
    def has_daemon(self) -> bool:
        """Whether a daemon runs its containers."""
        return bool(self.units)


ENGINES = {
    "docker": ContainerEngine(
        "Docker",
        "dockerd",
        ("docker.service",),
        (25,),
        "runc",
        config=".json",
        reloads=True,
        asked=True,
        on_path=True,
    ),
    "containerd": ContainerEngine(
        "containerd", "containerd", ("containerd.service",), (1, 7), "runc", config=".toml", drop_ins=True
    ),
    "crio": ContainerEngine(
        "CRI-O",
        "crio",
        ("crio.service", "cri-o.service"),
        (1, 24),
        "",
        config="crio.conf",
        drop_ins=True,
        asked=True,
    ),
    "podman": ContainerEngine("podman", "podman", (), (4, 1), ""),
}
DAEMONS = {name: engine for name, engine in ENGINES.items() if engine.has_daemon}


class Distribution(NamedTuple):
    """A Kubernetes distribution that runs a containerd of its own; its key in `DISTRIBUTIONS` is its name for
    ``--runtime`` and ``--on``.

    `units` are the systemd units that start it. `directory` is a part of the path of its containerd's file.
    """

    units: tuple[str, ...]
    directory: str


DISTRIBUTIONS = {
    "k3s": Distribution(("k3s.service", "k3s-agent.service"), "/rancher/k3s/"),
    "rke2": Distribution(("rke2-server.service", "rke2-agent.service"), "/rancher/rke2/"),
    "k0s": Distribution(("k0sworker.service", "k0scontroller.service"), "/k0s/"),
    "microk8s": Distribution(("snap.microk8s.daemon-containerd.service",), "/snap/microk8s/"),
}
