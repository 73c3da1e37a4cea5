"""Whether CUDA really works here: gpunode's vector-add on every device, in a child process."""

from __future__ import annotations

from gpunode.errors import GpunodeError
from gpunode.facts.topic import Stuck
from gpunode.gpu.program import MODULE, Answer, arguments, read_answer
from gpunode.host import Host

DEVICE_SECONDS = 8.0
_SECONDS = 20.0  # below what the doctor waits for one check


def run_cuda(host: Host) -> Answer | None:
    """What the program said; a recorded machine has its document under ``nvml.cuda``, None without one."""
    import json

    if not host.live:
        recorded = host.recorded("nvml", "cuda")
        text = json.dumps(recorded) if recorded else ""
    else:
        from gpunode.gpu.child import module_argv

        done = host.run(module_argv(MODULE, *arguments((), DEVICE_SECONDS)), timeout=_SECONDS)
        if done.timed_out:
            raise Stuck(f"CUDA gave no answer within {_SECONDS:g} s", first=True)
        text = done.stdout
    if not text:
        return None
    try:
        answer = read_answer(text)
        if host.live:
            host.heard("nvml", "cuda", json.loads(text.strip().rpartition("\n")[2]))
        return answer
    except ValueError as error:
        raise GpunodeError(f"the vector-add gave no usable answer: {error}") from error
