"""Compute modes: EXCLUSIVE_PROCESS while a daemon runs, and the previous mode afterwards.

NVIDIA recommends it for MPS: then nothing but the MPS server can open the GPU, and a process that misses the
daemon fails instead of taking the GPU past its limits. The previous mode is recorded before it is changed, so
that it can be restored after a crash.

As a child process, with the options `action` and `gpus`, this module gets, sets or restores modes through
NVML: ``{"gpus": {"GPU-1": {"mode": 3}, "GPU-2": {"error": "...", "code": 4}}}``, or ``{"error": {"code": 9,
"message": "..."}}`` if NVML itself fails. A GPU that fails affects no other. Restoring changes no GPU that is
not in EXCLUSIVE_PROCESS any more: another process has set it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from gpunode.errors import DaemonError, GpunodeError
from gpunode.gpu.child import ChildFailure, Parent, answer, start
from gpunode.gpu.library_paths import nvml_options
from gpunode.gpu.nvml import NO_PERMISSION, Nvml, NvmlError
from gpunode.host import Host

DEFAULT, PROHIBITED, EXCLUSIVE_PROCESS = 0, 2, 3  # nvmlComputeMode_t
FILE = "compute-modes.json"
_SECONDS = 20.0
_HURRIED_SECONDS = 4.0  # what is left of systemd's stop timeout when a daemon had to be killed before


@dataclass(frozen=True)
class Modes:
    """Modes by UUID, and why a GPU has none."""

    modes: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


class ComputeModes:
    """The modes of one daemon's GPUs. `directory` is the daemon's; methods take seconds, and `make_exclusive`
    gives up with `DaemonError` once `stop` is set."""

    def __init__(self, host: Host, directory: str, stop: Event) -> None:
        self._host = host
        self._stop = stop
        self._path = f"{directory}/{FILE}"

    def make_exclusive(self, uuids: Sequence[str]) -> Mapping[str, str]:
        """Why, by UUID, a GPU can't be used: it couldn't be set, or its mode prohibits compute."""
        desired = self._stop.is_set
        before = self._run_child("get", uuids, _SECONDS, desired)
        usable = {uuid: mode for uuid, mode in before.modes.items() if mode != PROHIBITED}
        refused = {
            uuid: "its compute mode is PROHIBITED: nvidia-smi -i "
            f"{uuid} -c DEFAULT lets processes use it again"
            for uuid in before.modes.keys() - usable.keys()
        }
        self._remember({**usable, **self.recorded_modes})
        change = [f"{uuid}={EXCLUSIVE_PROCESS}" for uuid, mode in usable.items() if mode != EXCLUSIVE_PROCESS]
        after = self._run_child("set", change, _SECONDS, desired) if change else Modes()
        return {**before.errors, **refused, **after.errors}

    def restore(self, *, hurry: bool = False) -> Mapping[str, str]:
        """Restore the recorded modes, and delete the record. Return, by UUID, those that failed and stay
        recorded."""
        seconds = _HURRIED_SECONDS if hurry else _SECONDS
        modes = self.recorded_modes
        if not modes:
            return {}
        done = self._run_child("restore", [f"{uuid}={mode}" for uuid, mode in modes.items()], seconds)
        left = {uuid: mode for uuid, mode in modes.items() if uuid in done.errors}
        self._remember(left)
        return done.errors

    @property
    def recorded_modes(self) -> dict[str, int]:
        """The recorded modes by UUID. A file that isn't ours, or is damaged, is ignored."""
        try:
            read = json.loads(self._host.read_text(self._path) or "{}")
        except (ValueError, GpunodeError):
            return {}
        if not isinstance(read, dict):
            return {}
        return {uuid: mode for uuid, mode in read.items() if isinstance(mode, int) and 0 <= mode < 4}

    def _remember(self, modes: Mapping[str, int]) -> None:
        if modes:
            self._host.write_atomic(self._path, (json.dumps(modes) + "\n").encode())
        else:
            self._host.remove(self._path)

    def _run_child(
        self, action: str, gpus: Sequence[str], seconds: float, stopped: Callable[[], bool] = lambda: False
    ) -> Modes:
        options = {**nvml_options(self._host), "action": action, "gpus": list(gpus)}
        try:
            child = start(self._host, "gpunode.plugin.mps.compute_mode", options)
            try:
                document = answer(child, seconds, stopped=stopped)
            finally:
                child.end()
        except ChildFailure as error:
            reason = "was stopped" if stopped() else str(error)
            raise DaemonError(reason, hint="gpunode doctor") from None
        if "error" in document:
            reason = _reason(document["error"]["code"], document["error"]["message"])
            raise DaemonError(f"the compute mode can't be set: {reason}", hint="gpunode doctor")
        seen: dict[str, dict[str, Any]] = document["gpus"]
        return Modes(
            {uuid: int(gpu_answer["mode"]) for uuid, gpu_answer in seen.items() if "mode" in gpu_answer},
            {
                uuid: _reason(gpu_answer["code"], gpu_answer["error"])
                for uuid, gpu_answer in seen.items()
                if "error" in gpu_answer
            },
        )


def _reason(code: int, message: str) -> str:
    return "only root may set the compute mode" if code == NO_PERMISSION else message


# The child.


def main() -> int:
    """0, whatever NVML reports; anything else means a crash."""
    parent = Parent()
    action, gpus = parent.options["action"], parent.options["gpus"]
    try:
        with Nvml.for_parent(parent) as nvml:
            parent.send(gpus={gpu.partition("=")[0]: _gpu_mode(nvml, action, gpu) for gpu in gpus})
    except NvmlError as error:
        parent.send(error=error.document)
    return 0


def _gpu_mode(nvml: Nvml, action: str, gpu: str) -> dict[str, object]:
    uuid, _, desired = gpu.partition("=")
    try:
        handle = nvml.handle_by_uuid(uuid)
        mode = nvml.compute_mode(handle)
        if action == "set" or (action == "restore" and mode == EXCLUSIVE_PROCESS):
            if mode != int(desired):
                nvml.set_compute_mode(handle, int(desired))
            mode = int(desired)
    except NvmlError as error:
        return {"error": error.message, "code": error.code}
    return {"mode": mode}


if __name__ == "__main__":
    sys.exit(main())
