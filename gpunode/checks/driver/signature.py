"""Secure Boot: whether the firmware's chain of keys accepts the module, now and at the next boot."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.driver import packages, remedies
from gpunode.checks.model import ANY_ENGINE, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.facts import driver
from gpunode.facts.node import Node
from gpunode.result import Fix

# whose certificates shim or the kernel carries, so that their modules need no enrolment
_DISTRIBUTION_SIGNERS = (
    "Canonical", "Ubuntu", "Debian Secure Boot", "Red Hat", "Fedora", "CentOS", "Rocky", "AlmaLinux",
    "Oracle", "Amazon", "SUSE", "openSUSE",
)  # fmt: skip


def secureboot_unsigned(node: Node) -> Verdict:
    if not node.secure_boot:
        return ok("Secure Boot is off")
    if node.module is not None:
        return ok("Secure Boot is on and the kernel accepted the module")
    file = node.module_file
    if file is None:
        return skip("modinfo tells nothing of the module's signature")
    state = seen("/sys/firmware/efi/efivars/SecureBoot-*", "1 (on)")
    if not file.signer:
        signature = seen("modinfo -F signer nvidia", "(not signed)")
        fix = packages.enrol_key(node, signed=False)
        return fail("Secure Boot is on and the NVIDIA module isn't signed", state, signature, fix=fix)
    signed = seen("modinfo -F signer nvidia", file.signer)
    if any(name in file.signer for name in _DISTRIBUTION_SIGNERS):
        return ok("Secure Boot is on and the distribution signed the module", signed)
    enrolled = driver.enrolled_keys(node.host)
    if enrolled is None:
        return skip("mokutil can't tell whether the module's key is enrolled")
    if file.signer in enrolled:
        return ok("Secure Boot is on and the module's key is enrolled", signed)
    if file.signer.encode() in (driver.waiting_keys(node.host) or b""):
        return fail(
            "the key that signed the NVIDIA module waits to be confirmed at the console during the next boot",
            state,
            signed,
            fix=Fix("mokutil --list-new && reboot", True, "reboot"),
        )
    return fail(
        "Secure Boot is on and the key that signed the NVIDIA module isn't enrolled",
        state,
        signed,
        fix=packages.enrol_key(node, signed=True),
    )


def mok_pending(node: Node) -> Verdict:
    if not node.secure_boot:
        return ok("Secure Boot is off")
    waiting = driver.waiting_keys(node.host)
    if not waiting:
        return ok("no key waits to be enrolled")
    signer = node.module_file.signer if node.module_file else ""
    if not signer:
        return skip("modinfo doesn't tell who signed the module")
    if signer.encode() not in waiting:
        return ok("a key waits to be enrolled, and it isn't the NVIDIA module's")
    return warn(
        "the NVIDIA module's key waits to be confirmed at the console during the next boot",
        seen("/sys/firmware/efi/efivars/MokNew-*", f"a certificate of {len(waiting)} bytes"),
        seen("modinfo -F signer nvidia", signer),
    )


CHECKS = (
    Check(
        id="secureboot-unsigned",
        title="Secure Boot accepts the module",
        layer="driver",
        severity="error",
        looks_at=(
            "the efivar SecureBoot, the module's signer (modinfo) and the enrolled keys (mokutil). A loaded "
            "module was accepted."
        ),
        why=(
            "With Secure Boot the kernel refuses a module whose signature it can't trace to an enrolled "
            "key: Key was rejected by service. Enrolling asks for a password at the console during the next "
            "boot."
        ),
        remedy=fixes.ENROL_KEY,
        run=secureboot_unsigned,
        blocked_by=("driver-not-installed", "dkms-not-built"),
        preflight=ANY_ENGINE,
        reboot=True,
        refs=(
            "https://wiki.debian.org/SecureBoot",
            "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
        ),
    ),
    Check(
        id="mok-pending",
        title="No key waits for the next boot",
        layer="driver",
        severity="warning",
        looks_at=(
            "the efivar MokNew, where mokutil --import leaves a key for MokManager, on a Secure Boot node."
        ),
        why=(
            "MokManager asks for the key's password at the console (or the BMC's) and gives up after ten "
            "seconds. If nobody answers, the key is dropped and the kernel refuses what it signed. Have the "
            "console open before you reboot, and choose Enroll MOK."
        ),
        remedy=remedies.LIST_NEW_KEYS,
        run=mok_pending,
        blocked_by=("driver-not-installed", "secureboot-unsigned"),
        unless=("operator-driver",),
        reboot=True,
        refs=("https://wiki.debian.org/SecureBoot",),
    ),
)
