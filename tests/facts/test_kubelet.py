"""The kubelet's disk pressure thresholds: its settings, in all formats."""

import pytest

from gpunode.facts.kubelet import amount, eviction_limits, parse_eviction_hard, parse_flag
from gpunode.facts.processes import Process

YAML = """apiVersion: kubelet.config.k8s.io/v1beta1
evictionHard:
  imagefs.available: 15%
  # of a file system, not of a disk
  nodefs.available: "1Gi"
  nodefs.inodesFree: '5%'
evictionPressureTransitionPeriod: 0s
memory.available: 1%
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (YAML, {"imagefs.available": "15%", "nodefs.available": "1Gi", "nodefs.inodesFree": "5%"}),
        ('{"evictionHard": {"nodefs.available": "5%"}, "failSwapOn": false}', {"nodefs.available": "5%"}),
        ('evictionHard: {nodefs.available: "0%"}\n', {"nodefs.available": "0%"}),
        ('--root-dir=/x\n--eviction-hard="memory.available<100Mi,nodefs.available<1Gi"\n--v=2\n',
         {"memory.available": "100Mi", "nodefs.available": "1Gi"}),
        ("evictionHard:\nfailSwapOn: false\n", {}),
        ("evictionSoft:\n  nodefs.available: 20%\n", {}),
        ("", {}),
    ],
)  # fmt: skip
def test_limits_are_read_from_a_file(text, expected):
    assert parse_eviction_hard(text) == expected


def test_flag_takes_precedence():
    kubelet = Process(1, ("kubelet", "--eviction-hard=imagefs.available<5%,nodefs.available<5%"), 0.0)
    assert eviction_limits([YAML], kubelet) == {"imagefs.available": "5%", "nodefs.available": "5%"}
    assert eviction_limits([YAML], Process(1, ("kubelet",), 0.0)) == parse_eviction_hard(YAML)
    assert eviction_limits([YAML], None) == parse_eviction_hard(YAML)
    assert parse_flag("nonsense,=,nodefs.available<1Gi") == {"nodefs.available": "1Gi"}


@pytest.mark.parametrize(
    ("limit", "number"),
    [
        ("10%", 100), ("12.5%", 125), ("1Gi", 1 << 30), ("100M", 10**8), ("5", 5), ("0%", 0),
        ("", None), ("-1Gi", None), ("1e400", None), ("٣%", None), ("9" * 40, None),
    ],
)  # fmt: skip
def test_quantities_are_parsed(limit, number):
    assert amount(limit, 1000) == number
