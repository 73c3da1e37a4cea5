"""What is known about a containerd's files before a change is planned."""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.dataclass import dataclass
from gpunode.facts.containerd import ContainerdConfig
from gpunode.runtime.trees import Tree

DROP_IN_NAME = "conf.d/99-nvidia.toml"
# where NVIDIA's tools have put their drop-in over the years, relative to the main file's directory
NVIDIA_DROP_INS = (DROP_IN_NAME, "config.d/99-nvidia.toml")


@dataclass(frozen=True)
class State:
    """`texts` has every file that may be edited. `effective` is containerd's merged view, None if unknown.

    `drop_in` is the path for a drop-in, `drop_in_forced` whether the user named it. `systemd_cgroup` is what
    a CRI that is switched on only now, or that had no file, should use. `neighbours` are TOML files beside
    the drop-in, read by containerd or not.
    """

    config: ContainerdConfig
    texts: Mapping[str, str]
    release: tuple[int, ...]
    effective: Tree | None = None
    drop_in: str = ""
    drop_in_forced: bool = False
    systemd_cgroup: bool = False
    neighbours: tuple[str, ...] = ()

    @property
    def deep(self) -> bool:
        """Whether this containerd merges a drop-in key by key."""
        return self.config.deep

    @property
    def release_text(self) -> str:
        """The release for people."""
        return ".".join(map(str, self.release)) or "(unknown release)"

    @property
    def newest_version(self) -> int:
        """The file version that this release writes itself."""
        return 4 if self.release >= (2, 3) else 3 if self.deep else 2
