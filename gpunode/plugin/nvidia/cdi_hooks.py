"""Which hook program the CDI specifications name, and with which of its hooks."""

from __future__ import annotations

from gpunode.cdi.hooks import HookProgram, ask_hooks, find_hooks
from gpunode.dataclass import replace
from gpunode.facts.toolkit import hook_program
from gpunode.host import Host
from gpunode.plugin.nvidia.site import Roots
from gpunode.plugin.settings import Settings

_ASSUMED = frozenset(
    ("create-symlinks", "enable-cuda-compat", "update-ldcache", "disable-device-node-modification")
)


class HookChoice:
    """Asks a program for its hooks once, and again when it was replaced."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._asked: tuple[object, HookProgram | None] = ((), None)

    def choose(self, settings: Settings, roots: Roots) -> HookProgram | None:
        """None where there is no program, or all hooks are disabled: then mounts do without."""
        disabled = frozenset(settings.cdi_disable_hooks)
        if "all" in disabled:
            return None
        key = (settings.nvidia_cdi_hook_path, roots, self.programs(settings, roots))
        if self._asked[0] != key:
            self._asked = key, _find(self._host, settings, roots)
        found = self._asked[1]
        return replace(found, known=found.known - disabled) if found else None

    def programs(self, settings: Settings, roots: Roots) -> tuple[object, ...]:
        """Changes when one of them is installed, removed or replaced."""
        names = (hook_program(self._host, name) for name in ("nvidia-cdi-hook", "nvidia-ctk"))
        paths = (f"{_root(roots)}{settings.nvidia_cdi_hook_path}", *names)
        stats = (self._host.stat(path) for path in paths if path)
        return tuple((found.st_mtime_ns, found.st_size, found.st_ino) for found in stats if found)


def _root(roots: Roots) -> str:
    """Below which the node's programs can be looked at."""
    return roots.driver_here if roots.mounted and not roots.driver else ""


def _find(host: Host, settings: Settings, roots: Roots) -> HookProgram | None:
    """The program that the settings name; else, on the node itself, whichever is installed.

    From a container only what lies below the mounted root can be looked at. A path that was chosen there is
    believed; the default isn't, as containers wouldn't start without the program.
    """
    path = settings.nvidia_cdi_hook_path
    found = ask_hooks(host, path, _root(roots)) if path else None
    if found is not None or not roots.mounted:
        return found or find_hooks(host)
    if not path or path == Settings().nvidia_cdi_hook_path:
        return None
    name = path.rpartition("/")[2]
    return HookProgram(path, (name, "hook") if name == "nvidia-ctk" else (name,), _ASSUMED)
