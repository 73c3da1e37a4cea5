"""Why a package manager failed, from what it prints: the first pattern that is found."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpunode.host import Completed
from gpunode.packages.manager import Failure, Trouble

Pattern = tuple[Trouble, str]
# what the kernel, the clock and TLS refuse reads alike in all of them, and is why whatever else is said
_COMMON: tuple[Pattern, ...] = (
    (Trouble.READ_ONLY, r"Read-only file system"),
    (Trouble.NO_SPACE, r"No space left on device|Disk quota exceeded"),
    (Trouble.CLOCK, r"^E: Release file .* is (not valid yet|expired)"),
    (Trouble.CLOCK, r"[Cc]ertificate.*(expired|not( yet)? (valid|activated)|not yet valid)"),
    (
        Trouble.CERTIFICATE,
        r"Certificate verification failed|certificate is NOT trusted|SSL certificate problem",
    ),
)
HINTS = {
    Trouble.SIGNATURE: "the repository's key is missing, expired or another; give the right one: --key FILE",
    Trouble.CONFLICTING_SOURCES: "two files name this repository with different keys: gpunode toolkit status",
    Trouble.NETWORK: "the repository can't be reached: see its name, the network and the proxy (sudo drops "
    "http_proxy: sudo -E), or use --repository URL or --from DIR",
    Trouble.CERTIFICATE: "this node doesn't trust its certificate: add the CA of the proxy or the mirror "
    "(update-ca-certificates, update-ca-trust)",
    Trouble.CLOCK: "this node's clock is wrong (timedatectl), or the mirror isn't kept up any more",
    Trouble.NO_REPOSITORY: "there is nothing at that address: --repository takes the one below which "
    "stable/deb or stable/rpm lies",
    Trouble.NOT_FOUND: "see what there is: gpunode toolkit status",
    Trouble.HELD: "a version lock or an exclusion stands in the way: gpunode toolkit status",
    Trouble.INTERRUPTED: "finish the earlier transaction first: dpkg --configure -a",
    Trouble.NO_SPACE: "make room, then run this again: df -h, df -i",
    Trouble.READ_ONLY: "a file system is read-only, and dmesg may say why: findmnt -O ro",
    Trouble.TIMED_OUT: "see in what state it left the packages before going on",
}
_SHOWN = 300


def failure(done: Completed, patterns: Sequence[Pattern], *, noise: str = r"(?!)") -> Failure:
    """The first line that a pattern fits, else the last one that says anything but `noise`."""
    text = f"{done.stdout}\n{done.stderr}"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.search(noise, line)]
    if done.timed_out:
        return _made(Trouble.TIMED_OUT, "it said nothing for too long, and was ended")
    for trouble, pattern in (*_COMMON, *patterns):
        for line in lines:
            if re.search(pattern, line):
                return _made(trouble, line)
    return _made(Trouble.OTHER, lines[-1] if lines else f"exit code {done.code}")


def _made(trouble: Trouble, said: str) -> Failure:
    printable = "".join(char if char.isprintable() else " " for char in said)
    return Failure(trouble, printable[:_SHOWN], HINTS.get(trouble, ""))
