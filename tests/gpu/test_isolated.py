"""The NVML probe: real children, the real pynvml, stand-in libraries that answer, refuse, hang and crash."""

import json
import os

import pytest

from fixtures.scenario import Fault, StubMig, gpu_uuid, machine, mig_uuid, mixed_layout, with_mig
from gpunode.errors import ConfigError
from gpunode.gpu.model import Inventory
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.host.recording import RECORDING
from gpunode.output.result import plain
from tests.gpu.children import run_python
from tests.gpu.conftest import host_of
from tests.waiting import eventually, has_ended

# a process that was started for this node, and has one thread: it is forked, not started again
FORKED = """
import json, os, sys
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.output.result import plain
order, said = [], []
host = Host(environ=dict(os.environ), trace=said.append)
assert host.forkable()
answer = probe(host, timeout=float(sys.argv[1]), topology=True, started=lambda: order.append(1))
assert order == [1] and len(said) == 1
try:
    os.waitpid(-1, os.WNOHANG)
    left = True
except ChildProcessError:
    left = False
print(json.dumps({**plain(answer), "left": left}))
"""


@pytest.mark.parametrize("count", [0, 1, 8, 16])
def test_every_gpu_is_listed_with_what_nvml_says_of_it(make_node, count):
    answer = probe(host_of(make_node(machine(count))))
    assert answer.inventory is not None, answer.message
    gpus = answer.inventory.gpus
    assert [gpu.index for gpu in gpus] == list(range(count))
    assert [gpu.uuid for gpu in gpus] == [gpu_uuid(i) for i in range(count)]
    assert len({gpu.pci for gpu in gpus}) == count
    assert all(gpu.error == "" and gpu.compute_capability == "9.0" for gpu in gpus)
    assert answer.inventory.cuda_version == "12.2"
    assert answer.inventory.driver_version == "535.104.05"


def test_a_pci_address_is_spelt_as_sysfs_spells_it(make_node):
    scenario = machine(2).with_gpu(0, pci="00000000:AB:00.0").with_gpu(1, pci="00010000:3B:00.0")
    answer = probe(host_of(make_node(scenario)))
    assert answer.inventory is not None
    assert [gpu.pci for gpu in answer.inventory.gpus] == ["0000:ab:00.0", "00010000:3b:00.0"]


def test_mig_devices_are_listed_under_their_gpu(make_node):
    answer = probe(host_of(make_node(with_mig(machine(2), 1, mixed_layout(1)))))
    assert answer.inventory is not None, answer.message
    whole, cut = answer.inventory.gpus
    assert (whole.mig_enabled, whole.mig) == (False, ())
    assert cut.mig_enabled
    assert [mig.profile for mig in cut.mig] == ["3g.40gb", "2g.20gb", "1g.10gb+me", "1g.10gb"]
    assert [(mig.index, mig.uuid, mig.gi, mig.ci) for mig in cut.mig] == [
        (0, mig_uuid(1, 0), 1, 0),
        (1, mig_uuid(1, 1), 3, 0),
        (2, mig_uuid(1, 2), 9, 0),
        (3, mig_uuid(1, 3), 10, 0),
    ]


def test_empty_mig_slots_are_left_out(make_node):
    slots = (StubMig(5, mig_uuid(0, 5), gi=11),)
    answer = probe(host_of(make_node(with_mig(machine(1), 0, slots))))
    assert answer.inventory is not None
    assert [mig.index for mig in answer.inventory.gpus[0].mig] == [5]


def test_without_root_a_mig_device_is_named_by_its_attributes(make_node):
    scenario = with_mig(machine(1), 0, mixed_layout(0)).with_faults(Fault("nvmlDeviceGetGpuInstanceById", 4))
    answer = probe(host_of(make_node(scenario)))
    assert answer.inventory is not None
    assert answer.inventory.gpus[0].error == ""
    assert [mig.profile for mig in answer.inventory.gpus[0].mig][:2] == ["3g.40gb", "2g.20gb"]


def test_a_lost_gpu_is_listed_with_its_error_and_hides_no_other(make_node):
    answer = probe(host_of(make_node(machine(8).with_gpu(3, lost=True))))
    assert answer.inventory is not None, answer.message
    broken = [gpu for gpu in answer.inventory.gpus if gpu.error]
    assert [gpu.index for gpu in broken] == [3]
    assert "lost" in broken[0].error
    assert "15" in broken[0].error
    assert sum(bool(gpu.uuid) for gpu in answer.inventory.gpus) == 7


def test_a_gpu_that_fails_half_way_keeps_what_could_be_read(make_node):
    scenario = machine(2).with_faults(Fault("nvmlDeviceGetMinorNumber", 999, gpu_uuid(1)))
    answer = probe(host_of(make_node(scenario)))
    assert answer.inventory is not None
    gpu = answer.inventory.gpus[1]
    assert (gpu.uuid, gpu.name, gpu.minor) == (gpu_uuid(1), "NVIDIA H100 80GB HBM3", None)
    assert "999" in gpu.error


def test_an_unsupported_question_is_no_failure(make_node):
    scenario = machine(1).with_faults(Fault("nvmlDeviceGetMemoryInfo", 3))
    answer = probe(host_of(make_node(scenario)))
    assert answer.inventory is not None
    assert (answer.inventory.gpus[0].error, answer.inventory.gpus[0].memory_bytes) == ("", 0)


@pytest.mark.parametrize("code", [9, 18, 999])
def test_nvmls_own_code_comes_through(make_node, code):
    answer = probe(host_of(make_node(machine(1).with_faults(Fault("nvmlInitWithFlags", code)))))
    assert (answer.inventory, answer.code, answer.timed_out) == (None, code, False)
    assert answer.message


def test_a_missing_library_is_code_12(make_node):
    answer = probe(host_of(make_node(machine(1), "cuda")))
    assert (answer.inventory, answer.code) == (None, 12)
    assert "libnvidia-ml.so.1" in answer.message


def test_a_hang_is_a_timeout_after_the_given_seconds(make_node):
    node = make_node(machine(1).with_faults(Fault("nvmlInitWithFlags", hang=60)))
    answer = probe(host_of(node), timeout=1.0)
    assert (answer.inventory, answer.code, answer.timed_out) == (None, None, True)
    assert 1.0 <= answer.seconds < 30
    assert "1 s" in answer.message


def test_a_crash_names_the_signal(make_node):
    answer = probe(host_of(make_node(machine(1).with_faults(Fault("nvmlDeviceGetUUID", abort=True)))))
    assert (answer.inventory, answer.code, answer.timed_out) == (None, None, False)
    assert answer.message.endswith("(SIGABRT) (nvmlDeviceGetUUID of GPU 0)")


@pytest.mark.parametrize("junk", ["print('junk')", "print('[]')", "print('{\"inventory\": 3}')"])
def test_output_that_is_no_answer_is_told_apart(tmp_path, junk):
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\n{junk}\nsys.stdout.flush()\nsys.stderr.write('odd\\n')\nos._exit(0)\n"
    )
    answer = probe(Host(environ={**os.environ, "PYTHONPATH": str(tmp_path)}))
    assert (answer.inventory, answer.code, answer.timed_out) == (None, None, False)
    assert "no usable answer" in answer.message


def forked(node, seconds=20.0):
    found = run_python(FORKED, node.env, str(seconds))
    assert found.pop("left") is False, "a child was left behind"
    return found


def test_a_fork_tells_the_same_as_a_new_process(make_node):
    node = make_node(with_mig(machine(3), 1, mixed_layout(1)))
    found, fresh = forked(node), plain(probe(host_of(node), topology=True))
    assert found.pop("seconds") and fresh.pop("seconds")
    assert found == fresh


@pytest.mark.parametrize(
    ("fault", "seconds", "timed_out", "word"),
    [
        (Fault("nvmlInitWithFlags", hang=60), 4.0, True, "4 s (nvmlInit)"),
        (Fault("nvmlDeviceGetUUID", hang=60), 4.0, True, "4 s (nvmlDeviceGetUUID of GPU 0)"),
        (Fault("nvmlDeviceGetUUID", abort=True), 20.0, False, "(SIGABRT) (nvmlDeviceGetUUID of GPU 0)"),
    ],
    ids=["hang", "later", "crash"],
)
def test_a_fork_that_hangs_or_crashes_is_told_the_same_way(make_node, fault, seconds, timed_out, word):
    found = forked(make_node(machine(1).with_faults(fault)), seconds)
    assert (found["inventory"], found["code"], found["timedOut"]) == (None, None, timed_out)
    assert word in found["message"]


def test_a_fork_has_nothing_open_that_somebody_else_waits_for(tmp_path):
    script = """
import json, os, sys
from gpunode.gpu.child import run_module
from gpunode.host import Host
sys.path.insert(0, sys.argv[1])
kept = os.memfd_create("kept", 0)
done = run_module(Host(environ=dict(os.environ)), "told", "word", timeout=20)
print(json.dumps([json.loads(done.stdout), done.stderr.splitlines(), done.code, os.getsid(0)]))
"""
    (tmp_path / "told.py").write_text(
        "import json, os, signal, sys\n"
        "def main():\n"
        "    os.write(1, b'chatter\\n')\n"
        "    os.write(2, b'trouble\\n')\n"
        "    numbers = [n for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fdinfo/{n}')]\n"
        "    links = [os.readlink(f'/proc/self/fd/{n}') for n in numbers]\n"
        "    print(json.dumps([sys.argv[1:], sorted(links), os.getsid(0), sys.stdin.read()]))\n"
    )
    (words, links, session, read), errors, code, ours = run_python(script, {}, str(tmp_path))
    assert (words, read, code, errors) == (["word"], "", 0, ["chatter", "trouble"])
    assert session != ours
    assert [link.split(":")[0] for link in links] == ["/dev/null", *["/memfd"] * 2, "pipe"]


BEGUN = """
import json, os, subprocess, sys
from gpunode.gpu import child
from gpunode.gpu.probe import probe
from gpunode.host import Host
host = Host(environ=dict(os.environ))
child.begin("gpunode.gpu.probe")
pid = child._begun["gpunode.gpu.probe"].child.pid
{then}
child.end_begun()
try:
    os.kill(pid, 0)
    left = True
except ProcessLookupError:
    left = False
print(json.dumps([left, sys.argv[1:], len(os.listdir("/proc/self/fd"))]))
"""


def test_a_child_that_was_begun_has_the_answer_or_is_ended(make_node):
    node = make_node(machine(2))
    asked = "answer = probe(host); assert len(answer.inventory.gpus) == 2 and not child._begun"
    other = "answer = probe(host, topology=True); assert len(answer.topology.pairs) == 1"
    for then in (asked, other, ""):
        assert run_python(BEGUN.format(then=then), node.env) == [False, [], 4]  # three, and the list of them


def test_where_no_process_is_to_be_had_that_is_told(make_node):
    script = """
import errno, json, os
from gpunode.gpu import child
from gpunode.gpu.probe import probe
from gpunode.host import Host
def fork():
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
os.fork = fork
before = len(os.listdir("/proc/self/fd"))
child.begin("gpunode.gpu.probe")
answer = probe(Host(environ=dict(os.environ)))
print(json.dumps([child._begun, answer.message, len(os.listdir("/proc/self/fd")) - before]))
"""
    begun, message, left = run_python(script, make_node(machine(1)).env)
    assert (begun, left) == ({}, 0)
    assert "Resource temporarily unavailable" in message


def test_one_that_hangs_is_ended(make_node):
    node = make_node(machine(1).with_faults(Fault("nvmlInitWithFlags", hang=60.0)))
    then = "import time; time.sleep(0.5)"  # it is in NVML by then, or on the way
    assert run_python(BEGUN.format(then=then), node.env) == [False, [], 4]


@pytest.mark.parametrize("faults", [(), (Fault("nvmlInitWithFlags", hang=60.0),)], ids=["answers", "hangs"])
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.2])
def test_nobody_s_child_ends_by_itself(make_node, faults, seconds):
    """Whenever who asked is gone: before the child has started, while it loads, in NVML."""
    then = f"import time; time.sleep({seconds}); os.write(1, b'%d' % pid); os._exit(0)"
    pid = run_python(BEGUN.format(then=then), make_node(machine(1).with_faults(*faults)).env)
    assert eventually(lambda: has_ended(pid))


@pytest.mark.parametrize(
    "spoilt",
    [
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "environ['LD_LIBRARY_PATH'] = '/elsewhere'",
        "os.environ['LD_LIBRARY_PATH'] = environ['LD_LIBRARY_PATH'] = '/since'",
        "environ['ANY'] = 'other'",
    ],
)
def test_no_fork_where_it_would_be_another_thing_than_a_new_process(spoilt):
    script = f"""
import json, os, threading, time
from gpunode.host import Host
environ = dict(os.environ)
{spoilt}
print(json.dumps(Host(environ=environ).forkable()))
"""
    assert run_python(script, {}) is False


def recorded(tmp_path, nvml):
    (tmp_path / RECORDING).parent.mkdir()
    (tmp_path / RECORDING).write_text(json.dumps({} if nvml is None else {"nvml": nvml}))
    return Host(root=tmp_path)


def test_a_recorded_inventory_is_the_answer(make_node, tmp_path):
    node = make_node(with_mig(machine(2), 1, mixed_layout(1)))
    live = probe(host_of(node)).inventory
    assert isinstance(live, Inventory)
    assert probe(recorded(tmp_path, {"inventory": plain(live)})).inventory == live


def test_a_recorded_error_is_the_answer(tmp_path):
    answer = probe(recorded(tmp_path, {"error": {"code": 18, "message": "mismatch"}}))
    assert (answer.inventory, answer.code, answer.message) == (None, 18, "mismatch")


def test_a_recorded_timeout_is_the_answer(tmp_path):
    assert probe(recorded(tmp_path, {"timeout": True})).timed_out


def test_a_machine_without_recorded_nvml_is_not_asked_live(tmp_path):
    answer = probe(recorded(tmp_path, None))
    assert (answer.inventory, answer.code) == (None, None)
    assert "recorded" in answer.message


@pytest.mark.parametrize(
    "nvml", [{"inventory": []}, {"error": 3}, {"error": {}}, {"inventory": {"gpus": [1]}}]
)
def test_a_malformed_recording_is_an_error_that_names_it(tmp_path, nvml):
    with pytest.raises(ConfigError, match=r"recording\.json"):
        probe(recorded(tmp_path, nvml))
