"""The inventory and the condition of the GPUs, from NVML in a child process with a time limit."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from gpunode.gpu.child import ChildFailure, answer, start, unusable
from gpunode.gpu.library_paths import nvml_options
from gpunode.gpu.model import Inventory, inventory_from_json
from gpunode.host import Host
from gpunode.host.recording import naming_the_key
from gpunode.output.typed import from_plain

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


class _Failure(NamedTuple):
    code: int
    message: str = ""


class _Answers(NamedTuple):
    """What children reported, and what a recording has under `nvml`."""

    inventory: Mapping[str, Any] | None = None
    conditions: Mapping[str, Any] | None = None
    error: _Failure | None = None
    cuda: Mapping[str, Any] = MappingProxyType({})
    timeout: bool = False
    problem: str = ""


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
            result = _answer({**answers, "problem": str(failure or "")}, seconds)
        except ValueError as error:
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


_NOT_RECORDED = NvmlProbe(None, None, "nothing was recorded of this machine's NVML", asked=False)


def _recorded(host: Host) -> NvmlProbe:
    with naming_the_key():
        return _answer(host.recording.get("nvml", {}), recorded=True)


def _answer(data: Mapping[str, Any], seconds: float = 0.0, *, recorded: bool = False) -> NvmlProbe:
    """`PlainError` for a value of a wrong type, which is unknown in a condition that wasn't `recorded`."""
    answers = from_plain(_Answers, data, where="nvml")
    if answers.timeout:
        return NvmlProbe(None, None, "NVML did not answer", timed_out=True)
    if answers.error is not None:
        return NvmlProbe(None, answers.error.code, answers.error.message, seconds=seconds)
    if recorded and answers.inventory is None:
        return NvmlProbe(None, None, answers.problem) if answers.problem else _NOT_RECORDED
    inventory = inventory_from_json(answers.inventory, "nvml.inventory")
    if answers.conditions is None:
        return NvmlProbe(inventory, seconds=seconds)
    from gpunode.gpu.nvml_health import conditions_from_json

    conditions = conditions_from_json(answers.conditions, inventory, lenient=not recorded)
    untold = _untold(inventory, conditions, answers.problem)
    return NvmlProbe(inventory, seconds=seconds, conditions=conditions, untold=untold)


def _untold(inventory: Inventory, conditions: tuple[Condition, ...], problem: str) -> str:
    """Why the next condition is missing."""
    left = sorted({gpu.index for gpu in inventory.gpus} - {condition.index for condition in conditions})
    if not problem:
        return ""
    return f"{problem}: the condition of GPU {left[0]}" if left else f"{problem}: the clocks of the GPUs"
