"""Children of the vector-add program that run at the same time, each with a time limit."""

import json

from fixtures.scenario import machine
from gpunode.gpu.vectoradd import AT_ONCE
from tests.gpu.children import run_python
from tests.waiting import PATIENCE

HANG = "import time; time.sleep(600)"
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
OK = "print('ok', end='')"
RUN = """
import json, os, sys
from gpunode.gpu.vectoradd import run_each
scripts, timeout = json.loads(sys.argv[1]), float(sys.argv[2])
ended = run_each([(sys.executable, "-I", "-S", "-c", script) for script in scripts], timeout)
try:
    os.waitpid(-1, os.WNOHANG)
    left = True
except ChildProcessError:
    left = False
print(json.dumps([[len(one.output), one.code, one.timed_out] for one in ended] + [left]))
"""


def outcomes(scripts, timeout=PATIENCE / 2):
    """In a process of its own, which has no other children."""
    *ended, left = run_python(RUN, {}, json.dumps(scripts), str(timeout))
    assert left is False, "a child was left behind"
    return ended


def test_outcomes_keep_the_order_of_the_commands():
    scripts = [f"import time; time.sleep(0.01 * (5 - {n})); print('x' * {n}, end='')" for n in range(5)]
    assert outcomes(scripts) == [[n, 0, False] for n in range(5)]


def test_all_commands_run_beyond_the_parallel_limit():
    assert outcomes([OK] * (AT_ONCE + 2)) == [[2, 0, False]] * (AT_ONCE + 2)


def test_output_larger_than_a_pipe_is_complete():
    assert outcomes(["print('x' * 1000000, end='')"]) == [[1_000_000, 0, False]]


def test_hanging_child_is_killed_at_its_limit_and_stops_no_other():
    for seconds in (1, 10, 60):  # a busy machine may not have finished the other one within the first
        ended = outcomes([HANG, OK, HANG], timeout=seconds)
        if not ended[1][2]:
            break
    assert ended == [[0, -9, True], [2, 0, False], [0, -9, True]]


def test_output_before_a_hang_is_kept():
    for seconds in (1, 10, 60):
        ended = outcomes([f"print('ok', end='', flush=True); {HANG}"], timeout=seconds)
        if ended[0][0]:
            break
    assert ended == [[2, -9, True]]


def test_crash_and_exit_code_have_distinct_outcomes():
    assert outcomes([CRASH, "raise SystemExit(70)", OK]) == [[0, -11, False], [0, 70, False], [2, 0, False]]


def test_no_commands_give_no_outcomes():
    assert outcomes([]) == []


def test_output_printed_by_a_library_is_not_in_the_result(make_node):
    script = """
import os, sys
from gpunode.gpu import vectoradd
list_devices = vectoradd._enumerate
vectoradd._enumerate = lambda: os.write(1, b"noise") and list_devices()
sys.argv[1:] = ["{}"]
vectoradd.child()
"""
    assert len(run_python(script, make_node(machine(2)).env)["targets"]) == 2
