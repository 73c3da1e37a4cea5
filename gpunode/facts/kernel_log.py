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


# NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:2b85)
# NVRM: installed in this system requires use of the NVIDIA open kernel modules.
_GPU = re.compile(r"NVRM: The NVIDIA GPU (?P<address>[0-9a-fA-F:]+\.[0-7]) \(PCI ID")
UNSUPPORTED = (
    r"is not supported by the NVIDIA|requires use of the NVIDIA open"
    r"|not supported by open(?: nvidia\.ko|$)"  # one message, which drivers break in different places
)
_FAILED = re.compile(r"NVRM: GPU (?P<address>[0-9a-fA-F:]+\.[0-7]): (?:RmInitAdapter|rm_init_adapter) failed")
_MESSAGE_LINES = 6  # such a message is one printk over several lines


def failed_gpus(lines: tuple[KernelLine, ...]) -> frozenset[str]:
    """Addresses of the GPUs that the driver calls unsupported or failed to initialise."""
    found, address, left = set(), "", 0
    for line in lines:
        match = _GPU.match(line.text)
        if match is not None:
            address, left = match["address"].lower(), _MESSAGE_LINES
        if left and re.search(UNSUPPORTED, line.text):
            found.add(address)
        failed = _FAILED.match(line.text)
        if failed is not None:
            found.add(failed["address"].lower())
        left = max(0, left - 1)
    return frozenset(found)


def matching(lines: tuple[KernelLine, ...], pattern: str) -> tuple[tuple[KernelLine, re.Match[str]], ...]:
    """Lines in which the pattern is found, each with its match."""
    compiled = re.compile(pattern)
    return tuple((line, match) for line in lines if (match := compiled.search(line.text)))
