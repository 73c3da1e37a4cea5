"""`probe`, and the child that it starts, which queries NVML for the inventory and prints it as JSON.

``{"inventory": {...}}`` as `gpunode gpus -o json` has it under `data`, with ``"topology"`` beside it if the
argument --topology asks for it, or
``{"error": {"code": 18, "message": "..."}}``. ``--library PATH`` names the library to load. ``--root PATH``
names the root directory of a driver container: its libraries and its device files are used.

With --condition a line ``[INDEX, {...}]`` follows for each GPU, as soon as it is known: a GPU over which NVML
hangs or crashes doesn't take the inventory with it. Each question is named on stderr before NVML is asked:
the last line there is the one in which it hung or crashed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from gpunode.errors import ConfigError
from gpunode.gpu.child import end_with_parent, module_argv, signal_name
from gpunode.gpu.discover import discover
from gpunode.gpu.model import Inventory, Topology, inventory_from_json, topology_from_json
from gpunode.gpu.nvml import NO_PERMISSION, Nvml, NvmlError, load_bindings
from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.host.recording import RECORDING
from gpunode.output.result import plain

if TYPE_CHECKING:
    from gpunode.gpu.condition import Condition


# Asking NVML in a child process: on a sick GPU it hangs for minutes or takes the process down.

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
) -> NvmlProbe:
    """The inventory of this node, within `timeout` seconds; never raises for NVML's failure.

    With persistence mode off, eight GPUs may well take ten seconds. With `topology` NVML is also asked how
    they hang together, with `condition` how each of them is. `library` is where NVML is loaded from, if not
    from where the dynamic loader finds it; `root` is the root directory of a driver container, which the
    child then enters. `ConfigError` for a malformed recording.
    """
    if not host.live:
        return _recorded(host)
    start = host.monotonic()
    words = (
        *(("--condition",) if condition else ()),  # lines, as what comes before a hang counts
        *(("--topology",) if topology else ()),
        *(("--library", library) if library else ()),
        *(("--root", root) if root else ()),
    )
    done = host.run(module_argv("gpunode.gpu.probe", *words), timeout=timeout)
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


def main() -> int:
    """Print the inventory or NVML's error; always 0, so that anything else means a crash."""
    end_with_parent()
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answer
    try:
        _enter(_value("--root"))
        with Nvml.open(_value("--library"), _Asking) as nvml:
            inventory = discover(nvml)
            answer = {"inventory": plain(inventory)}
            if "--topology" in sys.argv[1:]:
                from gpunode.gpu.topology import read_topology

                answer["topology"] = plain(read_topology(nvml, inventory))
            _say(answer)
            if "--condition" in sys.argv[1:]:
                _say_conditions(nvml, inventory)
    except NvmlError as error:
        _say({"error": {"code": error.code, "message": error.message}})
    return 0


class _Asking:
    """Names a question on stderr; there is nothing to do when NVML has answered it."""

    def __init__(self, function: str, gpus: Sequence[int]) -> None:
        about = f" of {' and '.join(f'GPU {gpu}' for gpu in gpus)}" if gpus else ""
        self._line = f"asking {function}{about}\n".encode()

    def __enter__(self) -> None:
        os.write(sys.stderr.fileno(), self._line)

    def __exit__(self, *_: object) -> None:
        return


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _say_conditions(nvml: Nvml, inventory: Inventory) -> None:
    from gpunode.gpu.condition import read_conditions

    for condition in read_conditions(nvml, inventory):
        _say([condition.index, plain(condition)])


def _value(option: str) -> str:
    return sys.argv[sys.argv.index(option) + 1] if option in sys.argv else ""


def _enter(root: str) -> None:
    """Make a driver container's root the root of this process; no module can be imported after that."""
    if not root:
        return
    from gpunode.gpu import condition, topology  # noqa: F401 - both are needed later

    load_bindings()
    try:
        os.chroot(root)
        os.chdir("/")
    except OSError as error:
        raise NvmlError(NO_PERMISSION, f"can't enter {root}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())


# Note of the question that NVML is being asked. The child writes it, for its parent.
#
# The note is a file without a name that both processes have open. It survives the child, and unlike a line on
# stdout it costs the parent nothing while all is well.

GPU, LINKS, EVENTS = "gpu", "links", "events"
"""What is given up when a question hangs or crashes: the GPU, its links, or its events."""

_LINK_FUNCTIONS = ("nvmlDeviceGetNvLink", "nvmlDeviceGetTopology")
_EVENT_FUNCTIONS = ("nvmlEventSet", "nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes")
_RECORD_BYTES = 256
_QUESTION, _WAIT = 0, _RECORD_BYTES
_WAIT_FUNCTION = "nvmlEventSetWait"


@dataclass(frozen=True)
class NvmlQuestion:
    """An NVML function and the indices of the GPUs that it is about, none if it is about the driver."""

    function: str
    gpus: tuple[int, ...] = ()

    @property
    def part(self) -> str:
        """GPU, LINKS or EVENTS."""
        if self.function.startswith(_LINK_FUNCTIONS):
            return LINKS
        return EVENTS if self.function.startswith(_EVENT_FUNCTIONS) else GPU

    def __str__(self) -> str:
        gpus = " and ".join(f"GPU {index}" for index in self.gpus)
        return f"{self.function} of {gpus}" if gpus else self.function


class Note:
    """The child's side. `file` is the descriptor of the note, -1 if nobody reads it.

    One question is asked at a time, whatever the thread, so that the note is never ambiguous. Only the wait
    for events, which takes most of the time, has its own place in the note.
    """

    def __init__(self, file: int = -1) -> None:
        self._file = file
        self._lock = Lock()
        self._count = 0

    @contextmanager
    def asking(self, function: str, gpus: Sequence[int]) -> Iterator[None]:
        """Keep a note of the question while it is asked."""
        if self._file < 0:
            yield
            return
        waits = function == _WAIT_FUNCTION
        place = _WAIT if waits else _QUESTION
        with nullcontext() if waits else self._lock:
            self._count += not waits
            self._write(place, function, gpus)
            try:
                yield
            finally:
                self._write(place, "", ())

    def _write(self, place: int, function: str, gpus: Sequence[int]) -> None:
        record = json.dumps([self._count, function, list(gpus)])
        os.pwrite(self._file, record.encode().ljust(_RECORD_BYTES), place)


def read_note(data: bytes) -> tuple[int, NvmlQuestion | None, NvmlQuestion | None]:
    """How many questions were asked so far, the one that has no answer yet, and the wait for events.

    ValueError if the note is malformed.
    """
    return *_record(data[:_RECORD_BYTES]), _record(data[_WAIT:])[1]


def _record(data: bytes) -> tuple[int, NvmlQuestion | None]:
    text = data.rstrip(b" \0")
    if not text:
        return 0, None
    try:
        count, function, gpus = json.loads(text)
        return int(count), NvmlQuestion(str(function), tuple(map(int, gpus))) if function else None
    except (TypeError, RecursionError) as error:
        raise ValueError(f"malformed note {text[:100]!r}") from error
