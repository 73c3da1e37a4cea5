"""The toolkit's list of low-level runtimes, where CRI-O keeps its own outside every PATH."""

from __future__ import annotations

from gpunode.facts.crio import CrioConfig
from gpunode.facts.crio_programs import RUNTIMES_KEY, low_level_paths, toolkit_runtimes
from gpunode.facts.toolkit_config import DEFAULT_PATH
from gpunode.host import Host
from gpunode.runtime.engine import FileEdit, decode
from gpunode.runtime.toolkit_file import with_settings


def toolkit_edit(
    host: Host, config: CrioConfig, version: tuple[int, ...]
) -> tuple[FileEdit | None, tuple[str, ...]]:
    """The edit that names CRI-O's real runtimes, and notes; None if one that is listed is found already."""
    content = host.read_bytes(DEFAULT_PATH)
    text = decode(content, DEFAULT_PATH)
    names = toolkit_runtimes(text)
    real = low_level_paths(host, config, version)
    if not real or any(host.which(name) for name in names):
        return None, ()
    wanted = [*real, *(name for name in names if name not in real)]
    if content is None:
        command = f"gpunode toolkit config set --create {'.'.join(RUNTIMES_KEY)}={','.join(wanted)}"
        return None, (f"nvidia-container-runtime won't find {real[0]} by itself; tell it: {command}",)
    after = with_settings(text, DEFAULT_PATH, {RUNTIMES_KEY: wanted})
    return FileEdit(DEFAULT_PATH, content, after.encode()), ()
