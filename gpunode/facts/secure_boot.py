"""Secure Boot: whether the firmware enforces signatures, and the certificates that it accepts."""

from __future__ import annotations

from gpunode.host import Host

_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
SHIM_KEY = "/var/lib/shim-signed/mok/MOK.der"
DKMS_KEY = "/var/lib/dkms/mok.pub"
AKMODS_KEY = "/etc/pki/akmods/certs/public_key.der"
_KEYS = (SHIM_KEY, DKMS_KEY, AKMODS_KEY)


def is_enforced(host: Host) -> bool | None:
    """Whether the firmware enforces signatures; None if unknown (no EFI).

    An efivars file contains four bytes of attributes, then the variable: one byte, 1 for on.
    """
    data = host.read_bytes(_SECURE_BOOT)
    return data[4] == 1 if data is not None and len(data) == 5 else None


def waiting_keys(host: Host) -> bytes | None:
    """Certificates for which MokManager prompts during the next boot (mokutil --import); None if there are
    none. shim keeps them in the variable MokNew of its vendor's GUID, which mokutil writes."""
    return host.read_bytes("/sys/firmware/efi/efivars/MokNew-605dab50-e046-4300-abb6-3dd810dd8b23")


def signing_key(host: Host) -> str:
    """The certificate with which this node's own builds of modules are signed (DKMS, akmods); empty if it has
    none."""
    return next((path for path in _KEYS if host.exists(path)), "")


def key_enrolled(host: Host, path: str) -> bool | None:
    """Whether Secure Boot accepts modules signed with this certificate, according to mokutil(1); None if it
    doesn't report it."""
    answer = host.run(["mokutil", "--test-key", path], timeout=5.0)
    if "is already enrolled" in answer.stdout:
        return True
    known = ("is not enrolled", "is already in the enrollment")
    return False if any(words in answer.stdout for words in known) else None


def enrolled_keys(host: Host) -> str | None:
    """The certificates that Secure Boot accepts beside the firmware's, as mokutil(1) prints them."""
    answer = host.run(["mokutil", "--list-enrolled"], timeout=5.0)
    return answer.stdout if answer.ok else None
