"""How containers of a user's rootless Docker get their GPUs, and whether the hook may do it there.

The toolkit's prestart hook writes device cgroups, which a rootless engine may not: ``no-cgroups`` in the
toolkit's configuration that dockerd's environment leads to keeps it from trying. By CDI none is needed.
"""

from __future__ import annotations

from typing import Any

from gpunode.facts.daemons import Daemon, reader
from gpunode.facts.docker_rootless import places
from gpunode.facts.gates import can
from gpunode.facts.processes import environment
from gpunode.facts.toolkit_config import DEFAULT_PATH
from gpunode.host import Host

CONFIG_VARIABLE = "NVIDIA_CTK_CONFIG_FILE_PATH"


def hook_injects(host: Host, daemon: Daemon, programs: tuple[str, ...]) -> bool:
    """Whether a container may get its GPUs by the hook: in mode legacy, or by ``--gpus``.

    `programs` are those of Docker's nvidia runtimes.
    """
    if any(path.endswith(".legacy") for path in programs):
        return True
    mode = _setting(host, daemon, "nvidia-container-runtime", "mode") or "auto"
    if mode != "auto":
        return mode == "legacy"  # in cdi, jit-cdi and csv the hook refuses, so --gpus doesn't use it either
    from gpunode.facts.toolkit import find_toolkit

    toolkit = find_toolkit(host)
    hook = "nvidia-container-runtime-hook" in toolkit.programs
    # the mode auto means legacy before jit-cdi came; docker run --gpus used the hook before it used CDI
    return not can("toolkit", "jit-cdi", toolkit.version) or (
        hook and not can("docker", "gpus-by-cdi", daemon.version)
    )


def no_cgroups(host: Host, daemon: Daemon) -> bool:
    """Whether this user's toolkit configuration, else the node's, tells the hook to leave cgroups alone."""
    return _setting(host, daemon, "nvidia-container-cli", "no-cgroups") is True


def _setting(host: Host, daemon: Daemon, *keys: str) -> Any:
    """A value of the toolkit's configuration as dockerd's environment leads to it; None for broken files."""
    import tomllib

    from gpunode.facts.containerd import dig

    named = environment(host, daemon.process.pid).get(CONFIG_VARIABLE) if daemon.process else None
    uid = daemon.process.uid if daemon.process else None
    path = named or places(host, daemon.process, uid).toolkit_config
    text = reader(host, daemon).read_text(path) or host.read_text(DEFAULT_PATH) or ""
    try:
        return dig(tomllib.loads(text), *keys)
    except tomllib.TOMLDecodeError:
        return None  # whoever edits the file says what is wrong with it
