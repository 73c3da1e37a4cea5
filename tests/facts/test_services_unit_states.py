"""systemd's output for many units at once."""

import json
from collections.abc import Sequence

import pytest

from gpunode.facts.node import Node
from gpunode.facts.services import COMMAND, UNITS, parse_unit_states, read_unit_states
from gpunode.facts.topic import Stuck
from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.host.recording import RECORDING

# what systemctl show prints for a running unit, a failed one that has an alias, and a missing one
OUTPUT = """\
Result=success
Id=docker.service
Names=docker.service
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled

Result=exit-code
Id=chrony.service
Names=chrony.service chronyd.service
LoadState=loaded
ActiveState=failed
SubState=failed
UnitFileState=disabled

Result=success
Id=nvlsm.service
Names=nvlsm.service
LoadState=not-found
ActiveState=inactive
SubState=dead
UnitFileState=
"""


def test_units_are_found_under_all_their_names():
    states = parse_unit_states(OUTPUT)
    assert sorted(states) == ["chrony.service", "chronyd.service", "docker.service", "nvlsm.service"]
    assert states["docker.service"].runs and states["docker.service"].at_boot
    assert str(states["docker.service"]) == "active (running), enabled"
    assert str(states["chronyd.service"]) == "failed (failed), disabled, exit-code"
    assert not states["chronyd.service"].runs and states["chronyd.service"].installed
    assert not states["nvlsm.service"].installed


@pytest.mark.parametrize("text", ["", "\n\n\n", "garbage", "=\n=", "Id=\n", "Failed to connect to bus"])
def test_invalid_response_gives_no_states(text):
    assert parse_unit_states(text) == {}


def test_recorded_machine_needs_only_the_recorded_units(tmp_path):
    recording = tmp_path / RECORDING
    recording.parent.mkdir()
    commands = {f"{' '.join(COMMAND)} docker.service chrony.service nvlsm.service": {"stdout": OUTPUT}}
    recording.write_text(json.dumps({"commands": commands}))
    assert len(read_unit_states(Host(tmp_path))) == 4
    assert read_unit_states(Host(tmp_path / "nothing")) == {}


QUERIES: list[Sequence[str]] = []


class Hanging(Host):
    live = True

    def is_dir(self, path):
        return True

    def run(self, argv, **_):
        QUERIES.append(argv)
        assert tuple(argv) == (*COMMAND, *UNITS)
        return Completed(tuple(argv), -9, "", "", timed_out=True)


def test_hanging_systemd_is_waited_for_once():
    node = Node(Hanging())
    with pytest.raises(Stuck) as raised:
        _ = node.units
    assert raised.value.first
    with pytest.raises(Stuck) as again:
        _ = node.units
    assert not again.value.first and len(QUERIES) == 1
