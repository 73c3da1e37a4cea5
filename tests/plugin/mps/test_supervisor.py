"""Supervisors of real processes: the stub of nvidia-cuda-mps-control, and NVML's in its child."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.scenario import Fault, gpu_uuid, machine
from gpunode.gpu.model import Inventory
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.ledger import Ledger
from gpunode.plugin.model import ResourcePlan
from gpunode.plugin.mps import layout, supervisor
from gpunode.plugin.mps.daemon import Identity, MpsControl, left_behind, remains, start
from gpunode.plugin.mps.layout import DaemonSpec
from gpunode.plugin.mps.supervisor import Keeper, Supervisor
from tests.plugin.fakes import FakeBackend, FakeChecker
from tests.plugin.mps.conftest import MpsNode
from tests.plugin.nodes import MemoryLog, eventually

pytestmark = pytest.mark.full

EXCLUSIVE, DEFAULT, PROHIBITED = 3, 0, 2


def spec(node: MpsNode, *gpus: int, percentage: int = 25, mib: int = 1000) -> DaemonSpec:
    uuids = tuple(gpu_uuid(index) for index in gpus or (0,))
    directory = f"{node.root}/nvidia.com/gpu"
    return DaemonSpec("nvidia.com/gpu", uuids, directory, percentage, (mib,) * len(uuids))


@contextmanager
def kept(node: MpsNode, wanted: DaemonSpec, log: MemoryLog | None = None) -> Iterator[Keeper]:
    made = Keeper(node.host, Settings(mps=True, mps_root=node.root), wanted, log or MemoryLog())
    made.start()
    try:
        yield made
    finally:
        made.stop()
        made.join(60.0)
        assert not made.alive


def pid(node: MpsNode) -> int:
    return int(json.loads(Path(f"{node.root}/nvidia.com/gpu/daemon.json").read_text())["pid"])


def answers(node: MpsNode, wanted: DaemonSpec) -> bool:
    """Wait until the daemon answers: its socket exists a little earlier."""
    control = MpsControl(node.host, str(node.mps.program), wanted.pipe)
    return eventually(control.answers)


def up(made: Keeper, seconds: float = 30.0) -> bool:
    return eventually(lambda: made.problem is None, seconds)


def test_daemon_starts_with_its_limits_and_stops_without_leftovers(node: MpsNode) -> None:
    log = MemoryLog()
    wanted = spec(node, 1, 3)
    unstarted = Keeper(node.host, Settings(mps=True, mps_root=node.root), wanted, log)
    assert unstarted.problem and unstarted.problem.code == "mps"
    with kept(node, wanted, log) as made:
        assert up(made), log.lines
        assert node.gpus.compute_modes() == {gpu_uuid(1): EXCLUSIVE, gpu_uuid(3): EXCLUSIVE}
        assert node.mps.commands() == [
            "set_default_device_pinned_mem_limit 0 1000M",
            "set_default_device_pinned_mem_limit 1 1000M",
            "set_default_active_thread_percentage 25",
        ]
        (environ,) = node.mps.environments()
        assert environ["CUDA_VISIBLE_DEVICES"] == f"{gpu_uuid(1)},{gpu_uuid(3)}"
        assert environ["CUDA_MPS_PIPE_DIRECTORY"] == wanted.pipe
        assert "GPUNODE_STUB_SCENARIO" not in environ
        assert Path(wanted.started).exists()
        assert Path(f"{node.root}/shm").readlink() == Path("/dev/shm")
        process = pid(node)
    assert node.mps.commands()[-1] == "quit -t 2"
    assert node.gpus.compute_modes() == {gpu_uuid(1): DEFAULT, gpu_uuid(3): DEFAULT}
    assert not Path(wanted.directory).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert "MPS control daemon has ended" in log.messages("info")
    assert log.messages("error") == []


def test_killed_daemon_is_restarted(node: MpsNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_BACK_OFF", (3600.0,))  # until it has been looked at
    log = MemoryLog()
    with kept(node, spec(node), log) as made:
        assert up(made)
        first = pid(node)
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: made._next_start > 0.0)
        assert made.problem and "ended by itself (exit status -9)" in made.problem.reason
        assert not Path(made.spec.started).exists()
        made._next_start = 0.0
        assert up(made), log.lines
        assert pid(node) != first
    assert node.gpus.compute_modes() == {gpu_uuid(0): DEFAULT}


def test_program_that_exits_at_once_is_retried_later(node: MpsNode) -> None:
    log = MemoryLog()
    node.mps.behave(exits=1)
    with kept(node, spec(node), log) as made:
        assert eventually(lambda: log.messages("error") != [])
        assert made.problem and "ends at once (exit status 1)" in made.problem.reason
        assert "This stub is configured to exit" in made.problem.reason
        node.mps.behave()
        assert up(made), log.lines


def test_missing_program_hint_names_its_package(node: MpsNode, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    node.mps.program.rename(node.place / "away")
    monkeypatch.setattr("gpunode.gpu.library_paths.PROGRAM_DIRECTORIES", ())
    with kept(node, spec(node), log) as made:
        assert eventually(lambda: log.messages("error") != [])
        assert made.problem and made.problem.reason == "nvidia-cuda-mps-control is not on this node"
        assert "nvidia-compute-utils" in str(log.lines[-1][2]["hint"])
        (node.place / "away").rename(node.mps.program)
        assert up(made)


def test_unresponsive_daemon_is_replaced(node: MpsNode, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryLog()
    monkeypatch.setattr(supervisor, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr("gpunode.plugin.mps.daemon._SECONDS", 1.0)
    monkeypatch.setattr("gpunode.plugin.mps.daemon._QUIT_SECONDS", 0.3)
    with kept(node, spec(node), log) as made:
        assert up(made)
        first = pid(node)
        node.mps.behave(deaf=True)
        assert eventually(lambda: "the MPS control daemon does not answer any more" in log.messages("error"))
        node.mps.behave()
        assert up(made), log.lines
        assert pid(node) != first


def test_servers_that_do_not_start_are_a_problem_until_one_does(
    node: MpsNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_SERVER_SECONDS", 0.3)
    log = MemoryLog()
    with kept(node, spec(node), log) as made:
        assert up(made)
        node.mps.behave(servers_fail=True)
        for _ in range(3):  # as a client does
            made._control.send("start_server -uid 1000")
        assert eventually(lambda: made.problem is not None)
        assert made.problem and made.problem.reason.startswith("the MPS server does not come up (Server 5")
        assert eventually(lambda: "start_server -uid 0" in node.mps.commands())
        assert made.problem is not None
        node.mps.behave()
        assert eventually(lambda: "the MPS server is running again" in log.messages("info")), log.lines
        assert len(node.mps.environments()) == 1


def test_daemon_that_outlived_its_supervisor_is_adopted(node: MpsNode) -> None:
    """As after SIGKILL of the plugin: the clients of the daemon live on."""
    wanted = spec(node)
    layout.prepare(node.host, wanted, node.root, MemoryLog())
    orphan = start(node.host, str(node.mps.program), wanted)
    Path(f"{wanted.directory}/compute-modes.json").write_text(json.dumps({gpu_uuid(0): DEFAULT}))
    node.gpus.write(machine(4).with_gpu(0, compute_mode=EXCLUSIVE))
    assert answers(node, wanted)
    log = MemoryLog()
    with kept(node, wanted, log) as made:
        assert up(made), log.lines
        assert pid(node) == orphan.pid
        assert orphan.ended() is None
        assert "using the MPS control daemon that already runs" in log.messages("info")
    assert orphan.ended() is not None
    assert node.gpus.compute_modes() == {gpu_uuid(0): DEFAULT}


def test_daemon_of_a_killed_plugin_outlives_the_time_until_the_first_plan(node: MpsNode) -> None:
    """A tick between "GPUs found" and the plan saw no resource with MPS and ended every daemon."""
    wanted = spec(node)
    layout.prepare(node.host, wanted, node.root, MemoryLog())
    orphan = start(node.host, str(node.mps.program), wanted)
    log = MemoryLog()
    settings = Settings(mps=True, mps_root=node.root)

    class Ticking(FakeBackend):
        def plan(self, settings: Settings, seen: Inventory) -> ResourcePlan:
            mps.tick(time.monotonic())
            return super().plan(settings, seen)

    backend = Ticking({})
    ledger = Ledger(backend, settings, FakeChecker(), log, time.time)
    mps = Supervisor(node.host, log, ledger)
    ledger.vetoes.append(mps)
    backend.sink = ledger
    backend.look()
    assert not Path(f"{node.root}/.lock").exists()  # it is taken before anything is ended
    assert orphan.ended() is None
    mps.tick(time.monotonic())  # the plan is made, and has no resource with MPS
    assert eventually(lambda: orphan.ended() is not None)
    mps.close()


def test_first_plan_made_during_a_tick_ends_no_daemon(node: MpsNode) -> None:
    """The ledger publishes it from another thread, between two reads of the supervisor."""
    Path(node.root).mkdir()
    log = MemoryLog()

    class Publishing(Ledger):
        ready = False

        def __getattribute__(self, name: str) -> object:
            value = super().__getattribute__(name)
            if name in ("plan", "planned") and self.ready:
                self.ready = False
                backend.look()
            return value

    backend = FakeBackend({})
    ledger = Publishing(backend, Settings(mps=True, mps_root=node.root), FakeChecker(), log, time.time)
    mps = Supervisor(node.host, log, ledger)
    backend.sink = ledger
    ledger.ready = True
    mps.tick(time.monotonic())
    assert ledger.planned
    assert not Path(f"{node.root}/.lock").exists()  # it is taken before anything is ended
    mps.tick(time.monotonic())
    assert Path(f"{node.root}/.lock").exists()
    mps.close()


def test_earlier_daemon_with_other_gpus_is_stopped_first(node: MpsNode) -> None:
    wanted = spec(node, 0, 1)
    layout.prepare(node.host, wanted, node.root, MemoryLog())
    orphan = start(node.host, str(node.mps.program), spec(node, 0))
    assert answers(node, wanted)
    with kept(node, wanted) as made:
        assert up(made)
        assert orphan.ended() is not None
        assert pid(node) != orphan.pid


def test_process_that_reused_the_pid_is_not_stopped(node: MpsNode) -> None:
    """The file names this test's own process, with another start time."""
    wanted = spec(node)
    Path(wanted.directory).mkdir(parents=True)
    mine = Identity.of(node.host, os.getpid(), wanted.gpus)
    assert mine is not None and mine.alive(node.host)
    file = Path(f"{wanted.directory}/daemon.json")
    for changed in ({"started": mine.started - 1}, {"program": "/usr/bin/nvidia-cuda-mps-control"}):
        file.write_text(json.dumps({**vars_of(mine), **changed}))
        assert left_behind(node.host, wanted) is None
    for text in ("", "{}", "[]", "nonsense", '{"pid": "x"}', '{"pid": 1, "started": null}'):
        file.write_text(text)
        assert left_behind(node.host, wanted) is None
    with kept(node, wanted) as made:
        assert up(made)


def vars_of(identity: Identity) -> dict[str, object]:
    return {
        **{"pid": identity.pid, "started": identity.started},
        **{"program": identity.program, "gpus": list(identity.gpus)},
    }


def test_foreign_daemon_is_not_touched(node: MpsNode) -> None:
    wanted = spec(node)
    layout.prepare(node.host, wanted, node.root, MemoryLog())
    other = start(node.host, str(node.mps.program), wanted)
    Path(f"{wanted.directory}/daemon.json").unlink()
    assert answers(node, wanted)
    log = MemoryLog()
    try:
        with kept(node, wanted, log) as made:
            assert eventually(lambda: log.messages("error") != [])
            assert made.problem and "already running" in made.problem.reason
            assert "echo quit | CUDA_MPS_PIPE_DIRECTORY=" in str(log.lines[-1][2]["hint"])
        assert other.ended() is None
        assert Path(f"{wanted.pipe}/control").exists()
        assert not [line for line in node.mps.commands() if "set_default" in line]
    finally:
        other.signal("TERM")
        assert eventually(lambda: other.ended() is not None)


def test_stop_does_not_wait_for_a_hanging_nvml(node: MpsNode) -> None:
    node.gpus.write(machine(4).with_faults(Fault("nvmlInitWithFlags", hang=60.0, times=99)))
    log = MemoryLog()
    with kept(node, spec(node), log) as made:
        assert eventually(lambda: node.gpus.fault_calls() > 0)
        begun = time.monotonic()
        made.stop(hurry=True)
        made.join(30.0)
        assert time.monotonic() - begun < 10.0
    assert log.messages("error") == []


def test_stop_with_hanging_daemon_and_nvml_is_faster_than_the_systemd_timeout(
    node: MpsNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpunode.plugin.mps.compute_mode._HURRIED_SECONDS", 0.5)
    monkeypatch.setattr("gpunode.plugin.mps.daemon._QUIT_SECONDS", 0.5)
    log = MemoryLog()
    with kept(node, spec(node), log) as made:
        assert up(made)
        process = pid(node)
        node.mps.behave(deaf=True)
        node.gpus.write(machine(4).with_faults(Fault("nvmlInitWithFlags", hang=60.0)))
        begun = time.monotonic()
        made.stop(hurry=True)
        made.join(30.0)
        assert time.monotonic() - begun < 10.0
    assert Identity.of(node.host, process, ()) is None
    assert "MPS has not ended cleanly" in log.messages("error")
    assert remains(node.host, node.root) != []  # the next start restores the modes


def test_lost_gpu_does_not_affect_the_others(node: MpsNode) -> None:
    node.gpus.write(machine(4).with_gpu(1, lost=True))
    with kept(node, spec(node, 0, 1)) as made:
        assert up(made)
        assert set(made.gpu_problems) == {gpu_uuid(1)}
        assert "lost" in made.gpu_problems[gpu_uuid(1)].reason


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("nvmlDeviceSetComputeMode", 4), "only root may set the compute mode"),
        (Fault("nvmlInitWithFlags", 9), "the NVIDIA kernel module is not loaded"),
    ],
    ids=["permission", "driver"],
)
def test_gpus_that_refuse_the_mode_are_named(node: MpsNode, fault: Fault, reason: str) -> None:
    node.gpus.write(machine(4).with_faults(fault))
    log = MemoryLog()
    with kept(node, spec(node), log) as made:
        assert eventually(lambda: log.messages("error") != [])
        assert made.problem and reason in made.problem.reason
        assert node.mps.environments() == []
        node.gpus.write(machine(4))
        assert up(made)


def test_prohibited_gpu_stays_prohibited(node: MpsNode) -> None:
    node.gpus.write(machine(4).with_gpu(0, compute_mode=PROHIBITED))
    with kept(node, spec(node)) as made:
        assert eventually(lambda: made.problem is not None and "PROHIBITED" in made.problem.reason)
    assert node.gpus.compute_modes() == {}


def test_mode_changed_by_another_user_meanwhile_is_kept(node: MpsNode) -> None:
    with kept(node, spec(node)) as made:
        assert up(made)
        with Path(f"{node.gpus.scenario_path}.modes").open("a") as file:
            file.write(f"{gpu_uuid(0)} {PROHIBITED}\n")
    assert node.gpus.compute_modes() == {gpu_uuid(0): PROHIBITED}


def test_exclusive_gpu_stays_exclusive(node: MpsNode) -> None:
    node.gpus.write(machine(4).with_gpu(0, compute_mode=EXCLUSIVE))
    with kept(node, spec(node)) as made:
        assert up(made)
    assert node.gpus.compute_modes() == {}


def test_mode_that_cannot_be_restored_is_reported_and_remembered(node: MpsNode) -> None:
    log = MemoryLog()
    with kept(node, spec(node), log) as made:
        assert up(made)
        node.gpus.write(machine(4).with_faults(Fault("nvmlDeviceSetComputeMode", 4)))
    assert "the compute mode is still EXCLUSIVE_PROCESS" in log.messages("error")
    (left,) = remains(node.host, node.root)
    assert left.directory == spec(node).directory
    node.gpus.write(machine(4))
    ender = Keeper(node.host, Settings(mps=True, mps_root=node.root), left, log)
    ender.stop()
    ender.start()
    ender.join(30.0)
    assert node.gpus.compute_modes() == {gpu_uuid(0): DEFAULT}
    assert remains(node.host, node.root) == []


def test_other_limits_need_no_new_daemon(node: MpsNode) -> None:
    with kept(node, spec(node)) as made:
        assert up(made)
        made.adjust(spec(node, percentage=10, mib=400))
        assert eventually(lambda: "set_default_active_thread_percentage 10" in node.mps.commands())
        assert "set_default_device_pinned_mem_limit 0 400M" in node.mps.commands()
        assert len(node.mps.environments()) == 1


def test_shared_memory_that_is_not_private_is_refused(node: MpsNode) -> None:
    Path(f"{node.root}/shm").mkdir(parents=True)
    with kept(node, spec(node)) as made:
        assert eventually(
            lambda: made.problem is not None and "clients would not find" in made.problem.reason
        )
    assert Path(f"{node.root}/shm").is_dir()


def test_container_without_the_nodes_shm_gets_a_mount_hint(node: MpsNode) -> None:
    pod = replace(
        node, host=replace(node.host, environ={**node.host.environ, "KUBERNETES_SERVICE_HOST": "x"})
    )
    log = MemoryLog()
    with kept(pod, spec(node), log) as made:
        assert eventually(lambda: made.problem is not None and "this is a container" in made.problem.reason)
        assert "mount a tmpfs of the node" in str(log.lines[-1][2]["hint"])


def test_log_is_followed_and_kept_small(node: MpsNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunode.plugin.mps.daemon._MOST", 4000)
    log = MemoryLog()
    with kept(node, spec(node), log) as made:
        assert up(made)
        path = Path(f"{made.spec.log}/control.log")
        for _ in range(40):
            made._control.send("nonsense")
        assert eventually(lambda: any("Unknown command" in str(f.get("said")) for _, _, f in log.lines))
        assert eventually(lambda: path.stat().st_size < 4000)
        made._control.send("start_server -uid 0")
        assert eventually(lambda: any("Ready" in str(f.get("said")) for _, _, f in log.lines))
        assert sum("Unknown command" in str(fields.get("said")) for _, _, fields in log.lines) < 4
        with suppress(ValueError):
            path.read_text().index("\0")  # the daemon continues at the start, without a gap
            pytest.fail("the log has a gap")
