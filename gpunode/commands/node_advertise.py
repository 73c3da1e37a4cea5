"""`gpunode node advertise`: an extended resource on a node that no device plugin serves.

Facts: Kubernetes, Advertise Extended Resources for a Node. The kubelet keeps an entry of capacity that it
doesn't know and copies it to allocatable when it next looks; a registered device plugin overwrites it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gpunode.commands.node_change import (
    KIND,
    KeyChange,
    NodeChange,
    Place,
    Target,
    blocks,
    carry_out,
    checked_key,
    place,
    told,
)
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.kubernetes.api import FIELD_MANAGER, ClusterError, Json, Patch
from gpunode.kubernetes.changes import capacity_patch, patiently, strings, whole, writer_of
from gpunode.output.result import Block, ErrorInfo, ExitCode, Progress, Result, Style, Text

AUTO = "auto"
_NO_DEVICE = (
    "no device comes with it: nobody allocates GPUs, so a container sees them only where the nvidia runtime"
    " is the engine's default or the pod's RuntimeClass, and NVIDIA_VISIBLE_DEVICES is set"
)
_RESTART = "a kubelet that registers anew may set it to 0: advertise again after it restarts"
_INTERVAL = 0.5


@dataclass(frozen=True)
class Options:
    """`count` is a number, or auto: this machine's GPUs. `remove` takes the resource away. `force`: although
    somebody else serves it. `wait`: seconds for the kubelet to make it allocatable."""

    resource: str
    count: str = AUTO
    remove: bool = False
    force: bool = False
    wait: float = 30.0
    target: Target = Target()


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Change the node's capacity and see that it becomes allocatable; kind NodeChange.

    `UsageError`, `PreconditionError` where a device plugin serves the resource, `ClusterError`. Exit 1 if it
    isn't allocatable in time.
    """
    resource = checked_resource(options.resource)
    at = place(host, options.target)
    count = None if options.remove else _count(host, options, at, progress)
    by = served(host, resource) if at.own and not options.force else ""

    def plan(node: Json) -> Patch:
        patch = capacity_patch(node, resource, count)
        if patch and not options.force:
            _refuse_served(node, resource, by)
        return patch

    done = carry_out(host, progress, at, plan, status=True)
    before, wanted = _seen(done.before, resource)[0], None if count is None else str(count)
    back = ("--remove",) if before is None else ("--count", before)
    forced = ("--force",) if options.force else ()
    undo = at.command("advertise", "--resource", resource, *back, *forced)
    data = told(at, done, [KeyChange(resource, before, wanted)], undo, status=True)
    if options.target.dry_run:
        return _result(done.before, data, resource)
    with progress.step("waiting for the kubelet") if options.wait else progress.step("reading it back"):
        try:
            node = _await(host, progress, at, resource, wanted, options.wait)
        except ClusterError as error:
            return _unseen(data, error)
        except KeyboardInterrupt:
            _take_back(host, progress, at, resource, before, data)
            raise
    return _result(node, data, resource, wanted, checked=True)


def _unseen(data: NodeChange, error: ClusterError) -> Result:
    """It was written, and then the API server failed: what there is to undo must not be lost with it."""
    said = "the capacity was written" if data.patch else "nothing was to do"
    told = ErrorInfo(error.code, f"{said}, but it couldn't be read back: {error.message}", error.hint)
    return Result(KIND, data, "fail", ExitCode.FAILED, errors=(told,), blocks=blocks(data))


def _take_back(
    host: Host, progress: Progress, at: Place, resource: str, before: str | None, data: NodeChange
) -> None:
    """Ctrl-C while the kubelet is waited for: the node is as it was, unless somebody changed it since."""
    if not data.patch:
        return
    written = data.patch[-1].get("value")
    count = None if before is None else whole(before)

    def plan(node: Json) -> Patch:
        now = _seen(node, resource)[0]
        ours = now is not None and written is not None and whole(now) == whole(str(written))
        return capacity_patch(node, resource, count) if ours or now == written else ()

    try:
        done = carry_out(host, progress, at, plan, status=True)
    except ClusterError as error:
        progress.note(f"it couldn't be taken back ({error.message}); undo it with: {data.undo}")
    else:
        progress.note("taken back" if done.patch else "somebody else has changed it since: left as it is")


def checked_resource(name: str) -> str:
    """An extended resource's name, ``domain/name``. `UsageError` for any other, and for Kubernetes' own."""
    domain = checked_key(name, "resource's name").partition("/")[0] if "/" in name else ""
    if not domain or domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
        raise UsageError(
            f"{name!r} can't be an extended resource",
            hint="it has a domain of its own: --resource nvidia.com/gpu",
        )
    return name


def _count(host: Host, options: Options, at: Place, progress: Progress) -> int:
    if options.count != AUTO:
        if not options.count.isascii() or not options.count.isdigit() or not len(options.count) < 10:
            raise UsageError(
                f"--count {options.count!r} is no number of devices",
                hint="a whole number, or auto; --remove takes the entry away",
            )
        return int(options.count)
    if not at.own:
        raise UsageError(
            f"{at.node} is another machine, whose GPUs can't be counted from here",
            hint="say how many: --count N",
        )
    if options.resource == "nvidia.com/gpu":
        return _nvidia(host, progress)
    if options.resource == "amd.com/gpu":
        from gpunode.gpu.amd import read_inventory

        return _some(sum(1 for gpu in read_inventory(host).gpus if not gpu.error))
    raise UsageError(
        f"how many {options.resource} there are can't be told by itself", hint="say how many: --count N"
    )


def _nvidia(host: Host, progress: Progress) -> int:
    """GPUs that aren't cut into MIG devices and that NVML can describe."""
    from gpunode.commands.gpus import explain_failure
    from gpunode.gpu.probe import probe

    with progress.step("asking NVML"):
        answer = probe(host)
    if answer.inventory is None:
        raise explain_failure(answer)
    return _some(sum(1 for gpu in answer.inventory.gpus if not gpu.error and not gpu.mig_enabled))


def _some(count: int) -> int:
    if not count:
        raise PreconditionError("this machine has no whole GPU to advertise", hint="see: gpunode gpus")
    return count


def served(host: Host, resource: str) -> str:
    """Who says that a device plugin of this node serves it: the kubelet, or its checkpoint; else empty."""
    from gpunode.facts.node import Node

    try:
        found = Node(host).allocatable
    except GpunodeError:
        return ""  # the node's own record of who wrote the value is asked as well
    return found.source if found is not None and resource in found.resources else ""


def _refuse_served(node: Json, resource: str, by: str) -> None:
    """`PreconditionError` where the value is a device plugin's, or may be: gpunode didn't write it."""
    hint = "see: gpunode plugin status; to overwrite what isn't ours: add --force"
    if by:
        raise PreconditionError(
            f"a device plugin serves {resource} on this node ({by}): it would overwrite the count",
            hint=hint,
            code="resource-served",
        )
    value = _seen(node, resource)[0]
    writer = writer_of(node, resource)
    if value not in (None, "0") and writer != FIELD_MANAGER:
        wrote = f"{writer} set it" if writer else "who set it isn't recorded"
        raise PreconditionError(
            f"the node has {resource}: {value} already, and {wrote}: a device plugin serves it, it seems",
            hint=hint,
            code="resource-served",
        )


def _seen(node: Json, resource: str) -> tuple[str | None, str | None]:
    """Capacity and allocatable, as numbers where they are some: 1k is 1000."""
    capacity, allocatable = (strings(node, ("status", part)) for part in ("capacity", "allocatable"))
    return _number(capacity.get(resource)), _number(allocatable.get(resource))


def _number(amount: str | None) -> str | None:
    count = None if amount is None else whole(amount)
    return amount if count is None else str(count)


def _await(
    host: Host, progress: Progress, at: Place, resource: str, wanted: str | None, seconds: float
) -> Json:
    """The node, read back until both values are as wanted, or time is up."""
    end = host.monotonic() + (seconds if math.isfinite(seconds) else 0)
    while True:
        node = patiently(host, progress, lambda: at.cluster.get_node(at.node))
        if _seen(node, resource) == (wanted, wanted) or host.monotonic() >= end:
            return node
        host.sleep(min(_INTERVAL, max(0.0, end - host.monotonic())))


def _result(
    node: Json, data: NodeChange, resource: str, wanted: str | None = None, *, checked: bool = False
) -> Result:
    capacity, allocatable = _seen(node, resource)
    data = replace(data, capacity=capacity, allocatable=allocatable)
    notes = (_NO_DEVICE, _RESTART) if data.changes and data.changes[0].after is not None else ()
    shown: tuple[Block, ...] = blocks(data)
    if not checked:
        return Result(KIND, data, messages=notes, blocks=shown)
    line = f"{resource}: capacity {capacity or 'none'}, allocatable {allocatable or 'none'}"
    if (capacity, allocatable) == (wanted, wanted):
        return Result(KIND, data, messages=notes, blocks=(*shown, Text(line, Style.GOOD)))
    if capacity != wanted:
        why = f"{data.node} has {resource}: {capacity or 'none'} again, not {wanted or 'none'}"
        error = ErrorInfo("overwritten", why, "a device plugin serves it: gpunode plugin status")
    else:
        why = f"{data.node} has {line}"
        hint = "the kubelet copies it when it next looks: is it running? wait longer with --wait SECONDS"
        error = ErrorInfo("not-allocatable", why, hint)
    return Result(KIND, data, "fail", ExitCode.FAILED, notes, (error,), (*shown, Text(line, Style.WARN)))
