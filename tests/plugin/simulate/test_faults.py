"""Faults of simulated GPUs, without a plugin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import ConfigError, GpunodeError, UsageError
from gpunode.gpu.model import GPU_IS_LOST
from gpunode.gpu.nvml import FABRIC_STATES, GpuEvent
from gpunode.gpu.nvml_health import RECOVERY_ACTIONS
from gpunode.plugin.simulate.faults import FAULTS, Fault, make_fault, parse_fault, parse_script
from gpunode.plugin.simulate.node import DRIVER_GONE, LOST, SimulatedNode
from tests.cli import gpunode


def test_fault_values_are_those_of_readings() -> None:
    assert set(FAULTS["recovery"].value) == set(RECOVERY_ACTIONS)
    assert set(FAULTS["fabric"].value) == set(FABRIC_STATES) - {None}


def happen(node: SimulatedNode, name: str, value: str = "", gpu: str = "") -> tuple[GpuEvent, ...]:
    return node.apply(make_fault(name, value, gpu))


def test_xid_is_an_event_with_the_recovery_action_of_its_class() -> None:
    node = SimulatedNode("h100:4")
    before = node.inventory
    uuid = before.gpus[2].uuid
    assert happen(node, "xid", "31", "2") == (GpuEvent("xid", uuid, 31),)
    assert [reading.recovery_action for reading in node.readings] == ["none"] * 4
    happen(node, "xid", "95", "2")
    assert [reading.recovery_action for reading in node.readings] == ["none", "none", "reset", "none"]
    happen(node, "reset", "", "2")
    assert [reading.recovery_action for reading in node.readings] == ["none"] * 4
    assert node.inventory == before


def test_errors_add_up_and_a_reset_clears_them() -> None:
    node = SimulatedNode("h100:2,node=x")
    events = [*happen(node, "ecc", "2", "1"), *happen(node, "ecc", "3", node.inventory.gpus[1].uuid)]
    assert [event.kind for event in events] == ["ecc-double"] * 2
    for fault in (("remap", "pending", "1"), ("recovery", "reset", "1"), ("fabric", "", "1")):
        happen(node, *fault)
    first, second = node.readings
    assert (first.ecc_volatile, first.remap_pending, first.recovery_action) == (0, False, "none")
    assert (second.ecc_volatile, second.ecc_aggregate) == (5, 5)
    assert (second.remap_pending, second.recovery_action, second.fabric_state) == (True, "reset", None)
    happen(node, "reset", "", "all")
    _, second = node.readings
    assert (second.ecc_volatile, second.ecc_aggregate) == (0, 5)
    assert (second.remap_pending, second.recovery_action) == (False, "none")


def test_only_heal_clears_a_failed_remapping() -> None:
    node = SimulatedNode("h100:8")
    happen(node, "remap", "failed", "0")
    happen(node, "fabric", "in-progress", "0")
    assert node.readings[0].fabric_state == "in-progress"
    happen(node, "reset", "", "0")
    assert node.readings[0].remap_failed is True
    happen(node, "heal", "", "0")
    assert node.readings[0].remap_failed is False


def test_lost_gpu_is_listed_and_unplugged_is_not() -> None:
    node = SimulatedNode("h100:3")
    happen(node, "lost", "", "0")
    happen(node, "unplug", "", "1")
    assert [(gpu.index, gpu.error) for gpu in node.inventory.gpus] == [(0, LOST), (2, "")]
    assert [reading.error for reading in node.readings] == [LOST, ""]
    assert [gpu.error_code for gpu in node.inventory.gpus] == [GPU_IS_LOST, None]
    assert [reading.error_code for reading in node.readings] == [GPU_IS_LOST, None]
    happen(node, "return", "", "0")
    happen(node, "plug", "", "1")
    assert [gpu.error for gpu in node.inventory.gpus] == ["", "", ""]


def test_repartition_changes_the_inventory_and_the_links() -> None:
    node = SimulatedNode("h100:8")
    happen(node, "mig", "3g.40gb*2", "5")
    assert [len(gpu.mig) for gpu in node.inventory.gpus] == [0, 0, 0, 0, 0, 2, 0, 0]
    assert len(node.topology.switch_links) == 7
    with pytest.raises(UsageError, match="has no MIG profile"):
        happen(node, "mig", "9g.90gb", "5")
    happen(node, "reset", "", "5")
    assert (node.inventory.gpus[5].mig_enabled, node.inventory.gpus[5].mig) == (True, ())
    happen(node, "mig", "off", "5")
    assert not node.inventory.gpus[5].mig_enabled


def test_reloaded_driver_is_another_generation() -> None:
    node = SimulatedNode("h100:1")
    before = node.readings[0].generation
    happen(node, "driver", "gone")
    assert (node.driver_gone, node.readings) == (DRIVER_GONE, ())
    happen(node, "driver", "back")
    assert node.driver_gone == ""
    assert node.readings[0].generation != before


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("fire",), "no fault is called 'fire'"),
        (("xid",), "xid takes a number"),
        (("xid", "many", "0"), "xid takes a number"),
        (("xid", "79"), "which one"),
        (("lost", "7", "0"), "takes no value"),
        (("remap", "maybe", "0"), "not one of pending"),
        (("mig", "", "0"), "takes a layout"),
        (("xid", "79", "9"), "no simulated GPU '9'"),
    ],
)
def test_invalid_fault_is_refused(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        happen(SimulatedNode("h100:2"), *words)


@pytest.mark.parametrize(
    ("words", "message", "example"),
    [
        (("driver", "goen"), "driver 'goen' is not one of gone, back", "driver gone"),
        (
            ("fabric", "foo", "--gpu", "2"),
            "fabric 'foo' is not one of in-progress, not-started, completed",
            "fabric in-progress --gpu 2",
        ),
        (("xid", "x"), "xid takes a number: the driver reports this XID", "xid 79 --gpu 0"),
        (("lost", "7", "--gpu", "1"), "lost takes no value, and '7' was given", "lost --gpu 1"),
        (("mig",), "mig takes a layout such as 3g.20gb/1g.5gb*4, or off", "mig 3g.20gb/1g.5gb*4 --gpu 0"),
    ],
)
def test_refused_fault_has_a_whole_command_as_example(
    words: tuple[str, ...], message: str, example: str
) -> None:
    ran = gpunode("plugin", "inject", *words)
    hint = f"hint: for example: gpunode plugin inject {example}\n"
    assert (ran.code, ran.err) == (2, f"error: {message}\n{hint}")


def test_broken_script_is_named_with_what_a_line_is(tmp_path: Path) -> None:
    script = tmp_path / "s"
    line = 'each line is a fault such as {"gpu": 3, "xid": 79}\n'
    for data, says in (
        (b"\n\xff\xfe", ":2: not UTF-8"),
        (b"[]", ":1: not a JSON object"),
        (b"{", ":1: not JSON: "),
    ):
        script.write_bytes(data)
        ran = gpunode("plugin", "inject", "--script", str(script))
        assert ran.err.startswith(f"error: {script}{says}") and ran.err.endswith(f"\nhint: {line}")
    script.unlink()
    ran = gpunode("plugin", "inject", "--script", str(script))
    assert ran.err == f"error: {script} doesn't exist\nhint: name an existing file; {line}"


def test_xid_names_an_existing_instance() -> None:
    node = SimulatedNode("a100:2,mig=3g.20gb/1g.5gb")
    gpu = node.inventory.gpus[1]
    uuid, instance = gpu.uuid, gpu.mig[0].gi
    instances = ", ".join(str(gi) for gi in sorted(mig.gi for mig in gpu.mig))
    fault = make_fault("xid", "94", "1", gi=instance, ci=0)
    assert node.apply(fault) == (GpuEvent("xid", uuid, 94, instance, 0),)
    for wrong in (make_fault("xid", "94", "1", gi=3), make_fault("xid", "94", "1", gi=instance, ci=3)):
        with pytest.raises(UsageError, match="GPU 1 has no such MIG instance") as refused:
            node.apply(wrong)
        assert refused.value.hint == f"--gi is one of {instances}, --ci 0"
    with pytest.raises(UsageError, match="GPU 0 has no such MIG instance") as refused:
        SimulatedNode("t4:1").apply(make_fault("xid", "94", "0", gi=1))
    assert refused.value.hint == "make some: gpunode plugin inject mig LAYOUT --gpu 0"


def test_script_runs_in_the_order_of_its_times() -> None:
    text = '# a bad night\n\n{"at": 2.5, "gpu": 3, "xid": 79}\n{"gpu": "all", "ecc": 1}\n'
    assert parse_script(text, "f") == (Fault("ecc", "1", "all"), Fault("xid", "79", "3", at=2.5))
    with pytest.raises(ConfigError, match="f:2: one fault a line, not 2"):
        parse_script('{"gpu": 1, "xid": 1}\n{"gpu": 1, "xid": 1, "ecc": 1}', "f")


@pytest.mark.full
@given(
    st.text(max_size=80)
    | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps)
)
def test_any_line_is_parsed_or_refused(line: str) -> None:
    try:
        parse_fault(line)
    except GpunodeError as error:
        assert error.message


@given(
    st.dictionaries(
        st.sampled_from([*FAULTS, "gpu", "gi", "ci", "at", "x"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers()),
        max_size=4,
    )
)
def test_any_object_is_handled_or_refused(line: dict[str, object]) -> None:
    node = SimulatedNode("a100:2,mig=1g.5gb")
    try:
        node.apply(parse_fault(json.dumps(line)))
    except GpunodeError as error:
        assert error.message
    assert node.driver_gone or len(node.readings) == len(node.inventory.gpus)
