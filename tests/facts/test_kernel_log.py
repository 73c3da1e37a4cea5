"""The kernel's log as /dev/kmsg and as dmesg show it."""

from pathlib import Path

from gpunode.facts.kernel_log import KernelLine, matching, read_kernel_log
from gpunode.host import Host

LOG = """\
[    3.000001] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.
6,100,4000002,-;nvidia: module license 'NVIDIA' taints kernel.
 SUBSYSTEM=pci
30,101,5000000,-;NVRM: Xid (PCI:0000:3b:00): 48, said by a process
nonsense
"""


def test_both_formats_are_read_and_messages_of_processes_are_not(tmp_path: Path) -> None:
    (tmp_path / ".gpunode").mkdir()
    (tmp_path / ".gpunode/kernel.log").write_text(LOG)
    lines = read_kernel_log(Host(tmp_path))
    assert lines == (
        KernelLine(3.000001, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."),
        KernelLine(4.000002, "nvidia: module license 'NVIDIA' taints kernel."),
    )
    ((line, match),) = matching(lines, r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\).*?: (\d+),")
    assert (line, match[1], match[2]) == (lines[0], "0000:3b:00", "79")


def test_missing_log_has_no_lines(tmp_path: Path) -> None:
    assert read_kernel_log(Host(tmp_path)) == ()
