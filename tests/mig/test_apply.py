"""`gpunode mig apply`, and `plan` and `assert` with it, through the command line."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.scenario import Fault, Process, gpu_uuid, mig_machine
from gpunode.commands import mig_apply
from gpunode.commands.mig_apply import MigLabels
from gpunode.commands.mig_plan import LayoutRequest
from gpunode.errors import GpunodeError
from gpunode.kubernetes.access import Access
from tests.cli import clean_environment, command
from tests.mig.conftest import EXAMPLES, MigMaker
from tests.ordinary_user import AS_ORDINARY_USER, make_readable, public_directory
from tests.silent import SilentProgress
from tests.waiting import PATIENCE, eventually

IN_USE, INSUFFICIENT = 19, 23


def test_layout_is_applied_and_replaced_by_another(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    ran = node.apply("all-balanced")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == "all-balanced applied"
    assert node.devices() == {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
    before = node.uuids()
    ran = node.apply("parts", "-o", "json")
    assert ran.code == 0, ran.err
    data = ran.document["data"]
    assert node.devices() == {"3g.40gb": 1, "1c.3g.40gb": 3}
    kept = before & node.uuids()
    assert len(kept) == 1, "the 3g.40gb stays, with its UUID"
    assert set(data["gone"]) == before - kept
    assert {one["uuid"] for one in data["new"]} == node.uuids() - kept


def test_json_results_of_apply(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    document = node.apply("all-1g", "-o", "json").document
    assert document["kind"] == "MigApplication" and document["data"]["applied"] is True
    assert len(document["data"]["devices"]) == len(document["data"]["new"]) == 7


@pytest.mark.full
def test_equal_layout_changes_nothing(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("a100-40gb", "a30"))
    assert node.apply("all-1g").code == 0
    done = node.stub.mig_changes()
    ran = node.apply("all-1g")
    assert (ran.code, ran.out) == (0, "all-1g: unchanged\n")
    assert node.stub.mig_changes() == done


def test_dry_run_prints_the_plan(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100", "h100"))
    shown = node.run("plan", "-f", EXAMPLES, "-c", "all-balanced")
    dry = node.apply("all-balanced", "--dry-run")
    assert shown.code == dry.code == 0
    assert shown.out.startswith(dry.out) and "create GPU instance 3g.40gb at 4:4" in dry.out
    assert node.stub.mig_changes() == [] and not (node.directory / "state").exists()


def test_plan_shows_the_current_and_the_desired_layout(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    assert node.apply("all-balanced").code == 0
    ran = node.run("plan", "-f", EXAMPLES, "-c", "media")
    assert "0-1    2g.20gb" in ran.out.replace("0      2g.20gb", "0-1    2g.20gb")
    assert "goes: 2g.20gb at 0:2  MIG-" in ran.out
    data = node.run("plan", "-f", EXAMPLES, "-c", "media", "-o", "json").document["data"]
    (gpu,) = data["gpus"]
    assert [piece["profile"] for piece in gpu["today"]] == ["2g.20gb", "1g.10gb", "1g.10gb", "3g.40gb"]
    assert len(gpu["wanted"]) == 7 and len(gpu["lost"]) + len(gpu["kept"]) == 4
    assert data["changes"] is True and data["obstacles"] == []


@pytest.mark.full
def test_assert_exit_code_depends_on_the_difference(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    assert node.apply("all-balanced").code == 0
    words = ("assert", "-f", EXAMPLES, "-c")
    assert node.run(*words, "all-balanced").code == 0
    ran = node.run(*words, "media")
    assert ran.code == 5 and "wanted is 1 x 1g.10gb+me, 6 x 1g.10gb" in ran.out
    assert node.run(*words, "media", "--mode-only").code == 0
    assert node.run(*words, "all-disabled", "--mode-only").code == 5
    assert node.run(*words, "graphics", "--valid-config").code == 0
    whole = node.run("assert", "-f", EXAMPLES, "--valid-config")
    assert (whole.code, "all-balanced" in whole.out) == (0, True), (
        "a file is valid without a selected configuration"
    )
    assert node.run(*words, "graphics").code == 3
    assert node.run(*words, "nothing").code == 2
    assert node.run("assert", "-f", node.config("version: v9")).code == 1


@pytest.mark.full
def test_variables_and_short_flags_of_mig_parted(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    env = {"MIG_PARTED_CONFIG_FILE": EXAMPLES, "MIG_PARTED_SELECTED_CONFIG": "all-enabled"}
    assert node.run("apply", env=env).code == 0
    assert node.gpu().current and node.devices() == {}
    assert node.run("assert", "-m", env=env).code == 0
    assert node.run("assert", env={**env, "MIG_PARTED_SELECTED_CONFIG": "all-disabled"}).code == 5


def test_configuration_is_read_from_standard_input(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    done = subprocess.run(
        [*node.space, *command("mig", "apply", "-f", "-")],
        input="version: v1\nmig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {7g.80gb: 1}}]}",
        env=clean_environment(node.env),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert node.devices() == {"7g.80gb": 1}


@pytest.mark.full
def test_only_selected_gpus_are_changed(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100", "h100"))
    assert node.apply("first-whole").code == 0
    assert (node.devices(0), node.devices(1)) == ({}, {"3g.40gb": 2})
    only = node.profiles("1g.10gb: 7", devices="[0]")
    ran = node.apply("wanted", file=only)
    assert ran.code == 0 and "GPU 1 is in no entry of 'wanted' and stays as it is" in ran.err
    assert (node.devices(0), node.devices(1)) == ({"1g.10gb": 7}, {"3g.40gb": 2})
    assert node.run("assert", "-f", only).code == 0


@pytest.mark.full
def test_mode_only_keeps_the_instances(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    assert node.apply("all-balanced", "--mode-only").code == 0
    assert node.gpu().current and node.devices() == {}
    assert node.apply("all-balanced").code == 0
    assert node.apply("media", "--mode-only").code == 0
    assert node.devices() == {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}


# --- refusals --------------------------------------------------------------------------------------------


def test_ordinary_user_may_plan_and_not_apply(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    with public_directory() as place:
        copied = place / "scenario.txt"
        copied.write_text(node.stub.scenario_path.read_text())
        make_readable(place)
        env = {"GPUNODE_STUB_SCENARIO": str(copied)}
        ran = node.run("apply", "-f", EXAMPLES, "-c", "all-1g", env=env, prefix=AS_ORDINARY_USER)
    assert ran.code == 3 and "needs root" in ran.err


def test_recorded_machine_is_never_changed(mig_node: MigMaker, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    node = mig_node(mig_machine("h100"))
    ran = node.run("apply", "--root", f"{tmp_path}/root", "-f", EXAMPLES, "-c", "all-1g")
    assert ran.code == 3 and "MIG is only changed on the node itself" in ran.err
    assert node.stub.mig_changes() == []


@pytest.mark.full
def test_process_using_a_removed_instance_is_named_and_stops_apply(mig_node: MigMaker) -> None:
    made = mig_node(mig_machine("h100"))
    assert made.apply("all-balanced").code == 0
    victim = next(gi for gi in made.gpu().instances if gi.name == "2g.20gb")
    with made.shared() as node, node.sleeping() as (sleep, pid):
        used = Process(0, pid, gi=victim.id, ci=0, real=True)
        node.stub.write(replace(mig_machine("h100"), processes=(used,)))
        done = node.stub.mig_changes()
        ran = node.apply("parts")
        assert ran.code == 3
        assert f"sleep (process {pid})" in ran.err and "uses the 2g.20gb at 0:2 of GPU 0" in ran.err
        assert f"--drain {pid}" in ran.err
        planned = node.run("plan", "-f", EXAMPLES, "-c", "parts", "-o", "json").document["data"]
        assert [one["pid"] for one in planned["obstacles"]] == [pid]
        assert node.stub.mig_changes() == done
        # it doesn't use the 3g.40gb, so a change that keeps its own instance may continue
        aside = node.profiles("2g.20gb: 1, 1g.10gb: 2")
        assert node.apply("wanted", file=aside).code == 0
        ran = node.apply("parts", "--drain", "1")
        assert ran.code == 2 and "process 1 does not block the change" in ran.err
        ran = node.apply("parts", "--drain", str(pid))
        assert ran.code == 0, ran.err
        assert sleep.wait(PATIENCE) == -signal.SIGTERM
    assert node.devices() == {"3g.40gb": 1, "1c.3g.40gb": 3}


def test_drained_unit_is_stopped_and_started_again(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    log = node.directory / "systemctl.log"
    node.program("systemctl", f'echo "$@" >> {log}')
    ran = node.apply("all-1g", "--drain", "nvidia-dcgm", "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.document["data"]["drained"] == ["nvidia-dcgm.service"]
    verbs = [line for line in log.read_text().splitlines() if "dcgm" in line]
    assert verbs == [
        "is-active --quiet nvidia-dcgm.service",
        "stop nvidia-dcgm.service",
        "start nvidia-dcgm.service",
    ]


@pytest.mark.full
def test_stopped_unit_is_started_after_a_failure(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100").with_faults(Fault("migChange", INSUFFICIENT, after=2, times=1)))
    log = node.directory / "systemctl.log"
    node.program("systemctl", f'echo "$@" >> {log}')
    assert node.apply("all-1g", "--drain", "nvidia-dcgm").code == 4
    assert log.read_text().splitlines()[-1] == "start nvidia-dcgm.service"


def test_unit_that_does_not_stop_prevents_the_change(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    node.program(
        "systemctl",
        f'case "$*" in "stop b.service") echo no >&2; exit 1;; esac; echo "$@" >> {node.directory}/log',
    )
    ran = node.apply("all-1g", "--drain", "a", "--drain", "b")
    assert ran.code == 3 and "systemctl stop b.service: no" in ran.err
    assert (node.directory / "log").read_text().splitlines()[-1] == "start a.service"
    assert node.stub.mig_changes() == []


# --- failures during apply -------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("after", [0, 7])
def test_failure_restores_the_previous_layout(mig_node: MigMaker, after: int) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    before = node.gpu()
    node.stub.write(scenario.with_faults(Fault("migChange", INSUFFICIENT, after=after, times=1)))
    ran = node.apply("media")
    assert ran.code == 4
    assert "the previous layout was restored" in ran.err and "NVML 23" in ran.err
    node.stub.write(scenario)
    now = node.gpu()
    assert [(g.name, g.placement) for g in sorted(now.instances, key=lambda g: g.placement.start)] == [
        (g.name, g.placement) for g in sorted(before.instances, key=lambda g: g.placement.start)
    ]
    assert not (node.directory / "state/mig-before.json").exists()
    assert node.run("assert", "-f", EXAMPLES, "-c", "all-balanced").code == 0


@pytest.mark.full
def test_nvml_crash_restores_the_previous_layout(mig_node: MigMaker) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    node.stub.write(scenario.with_faults(Fault("migChange", abort=True, after=4, times=1)))
    ran = node.apply("media")
    assert ran.code == 4 and "NVML crashed" in ran.err
    node.stub.write(scenario)
    assert node.devices() == {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "step"),
    [
        ("nvmlDeviceGetMigMode", "read the layouts"),
        ("nvmlDeviceSetMigMode", "switch MIG on"),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", "create GPU instance"),
    ],
)
def test_nvml_crash_names_the_queried_gpu(mig_node: MigMaker, function: str, step: str) -> None:
    node = mig_node(mig_machine("h100", "h100").with_faults(Fault(function, uuid=gpu_uuid(1), abort=True)))
    ran = node.apply("all-balanced")
    assert ran.code != 0
    assert f"GPU 1: can't {step}" in ran.err, ran.err
    assert f"NVML crashed the process that queried it (SIGABRT): {function} of GPU 1" in ran.err, ran.err


@pytest.mark.full
def test_nvml_hang_names_the_queried_gpu(mig_node: MigMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunode.mig.session.READ_SECONDS", 5.0)
    hang = Fault("nvmlDeviceGetMigMode", uuid=gpu_uuid(1), hang=60.0)
    node = mig_node(mig_machine("h100", "h100").with_faults(hang))
    with pytest.raises(GpunodeError) as caught:
        labels = MigLabels(node.host, Access(), "", SilentProgress(), asked_for=False)
        mig_apply.once(node.host, LayoutRequest(EXAMPLES, "all-balanced"), labels, SilentProgress())
    reason = "NVML did not answer within 5 s: nvmlDeviceGetMigMode of GPU 1"
    assert caught.value.message == f"GPU 1: can't read the layouts: {reason}"


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_restores_the_previous_layout(mig_node: MigMaker, number: signal.Signals) -> None:
    scenario = mig_machine("h100")
    node = mig_node(scenario)
    assert node.apply("all-balanced").code == 0
    node.stub.write(scenario.with_faults(Fault("migChange", hang=60.0, after=6, times=1)))
    argv = command("mig", "apply", "-f", EXAMPLES, "-c", "media")
    with node.start(*argv, stderr=subprocess.PIPE, text=True) as child:
        assert eventually(lambda: node.stub.fault_calls() >= 7)
        node.kill(child, number)
        _, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130 and "the previous layout was restored" in err, err
    assert node.devices() == {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}


@pytest.mark.full
def test_concurrent_runs_are_serialized(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    argv = [command("mig", "apply", "-f", EXAMPLES, "-c", label) for label in ("all-1g", "media")]
    running = [node.start(*one, stderr=subprocess.PIPE) for one in argv]
    assert [one.wait(PATIENCE) for one in running] == [0, 0]
    for one in running:
        assert one.stderr is not None
        one.stderr.close()
    assert node.devices() in ({"1g.10gb": 7}, {"1g.10gb": 6, "1g.10gb+me": 1})


# --- modes and resets ------------------------------------------------------------------------------------


def held_until_reset(node, scenario) -> None:
    """An nvidia-smi before which the holder of the GPU releases it."""
    path = node.stub.scenario_path
    node.program("nvidia-smi", f"sed -i 's/ held=1//' {path}\nexec {node.stub.programs}/nvidia-smi \"$@\"")
    node.stub.write(scenario)


@pytest.mark.full
def test_only_the_gpu_with_a_pending_mode_is_reset(mig_node: MigMaker) -> None:
    scenario = mig_machine("a100-40gb", "a100-40gb", "a30")
    node = mig_node(scenario)
    held_until_reset(node, scenario.with_gpu(0, reported={"held": 1}))
    ran = node.apply("all-1g")
    assert ran.code == 0, ran.err
    assert [line for line in node.stub.mig_changes() if line.startswith("reset")] == ["reset gpu=0"]
    assert [node.devices(n) for n in range(3)] == [{"1g.5gb": 7}, {"1g.5gb": 7}, {"1g.6gb": 4}]


@pytest.mark.full
def test_failed_reset_leaves_no_mode_pending(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("a100-40gb").with_gpu(0, reported={"held": 1}))
    ran = node.apply("all-1g")
    assert ran.code == 4 and "In use by another client" in ran.err
    assert not node.gpu().current and not node.gpu().pending


@pytest.mark.full
def test_virtual_machine_needs_a_reboot(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("a100-40gb").with_gpu(0, reported={"mig_vm": 1, "virtualization": 1}))
    ran = node.apply("all-1g")
    assert ran.code == 4 and "--mode-only --skip-reset, reboot, then apply" in ran.err
    assert not node.gpu().pending
    ran = node.apply("all-1g", "--skip-reset")
    assert ran.code == 3 and "--skip-reset was given" in ran.err
    ran = node.apply("all-1g", "--mode-only", "--skip-reset")
    assert ran.code == 0 and "on after a reset or a reboot" in ran.out
    assert node.gpu().pending and not node.gpu().current
    assert node.run("assert", "-m", "-f", EXAMPLES, "-c", "all-1g").code == 5
    node.stub.reboot()
    assert node.apply("all-1g").code == 0
    assert node.devices() == {"1g.5gb": 7}


@pytest.mark.full
def test_unwanted_pending_mode_is_cancelled(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("a100-40gb").with_gpu(0, reported={"mig_next": 1, "held": 1}))
    assert node.gpu().pending
    ran = node.apply("all-disabled")
    assert ran.code == 0, ran.err
    assert not node.gpu().pending
    assert not any(line.startswith("reset") for line in node.stub.mig_changes())


# --- at boot ---------------------------------------------------------------------------------------------


def test_persist_dry_run_shows_the_unit_without_writing_it(mig_node: MigMaker) -> None:
    node = mig_node(mig_machine("h100"))
    ran = node.apply("all-1g", "--persist", "--dry-run")
    assert ran.code == 0 and "+ExecStart=" in ran.out and "/etc/systemd/system/gpunode-mig.service" in ran.out
    assert 'mig apply --config-file /etc/gpunode/mig.yaml --selected-config "all-1g"' in ran.out
    assert not Path("/etc/systemd/system/gpunode-mig.service").exists()
