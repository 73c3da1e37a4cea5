"""The toolkit's own container, run by the GPU operator: it sets up the engine and may inject GPUs by NRI."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.facts.processes import Process, environment
from gpunode.host import Host

# its program since 1.17 and before (cmd/nvidia-ctk-installer)
_PROGRAMS = ("nvidia-ctk-installer", "nvidia-toolkit")
_FLAGS = ("--enable-nri-plugin", "-p")
_TRUE = ("1", "t", "true")


def nri_plugin(host: Host, processes: Sequence[Process]) -> Process | None:
    """The toolkit's process that wants to inject GPUs by NRI; None if none does, or it can't be told."""
    for process in processes:
        if process.name not in _PROGRAMS or process.uid not in (0, host.uid):
            continue
        given = next((word for word in process.argv[1:] if word.partition("=")[0] in _FLAGS), None)
        if given is None:
            given = f"={environment(host, process.pid).get('ENABLE_NRI_PLUGIN', 'false')}"
        _, equals, value = given.partition("=")
        if not equals or value.lower() in _TRUE:
            return process
    return None
