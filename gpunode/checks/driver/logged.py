"""Lines of the kernel's log as evidence for something that a check has seen elsewhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from gpunode.errors import GpunodeError
from gpunode.facts.kernel_log import SOURCE, KernelLine, matching
from gpunode.facts.node import Node
from gpunode.result import Evidence

# nvidia 0000:01:00.0: Unable to change power state from D3cold to D0, device inaccessible
_DRIVER = (
    r"^(?:NVRM: |nvidia[\w-]*(?: [0-9a-f:.]+)?: |Lockdown: modprobe|Loading of |PKCS#7 )"
    r"|Key was rejected|nvidia.*Required key not available"
)
_FAILURE = re.compile(
    r"fail|error|unable|can'?t|cannot|could not|not supported|requires use|is invalid|is 0M|inaccessible"
    r"|no nvidia|none of the nvidia|not called|obtained ownership|fallen|time[d ]?-?out|reject|refus|denied"
    r"|restrict|conflict|mismatch|unsigned|disagrees|unknown symbol|version magic|not initialized|does not"
    r"|xid \(|installed in this system|PCI ID|not signed|power cables|is already bound",
    re.IGNORECASE,
)
# out-of-tree modules are always said to be unsigned and to taint; that loads all the same
_HARMLESS = re.compile(r"taint", re.IGNORECASE)
_SHOWN = 5
_STORM = 3  # the same XID of the same GPU this often is told once, with its number


def logged(node: Node, pattern: str) -> tuple[Evidence, ...]:
    """Lines of this boot in which the pattern is found, oldest first; () for a user who may not read them."""
    return tuple(_evidence(line) for line, _ in matching(_log(node), pattern))


def failures(node: Node, *addresses: str) -> tuple[Evidence, ...]:
    """The driver's failures of this boot, oldest first: the first of a series is the cause of the others.

    With `addresses` only those that name one of these GPUs.
    The driver tries again, so a line that differs from an earlier one in numbers alone isn't repeated.
    """
    places = [address.rpartition(".")[0].lower() for address in addresses]
    found: dict[str, KernelLine] = {}
    for line, _ in matching(_log(node), _DRIVER):
        text = line.text.lower()
        if not _FAILURE.search(text) or _HARMLESS.search(text):
            continue
        if not places or any(place in text for place in places):
            found.setdefault(re.sub(r"\b(?:0x[0-9a-f]+|\d+)\b", "N", text), line)
    return tuple(_evidence(line) for line in list(found.values())[:_SHOWN])


def xid_storms(node: Node) -> Iterator[Evidence]:
    """XIDs that one GPU repeats: the first line of each and how often it came."""
    try:
        lines = node.xids
    except GpunodeError:
        return
    counts = Counter((line.address, line.number) for line in lines)
    for place, count in counts.items():
        first = next(line for line in lines if (line.address, line.number) == place)
        if count >= _STORM:
            yield Evidence(SOURCE, f"[{first.seconds:.6f}] {first.text} (the first of {count})", None)


def _log(node: Node) -> tuple[KernelLine, ...]:
    try:
        return node.kernel_log
    except GpunodeError:
        return ()


def _evidence(line: KernelLine) -> Evidence:
    return Evidence(SOURCE, f"[{line.seconds:.6f}] {line.text}", None)
