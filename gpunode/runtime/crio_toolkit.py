"""The toolkit's list of low-level runtimes, where CRI-O keeps its own outside every PATH.

CRI-O's packages put crun and runc into /usr/libexec/crio. nvidia-container-runtime takes the first of
``nvidia-container-runtime.runtimes`` that it finds, by default the bare names, and fails every pod without.
"""

from __future__ import annotations

from gpunode.facts.containerd import dig, parse_toml
from gpunode.facts.crio import CrioConfig, compiled_default
from gpunode.facts.toolkit_config import DEFAULT_PATH
from gpunode.host import Host
from gpunode.runtime.crio_handlers import is_low_level
from gpunode.runtime.engine import FileEdit, decode
from gpunode.runtime.toolkit_file import with_settings

_KEY = ("nvidia-container-runtime", "runtimes")
_TOOLKIT_DEFAULT = ["runc", "crun"]
_PACKAGED = ("/usr/libexec/crio/crun", "/usr/libexec/crio/runc")


def toolkit_edit(
    host: Host, config: CrioConfig, version: tuple[int, ...]
) -> tuple[FileEdit | None, tuple[str, ...]]:
    """The edit that names CRI-O's real runtimes, and notes; None if one that is listed is found already."""
    content = host.read_bytes(DEFAULT_PATH)
    text = decode(content, DEFAULT_PATH)
    listed = dig(parse_toml(text, DEFAULT_PATH), *_KEY)
    names = [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else _TOOLKIT_DEFAULT
    real = _real_paths(host, config, version)
    if not real or any(host.which(name) for name in names):
        return None, ()
    wanted = [*real, *(name for name in names if name not in real)]
    if content is None:
        command = f"gpunode toolkit config set --create {'.'.join(_KEY)}={','.join(wanted)}"
        return None, (f"nvidia-container-runtime won't find {real[0]} by itself; tell it: {command}",)
    after = with_settings(text, DEFAULT_PATH, {_KEY: wanted})
    return FileEdit(DEFAULT_PATH, content, after.encode()), ()


def _real_paths(host: Host, config: CrioConfig, version: tuple[int, ...]) -> list[str]:
    """Where crun and runc are: the default's first, then other handlers', then the packages' place."""
    default = config.named_default or compiled_default(version)
    tables = sorted(config.handlers.items(), key=lambda pair: pair[0] != default)
    named = [str(table.get("runtime_path", "")) for name, table in tables if is_low_level(name, table)]
    absolute = [path for path in (*named, *_PACKAGED) if path.startswith("/")]
    return [path for path in dict.fromkeys(absolute) if host.executable(path)]
