"""Compute modes: EXCLUSIVE_PROCESS while a daemon runs, and afterwards what it was before.

NVIDIA recommends it for MPS: then nothing but the MPS server can open the GPU, and a process that misses the
daemon fails instead of taking the GPU past its limits. What it was before is written down before it is
changed, so that whoever comes after a crash still knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpunode.errors import DaemonError, GpunodeError
from gpunode.gpu.child import module_argv
from gpunode.gpu.nvml_errors import NO_PERMISSION
from gpunode.host import Host

DEFAULT, PROHIBITED, EXCLUSIVE_PROCESS = 0, 2, 3  # nvmlComputeMode_t
FILE = "compute-modes.json"
_SECONDS = 20.0


@dataclass(frozen=True)
class Modes:
    """Modes by UUID, and why a GPU has none."""

    modes: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


class ComputeModes:
    """The modes of one daemon's GPUs. `directory` is the daemon's; methods take seconds."""

    def __init__(self, host: Host, directory: str) -> None:
        self._host = host
        self._path = f"{directory}/{FILE}"

    def make_exclusive(self, uuids: Sequence[str]) -> Mapping[str, str]:
        """Why, by UUID, a GPU can't be used: it couldn't be set, or nobody may compute on it."""
        before = self._ask("get", uuids)
        usable = {uuid: mode for uuid, mode in before.modes.items() if mode != PROHIBITED}
        refused = {
            uuid: "its compute mode is PROHIBITED: nvidia-smi -i "
            f"{uuid} -c DEFAULT lets processes use it again"
            for uuid in before.modes.keys() - usable.keys()
        }
        self._remember({**usable, **self.remembered})
        change = [f"{uuid}={EXCLUSIVE_PROCESS}" for uuid, mode in usable.items() if mode != EXCLUSIVE_PROCESS]
        after = self._ask("set", change) if change else Modes()
        return {**before.errors, **refused, **after.errors}

    def restore(self) -> Mapping[str, str]:
        """Put back what was written down, and forget it. Tells, by UUID, what failed and is still known."""
        kept = self.remembered
        if not kept:
            return {}
        done = self._ask("restore", [f"{uuid}={mode}" for uuid, mode in kept.items()])
        left = {uuid: mode for uuid, mode in kept.items() if uuid in done.errors}
        self._remember(left)
        return done.errors

    @property
    def remembered(self) -> dict[str, int]:
        """What was written down: mode by UUID. A file that isn't ours, or is damaged, tells nothing."""
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

    def _ask(self, action: str, gpus: Sequence[str]) -> Modes:
        done = self._host.run(module_argv("gpunode.gpu.compute_mode", action, *gpus), timeout=_SECONDS)
        if done.timed_out:
            raise DaemonError(f"NVML did not answer within {_SECONDS:g} s", hint="gpunode doctor")
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.code}"])[-1]
            raise DaemonError(f"the compute mode can't be set: {last}", hint="gpunode doctor") from None
        if "error" in answer:
            raise DaemonError(f"the compute mode can't be set: {_reason(answer)}", hint="gpunode doctor")
        seen: dict[str, dict[str, int | str]] = answer["gpus"]
        return Modes(
            {uuid: int(one["mode"]) for uuid, one in seen.items() if "mode" in one},
            {uuid: _reason(one) for uuid, one in seen.items() if "error" in one},
        )


def _reason(answer: Mapping[str, int | str]) -> str:
    if answer.get("code") == NO_PERMISSION:
        return "only root may set the compute mode"
    return str(answer["error"])
