"""`gpunode demo`: the whole way on a simulated node, each step as a person would type it.

The commands are the real ones, on a recorded machine in a temporary directory. Simulated are the GPUs (the
vector-add is computed on the CPU), the daemons' restarts and the kubelet; the transcript says so.
"""

from __future__ import annotations

import io
from collections.abc import Callable

from gpunode.commands.demo_node import Daemons, build_demo_node, inventory
from gpunode.dataclass import dataclass, field
from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.result import Block, ErrorInfo, ExitCode, Progress, Result, Style, Table, Text

__all__ = ["Options", "build_demo_node", "run"]
_KUBELET_SECONDS = 60.0  # it takes a tenth of one; a busy machine may take many


@dataclass(frozen=True)
class Options:
    """The demo takes none."""


@dataclass(frozen=True)
class Step:
    """One command line of the demo and what it came to."""

    command: str
    exit_code: int


@dataclass(frozen=True)
class DemoReport:
    """`data` of the envelope; `allocatable` is what the kubelet's stand-in counts at the end."""

    steps: tuple[Step, ...]
    allocatable: int


@dataclass(frozen=True)
class Transcript:
    """What has been typed and printed so far."""

    steps: list[Step] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def type(self, command: str, run: Callable[[], Result]) -> Result:
        """Show a command, run it, show what it prints."""
        try:
            result = run()
        except GpunodeError as error:
            result = Result("Error", status="error", exit_code=error.exit_code, errors=(error.info(),))
        self.steps.append(Step(command, int(result.exit_code)))
        told = [Text(line, Style.BAD) for info in result.errors for line in _error_lines(info)]
        self.blocks.extend([Text(f"$ {command}", Style.COMMAND), *result.blocks, *told, Text("")])
        return result


def _error_lines(info: ErrorInfo) -> list[str]:
    return [f"error: {info.message}", *([f"hint: {info.hint}"] if info.hint else [])]


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Play the whole way in a temporary directory; exit 1 if it doesn't come out as it must."""
    with host.temporary_directory() as place:
        root = place / "node"
        node = build_demo_node(root)
        transcript = Transcript()
        transcript.blocks.append(Text(f"$ export GPUNODE_ROOT={root}", Style.COMMAND))
        transcript.blocks.append(
            Text("# a simulated node: 8 x H100, the driver installed, nothing configured")
        )
        transcript.blocks.append(Text(""))
        _doctor(transcript, node, progress)
        for engine, verb in (("containerd", "restart"), ("docker", "reload")):
            _configure(transcript, node, engine, verb, progress)
        node = Host(root)
        healthy = _doctor(transcript, node, progress)
        _gpus(transcript, node, progress)
        verified = _verify(transcript, node, progress)
        allocatable = _plugin(transcript, node)
        return _report(transcript, allocatable, healthy.exit_code == verified.exit_code == ExitCode.OK)


def _doctor(transcript: Transcript, node: Host, progress: Progress) -> Result:
    from gpunode.commands import doctor

    return transcript.type("gpunode doctor", lambda: doctor.run(node, doctor.Options(), progress))


def _configure(transcript: Transcript, node: Host, engine: str, verb: str, progress: Progress) -> None:
    from gpunode.commands import configure_runtime
    from gpunode.runtime.request import Request

    options = configure_runtime.Options(Request(runtimes=(engine,), configures=True))
    transcript.type(
        f"gpunode configure-runtime --runtime {engine}",
        lambda: configure_runtime.run(node, options, progress),
    )

    def restart() -> Result:
        Daemons(node).restart(engine)
        return Result("Restart", blocks=(Text(f"# simulated: {engine} has read its configuration again"),))

    transcript.type(f"systemctl {verb} {engine}", restart)


def _gpus(transcript: Transcript, node: Host, progress: Progress) -> None:
    from gpunode.commands import gpus

    transcript.type("gpunode gpus", lambda: gpus.run(node, gpus.Options(), progress))


def _verify(transcript: Transcript, node: Host, progress: Progress) -> Result:
    from gpunode.commands import verify

    return transcript.type("gpunode verify", lambda: verify.run(node, verify.Options(), progress))


def _plugin(transcript: Transcript, node: Host) -> int:
    """Serve to the kubelet's stand-in until it counts the GPUs; gives its allocatable count."""
    from gpunode.plugin.compose import make_service
    from gpunode.plugin.kubelet_stub import KubeletStub
    from gpunode.plugin.logfmt import LogfmtLog
    from gpunode.plugin.settings import Settings

    settings = Settings()
    kubelet = KubeletStub(node, settings.directory)
    transcript.blocks.append(Text("$ gpunode plugin serve &", Style.COMMAND))
    service = make_service(node, settings, LogfmtLog(_LogLines(transcript.blocks), {}))
    kubelet.start()
    service.start()
    try:
        kubelet.wait_allocatable(settings.resource_name, len(inventory().gpus), _KUBELET_SECONDS)
        # the plugin notices a moment later that it is watched; the transcript ends with its saying so
        node.wait_until(lambda: _says(transcript.blocks, "the kubelet watches"), _KUBELET_SECONDS)
        allocatable = kubelet.allocatable(settings.resource_name)
        capacity = kubelet.capacity(settings.resource_name)
    finally:
        service.stop()
        service.join()
        kubelet.stop()
    transcript.steps.append(Step("gpunode plugin serve", 0))
    rows = (("capacity", str(capacity)), ("allocatable", str(allocatable)))
    transcript.blocks.extend(
        [
            Text(""),
            Text(f"# what the kubelet's stand-in counts of {settings.resource_name}"),
            Table(("", ""), rows),
            Text(""),
        ]
    )
    return allocatable


def _says(blocks: list[Block], words: str) -> bool:
    return any(isinstance(block, Text) and words in block.text for block in blocks[-10:])


class _LogLines(io.StringIO):
    """A stream for the plugin's log that keeps whole lines as part of the transcript."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self._blocks = blocks

    def write(self, text: str) -> int:
        self._blocks += [Text(line, Style.DIM) for line in text.splitlines()]
        return len(text)


def _report(transcript: Transcript, allocatable: int, proven: bool) -> Result:
    wanted = len(inventory().gpus)
    good = proven and allocatable == wanted
    closing = (
        Text(f"{allocatable} of {wanted} GPUs are allocatable: pods can run on this node.", Style.GOOD)
        if good
        else Text(
            f"{allocatable} of {wanted} GPUs are allocatable; the demo did not come out right.", Style.BAD
        )
    )
    return Result(
        "Demo",
        DemoReport(tuple(transcript.steps), allocatable),
        status="ok" if good else "fail",
        exit_code=ExitCode.OK if good else ExitCode.FAILED,
        blocks=(*transcript.blocks, closing),
    )
