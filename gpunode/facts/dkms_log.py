"""Why DKMS or akmods couldn't build the module: the compiler's error in the log of the failed build."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpunode.dataclass import dataclass
from gpunode.host import Host

_TREE = "/var/lib/dkms"
_AKMODS = "/var/cache/akmods"  # KMOD/VERSION-for-KERNEL.failed.log (akmodsbuild(1))
_TAIL_BYTES = 1 << 20
_REALTIME = "is a PREEMPT_RT kernel"  # NVIDIA's conftest.sh
_FORBIDDEN = "GPL-incompatible module nvidia"  # a symbol that this kernel keeps from the proprietary module
# of the driver's sources, or of the kernel's headers below them; a compiler that fails itself isn't meant
_ERROR = r"\S+\.[ch]:\d+:\d+: error: "


@dataclass(frozen=True)
class FailedBuild:
    """The first line that says why, with its number (None in a log too long to be read from its beginning);
    `realtime` if the driver refuses the kernel as a realtime one."""

    path: str
    line: int | None
    text: str
    version: str
    realtime: bool


def failed_build(host: Host, release: str) -> FailedBuild | None:
    """Of the last try for this kernel, None if there was none, or no compiler's error in it."""
    for path, version in _logs(host, release):
        text = host.read_tail(path, _TAIL_BYTES)
        for number, line in enumerate(text.splitlines(), 1):
            realtime = _REALTIME in line
            if realtime or _FORBIDDEN in line or (" error: " in line and re.search(_ERROR, line)):
                whole = number if len(text) < _TAIL_BYTES else None
                return FailedBuild(path, whole, line.strip()[:200], version, realtime)
    return None


def _logs(host: Host, release: str) -> Iterator[tuple[str, str]]:
    """Logs of failed builds for this kernel, each with the driver's version."""
    for module in host.listdir(_TREE):
        if not module.startswith("nvidia"):
            continue
        for version in host.listdir(f"{_TREE}/{module}"):
            path = f"{_TREE}/{module}/{version}/build/make.log"
            lines = host.read_tail(path, _TAIL_BYTES).splitlines()
            if any(f"for kernel {release} " in f"{line} " for line in lines[:3]):
                yield path, version
    for module in host.listdir(_AKMODS):
        if module.startswith("nvidia"):
            for path in host.glob(f"{_AKMODS}/{module}", f"*-for-{release}.failed.log"):
                yield path, path.rpartition("/")[2].partition("-")[0]
