"""Everything that hangs is a finding that names what it waits for, and is waited for once."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fixtures.machines import recorded_host
from gpunode.checks.finding import Finding, FindingStatus
from gpunode.checks.patience import Patience
from gpunode.checks.runner import Selection, run_checks
from gpunode.commands import doctor
from gpunode.facts.node import Node
from gpunode.facts.topic import Stuck, topic
from gpunode.host import Host
from gpunode.host.files import LARGE_BYTES
from tests.checks.stalls import Stall, stalling
from tests.silent import SilentProgress
from tests.waiting import PATIENCE, eventually


class Stalled(Host):
    """A machine on which reading below one path blocks until it is released."""

    place = "/proc/1"
    stall: Stall

    def read_bytes(self, path: str, limit: int = LARGE_BYTES) -> bytes | None:
        if path.startswith(self.place):
            self.path(path)  # where Host records it
            self.stall.wait()
        return super().read_bytes(path, limit)


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    with stalling(monkeypatch) as stall:
        yield stall


@pytest.fixture
def stalled(tmp_path: Path, stall: Stall) -> Stalled:
    Stalled.stall = stall
    return Stalled(recorded_host("healthy-h100", tmp_path).root, environ={})


def by_id(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings}


@pytest.mark.full
def test_stuck_process_table_is_one_error_and_other_checks_run(stalled: Stalled) -> None:
    processes = [path for path in stalled.listdir("/proc") if path.isdecimal()]
    Stalled.place = f"/proc/{processes[0]}/"
    findings = by_id(run_checks(Node(stalled)))
    errors = [finding for finding in findings.values() if finding.status is FindingStatus.ERROR]
    assert len(errors) >= 1
    assert all(f"reading /proc/{processes[0]}/" in finding.summary for finding in errors)
    assert findings["pci-no-gpu"].status is FindingStatus.PASS
    assert findings["driver-lib-mismatch"].status is FindingStatus.PASS


def test_hanging_query_is_waited_for_only_once(stall: Stall) -> None:
    class Thing:
        @topic
        def slow(self) -> int:
            stall.wait()
            return 1

    thing, raised = Thing(), []

    with Patience(Host(), 1.0) as patience:
        for _ in range(2):
            try:
                patience.call(lambda: thing.slow)
            except Stuck as error:
                raised.append((error.message, error.first))
    (waited, first), (known, again) = raised
    assert re.match(r"no answer within 1 s: ", waited) and first
    assert known == "waits for a hanging query: slow" and not again


def test_late_result_is_ignored_and_its_thread_ends(stall: Stall) -> None:
    with Patience(Host(), 0.1) as patience:
        with pytest.raises(Stuck):
            patience.call(stall.wait)
        stall.release()
        assert eventually(lambda: not any(one.name == "checks" for one in threading.enumerate()))
        assert patience.call(lambda: "next") == "next"


def test_one_thread_answers_until_a_query_hangs(stall: Stall) -> None:
    with Patience(Host(), 0.5) as patience:
        first = [patience.call(threading.get_ident) for _ in range(3)]
        with pytest.raises(Stuck):
            patience.call(stall.wait)
        second = patience.call(threading.get_ident)
    assert len(set(first)) == 1
    assert second not in first


@pytest.mark.parametrize(
    ("question", "place", "request_"),
    [
        (lambda host: host.read_text("/proc/1/comm"), "read_regular", "reading /proc/1/comm"),
        (lambda host: host.file_system("/tmp"), "os.statvfs", "reading /tmp"),
        (lambda host: host.listdir("/sys"), "os.listdir", "reading /sys"),
    ],
)
def test_finding_names_the_hanging_call_of_a_live_host(
    question: Callable[[Host], object],
    place: str,
    request_: str,
    stall: Stall,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host()
    monkeypatch.setattr(f"gpunode.host.reading.{place}", stall.wait)
    with Patience(host, 0.2) as patience, pytest.raises(Stuck) as caught:
        patience.call(lambda: question(host))
    stall.release()
    monkeypatch.undo()
    assert caught.value.message == f"no answer within 0.2 s: {request_}"


def test_finding_names_the_hanging_command(stall: Stall) -> None:
    host = Host()

    def question() -> None:
        host.run(("true",))
        stall.wait()

    message = "no answer within 1 s: running true"
    with Patience(host, 1.0) as patience, pytest.raises(Stuck, match=message):
        patience.call(question)


def test_exception_of_a_query_reaches_the_caller() -> None:
    with Patience(Host(), PATIENCE) as patience, pytest.raises(ZeroDivisionError):
        patience.call(lambda: 1 // 0)


def test_single_query_may_have_a_longer_limit(stall: Stall) -> None:
    with Patience(Host(), 0.05) as patience:
        assert patience.call(lambda: 1, least=PATIENCE) == patience.call(lambda: 1)
    assert stall.limits == [PATIENCE, 0.05]


def test_failed_topic_is_read_again_on_next_use() -> None:
    class Thing:
        count = 0

        @topic
        def shy(self) -> int:
            Thing.count += 1
            if Thing.count == 1:
                raise PermissionError
            return Thing.count

    thing = Thing()
    with pytest.raises(PermissionError):
        _ = thing.shy
    assert thing.shy == thing.shy == 2


def test_no_thread_is_left_if_no_query_hangs(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # threads of an earlier test may still be listed
    run_checks(Node(recorded_host("healthy-h100", tmp_path)))
    assert eventually(lambda: not set(threading.enumerate()) - before)


@pytest.mark.full
def test_node_summary_does_not_wait_for_hanging_queries(stalled: Stalled) -> None:
    """A check that doesn't need the process table leaves finding the engines to the report."""
    processes = [path for path in stalled.listdir("/proc") if path.isdecimal()]
    Stalled.place = f"/proc/{processes[0]}/"
    result = doctor.run(stalled, SilentProgress(), Selection(only=("pci-no-gpu",)))
    about = result.data.node
    assert (about.engines, about.kernel, len(about.gpus)) == ((), "5.15.0-122-generic", 8)
