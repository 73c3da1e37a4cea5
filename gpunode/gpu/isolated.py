"""Asking NVML in a child process: on a sick GPU it hangs for minutes or takes the process down."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gpunode.errors import ConfigError
from gpunode.gpu.child import module_argv, signal_name
from gpunode.gpu.model import Inventory, Topology, inventory_from_json, topology_from_json
from gpunode.host import RECORDING, Completed, Host


@dataclass(frozen=True)
class NvmlProbe:
    """What NVML said: the inventory, or why there is none.

    `code` is NVML's return code, None if NVML didn't get to say one: then it hung (`timed_out`) or the child
    crashed, which `message` tells. `seconds` is how long it took. `topology` is there if it was asked for.
    """

    inventory: Inventory | None
    code: int | None = None
    message: str = ""
    timed_out: bool = False
    seconds: float = 0.0
    topology: Topology | None = None


def probe(host: Host, timeout: float = 15.0, topology: bool = False, library: str = "") -> NvmlProbe:
    """The inventory of this node, within `timeout` seconds; never raises for NVML's failure.

    With persistence mode off, eight GPUs may well take ten seconds. With `topology` NVML is also asked how
    they hang together. `library` is where NVML is loaded from, if not from where the dynamic loader finds it.
    `ConfigError` for a malformed recording.
    """
    if not host.live:
        return _recorded(host)
    start = host.monotonic()
    words = (*(("--topology",) if topology else ()), *(("--library", library) if library else ()))
    done = host.run(module_argv("gpunode.gpu.probe", *words), timeout=timeout)
    return _read(done, timeout, host.monotonic() - start)


def _read(done: Completed, timeout: float, seconds: float) -> NvmlProbe:
    if done.timed_out:
        message = f"NVML did not answer within {timeout:g} s"
        return NvmlProbe(None, None, message, timed_out=True, seconds=seconds)
    if done.code < 0:
        message = f"NVML crashed the process that asked it ({signal_name(done.code)})"
        return NvmlProbe(None, None, message, seconds=seconds)
    try:
        return _answer(json.loads(done.stdout), seconds)
    except (ValueError, KeyError, TypeError, AttributeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
        return NvmlProbe(None, None, f"the NVML probe gave no usable answer: {last}", seconds=seconds)


def _answer(answer: dict[str, Any], seconds: float = 0.0) -> NvmlProbe:
    error = answer.get("error")
    if error is not None:
        return NvmlProbe(None, int(error["code"]), str(error.get("message", "")), seconds=seconds)
    links = topology_from_json(answer["topology"]) if "topology" in answer else None
    return NvmlProbe(inventory_from_json(answer["inventory"]), seconds=seconds, topology=links)


def _recorded(host: Host) -> NvmlProbe:
    recorded = host.recording.get("nvml")
    if not recorded:
        return NvmlProbe(None, None, "nothing was recorded of this machine's NVML")
    try:
        if recorded.get("timeout"):
            return NvmlProbe(None, None, "NVML did not answer", timed_out=True)
        return _answer(recorded)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{RECORDING}: the section nvml is malformed ({error!r})", hint="see docs/recorded-machines.md"
        ) from error
