"""`gpunode verify`: a CUDA vector-add on every GPU and MIG device, on the host or in a container."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpunode.errors import GpunodeError, UsageError
from gpunode.gpu import vectoradd
from gpunode.gpu.child import module_argv, signal_name
from gpunode.gpu.probe import NvmlProbe, probe
from gpunode.gpu.vectoradd import Answer, DeviceResult, Plan
from gpunode.host import Host
from gpunode.output.result import Block, Cell, ErrorInfo, ExitCode, Progress, Result, Style, Table, Text

if TYPE_CHECKING:
    from gpunode.runtime.verify.container import ContainerOutcome, ContainerRequest


_NVML_SECONDS = 30.0
_STYLES = {"ok": Style.GOOD, "skip": Style.DIM}
_PASSED = "Test PASSED"  # what NVIDIA's vectorAdd sample prints
_DOCTOR = "find out why: gpunode doctor"
_NO_DRIVER_HINT = (
    "see accept-nvidia-visible-devices-envvar-when-unprivileged and mode in"
    " /etc/nvidia-container-runtime/config.toml; on the host: gpunode verify"
)
_HINTS = {
    3: "modprobe nvidia-uvm, then gpunode doctor",
    802: "systemctl status nvidia-fabricmanager",
    803: "reboot, or reload the nvidia modules; see gpunode explain driver-lib-mismatch",
    804: "take the cuda-compat libraries off the library path: ldconfig -p | grep libcuda",
    999: "modprobe -r nvidia-uvm && modprobe nvidia-uvm, then dmesg | grep -i nvrm",
}


@dataclass(frozen=True)
class PodAsked:
    """What only a pod takes; see `verify_kubernetes.Options`. `timeout` 0 is its own default."""

    namespace: str = ""
    resource: str = ""
    runtime_class: str = "auto"
    node: str = ""
    kubeconfig: str = ""
    context: str = ""
    server: str = ""
    timeout: float = 0.0


@dataclass(frozen=True)
class Options:
    """`on` is host, an engine or kubernetes; `timeout`: seconds for each device; the rest is for containers.

    With `cdi` the GPUs come by CDI, otherwise by the handler `runtime_name` where the engine has it.
    """

    on: str = "host"
    image: str = ""
    timeout: float = 60.0
    runtime_name: str = "nvidia"
    socket: str = ""
    config: str = ""
    cdi: bool = False
    pod: PodAsked = PodAsked()


@dataclass(frozen=True)
class Verification:
    """`data` of the envelope. `via` says how the container got its GPUs: a handler, or devices by CDI; for a
    pod, the device plugin or a resource claim. `pod` is there on kubernetes only."""

    on: str
    devices: tuple[DeviceResult, ...]
    image: str = ""
    via: str = ""
    pod: PodRun | None = None


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Prove that CUDA computes. Exit 1 if a device fails or there is none; errors name cause and cure."""
    refuse_contradictions(options)
    if options.image:
        return _own_image(host, options, progress)
    with progress.step("asking NVML which GPUs there are"):
        known = probe(host, _NVML_SECONDS)
    wanted = vectoradd.plan(known.inventory)
    if not host.live and options.on == "host":
        return _simulated(known, wanted, progress)
    answer, via = Answer(()), ""
    if wanted.runnable or not wanted.settled:
        with progress.step(f"vector-add on {options.on}"):
            if options.on == "host":
                answer = _on_host(host, options, wanted)
            else:
                answer, via = in_container(host, options, wanted.uuids, progress)
    messages = () if known.inventory else (f"NVML: {known.message}; CUDA itself was asked for the devices",)
    data = Verification(options.on, vectoradd.merge(wanted, answer.devices), via=via)
    return _report(data, answer, messages)


def refuse_contradictions(options: Options) -> None:
    if options.on == "kubernetes":
        given = (
            "--cdi" if options.cdi else "--socket" if options.socket else "--config" * bool(options.config)
        )
        if given:
            raise UsageError(f"{given} is for a container engine", hint="leave it out with --on kubernetes")
        return
    if replace(options.pod, timeout=0.0) != PodAsked():
        raise UsageError(
            f"a pod's options are given, and --on is {options.on}", hint="gpunode verify --on kubernetes"
        )
    given = f"--image {options.image}" if options.image else "--cdi" if options.cdi else ""
    if given and options.on == "host":
        what = "an image" if options.image else "CDI"
        raise UsageError(f"{what} needs a container engine", hint=f"gpunode verify --on docker {given}")


def _simulated(known: NvmlProbe, wanted: Plan, progress: Progress) -> Result:
    """A recorded machine: its GPUs' sums are computed here, and every result says so."""
    if known.inventory is None:
        from gpunode.commands.gpus import explain_failure

        raise explain_failure(known)
    with progress.step("vector-add, simulated"):
        done = tuple(vectoradd.vector_add((one.index, one.uuid, one.name) for one in wanted.runnable))
    data = Verification("host", vectoradd.merge(wanted, done))
    return _report(data, Answer(done), (vectoradd.NOTICE,))


def _on_host(host: Host, options: Options, wanted: Plan) -> Answer:
    arguments = vectoradd.arguments(wanted.uuids, options.timeout)
    limit = vectoradd.longest_run(len(wanted.uuids), options.timeout)
    done = host.run(module_argv(vectoradd.MODULE, *arguments), timeout=limit)
    if done.timed_out:
        raise GpunodeError(f"the vector-add did not end within {limit:g} s", hint=_DOCTOR, code="cuda-hang")
    return _read(done.code, done.stdout, done.stderr)


def in_container(
    host: Host, options: Options, uuids: Sequence[str], progress: Progress
) -> tuple[Answer, str]:
    """The answer for these GPUs, all that CUDA sees for none, and how the container got its GPUs.

    `GpunodeError` if the driver isn't in it.
    """
    from gpunode.runtime.verify.run import run_program

    request = replace(
        _request(options),
        argv=("-m", vectoradd.MODULE, *vectoradd.arguments(uuids, options.timeout)),
        timeout=vectoradd.longest_run(len(uuids), options.timeout),
    )
    done = run_program(host, request, progress)
    answer = _read(done.exit_code, done.stdout, done.stderr)
    if _without_driver(answer):
        raise _not_injected(host, options, done, answer)
    return answer, str(done.way)


def _request(options: Options) -> ContainerRequest:
    from gpunode.runtime.verify.container import ContainerRequest

    return ContainerRequest(
        engine=options.on,
        runtime_name=options.runtime_name,
        image=options.image,
        timeout=options.timeout,
        socket=options.socket,
        config=options.config,
        cdi=options.cdi,
    )


def _without_driver(answer: Answer) -> bool:
    """Whether all that failed is that there is no libcuda."""
    told = [device.message for device in answer.devices] + [answer.error] * bool(answer.error)
    return bool(told) and all("libcuda.so.1 can't be loaded" in message for message in told)


def _not_injected(host: Host, options: Options, done: ContainerOutcome, answer: Answer) -> GpunodeError:
    said = " ".join([answer.error, *(device.message for device in answer.devices)])
    if "Permission denied" in said:
        return GpunodeError(
            f"the container may not read the NVIDIA driver it was given ({done.way}): {said}",
            hint="setsebool -P container_use_devices on; see ausearch -m avc -ts recent",
            code="driver-denied",
        )
    if done.way.devices:
        from gpunode.runtime.verify.failures import without_driver

        return without_driver(host, done.way)
    return GpunodeError(
        f"the container started and the runtime {options.runtime_name!r} gave it no NVIDIA driver",
        hint=_NO_DRIVER_HINT,
        code="driver-not-injected",
    )


def _read(code: int, stdout: str, stderr: str) -> Answer:
    try:
        return vectoradd.read_answer(stdout)
    except ValueError as error:
        how = f"was ended by {signal_name(code)}" if code < 0 else f"ended with code {code} and no result"
        said = (stderr.strip().splitlines() or [""])[-1]
        raise GpunodeError(
            f"the vector-add {how}" + (f": {said}" if said else ""), hint=_DOCTOR, code="cuda-crash"
        ) from error


def _own_image(host: Host, options: Options, progress: Progress) -> Result:
    """An image's own vectoradd: all it tells is whether it passed, not on which device."""
    from gpunode.runtime.verify.run import run_program

    with progress.step(f"{options.image} on {options.on}"):
        done = run_program(host, _request(options), progress)
    if done.exit_code == 0 and _PASSED in done.stdout:
        result = DeviceResult(0, "", options.image, milliseconds=done.seconds * 1000, message=_PASSED)
    else:
        said = ((done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"])[-1]
        message = f"exit code {done.exit_code}, no {_PASSED!r}: {said}"
        result = DeviceResult(0, "", options.image, status="fail", message=message)
    data = Verification(options.on, (result,), options.image, str(done.way))
    return _report(data, Answer((result,)), ())


def _report(data: Verification, answer: Answer, messages: tuple[str, ...]) -> Result:
    errors = tuple(_errors(data.devices, answer))
    code = ExitCode.FAILED if errors else ExitCode.OK
    status = "fail" if errors else "ok"
    return Result("Verification", data, status, code, messages, errors, _blocks(data, answer))


def _errors(devices: Sequence[DeviceResult], answer: Answer) -> list[ErrorInfo]:
    if answer.error:
        return [ErrorInfo("cuda", answer.error, _HINTS.get(answer.code or 0, _DOCTOR))]
    failed = [device for device in devices if _failed(device)]
    if failed:
        causes = {device.message for device in failed}
        which = ", ".join(dict.fromkeys(str(device.index) for device in failed))
        told = f": {causes.pop()}" if len(causes) == 1 else ""
        message = f"{len(failed)} of {len(devices)} devices failed (GPU {which}){told}"
        return [ErrorInfo("device-failed", message, _hint(failed))]
    if not any(device.status == "ok" for device in devices):
        return [ErrorInfo("no-device", "there is no GPU to verify", _DOCTOR)]
    return []


def _failed(device: DeviceResult) -> bool:
    return device.status not in _STYLES


def _hint(failed: Sequence[DeviceResult]) -> str:
    """The cure of an error that all failed devices share, else the doctor."""
    for code, hint in _HINTS.items():
        if all(f"({code})" in device.message for device in failed):
            return hint
    return f"{_DOCTOR}; dmesg | grep -i xid"


def _blocks(data: Verification, answer: Answer) -> tuple[Block, ...]:
    devices = data.devices
    if not devices:
        return ()
    rows = tuple(_row(device) for device in devices)
    good = sum(device.status == "ok" for device in devices)
    elements = max((device.elements for device in answer.devices), default=0)
    what = f" of {elements} elements" if elements else ""
    where = f"{data.on} ({data.via})" if data.via else data.on
    summary = f"Vector-add{what} on {where}: {good} of {len(devices)} devices right"
    style = Style.BAD if not good or any(map(_failed, devices)) else Style.GOOD
    return Table(("GPU", "NAME", "UUID", "MAX ERROR", "TIME", "RESULT"), rows), Text(summary, style)


def _row(device: DeviceResult) -> tuple[Cell | str, ...]:
    verdict = f"{device.status}: {device.message}" if device.message else device.status
    return (
        str(device.index),
        device.name or "-",
        device.uuid or "-",
        "-" if device.max_error is None else f"{device.max_error:g}",
        f"{device.milliseconds:.2f} ms" if device.elements else "-",
        Cell(verdict, _STYLES.get(device.status, Style.BAD)),
    )


@dataclass(frozen=True)
class PodRun:
    """What became of the pod. `code` and `reason` are empty if it passed; `log` is its last lines; `seconds`
    from its creation to its end; `removed` whether it is gone from the cluster."""

    server: str
    namespace: str
    name: str
    node: str
    resource: str
    runtime_class: str
    phase: str
    code: str
    reason: str
    seconds: float
    log: tuple[str, ...]
    removed: bool
