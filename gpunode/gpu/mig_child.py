"""The child of `mig.MigSession`: one JSON question a line on stdin, one JSON answer a line on stdout.

It begins with ``{"ready": true}``, or ``{"error": "...", "code": 9}`` if NVML doesn't open. Questions are
``{"do": "layouts"}``, ``{"do": "set-mode", "uuid": U, "on": true}``, ``{"do": "create-gpu-instance", "uuid":
U, "profile": ID, "at": [START, SIZE]}`` (without `at` the driver chooses), and so on as `_ACTIONS` has them.
Answers are ``{"done": {...}}`` or ``{"error": ..., "code": ..., "what": "GPU 0, GPU instance 3"}``. It ends
with its input. ``--note`` is the descriptor of the `probe.Note`: which question to which GPU has no answer.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any

from gpunode.gpu.child import end_with_parent
from gpunode.gpu.mig_calls import MigCalls
from gpunode.gpu.mig_model import Placement
from gpunode.gpu.mig_reader import read_layouts
from gpunode.gpu.nvml import FUNCTION_NOT_FOUND, NOT_FOUND, NOT_SUPPORTED, Handle, Nvml, NvmlError
from gpunode.gpu.probe import Note
from gpunode.output.result import plain

Question = Mapping[str, Any]


def main() -> int:
    """0, whatever NVML says; anything else means a crash."""
    end_with_parent()
    parser = ArgumentParser()
    parser.add_argument("--note", type=int, default=-1, help="descriptor of the note")
    note = Note(parser.parse_args().note)
    try:
        with Nvml.open(asking=note.asking) as nvml:
            _say({"ready": True})
            for line in sys.stdin:
                _say(_answer(nvml, json.loads(line)))
    except NvmlError as error:
        _say({"error": error.message, "code": error.code})
    return 0


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _answer(nvml: Nvml, question: Question) -> dict[str, Any]:
    try:
        return {"done": _ACTIONS[question["do"]](nvml, question)}
    except NvmlError as error:
        return {"error": error.message, "code": error.code, "what": _what(nvml, question)}


def _what(nvml: Nvml, question: Question) -> str:
    """Of what the question was, as people name it."""
    uuid = question.get("uuid", "")
    try:
        words = [f"GPU {_gpu(nvml, question).gpu}"] if uuid else []
    except NvmlError:
        words = [f"GPU {uuid}"]
    words += [f"GPU instance {question['gi']}"] if "gi" in question else []
    words += [f"compute instance {question['ci']}"] if "ci" in question else []
    return ", ".join(words)


def _gpu(nvml: Nvml, question: Question) -> Handle:
    """Its handle, anew each time: a change of the mode may take handles away. `Nvml.handle_by_uuid` would ask
    every GPU without naming the one that hangs."""
    for index in range(nvml.device_count()):
        try:
            gpu = nvml.handle(index)
            if nvml.uuid(gpu) == question["uuid"]:
                return gpu
        except NvmlError:
            continue  # another GPU's failure is not this one's
    raise NvmlError(NOT_FOUND)


def _gpu_instance(nvml: Nvml, question: Question) -> Handle:
    return MigCalls(nvml).gpu_instance(_gpu(nvml, question), question["gi"])


def _at(question: Question) -> Placement | None:
    place = question.get("at")
    return Placement(*place) if place else None


def _layouts(nvml: Nvml, _question: Question) -> Any:
    return plain(read_layouts(nvml))


def _set_mode(nvml: Nvml, question: Question) -> Any:
    calls, gpu = MigCalls(nvml), _gpu(nvml, question)
    status = calls.set_mode(gpu, question["on"])
    current, pending = calls.modes(_gpu(nvml, question))
    return {"status": status, "current": current, "pending": pending}


def _create_gpu_instance(nvml: Nvml, question: Question) -> Any:
    calls = MigCalls(nvml)
    made = calls.create_gpu_instance(_gpu(nvml, question), question["profile"], _at(question))
    info = calls.gpu_instance_info(made)
    return {"id": info.id, "at": [info.placement.start, info.placement.size]}


def _create_compute_instance(nvml: Nvml, question: Question) -> Any:
    calls, gi = MigCalls(nvml), _gpu_instance(nvml, question)
    profiles = [one.id for one in calls.compute_profiles(gi) if one.slices == question["slices"]]
    if not profiles:
        raise NvmlError(NOT_SUPPORTED, f"it takes no compute instance of {question['slices']} slices")
    made = calls.compute_instance_info(calls.create_compute_instance(gi, profiles[0], _at(question)))
    uuid = _uuid(nvml, _gpu(nvml, question), (question["gi"], made.id))
    return {"id": made.id, "at": [made.placement.start, made.placement.size], "uuid": uuid}


def _uuid(nvml: Nvml, gpu: Handle, instances: tuple[int, int]) -> str:
    devices = (device for _, device in nvml.mig_handles(gpu))
    return next((nvml.uuid(one) for one in devices if nvml.mig_instances(one) == instances), "")


def _destroy_gpu_instance(nvml: Nvml, question: Question) -> Any:
    MigCalls(nvml).destroy_gpu_instance(_gpu_instance(nvml, question))
    return {}


def _destroy_compute_instance(nvml: Nvml, question: Question) -> Any:
    calls = MigCalls(nvml)
    calls.destroy_compute_instance(calls.compute_instance(_gpu_instance(nvml, question), question["ci"]))
    return {}


def _processes(nvml: Nvml, question: Question) -> Any:
    """Who computes or draws, on the GPU or one of its MIG devices; ids are None for the GPU as a whole."""
    gpu = _gpu(nvml, question)
    found: set[tuple[int, int | None, int | None]] = set()
    for device in (gpu, *(one for _, one in _mig_handles(nvml, gpu))):
        here = (None, None) if device is gpu else nvml.mig_instances(device)
        for call in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            for process in _running(nvml, call, device):
                gi, ci = (_id(process.gpuInstanceId), _id(process.computeInstanceId))
                found.add((int(process.pid), here[0] if gi is None else gi, here[1] if ci is None else ci))
    placed = {pid for pid, gi, _ in found if gi is not None}
    return [list(one) for one in sorted(found, key=repr) if one[1] is not None or one[0] not in placed]


def _mig_handles(nvml: Nvml, gpu: Handle) -> tuple[tuple[int, Handle], ...]:
    return nvml.mig_handles(gpu) if nvml.mig_enabled(gpu) else ()


def _running(nvml: Nvml, call: str, device: Handle) -> list[Any]:
    try:
        return list(nvml.call(call, device))
    except NvmlError as error:
        if error.code in (NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND):
            return []
        raise


def _id(number: int | None) -> int | None:
    return None if number is None or number == 0xFFFFFFFF else int(number)


_ACTIONS: Mapping[str, Callable[[Nvml, Question], Any]] = {
    "layouts": _layouts,
    "set-mode": _set_mode,
    "create-gpu-instance": _create_gpu_instance,
    "create-compute-instance": _create_compute_instance,
    "destroy-gpu-instance": _destroy_gpu_instance,
    "destroy-compute-instance": _destroy_compute_instance,
    "processes": _processes,
}

if __name__ == "__main__":
    sys.exit(main())
