"""Faults that can be injected into simulated GPUs, as one JSON object per line. Pure.

``{"gpu": 3, "xid": 79}``: one key is the fault's name with its value, `gpu` an index, a UUID or ``all``, `gi`
and `ci` the MIG instance that an XID names; a script's lines also have `at`, seconds from its start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpunode.errors import ConfigError, DaemonError, GpunodeError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.host.recording import not_json

if TYPE_CHECKING:
    import socket


ALL = "all"
_MOST = 1 << 31
_LAST_SECOND = 86400.0
_LINE = 'each line is a fault such as {"gpu": 3, "xid": 79}'


@dataclass(frozen=True)
class Kind:
    """One fault. `value` is ``number``, ``layout``, ``""`` for none, or the allowed words; the first one is
    the default. `whole` faults concern the node, not a GPU."""

    help: str
    value: str | tuple[str, ...] = ""
    whole: bool = False


_RECOVERIES = (
    *("reset", "reboot", "drain-p2p", "drain-and-reset"),
    *("recover-imex", "bus-reset", "system-reboot", "none"),
)
FAULTS: Mapping[str, Kind] = {
    "xid": Kind("the driver reports this XID", "number"),
    "ecc": Kind("so many more uncorrectable ECC errors", "number"),
    "lost": Kind("the GPU falls off the bus: listed, and not readable"),
    "return": Kind("a lost GPU can be read again"),
    "unplug": Kind("the GPU isn't listed any more"),
    "plug": Kind("an unplugged GPU is back"),
    "remap": Kind("a row remapping waits for a reset, or failed", ("pending", "failed", "none")),
    "recovery": Kind("NVML's recovery action", _RECOVERIES),
    "fabric": Kind("the state of the NVLink fabric", ("in-progress", "not-started", "completed")),
    "mig": Kind("MIG mode with this layout, or off", "layout"),
    "reset": Kind("a GPU reset: fixes what a reset fixes, removes MIG instances"),
    "heal": Kind("as if nothing had ever happened to the GPU"),
    "driver": Kind("the driver is unloaded, or loaded again", ("gone", "back"), whole=True),
}


@dataclass(frozen=True)
class Fault:
    """One fault to inject. `value` is a number's digits, a word or a layout; `at` is a script's."""

    name: str
    value: str = ""
    gpu: str = ""
    gi: int | None = None
    ci: int | None = None
    at: float = 0.0

    def __str__(self) -> str:
        """A description such as: xid 79, GPU 3, GPU instance 1"""
        parts = [f"{self.name} {self.value}".strip()]
        parts += ["all GPUs" if self.gpu == ALL else f"GPU {self.gpu}"] if self.gpu else []
        parts += [f"GPU instance {self.gi}"] if self.gi is not None else []
        parts += [f"compute instance {self.ci}"] if self.ci is not None else []
        return ", ".join(parts)

    @property
    def line(self) -> str:
        """The fault as it is sent over the socket."""
        whole = {self.name: self.value or True, "gpu": self.gpu, "gi": self.gi, "ci": self.ci}
        return json.dumps({key: value for key, value in whole.items() if value not in ("", None)})


@dataclass(frozen=True)
class InjectedFault:
    """`data` of the envelope: what happened to the simulated GPUs."""

    faults: tuple[Fault, ...]


def make_fault(
    name: str, value: str = "", gpu: str = "", gi: int | None = None, ci: int | None = None, at: float = 0.0
) -> Fault:
    """Parse one fault. `UsageError` has the reason for an invalid one, and the valid values."""
    kind = FAULTS.get(name)
    if kind is None:
        raise UsageError(f"no fault is called {name!r}", hint=f"one of: {', '.join(FAULTS)}")
    number, layout = kind.value == "number", kind.value == "layout"
    sample = "79" if number else "3g.20gb/1g.5gb*4" if layout else kind.value[0] if kind.value else ""
    words = ("gpunode plugin inject", name, sample, "" if kind.whole else f"--gpu {gpu or 0}")
    hint = f"for example: {' '.join(filter(None, words))}"
    if kind.value == "" and value:
        raise UsageError(f"{name} takes no value, and {value!r} was given", hint=hint)
    if number and not (value.isdecimal() and int(value[:12]) < _MOST):
        raise UsageError(f"{name} takes a number: {kind.help}", hint=hint)
    if layout and not value:
        raise UsageError(f"{name} takes a layout such as {sample}, or off", hint=hint)
    if isinstance(kind.value, tuple):
        value = value or kind.value[0]
        if value not in kind.value:
            raise UsageError(f"{name} {value!r} is not one of {', '.join(kind.value)}", hint=hint)
    if not kind.whole and not gpu:
        raise UsageError(f"{name} happens to a GPU: which one?", hint="--gpu with an index, a UUID or all")
    return Fault(name, value, gpu, gi, ci, at)


def parse_fault(text: str) -> Fault:
    """One line. `UsageError` or `ConfigError` has the reason if it is invalid."""
    try:
        data: Any = json.loads(text)
    except RecursionError as error:
        raise ConfigError("nested too deeply", hint=_LINE) from error
    except ValueError as error:
        raise ConfigError(not_json(text, error), hint=_LINE) from error
    if not isinstance(data, dict):
        raise ConfigError("not a JSON object", hint=_LINE)
    names = [key for key in data if key not in ("gpu", "gi", "ci", "at")]
    if len(names) != 1:
        raise ConfigError(f"one fault a line, not {len(names)}", hint=f"one of: {', '.join(FAULTS)}")
    value, at = data[names[0]], data.get("at", 0)
    if type(at) not in (int, float) or not 0 <= at <= _LAST_SECOND:
        raise ConfigError(f"at: {at!r} is not a number of seconds from 0 to {_LAST_SECOND:g}")
    for key in ("gi", "ci"):
        if type(data.get(key, 0)) is not int:
            raise ConfigError(f"{key}: {data[key]!r} is not an instance id")
    return make_fault(
        names[0],
        "" if value is True else str(value),
        str(data.get("gpu", "")),
        data.get("gi"),
        data.get("ci"),
        float(at),
    )


def read_script(host: Host, path: str) -> tuple[Fault, ...]:
    """The faults of a script. `ConfigError` if it is missing, else as `parse_script`."""
    text = host.read_text(path)
    if text is None:
        raise ConfigError(f"{path} doesn't exist", hint=f"name an existing file; {_LINE}")
    return parse_script(text, path)


def parse_script(text: str, path: str) -> tuple[Fault, ...]:
    """Every line of a script in the order of its time; empty lines and ``#`` comments are skipped."""
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                faults.append(parse_fault(line))
            except (ConfigError, UsageError) as error:
                raise ConfigError(f"{path}:{number}: {error.message}", hint=error.hint) from error
    return tuple(sorted(faults, key=lambda fault: fault.at))


# Protocol of a running simulated plugin: a unix socket, one JSON line for each fault, one for each answer.

_LONGEST = 4096
_CLIENT_SECONDS = 1.0
_ANSWER_SECONDS = 10.0


def socket_path(state_dir: str) -> str:
    """The socket on which a simulated plugin listens for faults."""
    return f"{state_dir.rstrip('/')}/simulated.sock"


class FaultServer:
    """The server's end, for one thread. `apply` injects a fault."""

    def __init__(self, host: Host, state_dir: str, apply: Callable[[Fault], None]) -> None:
        self._host = host
        self._apply = apply
        self.path = socket_path(state_dir)
        host.make_dirs(state_dir, 0o755)
        try:
            self._listening = host.listen_unix(self.path)
        except PreconditionError as error:
            error.hint = error.hint.replace("another directory", "another --state-dir")
            raise

    def serve(self, seconds: float) -> None:
        """Wait at most this long for a client, and execute all its requests."""
        self._listening.settimeout(seconds)
        try:
            client, _ = self._listening.accept()
        except TimeoutError:
            return
        with client:
            client.settimeout(_CLIENT_SECONDS)
            try:
                self._answer_all(client)
            except OSError:
                return  # the client is gone, or sends nothing: continue with the next one

    def _answer_all(self, client: socket.socket) -> None:
        with client.makefile("rwb") as lines:
            while line := lines.readline(_LONGEST):
                lines.write(json.dumps(self._answer(line)).encode() + b"\n")
                lines.flush()

    def _answer(self, line: bytes) -> dict[str, str]:
        try:
            self._apply(parse_fault(line.decode("utf-8", "replace")))
        except GpunodeError as error:
            return {"error": error.message, "hint": error.hint}
        return {}

    def close(self) -> None:
        self._listening.close()
        self._host.remove(self.path)


class Client:
    """The client's end. `PreconditionError` if no simulated plugin listens there."""

    def __init__(self, host: Host, state_dir: str) -> None:
        path = socket_path(state_dir)
        try:
            self._connection = host.connect_unix(path, _ANSWER_SECONDS)
        except DaemonError as error:
            raise PreconditionError(
                f"no simulated plugin accepts faults: {error.message}",
                hint="start one with: gpunode plugin serve --simulate h100:8; with the same --state-dir",
            ) from error
        self._lines = self._connection.makefile("rwb")

    def send(self, fault: Fault) -> None:
        """Inject it; return when it has happened. `DaemonError` with the plugin's message if it refuses."""
        try:
            self._lines.write(fault.line.encode() + b"\n")
            self._lines.flush()
            answer: Any = json.loads(self._lines.readline(_LONGEST) or b"{}")
        except (OSError, ValueError) as error:
            raise DaemonError(f"the simulated plugin did not answer: {error}") from error
        if answer.get("error"):
            raise DaemonError(str(answer["error"]), hint=str(answer.get("hint", "")), code="refused")

    def close(self) -> None:
        self._lines.close()
        self._connection.close()
