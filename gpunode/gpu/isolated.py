"""Asking NVML in a child process: on a sick GPU it hangs for minutes or takes the process down."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError
from gpunode.gpu.child import module_argv, run_module, signal_name
from gpunode.gpu.model import Inventory, Topology, inventory_from_json, topology_from_json
from gpunode.host import RECORDING, Completed, Host

if TYPE_CHECKING:
    from gpunode.gpu.condition import Condition


_ASKING = "asking "


@dataclass(frozen=True)
class NvmlProbe:
    """What NVML said: the inventory, or why there is none.

    `code` is NVML's return code, None if NVML didn't get to say one: then it hung (`timed_out`) or the child
    crashed, which `message` tells. `seconds` is how long it took. `topology` and `conditions` are there if
    they were asked for. NVML may hang or crash over a condition alone: `untold` says so, and for which GPU;
    what was told before stays. `asked` is false for a recorded machine of whose NVML nothing was recorded.
    """

    inventory: Inventory | None
    code: int | None = None
    message: str = ""
    timed_out: bool = False
    seconds: float = 0.0
    topology: Topology | None = None
    conditions: tuple[Condition, ...] = ()
    untold: str = ""
    asked: bool = True


def probe(
    host: Host,
    timeout: float = 15.0,
    topology: bool = False,
    library: str = "",
    *,
    condition: bool = False,
    root: str = "",
    started: Callable[[], None] | None = None,
) -> NvmlProbe:
    """The inventory of this node, within `timeout` seconds; never raises for NVML's failure.

    With persistence mode off, eight GPUs may well take ten seconds. With `topology` NVML is also asked how
    they hang together, with `condition` how each of them is. `library` is where NVML is loaded from, if not
    from where the dynamic loader finds it; `root` is the root directory of a driver container, which the
    child then enters. `started` is called while NVML has its turn, or before.
    `ConfigError` for a malformed recording.
    """
    if not host.live:
        if started is not None:
            started()
        return _recorded(host)
    start = host.monotonic()
    words = (
        *(("--topology",) if topology else ()),
        *(("--library", library) if library else ()),
        *(("--root", root) if root else ()),
    )
    if condition:  # what was told before a hang counts: not one answer, but lines
        if started is not None:
            started()
        done = host.run(module_argv("gpunode.gpu.probe", "--condition", *words), timeout=timeout)
    else:
        done = run_module(host, "gpunode.gpu.probe", *words, timeout=timeout, started=started)
    found = _read(done, timeout, host.monotonic() - start, condition)
    _heard(host, done, found)
    return found


def _heard(host: Host, done: Completed, found: NvmlProbe) -> None:
    """The child's own words, in a recording's form."""
    if found.inventory is None:
        if found.timed_out:
            host.heard("nvml", "timeout", True)
        elif found.code is not None:
            host.heard("nvml", "error", {"code": found.code, "message": found.message})
        host.heard("nvml", "problem", found.message)
        return
    first, _, rest = done.stdout.partition("\n")
    for name, value in json.loads(first).items():
        host.heard("nvml", name, value)
    lines = [json.loads(line) for line in rest.split("\n")[:-1]]
    host.heard("nvml", "conditions", {str(index): value for index, value in lines})
    if found.untold:
        host.heard("nvml", "problem", found.untold.rpartition(": ")[0])


def _read(done: Completed, timeout: float, seconds: float, condition: bool) -> NvmlProbe:
    problem = ""
    if done.timed_out:
        problem = f"NVML did not answer within {timeout:g} s"
    elif done.code < 0:
        problem = f"NVML crashed the process that asked it ({signal_name(done.code)})"
    if problem:
        problem += _unanswered(done.stderr)
    first, _, rest = done.stdout.partition("\n")
    if problem and not (condition and done.stdout.count("\n")):
        return NvmlProbe(None, None, problem, done.timed_out, seconds)
    try:
        answer = json.loads(first)
        if condition:
            answer["conditions"] = dict(json.loads(line) for line in rest.split("\n")[:-1])
        return _answer(answer, seconds, problem)
    except (ValueError, KeyError, TypeError, AttributeError):
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith(_ASKING)]
        last = (lines or [f"exit code {done.code}"])[-1]
        return NvmlProbe(None, None, f"the NVML probe gave no usable answer: {last}", seconds=seconds)


def _unanswered(stderr: str) -> str:
    """The question that the child named last, in parentheses."""
    lines = [line for line in stderr.splitlines() if line.startswith(_ASKING)]
    return f" ({lines[-1].removeprefix(_ASKING)})" if lines else ""


def _answer(answer: dict[str, Any], seconds: float = 0.0, problem: str = "") -> NvmlProbe:
    error = answer.get("error")
    if error is not None:
        return NvmlProbe(None, int(error["code"]), str(error.get("message", "")), seconds=seconds)
    inventory = inventory_from_json(answer["inventory"])
    links = topology_from_json(answer["topology"]) if "topology" in answer else None
    conditions, untold = _conditions(answer, inventory, problem) if "conditions" in answer else ((), "")
    return NvmlProbe(inventory, seconds=seconds, topology=links, conditions=conditions, untold=untold)


def _conditions(
    answer: dict[str, Any], inventory: Inventory, problem: str
) -> tuple[tuple[Condition, ...], str]:
    """What was told, and the first GPU of which NVML didn't tell any more."""
    from gpunode.gpu.condition import conditions_from_json

    told = conditions_from_json(answer["conditions"], inventory)
    left = sorted({gpu.index for gpu in inventory.gpus} - {one.index for one in told})
    if not problem:
        return told, ""
    return (
        told,
        f"{problem}: the condition of GPU {left[0]}" if left else f"{problem}: the clocks of the GPUs",
    )


_NOT_RECORDED = NvmlProbe(None, None, "nothing was recorded of this machine's NVML", asked=False)


def _recorded(host: Host) -> NvmlProbe:
    recorded = host.recording.get("nvml")
    if not recorded:
        return _NOT_RECORDED
    try:
        if recorded.get("timeout"):
            return NvmlProbe(None, None, "NVML did not answer", timed_out=True)
        problem = str(recorded.get("problem", ""))
        if problem and not {"error", "inventory"} & set(recorded):
            return NvmlProbe(None, None, problem)
        if not {"error", "inventory"} & set(recorded):
            return _NOT_RECORDED
        return _answer(recorded, problem=problem)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{RECORDING}: the section nvml is malformed ({error!r})", hint="see docs/recorded-machines.md"
        ) from error
