"""What k3s and rke2 find of NVIDIA's programs when they start, and so register by themselves."""

from __future__ import annotations

from collections.abc import Container

from gpunode.errors import GpunodeError
from gpunode.facts.daemons import Daemon
from gpunode.facts.units import read_unit
from gpunode.host import Host

# what both put before their PATH while they look, and the names under which they register what they find
_FIRST = ("/usr/local/nvidia/toolkit", "/opt/kwasm/bin")
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = {
    "nvidia": "nvidia-container-runtime",
    "nvidia-cdi": "nvidia-container-runtime.cdi",
    "nvidia-experimental": "nvidia-container-runtime-experimental",
}
SEARCHED = tuple(_PROGRAMS)


def found_at_start(host: Host, daemon: Daemon, rendered: Container[str]) -> dict[str, str]:
    """Programs that a start would find, by the name of their handler.

    Which of the variants are looked for changed from release to release, so only those count that the
    rendered file has too. `nvidia` is looked for by all, though before October 2024 not in all of PATH: one
    that the last start could have found and that isn't rendered is none that the next one finds.
    """
    places = (*_FIRST, *filter(None, _path(host, daemon).split(":")))
    found = {
        name: next((path for place in places if host.executable(path := f"{place}/{program}")), "")
        for name, program in _PROGRAMS.items()
    }
    missed = found["nvidia"] and "nvidia" not in rendered and _was_there(host, daemon, found["nvidia"])
    sure = () if missed else ("nvidia",)
    return {name: path for name, path in found.items() if path and (name in sure or name in rendered)}


def _was_there(host: Host, daemon: Daemon, path: str) -> bool:
    """Whether a program was installed before the running containerd was started."""
    found = host.stat(path)
    # a package keeps the time at which its files were built: only the inode's change is the installation's
    return found is not None and daemon.process is not None and found.st_ctime < daemon.process.started


def registration(name: str, path: str, plugin: str) -> str:
    """About what the base template adds to the rendered file for a program that is found."""
    table = f"plugins.'{plugin}'.containerd.runtimes.'{name}'"
    kind = 'runtime_type = "io.containerd.runc.v2"'
    return f"[{table}]\n  {kind}\n[{table}.options]\n  BinaryName = '{path}'\n"


def _path(host: Host, daemon: Daemon) -> str:
    """The PATH of the service: its unit's, else that of its running containerd, else systemd's own."""
    unit = read_unit(host, daemon.unit) if daemon.unit else None
    given = unit.environment.get("PATH", "") if unit else ""
    if given or daemon.process is None:
        return given or _DEFAULT_PATH
    try:
        raw = host.read_bytes(f"/proc/{daemon.process.pid}/environ") or b""
    except GpunodeError:
        return _DEFAULT_PATH
    pairs = (part.partition(b"=") for part in raw.split(b"\0"))
    own = next((value for key, _, value in pairs if key == b"PATH"), b"")
    return own.decode("utf-8", "replace") or _DEFAULT_PATH
