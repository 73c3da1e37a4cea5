"""`gpunode node`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gpunode.commands.gpus import explain_failure
from gpunode.commands.help_page import command_group
from gpunode.commands.options import (
    ContextOption,
    DryRunOption,
    KubeconfigOption,
    NodeOption,
    ServerOption,
    refuse_both,
    resource_names,
    wait_option,
)
from gpunode.commands.session import Session, verb
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.gpu.amd import read_inventory
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.kubernetes import access, changes
from gpunode.kubernetes.access import Access, connect, node_name
from gpunode.kubernetes.api import FIELD_MANAGER, ClusterError, Json, NotFound, Patch
from gpunode.kubernetes.changes import Changed, capacity_patch, patiently, strings, whole_number, writer_of
from gpunode.output.result import Block, ErrorInfo, ExitCode, Progress, Result, Style, Text
from gpunode.plugin.config.settings import resource_name_problem

if TYPE_CHECKING:
    from gpunode.kubernetes.client import Cluster

node_app = command_group("Change this machine's Node object.")


WAIT_SECONDS = 30.0


# Change of a Node by one patch, with the undo: for `node advertise` and `setup --kubernetes`.

KIND = "NodeChange"


class NodeTarget(NamedTuple):
    """Node and cluster; an empty `node` is looked up, see `access.node_name`."""

    access: Access = Access()
    node: str = ""
    dry_run: bool = False


class KeyChange(NamedTuple):
    """One label or resource; None where it doesn't exist."""

    key: str
    before: str | None
    after: str | None


class NodeChange(NamedTuple):
    """`data` of the envelope. `request` and `patch` are what was sent, or would be; an empty patch means that
    there was nothing to change. `undo` is a command line, empty if there is nothing to undo."""

    node: str
    server: str
    source: str
    request: str
    changes: tuple[KeyChange, ...]
    patch: tuple[Mapping[str, Any], ...]
    undo: str
    dry_run: bool
    capacity: str | None = None
    allocatable: str | None = None


class NodeLocation(NamedTuple):
    """The node found from `place`, by `source`; `own` if it is this machine."""

    cluster: Cluster
    node: str
    source: str
    own: bool
    dry_run: bool

    def command(self, verb: str, *words: str) -> str:
        """A command line for the same node of the same cluster."""
        return shlex.join(("gpunode", "node", verb, "--node", self.node, *self.cluster.options, *words))


def place(host: Host, target: NodeTarget) -> NodeLocation:
    """Errors as in `access.connect` and `access.node_name`."""
    node_name(host, target.node)  # an invalid name is refused before any query
    return place_in(connect(host, target.access), host, target.node, target.dry_run)


def place_in(cluster: Cluster, host: Host, node: str, dry_run: bool) -> NodeLocation:
    """The same in a known cluster; an empty `node` is looked up."""
    name, source = node_name(host, node, cluster.node)
    own, _ = node_name(host, "", cluster.node)
    return NodeLocation(cluster, name, source, name == own, dry_run)


def carry_out(
    host: Host, progress: Progress, at: NodeLocation, plan: Callable[[Json], Patch], *, status: bool = False
) -> Changed:
    """Patch the node, or its status; with a dry run only plan. `ClusterError`, and what `plan` raises."""
    cluster = at.cluster

    def read() -> Json:
        try:
            return cluster.get("Node", at.node)
        except NotFound as error:
            error.hint = access.hint(host, cluster, at.source)
            raise

    with progress.step(f"querying {cluster.server}"):
        if at.dry_run:
            node = changes.patiently(host, progress, read)
            return Changed(node, node, plan(node))
        send = partial(cluster.patch, "Node", at.node, status=status)
        return changes.change(host, progress, read, plan, send)


def changed_node(
    at: NodeLocation, done: Changed, changes: Sequence[KeyChange], undo: str = "", *, status: bool = False
) -> Result:
    """The result of `carry_out`; kind NodeChange."""
    data = node_change(at, done, changes, undo, status=status)
    return Result(KIND, data, blocks=blocks(data))


def node_change(
    at: NodeLocation, done: Changed, changes: Sequence[KeyChange], undo: str, *, status: bool = False
) -> NodeChange:
    """`changes` and `undo` only count if a patch was needed."""
    path = f"/api/v1/nodes/{at.node}{'/status' if status else ''}"
    return NodeChange(
        node=at.node,
        server=at.cluster.server,
        source=at.cluster.source,
        request=f"PATCH {path}",
        changes=tuple(changes) if done.patch else (),
        patch=tuple(done.patch),
        undo=undo if done.patch else "",
        dry_run=at.dry_run,
    )


def blocks(data: NodeChange) -> tuple[Block, ...]:
    """For people: the result for each key; the patch itself for a dry run."""
    if not data.patch:
        return (Text(f"node {data.node} unchanged"),)
    page: list[Block] = [Text(f"node {data.node} {'(dry run)' if data.dry_run else 'changed'}", Style.GOOD)]
    page += [Text(f"  {_line(change)}") for change in data.changes]
    if data.dry_run:
        page.append(Text(f"{data.request} on {data.server}, application/json-patch+json", Style.DIM))
        lines = [json.dumps(operation) for operation in data.patch]
        ends = [*([","] * (len(lines) - 1)), "]"]
        page += [
            Text(f"{'[' if n == 0 else ' '}{line}{end}", Style.COMMAND)
            for n, (line, end) in enumerate(zip(lines, ends, strict=True))
        ]
    elif data.undo:
        page.append(Text(f"undo it with: {data.undo}", Style.DIM))
    return tuple(page)


def _line(change: KeyChange) -> str:
    if change.after is None:
        return f"- {change.key}={change.before or ''}"
    if change.before is None:
        return f"+ {change.key}={change.after}"
    return f"~ {change.key}={change.after} (was {change.before or 'empty'})"


# `gpunode node advertise`: an extended resource on a node that no device plugin serves.
#
# Facts: Kubernetes, Advertise Extended Resources for a Node. The kubelet keeps a capacity entry that it
# doesn't know and copies it to allocatable at its next sync; a registered device plugin overwrites it.

AUTO = "auto"
_NO_DEVICE = (
    "this adds no device: no plugin allocates GPUs, so a container sees them only where the nvidia runtime"
    " is the engine's default or the pod's RuntimeClass, and NVIDIA_VISIBLE_DEVICES is set"
)
_RESTART = "a kubelet that registers again may set it to 0: advertise again after it restarts"
_INTERVAL = 0.5


@verb(node_app, "advertise", "NodeChange")
def node_advertise(
    session: Session,
    resource: Annotated[
        str,
        typer.Option(
            "--resource",
            metavar="NAME",
            help="Extended resource, such as nvidia.com/gpu.",
            autocompletion=resource_names,
        ),
    ],
    count: Annotated[
        str,
        typer.Option("--count", metavar="N", help="Number of devices; auto: this machine's GPUs."),
    ] = AUTO,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the resource from the node.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a value that a device plugin or another program set.")
    ] = False,
    wait: Annotated[float, wait_option(least=0, default=WAIT_SECONDS)] = WAIT_SECONDS,
    kubeconfig: KubeconfigOption = "",
    kube_context: ContextOption = "",
    server: ServerOption = "",
    node: NodeOption = "",
    dry_run: DryRunOption = False,
) -> Result:
    """Advertise a resource without a device plugin. The scheduler counts it; containers get no GPU from it.

    gpunode node advertise --resource example.com/gpu --count 8 --dry-run
    """
    host, progress = session.host, session.progress
    _check_resource(resource)
    _check_count(count, remove=remove)
    at = place(host, NodeTarget(Access(kubeconfig, kube_context, server), node, dry_run))
    number = None if remove else _count(host, count, resource, at, progress)
    by = served(host, resource) if at.own and not force else ""

    def plan(node: Json) -> Patch:
        patch = capacity_patch(node, resource, number)
        if patch and not force:
            _refuse_served(node, resource, by)
        return patch

    done = carry_out(host, progress, at, plan, status=True)
    before, desired = _amounts(done.before, resource)[0], None if number is None else str(number)
    undo_options = ("--remove",) if before is None else ("--count", before)
    forced = ("--force",) if force else ()
    undo = at.command("advertise", "--resource", resource, *undo_options, *forced)
    data = node_change(at, done, [KeyChange(resource, before, desired)], undo, status=True)
    if dry_run:
        return _result(done.before, data, resource)
    with progress.step("waiting for the kubelet") if wait else progress.step("reading it back"):
        try:
            present = _await(host, progress, at, resource, desired, wait)
        except ClusterError as error:
            return _not_read_back(data, error)
        except KeyboardInterrupt:
            _roll_back(host, progress, at, resource, before, data)
            raise
    return _result(present, data, resource, desired, checked=True)


def _not_read_back(data: NodeChange, error: ClusterError) -> Result:
    """The patch was written, and then the API server failed: the undo command must not be lost."""
    outcome = "the capacity was written" if data.patch else "nothing had to be changed"
    info = ErrorInfo(error.code, f"{outcome}, but it couldn't be read back: {error.message}", error.hint)
    return Result(KIND, data, "fail", ExitCode.FAILED, errors=(info,), blocks=blocks(data))


def _roll_back(
    host: Host, progress: Progress, at: NodeLocation, resource: str, before: str | None, data: NodeChange
) -> None:
    """Ctrl-C during the wait for the kubelet: the node is restored, unless a client has changed it since."""
    if not data.patch:
        return
    written = data.patch[-1].get("value")
    count = None if before is None else whole_number(before)

    def plan(node: Json) -> Patch:
        now = _amounts(node, resource)[0]
        is_own = now is not None and written is not None and whole_number(now) == whole_number(str(written))
        return capacity_patch(node, resource, count) if is_own or now == written else ()

    try:
        done = carry_out(host, progress, at, plan, status=True)
    except ClusterError as error:
        progress.note(f"it couldn't be rolled back ({error.message}); undo it with: {data.undo}")
    else:
        progress.note("rolled back" if done.patch else "another client has changed it since: left unchanged")


def _check_resource(name: str) -> None:
    """`UsageError` for a name that isn't an extended resource's."""
    if "/" not in name:
        raise UsageError(f"{name!r} has no domain", hint="a resource is DOMAIN/NAME, such as nvidia.com/gpu")
    if problem := resource_name_problem(name):
        raise UsageError(
            f"{name!r} can't be an extended resource: {problem}",
            hint="it has a domain of its own: --resource nvidia.com/gpu",
        )


def _check_count(count: str, *, remove: bool) -> None:
    refuse_both(count=count != AUTO, remove=remove)
    if count != AUTO and not (count.isascii() and count.isdigit() and len(count) < 10):
        raise UsageError(
            f"--count {count!r} is not a number of devices",
            hint="a whole number, or auto; --remove takes the entry away",
        )


def _count(host: Host, count: str, resource: str, at: NodeLocation, progress: Progress) -> int:
    if count != AUTO:
        return int(count)
    if not at.own:
        raise UsageError(
            f"{at.node} is another machine: its GPUs can't be counted from here",
            hint="pass the number: --count N",
        )
    if resource == "amd.com/gpu":
        inventory = read_inventory(host)
    elif resource == "nvidia.com/gpu":
        with progress.step("querying NVML"):
            answer = probe(host)
        if answer.inventory is None:
            raise explain_failure(answer)
        inventory = answer.inventory
    else:
        raise UsageError(f"the number of {resource} can't be determined", hint="pass the number: --count N")
    whole = sum(1 for gpu in inventory.gpus if not gpu.error and not gpu.mig_enabled)
    if not whole:
        raise PreconditionError("this machine has no whole GPU to advertise", hint="see gpunode gpus")
    return whole


def served(host: Host, resource: str) -> str:
    """The source that says that a device plugin of this node serves it: the kubelet, or its checkpoint; else
    empty."""
    from gpunode.facts.node import Node

    try:
        allocatable = Node(host).allocatable
    except GpunodeError:
        return ""  # the node's own record of who wrote the value is read as well
    return allocatable.source if allocatable is not None and resource in allocatable.resources else ""


def _refuse_served(node: Json, resource: str, by: str) -> None:
    """`PreconditionError` where the value is, or may be, a device plugin's and not gpunode's."""
    hint = "see gpunode plugin status; to overwrite what isn't ours: add --force"
    if by:
        raise PreconditionError(
            f"a device plugin serves {resource} on this node ({by}): it would overwrite the count",
            hint=hint,
            code="resource-served",
        )
    value = _amounts(node, resource)[0]
    writer = writer_of(node, resource)
    if value not in (None, "0") and writer != FIELD_MANAGER:
        wrote = f"{writer} set it" if writer else "who set it isn't recorded"
        raise PreconditionError(
            f"the node has {resource}: {value} already, and {wrote}: a device plugin serves it, it seems",
            hint=hint,
            code="resource-served",
        )


def _amounts(node: Json, resource: str) -> tuple[str | None, str | None]:
    """Capacity and allocatable; quantities become numbers where possible: 1k is 1000."""
    capacity, allocatable = (strings(node, ("status", part)) for part in ("capacity", "allocatable"))
    return _number(capacity.get(resource)), _number(allocatable.get(resource))


def _number(amount: str | None) -> str | None:
    count = None if amount is None else whole_number(amount)
    return amount if count is None else str(count)


def _await(
    host: Host, progress: Progress, at: NodeLocation, resource: str, desired: str | None, seconds: float
) -> Json:
    """The node, read repeatedly until both values are as desired, or the time is up."""
    end = host.monotonic() + seconds
    while True:
        node = patiently(host, progress, lambda: at.cluster.get("Node", at.node))
        if _amounts(node, resource) == (desired, desired) or host.monotonic() >= end:
            return node
        host.sleep(min(_INTERVAL, max(0.0, end - host.monotonic())))


def _result(
    node: Json, data: NodeChange, resource: str, desired: str | None = None, *, checked: bool = False
) -> Result:
    capacity, allocatable = _amounts(node, resource)
    data = data._replace(capacity=capacity, allocatable=allocatable)
    notes = (_NO_DEVICE, _RESTART) if data.changes and data.changes[0].after is not None else ()
    page: tuple[Block, ...] = blocks(data)
    if not checked:
        return Result(KIND, data, messages=notes, blocks=page)
    line = f"{resource}: capacity {capacity or 'none'}, allocatable {allocatable or 'none'}"
    if (capacity, allocatable) == (desired, desired):
        return Result(KIND, data, messages=notes, blocks=(*page, Text(line, Style.GOOD)))
    if capacity != desired:
        message = f"{data.node} has {resource}: {capacity or 'none'} again, not {desired or 'none'}"
        error = ErrorInfo("overwritten", message, "a device plugin serves it: gpunode plugin status")
    else:
        message = f"{data.node} has {line}"
        hint = "the kubelet copies it when it next looks: is it running? wait longer with --wait DURATION"
        error = ErrorInfo("not-allocatable", message, hint)
    return Result(KIND, data, "fail", ExitCode.FAILED, notes, (error,), (*page, Text(line, Style.WARN)))
