"""The NVML probe: real children, the real pynvml, stub libraries that respond, refuse, hang and crash."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.scenario import Fault, StubMig, gpu_uuid, machine, mig_uuid, mixed_layout, with_mig
from gpunode.errors import ConfigError
from gpunode.gpu.model import Inventory
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.host.recording import RECORDING
from gpunode.output.typed import plain
from tests.gpu.children import run_python
from tests.gpu_node import host_of
from tests.waiting import eventually, has_ended


@pytest.mark.parametrize("count", [0, 1, 8, 16])
def test_every_gpu_is_listed_with_its_nvml_values(make_node, count):
    answer = probe(host_of(make_node(machine(count))))
    assert answer.inventory is not None, answer.message
    gpus = answer.inventory.gpus
    assert [gpu.index for gpu in gpus] == list(range(count))
    assert [gpu.uuid for gpu in gpus] == [gpu_uuid(i) for i in range(count)]
    assert len({gpu.pci for gpu in gpus}) == count
    assert all(gpu.error == "" and gpu.compute_capability == "9.0" for gpu in gpus)
    assert answer.inventory.cuda_version == "12.2"
    assert answer.inventory.driver_version == "535.104.05"


def test_pci_address_is_formatted_as_in_sysfs(make_node):
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


def test_lost_gpu_is_listed_with_its_error_and_does_not_hide_the_others(make_node):
    answer = probe(host_of(make_node(machine(8).with_gpu(3, lost=True))))
    assert answer.inventory is not None, answer.message
    broken = [gpu for gpu in answer.inventory.gpus if gpu.error]
    assert [gpu.index for gpu in broken] == [3]
    assert "lost" in broken[0].error
    assert "15" in broken[0].error
    assert sum(bool(gpu.uuid) for gpu in answer.inventory.gpus) == 7


def test_gpu_that_fails_half_way_keeps_the_values_read(make_node):
    scenario = machine(2).with_faults(Fault("nvmlDeviceGetMinorNumber", 999, gpu_uuid(1)))
    answer = probe(host_of(make_node(scenario)))
    assert answer.inventory is not None
    gpu = answer.inventory.gpus[1]
    assert (gpu.uuid, gpu.name, gpu.minor) == (gpu_uuid(1), "NVIDIA H100 80GB HBM3", None)
    assert "999" in gpu.error


def test_unsupported_query_is_not_an_error(make_node):
    scenario = machine(1).with_faults(Fault("nvmlDeviceGetMemoryInfo", 3))
    answer = probe(host_of(make_node(scenario)))
    assert answer.inventory is not None
    assert (answer.inventory.gpus[0].error, answer.inventory.gpus[0].memory_bytes) == ("", 0)


@pytest.mark.parametrize("code", [9, 18, 999])
def test_nvml_error_code_is_passed_on(make_node, code):
    answer = probe(host_of(make_node(machine(1).with_faults(Fault("nvmlInitWithFlags", code)))))
    assert (answer.inventory, answer.code, answer.timed_out) == (None, code, False)
    assert answer.message


def test_missing_library_has_error_code_12(make_node):
    answer = probe(host_of(make_node(machine(1), "cuda")))
    assert (answer.inventory, answer.code) == (None, 12)
    assert "libnvidia-ml.so.1" in answer.message


def test_hang_times_out_after_the_configured_seconds(make_node):
    node = make_node(machine(1).with_faults(Fault("nvmlInitWithFlags", hang=60)))
    answer = probe(host_of(node), timeout=1.0)
    assert (answer.inventory, answer.code, answer.timed_out) == (None, None, True)
    assert 1.0 <= answer.seconds < 30
    assert "1 s" in answer.message


def test_crash_names_the_signal(make_node):
    answer = probe(host_of(make_node(machine(1).with_faults(Fault("nvmlDeviceGetUUID", abort=True)))))
    assert (answer.inventory, answer.code, answer.timed_out) == (None, None, False)
    assert answer.message.endswith("(SIGABRT) (nvmlDeviceGetUUID of GPU 0)")


@pytest.mark.parametrize("junk", ["print('junk')", "print('[]')", "print('{\"inventory\": 3}')"])
def test_invalid_output_of_the_child_is_reported(tmp_path, junk):
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\n{junk}\nsys.stdout.flush()\nsys.stderr.write('odd\\n')\nos._exit(0)\n"
    )
    answer = probe(Host(environ={**os.environ, "PYTHONPATH": str(tmp_path)}))
    assert (answer.inventory, answer.code, answer.timed_out) == (None, None, False)
    assert "an invalid answer" in answer.message


@pytest.mark.full
@pytest.mark.parametrize("condition", [False, True])
@pytest.mark.parametrize(
    ("fault", "seconds", "timed_out", "words"),
    [
        (Fault("nvmlInitWithFlags", hang=60), 4.0, True, "4 s (nvmlInit)"),
        (Fault("nvmlDeviceGetUUID", hang=60), 4.0, True, "4 s (nvmlDeviceGetUUID of GPU 0)"),
        (Fault("nvmlDeviceGetUUID", abort=True), 20.0, False, "(SIGABRT) (nvmlDeviceGetUUID of GPU 0)"),
    ],
    ids=["hang", "later", "crash"],
)
def test_hang_or_crash_names_the_query_and_leaves_no_child(
    make_node, fault, seconds, timed_out, words, condition
):
    script = """
import json, os, sys
from gpunode.gpu.probe import probe
from gpunode.host import Host
from gpunode.output.typed import plain
said = []
host = Host(environ=dict(os.environ), trace=said.append)
answer = probe(host, timeout=float(sys.argv[1]), condition=sys.argv[2] == "True")
assert len(said) == 1
try:
    os.waitpid(-1, os.WNOHANG)
    left = True
except ChildProcessError:
    left = False
print(json.dumps({**plain(answer), "left": left}))
"""
    env = make_node(machine(1).with_faults(fault)).env
    answer = run_python(script, env, str(seconds), str(condition))
    assert answer["left"] is False
    assert (answer["inventory"], answer["code"], answer["timedOut"]) == (None, None, timed_out)
    assert words in answer["message"]


def test_process_that_cannot_start_is_reported(make_node, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("subprocess.Popen", refuse)
    answer = probe(host_of(make_node(machine(1))))
    assert answer.inventory is None
    assert "Resource temporarily unavailable" in answer.message


def test_child_in_a_hanging_nvml_ends_with_its_parent(make_node):
    node = make_node(machine(1).with_faults(Fault("nvmlInitWithFlags", hang=60.0)))
    script = "from gpunode.gpu.probe import probe; from gpunode.host import Host; probe(Host(), timeout=60.0)"
    with subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **node.env}) as parent:
        assert eventually(lambda: any(map(in_nvml, children(parent.pid))))
        (child,) = children(parent.pid)
        parent.kill()
    assert eventually(lambda: has_ended(child))


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def in_nvml(pid):
    return "libnvidia-ml" in Path(f"/proc/{pid}/maps").read_text()


def test_output_printed_by_a_library_is_not_in_the_result(make_node):
    script = """
import os, sys
from gpunode.gpu import nvml_health
read = nvml_health.discover
nvml_health.discover = lambda nvml: os.write(1, b"noise") and read(nvml)
sys.exit(nvml_health.main())
"""
    assert len(run_python(script, make_node(machine(2)).env)["inventory"]["gpus"]) == 2


def recorded(tmp_path, nvml):
    (tmp_path / RECORDING).parent.mkdir()
    (tmp_path / RECORDING).write_text(json.dumps({} if nvml is None else {"nvml": nvml}))
    return Host(root=tmp_path)


def test_recorded_inventory_is_returned(make_node, tmp_path):
    node = make_node(with_mig(machine(2), 1, mixed_layout(1)))
    live = probe(host_of(node)).inventory
    assert isinstance(live, Inventory)
    assert probe(recorded(tmp_path, {"inventory": plain(live)})).inventory == live


def test_recorded_error_is_returned(tmp_path):
    answer = probe(recorded(tmp_path, {"error": {"code": 18, "message": "mismatch"}}))
    assert (answer.inventory, answer.code, answer.message) == (None, 18, "mismatch")


def test_recorded_timeout_is_returned(tmp_path):
    assert probe(recorded(tmp_path, {"timeout": True})).timed_out


def test_machine_without_recorded_nvml_is_not_queried_live(tmp_path):
    answer = probe(recorded(tmp_path, None))
    assert (answer.inventory, answer.code) == (None, None)
    assert "recorded" in answer.message


@pytest.mark.parametrize(
    "nvml", [{"inventory": []}, {"error": 3}, {"error": {}}, {"inventory": {"gpus": [1]}}]
)
def test_malformed_recording_is_an_error_with_its_name(tmp_path, nvml):
    with pytest.raises(ConfigError, match=r"recording\.json"):
        probe(recorded(tmp_path, nvml))
