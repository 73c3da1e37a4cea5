"""Vector-add on every device that CUDA sees: ``python -m gpunode.gpu.vectoradd``, standard library only.

Prints one JSON document, ``{"devices": [DeviceResult...], "error": null | {"code": 802, "message": "..."}}``,
and exits with 1 unless every device passed. Each device has a forked child with a time limit, which sets
CUDA_VISIBLE_DEVICES before CUDA starts, because a process can use only one MIG device.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import operator
import os
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from gpunode.gpu.child import AT_ONCE, JobResult, run_each, signal_name
from gpunode.gpu.cuda import Cuda, CudaError
from gpunode.gpu.model import Inventory

# The vector-add kernel in PTX, written manually so that no CUDA toolkit is needed.
#
# PTX ISA 6.0 is what driver 384.81 (CUDA 9.0) supports, and sm_30 is the oldest virtual architecture that it
# compiles for every later GPU, so each driver's own just-in-time compiler can compile it for the present GPU.

ENTRY = "vector_add"

VECTOR_ADD = """.version 6.0
.target sm_30
.address_size 64

// out[i] = a[i] + b[i] for i < count; one thread per element
.visible .entry vector_add(
    .param .u64 a,
    .param .u64 b,
    .param .u64 out,
    .param .u32 count
)
{
    .reg .pred %beyond;
    .reg .b32 %index, %block, %threads, %thread, %count;
    .reg .b64 %a, %b, %out, %offset;
    .reg .f32 %x, %y, %sum;

    ld.param.u32 %count, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %index, %block, %threads, %thread;
    setp.ge.u32 %beyond, %index, %count;
    @%beyond bra done;

    ld.param.u64 %a, [a];
    ld.param.u64 %b, [b];
    ld.param.u64 %out, [out];
    cvta.to.global.u64 %a, %a;
    cvta.to.global.u64 %b, %b;
    cvta.to.global.u64 %out, %out;
    mul.wide.u32 %offset, %index, 4;
    add.u64 %a, %a, %offset;
    add.u64 %b, %b, %offset;
    add.u64 %out, %out, %offset;

    ld.global.f32 %x, [%a];
    ld.global.f32 %y, [%b];
    add.rn.f32 %sum, %x, %y;
    st.global.f32 [%out], %sum;

done:
    ret;
}
"""


# The sum that a GPU must compute, and the check of its answer. Standard library only.

ELEMENTS = 1 << 20


@dataclass(frozen=True)
class DeviceResult:
    """Result of one device. `status` is ok, fail, timeout or skip; `message` says why it isn't ok.

    `max_error` is the largest difference from the right sum, None if nothing was compared or a value wasn't a
    number. `milliseconds` is the kernel's time from launch to end, without compilation and copies.
    """

    index: int
    uuid: str
    name: str
    elements: int = 0
    max_error: float | None = None
    milliseconds: float = 0.0
    status: str = "ok"
    message: str = ""


@cache
def inputs() -> tuple[array[float], array[float]]:
    """Two vectors of `ELEMENTS` float32.

    All values and all sums differ from one another and are exact in float32 (multiples of 1/4 below 2^21), so
    a swapped, stale or missing element is detected and the right answer has no error at all. Made once, for
    all callers: none may change them.
    """
    return array("f", range(ELEMENTS)), array("f", [0.5 * i + 0.25 for i in range(ELEMENTS)])


@cache
def expected() -> array[float]:
    """The right sums; made once, like `inputs`."""
    return array("f", [1.5 * i + 0.25 for i in range(ELEMENTS)])


def largest_error(sums: array[float], want: array[float]) -> float | None:
    """The largest absolute difference of two equally long vectors; None if a value isn't a finite number."""
    if memoryview(sums) == memoryview(want):  # as arrays the comparison takes ten times as long
        return 0.0
    errors = [abs(left - right) for left, right in zip(sums, want, strict=True)]
    return None if any(map(math.isnan, errors)) or math.inf in errors else max(errors)


def judge(
    index: int, uuid: str, name: str, sums: array[float], want: array[float], milliseconds: float
) -> DeviceResult:
    """Compare a device's answer element by element with the right one, `want`."""
    error = largest_error(sums, want)
    if error == 0.0:
        return DeviceResult(index, uuid, name, len(sums), error, milliseconds)
    wrong = [i for i, (left, right) in enumerate(zip(sums, want, strict=True)) if left != right]
    first = wrong[0]
    message = (
        f"{len(wrong)} of {len(sums)} sums are wrong, the first at {first}: {sums[first]!r} instead of"
        f" {want[first]!r}; the GPU or its memory is faulty"
    )
    return DeviceResult(index, uuid, name, len(sums), error, milliseconds, "fail", message)


_THREADS = 256
_POISON = 0xFFFFFFFF  # not a number in float32, so that an unwritten element can't pass
# These disable the compiler that the test must prove, or load a profiler into the program.
_MISLEADING = ("CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT", "CUDA_INJECTION64_PATH")


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to test: `selector` is the value of CUDA_VISIBLE_DEVICES for it."""

    index: int
    selector: str
    uuid: str
    name: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code is 0 if there is a device and every one passed."""
    parser = argparse.ArgumentParser(prog="vectoradd", description="CUDA vector-add on every device")
    parser.add_argument("--uuid", action="append", default=[], help="this GPU or MIG device (repeatable)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each device")
    options = parser.parse_args(argv)
    error = None
    try:
        targets = [Target(i, uuid, uuid) for i, uuid in enumerate(options.uuid)]
        targets = targets or find_targets(options.timeout)
    except CudaError as failure:
        targets, error = [], {"code": failure.code, "message": failure.message}
    results = try_all(targets, options.timeout)
    json.dump({"devices": [dataclasses.asdict(result) for result in results], "error": error}, sys.stdout)
    sys.stdout.write("\n")
    return 0 if results and all(result.status == "ok" for result in results) else 1


def find_targets(timeout: float) -> list[Target]:
    """The devices that CUDA itself reports, in a child. `CudaError` if it can't be initialised in time."""
    [outcome] = run_each([_enumerate], timeout)
    answer = _answer(outcome)
    if answer is None:
        raise CudaError(None, f"counting the GPUs through CUDA {_ending(outcome, timeout)}")
    if "error" in answer:
        raise CudaError(answer["code"], answer["error"])
    return [Target(**target) for target in answer["targets"]]


def _enumerate() -> bytes:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    selectors = [entry.strip() for entry in visible.split(",")] if visible else []
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    try:
        cuda = Cuda()
        targets = []
        for index in range(cuda.device_count()):
            uuid = cuda.uuid(index)
            selector = uuid or (selectors[index] if index < len(selectors) else str(index))
            targets.append(dataclasses.asdict(Target(index, selector, uuid, cuda.name(index))))
    except CudaError as error:
        return json.dumps({"error": error.message, "code": error.code}).encode()
    return json.dumps({"targets": targets}).encode()


def try_all(targets: Sequence[Target], timeout: float) -> list[DeviceResult]:
    """Vector-add on every target, each in its own child."""
    if targets:
        inputs()  # a quarter of a second of the CPU including the sums: once here, not in each child
        expected()

    def job(target: Target) -> bytes:
        return json.dumps(dataclasses.asdict(_try_one(target))).encode()

    outcomes = run_each([lambda target=target: job(target) for target in targets], timeout)  # type: ignore[misc]
    return [_result(target, outcome, timeout) for target, outcome in zip(targets, outcomes, strict=True)]


def _result(target: Target, outcome: JobResult, timeout: float) -> DeviceResult:
    answer = _answer(outcome)
    if answer is not None:
        return DeviceResult(**answer)
    status = "timeout" if outcome.timed_out else "fail"
    message = f"the vector-add {_ending(outcome, timeout)}"
    return DeviceResult(target.index, target.uuid, target.name, status=status, message=message)


def _answer(outcome: JobResult) -> dict[str, Any] | None:
    """The child's result, if it wrote one; how it exited afterwards is irrelevant."""
    try:
        answer = json.loads(outcome.output)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _ending(outcome: JobResult, timeout: float) -> str:
    if outcome.timed_out:
        return f"did not end within {timeout:g} s: the GPU or its driver hangs"
    if outcome.code < 0:
        return f"was ended by {signal_name(outcome.code)}: the driver crashed it"
    return f"ended with code {outcome.code} and no result"


def _try_one(target: Target) -> DeviceResult:
    _prepare(target.selector)
    name = target.name
    try:
        cuda = Cuda()
        name = cuda.name(0)
        # another GPU's right sum proves nothing about this one
        uuid = cuda.uuid(0)  # only whole GPUs have one UUID with all drivers
        if target.uuid.startswith("GPU-") and uuid.startswith("GPU-") and uuid != target.uuid:
            message = f"CUDA_VISIBLE_DEVICES={target.uuid} gave {uuid}: something intercepts CUDA"
            raise CudaError(None, message)
        with cuda.context(0):
            sums, milliseconds = _add(cuda)
    except CudaError as error:
        return DeviceResult(target.index, target.uuid, name, status="fail", message=error.message)
    return judge(target.index, target.uuid, name, sums, expected(), milliseconds)


def _prepare(selector: str) -> None:
    """The variables that libcuda reads at its start. Without its cache the compiler really runs, and no file
    is left."""
    for name in _MISLEADING:
        os.environ.pop(name, None)
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = selector


def _add(cuda: Cuda) -> tuple[array[float], float]:
    """The sums from the current device, and the kernel's milliseconds."""
    kernel = cuda.load(VECTOR_ADD, ENTRY)
    left, right = inputs()
    sums = array("f", bytes(4 * ELEMENTS))
    size = 4 * ELEMENTS
    first, second, out = (cuda.allocate(size) for _ in range(3))
    cuda.to_device(first, left.buffer_info()[0], size)
    cuda.to_device(second, right.buffer_info()[0], size)
    cuda.fill(out, _POISON, ELEMENTS)
    start = time.perf_counter()
    blocks = -(-ELEMENTS // _THREADS)
    cuda.launch(kernel, blocks, _THREADS, (first, second, out, ctypes.c_uint32(ELEMENTS)))
    milliseconds = (time.perf_counter() - start) * 1000
    cuda.from_device(sums.buffer_info()[0], out, size)
    return sums, milliseconds


# The program as a child: its files, its arguments and the parser of its output.

MODULE = "gpunode.gpu.vectoradd"
PROGRAM_FILES = (
    "__init__.py",
    "gpu/__init__.py",
    "gpu/child.py",
    "gpu/cuda.py",
    "gpu/model.py",
    "gpu/vectoradd.py",
    "output/__init__.py",
    "output/typed.py",
)
"""All that the program needs besides the standard library, relative to the package gpunode."""

_START_SECONDS = 15.0


class ProgramAnswer(NamedTuple):
    """The program's output. `error` says why CUDA can't even count devices, `code` is its CUresult."""

    devices: tuple[DeviceResult, ...]
    error: str = ""
    code: int | None = None


def arguments(uuids: Sequence[str], timeout: float) -> tuple[str, ...]:
    """Command line of the program: these devices, or those that CUDA itself reports; `timeout` seconds for
    each."""
    options = [argument for uuid in uuids for argument in ("--uuid", uuid)]
    return (*options, "--timeout", f"{timeout:g}")


def longest_run(devices: int, timeout: float) -> float:
    """Seconds until the whole program must have ended, when each device may take `timeout` seconds."""
    rounds = max(1, math.ceil(devices / AT_ONCE)) + (0 if devices else 1)  # counting the devices is a round
    return rounds * (timeout + 2.0) + _START_SECONDS


def read_answer(text: str) -> ProgramAnswer:
    """Parse the program's output; its document is the last line. ValueError if there is none."""
    try:
        document = json.loads(text.strip().rpartition("\n")[2])
        devices = tuple(_device(item) for item in document["devices"])
        error = document["error"]
        if error is None:
            return ProgramAnswer(devices)
        code = error["code"]
        return ProgramAnswer(devices, str(error["message"]), code if isinstance(code, int) else None)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise ValueError(f"not a vector-add answer: {problem!r}") from problem


def _device(item: Any) -> DeviceResult:
    error = item["max_error"]
    return DeviceResult(
        int(item["index"]),
        str(item["uuid"]),
        str(item["name"]),
        int(item["elements"]),
        None if error is None else float(error),
        float(item["milliseconds"]),
        str(item["status"]),
        str(item["message"]),
    )


# The devices of an inventory that can run a kernel: whole GPUs, or the MIG devices of a partitioned GPU.


class DevicePlan(NamedTuple):
    """`runnable` devices as pending results, and `settled` ones that need no test."""

    runnable: tuple[DeviceResult, ...] = ()
    settled: tuple[DeviceResult, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(device.uuid for device in self.runnable)


def plan(inventory: Inventory | None) -> DevicePlan:
    """Divide an inventory's devices; a GPU that NVML can't read or that has another one's UUID fails, a GPU
    in MIG mode without MIG devices is skipped.
    """
    runnable: list[DeviceResult] = []
    results: list[DeviceResult] = []
    owners: dict[str, int] = {}
    for gpu in inventory.gpus if inventory else ():
        owner = owners.setdefault(gpu.uuid, gpu.index)
        if owner != gpu.index and not gpu.error:
            message = f"NVML reports the same UUID as for GPU {owner}: the two can't be distinguished"
            results.append(DeviceResult(gpu.index, gpu.uuid, gpu.name, status="fail", message=message))
        elif gpu.error:
            results.append(DeviceResult(gpu.index, gpu.uuid, gpu.name, status="fail", message=gpu.error))
        elif gpu.mig_enabled and not gpu.mig:
            message = "MIG is on and holds no device: make some (nvidia-smi mig -cgi ... -C) or switch it off"
            results.append(DeviceResult(gpu.index, gpu.uuid, gpu.name, status="skip", message=message))
        elif gpu.mig_enabled:
            runnable += [
                DeviceResult(gpu.index, mig.uuid, f"{gpu.name} MIG {mig.profile}") for mig in gpu.mig
            ]
        else:
            runnable.append(DeviceResult(gpu.index, gpu.uuid, gpu.name))
    return DevicePlan(tuple(runnable), tuple(results))


def merge(desired: DevicePlan, seen: Sequence[DeviceResult]) -> tuple[DeviceResult, ...]:
    """The program's results with the inventory's indices and names, in the inventory's order."""
    by_uuid = {result.uuid: result for result in seen}
    results = [
        replace(by_uuid[device.uuid], index=device.index, name=device.name or by_uuid[device.uuid].name)
        if device.uuid in by_uuid
        else replace(device, status="fail", message="the program said nothing of this device")
        for device in desired.runnable
    ]
    extra = [result for result in seen if result.uuid not in desired.uuids]
    return tuple(sorted([*results, *desired.settled, *extra], key=lambda result: result.index))


# The vector-add of a recorded or simulated node, on this machine's CPU.

NOTICE = "simulated: computed on the CPU"


def vector_add(devices: Iterable[tuple[int, str, str]]) -> Iterator[DeviceResult]:
    """The sums of each device (index, UUID, name), computed and compared on the CPU.

    `message` says that it is simulated; `milliseconds` are this machine's.
    """
    (left, right), want = inputs(), expected()
    for index, uuid, name in devices:
        start = time.perf_counter()
        sums = array("f", map(operator.add, left, right))
        milliseconds = (time.perf_counter() - start) * 1000
        yield replace(judge(index, uuid, name, sums, want, milliseconds), message=NOTICE)


if __name__ == "__main__":
    sys.exit(main())
