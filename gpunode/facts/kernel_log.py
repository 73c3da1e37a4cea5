"""The kernel's log of this boot: messages of the driver, the bus and the module loader."""

from __future__ import annotations

import re
from typing import NamedTuple

from gpunode.host import Host

SOURCE = "dmesg"
"""Command that shows these lines to a user."""

# /dev/kmsg: level,sequence,microseconds,flags;text (ABI/testing/dev-kmsg); dmesg: [seconds] text
_KMSG = re.compile(r"(?P<level>\d+),\d+,(?P<microseconds>\d+),[^;]*;(?P<text>.*)", re.DOTALL)
_DMESG = re.compile(r"\[\s*(?P<seconds>\d+\.\d+)\]\s?(?P<text>.*)", re.DOTALL)


class KernelLine(NamedTuple):
    """`seconds` are since the boot. The text is as the kernel has it, escapes (``\\x0a``) included."""

    seconds: float
    text: str


def read_kernel_log(host: Host) -> tuple[KernelLine, ...]:
    """Oldest first; () if no log is kept. `Unreadable` without permission. Lines that a process wrote (a
    facility other than the kernel's) are left out: any user with access could have written them."""
    result = []
    for line in host.kernel_log() or ():
        kmsg = _KMSG.fullmatch(line)
        if kmsg is not None:
            if int(kmsg["level"]) >> 3 == 0:
                result.append(KernelLine(int(kmsg["microseconds"]) / 1e6, kmsg["text"]))
            continue
        dmesg = _DMESG.fullmatch(line)
        if dmesg is not None:
            result.append(KernelLine(float(dmesg["seconds"]), dmesg["text"]))
    return tuple(result)


# NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:2b85)
# NVRM: installed in this system requires use of the NVIDIA open kernel modules.
_GPU = re.compile(r"NVRM: The NVIDIA GPU (?P<address>[0-9a-fA-F:]+\.[0-7]) \(PCI ID")
UNSUPPORTED = (
    r"is not supported by the NVIDIA|requires use of the NVIDIA open"
    r"|not supported by open(?: nvidia\.ko|$)"  # one message, which drivers break in different places
)
_FAILED = re.compile(r"NVRM: GPU (?P<address>[0-9a-fA-F:]+\.[0-7]): (?:RmInitAdapter|rm_init_adapter) failed")
_LOADING = "NVRM: loading NVIDIA UNIX"  # proprietary and open modules alike
_MESSAGE_LINES = 6  # such a message is one printk over several lines


def failed_gpus(lines: tuple[KernelLine, ...]) -> frozenset[str]:
    """Addresses of the GPUs that the driver reports as unsupported or failed to initialise."""
    addresses, address, left = set(), "", 0
    for line in lines:
        match = _GPU.match(line.text)
        if match is not None:
            address, left = match["address"].lower(), _MESSAGE_LINES
        if left and re.search(UNSUPPORTED, line.text):
            addresses.add(address)
        failed = _FAILED.match(line.text)
        if failed is not None:
            addresses.add(failed["address"].lower())
        left = max(0, left - 1)
    return frozenset(addresses)


def matching(lines: tuple[KernelLine, ...], pattern: str) -> tuple[tuple[KernelLine, re.Match[str]], ...]:
    """Lines that match the pattern, each with its match."""
    compiled = re.compile(pattern)
    return tuple((line, match) for line in lines if (match := compiled.search(line.text)))


def last_load(log: tuple[KernelLine, ...]) -> float:
    """When the driver was last loaded, in seconds since the boot; 0 if the log doesn't go back that far."""
    return max((line.seconds for line in log if line.text.startswith(_LOADING)), default=0.0)
