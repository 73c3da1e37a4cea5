"""The kernel's log of this boot: what the driver, the bus and the loader had to say."""

from __future__ import annotations

import re

from gpunode.dataclass import dataclass
from gpunode.host import Host

SOURCE = "dmesg"
"""How a person finds these lines again."""

# /dev/kmsg: level,sequence,microseconds,flags;text (ABI/testing/dev-kmsg); dmesg: [seconds] text
_KMSG = re.compile(r"(?P<level>\d+),\d+,(?P<microseconds>\d+),[^;]*;(?P<text>.*)", re.DOTALL)
_DMESG = re.compile(r"\[\s*(?P<seconds>\d+\.\d+)\]\s?(?P<text>.*)", re.DOTALL)


@dataclass(frozen=True)
class KernelLine:
    """`seconds` are since the boot. The text is as the kernel has it, escapes (``\\x0a``) included."""

    seconds: float
    text: str


def read_kernel_log(host: Host) -> tuple[KernelLine, ...]:
    """Oldest first; () where no log is kept. `Unreadable` if this user may not. What a process wrote into it
    (a facility other than the kernel's) is left out: anybody with access could have."""
    found = []
    for line in host.kernel_log() or ():
        kmsg = _KMSG.fullmatch(line)
        if kmsg is not None:
            if int(kmsg["level"]) >> 3 == 0:
                found.append(KernelLine(int(kmsg["microseconds"]) / 1e6, kmsg["text"]))
            continue
        dmesg = _DMESG.fullmatch(line)
        if dmesg is not None:
            found.append(KernelLine(float(dmesg["seconds"]), dmesg["text"]))
    return tuple(found)


def matching(lines: tuple[KernelLine, ...], pattern: str) -> tuple[tuple[KernelLine, re.Match[str]], ...]:
    """Lines in which the pattern is found, each with its match."""
    compiled = re.compile(pattern)
    return tuple((line, match) for line in lines if (match := compiled.search(line.text)))
