"""`gpunode verify`: a CUDA vector-add on every GPU and MIG device, on the host or in a container."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import typer

from gpunode.commands.gpus import explain_failure
from gpunode.commands.options import (
    KUBERNETES,
    ConfigOption,
    ContextOption,
    NameOption,
    NodeOption,
    PodKubeconfigOption,
    PodNamespaceOption,
    ServerOption,
    SocketOption,
    changed,
    duration_option,
    one_of,
    pod_resource_option,
)
from gpunode.commands.session import Session, verb
from gpunode.errors import GpunodeError, UsageError
from gpunode.facts.images import vector_add_image
from gpunode.facts.pci import read_gpus
from gpunode.gpu import vectoradd
from gpunode.gpu.child import module_argv, signal_name
from gpunode.gpu.model import short_uuid
from gpunode.gpu.probe import NvmlProbe, probe
from gpunode.gpu.vectoradd import DevicePlan, DeviceResult, ProgramAnswer
from gpunode.host import Host
from gpunode.kubernetes.access import Access
from gpunode.output.result import Block, Cell, ErrorInfo, ExitCode, Progress, Result, Style, Table, Text
from gpunode.runtime.verify import run_program
from gpunode.runtime.verify.container import ContainerOutcome, ContainerRequest, Verification
from gpunode.runtime.verify.failures import without_driver

SECONDS = 60.0  # for each device
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


def run(host: Host, progress: Progress, timeout: float = SECONDS) -> Result:
    """Run CUDA on the host, with `timeout` seconds for each device. Exit 1 if a device fails or there is
    none; errors name the cause and the fix."""
    nvml, desired = _probed(host, progress)
    if not host.live:
        return _simulated(host, nvml, progress)
    answer = ProgramAnswer(())
    if desired.runnable or not desired.settled:
        with progress.step("vector-add on host"):
            answer = _on_host(host, timeout, desired)
    return _proof("host", nvml, desired, answer)


def run_in_container(host: Host, request: ContainerRequest, progress: Progress) -> Result:
    """The same in a container of an engine, or with the vectoradd of `request.image`; `request.timeout` is
    for each device."""
    if request.image:
        return _own_image(host, request, progress)
    nvml, desired = _probed(host, progress)
    answer, via = ProgramAnswer(()), ""
    if desired.runnable or not desired.settled:
        with progress.step(f"vector-add on {request.engine}"):
            answer, via = in_container(host, request, desired.uuids, progress)
    return _proof(request.engine, nvml, desired, answer, via)


def _probed(host: Host, progress: Progress) -> tuple[NvmlProbe, DevicePlan]:
    with progress.step("querying NVML for the GPUs"):
        nvml = probe(host, _NVML_SECONDS)
    return nvml, vectoradd.plan(nvml.inventory)


def _proof(on: str, nvml: NvmlProbe, desired: DevicePlan, answer: ProgramAnswer, via: str = "") -> Result:
    messages = () if nvml.inventory else (f"NVML: {nvml.message}; the devices were read from CUDA",)
    return _report(Verification(on, vectoradd.merge(desired, answer.devices), via=via), answer, messages)


def _simulated(host: Host, nvml: NvmlProbe, progress: Progress) -> Result:
    """A recorded machine: the sums of its GPUs are computed on this CPU, and every result says so.

    As on the machine itself, NVML lists no GPU that another kernel driver controls, or none.
    """
    if nvml.inventory is None:
        raise explain_failure(nvml)
    drivers = {gpu.address: gpu.driver for gpu in read_gpus(host)}
    gpus = tuple(gpu for gpu in nvml.inventory.gpus if drivers.get(gpu.pci, "nvidia") == "nvidia")
    if nvml.inventory.gpus and not gpus:
        others = ", ".join(sorted({driver for driver in drivers.values() if driver}))
        why = f"{others} controls them" if others else "no driver controls them"
        raise GpunodeError(f"no GPU can run CUDA: {why}", hint=_DOCTOR, code="no-device")
    desired = vectoradd.plan(nvml.inventory._replace(gpus=gpus))
    with progress.step("vector-add, simulated"):
        done = tuple(
            vectoradd.vector_add((device.index, device.uuid, device.name) for device in desired.runnable)
        )
    data = Verification("host", vectoradd.merge(desired, done))
    return _report(data, ProgramAnswer(done), (vectoradd.NOTICE,))


def _on_host(host: Host, timeout: float, desired: DevicePlan) -> ProgramAnswer:
    arguments = vectoradd.arguments(desired.uuids, timeout)
    limit = vectoradd.longest_run(len(desired.uuids), timeout)
    done = host.run(module_argv(vectoradd.MODULE, *arguments), timeout=limit)
    if done.timed_out:
        raise GpunodeError(f"the vector-add did not end within {limit:g} s", hint=_DOCTOR, code="cuda-hang")
    return _read(done.code, done.stdout, done.stderr)


def in_container(
    host: Host, request: ContainerRequest, uuids: Sequence[str], progress: Progress
) -> tuple[ProgramAnswer, str]:
    """The result for these GPUs (all that CUDA reports if none are named), and how the container got its
    GPUs.

    `GpunodeError` if the container lacks the driver.
    """
    whole = replace(
        request,
        argv=("-m", vectoradd.MODULE, *vectoradd.arguments(uuids, request.timeout)),
        timeout=vectoradd.longest_run(len(uuids), request.timeout),
    )
    done = run_program(host, whole, progress)
    answer = _read(done.exit_code, done.stdout, done.stderr)
    if _without_driver(answer):
        raise _not_injected(host, request.runtime_name, done, answer)
    return answer, str(done.way)


def _without_driver(answer: ProgramAnswer) -> bool:
    """Whether every failure is a missing libcuda."""
    messages = [device.message for device in answer.devices] + [answer.error] * bool(answer.error)
    return bool(messages) and all("libcuda.so.1 can't be loaded" in message for message in messages)


def _not_injected(
    host: Host, runtime_name: str, done: ContainerOutcome, answer: ProgramAnswer
) -> GpunodeError:
    output = " ".join([answer.error, *(device.message for device in answer.devices)])
    if "Permission denied" in output:
        return GpunodeError(
            f"the container may not read the NVIDIA driver it was given ({done.way}): {output}",
            hint="setsebool -P container_use_devices on; see ausearch -m avc -ts recent",
            code="driver-denied",
        )
    if done.way.devices:
        return without_driver(host, done.way)
    return GpunodeError(
        f"the container started and the runtime {runtime_name!r} gave it no NVIDIA driver",
        hint=_NO_DRIVER_HINT,
        code="driver-not-injected",
    )


def _read(code: int, stdout: str, stderr: str) -> ProgramAnswer:
    try:
        return vectoradd.read_answer(stdout)
    except ValueError as error:
        ending = f"was ended by {signal_name(code)}" if code < 0 else f"ended with code {code} and no result"
        last_line = (stderr.strip().splitlines() or [""])[-1]
        raise GpunodeError(
            f"the vector-add {ending}" + (f": {last_line}" if last_line else ""),
            hint=_DOCTOR,
            code="cuda-crash",
        ) from error


def _own_image(host: Host, request: ContainerRequest, progress: Progress) -> Result:
    """An image's own vectoradd: it reports only whether it passed, not on which device."""
    with progress.step(f"{request.image} on {request.engine}"):
        done = run_program(host, request, progress)
    if done.exit_code == 0 and _PASSED in done.stdout:
        result = DeviceResult(0, "", request.image, milliseconds=done.seconds * 1000, message=_PASSED)
    else:
        last_line = ((done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"])[-1]
        message = f"exit code {done.exit_code}, no {_PASSED!r}: {last_line}"
        result = DeviceResult(0, "", request.image, status="fail", message=message)
    data = Verification(request.engine, (result,), request.image, str(done.way))
    return _report(data, ProgramAnswer((result,)), ())


def _report(data: Verification, answer: ProgramAnswer, messages: tuple[str, ...]) -> Result:
    errors = tuple(_errors(data.devices, answer))
    code = ExitCode.FAILED if errors else ExitCode.OK
    status = "fail" if errors else "ok"
    return Result("Verification", data, status, code, messages, errors, _blocks(data, answer))


def _errors(devices: Sequence[DeviceResult], answer: ProgramAnswer) -> list[ErrorInfo]:
    if answer.error:
        return [ErrorInfo("cuda", answer.error, _HINTS.get(answer.code or 0, _DOCTOR))]
    failed = [device for device in devices if _failed(device)]
    if failed:
        causes = {device.message for device in failed}
        indexes = ", ".join(dict.fromkeys(str(device.index) for device in failed))
        cause = f": {causes.pop()}" if len(causes) == 1 else ""
        message = f"{len(failed)} of {len(devices)} devices failed (GPU {indexes}){cause}"
        return [ErrorInfo("device-failed", message, _hint(failed))]
    if not any(device.status == "ok" for device in devices):
        return [ErrorInfo("no-device", "there is no GPU to verify", _DOCTOR)]
    return []


def _failed(device: DeviceResult) -> bool:
    return device.status not in _STYLES


def _hint(failed: Sequence[DeviceResult]) -> str:
    """The fix for an error that all failed devices share, else a hint to run the doctor."""
    for code, hint in _HINTS.items():
        if all(f"({code})" in device.message for device in failed):
            return hint
    return f"{_DOCTOR}; dmesg | grep -i xid"


def _blocks(data: Verification, answer: ProgramAnswer) -> tuple[Block, ...]:
    devices = data.devices
    if not devices:
        return ()
    rows = tuple(_row(device) for device in devices)
    good = sum(device.status == "ok" for device in devices)
    elements = max((device.elements for device in answer.devices), default=0)
    size = f" of {elements} elements" if elements else ""
    where = f"{data.on} ({data.via})" if data.via else data.on
    summary = f"Vector-add{size} on {where}: {good} of {len(devices)} devices right"
    style = Style.BAD if not good or any(map(_failed, devices)) else Style.GOOD
    if any(device.message == vectoradd.NOTICE for device in devices):
        summary = f"Simulated on the CPU for {good} of {len(devices)} devices: proves nothing about the GPUs"
        style = Style.WARN if style is Style.GOOD else style
    return Table(("GPU", "NAME", "UUID", "MAX ERROR", "TIME", "RESULT"), rows), Text(summary, style)


def _row(device: DeviceResult) -> tuple[Cell | str, ...]:
    verdict = f"{device.status}: {device.message}" if device.message else device.status
    return (
        str(device.index),
        device.name or "-",
        Cell(device.uuid or "-", short=short_uuid(device.uuid)),
        "-" if device.max_error is None else f"{device.max_error:g}",
        f"{device.milliseconds:.2f} ms" if device.elements else "-",
        Cell(verdict, _STYLES.get(device.status, Style.BAD)),
    )


# `gpunode verify`.

verify_app = typer.Typer(rich_markup_mode=None)


VerifyPlace = Literal[
    "host", "docker", "containerd", "crio", "podman", "k3s", "rke2", "k0s", "microk8s", "kubernetes"
]


@dataclass(frozen=True)
class PodOptions:
    """The options that go with --on kubernetes."""

    namespace: PodNamespaceOption = ""
    resource: Annotated[str, pod_resource_option()] = ""
    runtime_class: Annotated[
        str,
        typer.Option(
            "--runtime-class",
            metavar="NAME",
            help="RuntimeClass of the pod; auto: nvidia if it exists; empty: none.",
            autocompletion=one_of("auto", "nvidia"),
            rich_help_panel=KUBERNETES,
        ),
    ] = "auto"
    node: NodeOption = ""
    kubeconfig: PodKubeconfigOption = ""
    kube_context: ContextOption = ""
    server: ServerOption = ""


ImageOption = Annotated[
    str,
    typer.Option(
        "--image",
        metavar="REF",
        help="Run the vectoradd program of this image instead; an engine must have it.",
        show_default=f"for a pod {vector_add_image()}",
    ),
]
TimeoutOption = Annotated[
    float | None,
    duration_option(
        "--timeout",
        least=1,
        default="60s, for a pod 5m",
        help="Time limit for each device, or for the pod.",
    ),
]


@verb(verify_app, "verify", "Verification")
def verify(
    session: Session,
    on: Annotated[VerifyPlace, typer.Option("--on", help="Where the CUDA program runs.")] = "host",
    image: ImageOption = "",
    runtime_name: NameOption = "nvidia",
    config: ConfigOption = "",
    socket: SocketOption = "",
    timeout: TimeoutOption = None,
    cdi: Annotated[
        bool, typer.Option("--cdi", help="Request the GPUs through CDI instead of the runtime.")
    ] = False,
    pod: PodOptions = PodOptions(),
) -> Result:
    """Run a CUDA program on every GPU and check the result. MIG devices are included.

    With --on kubernetes, NVIDIA's sample in a pod checks one GPU of this node. With an engine it needs root,
    or the right to use the engine's socket.

    gpunode verify

    sudo gpunode verify --on containerd

    gpunode verify --on kubernetes --kubeconfig ~/.kube/config
    """
    _refuse_contradictions(on, image, socket, config, cdi=cdi, pod=next(iter(changed(pod)), ""))
    if on == "kubernetes":
        from gpunode.commands import verify_kubernetes

        pod_request = verify_kubernetes.PodRequest(
            image=image,
            namespace=pod.namespace,
            node=pod.node,
            resource=pod.resource or "nvidia.com/gpu",
            runtime_class=pod.runtime_class,
            runtime_name=runtime_name,
            timeout=timeout or verify_kubernetes.SECONDS,
            access=Access(pod.kubeconfig, pod.kube_context, pod.server, pods=True),
        )
        return verify_kubernetes.run(session.host, pod_request, session.progress)
    if on == "host":
        return run(session.host, session.progress, timeout or SECONDS)
    request = ContainerRequest(
        engine=on,
        runtime_name=runtime_name,
        image=image,
        timeout=timeout or SECONDS,
        socket=socket,
        config=config,
        cdi=cdi,
    )
    return run_in_container(session.host, request, session.progress)


def _refuse_contradictions(
    on: VerifyPlace, image: str, socket: str, config: str, *, cdi: bool, pod: str
) -> None:
    """`UsageError` for options of another target; `pod` is the first option for a pod, empty for none."""
    if on == "kubernetes":
        option = "--cdi" if cdi else "--socket" if socket else "--config" if config else ""
        if option:
            raise UsageError(f"{option} is for a container engine", hint="leave it out with --on kubernetes")
        return
    if pod:
        raise UsageError(f"{pod} is for a pod, and --on is {on}", hint="gpunode verify --on kubernetes")
    option = f"--image {image}" if image else "--cdi" if cdi else ""
    if option and on == "host":
        subject = "an image" if image else "CDI"
        raise UsageError(f"{subject} needs a container engine", hint=f"gpunode verify --on docker {option}")
