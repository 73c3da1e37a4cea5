"""What `mig apply` tells the cluster: the Node's labels, on the way and at the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.mig import manager
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.kubernetes.access import Access
from gpunode.mig import node_labels
from gpunode.mig.node_labels import FAILED, PENDING, NodeLabels
from gpunode.output.result import Progress


class BesideAnother(PreconditionError):
    """A MIG manager runs on this node: the labels are its own."""

    default_code = "mig-keeper"


def label_command(host: Host, label: str, node: str = "") -> str:
    """The command by which an administrator asks for a configuration."""
    name = node or host.environ.get("NODE_NAME") or "NAME"
    return shlex.join(("kubectl", "label", "--overwrite", "node", name, f"{node_labels.CONFIG}={label}"))


def refuse_another(host: Host, label: str) -> None:
    """`BesideAnother` where one runs."""
    other = manager(Node(host))
    if other:
        raise BesideAnother(
            f"{other}, acts on {node_labels.CONFIG} itself: the two would cut these GPUs at once",
            hint=f"let it do it: {label_command(host, label)}",
        )


class MigLabels:
    """The labels of one run. Without `on` nobody is asked and nobody is told. `labels` are those to use, if
    they are known already. `told` is the state that was told last, whether or not the server took it."""

    def __init__(
        self,
        host: Host,
        access: Access,
        node: str,
        progress: Progress,
        on: bool,
        labels: NodeLabels | None = None,
    ) -> None:
        self._host, self._progress = host, progress
        self._access, self._node, self._on = access, node, on
        self._labels = labels
        self._label = ""
        self.told = ""

    def asked(self) -> str:
        """The configuration that the Node asks for, if any."""
        if not self._on:
            return ""
        self._label = self._connected().asked(self._host, self._progress)
        return self._label

    def begin(self, label: str) -> None:
        """This one it is. `UsageError` if that is no label, `BesideAnother`; what
        `access.connect` raises."""
        self._label = label
        if not self._on:
            return
        node_labels.check(label)
        refuse_another(self._host, label)
        self._connected()

    @contextmanager
    def refusals(self, label: str) -> Iterator[None]:
        """What fails before anything was told changes no label, for they are still true; but where the Node
        asks for this very configuration its state becomes failed."""
        self._label = label
        try:
            yield
        except GpunodeError as error:
            ours = self._on and not isinstance(error, BesideAnother)
            if ours and not self.told and self._is_asked_for():
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
        self.told = state
        try:
            self._connected().tell(self._host, self._progress, self._label, state)
        except GpunodeError as error:
            if state == PENDING and not softly:
                raise
            self._progress.note(f"the node's labels don't say {state}: {error.message}")

    def _connected(self) -> NodeLabels:
        if self._labels is None:
            self._labels = node_labels.connected(self._host, self._access, self._node)
        return self._labels
