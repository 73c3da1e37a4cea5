"""Where labels go: a feature file, a NodeFeature object, the Node itself. None writes what is so already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from gpunode.host import Host
from gpunode.plugin.config.label_options import OUTPUT_FILE
from gpunode.plugin.settings import LabelSettings, Settings
from gpunode.result import Change, Progress

if TYPE_CHECKING:
    from gpunode.kubernetes.api import Cluster


class Sink(Protocol):
    """One place. `GpunodeError` says why it can't be had."""

    def put(self, labels: Mapping[str, str], dry_run: bool) -> Change:
        """Make these the labels there, or tell what that would change."""


def chosen(settings: LabelSettings) -> tuple[str, ...]:
    """Names of the sinks: those that were asked for, else what other options amount to, else stdout."""
    if settings.to:
        return settings.to
    given = (("node-feature", settings.use_node_feature_api), ("file", bool(settings.output_file)))
    return tuple(name for name, wanted in given if wanted) or ("stdout",)


def make_sinks(host: Host, settings: Settings, progress: Progress) -> tuple[Sink, ...]:
    """The sinks beside stdout; nothing is read or asked yet."""
    wanted, names = settings.labels, chosen(settings.labels)
    made: list[Sink] = []
    if "file" in names:
        from gpunode.plugin.labels.sinks.file import FeatureFile

        made.append(FeatureFile(host, wanted.output_file or OUTPUT_FILE))
    connect = _connector(host, wanted)
    if "node-feature" in names:
        from gpunode.plugin.labels.sinks.node_feature import NodeFeature

        made.append(NodeFeature(host, connect, progress, wanted, settings.vendor))
    if "node" in names:
        from gpunode.plugin.labels.sinks.node import NodeLabels

        made.append(NodeLabels(host, connect, progress, wanted, settings.vendor))
    return tuple(made)


def _connector(host: Host, settings: LabelSettings) -> Callable[[], Cluster]:
    """Connects once, when it is first needed: a token that ages is read again for each request."""
    found: list[Cluster] = []

    def connect() -> Cluster:
        import sys

        if not found:
            from gpunode.kubernetes.access import Access, connect

            if (
                sys.modules.get("ssl", sys) is None
            ):  # light.py keeps TLS out of services that speak to no server
                del sys.modules["ssl"]
            found.append(connect(host, Access(settings.kubeconfig, settings.kube_context, settings.server)))
        return found[0]

    return connect


def lines(labels: Mapping[str, str]) -> str:
    """``key=value``, a line each, sorted: what NFD reads, and people."""
    return "".join(f"{key}={value}\n" for key, value in sorted(labels.items()))


def change(where: str, before: Mapping[str, str] | None, after: Mapping[str, str]) -> Change:
    """What becomes of the labels there; None: there is nothing yet, and without labels nothing is made."""
    if dict(before or {}) == dict(after):
        return Change(where, "unchanged")
    from difflib import unified_diff

    old = lines(before or {}).splitlines(keepends=True)
    diff = "".join(unified_diff(old, lines(after).splitlines(keepends=True), where, where))
    return Change(where, "created" if before is None else "updated", diff)
