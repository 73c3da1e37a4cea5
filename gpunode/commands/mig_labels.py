"""What `mig apply` tells the cluster: the Node's labels, on the way and at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.mig_layout import manager
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.kubernetes.access import Access
from gpunode.mig import node_labels
from gpunode.mig.node_labels import FAILED, PENDING, NodeLabels
from gpunode.result import Progress


class MigLabels:
    """The labels of one run. Without `on` nobody is asked and nobody is told."""

    def __init__(self, host: Host, access: Access, node: str, progress: Progress, on: bool) -> None:
        self._host, self._progress = host, progress
        self._access, self._node, self._on = access, node, on
        self._labels: NodeLabels | None = None
        self._label = ""
        self._told = False

    def asked(self) -> str:
        """The configuration that the Node asks for, if any."""
        if not self._on:
            return ""
        self._label = self._connected().asked(self._host, self._progress)
        return self._label

    def begin(self, label: str) -> None:
        """This one it is. `UsageError` if that is no label, `PreconditionError` beside a MIG manager; what
        `access.connect` raises."""
        self._label = label
        if not self._on:
            return
        node_labels.check(label)
        other = manager(Node(self._host))
        if other:
            raise PreconditionError(
                f"{other}, acts on {node_labels.CONFIG} itself: the two would cut these GPUs at once",
                hint=f"let it do it: gpunode node label {node_labels.CONFIG}={label}",
                code="mig-keeper",
            )
        self._connected()

    @contextmanager
    def refusals(self, label: str) -> Iterator[None]:
        """What fails before anything was told changes no label, for they are still true; but where the Node
        asks for this very configuration its state becomes failed."""
        self._label = label
        try:
            yield
        except GpunodeError:
            if self._on and not self._told and self._is_asked_for():
                self.tell(FAILED, softly=True)
            raise

    def _is_asked_for(self) -> bool:
        wanted = self._label
        try:
            asked = self.asked()
        except GpunodeError:
            return False
        return bool(asked) and asked == (wanted or asked)

    def tell(self, state: str, *, softly: bool = False) -> None:
        """The labels. A server that fails stops the run only before it has changed anything."""
        if not self._on:
            return
        self._told = True
        try:
            self._connected().tell(self._host, self._progress, self._label, state)
        except GpunodeError as error:
            if state == PENDING and not softly:
                raise
            self._progress.note(f"the node's labels don't say {state}: {error.message}")

    def _connected(self) -> NodeLabels:
        if self._labels is None:
            from gpunode.kubernetes.access import connect, node_name

            cluster = connect(self._host, self._access)
            self._labels = NodeLabels(cluster, node_name(self._host, self._node)[0])
        return self._labels
