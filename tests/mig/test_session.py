"""MIG through NVML: read and changed in a child, on the stub, which behaves like hardware."""

from __future__ import annotations

import subprocess

import pytest

from fixtures.mig_tables import BOARDS
from fixtures.scenario import (
    Fault,
    Process,
    Scenario,
    StubGpuInstance,
    gpu_uuid,
    machine,
    mig_machine,
    mig_uuid,
    mixed_layout,
    with_mig,
)
from gpunode.mig.model import GpuLayout, Layouts, Placement
from gpunode.mig.session import MigError, MigProcess, MigSession, read_layouts
from gpunode.output.result import ExitCode
from gpunode.output.typed import from_plain, plain
from tests.gpu_node import NodeMaker, host_of

U0 = gpu_uuid(0)
IN_USE = 19


def layouts(make_node: NodeMaker, scenario: Scenario) -> tuple[GpuLayout, ...]:
    return read_layouts(host_of(make_node(scenario))).gpus


def session_on(make_node: NodeMaker, scenario: Scenario):
    node = make_node(scenario)
    return node, MigSession(host_of(node))


def smi(node, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(node.programs / "nvidia-smi"), *words], env=node.env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("board", BOARDS)
def test_every_model_lists_its_profiles_with_mig_off(make_node, board):
    (gpu,) = layouts(make_node, mig_machine(board))
    wanted = BOARDS[board]
    assert (gpu.name, gpu.capable, gpu.current, gpu.pending) == (wanted.name, True, False, False)
    assert (gpu.device_id, gpu.subsystem_id, gpu.slots) == (
        wanted.device_id,
        wanted.subsystem_id,
        wanted.slots,
    )
    assert (gpu.instances, gpu.error, gpu.untold) == ((), "", "")
    assert [(p.index, p.id, p.name, p.slices, p.memory_mib, p.sms, p.max_count) for p in gpu.profiles] == [
        (p.index, p.id, p.name, p.slices, p.megabytes, p.sms, p.count)
        for p in sorted(wanted.profiles, key=lambda one: one.index)
    ]
    for profile in wanted.profiles:
        seen = profile_of(gpu, profile.name)
        assert [(place.start, place.size) for place in seen.placements] == [
            (start, profile.size) for start in profile.starts
        ]
        assert seen.free is None, "nothing is free where MIG is off"
        # the name computed from the memory's share is NVML's own on all of these
        assert seen.aliases == ()


@pytest.mark.parametrize(("cc", "name"), [("8.9", "NVIDIA L40S"), ("7.5", "Tesla T4")])
def test_gpu_without_mig_is_not_capable(make_node, cc, name):
    (gpu,) = layouts(make_node, machine(1, cc=cc, name=name))
    assert (gpu.capable, gpu.current, gpu.profiles, gpu.error) == (False, False, (), "")


def test_instances_are_read_with_placements_and_uuids(make_node):
    (gpu,) = layouts(make_node, with_mig(mig_machine("h100"), 0, mixed_layout(0)))
    found = [(gi.id, gi.name, str(gi.placement), [ci.uuid for ci in gi.compute]) for gi in gpu.instances]
    assert found == [
        (1, "3g.40gb", "4:4", [mig_uuid(0, 0)]),
        (3, "2g.20gb", "0:2", [mig_uuid(0, 1)]),
        (9, "1g.10gb+me", "2:1", [mig_uuid(0, 2)]),
        (10, "1g.10gb", "3:1", [mig_uuid(0, 3)]),
    ]
    assert dict(gpu.devices()) == {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb+me": 1, "1g.10gb": 1}
    assert [(p.name, p.free) for p in gpu.profiles if p.free] == []


def test_gpu_instance_without_a_compute_instance_is_listed(make_node):
    cut = mig_machine("a30", enabled=True).with_gpu(0, gpu_instances=(StubGpuInstance(3, 0, 1),))
    (gpu,) = layouts(make_node, cut)
    assert [(gi.id, gi.name, gi.placement, gi.compute) for gi in gpu.instances] == [
        (3, "1g.6gb", Placement(1, 1), ())
    ]
    assert not gpu.devices()
    assert {p.name: p.free for p in gpu.profiles} == {
        "1g.6gb": 3,
        "2g.12gb": 1,
        "4g.24gb": 0,
        "1g.6gb+me": 1,
        "2g.12gb+me": 1,
    }


def test_layouts_survive_json(make_node):
    found = read_layouts(host_of(make_node(with_mig(mig_machine("h100", "a30"), 0, mixed_layout(0)))))
    assert from_plain(Layouts, plain(found)) == found


def test_profile_names_are_computed_for_a_driver_without_names(make_node):
    old = (Fault("nvmlDeviceGetGpuInstanceProfileInfoV", 13),)
    (gpu,) = layouts(make_node, with_mig(mig_machine("h100"), 0, mixed_layout(0)).with_faults(*old))
    assert [p.name for p in gpu.profiles] == [
        *("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.10gb+me", "1g.20gb")
    ]
    assert dict(gpu.devices())["1g.10gb+me"] == 1


def test_lost_gpu_does_not_affect_the_others(make_node):
    first, second = layouts(make_node, mig_machine("h100", "h100").with_gpu(0, lost=True))
    assert "NVML 15" in first.error
    assert second.capable and not second.error


def test_without_rights_modes_are_read_and_instances_are_unknown(make_node):
    denied = (
        Fault("nvmlDeviceGetGpuInstances", 4),
        Fault("nvmlDeviceGetGpuInstancePossiblePlacements", 4),
    )
    scenario = with_mig(mig_machine("h100"), 0, mixed_layout(0)).with_faults(*denied)
    (gpu,) = layouts(make_node, scenario)
    assert (gpu.capable, gpu.current, gpu.error, gpu.instances) == (True, True, "", ())
    assert "no permission" in gpu.untold
    assert profile_of(gpu, "3g.40gb").max_count == 2


def profile_of(gpu, name):
    """The profile that a GPU offers under this name or an alias."""
    return next(one for one in gpu.profiles if name in one.names)


# --- changes ------------------------------------------------------------------------------------------------


def test_default_placement_on_a100_makes_3g_impossible(make_node):
    _, session = session_on(make_node, mig_machine("a100-40gb", enabled=True))
    with session:
        gpu = session.layouts().gpus[0]
        one, two, three = (profile_of(gpu, name) for name in ("1g.5gb", "2g.10gb", "3g.20gb"))
        assert session.create_gpu_instance(U0, one.id)[1] == Placement(6, 1)
        assert session.create_gpu_instance(U0, one.id)[1] == Placement(0, 1)
        assert session.create_gpu_instance(U0, two.id)[1] == Placement(2, 2)
        with pytest.raises(MigError) as refused:
            session.create_gpu_instance(U0, three.id, name="3g.20gb")
    assert refused.value.nvml_code == 23
    assert str(refused.value) == "GPU 0: can't create GPU instance 3g.20gb: not enough resources (NVML 23)"


def test_explicit_placements_fit(make_node):
    node, session = session_on(make_node, mig_machine("a100-40gb", enabled=True))
    with session:
        gpu = session.layouts().gpus[0]
        for name, start in (("1g.5gb", 2), ("1g.5gb", 3), ("2g.10gb", 0), ("3g.20gb", 4)):
            profile = profile_of(gpu, name)
            place = next(one for one in profile.placements if one.start == start)
            gi, at = session.create_gpu_instance(U0, profile.id, place, name)
            assert at == place
            ci = session.create_compute_instance(U0, gi, profile.slices)
            (made,) = next(one.compute for one in session.layouts().gpus[0].instances if one.id == gi)
            assert (made.id, made.slices, made.placement, made.uuid[:4]) == (
                ci,
                profile.slices,
                Placement(0, profile.slices),
                "MIG-",
            )
        within = session.layouts().gpus[0]
    later = read_layouts(host_of(node)).gpus[0]
    assert later == within, "another process sees the changes of this one"
    assert dict(later.devices()) == {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}
    assert len({ci.uuid for gi in later.instances for ci in gi.compute}) == 4


def test_gpu_instance_is_shared_by_its_compute_instances(make_node):
    _, session = session_on(make_node, mig_machine("h100", enabled=True))
    with session:
        gi, _ = session.create_gpu_instance(U0, 9, Placement(0, 4))
        second = session.create_compute_instance(U0, gi, 1, Placement(1, 1))
        first = session.create_compute_instance(U0, gi, 1, Placement(0, 1))
        with pytest.raises(MigError, match=r"GPU 0, GPU instance 1: can't create compute instance 2c"):
            session.create_compute_instance(U0, gi, 2)
        with pytest.raises(MigError, match=r"no compute instance of 7 slices"):
            session.create_compute_instance(U0, gi, 7)
        with pytest.raises(MigError) as kept:
            session.destroy_gpu_instance(U0, gi)
        assert kept.value.nvml_code == IN_USE
        assert kept.value.message.startswith("GPU 0, GPU instance 1: can't ")
        (seen,) = session.layouts().gpus[0].instances
        assert [(ci.id, ci.placement.start) for ci in seen.compute] == [(second, 1), (first, 0)]
        assert [ci.profile for ci in seen.compute] == ["1c.3g.40gb"] * 2
        for ci in (first, second):
            session.destroy_compute_instance(U0, gi, ci)
        session.destroy_gpu_instance(U0, gi)
        assert session.layouts().gpus[0].instances == ()


def test_media_profile_with_all_engines_is_unique(make_node):
    _, session = session_on(make_node, mig_machine("rtx-pro-6000", enabled=True))
    with session:
        gpu = session.layouts().gpus[0]
        session.create_gpu_instance(U0, profile_of(gpu, "1g.24gb+me.all").id)
        with pytest.raises(MigError, match="not enough resources"):
            session.create_gpu_instance(U0, profile_of(gpu, "1g.24gb").id)
        session.create_gpu_instance(U0, profile_of(gpu, "1g.24gb-me").id)


def test_instance_in_use_stays_and_its_neighbour_can_be_destroyed(make_node):
    busy = Process(0, 4711, gi=1, ci=0)
    scenario = with_mig(mig_machine("h100"), 0, mixed_layout(0))
    _, session = session_on(make_node, Scenario(**{**vars(scenario), "processes": (busy,)}))
    with session:
        assert session.processes(U0) == (MigProcess(4711, 1, 0),)
        with pytest.raises(MigError) as refused:
            session.destroy_compute_instance(U0, 1, 0)
        assert refused.value.message.startswith("GPU 0, GPU instance 1, compute instance 0: can't ")
        session.destroy_compute_instance(U0, 3, 0)
        session.destroy_gpu_instance(U0, 3)
        assert [gi.id for gi in session.layouts().gpus[0].instances] == [1, 9, 10]


# --- modes --------------------------------------------------------------------------------------------------


def modes(session):
    """The first GPU's mode now and after its next reset."""
    gpu = session.layouts().gpus[0]
    return gpu.current, gpu.pending


@pytest.mark.parametrize("board", ["a100-80gb", "h100", "b200"])
def test_idle_gpu_changes_its_mode_at_once(make_node, board):
    _, session = session_on(make_node, mig_machine(board))
    with session:
        assert (session.set_mode(U0, True), modes(session)) == (True, (True, True))
        assert (session.set_mode(U0, False), modes(session)) == (True, (False, False))


def test_busy_gpu_keeps_the_mode_pending_until_its_reset(make_node):
    scenario = mig_machine("a100-80gb").with_gpu(0, reported={"held": 1})
    node, session = session_on(make_node, scenario)
    with session:
        assert (session.set_mode(U0, True), modes(session)) == (False, (False, True))
        with pytest.raises(MigError, match=r"can't create GPU instance .* \(NVML 3\)"):
            session.create_gpu_instance(U0, 19)
        assert (session.set_mode(U0, False), modes(session)) == (True, (False, False)), "rolled back"
        session.set_mode(U0, True)
    assert "In use by another client" in smi(node, "-r", "-i", "0").stdout
    node.write(scenario.with_gpu(0, reported={}))
    gpu = read_layouts(host_of(node)).gpus[0]
    assert (gpu.current, gpu.pending, gpu.mode_pending) == (False, True, True)
    assert smi(node, "--gpu-reset", "-i", gpu.pci).returncode == 0
    assert read_layouts(host_of(node)).gpus[0].current


def test_open_session_prevents_the_reset(make_node):
    node, session = session_on(make_node, mig_machine("a100-80gb"))
    with session:
        assert smi(node, "-r", "-i", U0).returncode == 3
    assert smi(node, "-r", "-i", U0).returncode == 0


def test_virtual_machine_needs_a_reboot(make_node):
    _, session = session_on(make_node, mig_machine("a100-80gb").with_gpu(0, reported={"mig_vm": 1}))
    with session:
        assert (session.set_mode(U0, True), modes(session)) == (False, (False, True))


def test_mig_with_instances_cannot_be_disabled(make_node):
    node, session = session_on(make_node, with_mig(mig_machine("h100"), 0, mixed_layout(0)))
    with session, pytest.raises(MigError, match="can't switch MIG off"):
        session.set_mode(U0, False)
    assert node.mig_changes() == []


def test_reboot_removes_instances_and_the_mode_on_hopper(make_node):
    scenario = mig_machine("h100", "a100-80gb", enabled=True)
    node, session = session_on(make_node, scenario)
    with session:
        for gpu in session.layouts().gpus:
            session.create_gpu_instance(gpu.uuid, gpu.profiles[0].id)
    node.reboot()
    assert [(gpu.current, gpu.instances) for gpu in read_layouts(host_of(node)).gpus] == [
        (False, ()),
        (True, ()),
    ]


def test_virtual_gpu_is_controlled_by_its_host(make_node):
    guest = mig_machine("a100-80gb", enabled=True).with_gpu(0, reported={"virtualization": 2})
    _, session = session_on(make_node, guest)
    with session:
        assert session.layouts().gpus[0].virtualization == 2
        for change in (lambda: session.set_mode(U0, False), lambda: session.create_gpu_instance(U0, 19)):
            with pytest.raises(MigError) as refused:
                change()
            assert refused.value.nvml_code == 3


# --- faults of NVML -----------------------------------------------------------------------------------------


def test_missing_rights_are_a_precondition_failure(make_node):
    _, session = session_on(make_node, mig_machine("h100").with_faults(Fault("nvmlDeviceSetMigMode", 4)))
    with session, pytest.raises(MigError) as refused:
        session.set_mode(U0, True)
    assert (refused.value.exit_code, refused.value.code) == (ExitCode.PRECONDITION, "mig-permission")
    assert refused.value.hint == "run it as root"


def test_fault_occurs_at_the_step_in_the_scenario(make_node):
    node = make_node(mig_machine("h100", enabled=True).with_faults(Fault("migChange", 999, after=2, times=1)))
    outcomes: list[int | None] = []
    for _ in range(2):  # counted over all processes
        with MigSession(host_of(node)) as session:
            for _ in range(2):
                try:
                    outcomes.append(session.create_gpu_instance(U0, 19)[0])
                except MigError as error:
                    outcomes.append(error.nvml_code)
    assert outcomes == [7, 8, 999, 9]


def test_hang_ends_the_session_in_time(make_node, monkeypatch):
    monkeypatch.setattr("gpunode.mig.session.CHANGE_SECONDS", 0.3)
    _, session = session_on(
        make_node, mig_machine("h100").with_faults(Fault("nvmlDeviceSetMigMode", hang=60))
    )
    with session:
        with pytest.raises(MigError, match=r"did not answer within 0.3 s") as hung:
            session.set_mode(U0, True)
        assert (hung.value.nvml_code, hung.value.code) == (None, "mig-hang")
        with pytest.raises(MigError, match="NVML is closed"):
            session.layouts()


def test_crash_is_reported(make_node):
    crash = Fault("nvmlDeviceCreateGpuInstance", abort=True)
    _, session = session_on(make_node, mig_machine("h100", enabled=True).with_faults(crash))
    with session, pytest.raises(MigError, match="SIGABRT"):
        session.create_gpu_instance(U0, 19)


def test_unloaded_driver_is_reported(make_node):
    node = make_node(mig_machine("h100").with_faults(Fault("nvmlInitWithFlags", 9)))
    with pytest.raises(MigError, match=r"can't open NVML: .*not loaded \(NVML 9\)"):
        read_layouts(host_of(node))
