"""The toolkit's config.toml as its programs understand it: a key of the file, else its default."""

from __future__ import annotations

from typing import Any

from gpunode.dataclass import dataclass
from gpunode.facts.containerd import dig, parse_toml
from gpunode.facts.toolkit import Toolkit
from gpunode.facts.toolkit_config import DEFAULT_PATH, Key, keys_for, wrong
from gpunode.host import Host
from gpunode.tables import gate

# the toolkit's own container sets XDG_CONFIG_HOME to this for the programs that it installs
_BESIDE = "/.config/nvidia-container-runtime/config.toml"
MODE = "nvidia-container-runtime.mode"
NO_CGROUPS = "nvidia-container-cli.no-cgroups"
LDCONFIG = "nvidia-container-cli.ldconfig"
RUNTIMES = "nvidia-container-runtime.runtimes"
DEFAULT_KIND = "nvidia-container-runtime.modes.cdi.default-kind"
SPEC_DIRS = "nvidia-container-runtime.modes.cdi.spec-dirs"
BY_ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"
BY_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"


@dataclass(frozen=True)
class Settings:
    """`exists` is False where there is no file and all defaults hold; `tree` is what the file has."""

    path: str
    exists: bool
    text: str
    tree: dict[str, Any]
    keys: tuple[Key, ...]

    def value(self, name: str) -> Any:
        """What is in force for this key; the default where the file has none, or one of a wrong type."""
        key = next(one for one in self.keys if one.name == name)
        found = dig(self.tree, *key.path)
        return key.default if found is None or wrong(key, found, self.tree) else found

    def line(self, name: str) -> int | None:
        """Where the file has the key, None where it hasn't."""
        from gpunode.facts.toml_places import line_of_key

        path = tuple(name.split("."))
        return line_of_key(self.text, path) or None if dig(self.tree, *path) is not None else None

    def problems(self) -> tuple[tuple[str, str], ...]:
        """Keys that hold what the toolkit doesn't take, each with a sentence that says why."""
        found = ((key, dig(self.tree, *key.path)) for key in self.keys)
        told = ((key.name, wrong(key, value, self.tree)) for key, value in found if value is not None)
        return tuple((name, problem) for name, problem in told if problem)


def read_settings(host: Host, toolkit: Toolkit) -> Settings:
    """Those of the toolkit that the engines here run; `ConfigError` names the line that can't be parsed."""
    path = DEFAULT_PATH
    runtime = toolkit.programs.get("nvidia-container-runtime", "")
    beside = runtime.rpartition("/")[0] + _BESIDE
    if not runtime.startswith(("/usr/bin/", "/usr/sbin/")) and host.is_file(beside):
        path = beside
    text = host.read_text(path)
    return Settings(path, text is not None, text or "", parse_toml(text or "", path), keys_for(host))


def runtime_mode(settings: Settings, version: tuple[int, ...]) -> str:
    """How nvidia-container-runtime puts GPUs into containers: legacy, cdi, csv, jit-cdi; empty if unknown.

    ``auto`` means csv on Tegra, which `facts/system.py` tells; elsewhere it is what the release makes of it.
    """
    mode = str(settings.value(MODE))
    if mode != "auto":
        return mode
    if not version:
        return ""
    return "jit-cdi" if version >= gate("toolkit", "jit-cdi") else "legacy"
