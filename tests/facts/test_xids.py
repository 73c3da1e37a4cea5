"""XIDs in the kernel's log."""

import pytest

from gpunode.facts.kernel_log import KernelLine
from gpunode.facts.xids import address_of, fallen_off, xid_lines

LINES = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:3B:00): 13, pid=2213, name=python, Graphics Exception: ESR 0x50",
    "NVRM: Xid (0000:0a:00): 31, Ch 00000010, engmask 00000101",
    "NVRM: Xid (PCI:0000:04:00): 154, GPU recovery action changed "
    "from 0x0 (None) to 0x1 (GPU Reset Required)",
    "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
)


def log(*texts):
    return tuple(KernelLine(float(number), text) for number, text in enumerate(texts))


def test_number_and_address_are_read():
    assert [(one.address, one.number) for one in xid_lines(log(*LINES))] == [
        ("0000:3b:00.0", 79),
        ("0000:3b:00.0", 13),
        ("0000:0a:00.0", 31),
        ("0000:04:00.0", 154),
    ]


def test_gpus_that_fell_off_the_bus_are_listed():
    assert {one.address for one in fallen_off(log(*LINES))} == {"0000:3b:00.0"}
    assert len(fallen_off(log(*LINES))) == 2


@pytest.mark.parametrize(
    "text",
    [
        "python: NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
        "NVRM: Xid (PCI:0000:3b:00): 123456, pid=1",
        "NVRM: Xid (PCI:0000:3b:00)",
        "NVRM: Xid (PCI:no): 79, x",
        "NVRM: GPU at somewhere: GPU has fallen off the bus.",
        "",
    ],
)
def test_other_lines_are_skipped(text):
    assert xid_lines(log(text)) == () and fallen_off(log(text)) == ()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:3B:00", "0000:3b:00.0"),
        ("00000000:3b:00.0", "0000:3b:00.0"),
        ("00010000:3b:00", "00010000:3b:00.0"),
        ("3b:00", "0000:3b:00.0"),
    ],
)
def test_address_is_formatted_as_in_sysfs(text, address):
    assert address_of(text) == address
