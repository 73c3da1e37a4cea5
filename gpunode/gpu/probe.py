"""The inventory and the condition of the GPUs, from NVML in a child process with a time limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from gpunode.errors import ConfigError
from gpunode.gpu.child import ChildFailure, answer, start, unusable
from gpunode.gpu.library_paths import nvml_options
from gpunode.gpu.model import Inventory, inventory_from_json
from gpunode.host import Host
from gpunode.host.recording import RECORDING

if TYPE_CHECKING:
    from gpunode.gpu.nvml_health import Condition


class NvmlProbe(NamedTuple):
    """NVML's report: the inventory, or why there is none.

    `code` is NVML's return code, None if NVML returned none: then it hung (`timed_out`) or crashed the child;
    `message` says which. `seconds` is the duration. `conditions` exist if they were requested. NVML may hang
    or crash during a query for a condition alone: `untold` says so, and for which GPU; earlier answers are
    kept. `asked` is false for a recorded machine without a recorded answer of NVML.
    """

    inventory: Inventory | None
    code: int | None = None
    message: str = ""
    timed_out: bool = False
    seconds: float = 0.0
    conditions: tuple[Condition, ...] = ()
    untold: str = ""
    asked: bool = True


def probe(
    host: Host, timeout: float = 15.0, library: str = "", *, condition: bool = False, root: str = ""
) -> NvmlProbe:
    """The inventory of this node, within `timeout` seconds; never raises for NVML's failure.

    With persistence mode off, eight GPUs may take ten seconds. With `condition` NVML is also queried for the
    condition of each. `library` is NVML's path, if not the one that the dynamic loader finds; `root` is the
    root directory of a driver container, which the child then enters. `ConfigError` for a malformed
    recording.
    """
    if not host.live:
        return _recorded(host)
    begin = host.monotonic()
    failure: ChildFailure | None = None
    answers: dict[str, Any] = {}
    try:
        _collect(host, begin + timeout, timeout, nvml_options(host, library, root), condition, answers)
    except ChildFailure as error:
        failure = error
    seconds = host.monotonic() - begin
    if failure is not None and "inventory" not in answers:
        result = NvmlProbe(None, None, str(failure), failure.timed_out, seconds)
    else:
        try:
            result = _answer(answers, seconds, str(failure or ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            result = NvmlProbe(None, None, unusable(repr(error)), seconds=seconds)
    if result.inventory is None and result.code is None:
        if result.timed_out:
            host.heard("nvml", "timeout", True)
        host.heard("nvml", "problem", result.message)
        return result
    for name, value in answers.items():
        host.heard("nvml", name, value)
    if result.inventory is None or failure is not None:
        host.heard("nvml", "problem", str(failure or result.message))
    return result


def _collect(
    host: Host,
    deadline: float,
    timeout: float,
    options: dict[str, str],
    condition: bool,
    answers: dict[str, Any],
) -> None:
    """Fill `answers` as a recording has them: error, or inventory and conditions by index."""
    child = start(host, "gpunode.gpu.nvml_health", {**options, "conditions": condition})
    try:
        answers |= answer(child, deadline - host.monotonic(), limit=timeout)
        if "error" in answers or not condition:
            return
        answers["conditions"] = {}
        while "done" not in (document := answer(child, deadline - host.monotonic(), limit=timeout)):
            if "error" in document:
                raise ChildFailure(str(document["error"]))
            condition_of = document.get("condition", {})
            answers["conditions"][str(condition_of.get("index"))] = condition_of
    finally:
        child.end()


def _answer(answers: dict[str, Any], seconds: float = 0.0, problem: str = "") -> NvmlProbe:
    error = answers.get("error")
    if error is not None:
        return NvmlProbe(None, int(error["code"]), str(error.get("message", "")), seconds=seconds)
    inventory = inventory_from_json(answers["inventory"])
    conditions, untold = _conditions(answers, inventory, problem) if "conditions" in answers else ((), "")
    return NvmlProbe(inventory, seconds=seconds, conditions=conditions, untold=untold)


def _conditions(
    answers: dict[str, Any], inventory: Inventory, problem: str
) -> tuple[tuple[Condition, ...], str]:
    """The conditions that NVML returned, and why the next one is missing."""
    from gpunode.gpu.nvml_health import conditions_from_json

    conditions = conditions_from_json(answers["conditions"], inventory)
    left = sorted({gpu.index for gpu in inventory.gpus} - {condition.index for condition in conditions})
    if not problem:
        return conditions, ""
    return (
        conditions,
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
        if recorded.keys().isdisjoint(("error", "inventory")):
            return NvmlProbe(None, None, problem) if problem else _NOT_RECORDED
        return _answer(recorded, problem=problem)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{RECORDING}: the section nvml is malformed ({error!r})", hint="see docs/recorded-machines.md"
        ) from error
