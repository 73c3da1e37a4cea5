"""What CRI-O and podman, which read CDI without a switch, may still need: no old hook, a directory read."""

from __future__ import annotations

from collections.abc import Iterable

from gpunode.facts.oci_hooks import nvidia_hooks
from gpunode.host import Host
from gpunode.runtime.engine import FileEdit

_DIRECTORIES = {"/etc/cdi", "/var/run/cdi", "/run/cdi"}


def hook_removals(host: Host, directories: Iterable[str]) -> tuple[FileEdit, ...]:
    """Edits that remove NVIDIA's old OCI hooks from these directories."""
    hooks = nvidia_hooks(host, tuple(directories))
    return tuple(FileEdit(hook.path, host.read_bytes(hook.path), None) for hook in hooks)


def injects_twice(path: str) -> str:
    """The note about an old hook that stays beside a runtime."""
    return (
        f"{path} is NVIDIA's old OCI hook: beside the runtime it injects GPUs a second time;"
        f" rm {path}, or let --cdi remove it"
    )


def reads_none(engine: str, where: str, directories: Iterable[str]) -> str:
    """The note about an engine whose setting names none of CDI's own directories; "" where it names one."""
    named = tuple(directories)
    if _DIRECTORIES & set(named):
        return ""
    return (
        f"cdi_spec_dirs {where} is {', '.join(named) or 'empty'}: {engine} reads no specification"
        " from /etc/cdi or /var/run/cdi until one of them stands there"
    )
