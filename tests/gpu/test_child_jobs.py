"""Children with a time limit. The code forks, so it runs in a process of its own, which has no threads."""

from tests.gpu.children import run_python
from tests.waiting import PATIENCE

SCRIPT = """
import json, os, signal, sys, time
from gpunode.gpu.child import AT_ONCE, run_each
def hang(): time.sleep(600)
def crash(): os.kill(os.getpid(), signal.SIGSEGV)
def broken(): raise RuntimeError("broken")
jobs = {jobs}
outcomes = run_each(jobs, {timeout})
try:
    os.waitpid(-1, os.WNOHANG)
    left = True
except ChildProcessError:
    left = False
print(json.dumps([[len(o.output), o.code, o.timed_out] for o in outcomes] + [left]))
"""


def outcomes(jobs, timeout=PATIENCE / 2):
    *found, left = run_python(SCRIPT.format(jobs=jobs, timeout=timeout), {})
    assert left is False, "a child was left behind"
    return found


def test_outcomes_keep_the_order_of_the_jobs():
    found = outcomes("[lambda n=n: (time.sleep(0.01 * (5 - n)), b'x' * n)[1] for n in range(5)]")
    assert found == [[n, 0, False] for n in range(5)]


def test_all_jobs_run_beyond_the_parallel_limit():
    assert outcomes("[lambda: b'x'] * (2 * AT_ONCE + 1)") == [[1, 0, False]] * 33


def test_output_larger_than_a_pipe_is_complete():
    assert outcomes("[lambda: b'x' * 1000000]") == [[1_000_000, 0, False]]


def test_hanging_job_is_killed_at_its_limit_and_stops_no_other():
    for seconds in (1, 10, 60):  # a busy machine may not have finished the other job within the first
        found = outcomes("[hang, lambda: b'ok', hang]", timeout=seconds)
        if not found[1][2]:
            break
    assert found == [[0, -9, True], [2, 0, False], [0, -9, True]]


def test_crash_and_exception_have_distinct_outcomes():
    assert outcomes("[crash, broken, lambda: b'ok']") == [[0, -11, False], [0, 70, False], [2, 0, False]]


def test_no_jobs_give_no_outcomes():
    assert outcomes("[]") == []


def test_output_printed_by_a_library_is_not_in_the_result():
    assert outcomes("[lambda: os.write(1, b'hello') and b'ok']") == [[2, 0, False]]
