"""Conditions of each GPU: the real pynvml in a real child, with stub libraries."""

import pytest

from fixtures.scenario import Fault, Process, gpu_uuid, machine, with_nvswitch
from gpunode.errors import ConfigError
from gpunode.gpu.model import Gpu, Inventory
from gpunode.gpu.nvml import Fabric
from gpunode.gpu.nvml_health import Condition, GpuProcess, Licence, conditions_from_json
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.host.recording import RECORDING
from gpunode.output.typed import plain
from tests.gpu_node import host_of

REPORTED = {
    **{"persistence": 1, "slowdowns": 0x1, "temperature": 41, "temperature_slowdown": 87},
    **{"power_limit": 700000, "power_limit_default": 700000, "virtualization": 0},
    **{"display_active": 0, "inforom_valid": 1, "channel_repair": 0},
    **{"tpc_repair": 0, "sram_exceeded": 0, "reserved": 500 << 20, "remapped": 0},
}


def conditions(make_node, scenario, **how):
    return probe(host_of(make_node(scenario)), condition=True, **how).conditions


def test_all_conditions_of_a_gpu_are_read(make_node):
    scenario = with_nvswitch(machine(1).with_gpu(0, reported=REPORTED, fabric=(3, 0, 0x5A), used=3 << 30))
    (one,) = conditions(make_node, scenario)
    assert (one.index, one.uuid, one.error, one.error_code) == (0, gpu_uuid(0), "", None)
    assert (one.reading.ecc_volatile, one.reading.remap_pending, one.reading.recovery_action) == (
        *(0, False),
        "none",
    )
    assert (one.persistence, one.compute_mode, one.virtualization) == (True, "default", "none")
    assert (one.ecc_mode, one.ecc_mode_next, one.mig_mode, one.mig_mode_next) == (True, True, False, False)
    assert (one.temperature, one.temperature_slowdown) == (41, 87)
    assert (one.power_limit, one.power_limit_default) == (700000, 700000)
    assert (one.memory_used, one.memory_reserved) == (3 << 30, 500 << 20)
    assert (one.inforom_valid, one.sram_threshold_exceeded, one.channel_repair_pending) == (
        True,
        False,
        False,
    )
    assert (one.slowdowns, one.display_active) == ((), False)
    assert one.nvlinks == (True,) * 18
    assert one.fabric == Fabric("completed", 0, "00" * 16, 0, 0x5A)
    assert (one.processes, one.licence, one.cc_enabled) == ((), Licence(), None)


def test_old_gpu_has_few_conditions_and_no_invented_values(make_node):
    scenario = machine(1, cc="6.0").with_gpu(0, ecc=None, remap=None, recovery=None, reported={"links": 0})
    (one,) = conditions(make_node, scenario)
    values = plain(one)
    known = {"index", "uuid", "pci", "reading", "fabric", "licence", "processes", "nvlinks", "computeMode"}
    known |= {"memoryUsed", "error"}
    assert {key for key, value in values.items() if value is not None} == known
    assert one.nvlinks == () and one.processes == ()


def test_every_problem_is_read(make_node):
    bad = {"inforom_valid": 0, "retired_single": 60, "retired_double": 3, "ecc_mode_next": 0, "mig_next": 1}
    bad |= {"channel_repair": 1, "slowdowns": 0x44, "virtualization": 2, "licensed": 0}
    bad |= {"confidential": 1, "confidential_ready": 0}
    scenario = machine(1).with_gpu(0, reported=bad, compute_mode=3)
    (one,) = conditions(make_node, scenario)
    assert (one.inforom_valid, one.retired, one.retired_pages, one.channel_repair_pending) == (
        False,
        3,
        63,
        True,
    )
    assert (one.ecc_mode, one.ecc_mode_next, one.mig_mode, one.mig_mode_next) == (True, False, False, True)
    assert (one.slowdowns, one.compute_mode) == (("hw-thermal",), "exclusive-process")
    assert one.licence == Licence(True, False, ("NVIDIA Virtual Compute Server",))
    assert (one.cc_enabled, one.cc_ready) == (True, False)


def test_many_throttled_gpus_are_sampled_again_together(make_node):
    scenario = machine(8)
    for index in range(8):
        scenario = scenario.with_gpu(index, reported={"slowdowns": 0x20 if index % 2 else 0x1})
    answer = probe(host_of(make_node(scenario)), condition=True)
    assert [one.slowdowns for one in answer.conditions] == [(), ("sw-thermal",)] * 4


def test_gpu_lost_after_throttling_keeps_the_values_read(make_node):
    scenario = machine(1).with_gpu(0, reported=REPORTED | {"slowdowns": 0x20})
    scenario = scenario.with_faults(Fault("nvmlDeviceGetDisplayActive", 15))
    (one,) = conditions(make_node, scenario)
    assert (one.temperature, one.error_code, one.slowdowns) == (41, 15, ())


def test_processes_of_both_kinds_are_listed(make_node):
    import dataclasses

    scenario = dataclasses.replace(machine(1), processes=(Process(0, 7), Process(0, 9, graphics=True)))
    (one,) = conditions(make_node, scenario)
    assert one.processes == (GpuProcess(7, False, 1 << 20), GpuProcess(9, True, 1 << 20))


def test_lost_gpu_has_its_code_and_does_not_hide_the_others(make_node):
    first, second = conditions(make_node, machine(2).with_gpu(0, lost=True))
    assert (first.error_code, first.persistence) == (15, None)
    assert (second.error_code, second.compute_mode) == (None, "default")


def test_gpu_lost_during_the_read_gets_no_more_queries(make_node):
    scenario = machine(2).with_faults(Fault("nvmlDeviceGetPersistenceMode", 16, gpu_uuid(0)))
    first, second = conditions(make_node, scenario)
    assert (first.error_code, second.error_code) == (16, None)
    assert first.reading.ecc_volatile == 0


@pytest.mark.parametrize("code", [1, 2, 3, 4, 13, 21, 25, 27, 29, 999])
def test_other_error_drops_only_its_own_value(make_node, code):
    scenario = (
        machine(1).with_gpu(0, reported=REPORTED).with_faults(Fault("nvmlDeviceGetPersistenceMode", code))
    )
    (one,) = conditions(make_node, scenario)
    assert (one.persistence, one.error_code, one.temperature) == (None, None, 41)


def test_hanging_condition_query_keeps_the_inventory(make_node):
    scenario = machine(2).with_faults(Fault("nvmlDeviceValidateInforom", uuid=gpu_uuid(1), hang=30))
    answer = probe(host_of(make_node(scenario)), 2.0, condition=True)
    assert answer.inventory is not None and len(answer.inventory.gpus) == 2
    assert [one.index for one in answer.conditions] == [0]
    assert answer.untold == (
        "NVML did not answer within 2 s (nvmlDeviceValidateInforom of GPU 1): the condition of GPU 1"
    )
    assert not answer.timed_out


def test_crash_in_a_condition_query_keeps_the_inventory(make_node):
    scenario = machine(1).with_faults(Fault("nvmlDeviceValidateInforom", abort=True))
    answer = probe(host_of(make_node(scenario)), condition=True)
    assert answer.inventory is not None and answer.conditions == ()
    crash = "NVML crashed the process that queried it (SIGABRT) (nvmlDeviceValidateInforom of GPU 0)"
    assert answer.untold == f"{crash}: the condition of GPU 0"


def test_probe_without_conditions_does_not_query_them(make_node):
    scenario = machine(1).with_faults(Fault("nvmlDeviceValidateInforom", hang=30))
    answer = probe(host_of(make_node(scenario)), 3.0)
    assert (answer.inventory is not None, answer.conditions, answer.untold) == (True, (), "")


INVENTORY = Inventory("1", gpus=(Gpu(1, "GPU-1", "x", "0000:01:00.0"), Gpu(0, "GPU-0", "x", "0000:00:00.0")))


def test_encoded_conditions_are_decoded_unchanged():
    one = Condition(
        1,
        "GPU-1",
        "0000:01:00.0",
        nvlinks=(True, False),
        processes=(GpuProcess(1),),
        fabric=Fabric("completed", 0, "ab", 1, None),
        licence=Licence(True, False, ("x",)),
        slowdowns=("hw-thermal",),
        mig_mode=True,
    )
    (back,) = conditions_from_json({"1": plain(one)}, INVENTORY)
    assert plain(back) == {**plain(one), "reading": {**plain(one.reading), "uuid": "GPU-1"}}


@pytest.mark.parametrize("value", ["x", -1.5, [], {}, None, ["x", 1], [{}]])
def test_value_of_a_wrong_type_is_unknown(value):
    keys = {key: value for key in plain(Condition()) if key not in ("reading", "fabric", "licence")}
    (one,) = conditions_from_json({"0": {**keys, "reading": {"eccVolatile": value}}}, INVENTORY, lenient=True)
    assert (one.index, one.uuid, one.mig_mode, one.temperature) == (0, "GPU-0", None, None)
    assert one.reading.ecc_volatile is None


@pytest.mark.parametrize("value", [3, ["x"], {"x": {}}, {"0": 3}, {"0": {"reading": 3}}])
def test_malformed_recording_is_an_error(value, tmp_path):
    (tmp_path / RECORDING).parent.mkdir()
    import json

    nvml = {"inventory": {"driverVersion": "1"}, "conditions": value}
    (tmp_path / RECORDING).write_text(json.dumps({"nvml": nvml}))
    with pytest.raises(ConfigError):
        probe(Host(tmp_path))
