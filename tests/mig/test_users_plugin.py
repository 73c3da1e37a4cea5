"""gpunode's own device plugin during a change of MIG: it releases the GPU and shows the new layout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.scenario import Fault, mig_machine
from gpunode.errors import PreconditionError
from gpunode.facts.processes import Process
from gpunode.host import Host
from gpunode.mig.users import Clients, NvmlPause, clients
from tests.cli import clean_environment, command
from tests.mig.conftest import EXAMPLES, MigMaker, MigNode
from tests.ordinary_user import AS_ORDINARY_USER, public_directory
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.serving import kubelet
from tests.silent import SilentProgress
from tests.waiting import PATIENCE, eventually

BOTH = 1 << (signal.SIGUSR1 - 1) | 1 << (signal.SIGHUP - 1)
SERVE = ("/usr/bin/python3", "/usr/local/bin/gpunode", "plugin", "serve")
CHILD = ("/usr/bin/python3", "-P", "-m", "gpunode.gpu.nvml_watcher", "--poll", "1")


# --- which processes --------------------------------------------------------------------------------------


def processes(root: Path, *ran: tuple[int, int, int, tuple[str, ...]]) -> tuple[Process, ...]:
    """Number, parent, caught signals, command line."""
    for pid, parent, caught, _ in ran:
        place = root / f"proc/{pid}"
        place.mkdir(parents=True)
        (place / "status").write_text(f"PPid:\t{parent}\nSigBlk:\t{0:016x}\nSigCgt:\t{caught:016x}\n")
        (place / "cgroup").write_text("0::/system.slice/gpu.service\n")
    unit = root / "etc/systemd/system/gpu.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/usr/local/bin/gpunode plugin serve\n")
    return tuple(Process(pid, argv, 0.0) for pid, _, _, argv in ran)


@pytest.mark.parametrize(
    ("argv", "caught", "counts"),
    [
        (SERVE, BOTH, True),
        (("/usr/bin/python3", "-m", "gpunode", "plugin", "serve"), BOTH, True),
        (("/usr/bin/python3", "-P", "-m", "gpunode.light", "3", "plugin", "serve"), BOTH, True),
        (("python3", "/usr/local/bin/gpunode", "labels", "--watch"), BOTH, True),
        (("python3", "/usr/local/bin/gpunode", "labels"), BOTH, False),
        (SERVE, 1 << (signal.SIGHUP - 1), False),  # the other signal would end it
        (SERVE, 0, False),
        (("/usr/bin/nvidia-device-plugin",), BOTH, False),
    ],
)
def test_only_plugins_handling_both_signals_are_signalled(
    tmp_path: Path, argv: tuple[str, ...], caught: int, counts: bool
) -> None:
    ran = processes(tmp_path, (7, 1, caught, argv), (8, 7, 0, CHILD), (9, 1, 0, CHILD))
    wanted = Clients((7,), (8,)) if counts else Clients()
    assert clients(Host(root=tmp_path), ran) == wanted


class Deaf(Host):
    """A node whose plugin gets the signals without a reaction, and that doesn't wait."""

    def signal(self, pid: int, name: str, expected: Callable[[], bool] = lambda: True) -> None:
        assert expected()
        signals.append((pid, name))

    def wait_until(self, ready: object, timeout: float, interval: float = 0.05) -> bool:
        return False


signals: list[tuple[int, str]] = []


def test_plugin_that_keeps_nvml_open_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals.clear()
    ran = processes(tmp_path, (7, 1, BOTH, SERVE), (8, 7, 0, CHILD))
    monkeypatch.setattr("gpunode.mig.users.running", lambda _host: ran)
    with pytest.raises(PreconditionError, match="process 7 has not closed NVML") as caught:
        with NvmlPause(Deaf(root=tmp_path), SilentProgress()).if_needed(True):
            pytest.fail("the change began")
    assert "--drain gpunode-device-plugin" in caught.value.hint
    assert signals == [(7, "USR1"), (7, "HUP")]


class Interrupted(Host):
    """A node where another program's SIGHUP has the plugin open NVML again after the first signal."""

    def signal(self, pid: int, name: str, expected: Callable[[], bool] = lambda: True) -> None:
        signals.append((pid, name))


def test_plugin_that_keeps_nvml_open_gets_the_signal_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals.clear()
    service, child = processes(tmp_path, (7, 1, BOTH, SERVE), (8, 7, 0, CHILD))
    monkeypatch.setattr(
        "gpunode.mig.users.running", lambda _host: (service, child) if len(signals) < 2 else (service,)
    )
    with NvmlPause(Interrupted(root=tmp_path), SilentProgress()).if_needed(True):
        assert signals == [(7, "USR1"), (7, "USR1")]
    assert signals[2:] == [(7, "HUP")]


def test_service_that_restarts_meanwhile_is_resumed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals.clear()
    first, _, second, child = processes(
        tmp_path, (7, 1, BOTH, SERVE), (8, 7, 0, CHILD), (9, 1, BOTH, SERVE), (10, 9, 0, CHILD)
    )
    monkeypatch.setattr("gpunode.mig.users._CLOSE_SECONDS", 0.0)
    monkeypatch.setattr("gpunode.mig.users.running", lambda _host: (second, child) if signals else (first,))
    with pytest.raises(PreconditionError, match="process 9 has not closed NVML"):
        with NvmlPause(Interrupted(root=tmp_path), SilentProgress()).if_needed(True):
            pytest.fail("the change began")
    assert signals == [(7, "USR1"), (9, "USR1"), (9, "HUP")]


# --- real plugins -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """A MIG node, a kubelet, and the plugin that runs there."""

    node: MigNode
    kubelet: KubeletStub
    log: Path
    state: Path

    def shows(self, resource: str, count: int) -> bool:
        return self.kubelet.wait_allocatable(f"nvidia.com/{resource}", count, PATIENCE)


POD = ("unshare", "--pid", "--fork", "--kill-child=TERM")


@contextmanager
def serving(made: MigNode, pod: bool = False, shows: tuple[str, int] = ("gpu", 1)) -> Iterator[Beside]:
    """A plugin that polls by itself once an hour, as a service or as a pod's first process."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        kubelet(Path(short)) as (stub, _),
        made.shared() as node,  # its processes end before the directory they write to is removed
    ):
        if pod and subprocess.run([*node.space, *POD, "true"], capture_output=True).returncode:
            pytest.skip("no PID namespace can be made here")
        own = ("--kubelet-socket", f"{short}/dp/kubelet.sock", "--state-dir", f"{short}/state")
        words = (*own, "--mig-strategy", "mixed", "--rediscover-seconds", "3600")
        argv = (*node.space, *(POD if pod else ()), *command("plugin", "serve", *words))
        log = Path(short) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(argv, env=clean_environment(node.env), stderr=stream)
        try:
            beside = Beside(node, stub, log, Path(short) / "state")
            assert beside.shows(*shows), log.read_text()
            assert eventually(Path(short, "state/status.json").exists)
            yield beside
        finally:
            process.terminate()
            process.wait(PATIENCE)


@pytest.mark.full
@pytest.mark.parametrize("pod", [False, True], ids=["service", "pod"])
def test_plugin_closes_nvml_for_a_reset_and_advertises_the_new_layout(pod: bool, mig_node: MigMaker) -> None:
    """As long as it has NVML open an Ampere GPU can't be reset."""
    with serving(mig_node(mig_machine("a100-40gb")), pod) as beside:
        ran = beside.node.apply("all-balanced")
        assert ran.code == 0, (ran.err, beside.log.read_text())
        assert "closes NVML meanwhile" in ran.err
        assert beside.shows("mig-3g.20gb", 1) and beside.shows("mig-1g.5gb", 2), beside.log.read_text()
        names = [one.resource for one in beside.kubelet.registrations]
        assert names.count("nvidia.com/gpu") == 1, "it was never removed"


DISGUISED = """\
import signal, sys, time
for number in (signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, _: open(sys.argv[-1], "a").write(f"{number}\\n"))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.full
@pytest.mark.parametrize("user", [AS_ORDINARY_USER, ()], ids=["another user", "root"])
@pytest.mark.parametrize("options", [(), ("--state-dir", "{place}")], ids=["no status file", "a forged one"])
def test_process_that_only_resembles_the_plugin_gets_no_signal(
    mig_node: MigMaker, user: tuple[str, ...], options: tuple[str, ...]
) -> None:
    with public_directory() as place, serving(mig_node(mig_machine("a100-40gb"))) as beside:
        marker = place / "signals"
        marker.touch()
        marker.chmod(0o666)
        (place / "gpunode").write_text(DISGUISED)
        words = [option.format(place=place) for option in options]
        argv = [sys.executable, str(place / "gpunode"), "plugin", "serve", *words, str(marker)]
        with subprocess.Popen([*beside.node.space, *user, *argv], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None and process.stdout.readline() == b"ready\n"
                status = beside.state / "status.json"
                forged = {**json.loads(status.read_text()), "pid": process.pid}
                (place / "status.json").write_text(json.dumps(forged))
                ran = beside.node.apply("all-balanced")
            finally:
                process.kill()
        assert ran.code == 0, (ran.err, beside.log.read_text())
        assert marker.read_text() == ""
        assert "closes NVML meanwhile" in ran.err


@pytest.mark.full
def test_change_without_a_reset_is_advertised_at_once(mig_node: MigMaker) -> None:
    with serving(mig_node(mig_machine("h100"))) as beside:
        assert beside.node.apply("all-1g").code == 0
        assert beside.shows("mig-1g.10gb", 7), beside.log.read_text()
        assert "NVML is closed" not in beside.log.read_text()


@pytest.mark.full
def test_plugin_continues_after_a_failure(mig_node: MigMaker) -> None:
    scenario = mig_machine("a100-40gb").with_faults(Fault("migChange", 23, after=2, times=1))
    with serving(mig_node(scenario)) as beside:
        assert beside.node.apply("all-balanced").code == 4
        assert eventually(lambda: beside.log.read_text().count("GPUs found") == 2), beside.log.read_text()
        assert beside.shows("gpu", 1)


@pytest.mark.full
def test_pod_with_an_allocated_device_blocks(mig_node: MigMaker) -> None:
    """It uses nothing yet; the kubelet lists the device as its own (PodResources)."""
    made = mig_node(mig_machine("h100"))
    assert made.apply("all-1g").code == 0
    with serving(made, shows=("mig-1g.10gb", 7)) as beside, kubelet_process(beside):
        beside.kubelet.admit("train-0", "main", {"nvidia.com/mig-1g.10gb": 1})
        ran = beside.node.apply("all-balanced")
        assert ran.code == 3, ran.err
        assert "pod default/train-0 holds the 1g.10gb at" in ran.err
        assert "hint: end first: kubectl delete pod -n default train-0" in ran.err
        planned = beside.node.run("plan", "-f", EXAMPLES, "-c", "all-balanced", "-o", "json")
        (obstacle,) = planned.document["data"]["obstacles"]
        assert (obstacle["kind"], obstacle["name"], obstacle["drain"]) == ("pod", "default/train-0", "")
        beside.kubelet.remove("train-0")
        assert beside.node.apply("all-balanced").code == 0


@contextmanager
def kubelet_process(beside: Beside) -> Iterator[None]:
    """A process recognized as the kubelet of the stub."""
    script = 'exec -a kubelet sh -c "echo runs; read _" "--root-dir=$0"'
    argv = [*beside.node.space, "bash", "-c", script, str(beside.log.parent)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"runs\n"
        yield
        process.communicate(b"\n")
